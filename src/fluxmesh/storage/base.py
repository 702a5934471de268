"""The storage port: the only place where jobs live, and the only arbiter of who owns them.

General obligations of every backend
* A verb is one atomic step per item; a batch holds at most BATCH_MAX items (else InvalidOption).
* Time is the storage's: due instants, stamps, leases and tokens are made from it inside the step.
* Every mutating verb may be repeated after an unknown outcome without harm: ids are made by producers,
  exchanges carry request ids, everything else carries tokens. A driver never re-sends by itself.
* Each change of ownership (claim, transfer, take_held, release, reap) gives the job a new token,
  max(previous + 1, storage time in microseconds). A verb with another token than the stored one changes
  nothing. A settle keeps the token, by which its repetition is recognised.
* A job is always in exactly one place. It keeps its arrival sequence through release, reap, park and
  transfer; enqueue, promotion, replay and reprioritise give a new one.
* Verbs raise StorageUnreachable (nothing happened) or OutcomeUnknown (it may have), and nothing else
  but errors of the caller's making. They never block the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, TypeVar

from fluxmesh.config import BATCH_MAX
from fluxmesh.errors import InvalidOption, OutcomeUnknown, StorageUnreachable
from fluxmesh.events import Event
from fluxmesh.job import Attempt, Job
from fluxmesh.query import Page, Query
from fluxmesh.storage.values import (
    BeatAnswer,
    Cancelled,
    ClaimedJob,
    Counts,
    DeadGroup,
    Done,
    Enqueued,
    ExchangeAnswer,
    ExchangeRequest,
    MeshView,
    OrphansAnswer,
    Owned,
    ProgressNote,
    Promoted,
    Pruned,
    QueueStats,
    Reap,
    Registration,
    Retention,
    Settled,
    StorageInfo,
    TakeAnswer,
    Tended,
    WorkerInfo,
    WorkerRef,
    WorkerView,
)
from fluxmesh.submission import NewJob

BATCH_BYTES: Final = 16 << 20  # payloads or results of one call: a server does nothing else meanwhile
WORK_POLL_S: Final = 5.0  # a waiting worker claims this often in any case
REPEATS: Final = 2  # after an answer that was lost; every verb may be repeated without harm
T = TypeVar("T")


def checked_batch(items: Sequence[T]) -> Sequence[T]:
    if len(items) > BATCH_MAX:
        raise InvalidOption("batch", f"{len(items):,} items", hint=f"at most {BATCH_MAX:,} in one call")
    return items


async def asked_again(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer of a verb, asked for again while it is lost. Raises OutcomeUnknown once one was lost, also
    if the storage cannot be reached any more: that nothing was done now does not tell of the first time."""
    lost: OutcomeUnknown | None = None
    for _ in range(1 + REPEATS):
        try:
            return await ask()
        except OutcomeUnknown as error:
            lost = error
        except StorageUnreachable:
            if lost is None:
                raise
            break
    assert lost is not None
    raise lost


