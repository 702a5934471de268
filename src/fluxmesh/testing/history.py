"""The history checker: did a storage and its workers keep their promises, whatever happened to them?

Pure. It holds what bodies wrote of themselves against what the storage tells of the same jobs, what producers
were told and what was done to the processes. Every `Violation` comes with its evidence; no violation is the
verdict that a run under faults needs.

    from fluxmesh.testing.history import History, judge
    verdict = judge(History(effects=..., stories=..., told=...))
    assert not verdict.violations

All instants named `at_ns` are of one monotonic clock of the machine on which everything ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct

from fluxmesh.job import Attempt, Job, Status
from fluxmesh.storage.values import Cancelled

RETURNED: Final = "returned"  # how a body ended that raised nothing
DIES: Final = "dies"  # written by a body that kills its own process


class What(StrEnum):
    START = "start"
    END = "end"


class Effect(Struct, frozen=True):
    """One line of a body, appended in one write: it has begun, or it has ended. `how` of an end: RETURNED,
    DIES, or the name of what it raised."""

    what: What
    at_ns: int
    job: str
    task: str
    token: int
    attempt: int
    life: int
    pid: int
    worker: str
    how: str = ""


class Answer(StrEnum):
    """What a producer was told of a submission."""

    ACCEPTED = "accepted"
    UNKNOWN = "unknown"  # the outcome is not known
    REFUSED = "refused"  # nothing was stored


class Told(Struct, frozen=True):
    """The last word about one id. `expected`: how a job of its kind ends, if its processes do not die under
    it too often."""

    id: str
    answer: Answer
    at_ns: int
    expected: tuple[Status, ...] = (Status.COMPLETED,)


class CancelTold(Struct, frozen=True):
    """What was answered to a cancel."""

    id: str
    answer: Cancelled
    at_ns: int


class Sighting(Struct, frozen=True):
    """A job seen ended while the run went on."""

    id: str
    life: int
    status: Status
    token: int
    at_ns: int


class Ownership(Struct, frozen=True):
    """The storage gave this job to this worker, under this token."""

    id: str
    token: int
    worker: str


class Happening(StrEnum):
    """What became of a process."""

    KILLED = "killed"  # it was sent SIGKILL
    GONE = "gone"  # it has ended; at that instant it was seen alive for the last time
    STOPPED = "stopped"
    CONTINUED = "continued"


class ProcessEvent(Struct, frozen=True):
    """Something happened to a worker's process."""

    at_ns: int
    what: Happening
    pid: int
    worker: str = ""


class Story(Struct, frozen=True):
    """What the storage tells of one job."""

    record: Job
    history: Sequence[Attempt] = ()


class History(Struct, frozen=True, kw_only=True):
    """Everything that is known of a run.

    `lease_s`, `beat_s`: of all its workers. `storage_us`: what to add to microseconds of the monotonic clock
    to get the storage's time; None: its clock was stepped, so that its stamps say nothing about order.
    `max_concurrent`: limits of tasks. `losses`: when a primary was lost whose last writes its replica may
    lack. `told_counts` and `walked_counts`: jobs by status as the counters tell and as they were counted one
    by one. `leftovers`: what the end of the run found that should not be there, in words. `pruned`: ids of
    jobs that were removed on purpose. `timeout_s`: of a job whose submission says none. `untold_most`: how
    many jobs may be there of which no producer could tell, as those of a batch whose outcome is unknown;
    None: not known. `unheeding_s`: how long a body may go on, at the most, after it was told to stop.
    `owners`: whom the storage has given jobs to, as far as somebody looked.
    """

    effects: Sequence[Effect]
    stories: Sequence[Story]
    told: Sequence[Told] = ()
    cancels: Sequence[CancelTold] = ()
    sightings: Sequence[Sighting] = ()
    processes: Sequence[ProcessEvent] = ()
    lease_s: float = 6.0
    beat_s: float = 2.0
    storage_us: int | None = None
    max_concurrent: Mapping[str, int] = {}
    losses: Sequence[int] = ()
    told_counts: Mapping[Status, int] = {}
    walked_counts: Mapping[Status, int] = {}
    leftovers: Sequence[str] = ()
    pruned: frozenset[str] = frozenset()
    max_retries: int = 3
    max_crashes: int = 3
    timeout_s: float = 300.0
    untold_most: int | None = None
    unheeding_s: float = 10.0
    owners: Sequence[Ownership] = ()


class Violation(Struct, frozen=True):
    """A promise that was not kept. `rule` is its short name, `job` an id or empty."""

    rule: str
    job: str
    what: str
    evidence: tuple[str, ...] = ()

    def __str__(self) -> str:
        of = f" of job {self.job}" if self.job else ""
        return "\n    ".join([f"{self.rule}{of}: {self.what}", *self.evidence])


class Verdict(Struct, frozen=True):
    """`excused`: overlaps with a run whose owner was frozen for longer than its lease. `rolled_back`: jobs
    whose last steps may have been lost with a primary. `reruns`: starts beyond the first of a job."""

    violations: tuple[Violation, ...]
    starts: int = 0
    reruns: int = 0
    excused: int = 0
    rolled_back: int = 0


def judge(history: History) -> Verdict:
    """Hold everything against everything else. Total: odd input is a violation, not an error."""
    from fluxmesh.testing.history_overlaps import Overlaps
    from fluxmesh.testing.history_rules import RULES
    from fluxmesh.testing.history_runs import Index

    index = Index(history)
    overlaps = Overlaps(index)
    found = [*overlaps.violations()]
    for rule in RULES:
        found += rule(index)
    starts = len(index.runs)
    return Verdict(
        tuple(found),
        starts=starts,
        reruns=starts - len(index.runs_of),
        excused=overlaps.excused,
        rolled_back=len(index.touched),
    )
