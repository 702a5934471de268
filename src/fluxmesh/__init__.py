"""FluxMesh: background jobs for Python services. The public names; each is loaded when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fluxmesh.context import Context
    from fluxmesh.errors import (
        AppImportFailed,
        DuplicateTask,
        FluxMeshError,
        IdempotencyConflict,
        InvalidOption,
        InvalidPayload,
        JobCancelled,
        JobConflict,
        JobExpired,
        JobFailed,
        JobNotFound,
        JobUnsuccessful,
        NotInMesh,
        OutcomeUnknown,
        PayloadTooLarge,
        QueueFull,
        ResourceFailed,
        StorageDamaged,
        StorageError,
        StorageLoginRefused,
        StorageMissing,
        StorageRefused,
        StorageUnreachable,
        UsageError,
        WaitTimeout,
        WorkerFenced,
        WorkerRetired,
        WouldDeadlock,
    )
    from fluxmesh.handle import JobHandle
    from fluxmesh.job import Job, Priority, Status
    from fluxmesh.mesh.options import MeshWorker
    from fluxmesh.outcome import DeadLetter, JobInterrupted, JobTimeout, RetryAfter, Snooze
    from fluxmesh.queue import Queue

__all__ = [
    "AppImportFailed",
    "Context",
    "DeadLetter",
    "DuplicateTask",
    "FluxMeshError",
    "IdempotencyConflict",
    "InvalidOption",
    "InvalidPayload",
    "Job",
    "JobCancelled",
    "JobConflict",
    "JobExpired",
    "JobFailed",
    "JobHandle",
    "JobInterrupted",
    "JobNotFound",
    "JobTimeout",
    "JobUnsuccessful",
    "MeshWorker",
    "NotInMesh",
    "OutcomeUnknown",
    "PayloadTooLarge",
    "Priority",
    "Queue",
    "QueueFull",
    "ResourceFailed",
    "RetryAfter",
    "Snooze",
    "Status",
    "StorageDamaged",
    "StorageError",
    "StorageLoginRefused",
    "StorageMissing",
    "StorageRefused",
    "StorageUnreachable",
    "UsageError",
    "WaitTimeout",
    "WorkerFenced",
    "WorkerRetired",
    "WouldDeadlock",
]

_HOMES = {
    "Context": "context",
    "DeadLetter": "outcome",
    "Job": "job",
    "JobHandle": "handle",
    "JobInterrupted": "outcome",
    "JobTimeout": "outcome",
    "MeshWorker": "mesh.options",
    "Priority": "job",
    "Queue": "queue",
    "RetryAfter": "outcome",
    "Snooze": "outcome",
    "Status": "job",
}


def __getattr__(name: str) -> Any:
    """PEP 562: `import fluxmesh` loads nothing but this file."""
    if name not in __all__:
        raise AttributeError(f"module 'fluxmesh' has no attribute {name!r}")
    module = importlib.import_module(f"fluxmesh.{_HOMES.get(name, 'errors')}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
