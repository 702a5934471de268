"""memory://: the same verbs over a server in this process, for tests and for trying things out.

It lives and ends with the process, and is never taken instead of another storage: only by name. `memory://`
and `memory://name` are each one storage, for all who open it here, from whatever thread.
"""

from __future__ import annotations

import threading
from typing import Final
from urllib.parse import urlsplit

import fakeredis
from fakeredis import FakeServer
from fakeredis.aioredis import FakeAsyncRedisConnection
from redis.asyncio.connection import AbstractConnection

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.errors import InvalidOption
from fluxmesh.storage.redis import dialer
from fluxmesh.storage.redis.backend import RedisStorage
from fluxmesh.storage.redis.connection import MOST, Connections

_VERSION: Final = (7, 4)
_servers: dict[str, FakeServer] = {}
_making = threading.Lock()


def server_of(name: str) -> FakeServer:
    """The server of memory://name, made when it is first asked for."""
    with _making:
        if name not in _servers:
            _servers[name] = FakeServer(version=_VERSION)
        return _servers[name]


class MemoryConnections(Connections):
    """Connections that go nowhere."""

    kind = "memory"
    has_msgpack = False

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.path.strip("/") or parts.query:
            raise InvalidOption("url", f"{url!r}", hint="memory:// or memory://name")
        self._set_up(url, MOST)
        self._server = server_of(parts.netloc)

    async def open(self) -> AbstractConnection:
        connection: AbstractConnection = FakeAsyncRedisConnection(protocol=2, server=self._server)
        await connection.connect()  # type: ignore[no-untyped-call]
        return connection

    def _answer_s(self) -> float:
        return dialer.ANSWER_S

    async def check(self, namespace: str) -> None:
        self.version = (await self.said())["redis_version"]

    async def said(self) -> dict[str, str]:
        mode = "in this process, and gone with it"
        return {"redis_version": f"fakeredis {fakeredis.__version__}", "redis_mode": mode}


async def open_backend(
    url: str, settings: Settings, *, create: bool, clock: Clock, inline: bool = False
) -> RedisStorage:
    """Open (or make) the storage of that name in this process."""
    return RedisStorage(MemoryConnections(url), settings, clock)
