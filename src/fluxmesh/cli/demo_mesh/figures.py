"""What the demo shows and sums up: values made of what regions told and of what storage holds. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from fluxmesh.cli.demo_mesh.atlas import REGIONS, others
from fluxmesh.cli.demo_mesh.telling import Telling
from fluxmesh.job import Attempt, Job, Outcome, Status

RATE_OVER_S: Final = 3.0


class RegionLook(Struct, frozen=True, kw_only=True):
    """A region at one instant. `standing`: what the others think of it, by how many. The counts are of all
    its runs; `left`: jobs that others took from it."""

    region: str
    pid: int
    alive: bool
    standing: str
    running: int
    held: int
    done: int
    own: int
    took: int
    took_by_storage: int
    left: int


class Look(Struct, frozen=True, kw_only=True):
    """Everything at one instant. `round_trips_ms`: as measured by the first of the pair."""

    elapsed_s: float
    regions: tuple[RegionLook, ...]
    round_trips_ms: Mapping[tuple[str, str], float]
    submitted: int
    done: int
    waiting: int
    left: int
    done_per_s: float


class Line(Struct, frozen=True, kw_only=True):
    """A region in the summary. `own`: starts of jobs whose keys are its own."""

    region: str
    completed: int
    own: int
    others: int
    stolen_in: int
    stolen_out: int
    taken_held: int
    runs: int


class Theft(Struct, frozen=True, kw_only=True):
    """How many jobs one region took from another over the mesh, as it logged it."""

    thief: str
    victim: str
    jobs: int


class Summary(Struct, frozen=True, kw_only=True):
    """How it went. `lost`: jobs that storage does not have any more, or that ended and did not complete;
    `unfinished`: those that were left when it was ended by a key, or took too long. `doubled`: jobs that
    completed twice, or whose bodies overlapped or came to their end twice though nobody was killed in
    between. `ran_again`: jobs that a kill interrupted, or took the report of, and that were started once
    more: each is promised to start at least once. `steals_…` are requests over the mesh, `jobs_stolen_in`
    what they brought; `jobs_taken_held` came through storage alone. `starts_counted`: those of which it is
    known whether they were at the owner of the key. They may be fewer than jobs: a region that is killed
    takes its last counts with it, and counts none until it has met the others again."""

    jobs: int
    completed: int
    lost: int
    unfinished: int
    doubled: int
    ran_again: int
    kills: int
    seconds: float
    jobs_per_s: float
    steals_initiated: int
    steals_succeeded: int
    jobs_stolen_in: int
    jobs_stolen_out: int
    jobs_taken_held: int
    affinity_hits: int
    affinity_misses: int
    starts_counted: int
    regions: tuple[Line, ...]
    thefts: tuple[Theft, ...]

    ended_by_key: bool

    @property
    def well(self) -> bool:
        return not self.lost and not self.doubled and (self.ended_by_key or not self.unfinished)


class Rate:
    """Jobs a second over the last seconds."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def note(self, now_s: float, done: int) -> float:
        self._seen.append((now_s, done))
        while len(self._seen) > 1 and self._seen[0][0] < now_s - RATE_OVER_S:
            del self._seen[0]
        began_s, before = self._seen[0]
        took_s = now_s - began_s
        return (done - before) / took_s if took_s > 0 else 0.0


def standing_of(region: str, tellings: Mapping[str, Telling | None]) -> str:
    """ "alive", or by how many each state is seen: "dead 3, suspect 1"; empty if nobody has told yet."""
    seen = Counter(
        one.standing
        for observer in others(region)
        if (told := tellings.get(observer)) is not None
        for one in told.seen
        if one.region == region
    )
    if len(seen) == 1:
        return next(iter(seen))
    return ", ".join(f"{state} {count}" for state, count in seen.most_common())


def round_trips(tellings: Mapping[str, Telling | None]) -> dict[tuple[str, str], float]:
    return {
        (observer, one.region): one.rtt_ms
        for observer, told in tellings.items()
        if told is not None
        for one in told.seen
        if one.rtt_ms is not None and one.region in REGIONS
    }


def counted(runs: Iterable[Telling | None]) -> Counter[str]:
    """The counters of all runs together."""
    total: Counter[str] = Counter()
    for told in runs:
        if told is not None:
            total.update(told.counters)
    return total


# -- what storage says ------------------------------------------------------------------------------------


def lost_of(submitted: Sequence[str], jobs: Mapping[str, Job]) -> list[str]:
    return [one for one in submitted if one not in jobs or is_lost(jobs[one])]


def is_lost(job: Job) -> bool:
    return job.ended and job.status is not Status.COMPLETED


def has_doubled(history: Sequence[Attempt]) -> bool:
    """Whether a job completed twice, or was started before its last start was over."""
    if sum(attempt.outcome is Outcome.COMPLETED for attempt in history) > 1:
        return True
    over_s = float("-inf")
    for attempt in history:
        if attempt.started_at is None:
            continue
        if attempt.started_at < over_s:
            return True
        over_s = attempt.ended_at
    return False


def ended_twice(runs: Iterable[tuple[bool, Sequence[str]]]) -> set[str]:
    """Jobs whose bodies came to their end in two runs of workers of which neither was killed: whether a run
    was, and what it ended."""
    ends: Counter[str] = Counter()
    for killed, jobs in runs:
        if not killed:
            ends.update(jobs)
    return {job for job, count in ends.items() if count > 1}
