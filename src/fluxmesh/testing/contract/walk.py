"""What counts and queue_stats should say, found by walking over every job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from fluxmesh.job import Job, Status

QUEUED = (Status.PENDING, Status.CLAIMED)
FAILED_REASONS = ("error", "timeout")


def walked_counts(jobs: Iterable[Job]) -> tuple[dict[Status, int], dict[tuple[str, int], int], int]:
    """(by status, queued by (queue, tier), failed), zeros left out."""
    by_status: Counter[Status] = Counter()
    queued: Counter[tuple[str, int]] = Counter()
    failed = 0
    for job in jobs:
        by_status[job.status] += 1
        if job.status in QUEUED:
            queued[job.queue, job.priority] += 1
        failed += job.status is Status.DEAD_LETTER and job.reason in FAILED_REASONS
    return dict(by_status), dict(queued), failed


def walked_queues(
    jobs: Iterable[Job], paused: Collection[str] = ()
) -> dict[str, tuple[tuple[int, ...], int, int, int | None]]:
    """(queued by tier, scheduled, running, parked) of every queue with a job that has not ended.

    In a paused queue every job waits for something, parked or not: its parked are None.
    """
    queues: dict[str, tuple[list[int], Counter[str]]] = {}
    for job in jobs:
        if job.ended:
            continue
        queued, other = queues.setdefault(job.queue, ([0, 0, 0, 0], Counter()))
        if job.status in QUEUED:
            queued[job.priority] += 1
            other["parked"] += job.waiting_for is not None
        else:
            other[job.status] += 1
    return {
        queue: (
            tuple(queued),
            other[Status.SCHEDULED],
            other[Status.RUNNING],
            None if queue in paused else other["parked"],
        )
        for queue, (queued, other) in queues.items()
    }
