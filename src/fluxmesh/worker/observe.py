"""What a worker tells an observer: typed values, for tests and benchmarks. Without one nothing is made."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from fluxmesh.job import Outcome
from fluxmesh.storage.values import Settled


class JobStarted(Struct, frozen=True, gc=False):
    """The body is about to be entered (async), or was handed to a thread."""

    job_id: str
    task: str
    token: int


class JobEnded(Struct, frozen=True, gc=False):
    """The body has ended; storage does not know yet."""

    job_id: str
    outcome: Outcome


class JobSettled(Struct, frozen=True, gc=False):
    """Storage answered about the end of a job."""

    job_id: str
    verdict: Settled


class Claimed(Struct, frozen=True, gc=False):
    """An exchange is over: how many jobs it was asked for, and how many it gave."""

    asked: int
    got: int


class JobsReleased(Struct, frozen=True, gc=False):
    """Owned jobs that were given back without having been started."""

    job_ids: tuple[str, ...]
    why: str


class BodyUnstoppable(Struct, frozen=True, gc=False):
    """A body went on past its hard timeout, or past the end of its worker."""

    job_id: str


class LoopBlocked(Struct, frozen=True, gc=False):
    """The loop has not turned for more than a second."""

    job_id: str


class LeaseLapsed(Struct, frozen=True, gc=False):
    """No beat was good for so long that the lease may lapse: nothing is claimed or begun until one is."""


WorkerEvent = (
    JobStarted | JobEnded | JobSettled | Claimed | JobsReleased | BodyUnstoppable | LoopBlocked | LeaseLapsed
)
Observer = Callable[[WorkerEvent], None]
