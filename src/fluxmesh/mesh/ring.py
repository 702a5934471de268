"""Where a key belongs: consistent hashing over the slots that storage uses as well.

Each worker has `virtual_nodes` points, xxh3_64("{worker_id}-{i}") for i from 0. The circle has SLOTS slots of
equal size; slot s begins at s << 52, a key lies in slot xxh3_64(key) >> 52, and a slot belongs to the worker
of the first point at or after its beginning, clockwise. Of two equal points that of the lower worker id
counts. (Karger et al., Consistent hashing and random trees, 1997; the slots are ours.)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Final

import xxhash
from msgspec import Struct

from fluxmesh.affinity import SLOT_BITMAP_BYTES, SLOTS

CANDIDATES_TRIED: Final = 64  # hashes of a key, for its candidates
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
    """A pure function of the set of members: {worker_id: virtual_nodes}, in whatever order.

    Never changed; another set is another ring. Its table is made at the first question.
    """

    def __init__(self, members: Mapping[str, int]) -> None:
        self.members: Final = dict(sorted(members.items()))
        self._table: list[str] = []

    def __len__(self) -> int:
        return len(self.members)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ring) and self.members == other.members

    def __hash__(self) -> int:
        return hash(tuple(self.members.items()))

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
        """The owner, then others to whom the key may be passed on, each once: by hashing again with another
        seed, so that the keys of one owner go to all others and not to its neighbour. Not necessarily all."""
        table = self._table or self._made()
        hashed = key.encode()
        seen: set[str] = set()
        for seed in range(CANDIDATES_TRIED if table else 0):
            worker_id = table[_hash(hashed, seed) >> _SHIFT]
            if worker_id not in seen:
                seen.add(worker_id)
                yield worker_id
                if len(seen) == len(self.members):
                    return

    def _made(self) -> list[str]:
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
            self._table = owners
        return self._table
