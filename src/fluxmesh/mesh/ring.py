"""Where a key belongs: consistent hashing over the slots that storage uses as well.

Each worker has `virtual_nodes` points, xxh3_64("{worker_id}-{i}") for i from 0. The circle has SLOTS slots of
equal size; slot s begins at s << 52, a key lies in slot xxh3_64(key) >> 52, and a slot belongs to the worker
of the first point at or after its beginning, clockwise. Of two equal points that of the lower worker id
counts. (Karger et al., Consistent hashing and random trees, 1997; the slots are ours.)

A worker that has too much passes its slots on: each by hashing the slot again, so that they go to all others
and not to the neighbour, who would be the next to have too much. (The bound is that of Mirrokni, Thorup and
Zadimoghaddam, Consistent hashing with bounded loads, 2016; the way to the next one is ours.)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Set
from functools import lru_cache
from itertools import groupby
from typing import Final

import xxhash
from msgspec import Struct

from fluxmesh.affinity import SLOT_BITMAP_BYTES, SLOTS

CANDIDATES_TRIED: Final = 64  # hashes of a slot, for those to whom it may be passed on
_SHIFT: Final = 64 - 12
_NOWHERE: Final = 1 << 64  # beyond every point
_hash: Final = xxhash.xxh3_64_intdigest


class Span(Struct, frozen=True):
    """Neighbouring slots of one owner, from `start` up to, not with, `end`: parts of the circle, 0 to 1."""

    start: float
    end: float
    worker_id: str


@lru_cache(maxsize=1_024)
def _points(worker_id: str, virtual_nodes: int) -> array[int]:
    """The points of a worker that can count: the first of each slot."""
    first: dict[int, int] = {}
    for number in range(virtual_nodes):
        point = _hash(f"{worker_id}-{number}".encode())
        slot = point >> _SHIFT
        if point < first.get(slot, _NOWHERE):
            first[slot] = point
    return array("Q", first.values())


class Ring:
    """A pure function of the set of members, {worker_id: virtual_nodes}, in whatever order, and of those of
    them that are `over` the bound of load and pass their slots on. If all are, nobody does.

    Never changed; other sets are another ring. Its table is made at the first question.
    """

    def __init__(self, members: Mapping[str, int], over: Set[str] = frozenset()) -> None:
        self.members: Final = dict(sorted(members.items()))
        self.over: Final = frozenset(over & self.members.keys())
        self._drawn: list[str] = []  # without regard to load
        self._table: list[str] = []

    def passing(self, over: Set[str]) -> Ring:
        """The ring of the same members where these are over the bound."""
        ring = Ring(self.members, over)
        ring._drawn = self._drawn
        return ring

    def __len__(self) -> int:
        return len(self.members)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ring) and (self.members, self.over) == (other.members, other.over)

    def __hash__(self) -> int:
        return hash((tuple(self.members.items()), self.over))

    def owner(self, key: str) -> str | None:
        """The worker to whom the key belongs; None if there is no worker with points."""
        table = self._table or self._made()
        return table[_hash(key.encode()) >> _SHIFT] if table else None

    def owner_of_slot(self, slot: int) -> str | None:
        table = self._table or self._made()
        return table[slot] if table else None

    def owned_slots(self, worker_id: str) -> bytes:
        """One bit a slot, SLOT_BITMAP_BYTES in all; slot 0 is the highest bit of the first byte."""
        bits = 0
        for slot, owner in enumerate(self._table or self._made()):
            if owner == worker_id:
                bits |= 1 << (SLOTS - 1 - slot)
        return bits.to_bytes(SLOT_BITMAP_BYTES, "big")

    def spans(self) -> list[Span]:
        """The circle from 0 to 1 without gaps. One that crosses its end is two spans."""
        spans: list[Span] = []
        start = 0
        for worker_id, slots in groupby(self._table or self._made()):
            end = start + sum(1 for _ in slots)
            spans.append(Span(start / SLOTS, end / SLOTS, worker_id))
            start = end
        return spans

    def shares(self) -> dict[str, float]:
        """The part of the circle that each member owns; exactly 1 in all, unless nobody has a point."""
        counts = dict.fromkeys(self.members, 0)
        for worker_id in self._table or self._made():
            counts[worker_id] += 1
        return {worker_id: count / SLOTS for worker_id, count in counts.items()}

    def candidates(self, key: str) -> Iterator[str]:
        """The owner, then others to whom the key would be passed on, each once. Not necessarily all, and none
        that is over the bound, unless all are."""
        table = self._table or self._made()
        if not table:
            return
        slot = _hash(key.encode()) >> _SHIFT
        owner = table[slot]
        yield owner
        seen = {owner, *(() if len(self.over) == len(self.members) else self.over)}
        for worker_id in self._next_of(slot):
            if worker_id not in seen:
                seen.add(worker_id)
                yield worker_id

    def _next_of(self, slot: int) -> Iterator[str]:
        """Whose points the hashes of a slot meet, one after another."""
        hashed = slot.to_bytes(2, "big")
        for seed in range(1, CANDIDATES_TRIED + 1):
            yield self._drawn[_hash(hashed, seed) >> _SHIFT]

    def _made(self) -> list[str]:
        drawn = self._drawn = self._drawn or self._draw()
        over = self.over
        if not over or len(over) == len(self.members):
            self._table = drawn
            return drawn
        others = [worker_id for worker_id in self.members if worker_id not in over]
        self._table = [
            self._passed_on(slot, others) if owner in over else owner for slot, owner in enumerate(drawn)
        ]
        return self._table

    def _passed_on(self, slot: int, others: list[str]) -> str:
        for worker_id in self._next_of(slot):
            if worker_id not in self.over:
                return worker_id
        return others[_hash(slot.to_bytes(2, "big")) % len(others)]  # they have hardly a point

    def _draw(self) -> list[str]:
        nearest = [_NOWHERE] * SLOTS
        owners = [""] * SLOTS
        for (
            worker_id,
            virtual_nodes,
        ) in self.members.items():  # by id: an equal point of a higher id is too late
            for point in _points(worker_id, virtual_nodes):
                slot = point >> _SHIFT
                if point < nearest[slot]:
                    nearest[slot] = point
                    owners[slot] = worker_id
        following = next((owner for owner in owners if owner), "")
        if following:
            for slot in range(SLOTS - 1, -1, -1):  # a slot without a point belongs to the next one's first
                following = owners[slot] = owners[slot] or following
            return owners
        return []
