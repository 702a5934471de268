"""The program's own log as a signal: a test waits for an event instead of sleeping."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fluxmesh.obs import log

PATIENCE_S = 10.0


class LogTap(io.TextIOBase):
    """A log stream that keeps every event and wakes whoever waits for one."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._news: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def write(self, text: str) -> int:
        self.events.append(json.loads(text))
        if self._loop is not None and self._news is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)
        return len(text)

    def found(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        wanted = {"event": event, **fields}
        return [seen for seen in self.events if wanted.items() <= seen.items()]

    async def until(self, event: str, *, count: int = 1, **fields: Any) -> dict[str, Any]:
        """The `count`-th such event since the beginning, once it has come."""
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        async with asyncio.timeout(PATIENCE_S):
            while len(self.found(event, **fields)) < count:
                await self._news.wait()
                self._news.clear()
        return self.found(event, **fields)[count - 1]


@contextmanager
def tapped(level: str = "debug") -> Iterator[LogTap]:
    tap = LogTap()
    log.configure(level, "json", tap)
    try:
        yield tap
    finally:
        log.reset()
