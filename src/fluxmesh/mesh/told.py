"""A bound for the log: whoever makes up a thousand members a second must not fill it.

Of each kind of event so many lines are told in a window, then one that says how many more there were.
Counters are kept elsewhere and miss nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LINES_MOST: Final = 30  # of one kind of event
WINDOW_S: Final = 10.0

Tell = Callable[[str, str, dict[str, object]], None]  # level, event, fields


class _Window:
    __slots__ = ("level", "lines", "more", "since_s")

    def __init__(self, level: str, since_s: float) -> None:
        self.level = level
        self.since_s = since_s
        self.lines = 0
        self.more = 0


class Bounded:
    """Calls `tell` within the bound. `now_s`: monotonic. A kind is the words of an event, of which a program
    has a few. Not thread-safe."""

    def __init__(self, tell: Tell, now_s: Callable[[], float]) -> None:
        self._tell = tell
        self._now_s = now_s
        self._windows: dict[str, _Window] = {}

    def tell(self, level: str, event: str, fields: dict[str, object]) -> None:
        now_s = self._now_s()
        window = self._windows.get(event)
        if window is not None and now_s - window.since_s >= WINDOW_S:
            self._close(event, window)
            window = None
        if window is None:
            window = self._windows[event] = _Window(level, now_s)
        if window.lines < LINES_MOST:
            window.lines += 1
            self._tell(level, event, fields)
        else:
            window.more += 1

    def look(self) -> None:
        """Say what was left out in windows that are over. To be called now and then."""
        now_s = self._now_s()
        for event, window in list(self._windows.items()):
            if now_s - window.since_s >= WINDOW_S:
                self._close(event, window)

    def end(self) -> None:
        """Say all that was left out."""
        for event, window in list(self._windows.items()):
            self._close(event, window)

    def _close(self, event: str, window: _Window) -> None:
        del self._windows[event]
        if window.more:
            fields: dict[str, object] = {"of": event, "more": window.more, "within_s": WINDOW_S}
            self._tell(window.level, "more of the same", fields)
