"""What is yet to be told: one slot a node, each sent a bounded number of times, the least told first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from fluxmesh.mesh.messages import Record, Standing

SLOTS_MAX: Final = 4_096  # beyond it what was told most often goes
# Own words stand before all others, then what takes a node out of rings and targets.
_KINDS: Final = 4
_KIND_OF: Final = {Standing.LEFT: 1, Standing.DEAD: 1, Standing.SUSPECT: 2, Standing.ALIVE: 3}


@dataclass(slots=True, eq=False)
class Slot:
    record: Record
    kind: int
    sends: int = 0


@dataclass(slots=True)
class News:
    """The queue of updates. Buckets by (own or not, times sent, kind) keep a packet's choice independent of
    the length of the queue."""

    me: str
    slots: dict[str, Slot] = field(default_factory=dict)
    _buckets: list[dict[str, Slot]] = field(default_factory=list)
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.slots)

    def put(self, record: Record) -> None:
        """A record that was just adopted; what was queued about the same node is outdated by it."""
        self.drop(record.worker_id)
        if len(self.slots) >= SLOTS_MAX:
            self._drop_most_told()
        own = record.worker_id == self.me
        slot = Slot(record, 0 if own else _KIND_OF[Standing(record.standing)])
        self.slots[record.worker_id] = slot
        self._bucket(slot)[record.worker_id] = slot

    def drop(self, worker_id: str) -> None:
        slot = self.slots.pop(worker_id, None)
        if slot is not None:
            self._take_out(slot)

    def clear(self) -> None:
        self.slots.clear()
        self._buckets.clear()

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
        for worker_id in worker_ids:
            slot = self.slots.get(worker_id)
            if slot is None:
                continue
            self._take_out(slot)
            slot.sends += 1
            if slot.sends >= limit:
                del self.slots[worker_id]
            else:
                self._bucket(slot)[worker_id] = slot

    def _bucket(self, slot: Slot) -> dict[str, Slot]:
        index = slot.sends * _KINDS + slot.kind
        while len(self._buckets) <= index:
            self._buckets.append({})
        return self._buckets[index]

    def _take_out(self, slot: Slot) -> None:
        bucket = self._bucket(slot)
        del bucket[slot.record.worker_id]
        if not bucket:
            bucket.clear()  # an emptied dict keeps the room of its best days, a cleared one does not

    def _in_order(self) -> Iterator[Slot]:
        for bucket in self._buckets:
            yield from reversed(bucket.values())

    def _drop_most_told(self) -> None:
        for bucket in reversed(self._buckets):
            for worker_id in bucket:
                if worker_id != self.me:
                    self.drop(worker_id)
                    self.dropped += 1
                    return
