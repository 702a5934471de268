"""Calls over TCP: one request, one answer, then the next, on connections that are kept warm.

A frame on the wire is u32 length (big endian) and so many sealed bytes. A length beyond the bound closes
the connection before a byte of it is read. One call at a time is under way on a connection, so an answer
belongs to the last request; a call that takes too long closes its connection, so that its late answer meets
nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import Final

from fluxmesh.mesh.messages import Address
from fluxmesh.mesh.seal import Refusal, Session
from fluxmesh.mesh.timing import FRAME_MAX_BYTES

STREAM_PORT_ABOVE: Final = 1  # streams are one port above datagrams
CONNECTIONS_MOST: Final = 512  # of others, to us
CONNECTIONS_PER_HOST: Final = 64
WARM_MOST: Final = 64  # idle connections of ours, the longest idle is closed first
WARM_S: Final = 60.0
CONNECT_S: Final = 0.5
STRANGERS_PER_HOST: Final = 16  # of those that have shown no key, once they had the time to,
STRANGERS_MOST: Final = 128  # and of all hosts
SHOW_S: Final = 0.5  # in which an honest one has; whoever is younger counts to CONNECTIONS_PER_HOST only
GREET_S: Final = 2.0
FIRST_FRAME_S: Final = 5.0  # for one that has greeted to say something that opens
IDLE_S: Final = 120.0
WRITE_S: Final = 5.0
ANSWER_S: Final = 10.0  # for our core to answer a call; it answers at once, or never
CALLS_PER_S: Final = 2_000  # taken in all, and
CALLS_PER_HOST_S: Final = 500  # of one host; a connection that brings more is closed
READ_AHEAD_BYTES: Final = 32 << 10  # twice that is kept of what nobody has asked for yet
LARGE_OF_STRANGERS: Final = 8  # frames, read at once
_LENGTH: Final = struct.Struct(">I")


SILENT: Final = "no key shown in time"
CROWDED: Final = "too many connections that show no key"


class StreamRefused(Exception):
    """The other side says what cannot be understood."""


class _Connection:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session, counts: Counts
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._session = session
        self._counts = counts
        self.idle_since_s = 0.0

    async def greet(self, *, first: bool) -> None:
        """Both sides say their greeting, whatever the other's is: so each of them learns why it is refused.
        The one that was connected to says nothing before it was spoken to."""
        session = self._session
        if first:
            self._writer.write(session.greeting())
        theirs = await self._reader.readexactly(session.greeting_bytes)
        if not first:
            self._writer.write(session.greeting())
            async with asyncio.timeout(WRITE_S):
                await self._writer.drain()
        if not session.greeted(theirs):
            raise StreamRefused(str(session.refusal))

    async def write(self, frame: bytes) -> None:
        sealed = self._session.seal(frame)
        self._writer.write(_LENGTH.pack(len(sealed)) + sealed)
        self._counts.sent_bytes += _LENGTH.size + len(sealed)
        async with asyncio.timeout(WRITE_S):
            await self._writer.drain()

    async def read(self, gate: AbstractAsyncContextManager[None] | None = None) -> bytes:
        """The next frame. `gate` is for one who has not shown a key yet: only so many of those may bring a
        large one at a time, whose memory is taken as it comes."""
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if length > FRAME_MAX_BYTES:
            raise StreamRefused(str(Refusal.TOO_LARGE))
        if gate is None or length <= READ_AHEAD_BYTES:
            sealed = await self._reader.readexactly(length)
        else:
            async with gate:
                sealed = await self._reader.readexactly(length)
        self._counts.received_bytes += _LENGTH.size + length
        frame = self._session.open(sealed)
        if frame is None:
            raise StreamRefused(str(self._session.refusal))
        return frame

    @property
    def usable(self) -> bool:
        """Nobody has closed it, and nothing stands in it that nobody asked for."""
        return not (self._writer.is_closing() or self._reader.at_eof())

    def close(self) -> None:
        # Not close(): what is still to be written would keep a dead peer's connection for minutes.
        self._writer.transport.abort()


@dataclass(slots=True)
class Counts:
    """What went over streams since the start."""

    calls: int = 0
    calls_failed: int = 0
    calls_taken: int = 0
    connections: int = 0
    turned_away: int = 0  # there were too many connections, or too many calls a second
    gave_way: int = 0  # had shown no key when others came
    refused: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def as_dict(self) -> dict[str, int]:
        return {f"stream_{name}": value for name, value in asdict(self).items()}


class _Served:
    """A connection of somebody else's. A stranger becomes one that has `greeted`, which proves nothing but is
    more than most attackers do, and then `known` by a frame that opened. `idle_since_s`: it was answered and
    may say more."""

    __slots__ = ("gone", "greeted", "idle_since_s", "known", "since_s", "source", "writer")

    def __init__(self, source: Address, writer: asyncio.StreamWriter, now_s: float) -> None:
        self.source = source
        self.writer = writer
        self.since_s = now_s
        self.greeted = False
        self.known = False
        self.idle_since_s: float | None = None
        self.gone = False

    @property
    def is_at_work(self) -> bool:
        return self.known and self.idle_since_s is None

    def is_slow(self, now_s: float) -> bool:
        """It had the time to show a key, and did not."""
        return not self.known and now_s - self.since_s >= SHOW_S


class Streams:
    """Both ends. `on_call(source, frame)` is awaited for the answer to somebody's request (None: close);
    `on_refused(source, why)` hears of strangers; `delay_s(to)` is bad weather, on the way
    there and back (0: none)."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        session: Callable[[], Session],
        on_call: Callable[[Address, bytes], Awaitable[bytes | None]],
        on_refused: Callable[[Address, str], None],
        delay_s: Callable[[Address], tuple[float, float]],
    ) -> None:
        self._listener = listener
        self._session = session
        self._on_call = on_call
        self._on_refused = on_refused
        self._delay_s = delay_s
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], _Served] = {}
        self._warm: OrderedDict[int, tuple[Address, _Connection]] = OrderedDict()
        self._number = 0
        self._large = asyncio.Semaphore(LARGE_OF_STRANGERS)
        self._bringing: dict[_Served, None] = {}  # a large frame, the longest one first
        self._second = 0
        self._calls_of: dict[str, int] = {}  # host -> calls in that second; as many as CONNECTIONS_MOST
        self._closed = False
        self.counts = Counts()

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._taken, sock=self._listener, limit=READ_AHEAD_BYTES, backlog=128
        )

    async def close(self) -> None:
        """Both ends, at once."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        else:
            self._listener.close()
        for _, connection in self._warm.values():
            connection.close()
        self._warm.clear()
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        await asyncio.sleep(0)  # in which the loop closes what was aborted

    # -- our calls ---------------------------------------------------------------------------------------
    async def call(self, to: Address, frame: bytes, timeout_s: float) -> bytes | None:
        """The answer; None when that was refused, broken off or too late."""
        self.counts.calls += 1
        connection: _Connection | None = None
        answer: bytes | None = None
        try:
            async with asyncio.timeout(timeout_s):
                there_s, back_s = self._delay_s(to)
                if there_s > 0:
                    await asyncio.sleep(there_s)
                connection = self._take_warm(to)
                if connection is not None:
                    answer = await self._ask_warm(connection, frame)
                    if answer is None:  # the other side had closed it: that says nothing of now
                        connection.close()
                        connection = None
                if connection is None:
                    connection = await self._connect(to)
                    answer = await self._ask_new(connection, frame)
                if back_s > 0:
                    await asyncio.sleep(back_s)
        except (OSError, ValueError, asyncio.IncompleteReadError, StreamRefused) as error:
            answer = None  # ValueError: an address that is none, or a frame that is too large
            if isinstance(error, StreamRefused):
                self._refuse(to, str(error))
        if answer is None:
            self.counts.calls_failed += 1
            if connection is not None:
                connection.close()
        elif connection is not None:
            self._keep_warm(to, connection)
        return answer

    async def _ask_warm(self, connection: _Connection, frame: bytes) -> bytes | None:
        try:
            await connection.write(frame)
            return await connection.read()
        except (OSError, asyncio.IncompleteReadError):
            return None
        except BaseException:  # whoever waits no longer leaves nobody to close it
            connection.close()
            raise

    async def _ask_new(self, connection: _Connection, frame: bytes) -> bytes:
        try:
            await connection.greet(first=True)
            await connection.write(frame)
            return await connection.read()
        except BaseException:
            connection.close()
            raise

    async def _connect(self, to: Address) -> _Connection:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                to.host, to.port + STREAM_PORT_ABOVE, limit=READ_AHEAD_BYTES
            )
        _no_delay(writer)
        return _Connection(reader, writer, self._session(), self.counts)

    def _take_warm(self, to: Address) -> _Connection | None:
        now_s = asyncio.get_running_loop().time()
        for number in [one for one, (address, _) in self._warm.items() if address == to]:
            connection = self._warm.pop(number)[1]
            if connection.usable and now_s - connection.idle_since_s < WARM_S:
                return connection
            connection.close()
        return None

    def _keep_warm(self, to: Address, connection: _Connection) -> None:
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._number += 1
        self._warm[self._number] = (to, connection)
        if len(self._warm) > WARM_MOST:
            self._warm.popitem(last=False)[1][1].close()

    # -- calls of others ---------------------------------------------------------------------------------
    def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        source = Address(str(peer[0]), int(peer[1])) if peer else Address("", 0)
        now_s = asyncio.get_running_loop().time()
        if self._closed:  # accepted by the listener before that was closed
            writer.transport.abort()
            return
        if not self._has_room(source.host, now_s):
            self.counts.turned_away += 1
            writer.transport.abort()
            return
        served = _Served(source, writer, now_s)
        self.counts.connections += 1
        _no_delay(writer)
        connection = _Connection(reader, writer, self._session(), self.counts)
        task = asyncio.get_running_loop().create_task(self._served(connection, served))
        self._serving[task] = served
        # Not at the end of the task: one that is cancelled before its first step never gets there.
        task.add_done_callback(self._let_go)

    def _let_go(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task).writer.transport.abort()

    async def _served(self, connection: _Connection, served: _Served) -> None:
        source = served.source
        try:
            await self._serve(connection, source, served)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            if isinstance(error, TimeoutError) and not served.known:
                self._refuse(source, SILENT)
        except StreamRefused as error:
            self._refuse(source, str(error))

    def _refuse(self, source: Address, why: str) -> None:
        self.counts.refused += 1
        self._on_refused(source, why)

    def _has_room(self, host: str, now_s: float) -> bool:
        """Whether one more connection of this host may be served, for which others give way: first those that
        have shown no key, the longest silent one before all, then those that are only kept warm, whose owner
        connects anew when it has something to say. So a crowd without a key keeps nobody out who has one: to
        greet takes an instant."""
        everybody = [served for served in self._serving.values() if not served.gone]
        of_host = [served for served in everybody if served.source.host == host]
        for some, most in ((of_host, STRANGERS_PER_HOST), (everybody, STRANGERS_MOST)):
            slow = [one for one in some if one.is_slow(now_s) and not one.gone]
            for served in sorted(slow, key=_worth)[: max(0, len(slow) - most + 1)]:
                self._give_way(served)
        for some, most in ((of_host, CONNECTIONS_PER_HOST), (everybody, CONNECTIONS_MOST)):
            left = [one for one in some if not one.gone]
            if len(left) >= most:
                least = min(left, key=_worth)
                if least.is_at_work:
                    return False
                self._give_way(least)
        return True

    @contextlib.asynccontextmanager
    async def _large_turn(self, served: _Served) -> AsyncIterator[None]:
        """One of few. Who waits for one for long takes it from whoever has had it for the longest."""
        while True:
            try:
                async with asyncio.timeout(SHOW_S):
                    await self._large.acquire()
                break
            except TimeoutError:
                for slowest in self._bringing:
                    if not slowest.gone:
                        self._give_way(slowest)
                        break
        self._bringing[served] = None
        try:
            yield
        finally:
            del self._bringing[served]
            self._large.release()

    def _give_way(self, served: _Served) -> None:
        served.gone = True
        served.writer.transport.abort()
        if not served.known:
            self.counts.gave_way += 1
            self._on_refused(served.source, CROWDED)

    def _within_rate(self, host: str) -> bool:
        """Count a call of this host in the second that runs."""
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            self._second = second
            self._calls_of.clear()
        self._calls_of[host] = of_host = self._calls_of.get(host, 0) + 1
        return of_host <= CALLS_PER_HOST_S and sum(self._calls_of.values()) <= CALLS_PER_S

    async def _serve(self, connection: _Connection, source: Address, served: _Served) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(GREET_S):
            await connection.greet(first=False)
        served.greeted = True
        async with asyncio.timeout(FIRST_FRAME_S):
            frame = await connection.read(self._large_turn(served))
        served.known = True
        while True:
            if not self._within_rate(source.host):
                self.counts.turned_away += 1
                return
            self.counts.calls_taken += 1
            async with asyncio.timeout(ANSWER_S):
                answer = await self._on_call(source, frame)
            if answer is None:
                return
            await connection.write(answer)
            served.idle_since_s = loop.time()
            async with asyncio.timeout(IDLE_S):
                frame = await connection.read()
            served.idle_since_s = None


def _worth(served: _Served) -> tuple[int, float]:
    """The least gives way first."""
    if not served.known:
        return (1 if served.greeted else 0), served.since_s
    return (3, served.since_s) if served.idle_since_s is None else (2, served.idle_since_s)


def _no_delay(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
