"""SIGTERM and SIGINT as tellings: the first says stop, the second says at once.

A worker's processes share one process group on purpose: `kill -9 -group`, a terminal's Ctrl-C and Ctrl-Z
and a service manager treat the supervisor and its children as the one thing they are. The price is that a
child may be told twice of one wish, by the terminal and by its supervisor. So a child takes signals that
come within TELLING_GAP_S of a counted one for the same telling, and a supervisor forwards its second
signal no sooner than that gap after the first.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

TELLING_GAP_S: Final = 0.3
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Calls `on_first` at the first telling and `on_second` at the second, on the loop; later ones do
    nothing. `gap_s`: signals this soon after a counted one are the same telling."""

    def __init__(
        self, on_first: Callable[[], object], on_second: Callable[[], object], *, gap_s: float = TELLING_GAP_S
    ) -> None:
        self._callbacks = (on_first, on_second)
        self._gap_s = gap_s
        self._counted = 0
        self._counted_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def install(self) -> None:
        """Take over the signals of this process. Only on the main thread's running loop."""
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._told)

    def remove(self) -> None:
        """Back to the default handlers. Idempotent."""
        if self._loop is not None:
            for number in _SIGNALS:
                self._loop.remove_signal_handler(number)
            self._loop = None

    def end_with(self, code: int) -> None:
        """Instead of `remove`, when all is done and the process is about to exit with `code`: one more
        signal ends it at once with that code. It would die of the signal otherwise, and look as if it had
        failed."""
        if self._loop is None:
            return

        def end(_number: int, _frame: FrameType | None) -> None:
            os._exit(code)

        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.remove()
            for number in _SIGNALS:
                signal.signal(number, end)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _told(self) -> None:
        if self._loop is None:
            return
        now = self._loop.time()
        if self._counted_at is not None and now - self._counted_at < self._gap_s:
            return
        self._counted_at = now
        self._counted += 1
        if self._counted <= len(self._callbacks):
            self._callbacks[self._counted - 1]()
