"""A way to a server that can be slow, or lose answers. On a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Final

_READ_BYTES: Final = 64 << 10
_START_S: Final = 10.0
_END_TURNS: Final = 100
_END_S: Final = 0.01


class Proxy:
    """`port` is where clients go. What it does is set by attributes, for all that passes from then on."""

    def __init__(self, target_port: int, rng: random.Random) -> None:
        self.target_port = target_port
        self.delay_s = (0.0, 0.0)  # least and most, of every answer
        self.loses_replies = False
        self.delayed = 0  # answers
        self.lost = 0  # answers
        self.port = 0
        self._rng = rng
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="proxy", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise TimeoutError("the proxy does not start")

    def stop(self) -> None:
        assert self._loop is not None
        assert self._over is not None
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_START_S)

    def cut(self) -> None:
        """Close every connection."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()
        self._cut()
        for _ in range(_END_TURNS):  # connections end in order, not with the loop
            if self._writers:
                await asyncio.sleep(_END_S)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, away = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, away}
        try:
            await asyncio.gather(self._requests(reader, away), self._answers(there, writer))
        except OSError:
            pass
        finally:
            for one in (writer, away):
                self._writers.discard(one)
                one.transport.abort()

    async def _requests(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(_READ_BYTES):
            to.write(data)
            await to.drain()
        raise ConnectionAbortedError  # and so the other way ends as well

    async def _answers(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(_READ_BYTES):
            if self.delay_s[1]:
                self.delayed += 1
                await asyncio.sleep(self._rng.uniform(*self.delay_s))
            if self.loses_replies:
                self.lost += 1
                break
            to.write(data)
            await to.drain()
        raise ConnectionAbortedError
