"""Jobs as another process read them back, and what must be true of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from benchmarks.figures import CheckFailed
from fluxmesh.job import Outcome, Status


class Seen(Struct, frozen=True, array_like=True, gc=False):
    """One job: its record and its history as far as they matter. Times are storage stamps in seconds."""

    id: str
    task: str
    number: Any  # its first argument, by which jobs of a run are told apart
    result: Any
    priority: int
    status: Status
    created_at: float
    scheduled_at: float | None
    started_at: float | None
    completed_at: float | None
    worker_id: str | None
    outcomes: tuple[Outcome, ...]


def check_all_completed(seen: Iterable[Seen], numbers: Iterable[int], *, crashes: int = 0) -> None:
    """Each number has exactly one job, which completed with its number as result, after exactly one start.

    With `crashes`, up to so many crashed starts may precede it. Raises CheckFailed."""
    seen = list(seen)
    wanted, found = Counter(numbers), Counter(job.number for job in seen)
    lost, more = wanted - found, found - wanted
    if lost or more:
        raise CheckFailed(f"{lost.total():,} jobs are lost, {more.total():,} are too many")
    for job in seen:
        if job.status is not Status.COMPLETED:
            raise CheckFailed(f"job {job.id} is {job.status}")
        if type(job.result) is not type(job.number) or job.result != job.number:
            raise CheckFailed(f"job {job.id} has the result {job.result!r} and not {job.number!r}")
        *before, last = job.outcomes or (None,)
        if last is not Outcome.COMPLETED or any(outcome is not Outcome.CRASHED for outcome in before):
            raise CheckFailed(f"job {job.id} has the history {list(job.outcomes)}")
        if len(before) > crashes:
            raise CheckFailed(f"job {job.id} was started {len(job.outcomes)} times")
        if job.started_at is None or job.completed_at is None:
            raise CheckFailed(f"job {job.id} has no stamps")


def span_s(seen: Sequence[Seen]) -> float:
    """From the first claim to the last settle."""
    first = min(job.started_at for job in seen if job.started_at is not None)
    last = max(job.completed_at for job in seen if job.completed_at is not None)
    return last - first


def pick_up_ms(seen: Sequence[Seen]) -> list[float]:
    """From the submission of each job to its start."""
    return [(job.started_at - job.created_at) * 1e3 for job in seen if job.started_at is not None]


def end_to_end_ms(seen: Sequence[Seen]) -> list[float]:
    """From the submission of each job to its stored end."""
    return [(job.completed_at - job.created_at) * 1e3 for job in seen if job.completed_at is not None]


def lateness_ms(seen: Sequence[Seen]) -> list[float]:
    """From the due instant of each job to its start. Raises CheckFailed for one that began before it."""
    late = []
    for job in seen:
        if job.scheduled_at is None or job.started_at is None:
            raise CheckFailed(f"job {job.id} has no due instant")
        late.append((job.started_at - job.scheduled_at) * 1e3)
    if min(late) < 0:
        raise CheckFailed(f"a job began {-min(late):.3f} ms before it was due")
    return late


def inversions(urgent: Sequence[Seen], others: Sequence[Seen]) -> int:
    """Pairs in which another job was started while an urgent one, submitted before that, was not."""
    return sum(
        first.created_at < other.started_at < first.started_at
        for first in urgent
        for other in others
        if first.started_at is not None and other.started_at is not None
    )
