"""What a worker in the mesh holds: jobs that are claimed and not started, with all that it takes to run them.

The fetcher puts jobs in and begins them; storage alone says whether a begin was won. The node offers them to
others. `Stock` knows neither of the two. Everything here may be called on any thread: what changes takes a
lock for some microseconds, what only looks copies in one step and judges the copy.

A job leaves the stock in one of four ways: its begin was answered, it was given back, somebody else has it,
or it was popped. While its begin is under way it is still named in every beat.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import xxhash
from msgspec import Struct

from fluxmesh.clock import Clock
from fluxmesh.mesh.buffer import Buffer, Held, RunTimes, extra_of_claim, offered, pays, wanted, worth_asking
from fluxmesh.mesh.messages import Offer, Offered
from fluxmesh.storage.values import ClaimedJob, Owned

if TYPE_CHECKING:
    from fluxmesh.mesh.messages import NodeRef, Steal

HELD_MOST_S: Final = 5.0  # then a job is given back: somebody may start it sooner
REMEMBER_OFFER_S: Final = 30.0
OFFERS_MAX: Final = 4_096  # remembered
_HASHES_MAX: Final = 8_192


class Neighbours(Protocol):
    """What the node knows of who else there is. Any thread."""

    def owns(self, queue: str, task: str, slot: int | None) -> bool | None:
        """Whether a job belongs to this worker; None: there is no ring of that queue."""
        ...

    def owns_of(self, worker_id: str, queue: str, task: str, slot: int | None) -> bool: ...

    def claim_share(self) -> float:
        """This worker's part of the capacity of all that live."""
        ...


class Rules(Struct, frozen=True, kw_only=True):
    """How much is held, and who may take it. `weight` as MeshWorker has it."""

    concurrency: int
    local_buffer: int = 64
    steal: bool = True
    steal_threshold: int = 2
    steal_batch: int = 4
    weight: float = 0.7


