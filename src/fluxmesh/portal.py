"""Where blocking calls are carried out: one daemon thread with an event loop per process.

Async code is written once. A storage belongs to the loop that opened it, and programs come with no loop,
with one, or with one per test; so a storage is opened on the portal's loop, a thread waits for a coroutine
there (`run`), and another loop awaits it there, if it has no storage of its own (link.py).

A child of fork makes a portal of its own and never touches, not even closes, what it inherited: closing
would unregister the parent's sockets from the poll set that both share. When the interpreter ends, storages
are closed within EXIT_BUDGET_S. No user code ever runs on the portal's thread.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Final, TypeVar

from fluxmesh.errors import StorageUnreachable, WouldDeadlock
from fluxmesh.storage.base import Storage

EXIT_BUDGET_S: Final = 2.0
T = TypeVar("T")

_portal: Portal | None = None
_lock = threading.Lock()
inherited: list[object] = []  # what a forked child must neither use nor free


class Portal:
    """A running loop on a daemon thread of this process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._storages: set[Storage] = set()
        self._ended = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="fluxmesh-portal", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the portal's loop, from any other thread."""
        if self._ended:
            coroutine.close()
            raise StorageUnreachable("the interpreter is ending", hint="finish before the exit handlers run")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def keep(self, storage: Storage) -> None:
        self._storages.add(storage)

    async def close(self, storage: Storage) -> None:
        if storage in self._storages:
            self._storages.discard(storage)
            await storage.close()

    def release(self, storage: Storage) -> None:
        """Close the storage of an owner that was garbage-collected, in whatever thread that happened."""
        if self._pid == os.getpid() and not self._ended and storage in self._storages:
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self.close(storage)))

    def end(self) -> None:
        """Give up what is waiting, close the storages, end the thread; bounded by EXIT_BUDGET_S."""
        if self._pid != os.getpid() or self._ended:
            return
        self._ended = True
        try:
            closing = asyncio.run_coroutine_threadsafe(self._close_all(), self.loop)
            closing.result(timeout=EXIT_BUDGET_S * 0.75)
        except (TimeoutError, RuntimeError):
            pass  # the thread is a daemon: the process ends without it
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(EXIT_BUDGET_S * 0.25)

    async def _close_all(self) -> None:
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        closing = [self.close(storage) for storage in tuple(self._storages)]
        await asyncio.gather(*waiting, *closing, return_exceptions=True)


def current_portal() -> Portal:
    """The portal of this process, started at first use."""
    global _portal
    with _lock:
        if _portal is None:
            _portal = Portal()
            atexit.register(_portal.end)
        return _portal


def is_portals(loop: asyncio.AbstractEventLoop) -> bool:
    """True for the loop of this process's portal."""
    return _portal is not None and loop is _portal.loop


def _after_fork_in_child() -> None:
    global _portal, _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    if _portal is not None:
        inherited.append(_portal)
        _portal = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the portal's loop and wait for it. Works in every thread, also beside a loop that
    runs in the calling one, which it then blocks. An interrupt cancels the coroutine."""
    portal = current_portal()
    if portal.is_here():
        coroutine.close()
        raise WouldDeadlock("a blocking call on the thread that serves blocking calls", hint="use .aio")
    future = portal.submit(coroutine)
    try:
        return future.result()
    except CancelledError:
        raise StorageUnreachable("the interpreter is ending") from None
    finally:
        future.cancel()  # does nothing to one that is done
        del future
