"""The only reader of clocks. Wall time, time since boot and monotonic time are different types.

* `WallUs`: microseconds since the epoch. Due times, stamps, tokens. May be stepped by an operator.
* `BootUs`: microseconds since boot, suspended time included (CLOCK_BOOTTIME). Leases of the embedded
  storage: every process of a machine reads the same value and nobody can step it. It means nothing
  beside another `boot_id`.
* `MonoS`: seconds of a monotonic clock. Durations inside one process.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final, NewType, Protocol

WallUs = NewType("WallUs", int)
BootUs = NewType("BootUs", int)
MonoS = NewType("MonoS", float)

US: Final = 1_000_000
MAX_WALL_US: Final = 253_402_300_800 * US  # the year 10000: no date library reads further

OFFSETS_ENV: Final = "FLUXMESH_TEST_CLOCK_OFFSETS"
SKEW_ENV: Final = "FLUXMESH_TEST_CLOCK_SKEW_S"
_OFFSETS = struct.Struct("=qq")
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
# Darwin's CLOCK_MONOTONIC_RAW and others count no suspended time; a lease then merely lasts longer.
_BOOT_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", None) or time.CLOCK_MONOTONIC


class Clock(Protocol):
    """Obligations: never blocks, never raises; `boot_us` and `mono_s` never go back within a boot."""

    def wall_us(self) -> WallUs: ...
    def boot_us(self) -> BootUs: ...
    def mono_s(self) -> MonoS: ...
    def boot_id(self) -> str: ...


def _read_boot_id() -> str:
    try:
        return _BOOT_ID_FILE.read_text().strip()
    except OSError:
        # Without the file a boot is told from another by when it began, to the minute.
        began = time.time() - time.clock_gettime(_BOOT_CLOCK)
        return f"since-{int(began // 60)}"


class SystemClock:
    """The machine's clocks."""

    def __init__(self) -> None:
        self._boot_id = _read_boot_id()

    def wall_us(self) -> WallUs:
        return WallUs(time.time_ns() // 1_000)

    def boot_us(self) -> BootUs:
        return BootUs(time.clock_gettime_ns(_BOOT_CLOCK) // 1_000)

    def mono_s(self) -> MonoS:
        return MonoS(time.monotonic())

    def boot_id(self) -> str:
        return self._boot_id


class OffsetClock(SystemClock):
    """The machine's clocks, shifted by two signed counts of microseconds (wall, boot) kept in a file.

    All processes that share the file see a step at the same instant; this is how the tests step the
    clocks of a running fleet. Named by the environment variable FLUXMESH_TEST_CLOCK_OFFSETS.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _OFFSETS.size, access=mmap.ACCESS_READ)

    @staticmethod
    def write(path: Path, *, wall_us: int = 0, boot_us: int = 0) -> None:
        """Step the clocks of everybody who reads `path`; creates the file."""
        flags = os.O_RDWR | os.O_CREAT
        handle = os.open(path, flags, 0o600)
        try:
            os.pwrite(handle, _OFFSETS.pack(wall_us, boot_us), 0)
        finally:
            os.close(handle)

    def wall_us(self) -> WallUs:
        return WallUs(super().wall_us() + _OFFSETS.unpack_from(self._map)[0])

    def boot_us(self) -> BootUs:
        return BootUs(super().boot_us() + _OFFSETS.unpack_from(self._map)[1])


class SkewedClock(SystemClock):
    """The machine's clocks, its wall clock wrong by so many seconds: one of several, whose storage has
    the right time. Named by the environment variable FLUXMESH_TEST_CLOCK_SKEW_S."""

    def __init__(self, skew_s: float) -> None:
        super().__init__()
        self._skew_us = round(skew_s * US)

    def wall_us(self) -> WallUs:
        return WallUs(super().wall_us() + self._skew_us)


class ManualClock:
    """A clock that moves only when told to. Wall, boot and monotonic time advance together."""

    def __init__(self, *, wall_us: int = 1_700_000_000 * US, boot_us: int = 1_000 * US) -> None:
        self._wall = wall_us
        self._boot = boot_us
        self._mono = 0
        self._boot_id = "manual-boot-1"

    def advance(self, seconds: float) -> None:
        """Let time pass. `seconds` must not be negative: use `step_wall` for a clock that is set back."""
        if seconds < 0:
            raise ValueError("time does not go back; step_wall() and step_boot() do")
        shift = round(seconds * US)
        self._wall += shift
        self._boot += shift
        self._mono += shift

    def step_wall(self, seconds: float) -> None:
        self._wall += round(seconds * US)

    def step_boot(self, seconds: float) -> None:
        self._boot += round(seconds * US)

    def reboot(self, boot_id: str) -> None:
        """Another boot of the machine: time since boot starts anew."""
        self._boot_id = boot_id
        self._boot = US

    def wall_us(self) -> WallUs:
        return WallUs(self._wall)

    def boot_us(self) -> BootUs:
        return BootUs(self._boot)

    def mono_s(self) -> MonoS:
        return MonoS(self._mono / US)

    def boot_id(self) -> str:
        return self._boot_id


def system_clock() -> Clock:
    """The clock of this process: the machine's, or a shifted one if the environment says so."""
    path, skew = os.environ.get(OFFSETS_ENV), os.environ.get(SKEW_ENV)
    if path:
        return OffsetClock(Path(path))
    return SkewedClock(float(skew)) if skew else SystemClock()
