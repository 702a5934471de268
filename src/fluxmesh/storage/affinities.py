"""The part of the work that belongs to a worker: bounded as it is told, and asked as it stands.

Every backend keeps what `kept` leaves of it, and judges by the rules of `Own` and of the two instants below.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from fluxmesh.affinity import SLOT_BITMAP_BYTES, SLOTS, has_slot
from fluxmesh.storage.values import AFFINITY_WINDOW, NOBODYS_AFTER_S, STRICT_S, Affinity

PARTS_MOST: Final = 128
NAMES_BYTES_MOST: Final = 256 << 10  # of queues and tasks, in all parts
AHEAD_BYTES_MOST: Final = 1 << 20  # payloads of jobs that were passed by for the sake of own ones
OTHERS_MOST: Final = 1_000  # jobs of others that one look at a queue and tier walks past, at full weight
STRICT_US: Final = round(STRICT_S * 1e6)
_NOBODYS_AFTER_US: Final = round(NOBODYS_AFTER_S * 1e6)


def kept(affinity: Affinity) -> Affinity | None:
    """What is kept of it: nothing of one that is out of bounds, or that means nothing."""
    if not 0 < affinity.weight <= 1 or not 0 < len(affinity.parts) <= PARTS_MOST:
        return None
    names = 0
    for part in affinity.parts:
        if len(part.slots) != SLOT_BITMAP_BYTES:
            return None
        names += sum(len(name) for name in (*part.queues, *part.tasks))
    return affinity if names <= NAMES_BYTES_MOST else None


def is_everybodys(since_us: int, now_us: int) -> bool:
    """Whether a job that became ready then counts as everybody's own by now. One of the future does too: the
    clock went back."""
    return not 0 <= now_us - since_us <= _NOBODYS_AFTER_US


def is_kept_apart(since_us: int, now_us: int) -> bool:
    """Whether a job that became ready then is kept for its owner still, at full weight."""
    return 0 <= now_us - since_us < STRICT_US


class Own(Struct, frozen=True):
    """What belongs to one worker, by queue: for each the bitmaps of its slots with its tasks."""

    weight: float
    by_queue: dict[str, tuple[tuple[bytes, frozenset[str]], ...]]

    @property
    def window(self) -> int:
        """So many candidates of a queue and tier are looked at for one that is own."""
        return 1 + int(AFFINITY_WINDOW * self.weight)

    @property
    def is_strict(self) -> bool:
        return self.weight >= 1

    def has(self, queue: str, task: str, slot: int | None) -> bool:
        """Whether this job is its own."""
        for slots, tasks in self.by_queue.get(queue, ()):
            if task in tasks if slot is None else 0 <= slot < SLOTS and has_slot(slots, slot):
                return True
        return False


def own_of(affinity: Affinity) -> Own:
    """Of one that was kept."""
    by_queue: dict[str, tuple[tuple[bytes, frozenset[str]], ...]] = {}
    for part in affinity.parts:
        entry = (part.slots, frozenset(part.tasks))
        for queue in part.queues:
            by_queue[queue] = (*by_queue.get(queue, ()), entry)
    return Own(affinity.weight, by_queue)
