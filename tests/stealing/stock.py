"""A worker whose buffer is full of work, which is what others steal from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fluxmesh.handle import JobHandle
from fluxmesh.job import Status
from tests.cases.harness import Lab, wait_until
from tests.cases.workers import WorkerGroup

WARM: Final = 500
WARM_S: Final = 0.0  # jobs of a millisecond take two on a machine that runs other tests beside them
FILLS_S: Final = 10.0
WARMS_S: Final = 60.0


def warm(lab: Lab, jobs: int = WARM, seconds: float = WARM_S) -> Sequence[JobHandle[Any]]:
    """Short jobs, until all are done: those who ran them expect more of the kind, and fill their buffers."""
    before = len(lab.marks.ends(note="warm"))
    handles = lab.submit_many("brief", [(seconds, "warm")] * jobs)
    wait_until(lambda: len(lab.marks.ends(note="warm")) == before + jobs, WARMS_S, f"{jobs} short jobs")
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
