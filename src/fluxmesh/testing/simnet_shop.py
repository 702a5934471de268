"""Workers of a simulated mesh with one storage: how they live and die, and who looks on while they steal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Final

import msgspec

from fluxmesh.mesh.effects import Call, Emit
from fluxmesh.mesh.messages import (
    Address,
    Meta,
    NodeRef,
    Noted,
    Nothing,
    Offer,
    Offered,
    Steal,
    StreamFrame,
    Taken,
)
from fluxmesh.mesh.swim import Swim
from fluxmesh.mesh.timing import MS, S
from fluxmesh.testing.simnet import NobodyWatches, Simnet
from fluxmesh.testing.simnet_books import Books
from fluxmesh.testing.simnet_network import LINKS
from fluxmesh.testing.simnet_node import SimNode, Spec
from fluxmesh.testing.simnet_points import Line, Points
from fluxmesh.testing.simnet_shelf import ModelShelf
from fluxmesh.testing.simnet_store import Store
from fluxmesh.testing.simnet_trace import Trace, Violation
from fluxmesh.testing.simnet_workers import Habits, SimWorker

LEASE_NS: Final = 3 * S
BEAT_NS: Final = S
REAP_NS: Final = 500 * MS
PORT: Final = 7946
ALONE_NS: Final = 25 * MS  # that a burst is one worker's before others hear of it
GAVE_NS: Final = S
TRIED_NS: Final = 200 * MS  # so long at most nobody else is offered what one was
PROVEN_SHARE: Final = 0.7
_NAMES: Final[dict[type, str]] = {
    Steal: "steal",
    Offer: "offer",
    Nothing: "nothing",
    Taken: "taken",
    Noted: "noted",
}
_MESSAGE_STEPS: Final = {
    "steal": "before the steal arrives",
    "offer": "after the offer, before it arrives",
    "taken": "before the taken arrives",
    "noted": "after the taken, before it is noted",
}
_GIVEN_UP: Final = frozenset({"dead", "left", "restarted"})
_frame_of: Final = msgspec.msgpack.Decoder(StreamFrame).decode


class Onlooker(NobodyWatches):
    """What thieves may not do, judged by what they send."""

    def __init__(self) -> None:
        self.shop: Workshop | None = None
        self.asks = 0
        self.asked_by: Counter[str] = Counter()
        self.last_ask_ns = 0
        self._asking: dict[NodeRef, tuple[int, NodeRef]] = {}  # the last request of each
        self._gave: dict[tuple[NodeRef, NodeRef], int] = {}  # (victim, thief) -> when
        self._tried: dict[Offered, int] = {}  # what was offered, and when

    def calls(self, node: SimNode, effect: Call) -> None:
        shop = self.shop
        assert shop is not None
        if not isinstance(shop.body_of(effect.frame), Steal):
            return
        self.asks += 1
        self.asked_by[node.name] += 1
        self.last_ask_ns = shop.net.now
        worker = shop.worker_of(node.me)
        about = (node.name,)
        if worker is not None and (worker.is_draining or worker.is_degraded or not worker.habits.steals):
            raise Violation("no thief", f"{node.name} asks while it drains or stands still", about=about)
        before = self._asking.get(node.me)
        if before is not None and node.waits_for(before[0]):
            raise Violation("one at a time", f"{node.name} asks while it waits for an answer", about=about)
        target = shop.net.running.get(effect.to)
        if target is not None:
            self._asking[node.me] = effect.call, target.me
            last = self._gave.get((node.me, target.me))
            if last is not None and node.now - last < GAVE_NS:
                raise Violation(
                    "back at once",
                    f"{node.name} asks {target.name}, which it gave to {(node.now - last) / S:.2f} s ago",
                    about=(node.name, target.name),
                )

    def given_up(self, node: SimNode, worker_id: str) -> None:
        """The run that it asked is gone, as far as it knows: nobody waits for the answer."""
        asked = self._asking.get(node.me)
        if asked is not None and asked[1].worker_id == worker_id:
            del self._asking[node.me]

    def offers(self, victim: SimNode, thief: NodeRef | None, tiers: tuple[int, ...], offer: Offer) -> None:
        """At most half of what may change hands, and the highest of the tiers that the thief runs, but for
        what another is just trying to get."""
        assert self.shop is not None
        now = victim.now
        if thief is not None:
            self._gave[victim.me, thief] = now
        worker = self.shop.worker_of(victim.me)
        if worker is None:
            return
        about = (victim.name,)
        movable = {Offered(one.id, one.token): one.tier for one in worker.shelf.movable()}
        if len(offer.jobs) > max(1, len(movable) // 2):
            text = f"{victim.name} offers {len(offer.jobs)} of {len(movable)}"
            raise Violation("half", text, about=about)
        strange = [job for job in offer.jobs if job not in movable]
        if strange:
            raise Violation("offer", f"{victim.name} offers what it does not hold: {strange}", about=about)
        left = [
            tier
            for job, tier in movable.items()
            if job not in offer.jobs and tier in tiers
            if now - self._tried.get(job, -GAVE_NS) >= TRIED_NS
        ]
        lowest = max((movable[job] for job in offer.jobs), default=0)
        if left and min(left) < lowest:
            text = f"{victim.name} offers tier {lowest} and keeps one of tier {min(left)}"
            raise Violation("offer order", text, about=about)
        self._tried.update((job, now) for job in offer.jobs)


class Workshop:
    """All of them. `share` and `blows`: see Points."""

    def __init__(
        self,
        *,
        seed: int,
        nodes: int,
        habits: Sequence[Habits],
        link: str = "lan",
        share: float = 0.0,
        blows: float = 0.0,
    ) -> None:
        self.trace = Trace()
        self.onlooker = Onlooker()
        self.onlooker.shop = self
        self.net = Simnet(seed=seed, link=LINKS[link], watch=self.onlooker, trace=None)
        self.net.meddle = self._meddle
        self.net.on_emit.append(self._emitted)
        self.rng = Random(f"shop of {seed}")
        self.points = Points(rng=Random(f"points of {seed}"), share=share, blows=blows)
        self.line = Line(self.net, self.points, rng=Random(f"line of {seed}"))
        self.store = Store(now=lambda: self.net.now, lease_ns=LEASE_NS, beat_ns=BEAT_NS)
        self.books = Books(store=self.store, trace=self.trace)
        self.store.told = lambda change, row: self.books.change(self.net.now, change, row)
        self.store.wake = self._wake
        self.nodes = nodes
        self.habits = habits
        self.workers: dict[str, SimWorker] = {}  # the newest run of each
        self.runs: list[SimWorker] = []
        self.thefts = 0  # transfers that gave something
        self.deaths = 0
        self._favoured: SimWorker | None = None
        self._frame: tuple[bytes, object] = (b"", None)
        self._jobs = 0
        self._healed = False
        self.net.after(REAP_NS, self._reap)

    # -- lives -------------------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        """Worker `number` starts, unless it runs."""
        name = f"w{number}"
        old = self.workers.get(name)
        if old is not None and old.node.alive:
            return
        habits = self.habits[number]
        shelf = ModelShelf(most=habits.buffer, now=lambda: self.net.now, owns=self._owns)

        def make_core(**given: object) -> Swim:
            return Swim(
                **given,  # type: ignore[arg-type]
                steal_threshold=habits.threshold,
                steal_batch=habits.batch,
                steal_rate_limit=habits.rate,
                steals=habits.steals,
                shelf=shelf,
            )

        spec = Spec(
            name=name,
            host=f"10.0.0.{number + 1}",
            seeds=tuple(f"10.0.0.{other + 1}:{PORT}" for other in range(self.nodes)),
            meta=Meta(
                queues=("default",),
                tiers=habits.tiers,
                capacity=habits.slots,
                steals=habits.steals,
                version="sim",
            ),
        )
        node = self.net.start(spec, make_core=make_core)
        worker = SimWorker(self, node, habits, shelf)
        self.workers[name] = worker
        self.runs.append(worker)
        self.trace.event(self.net.now, name, "start", node.me.epoch)
        worker.begin()

    def _owns(self, worker: NodeRef, slot: int) -> bool:
        """In the place of a ring."""
        return worker.worker_id == f"w{slot % self.nodes}"

    def worker_of(self, ref: NodeRef) -> SimWorker | None:
        worker = self.workers.get(ref.worker_id)
        return worker if worker is not None and worker.me == ref and worker.node.alive else None

    @property
    def living(self) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if worker.node.alive]

    def kill(self, ref: NodeRef) -> None:
        """Its process ends at once. Often somebody can prove it; else its lease has to lapse."""
        worker = self.worker_of(ref)
        if worker is None:
            return
        self.deaths += 1
        self.trace.event(self.net.now, ref.worker_id, "killed", ref.epoch)
        worker.dies()
        self.net.kill(worker.node, host_too=self.rng.random() < 0.3)
        if self.rng.random() < PROVEN_SHARE:
            self.net.after(20 * MS + self.net.chance(80 * MS), self._prove, ref)
        number = int(ref.worker_id[1:])
        self.net.after(self.rng.choice((50, 500, 2_000, 5_000)) * MS, self.start, number)

    def _prove(self, ref: NodeRef) -> None:
        if self.line.is_away:
            self.net.after(200 * MS, self._prove, ref)
        else:
            self.store.declare_dead(ref)

    def stop(self, ref: NodeRef) -> None:
        """SIGSTOP, for less than a beat, some beats, or beyond the lease."""
        worker = self.worker_of(ref)
        if worker is not None and not worker.node.frozen:
            length = self.rng.choice((200 * MS, 1_200 * MS, 2_500 * MS, LEASE_NS + 1_500 * MS))
            self.trace.event(self.net.now, ref.worker_id, "stopped", length)
            worker.node.freeze(length)

    def _emitted(self, node: SimNode, emit: Emit) -> None:
        """A worker that has left ends, and comes back after a while."""
        if emit.kind in _GIVEN_UP and emit.record is not None:
            self.onlooker.given_up(node, emit.record.worker_id)
        if emit.kind != "gone":
            return
        worker = self.worker_of(node.me)
        if worker is not None:
            self.trace.event(self.net.now, node.name, "left", node.me.epoch)
            self.net.push(self.net.now, worker.dies)
            self.net.after(MS, self._prove, node.me)
            self.net.after(S, self.start, int(node.name[1:]))

    def _reap(self) -> None:
        if not self.line.is_away and any(not worker.node.frozen for worker in self.living):
            self.store.reap()
        self.net.after(REAP_NS, self._reap)

    # -- work --------------------------------------------------------------------------------------------

    def submit(
        self, count: int, *, tiers: Sequence[int], run_ns: Sequence[int], to: int | None = None
    ) -> None:
        """`count` jobs; worker `to` hears of them first, and has them alone for a moment."""
        jobs = []
        for _ in range(count):
            self._jobs += 1
            low, high = run_ns
            job = f"{self._jobs:08x}-0000-7000-8000-000000000000"
            jobs.append((job, self.rng.choice(tiers), self.rng.randint(low, high)))
        self._favoured = None if to is None else self.workers.get(f"w{to}")
        self.store.enqueue(jobs)
        self._favoured = None

    def _wake(self, count: int) -> None:
        if self._favoured is not None and self._favoured.node.alive:
            self._favoured.later(0, self._favoured.woken)
            self.net.after(ALONE_NS, self._wake_some, count)
        else:
            self.net.after(MS, self._wake_some, count)

    def _wake_some(self, count: int) -> None:
        idle = [worker for worker in self.living if worker.free > 0 and not worker.is_draining]
        for worker in self.rng.sample(idle, min(count, len(idle))):
            worker.later(0, worker.woken)

    # -- faults ------------------------------------------------------------------------------------------

    def step(self, where: str, thief: NodeRef, victim: NodeRef | None) -> None:
        """A boundary of a theft has been reached."""
        blow = self.points.blow(where)
        whom = thief if blow.startswith("thief") else victim
        if whom is None or not blow:
            return
        if blow.endswith("dies"):
            self.kill(whom)
        else:
            self.stop(whom)

    def body_of(self, frame: bytes) -> object:
        if self._frame[0] is not frame:
            self._frame = (frame, _frame_of(frame).body)
        return self._frame[1]

    def _meddle(self, sender: SimNode, to: Address, frame: bytes) -> tuple[int, ...] | None:
        body = self.body_of(frame)
        message = _NAMES.get(type(body), "")
        if not message:
            return (0,)
        self.trace.event(self.net.now, sender.name, message, to.host)
        where = _MESSAGE_STEPS.get(message)
        other = self.net.running.get(to)
        if isinstance(body, Offer):
            thief = None if other is None else other.me
            tiers = self.habits[int(to.host.rpartition(".")[2]) - 1].tiers
            self.onlooker.offers(sender, thief, tiers, body)
        if where is not None and other is not None:
            pair = (other.me, sender.me) if message in {"offer", "noted"} else (sender.me, other.me)
            self.net.push(self.net.now, self.step, where, *pair)
        match self.points.on_the_way(message):
            case "lost":
                return ()
            case "doubled":
                return (0, self.net.chance(50 * MS))
            case "late":
                return (100 * MS + self.net.chance(4 * S),)
            case "reset":
                return None
            case _:
                return (0,)

    def heal(self) -> None:
        """Every fault is over; who sleeps wakes up, who is dead comes back."""
        self.points.heal()
        self.net.network.heal()
        self.line.away_until_ns = self.line.slow_until_ns = 0
        for worker in self.living:
            worker.lies = 0
