"""Where a key lies: one of SLOTS slots, which the ring and the storage know alike.

A job's key is its affinity key, else the name of its task. Slot = xxh3_64(key) >> 52; a set of slots is a
bitmap of SLOT_BITMAP_BYTES, in which slot 0 is the highest bit of the first byte.
"""

from __future__ import annotations

from typing import Final

import xxhash

SLOTS: Final = 4_096
SLOT_BITMAP_BYTES: Final = SLOTS // 8
_SHIFT: Final = 64 - 12
_hash: Final = xxhash.xxh3_64_intdigest


def slot_of(key: str) -> int:
    """The slot of a key, 0 to SLOTS - 1."""
    return _hash(key.encode()) >> _SHIFT


def has_slot(bitmap: bytes, slot: int) -> bool:
    """Whether a slot is in a set of slots."""
    return bool(bitmap[slot >> 3] & (0x80 >> (slot & 7)))
