"""A model of the worker beside a simulated node: it claims, holds, begins, runs, settles, beats, and carries
out what the core decides about stealing.

The buffer and the core are the real ones. Its rounds are those of the real fetcher in short: one exchange at
a time that settles, begins and claims; no answer is acted on that is older than a beat; past its own deadline
it begins and starts nothing. All calls of storage go over a `Line`, on which they get lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from fluxmesh.mesh.effects import Leave, Seek, Take, Took, UpdateLoad
from fluxmesh.mesh.messages import Flag, Load, NodeRef, Offered
from fluxmesh.mesh.timing import MS, S
from fluxmesh.testing.simnet_shelf import ModelShelf
from fluxmesh.testing.simnet_store import Begun, Exchanged, Given
from fluxmesh.testing.simnet_trace import Violation

if TYPE_CHECKING:
    from fluxmesh.testing.simnet_node import SimNode
    from fluxmesh.testing.simnet_shop import Workshop

HELD_MOST_NS: Final = 5 * S
POLL_NS: Final = S
TRIES: Final = 3  # of a call whose outcome is unknown
LOAD_GAP_NS: Final = 10 * MS
PAUSE_NS: Final = 100 * MS


class Habits(Struct, frozen=True, kw_only=True):
    """How a worker is set. `buffer`: most jobs held; `greedy`: its claims fill that at once, others' hold one
    job beyond their free slots, as in a large fleet."""

    slots: int = 2
    buffer: int = 64
    greedy: bool = False
    threshold: int = 2
    batch: int = 4
    rate: float = 10.0  # requests of a peer in a second; 0: any
    steals: bool = True
    takes_held: bool = True  # by storage alone
    tiers: tuple[int, ...] = (0, 1, 2, 3)


class Flight(Struct):
    """An exchange under way."""

    number: int
    settle: tuple[Offered, ...]
    begin: tuple[Given, ...]
    slots: int
    extra: int
    sent_ns: int = 0
    tries: int = 0


class SimWorker:
    """One run of a worker, at one node."""

    def __init__(self, shop: Workshop, node: SimNode, habits: Habits, shelf: ModelShelf) -> None:
        self.shop = shop
        self.node = node
        self.me: NodeRef = node.me
        self.habits = habits
        self.shelf = shelf
        shelf.me = node.me
        self.bodies: dict[str, Given] = {}
        self.outbox: list[Offered] = []
        self.flight: Flight | None = None
        self.taking = False
        self.is_draining = False
        self.is_degraded = False
        self.lies = 0  # so many jobs more it says to hold
        self.deadline_ns = shop.net.now + shop.store.lease_ns - shop.store.beat_ns
        self.told_got = 0  # jobs that the core was told of by Took
        self.from_whom: dict[str, NodeRef] = {}
        self.rng = Random(f"{shop.net.seed} worker {node.name} {node.me.epoch}")
        self._requests = 0
        self._hungry = True
        self._wish = -1
        self._load_waits = False
        self._last_load: tuple[int, ...] = ()
        self._take_waits = False
        node.on_take = self._transfer

    # -- life --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.shop.books.runs[self.me] = self.habits.tiers
        self.shop.store.register(self.me, donates=self.habits.steals, tiers=self.habits.tiers)
        self._tell_load()
        self.later(self.rng.randrange(self.shop.store.beat_ns), self._beat)
        self.later(self.rng.randrange(POLL_NS), self._poll)
        self.look()

    def later(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        self.shop.net.after(delay_ns, self._act, action, args)

    def _act(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        """A process that is stopped does it when it goes on, one that is gone does nothing any more."""
        if not self.node.alive:
            return
        if self.node.frozen:
            self.shop.net.push(self.node.frozen_until + 1, self._act, action, args)
        else:
            action(*args)

    def ask(self, verb: str, apply: Callable[[], Any], heard: Callable[[Any], None]) -> None:
        self.shop.line.ask(verb, apply, lambda answer: self._act(heard, (answer,)))

    def dies(self) -> None:
        """The process is gone, and all bodies with it."""
        self.shop.books.dies(self.me, list(self.bodies))
        self.bodies.clear()

    def drain(self) -> None:
        """Claims no more, hands back what it holds, ends what runs, leaves."""
        if self.is_draining:
            return
        self.is_draining = True
        self._seek(0)
        self._tell_load()
        self.release(self.shelf.clear(), "drained")
        self.look()

    def degrade(self, length_ns: int) -> None:
        """Its loop stands: it neither claims nor steals, and says so."""
        self.is_degraded = True
        self._tell_load()
        self.later(length_ns, self._recovers)

    def _recovers(self) -> None:
        self.is_degraded = False
        self._tell_load()
        self.woken()

    @property
    def free(self) -> int:
        begun = 0 if self.flight is None else len(self.flight.begin) + self.flight.slots
        return self.habits.slots - len(self.bodies) - begun

    @property
    def may_begin(self) -> bool:
        return self.shop.net.now < self.deadline_ns and not self.is_draining and not self.is_degraded

    # -- rounds ------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        self._hungry = True
        self.look()
        self.later(POLL_NS, self._poll)

    def woken(self) -> None:
        self._hungry = True
        self.look()

    def look(self) -> None:
        """One exchange, if there is anything to do and none under way."""
        if self.flight is not None or not self.node.alive:
            return
        begin: tuple[Given, ...] = ()
        slots = extra = 0
        if self.may_begin:
            begin = self.shelf.hot(max(0, self.free))
            slots = max(0, self.free - len(begin))
            extra = max(0, self._wanted() - self.shelf.held)
        if not (self._hungry or self.outbox or begin):
            return
        if not (self.outbox or begin or slots or extra):
            self._left_if_drained()
            return
        self._requests += 1
        self.flight = Flight(self._requests, tuple(self.outbox), begin, slots, extra)
        self.outbox = []
        self._send()

    def _wanted(self) -> int:
        return self.habits.buffer if self.habits.greedy else min(1, self.habits.buffer)

    def _send(self) -> None:
        flight = self.flight
        assert flight is not None
        flight.sent_ns = self.shop.net.now
        flight.tries += 1
        self.ask("exchange", lambda: self._apply(flight), self._exchanged)

    def _apply(self, flight: Flight) -> Exchanged:
        """What storage does in one step, and who may be struck right after it."""
        settle, begin = flight.settle, tuple(job.owned for job in flight.begin)
        answer = self.shop.store.exchange(
            self.me, flight.number, settle=settle, begin=begin, slots=flight.slots, extra=flight.extra
        )
        self._step("after the begin, before its reply", begin)
        self._step("after the settle, before its reply", settle)
        return answer

    def _step(self, where: str, jobs: Sequence[Offered]) -> None:
        """A boundary of a theft: nothing of it, unless one of these jobs was stolen."""
        victims = (self.from_whom.get(job.id) for job in jobs)
        victim = next((victim for victim in victims if victim is not None), None)
        if victim is not None:
            self.shop.step(where, self.me, victim)

    def _exchanged(self, answer: Exchanged | None) -> None:
        flight = self.flight
        assert flight is not None
        if answer is None:
            if flight.tries < TRIES:
                self._send()
                return
            # Nobody will ever hear what became of it. Ends are told again; what was begun or given and is on
            # none of our lists storage takes back.
            self._unknown(flight)
            self.flight = None
            self.outbox = [*flight.settle, *self.outbox]
            self.later(PAUSE_NS, self.look)
            return
        self.flight = None
        if answer.fenced:
            raise Violation("fenced", f"{self.me} is fenced and lives", about=(self.node.name,))
        late = self.shop.net.now - flight.sent_ns > self.shop.store.beat_ns or not self.may_begin
        begun = [job for job, how in zip(flight.begin, answer.begun, strict=True) if how is Begun.BEGUN]
        self.shelf.begun(flight.begin)
        if late:
            self.release([*begun, *answer.running, *answer.held], "late")
        else:
            for job in (*begun, *answer.running):
                self._start(job)
            self._hold(answer.held)
            self._step("after the begin's reply", [job.owned for job in begun])
        self._after(flight, answer)

    def _hold(self, jobs: Sequence[Given]) -> None:
        """What does not fit goes back."""
        for job in jobs:
            self.shop.books.heard(self.me, job.id, job.token)
        self.release(self.shelf.add(jobs), "no room")

    def _unknown(self, flight: Flight) -> None:
        self.shelf.begun(flight.begin)
        for job in flight.begin:
            self.shop.books.heard(self.me, job.id, job.token, keeps=False)

    def _after(self, flight: Flight, answer: Exchanged) -> None:
        """Whether the claim came back short decides whether it asks others, and storage again at once."""
        if not self.node.alive:
            return
        found = len(answer.running) + len(answer.held)
        self._hungry = found > 0 and found >= flight.slots + flight.extra
        short = found < flight.slots + flight.extra
        if short and self.shelf.held <= self.habits.threshold and self.may_begin:
            self._seek(max(0, self.free) + max(0, self.habits.threshold - self.shelf.held))
        else:
            self._seek(0)
        waits = answer.held_in_ns if self.habits.takes_held else None
        if not found and flight.slots and waits is not None and not self._take_waits:
            self._take_waits = True
            self.later(waits + self.rng.randrange(20 * MS), self._take_held)
        self._tell_load()
        self.look()

    def _seek(self, want: int) -> None:
        if want != self._wish and self.habits.steals:
            self._wish = want
            self.node.command(Seek(want))

    # -- bodies ------------------------------------------------------------------------------------------

    def _start(self, job: Given) -> None:
        if not self.node.alive:
            return
        self.shop.books.heard(self.me, job.id, job.token)
        self.shop.books.starts(self.shop.net.now, self.me, job.id, job.token)
        self.bodies[job.id] = job
        self.later(job.run_ns, self._ended, job)

    def _ended(self, job: Given) -> None:
        if self.bodies.get(job.id) is not job:
            return
        del self.bodies[job.id]
        self.shop.books.ends(self.me, job.id, whole=True)
        self.outbox.append(job.owned)
        self.look()

    def _lost(self, job: Given) -> None:
        """A beat has told that a body runs that is ours no longer: it is cancelled."""
        del self.bodies[job.id]
        self.shop.books.ends(self.me, job.id, whole=False)

    # -- beats -------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        now = self.shop.net.now
        self.later(self.shop.store.beat_ns, self._beat)
        listed = [*(job.owned for job in self.shelf.all()), *(job.owned for job in self.bodies.values())]
        listed += self.outbox
        if self.flight is not None:
            listed += self.flight.settle
        self.ask(
            "beat",
            lambda: self.shop.store.beat(self.me, listed),
            lambda lost: self._beaten(now, lost),
        )
        old = self.shelf.older_than(now - HELD_MOST_NS)
        self.release(old, "old")

    def _beaten(self, sent_ns: int, lost: list[Offered] | None) -> None:
        if lost is None:
            return
        self.deadline_ns = max(self.deadline_ns, sent_ns + self.shop.store.lease_ns - self.shop.store.beat_ns)
        self.shelf.lost(lost)
        for item in lost:
            job = self.bodies.get(item.id)
            if job is not None and job.token == item.token:
                self._lost(job)
        self._tell_load()
        self.look()

    def release(self, jobs: Sequence[Given], why: str, tries: int = TRIES) -> None:
        """Given back; what cannot be is on no list any more, and comes back by that."""
        if not jobs:
            return
        for job in jobs:
            self.shop.books.heard(self.me, job.id, job.token, keeps=False)
        owned = [job.owned for job in jobs]

        def heard(answer: list[bool] | None) -> None:
            if answer is None and tries > 1:
                self.release(jobs, why, tries - 1)

        self.ask("release", lambda: self.shop.store.release(self.me, owned, why), heard)

    # -- stealing ----------------------------------------------------------------------------------------

    def _transfer(self, take: Take) -> None:
        """What the core has found."""
        self.shop.step("before the transfer", self.me, take.peer)
        if not self.node.alive:
            return
        if self.node.frozen:
            self._act(self._transfer, (take,))
            return
        if not self.may_begin:
            self._took(take, ())
            return
        sent_ns = self.shop.net.now
        self.taking = True

        def apply() -> list[Given]:
            given = self.shop.store.transfer(self.me, take.jobs)
            if given:
                self.shop.thefts += 1
            self.shop.step("after the transfer, before its reply", self.me, take.peer)
            return given

        self.ask("transfer", apply, lambda given: self._transferred(take, sent_ns, given))

    def _transferred(self, take: Take, sent_ns: int, given: list[Given] | None) -> None:
        self.taking = False
        given = given or []
        if self.shop.net.now - sent_ns > self.shop.store.beat_ns or not self.may_begin:
            self.release(given, "late")
            given = []
        self.from_whom.update((job.id, take.peer) for job in given)
        self._hold(given)
        got = {job.id for job in given}
        self._took(take, tuple(item for item in take.jobs if item.id in got))
        if given:
            self.shop.step("after its reply, before the begin", self.me, take.peer)
        self.look()

    def _took(self, take: Take, got: tuple[Offered, ...]) -> None:
        if self.node.alive:
            self.told_got += len(got)
            self.node.command(Took(take.peer, take.jobs, got))
            self._tell_load()

    def _take_held(self) -> None:
        """The way to steal without a mesh."""
        self._take_waits = False
        slots = self.free
        if self.flight is not None or slots <= 0 or not (self.may_begin and self.habits.steals):
            return
        sent_ns = self.shop.net.now
        flight = self.flight = Flight(0, (), (), slots, 0)  # keeps the slots

        def heard(given: list[Given] | None) -> None:
            assert self.flight is flight
            self.flight = None
            if self.shop.net.now - sent_ns > self.shop.store.beat_ns or not self.may_begin:
                self.release(given or [], "late")
            else:
                for job in given or ():
                    self._start(job)
            self.woken()

        self.ask("take_held", lambda: self.shop.store.take_held(self.me, slots), heard)

    # -- what others hear of it --------------------------------------------------------------------------

    def _tell_load(self) -> None:
        """At once, but numbers no more often than each 10 ms."""
        load = self._load()
        is_flag = load[-1:] != self._last_load[-1:]
        if load == self._last_load or (self._load_waits and not is_flag):
            return
        self._last_load = load
        self._load_waits = True
        self.later(LOAD_GAP_NS, self._load_again)
        self.node.command(UpdateLoad(Load("", 0, 0, *load)))

    def _load_again(self) -> None:
        self._load_waits = False
        self._tell_load()

    def _load(self) -> tuple[int, ...]:
        flags = Flag.STEALS if self.habits.steals else Flag(0)
        if self.is_draining:
            flags |= Flag.DRAINING
        elif self.is_degraded:
            flags |= Flag.DEGRADED
        else:
            flags |= Flag.READY
        stealable, best = self.shelf.stealable
        stealable = max(0, stealable + self.lies)
        return (self.shelf.held, len(self.bodies), self.habits.slots, stealable, best, 50, int(flags))

    def _left_if_drained(self) -> None:
        if self.is_draining and not self.node.leaving and not (self.bodies or self.outbox or self.flight):
            self.node.command(Leave())
