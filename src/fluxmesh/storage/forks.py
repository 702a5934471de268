"""Before a fork, every connection to a file is closed, at a moment when nobody uses it.

SQLite forbids to carry an open database into a child: its file locks belong to the process that took them,
but its notes of them are copied, so the child would take the parent's locks for its own and read or write
without any, or wait for one that nobody in it will ever give back (sqlite.org/howtocorrupt.html, 2.6).
The parent opens its connections anew when it next needs them; the child opens a storage of its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final, Protocol

PATIENCE_S: Final = 10.0  # longer than any transaction waits for another process


class Owner(Protocol):
    """Holds `fork_lock` while it uses its connection; `close` closes it, and the next use opens it."""

    fork_lock: threading.Lock

    def close(self) -> None: ...


opening = threading.Lock()  # held while a connection of no owner is open
_owners: weakref.WeakSet[Owner] = weakref.WeakSet()
_taken: list[threading.Lock] = []


def watch(owner: Owner) -> None:
    """Have the owner's connection closed before each fork from now on."""
    with opening:
        _owners.add(owner)


def _before() -> None:
    if not opening.acquire(timeout=PATIENCE_S):
        return
    _taken.append(opening)
    for owner in list(_owners):
        if owner.fork_lock.acquire(timeout=PATIENCE_S):
            _taken.append(owner.fork_lock)
            owner.close()


def _after() -> None:
    while _taken:
        _taken.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
