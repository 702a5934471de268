"""What the end of a child process means: words for it, and whether another takes its place. Pure."""

from __future__ import annotations

import signal
from enum import Enum, auto
from typing import Final

from fluxmesh.errors import AppImportFailed, StorageError, UsageError

EXIT_STOPPED: Final = 0
EXIT_HURRIED: Final = 1  # after a second signal; without one it is Python's exit after an uncaught error
EXIT_RETIRED: Final = 75  # a body could not be stopped: the process has to go for its slot to come back
EXIT_FENCED: Final = 76  # a newer epoch of this worker id exists, or this one was declared dead

# Repeating a start cannot mend these: the command line, the app, the storage that was named.
_HOPELESS: Final = frozenset({UsageError.exit_code, AppImportFailed.exit_code, StorageError.exit_code})

STABLE_AFTER_S: Final = 60.0  # a child that lived so long starts the back-off anew
FIRST_DELAY_S: Final = 0.5
LONGEST_DELAY_S: Final = 30.0
FREE_STALLS: Final = 3  # children that a supervisor ended because they stood still, before that costs a rest
_MAX_DOUBLINGS: Final = 16


class Next(Enum):
    """What the supervisor does when a child has ended."""

    LEAVE = auto()  # it ended as asked
    REPLACE = auto()  # at once: its end was planned
    RENEW = auto()  # its supervisor ended it because it stood still: at once, with a back-off of its own
    RESTART = auto()  # with back-off
    GIVE_UP = auto()  # end the whole worker with the child's exit code


def how_ended(code: int) -> str:
    """The exit code of `Popen.returncode` in words: it becomes part of a dead letter's reason."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    if code == EXIT_RETIRED:
        return "retired: a body could not be stopped"
    if code == EXIT_FENCED:
        return "fenced: its lease was lost"
    return f"exit status {code}"


def next_step(
    code: int,
    *,
    was_ready: bool,
    stopping: bool,
    said_so: bool,
    hopeless: bool = False,
    stalled: bool = False,
) -> Next:
    """What follows the end of a child. `was_ready`: some child of this worker has worked before. `said_so`:
    it reported its end, so that a status of 0 is its own; a body may end the process with any status.
    `hopeless`: it reported that no other would fare better. `stalled`: it was ended because it stood
    still."""
    if stopping or (code == EXIT_STOPPED and said_so):
        return Next.LEAVE
    if stalled:
        return Next.RENEW
    if code == EXIT_RETIRED:
        return Next.REPLACE
    if hopeless or (code in _HOPELESS and not was_ready):
        return Next.GIVE_UP
    return Next.RESTART


def restart_delay_s(failures: int, stalls: int = 0) -> float:
    """Rest before the restart that follows the n-th short life running: 0, 0.5, 1, 2 … 30 s. Stalls are
    counted apart, and the first few of them cost nothing: a job that blocks has retries, and they fail soon
    enough."""
    failures = max(failures, stalls - FREE_STALLS + 1 if stalls else 0)
    if failures <= 1:
        return 0.0
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 2, _MAX_DOUBLINGS))
