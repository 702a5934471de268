"""Slots: what is free, and what the reserve keeps."""

from __future__ import annotations

from fluxmesh.worker.slots import Slots


def test_without_a_reserve_every_free_slot_is_open_to_all() -> None:
    slots = Slots(3, {})
    slots.enter(2)
    assert (slots.occupied, slots.free, slots.open_to_all(), slots.lacking()) == (1, 2, 2, ())


def test_a_reserve_lacks_what_its_tier_does_not_use() -> None:
    slots = Slots(8, {0: 2, 1: 1})
    assert slots.lacking() == (2, 1, 0, 0)
    assert slots.open_to_all() == 5
    for _ in range(5):
        slots.enter(3)
    assert slots.open_to_all() == 0
    slots.enter(0)
    assert (slots.lacking(), slots.open_to_all()) == ((1, 1, 0, 0), 0)
    for _ in range(2):
        slots.enter(0)
    assert (slots.free, slots.lacking(), slots.open_to_all()) == (0, (0, 1, 0, 0), 0)
    slots.leave(3)
    assert (slots.free, slots.open_to_all()) == (1, 0)


def test_what_leaves_frees_its_tiers_share() -> None:
    slots = Slots(2, {0: 1})
    slots.enter(0)
    slots.enter(2)
    slots.leave(0)
    assert (slots.lacking(), slots.open_to_all()) == ((1, 0, 0, 0), 0)
