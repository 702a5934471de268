"""Clocks: wall time may be stepped, the others do not go back, and the hand-moved one moves them together."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxmesh.clock import (
    OFFSETS_ENV,
    SKEW_ENV,
    US,
    ManualClock,
    OffsetClock,
    SkewedClock,
    SystemClock,
    system_clock,
)


def test_a_manual_clock_stands_still_until_it_is_told_to_move() -> None:
    clock = ManualClock()
    before = (clock.wall_us(), clock.boot_us(), clock.mono_s())
    assert (clock.wall_us(), clock.boot_us(), clock.mono_s()) == before
    clock.advance(1.5)
    after = (clock.wall_us(), clock.boot_us(), clock.mono_s())
    assert after == (before[0] + 1_500_000, before[1] + 1_500_000, before[2] + 1.5)


def test_a_manual_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="step_wall"):
        ManualClock().advance(-1)


def test_stepping_one_clock_leaves_the_others_alone() -> None:
    clock = ManualClock()
    wall, boot, mono = clock.wall_us(), clock.boot_us(), clock.mono_s()
    clock.step_wall(-600)
    assert (clock.wall_us(), clock.boot_us(), clock.mono_s()) == (wall - 600 * US, boot, mono)
    clock.step_boot(600)
    assert (clock.boot_us(), clock.mono_s()) == (boot + 600 * US, mono)


def test_a_reboot_is_another_boot_id_and_starts_time_since_boot_anew() -> None:
    clock = ManualClock()
    first, boot = clock.boot_id(), clock.boot_us()
    clock.reboot("boot-2")
    assert clock.boot_id() == "boot-2" != first
    assert clock.boot_us() < boot


def test_the_machines_clocks_agree_between_two_readers_and_do_not_go_back() -> None:
    one, two = SystemClock(), SystemClock()
    assert one.boot_id() == two.boot_id() != ""
    readings = [one.boot_us(), two.boot_us(), one.boot_us()]
    assert readings == sorted(readings)
    assert one.mono_s() <= two.mono_s()


def test_everybody_who_shares_an_offsets_file_sees_a_step_at_once(tmp_path: Path) -> None:
    path = tmp_path / "offsets"
    OffsetClock.write(path)
    one, two = OffsetClock(path), OffsetClock(path)
    wall, boot = one.wall_us(), one.boot_us()
    OffsetClock.write(path, wall_us=3_600 * US, boot_us=-60 * US)
    for clock in (one, two):
        assert clock.wall_us() - wall >= 3_600 * US
        assert boot - 61 * US < clock.boot_us() < boot


def test_the_environment_names_the_offsets_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(system_clock()) is SystemClock
    path = tmp_path / "offsets"
    OffsetClock.write(path, wall_us=US)
    monkeypatch.setenv(OFFSETS_ENV, str(path))
    assert isinstance(system_clock(), OffsetClock)


def test_the_wall_clock_of_one_machine_can_be_wrong_beside_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SKEW_ENV, "-3600")
    wrong, right = system_clock(), SystemClock()
    assert isinstance(wrong, SkewedClock)
    assert abs(wrong.wall_us() + 3_600 * US - right.wall_us()) < 10 * US
    assert abs(wrong.boot_us() - right.boot_us()) < 10 * US
    assert wrong.boot_id() == right.boot_id()
