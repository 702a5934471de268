"""Timers by purpose."""

from __future__ import annotations

from fluxmesh.mesh.timers import Timers


def test_timers_fire_in_the_order_in_which_they_are_due() -> None:
    timers = Timers()
    for name, at in (("late", 30), ("first", 10), ("second", 20), ("also second", 20)):
        timers.arm((name, 0), at)
    fired = []
    while (timer := timers.pop_due(25)) is not None:
        fired.append(timer[0])
    assert fired == ["first", "second", "also second"]
    assert (timers.next_ns(), len(timers)) == (30, 1)


def test_arming_an_armed_timer_moves_it() -> None:
    timers = Timers()
    timers.arm(("probe", 1), 10)
    timers.arm(("probe", 1), 50)
    assert timers.pop_due(49) is None
    timers.arm(("probe", 1), 20)
    assert timers.pop_due(20) == ("probe", 1)
    assert timers.next_ns() is None


def test_a_disarmed_timer_does_not_fire_and_one_of_another_number_does() -> None:
    timers = Timers()
    timers.arm(("probe", 1), 10)
    timers.arm(("probe", 2), 11)
    timers.disarm(("probe", 1))
    timers.disarm(("never armed", 0))
    assert timers.pop_due(100) == ("probe", 2)
    assert timers.pop_due(100) is None


def test_moving_a_timer_for_ever_takes_no_more_memory() -> None:
    timers = Timers()
    for at in range(100_000):
        timers.arm(("probe", at % 3), at)
    assert len(timers) == 3
    assert len(timers._heap) < 200
