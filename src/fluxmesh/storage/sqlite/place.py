"""Where a job is: the `place` column, and the status it stands for."""

from __future__ import annotations

from typing import Final

from fluxmesh.job import Status

SCHEDULED: Final = 0
READY: Final = 1
PARKED: Final = 2
HELD: Final = 3
RUNNING: Final = 4
COMPLETED: Final = 5
DEAD_LETTER: Final = 6
CANCELLED: Final = 7
EXPIRED: Final = 8

STATUS: Final = (
    Status.SCHEDULED,
    Status.PENDING,
    Status.PENDING,
    Status.CLAIMED,
    Status.RUNNING,
    Status.COMPLETED,
    Status.DEAD_LETTER,
    Status.CANCELLED,
    Status.EXPIRED,
)
PLACES: Final[dict[Status, tuple[int, ...]]] = {
    status: tuple(place for place, of in enumerate(STATUS) if of is status) for status in Status
}
TERMINAL_PLACE: Final[dict[Status, int]] = {
    Status.COMPLETED: COMPLETED,
    Status.DEAD_LETTER: DEAD_LETTER,
    Status.CANCELLED: CANCELLED,
    Status.EXPIRED: EXPIRED,
}


def ready_lane(tier: int, queue: str) -> str:
    return f"{tier}:{queue}"


def task_lane(tier: int, queue: str, task: str) -> str:
    """The parking set of one task's jobs in one (queue, tier). A queue's name has no colon."""
    return f"{tier}:{queue}:t:{task}"


def key_lane(tier: int, queue: str, key: str) -> str:
    return f"{tier}:{queue}:k:{key}"
