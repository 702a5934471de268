"""A body that forks comes back twice; the copy is ended before it does anything in the worker's name.

The child of a fork has one thread of the worker's, and copies of its jobs, its loop and its selector. Were it
to go on it would take the next job, or wait for ever for threads that it does not have.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback


def end_if_forked(pid: int, error: BaseException | None) -> None:
    """In any other process than `pid`: end it, as the main program of a forked child would have ended."""
    if os.getpid() == pid:
        return
    status = 1
    with contextlib.suppress(BaseException):  # whatever the copy is like, it must not live on
        status = _status(error)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _status(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    traceback.print_exception(error)
    return 1
