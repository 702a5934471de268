"""Being told instead of asking: one subscribed connection of a storage, made when it is first needed.

Push is lossy: a connection that broke may have missed anything. So whoever waits is then told as if something
had come, and looks for himself; and every wait looks now and then in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from redis.asyncio.connection import AbstractConnection

from fluxmesh.errors import StorageError, StorageUnreachable
from fluxmesh.events import Event
from fluxmesh.storage.redis.connection import Connections
from fluxmesh.storage.redis.dialer import CONNECT_S, hang_up

_AGAIN_S: Final = 0.2
_AGAIN_MOST_S: Final = 5.0
_ACK_S: Final = 5.0
_EVENTS_KEPT: Final = 1_000
_NOTICE: Final = b"notice"

Hear = Callable[[bytes | None], None]  # a message; None: some may have been missed


class Listener:
    """Channels and who hears them. A channel is subscribed while somebody hears it."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._heard: dict[str, list[Hear]] = {}
        self._acks: dict[str, asyncio.Event] = {}
        self._connection: AbstractConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._pause_s = _AGAIN_S
        self._lock = asyncio.Lock()
        self._leaving: set[asyncio.Future[None]] = set()
        connections.on_doubt.append(self._move)

    async def add(self, channel: str, hear: Hear) -> None:
        """From the return on nothing is missed, unless the connection breaks."""
        self._heard.setdefault(channel, []).append(hear)
        try:
            async with asyncio.timeout(_ACK_S + CONNECT_S):
                await self._subscribe(channel)
        except BaseException as error:
            if self._forget(channel, hear):
                self._leave_soon(channel)
            if isinstance(error, TimeoutError):
                where = self._connections.where
                raise StorageUnreachable(f"{where}: no answer to a subscription", hint="try again") from error
            raise

    async def _subscribe(self, channel: str) -> None:
        async with self._lock:
            self._connections.check_usable()
            if self._reading is None:
                self._connection = await self._connections.open()
                self._reading = asyncio.create_task(self._read())
            ack = self._acks.get(channel)
            if ack is None:
                ack = self._acks[channel] = asyncio.Event()
                await self._send("SUBSCRIBE", channel)
        await ack.wait()

    async def _send(self, *command: str) -> None:
        if self._connection is not None and self._connection.is_connected:
            # What cannot be sent is made good by the reader, when it has connected again.
            with contextlib.suppress(Exception):
                await self._connection.send_command(*command, check_health=False)

    def _forget(self, channel: str, hear: Hear) -> bool:
        """True if nobody hears this channel any more."""
        hearing = self._heard.get(channel)
        if hearing is None:
            return False
        with contextlib.suppress(ValueError):
            hearing.remove(hear)
        if hearing:
            return False
        del self._heard[channel]
        return True

    async def remove(self, channel: str, hear: Hear) -> None:
        async with self._lock:
            if self._forget(channel, hear) and self._acks.pop(channel, None) is not None:
                await self._send("UNSUBSCRIBE", channel)

    def _leave_soon(self, channel: str) -> None:
        """Unsubscribe what was given up before it was acknowledged: by a task of its own, since whoever gave
        it up may have been cancelled."""
        leaving = asyncio.ensure_future(self._leave(channel))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _leave(self, channel: str) -> None:
        async with self._lock:
            if channel not in self._heard and self._acks.pop(channel, None) is not None:
                await self._send("UNSUBSCRIBE", channel)

    # -- reading -------------------------------------------------------------------------------------
    async def _read(self) -> None:
        while True:
            self._hearing = asyncio.create_task(self._hear())
            try:
                await asyncio.wait({self._hearing})
            finally:
                self._hearing.cancel()
            if not self._hearing.cancelled():
                self._hearing.exception()  # whatever broke it, the answer is a new connection
            self._missed()
            await self._connect_again()

    async def _hear(self) -> None:
        while self._connection is not None:
            # It is closed by whoever opened it: the driver would wait for TLS's good-bye.
            message = await self._connection.read_response(
                disable_decoding=True, timeout=None, disconnect_on_error=False
            )
            self._take(message)
            self._pause_s = _AGAIN_S

    def _move(self) -> None:
        """Give the connection up: its server may not be in charge any more, and silent for ever."""
        if self._hearing is not None:
            self._hearing.cancel()

    async def _connect_again(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, _AGAIN_MOST_S)
            with contextlib.suppress(StorageError):
                async with self._lock:
                    await self._connect()
                self._missed()
                return

    async def _connect(self) -> None:
        if self._connection is not None:
            await hang_up(self._connection)
        self._connection = await self._connections.open()
        for channel in self._acks:
            await self._send("SUBSCRIBE", channel)

    def _missed(self) -> None:
        for hearing in list(self._heard.values()):
            for hear in list(hearing):
                hear(None)

    def _take(self, message: Any) -> None:
        kind, channel = message[0], message[1].decode()
        if kind == b"message":
            for hear in list(self._heard.get(channel, ())):
                hear(message[2])
        elif kind == b"subscribe" and channel in self._acks:
            self._acks[channel].set()

    async def close(self) -> None:
        for leaving in list(self._leaving):
            leaving.cancel()
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        if self._connection is not None:
            await hang_up(self._connection)
            self._connection = None


class Bell:
    """What rang for one worker and was not asked for yet."""

    def __init__(self) -> None:
        self.work = asyncio.Event()
        self.notice = asyncio.Event()

    def hear(self, message: bytes | None) -> None:
        if message != _NOTICE:
            self.work.set()
        if message is None or message == _NOTICE:
            self.notice.set()


class Bells:
    """The bells of the workers of one storage: wake-ups and notices."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._hung: dict[str, Bell] = {}

    async def hang(self, channel: str) -> Bell | None:
        """Listen for a worker's bell. None: it hung there before."""
        if channel in self._hung:
            return None
        bell = self._hung[channel] = Bell()
        try:
            await self._listener.add(channel, bell.hear)
        except BaseException:
            del self._hung[channel]
            raise
        return bell

    async def wait_for_work(self, channel: str, timeout_s: float) -> bool:
        return await self._wait(channel, lambda bell: bell.work, timeout_s)

    async def wait_for_notice(self, channel: str, timeout_s: float) -> bool:
        return await self._wait(channel, lambda bell: bell.notice, timeout_s)

    async def _wait(self, channel: str, of: Callable[[Bell], asyncio.Event], timeout_s: float) -> bool:
        bell = await self.hang(channel)
        if bell is not None:
            bell.hear(None)  # nobody listened until now: it may have rung
        event = of(self._hung[channel])
        if not event.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await event.wait()
            except TimeoutError:
                return False
        event.clear()
        return True


@contextlib.asynccontextmanager
async def subscribed(
    listener: Listener, channels: Sequence[tuple[str, str]]
) -> AsyncIterator[AsyncIterator[Event]]:
    """Events of (topic, channel) pairs. A slow reader loses the oldest."""
    heard: asyncio.Queue[Event] = asyncio.Queue(_EVENTS_KEPT)

    def hearer(topic: str) -> Hear:
        def hear(body: bytes | None) -> None:
            if body is not None:
                if heard.full():
                    heard.get_nowait()
                heard.put_nowait(Event(topic, body))

        return hear

    async def events() -> AsyncIterator[Event]:
        while True:
            yield await heard.get()

    added: list[tuple[str, Hear]] = []
    try:
        for topic, channel in channels:
            hear = hearer(topic)
            await listener.add(channel, hear)
            added.append((channel, hear))
        yield events()
    finally:
        for channel, hear in added:
            await listener.remove(channel, hear)
