"""What is yet to be told: one slot a node, each sent a bounded number of times, the least told first."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from fluxmesh.mesh.member import Member
from fluxmesh.mesh.messages import Record

SLOTS_MAX: Final = 4_096  # beyond it what was told most often goes
# Own words stand before all others, then what takes a node out of rings and targets. By the number of the
# standing: Alive, Suspect, Dead, Left.
_KIND_OF: Final = (3, 2, 1, 1)
_OWN_KIND: Final = 0
_KINDS: Final = 4


@dataclass(slots=True, eq=False)
class Slot:
    record: Record
    kind: int
    bucket: dict[str, Slot]
    sends: int = 0


@dataclass(slots=True)
class News:
    """The queue of updates. Buckets by (times sent, kind) keep a packet's choice independent of the length of
    the queue."""

    me: str
    slots: dict[str, Slot] = field(default_factory=dict)
    dropped: int = 0
    _buckets: list[dict[str, Slot]] = field(default_factory=lambda: [{} for _ in range(_KINDS)])

    def __len__(self) -> int:
        return len(self.slots)

    def put(self, record: Record) -> None:
        """A record that was just adopted; what was queued about the same node is outdated by it."""
        worker_id = record.worker_id
        slot = self.slots.get(worker_id)
        if slot is not None:
            _take_out(slot)
        elif len(self.slots) >= SLOTS_MAX:
            self._drop_most_told()
        kind = _OWN_KIND if worker_id == self.me else _KIND_OF[record.standing]
        bucket = self._buckets[kind]
        bucket[worker_id] = self.slots[worker_id] = Slot(record, kind, bucket)

    def clear(self) -> None:
        self.slots.clear()
        for bucket in self._buckets:
            bucket.clear()

    def sends(self, worker_id: str) -> int | None:
        """How often the news of this node was sent; None when there is none left."""
        slot = self.slots.get(worker_id)
        return None if slot is None else slot.sends

    def candidates(self, limit: int) -> list[Record]:
        """What a packet should carry, most urgent first: our own word, then the least told, of those Left and
        Dead before Suspect before Alive."""
        picked: list[Record] = []
        own = self.slots.get(self.me)
        if own is not None:
            picked.append(own.record)
        for slot in self._in_order():
            if len(picked) >= limit:
                break
            if slot is not own:
                picked.append(slot.record)
        return picked

    def sent(self, worker_ids: Iterable[str], *, limit: int) -> None:
        """These went out once more; what was sent `limit` times is done."""
        buckets = self._buckets
        for worker_id in worker_ids:
            slot = self.slots.get(worker_id)
            if slot is None:
                continue
            _take_out(slot)
            slot.sends += 1
            if slot.sends >= limit:
                del self.slots[worker_id]
                continue
            index = slot.sends * _KINDS + slot.kind
            while len(buckets) <= index:
                buckets.append({})
            slot.bucket = buckets[index]
            slot.bucket[worker_id] = slot

    def _in_order(self) -> Iterator[Slot]:
        for bucket in self._buckets:
            if bucket:
                yield from reversed(bucket.values())

    def _drop_most_told(self) -> None:
        for bucket in reversed(self._buckets):
            for worker_id, slot in bucket.items():
                if worker_id != self.me:
                    _take_out(slot)
                    del self.slots[worker_id]
                    self.dropped += 1
                    return


def _take_out(slot: Slot) -> None:
    bucket = slot.bucket
    del bucket[slot.record.worker_id]
    if not bucket:
        bucket.clear()  # an emptied dict keeps the room of its best days, a cleared one does not


class Circle:
    """Whom to tell next: everybody once, in an order by chance, before anybody twice."""

    def __init__(self, *, rng: random.Random) -> None:
        self._rng = rng
        self._rest: list[Member] = []

    def pick(self, living: list[Member], count: int, *, but: list[Member]) -> list[Member]:
        """Up to `count` different ones of the living, none of `but`."""
        picked: list[Member] = []
        has_begun_anew = False
        while len(picked) < count:
            if not self._rest:
                if has_begun_anew:
                    break
                has_begun_anew = True
                self._rest = list(living)
                self._rng.shuffle(self._rest)
                continue
            member = self._rest.pop()
            if member.is_living and member not in picked and member not in but:
                picked.append(member)
        return picked
