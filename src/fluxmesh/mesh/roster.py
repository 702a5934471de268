"""What a node makes of its members: who is on the ring of which queue, who has too much, what is ours.

Pure: members as the core sees them in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

from msgspec import Struct

from fluxmesh.mesh.effects import MemberView
from fluxmesh.mesh.messages import Flag, Load, Meta, NodeRef, Standing
from fluxmesh.mesh.ring import Ring
from fluxmesh.mesh.timing import LOAD_STALE_MS
from fluxmesh.mesh.view import LIVING

BOUND_LEAST: Final = 1.25  # times the mean load per slot
RELEASE_AT: Final = 0.8  # of the bound: a load that trembles about it does not move keys each second


class Part(Struct, frozen=True):
    """Queues that share a ring: our slots of it as a bitmap (affinity.has_slot), and those of our tasks, by
    name, whose own slot is among them."""

    queues: tuple[str, ...]
    slots: bytes
    tasks: tuple[str, ...]


class Share(Struct, frozen=True):
    """The part of the work that is ours before others'. A queue that no part names has no order but that of
    arrival: the weight is 0, we are not on its ring, or nobody else is."""

    weight: float = 0.0
    parts: tuple[Part, ...] = ()


class Snapshot(Struct, frozen=True):
    """The others, and ourselves, at one instant. `in_ring` names the workers that have their place; `rings`
    are by queue; `claim_share` is our part of the capacity of all that live."""

    taken_ns: int
    members: tuple[MemberView, ...]
    me: tuple[MemberView, ...]  # one; none before the first look
    in_ring: frozenset[str]
    rings: Mapping[str, Ring]
    ring_recalculations: int
    share: Share = Share()
    claim_share: float = 1.0

    def peers(self) -> Iterable[MemberView]:
        """Members that live, or may."""
        return (view for view in self.members if view.record.standing in LIVING)

    def over(self) -> dict[str, tuple[str, ...]]:
        """Who passes its slots on, by queue; only queues where somebody does."""
        return {queue: tuple(sorted(ring.over)) for queue, ring in self.rings.items() if ring.over}


def bound_of(weight: float) -> float | None:
    """How many times the mean load per slot an owner may have before it passes its slots on; None: any."""
    return None if weight >= 1 else max(BOUND_LEAST, 1 / (1 - weight))


def over_bound(
    loads: Mapping[str, tuple[int, int] | None], before: Set[str], weight: float
) -> frozenset[str]:
    """Which of these have too much. `loads`: jobs that run or wait, and slots; None: not known, so it stays
    as it was. `before`: who had too much so far, and has to fall well below the bound. One with a slot for
    each of its jobs never has."""
    bound = bound_of(weight)
    known = [load for load in loads.values() if load is not None]
    slots = sum(load[1] for load in known)
    if bound is None or not weight or len(loads) < 2 or not slots:
        return frozenset()
    most = max(1.0, bound * sum(load[0] for load in known) / slots)
    over = set()
    for worker_id, load in loads.items():
        was_over = worker_id in before
        if load is None:
            is_over = was_over
        else:
            is_over = load[0] > most * (RELEASE_AT if was_over else 1.0) * max(load[1], 1)
        if is_over:
            over.add(worker_id)
    return frozenset(over)


class Roster:
    """Who is on the rings, which needs a memory: a member enters once it has answered us directly and says
    that it is ready (its view is eligible), and stays, suspect and degraded as it may be, until it is dead,
    has left or drains. So a stall of seconds moves no key, and back again. `tasks`: the names of ours."""

    def __init__(self, me: NodeRef, meta: Meta, tasks: tuple[str, ...] = ()) -> None:
        self._me = me
        self._meta = meta
        self._tasks = tasks
        self._entered: dict[str, int] = {}  # worker id -> epoch
        self._rings: dict[str, tuple[dict[str, int], Ring]] = {}
        self._recalculations = 0
        self._share = Share(meta.affinity_weight)
        self._shared: list[tuple[Ring, tuple[str, ...]]] = []

    def look(self, members: Sequence[MemberView], flags: int, now_ns: int) -> Snapshot:
        """`members` as the core lists them; `flags` are our own."""
        me = tuple(view for view in members if view.record.worker_id == self._me.worker_id)
        members = tuple(view for view in members if view.record.worker_id != self._me.worker_id)
        entered: dict[str, int] = {}
        weights: dict[str, dict[str, int]] = {queue: {} for queue in self._meta.queues}
        if flags & Flag.READY and not flags & Flag.DRAINING:
            entered[self._me.worker_id] = self._me.epoch
            _place(weights, self._me.worker_id, self._meta)
        for view in members:
            if self._belongs(view):
                entered[view.record.worker_id] = view.record.epoch
                if view.meta is not None:
                    _place(weights, view.record.worker_id, view.meta)
        self._entered = entered
        loads = {view.record.worker_id: _jobs_and_slots(view) for view in (*me, *members)}
        rings = {queue: self._ring(queue, of_queue, loads) for queue, of_queue in weights.items()}
        self._rings = {queue: self._rings[queue] for queue in rings}
        return Snapshot(
            now_ns,
            members,
            me,
            frozenset(entered),
            rings,
            self._recalculations,
            self._share_of(rings),
            self._claim_share(members),
        )

    def _belongs(self, view: MemberView) -> bool:
        record, load = view.record, view.load
        if record.standing not in LIVING or view.meta is None:
            return False
        if self._entered.get(record.worker_id) != record.epoch:
            return view.eligible and record.standing == Standing.ALIVE
        known = load is not None and load.epoch == record.epoch and load.age_ms <= LOAD_STALE_MS
        return not (load is not None and known and load.flags & Flag.DRAINING)

    def _ring(self, queue: str, weights: dict[str, int], loads: Mapping[str, tuple[int, int] | None]) -> Ring:
        known = self._rings.get(queue)
        before = known[1].over if known is not None else frozenset()
        on_ring = {worker_id: loads.get(worker_id) for worker_id in weights}
        over = over_bound(on_ring, before, self._meta.affinity_weight)
        if known is not None and known[0] == weights:
            if over == before:
                return known[1]
            ring = known[1].passing(over)
        else:
            ring = Ring(weights, over)
        self._rings[queue] = (weights, ring)
        self._recalculations += 1
        return ring

    def _share_of(self, rings: Mapping[str, Ring]) -> Share:
        """The same value for as long as nothing of it changes."""
        weight, me = self._meta.affinity_weight, self._me.worker_id
        by_ring: dict[Ring, list[str]] = {}
        for queue in self._meta.queues if weight else ():
            ring = rings[queue]
            if len(ring) > 1 and me in ring.members:
                by_ring.setdefault(ring, []).append(queue)
        shared = [(ring, tuple(queues)) for ring, queues in by_ring.items()]
        if shared == self._shared:
            return self._share
        self._shared = shared
        parts = tuple(
            Part(queues, ring.owned_slots(me), tuple(task for task in self._tasks if ring.owner(task) == me))
            for ring, queues in shared
        )
        self._share = Share(weight, parts)
        return self._share

    def _claim_share(self, members: Sequence[MemberView]) -> float:
        own, queues = max(self._meta.capacity, 1), set(self._meta.queues)
        everybody = own
        for view in members:
            if view.record.standing not in LIVING:
                continue
            if view.meta is None:
                everybody += own
            elif not queues.isdisjoint(view.meta.queues):
                everybody += view.meta.capacity
        return own / everybody


def _jobs_and_slots(view: MemberView) -> tuple[int, int] | None:
    load: Load | None = view.load
    if load is None or load.epoch != view.record.epoch or load.age_ms > LOAD_STALE_MS:
        return None
    return load.running + load.queued, load.capacity


def _place(weights: dict[str, dict[str, int]], worker_id: str, meta: Meta) -> None:
    for queue in meta.queues:
        weights.setdefault(queue, {})[worker_id] = meta.virtual_nodes
