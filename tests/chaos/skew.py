"""A machine whose clock is wrong: this process's wall clock, shifted by a file that the nemesis writes.

Not fluxmesh's OffsetClock: a storage with a clock of its own (Redis) is to keep it, and only its clients
are off.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Final

from fluxmesh import clock
from fluxmesh.clock import SystemClock, WallUs

SKEW_ENV: Final = "FLUXMESH_TEST_SKEW"
_US: Final = struct.Struct("=q")
_applied: list[Path] = []


def write(path: Path, skew_us: int) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(handle, _US.pack(skew_us), 0)
    finally:
        os.close(handle)


def apply_named() -> None:
    """Skew the clock of this process, if the environment names a file for it."""
    name = os.environ.get(SKEW_ENV)
    if not name or _applied:
        return
    path = Path(name)
    _applied.append(path)
    with path.open("rb") as file:
        shift = mmap.mmap(file.fileno(), _US.size, access=mmap.ACCESS_READ)
    true_wall_us = SystemClock.wall_us

    def wall_us(self: SystemClock) -> WallUs:
        return WallUs(true_wall_us(self) + _US.unpack_from(shift)[0])

    if clock.SystemClock is not SystemClock:
        raise RuntimeError("clock.SystemClock was replaced")
    SystemClock.wall_us = wall_us  # type: ignore[method-assign]