class Stock:
    """Implements `mesh.shelf.Shelf`. `on_taken` is called, on the node's thread, when others have taken."""

    def __init__(self, rules: Rules, clock: Clock) -> None:
        self.rules: Final = rules
        self.neighbours: Neighbours | None = None
        self.times: Final = RunTimes()
        self.trips: Final = RunTimes(0.0)  # the same of exchanges
        self.on_taken: Callable[[], None] = lambda: None
        self.want = 0  # jobs that others were last asked for
        self._clock = clock
        self._lock = threading.Lock()
        # What was taken from others fits in even if nothing is held of what is claimed.
        self._buffer = Buffer(max(rules.local_buffer, rules.steal_batch), self._is_own)
        self._jobs: dict[str, ClaimedJob] = {}
        self._beginning: dict[str, ClaimedJob] = {}
        self._gone: set[tuple[str, int]] = set()  # of those that are beginning: they must not run
        self._offers: dict[tuple[str, int], int] = {}  # when it was made, the oldest first
        self._hashes: dict[str, int] = {}
        self._share_changed = False
        self._given_up = False
        self.counts: Final = dict.fromkeys(
            (
                "prefetch_count",
                "prefetch_jobs",
                "local_pops",
                "jobs_stolen_out",
                "jobs_taken_held",
                "buffer_released_old",
                "affinity_hits",
                "affinity_misses",
            ),
            0,
        )

    def __len__(self) -> int:
        return len(self._jobs)

    def __bool__(self) -> bool:
        """An empty stock is one as well: `stock or …` shall not replace it."""
        return True

    # -- how much ------------------------------------------------------------------------------------
    @property
    def room(self) -> int:
        """How many jobs more fit in."""
        return max(0, self.rules.local_buffer - len(self._jobs))

    def lacks(self, coming: int = 0) -> int:
        """How many are missing to what keeps the slots busy for a moment; `coming` are asked for already."""
        return max(0, self._mark() - len(self._jobs) - coming)

    def _mark(self) -> int:
        if self._given_up:
            return 0
        return wanted(self.rules.concurrency, self.times.run_s, self.rules.local_buffer)

    def extra(self, coming: int = 0, *, fills: bool = False) -> int:
        """How many one claim shall hold beyond its free slots. `fills`: the last one found all it asked for,
        and so many more are wanted as there is room for."""
        lacks = self.lacks(coming)
        if not lacks or not (fills or worth_asking(lacks, self._mark())):
            return 0
        return min(lacks, self._claim_most())

    def pays(self, quiet_s: float) -> bool:
        """As `buffer.pays` has it."""
        return pays(self.times.run_s, self.trips.run_s, quiet_s)

    def give_up(self) -> None:
        """There is no mesh after all: hold nothing more."""
        self._given_up = True

    @property
    def run_ms(self) -> int:
        return round(self.times.run_s * 1e3)

    def _claim_most(self) -> int:
        share = self.neighbours.claim_share() if self.neighbours is not None else 1.0
        return extra_of_claim(self.rules.local_buffer, share)

    # -- in and out ----------------------------------------------------------------------------------
    def put(self, jobs: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        """Hold these. Answers those that do not fit."""
        now_ns = self._now_ns()
        left: list[ClaimedJob] = []
        with self._lock:
            for job in jobs:
                held = Held(job.id, job.token, job.queue, job.tier, job.task, job.slot, job.hops, now_ns)
                if self._buffer.put(held):
                    self._jobs[job.id] = job
                else:
                    self._jobs.pop(job.id, None)
                    left.append(job)
        return left

    def begins(self, slots: int, lacking: Sequence[int] = ()) -> bool:
        """Whether there is a job that could be begun in so many free slots (as `Buffer.hot` has it)."""
        if not self._jobs or slots <= 0:
            return False
        if not lacking:
            return True
        with self._lock:
            return bool(self._buffer.hot(slots, lacking))

    def pick(self, slots: int, lacking: Sequence[int] = ()) -> list[ClaimedJob]:
        """What to begin next. Each is to be `landed` once its begin was answered."""
        if not self._jobs:
            return []
        with self._lock:
            self._regard()
            picked: list[ClaimedJob] = []
            for held in self._buffer.hot(slots, lacking):
                job = self._jobs[held.id]
                self._beginning[job.id] = job  # first: a beat that looks meanwhile must not miss it
                self._drop(held.id, held.token)
                picked.append(job)
        return picked

    @property
    def is_beginning(self) -> bool:
        """Something is on its way to its start."""
        return bool(self._beginning)

    def must_not_run(self, job: ClaimedJob) -> bool:
        """Its begin may have been won, but by now it is another's, or was cancelled."""
        return (job.id, job.token) in self._gone

    def landed(self, job: ClaimedJob) -> None:
        """Its begin was answered and what follows from that is done."""
        with self._lock:
            if self._beginning.get(job.id) is job:
                del self._beginning[job.id]
            self._gone.discard((job.id, job.token))

    def pop(self) -> ClaimedJob | None:
        """Take the hottest job out. It is still held in storage: whoever has it has to begin it."""
        with self._lock:
            self._regard()
            for held in self._buffer.hot(1):
                job = self._jobs[held.id]
                self._drop(held.id, held.token)
                self.counts["local_pops"] += 1
                return job
        return None

    def prefetch(self, jobs: Sequence[ClaimedJob]) -> int:
        """Hold jobs that this worker has claimed; how many of them fit, from the first on."""
        return len(jobs) - len(self.put(jobs))

    def clear(self) -> list[ClaimedJob]:
        """All that is held, but for what is on its way to its start; it is held no longer."""
        with self._lock:
            jobs = list(self._jobs.values())
            for job in jobs:
                self._drop(job.id, job.token)
        return jobs

    def take_old(self) -> list[ClaimedJob]:
        """The same of what has been held for HELD_MOST_S."""
        if not self._jobs:
            return []
        with self._lock:
            old = self._buffer.older_than(self._now_ns() - int(HELD_MOST_S * 1e9))
            jobs = [self._jobs[held.id] for held in old]
            for job in jobs:
                self._drop(job.id, job.token)
            self.counts["buffer_released_old"] += len(jobs)
        return jobs

    def old_in_s(self) -> float | None:
        """When something will be; None: nothing is held."""
        with self._lock:
            since_ns = self._buffer.oldest_ns()
        return None if since_ns is None else HELD_MOST_S - (self._now_ns() - since_ns) / 1e9

    def forget(self, job: ClaimedJob) -> None:
        """This job was claimed anew: what is held of it under another token is ours no longer."""
        if job.id in self._jobs:
            with self._lock:
                held = self._buffer.held.get(job.id)
                if held is not None and held.token != job.token:
                    self._drop(held.id, held.token)

    def lose(self, item: Owned) -> ClaimedJob | None:
        """It must not be started any more. Answers the job if it was held and is so no longer; one that is on
        its way to its start is only marked."""
        with self._lock:
            job = self._jobs.get(item.id)
            if job is not None and job.token == item.token:
                self._drop(item.id, item.token)
                return job
            if (job := self._beginning.get(item.id)) is not None and job.token == item.token:
                self._gone.add((item.id, item.token))
        return None

    def _drop(self, job_id: str, token: int) -> bool:
        if self._buffer.remove(job_id, token) is None:
            return False
        del self._jobs[job_id]
        return True

    # -- for beats -----------------------------------------------------------------------------------
    def owned(self) -> list[Owned]:
        """What a beat presents: held, or on its way to its start."""
        jobs = {**self._jobs, **self._beginning}  # in this order: it comes there before it leaves here
        return [Owned(job.id, job.token) for job in jobs.values() if (job.id, job.token) not in self._gone]

    # -- whose it is ---------------------------------------------------------------------------------
    def share_changed(self) -> None:
        """What belongs to this worker is another part of the work now."""
        self._share_changed = True

    def _regard(self) -> None:
        if self._share_changed:
            self._share_changed = False
            self._buffer.regard()

    def _is_own(self, held: Held) -> bool:
        if self.neighbours is None or not self.rules.weight:
            return False
        return bool(self.neighbours.owns(held.queue, held.task, held.slot))

    def note_starts(self, jobs: Sequence[ClaimedJob]) -> None:
        """Count which of these belong to this worker."""
        if self.neighbours is None:
            return
        owns, ringless = self.neighbours.owns, None
        for job in jobs:
            if job.queue == ringless:
                continue
            own = owns(job.queue, job.task, job.slot)
            if own is None:
                ringless = job.queue  # so it is for all jobs of that queue
            else:
                self.counts["affinity_hits" if own else "affinity_misses"] += 1

    # -- for others ----------------------------------------------------------------------------------
    def stealable(self) -> tuple[int, int]:
        """How many jobs others may have, and the best tier of them."""
        if not self.rules.steal or not self._jobs:
            return 0, 3
        return self._buffer.stealable(own_too=self.rules.weight < 1)

    def offer(self, wish: Steal, most: int, thief: NodeRef) -> Offer:
        tasks = frozenset(wish.tasks)  # none: the thief has too many to name
        neighbours = self.neighbours if self.rules.weight else None

        def can_run(held: Held) -> bool:
            known = not tasks or self._hash(held.task) in tasks
            return known and held.queue in wish.queues and held.tier in wish.tiers

        def is_thiefs(held: Held) -> bool:
            return neighbours is not None and neighbours.owns_of(
                thief.worker_id, held.queue, held.task, held.slot
            )

        if not self.rules.steal:
            return Offer(())
        jobs = offered(
            list(self._buffer.held.values()),
            min(most, wish.want),
            can_run=can_run,
            is_thiefs=is_thiefs,
            is_own=self._is_own,
            own_too=self.rules.weight < 1,
        )
        self._remember(jobs)
        return Offer(
            tuple(Offered(job.id, job.token) for job in jobs),
            surplus=max(0, self.stealable()[0] - len(jobs)),
        )

    def _remember(self, jobs: Sequence[Held]) -> None:
        now_ns = self._now_ns()
        with self._lock:
            offers = self._offers
            for job in jobs:
                offers.pop((job.id, job.token), None)
                offers[(job.id, job.token)] = now_ns
            while offers:
                oldest = next(iter(offers))
                if len(offers) <= OFFERS_MAX and now_ns - offers[oldest] < REMEMBER_OFFER_S * 1e9:
                    break
                del offers[oldest]

    def taken(self, jobs: Sequence[Offered], thief: NodeRef) -> int:
        count = 0
        with self._lock:
            for item in jobs:
                if self._offers.pop((item.id, item.token), None) is None:
                    continue  # never offered, long ago, or counted already
                count += 1
                if not self._drop(item.id, item.token):
                    job = self._beginning.get(item.id)
                    if job is not None and job.token == item.token:
                        self._gone.add((item.id, item.token))
            self.counts["jobs_stolen_out"] += count
        if count:
            self.on_taken()
        return count

    def _hash(self, task: str) -> int:
        found = self._hashes.get(task)
        if found is None:
            if len(self._hashes) >= _HASHES_MAX:
                self._hashes.clear()
            found = self._hashes[task] = xxhash.xxh3_64_intdigest(task.encode())
        return found

    # -- figures -------------------------------------------------------------------------------------
    @property
    def hungry(self) -> bool:
        """Others are to be asked for work."""
        return self.want > 0

    def figures(self) -> dict[str, int]:
        """Counters since the start, and how things stand."""
        return {
            **self.counts,
            "buffered": len(self._jobs),
            "adaptive_prefetch": self._claim_most(),
            "should_prefetch": int(self.extra() > 0),
            "should_steal": int(self.hungry),
        }

    def _now_ns(self) -> int:
        return int(self._clock.mono_s() * 1e9)
