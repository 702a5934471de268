"""What doors show of jobs, attempts, queues and dead letters: plain objects, the contract's field names."""

from __future__ import annotations

from typing import Any

from fluxmesh.job import TIER_NAMES, Attempt, Job, JobError
from fluxmesh.storage.values import DeadGroup, QueueStats


def error_document(error: JobError | None) -> dict[str, Any] | None:
    """The contract's error object. (In storage an error is an array.)"""
    if error is None:
        return None
    return {name: getattr(error, name) for name in JobError.__struct_fields__}


def _fields(record: Job | Attempt | DeadGroup | QueueStats) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def job_document(job: Job) -> dict[str, Any]:
    """All job fields of the contract."""
    return _fields(job) | {"error": error_document(job.error)}


def attempt_document(attempt: Attempt) -> dict[str, Any]:
    return _fields(attempt) | {"error": error_document(attempt.error)}


def group_document(group: DeadGroup) -> dict[str, Any]:
    return _fields(group) | {"error": error_document(group.error)}


def queue_document(queue: QueueStats) -> dict[str, Any]:
    """`queued` by the names of the tiers."""
    return _fields(queue) | {"queued": dict(zip(TIER_NAMES, queue.queued, strict=True))}
