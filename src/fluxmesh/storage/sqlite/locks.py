"""Proof of death by a file lock: the kernel frees a worker's flock when its process ends, however it ends.

A worker takes its lock before it registers and the file's name stands in its row. A lock that can be taken
proves that its process is gone; a file that is missing proves nothing. Names are random, so that a lock
is never taken twice. The file descriptor is closed in forked children, which must not keep it alive.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

from fluxmesh.errors import StorageUnreachable
from fluxmesh.ids import new_nonce

try:
    import fcntl
except ImportError:  # no flock on this system: leases alone tell
    fcntl = None  # type: ignore[assignment]

_held: weakref.WeakSet[DeathLock] = weakref.WeakSet()


class DeathLock:
    """An exclusive lock held by this process for as long as it lives."""

    def __init__(self, folder: Path) -> None:
        """Raises StorageUnreachable if the lock cannot be taken."""
        self.name = new_nonce()
        self._path = folder / self.name
        self._fd = -1
        if fcntl is None:
            return
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise StorageUnreachable(
                f"no lock can be taken in {folder}: {error.strerror}",
                hint="check that the database's folder may be written to",
            ) from error
        _held.add(self)

    def release(self) -> None:
        """Give the lock up and remove its file. Safe to call twice."""
        if self._fd < 0:
            return
        # Removed while still locked: whoever opens the name afterwards finds no file, which proves nothing.
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._fd)
        self._fd = -1

    def forget(self) -> None:
        """In a forked child: close the copy without touching the parent's lock or file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_freed(folder: Path, name: str) -> bool:
    """True only if the file is there and nobody holds its lock."""
    if fcntl is None:
        return False
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared, so that two who look at once do not take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def remove(folder: Path, name: str) -> None:
    """Remove the file of a worker that is proven dead."""
    with contextlib.suppress(OSError):
        (folder / name).unlink()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
