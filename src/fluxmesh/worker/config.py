"""What a worker is told at its beginning, and the word for how it came to its end."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from fluxmesh.job import TIERS
from fluxmesh.submission import DEFAULT_QUEUE

if TYPE_CHECKING:
    from fluxmesh.mesh.options import MeshWorker


class WorkerEnd(StrEnum):
    """How a worker came to its end."""

    STOPPED = "stopped"
    HURRIED = "hurried"  # told twice
    RETIRED = "retired"  # a body could not be stopped: the process should be replaced
    FENCED = "fenced"  # a newer run of the same worker id exists, or this one was declared dead


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """What one worker does. `reserve[tier]` slots are kept for jobs of that tier. `mesh` None: it is in none;
    `mesh_optional`: if its mesh cannot be had, it runs without."""

    worker_id: str
    queues: tuple[str, ...] = (DEFAULT_QUEUE,)
    tiers: tuple[int, ...] = TIERS
    concurrency: int
    reserve: dict[int, int] = {}
    grace_s: float
    on_lease_lost: Literal["continue", "cancel"] = "continue"
    mesh: MeshWorker | None = None
    mesh_optional: bool = False
