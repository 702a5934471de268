"""A thread with an event loop of its own: a body that blocks the worker's loop leaves it alone."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


def _new_loop() -> asyncio.AbstractEventLoop:
    """Raises OSError if there are not enough files to be had. That is found out first: a loop that is half
    made when it fails cannot be thrown away without noise."""
    one, other = socket.socketpair()
    with one, other, selectors.DefaultSelector():
        pass
    return asyncio.new_event_loop()


class LoopThread:
    """Runs one coroutine function to its end on a daemon thread.

    `start` returns when `ready` was called inside, and raises what the coroutine raised before that;
    `failed` hears of what it raises later. `post` calls a function on that loop, from any thread; False: it
    has ended."""

    def __init__(
        self,
        name: str,
        main: Callable[[Callable[[], None]], Coroutine[Any, Any, None]],
        *,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._main = main
        self._failed = failed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Future[None] = Future()
        self._over = threading.Event()

    def start(self, timeout_s: float) -> None:
        """Raises TimeoutError, and whatever hinders the start."""
        try:
            self._thread.start()
        except RuntimeError:  # the machine has no thread to spare
            self._over.set()
            raise
        self._ready.result(timeout_s)

    def post(self, call: Callable[..., None], *args: object) -> bool:
        if self._loop is None or self._over.is_set():
            return False
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            return False
        return True

    def join(self, timeout_s: float) -> bool:
        """True: it has ended. From its own thread it is not waited for."""
        if threading.current_thread() is self._thread:
            return self._over.is_set()
        return self._over.wait(timeout_s)

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def _run(self) -> None:
        try:
            # Not the loop that the program prefers: a datagram socket is read by add_reader, which all have,
            # and timers have to be no coarser than asyncio's own.
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._main(self._mark_ready))
        except BaseException as error:  # the end of this thread must not go unnoticed
            if self._ready.done():
                with contextlib.suppress(Exception):
                    self._failed(error)
            else:
                self._ready.set_exception(error)
        finally:
            self._over.set()
            if not self._ready.done():
                self._ready.set_result(None)

    def _mark_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)
