"""A worker whose buffer is full of work, which is what others steal from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fluxmesh.handle import JobHandle
from fluxmesh.job import Status
from tests.cases.harness import Lab, wait_until
from tests.cases.workers import WorkerGroup

WARM: Final = 500
WARM_S: Final = 0.001
FILLS_S: Final = 10.0
WARMS_S: Final = 60.0


def warm(lab: Lab, jobs: int = WARM) -> Sequence[JobHandle[Any]]:
    """Jobs of a millisecond, until all are done: those who ran them expect more of the kind."""
    handles = lab.submit_many("brief", [(WARM_S, "warm")] * jobs)
    wait_until(lambda: len(lab.marks.ends(note="warm")) == jobs, WARMS_S, f"{jobs} jobs of a millisecond")
    return handles


def is_empty(lab: Lab) -> bool:
    """Nothing is ready: what is not running is held."""
    return not lab.queue.counts().by_status.get(Status.PENDING, 0)


def fill(lab: Lab, jobs: int, seconds: float, note: str = "work", **options: Any) -> Sequence[JobHandle[Any]]:
    """So many jobs of the same task, that last longer, until no one is in the queue any more."""
    handles = lab.submit_many("brief", [(seconds, note)] * jobs, **options)
    wait_until(lambda: is_empty(lab), FILLS_S, "the queue is empty")
    return handles


def held_by(lab: Lab, group: WorkerGroup) -> int:
    return sum(row.held for row in lab.queue.list_workers() if row.worker_id == group.worker_id)
