"""What the system says of a process: its state, and whether it is still there. On Linux it is asked exactly;
elsewhere less is known, and nothing is taken for granted."""

from __future__ import annotations

import os
import select
from enum import Enum, auto
from pathlib import Path
from typing import Final

_STATES_AFTER: Final = ")"  # the name before it, in parentheses, may hold anything


class ProcessState(Enum):
    RUNS = auto()  # or sleeps, or nobody knows
    STOPPED = auto()  # by a signal: it goes on when somebody says so
    TRACED = auto()  # a debugger holds it
    DEAD = auto()


_BY_LETTER: Final = {
    "T": ProcessState.STOPPED,
    "t": ProcessState.TRACED,
    "Z": ProcessState.DEAD,
    "X": ProcessState.DEAD,
    "x": ProcessState.DEAD,
}
_HAS_PROC: Final = os.path.exists("/proc/self/stat")


def process_state(pid: int) -> ProcessState:
    """The state of a process (of its first thread). RUNS where the system does not tell."""
    if not _HAS_PROC:
        return ProcessState.RUNS
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except FileNotFoundError:
        return ProcessState.DEAD
    except OSError:
        return ProcessState.RUNS
    letter = text.rpartition(_STATES_AFTER)[2].split(maxsplit=1)[0]
    return _BY_LETTER.get(letter, ProcessState.RUNS)


class ParentWatch:
    """Whether the process that started this one is still there. Its number may be given to another after its
    death, so it is looked at only while it is certainly our parent; on Linux a pidfd keeps to the process
    itself."""

    def __init__(self, pid: int) -> None:
        """`pid`: as the parent gave it. It may be gone already."""
        self.pid = pid
        self._fd = -1
        if hasattr(os, "pidfd_open"):
            try:
                self._fd = os.pidfd_open(pid)
            except OSError:
                pass  # gone, or forbidden: the number of our parent tells
        # Asked after that: if it is our parent still, then the descriptor is no other's.
        self._was_there = os.getppid() == pid
        if not self._was_there:
            self.close()

    def fileno(self) -> int:
        """A descriptor that can be read from its end on; -1: there is none."""
        return self._fd

    def gone(self) -> bool:
        if not self._was_there:
            return True
        if self._fd >= 0:
            return bool(select.select([self._fd], [], [], 0)[0])
        return os.getppid() != self.pid

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
