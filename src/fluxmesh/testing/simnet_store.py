"""A model of storage for the simulated mesh: who owns which job, and the verbs that move it.

It is a statement of its own of DESIGN.md 4, made to be read: one dictionary of rows, each verb one step.
Instants are nanoseconds of storage's time, which is the simulator's true time. Tokens are microseconds of it,
and grow: max(previous + 1, now). Not modelled: payloads, limits, delays, retries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct

from fluxmesh.mesh.messages import NodeRef, Offered
from fluxmesh.mesh.timing import MS

TIERS: Final = 4
MAX_HOPS: Final = 2
TAKEABLE_AFTER_NS: Final = 100 * MS
ANSWERS_KEPT: Final = 8


class Place(StrEnum):
    READY = "ready"
    HELD = "held"
    RUNNING = "running"
    DONE = "done"


class Begun(StrEnum):
    BEGUN = "begun"
    OUTRANKED = "outranked"
    LOST = "lost"


class Row(Struct):
    """A job as storage has it. `seq` is its place in the queue, which a release gives back to it."""

    id: str
    tier: int
    run_ns: int  # how long its body takes
    seq: int
    place: Place = Place.READY
    owner: NodeRef | None = None
    token: int = 0
    hops: int = 0  # of the present claim
    owned_ns: int = 0  # since when its owner has it
    absences: int = 0  # lists running of its owner in which it was not
    ended_by: tuple[NodeRef, int] | None = None


class Given(Struct, frozen=True):
    """A job as its new owner is told of it."""

    id: str
    token: int
    tier: int
    run_ns: int
    hops: int
    seq: int

    @property
    def owned(self) -> Offered:
        return Offered(self.id, self.token)


class Exchanged(Struct, frozen=True):
    """`held_in_ns`: when take_held may find something; None: nobody else holds anything."""

    fenced: bool = False
    settled: tuple[bool, ...] = ()
    begun: tuple[Begun, ...] = ()
    running: tuple[Given, ...] = ()
    held: tuple[Given, ...] = ()
    held_in_ns: int | None = None


class Lease(Struct):
    """The row of one run of a worker."""

    until_ns: int
    donates: bool = True
    tiers: tuple[int, ...] = tuple(range(TIERS))  # that it runs
    proven_dead: bool = False


class Change(Struct, frozen=True):
    """What a verb did to one job, for whoever keeps books: by whom, under which token it was asked for, which
    token the job has now."""

    verb: str
    job: str
    by: NodeRef | None
    presented: int
    token: int
    place: Place
    why: str = ""


class Store:
    """`told` hears of every change, after it; `wake` of jobs that have become ready."""

    def __init__(self, *, now: Callable[[], int], lease_ns: int, beat_ns: int) -> None:
        self._now = now
        self.lease_ns = lease_ns
        self.beat_ns = beat_ns
        self.jobs: dict[str, Row] = {}
        self.ready: list[dict[int, Row]] = [{} for _ in range(TIERS)]  # by seq
        self.owned: dict[NodeRef, dict[str, Row]] = {}
        self.leases: dict[NodeRef, Lease] = {}
        self.newest: dict[str, int] = {}
        self.places: dict[Place, int] = dict.fromkeys(Place, 0)
        self.told: Callable[[Change, Row], None] = lambda _change, _row: None
        self.wake: Callable[[int], None] = lambda _count: None
        self._answers: dict[NodeRef, dict[int, Exchanged]] = {}
        self._seq = 0
        self._last_beat_ns = 0
        self._not_before_ns = 0  # nothing lapses before

    # -- producers and lives -----------------------------------------------------------------------------

    def enqueue(self, jobs: Iterable[tuple[str, int, int]]) -> None:
        """(id, tier, run time)"""
        count = 0
        for job, tier, run_ns in jobs:
            if job in self.jobs:
                continue
            self._seq += 1
            row = self.jobs[job] = Row(job, tier, run_ns, self._seq)
            self.ready[tier][row.seq] = row
            self.places[Place.READY] += 1
            self.told(Change("enqueue", job, None, 0, 0, Place.READY), row)
            count += 1
        self.wake(count)

    def register(
        self, worker: NodeRef, *, donates: bool = True, tiers: tuple[int, ...] = tuple(range(TIERS))
    ) -> None:
        """A run with a higher epoch fences those before it; their jobs wait for a ground to be reaped."""
        self.newest[worker.worker_id] = max(worker.epoch, self.newest.get(worker.worker_id, 0))
        for run in [run for run, rows in self.owned.items() if not rows and not self.is_good(run)]:
            del self.owned[run], self.leases[run]
            self._answers.pop(run, None)
        self.leases[worker] = Lease(self._now() + self.lease_ns, donates, tiers)
        self.owned[worker] = {}

    def is_good(self, worker: NodeRef) -> bool:
        lease = self.leases.get(worker)
        return (
            lease is not None and not lease.proven_dead and self.newest.get(worker.worker_id) == worker.epoch
        )

    # -- the one round trip ------------------------------------------------------------------------------

    def exchange(
        self,
        worker: NodeRef,
        request: int,
        *,
        settle: Sequence[Offered] = (),
        begin: Sequence[Offered] = (),
        slots: int = 0,
        extra: int = 0,
    ) -> Exchanged:
        """settle, begin, claim, in this order; a begin that is not begun leaves its slot to the claim. A
        request that is repeated gets the same jobs again, less those that are its own no longer."""
        kept = self._answers.setdefault(worker, {})
        if request in kept:
            return self._again(worker, kept[request], begin)
        settled = tuple(self._settle(worker, item) for item in settle)
        begun = tuple(self._begin(worker, item) for item in begin)
        running: list[Given] = []
        held: list[Given] = []
        fenced = not self.is_good(worker)
        if not fenced:
            slots += sum(one is not Begun.BEGUN for one in begun)
            running = self._claim(worker, slots, Place.RUNNING)
            held = self._claim(worker, extra, Place.HELD)
        held_in = None if running or held else self._held_in(worker)
        answer = Exchanged(fenced, settled, begun, tuple(running), tuple(held), held_in)
        kept[request] = answer
        if len(kept) > ANSWERS_KEPT:
            del kept[min(kept)]
        return answer

    def _again(self, worker: NodeRef, answer: Exchanged, begin: Sequence[Offered]) -> Exchanged:
        def own(given: Iterable[Given], place: Place) -> tuple[Given, ...]:
            return tuple(one for one in given if self._is_own(worker, one.owned, place))

        begun = tuple(
            Begun.LOST if one is Begun.BEGUN and not self._is_own(worker, item, Place.RUNNING) else one
            for one, item in zip(answer.begun, begin, strict=True)
        )
        running, held = own(answer.running, Place.RUNNING), own(answer.held, Place.HELD)
        return Exchanged(answer.fenced, answer.settled, begun, running, held, answer.held_in_ns)

    def _settle(self, worker: NodeRef, item: Offered) -> bool:
        """False: stale, nothing was changed. Repeating one that was applied is true."""
        row = self.jobs[item.id]
        if row.ended_by == (worker, item.token):
            return True
        if not self._is_own(worker, item, Place.RUNNING):
            return False
        self._leaves(row)
        row.ended_by = (worker, item.token)
        self._put(row, Place.DONE, None, row.token)
        self.told(Change("settle", row.id, worker, item.token, row.token, Place.DONE), row)
        return True

    def _begin(self, worker: NodeRef, item: Offered) -> Begun:
        if not self._is_own(worker, item, Place.HELD) or not self.is_good(worker):
            return Begun.LOST
        row = self.jobs[item.id]
        if self._is_outranked(worker, row):
            self._release(row, "outranked", worker, item.token)
            return Begun.OUTRANKED
        self._put(row, Place.RUNNING, worker, row.token)
        self.told(Change("begin", row.id, worker, item.token, row.token, Place.RUNNING), row)
        return Begun.BEGUN

    def _claim(self, worker: NodeRef, count: int, place: Place) -> list[Given]:
        given: list[Given] = []
        for tier in self.leases[worker].tiers:
            queue = self.ready[tier]
            while queue and len(given) < count:
                row = queue[min(queue)]
                presented = row.token
                row.hops = 0
                self._gets(row, place, worker)
                self.told(Change("claim", row.id, worker, presented, row.token, place), row)
                given.append(_given(row))
        return given

    def _is_outranked(self, worker: NodeRef, row: Row) -> bool:
        """Whether a job of a higher tier is ready that this worker could run."""
        return any(self.ready[tier] for tier in self.leases[worker].tiers if tier < row.tier)

    def _held_in(self, worker: NodeRef) -> int | None:
        now = self._now()
        waits = [
            max(0, row.owned_ns + TAKEABLE_AFTER_NS - now)
            for owner, rows in self.owned.items()
            if owner != worker and self.leases[owner].donates
            for row in rows.values()
            if row.place is Place.HELD and row.hops < MAX_HOPS
        ]
        return min(waits, default=None)

    # -- from one to another -----------------------------------------------------------------------------

    def transfer(self, thief: NodeRef, jobs: Sequence[Offered]) -> list[Given]:
        """Held jobs become the thief's, by (id, token). What comes back is its own, the rest is not."""
        given: list[Given] = []
        if not self.is_good(thief) or self.leases[thief].until_ns < self._now():
            return given
        for item in jobs:
            row = self.jobs[item.id]
            if not self._may_move(row, item, thief):
                continue
            row.hops += 1
            self._leaves(row)
            self._gets(row, Place.HELD, thief)
            self.told(Change("transfer", row.id, thief, item.token, row.token, Place.HELD), row)
            given.append(_given(row))
        return given

    def _may_move(self, row: Row, item: Offered, thief: NodeRef) -> bool:
        return (
            row.place is Place.HELD
            and row.token == item.token
            and row.owner != thief
            and row.hops < MAX_HOPS
            and row.tier in self.leases[thief].tiers
        )

    def take_held(self, worker: NodeRef, slots: int) -> list[Given]:
        """Jobs held for a while by owners that donate, given running: best tier and oldest first, and none
        while one of a higher tier is ready."""
        if not self.is_good(worker):
            return []
        now = self._now()
        tiers = self.leases[worker].tiers
        rows = [
            row
            for owner, owned in self.owned.items()
            if owner != worker and self.leases[owner].donates
            for row in owned.values()
            if row.place is Place.HELD and row.hops < MAX_HOPS and row.tier in tiers
            if row.owned_ns + TAKEABLE_AFTER_NS <= now
        ]
        given: list[Given] = []
        for row in sorted(rows, key=lambda row: (row.tier, row.seq))[:slots]:
            if self._is_outranked(worker, row):
                break
            presented = row.token
            row.hops += 1
            self._leaves(row)
            self._gets(row, Place.RUNNING, worker)
            self.told(Change("take_held", row.id, worker, presented, row.token, Place.RUNNING), row)
            given.append(_given(row))
        return given

    def release(self, worker: NodeRef, jobs: Sequence[Offered], why: str = "given back") -> list[bool]:
        """Back to its old place. False: not its own (any more)."""
        done = []
        for item in jobs:
            row = self.jobs[item.id]
            own = any(self._is_own(worker, item, place) for place in (Place.HELD, Place.RUNNING))
            done.append(own)
            if own:
                self._release(row, why, worker, item.token)
        return done

    # -- liveness ----------------------------------------------------------------------------------------

    def beat(self, worker: NodeRef, listed: Sequence[Offered]) -> list[Offered]:
        """Renews the lease; what is owned for two beats and was on neither of the last two lists is released.
        Answers what of the list is not its own any more."""
        self._arm()
        now = self._now()
        if self.is_good(worker):
            self.leases[worker].until_ns = now + self.lease_ns
        names = {item.id for item in listed}
        for row in list(self.owned.get(worker, {}).values()):
            row.absences = 0 if row.id in names else row.absences + 1
            if row.absences >= 2 and now - row.owned_ns > 2 * self.beat_ns:
                self._release(row, "absent", worker, row.token)
        return [
            item
            for item in listed
            if not any(self._is_own(worker, item, place) for place in (Place.HELD, Place.RUNNING))
        ]

    def declare_dead(self, worker: NodeRef) -> None:
        lease = self.leases.get(worker)
        if lease is not None:
            lease.proven_dead = True

    def reap(self) -> None:
        """Takes back the jobs of the dead: proven, or silent for a lease while nothing else was silent."""
        self._arm()
        for worker, rows in self.owned.items():
            lease = self.leases[worker]
            why = "death proven" if lease.proven_dead else "lapsed"
            if rows and (lease.proven_dead or max(lease.until_ns, self._not_before_ns) < self._now()):
                for row in list(rows.values()):
                    self._release(row, why, worker, row.token)

    def _arm(self) -> None:
        """After a time in which storage heard nobody, nobody's silence counts for one lease."""
        now = self._now()
        if now - self._last_beat_ns > 2 * self.beat_ns:
            self._not_before_ns = now + self.lease_ns
        self._last_beat_ns = now

    # -- one row -----------------------------------------------------------------------------------------

    def _is_own(self, worker: NodeRef, item: Offered, place: Place) -> bool:
        row = self.jobs[item.id]
        return row.place is place and row.owner == worker and row.token == item.token

    def _gets(self, row: Row, place: Place, worker: NodeRef) -> None:
        """A new owner, and so a new token."""
        row.owned_ns, row.absences = self._now(), 0
        self.ready[row.tier].pop(row.seq, None)
        self.owned[worker][row.id] = row
        self._put(row, place, worker, self._next_token(row))

    def _leaves(self, row: Row) -> None:
        if row.owner is not None:
            self.owned[row.owner].pop(row.id, None)

    def _release(self, row: Row, why: str, by: NodeRef, presented: int) -> None:
        was = row.place
        self._leaves(row)
        row.hops = 0
        self._put(row, Place.READY, None, self._next_token(row))
        self.ready[row.tier][row.seq] = row
        self.told(Change("release", row.id, by, presented, row.token, Place.READY, f"{why}, {was}"), row)
        self.wake(1)

    def _next_token(self, row: Row) -> int:
        return max(row.token + 1, self._now() // 1_000)

    def _put(self, row: Row, place: Place, owner: NodeRef | None, token: int) -> None:
        self.places[row.place] -= 1
        self.places[place] += 1
        row.place, row.owner, row.token = place, owner, token


def _given(row: Row) -> Given:
    return Given(row.id, row.token, row.tier, row.run_ns, row.hops, row.seq)