class Storage(Protocol):
    """One namespace of one storage, opened by one process for one event loop."""

    # -- producers -------------------------------------------------------------------------------
    async def enqueue(self, jobs: Sequence[NewJob], *, queue_cap: int) -> list[Enqueued]:
        """Store jobs, in order. Per item: created; existing (known id, or a known idempotency key with
        the same payload hash, or a unique key held in that queue); conflict (known idempotency key, other
        hash); full (the queue holds `queue_cap` jobs that have not started). Keys are checked in the same
        step. `queue`, `tier` None are taken from the task's registration, else "default", 2. Wakes
        min(n, waiting) workers that can run them; a delayed job that is due before all others wakes one.
        """
        ...

    async def wait_for(self, job_id: str, timeout_s: float) -> Job | None:
        """The job once it has ended, or as it is when the time is up; None if there is no such job."""
        ...

    # -- workers: the hot path -------------------------------------------------------------------
    async def register(self, registration: Registration) -> int:
        """A new epoch for this worker id, greater than all before it in the namespace. Older epochs of
        the id are fenced from claiming at once; their jobs wait for a ground to reap. The limits and
        defaults of its tasks replace earlier ones of the same names."""
        ...

    async def exchange(self, request: ExchangeRequest) -> ExchangeAnswer:
        """The one round trip of a worker. Order: settle, promote what is due, begin, claim.

        settle: applies transitions of jobs running under this very epoch, fenced or not, by (id, token); if
        the cancel flag stands, every end but COMPLETED becomes CANCELLED. Frees permits and, with a
        terminal state, the unique key. begin: start held jobs; one that is outranked by a ready job of a
        higher tier that this worker could run, or whose queue is paused, or whose task was limited since and
        has no permit left, is released in the same step; so is one if parking cut the look at the higher
        tiers short.
        claim: strict tiers; inside a tier the queues take turns; inside a queue by arrival sequence, ready
        and parked jobs of own tasks alike. Jobs met that this worker may not run (task unknown to it, rate,
        concurrency) are parked, expired ones expired, at most PARK_CAP a call: then `more` is True and
        nothing of a lower tier is given. A limited job is given running only, never held. A claim that
        leaves ready jobs behind wakes one more worker; one that finds nothing marks this one as waiting.
        To a worker with affinity (`WorkerView.affinity`) of weight a the claim gives its own jobs first, of
        the first 1 + AFFINITY_WINDOW * a candidates of a queue and tier, both in arrival order; one that has
        waited for NOBODYS_AFTER_S counts as its own. At a = 1 a job that belongs to another living worker of
        good standing counts for its first STRICT_S as one that this worker may not run: it is neither given
        nor parked, outranks nothing, is not taken by take_held or transfer, and `next_due_s` knows when that
        ends; past more than affinities.OTHERS_MOST of them in one queue and tier nobody looks. (It is the
        weight of the worker that asks which counts: one of a smaller weight, or none, leaves nothing to
        others.) A wake-up goes to a waiting worker to whom the job belongs before others.
        A repeated request_id gets the jobs of the first time again, less those that are no longer its own.
        """
        ...

    async def wait_for_work(self, worker: WorkerRef, timeout_s: float) -> bool:
        """True as soon as there may be work for this worker, False when the time is up. A wake-up that
        came between the last exchange and this call is not missed."""
        ...

    async def wait_for_notice(self, worker: WorkerRef, timeout_s: float) -> bool:
        """True as soon as a beat of this worker may be told something: a cancel of a job that it runs, or a
        command; False when the time is up. Lossy, so nobody may rely on it: every beat tells all that
        stands. What came since the registration and before this call is not missed."""
        ...

    async def release(self, worker: WorkerRef, jobs: Sequence[Owned]) -> list[bool]:
        """Give owned jobs back, to their old places; nothing is charged. False: not owned (any more)."""
        ...

    async def transfer(self, thief: WorkerRef, jobs: Sequence[Owned]) -> list[ClaimedJob]:
        """Make held jobs the thief's (held), by (id, token). Only for a thief of good standing, only jobs
        with fewer than MAX_HOPS transfers. What comes back is its own; the rest is not."""
        ...

    async def take_held(self, worker: WorkerRef, slots: int) -> TakeAnswer:
        """Take jobs held for more than HELD_TAKEABLE_AFTER_S by other owners that donate, which this
        worker can run, best tier and oldest first, given running. Counts as a hop. Takes none while a
        job of a higher tier is ready for it, and none for a worker whose lease has lapsed. One that gets
        as many as it has asked for waits for work no more, and another is woken for what is ready."""
        ...

    async def progress(self, worker: WorkerRef, notes: Sequence[ProgressNote]) -> list[bool]:
        """Store progress, or what the owner's death shall mean, of owned jobs. False: not owned."""
        ...

    # -- liveness --------------------------------------------------------------------------------
    async def beat(self, worker: WorkerRef, owned: Sequence[Owned] | None, view: WorkerView) -> BeatAnswer:
        """Renew the lease of all jobs of this epoch. Puts a missing row back with the same epoch unless a
        newer one of that id exists. A job owned by this epoch for more than 2 beats that is absent from
        two lists running is released. `owned` None (a supervisor's beat) only renews. A `view.mesh` that
        is not None replaces what this epoch told of the mesh; beyond MESH_VIEW_BYTES it is not kept. So
        does a `view.affinity`, within the bounds of affinities.kept; it is gone with the row, and has to be
        told again when the answer's `has_affinity` says so."""
        ...

    async def declare_dead(self, worker: WorkerRef, how: str) -> bool:
        """Record the proof that this epoch's process is gone. False: there is no such row. "left" (a
        clean end) removes the row if it owns nothing."""
        ...

    async def orphans(self, limit: int) -> OrphansAnswer:
        """Jobs of dead owners, on these grounds and no others: lease lapsed while armed; death proven;
        owner row missing, seen once, one lease ago, while armed. Arming: every beat and every call of
        this verb first compares the last such call of the fleet with storage time; if that is more than
        2 beats ago or in the future, nothing lapses for one lease from now, and owner stamps in the
        future are set to now. Backends look for proofs of their own first (a lock the kernel freed)."""
        ...

    async def reap(self, items: Sequence[Reap]) -> list[Settled]:
        """Apply what was decided about orphans, if the token still matches and the owner is still dead by
        one of the grounds. Gives a new token; the cancel flag turns every end into CANCELLED."""
        ...

    async def command(self, worker_id: str, command: str | None) -> bool:
        """Ask all runs of a worker id to go "quiet" (claim no more) or "stop"; None takes it back.
        The next beat hears of it, for which they are noticed. False: no such worker."""
        ...

    # -- housekeeping ----------------------------------------------------------------------------
    async def lead(self, holder: str, ttl_s: float) -> bool:
        """True if `holder` has, gets or renews the housekeeping key. Decides only who bothers."""
        ...

    async def promote(self, limit: int) -> Promoted:
        """Make due jobs ready, oldest first in each tier, and expire what was not started in time."""
        ...

    async def tend(self, holder: str, ttl_s: float, *, promote: int, orphans: int) -> Tended:
        """A round of housekeeping in one call: `lead`; if that is true `promote`; in any case `orphans`."""
        ...

    async def prune(self, retention: Retention, limit: int) -> Pruned:
        """Delete what is over and older than the retention; idempotency keys outlive their jobs until
        idempotency_ttl_s after the end. Also: rows of workers long gone, waits that are over, expired
        keys, empty counters. At most `limit` jobs a call."""
        ...

    # -- operators -------------------------------------------------------------------------------
    async def cancel(self, ids: Sequence[str]) -> list[Cancelled]:
        """Not running: CANCELLED at once. Running: REQUESTED; the flag is stored, and stays until the life
        ends, and the owner is noticed (`wait_for_notice`), each time anew."""
        ...

    async def replay(self, ids: Sequence[str]) -> list[Done]:
        """A new life for ended jobs (not COMPLETED ones): ready now, counters, delay, expiry and progress
        reset; id, token and history kept. Of several at once, one succeeds."""
        ...

    async def discard(self, ids: Sequence[str]) -> list[Done]:
        """Delete ended jobs with their history. Their idempotency keys are forgotten too."""
        ...

    async def reprioritise(self, ids: Sequence[str], tier: int) -> list[Done]:
        """Move jobs that have not ended to another tier, with a new arrival sequence; a held job is
        released; for a running one it counts when it comes back."""
        ...

    async def pause(self, queue: str) -> bool:
        """Claim and begin refuse this queue; its held jobs are released. False: it was paused already."""
        ...

    async def resume(self, queue: str) -> bool: ...

    # -- reads: indexed, capped, paged, off the hot path ---------------------------------------------
    async def get(self, job_id: str) -> Job | None: ...

    async def history(self, job_id: str) -> list[Attempt] | None:
        """Ended starts of all lives, oldest first, at most 50; None: no such job."""
        ...

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 50) -> Page[Job]:
        """Jobs that match, newest first (by state alone: in the order of their ends or due times)."""
        ...

    async def counts(self) -> Counts: ...
    async def queue_stats(self) -> list[QueueStats]: ...
    async def dlq_groups(self, limit: int) -> list[DeadGroup]: ...
    async def fleet(self) -> list[WorkerInfo]: ...
    async def mesh_views(self) -> list[MeshView]:
        """What workers have told of the mesh, by epoch. Gone with the worker's row, its proven death and its
        being fenced by a newer run; a lapsed lease alone leaves it."""
        ...

    async def info(self) -> StorageInfo:
        """What storage this is. Raises StorageRefused if it was set up since so that it cannot keep jobs."""
        ...

    # -- push --------------------------------------------------------------------------------------
    async def publish(self, event: Event) -> int:
        """Send to everybody who listens to its topic now; the number of listeners. Lossy."""
        ...

    def subscribe(self, topics: Sequence[str]) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Events of these topics from the entry of the context on. A slow reader loses the oldest."""
        ...

    async def close(self) -> None:
        """Release everything. Afterwards every verb raises StorageUnreachable."""
        ...
