"""A way to the server that can be cut: before a request reaches it, or after it was carried out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final, Literal

_PIECE: Final = 65_536
Where = Literal["before", "after"]


class Cut:
    """Everything passes, until it is `armed`: then the connection of the next script is cut there."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.port = 0
        self.armed: Where | None = None
        self.cuts = 0
        self.serving: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()  # the next answer is that of the script

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        behind, forward = await asyncio.open_connection("127.0.0.1", self._server_port)
        back = asyncio.create_task(self._pass_on(behind, writer, self._cuts_answer))
        await self._pass_on(reader, forward, self._cuts_request)
        await back

    def _cuts_request(self, piece: bytes) -> bool:
        if self.armed is None or b"EVAL" not in piece:
            return False
        where, self.armed, self.cuts = self.armed, None, self.cuts + 1
        if where == "after":
            self._done.set()
        return where == "before"

    def _cuts_answer(self, _: bytes) -> bool:
        is_cut = self._done.is_set()
        self._done.clear()
        return is_cut

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cuts: Callable[[bytes], bool]
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while (piece := await reader.read(_PIECE)) and not cuts(piece):
                writer.write(piece)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def cutting(port: int) -> AsyncIterator[Cut]:
    cut = Cut(port)
    server = await asyncio.start_server(cut.serve, "127.0.0.1", 0)
    cut.port = server.sockets[0].getsockname()[1]
    try:
        yield cut
    finally:
        server.close()
        await asyncio.gather(*cut.serving)
