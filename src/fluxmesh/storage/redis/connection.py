"""Connections to one server: taken one at a time, bounded in time, and never asked twice.

What fails before anything was sent is StorageUnreachable; what fails after is OutcomeUnknown, and the
connection on which it failed is dropped, so that no late answer can be taken for another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from redis import exceptions as driver
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from fluxmesh.errors import InvalidOption, OutcomeUnknown, StorageRefused, StorageUnreachable

CONNECT_S: Final = 5.0
ANSWER_S: Final = 10.0
_MOST: Final = 32
_CLOSE_S: Final = 2.0
_OLDEST: Final = (6, 2)
_FLAGS_SINCE: Final = 7
# The server's refusals that leave everything as it was, and may be over soon.
_PASSING: Final = (
    "LOADING",
    "BUSY",
    "READONLY",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "OOM",
    "MISCONF",
    "NOREPLICAS",
)
_LOST: Final = (driver.ConnectionError, driver.TimeoutError, OSError, EOFError, TimeoutError)


def shown_url(url: str) -> str:
    """The URL without a password."""
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url


class Connections:
    """The idle connections of one storage, and the way to ask one."""

    kind = "redis"
    has_msgpack = True  # the server's Lua has cmsgpack

    def __init__(self, url: str) -> None:
        self.where = shown_url(url)
        self.version = ""
        self.knows_flags = False
        self._pid = os.getpid()
        self._idle: list[AbstractConnection] = []
        self._busy: set[AbstractConnection] = set()
        self._room = asyncio.Semaphore(_MOST)
        self._closed = False
        self._quiet = asyncio.Event()  # set when the last verb under way has its answer, of a closed storage
        try:
            options: dict[str, Any] = dict(parse_url(url))
        except ValueError as error:
            raise InvalidOption("url", f"{self.where!r}: {error}", hint="redis://host:6379/0") from None
        self._kind: type[Any] = options.pop("connection_class", Connection)
        if urlsplit(url).scheme == "rediss":
            self._kind = SSLConnection
        options.pop("max_connections", None)
        options.setdefault("socket_connect_timeout", CONNECT_S)
        options |= {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "decode_responses": False,
            "socket_timeout": ANSWER_S,
        }
        self._options = options
        try:
            self.make()
        except TypeError as error:
            raise InvalidOption("url", f"{self.where!r}: {error}", hint="leave it out of the URL") from None

    # -- opening -------------------------------------------------------------------------------------
    async def check(self) -> None:
        """Refuse a server that is too old, or that throws keys away when its memory is full."""
        found = await self.said()
        self.version = found.get("redis_version", "")
        numbers = tuple(int(part) for part in self.version.split(".")[:2] if part.isdigit())
        if numbers < _OLDEST:
            raise StorageRefused(
                f"{self.where} is Redis {self.version or '?'}", hint="6.2 is the oldest that will do"
            )
        self.knows_flags = numbers[0] >= _FLAGS_SINCE
        if found.get("redis_mode") == "cluster":
            raise StorageRefused(f"{self.where} is a node of a cluster", hint="name a server of its own")
        self.check_policy(found)

    def check_policy(self, found: dict[str, str]) -> None:
        """Refuse a server that throws keys away: it may have been told to since it was opened."""
        policy = found.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys"):
            raise StorageRefused(
                f"{self.where} evicts keys when its memory is full ({policy})",
                hint="maxmemory-policy noeviction",
            )

    async def said(self) -> dict[str, str]:
        """What the server says of itself."""
        found: dict[str, str] = {}
        for section in ("server", "memory", "persistence"):
            text: bytes = await self.command("INFO", section)
            lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
            found.update({name: value for name, _, value in lines})
        return found

    def make(self, *, patient: bool = False) -> AbstractConnection:
        """A connection of its own; `patient`: it may be silent for ever (a subscriber's)."""
        connection: AbstractConnection = self._kind(
            **self._options | ({"socket_timeout": None} if patient else {})
        )
        return connection

    def check_usable(self) -> None:
        if self._closed:
            raise StorageUnreachable(f"{self.where} has been closed", hint="open it again")
        if os.getpid() != self._pid:
            raise StorageUnreachable(f"{self.where} was opened before a fork", hint="open it in the child")

    async def connected(self, connection: AbstractConnection) -> None:
        """Raises StorageUnreachable, or StorageRefused where somebody has to change something first."""
        try:
            async with asyncio.timeout(CONNECT_S * 2):
                await connection.connect()  # type: ignore[no-untyped-call]
        except driver.AuthenticationError as error:
            raise StorageRefused(
                f"{self.where}: {error}", hint="look at user and password of the URL"
            ) from error
        except driver.ResponseError as error:
            self._checked(error)
        except (*_LOST, driver.RedisError) as error:
            raise StorageUnreachable(f"{self.where}: {error}", hint="is the server running?") from error

    # -- asking --------------------------------------------------------------------------------------
    async def command(self, *command: Any) -> Any:
        """Its answer: bytes, ints, lists. Raises NoScriptError as it is."""
        (answer,) = await self._ask([command])
        if isinstance(answer, driver.NoScriptError):
            raise answer
        return self._checked(answer)

    async def commands(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Answers of several commands sent together."""
        return [self._checked(answer) for answer in await self._ask(commands)] if commands else []

    def _checked(self, answer: Any) -> Any:
        if not isinstance(answer, Exception):
            return answer
        text = str(answer)
        passing = isinstance(answer, driver.BusyLoadingError | driver.OutOfMemoryError)
        if passing or text.startswith(_PASSING):
            raise StorageUnreachable(f"{self.where}: {text}", hint="the server refuses for now") from answer
        raise StorageRefused(f"{self.where}: {text}") from answer

    async def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.check_usable()
        async with self._room:
            self.check_usable()
            connection = await self._take()
            self._busy.add(connection)
            try:
                return await self._talk(connection, commands)
            finally:
                self._busy.discard(connection)
                if self._closed:
                    await connection.disconnect(nowait=True)
                    if not self._busy:
                        self._quiet.set()
                elif connection.is_connected:
                    self._idle.append(connection)

    async def _take(self) -> AbstractConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_connected and not _has_hung_up(connection):
                return connection
            await connection.disconnect(nowait=True)
        connection = self.make()
        try:
            await self.connected(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def _talk(self, connection: AbstractConnection, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        answers: list[Any] = []
        try:
            packed = connection.pack_commands(commands)
            await connection.send_packed_command(packed, check_health=False)
            for _ in commands:
                try:
                    answers.append(await connection.read_response(disable_decoding=True))
                except driver.ResponseError as error:
                    answers.append(error)
                except (driver.BusyLoadingError, driver.AuthenticationError) as error:
                    return [error for _ in commands]  # answers too; the driver has hung up on them
        except BaseException as error:
            # Answers may still be on their way: nobody may take them for his own.
            await connection.disconnect(nowait=True)
            if isinstance(error, _LOST):
                raise OutcomeUnknown(f"{self.where}: no answer ({error})", hint="repeat the call") from error
            raise
        return answers

    async def close(self) -> None:
        """Verbs under way get their answers, if they come soon."""
        if self._closed:
            return
        self._closed = True
        if self._busy:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), _CLOSE_S)
        for connection in [*self._idle, *self._busy]:
            await connection.disconnect(nowait=True)
        self._idle.clear()


def _has_hung_up(connection: AbstractConnection) -> bool:
    reader = getattr(connection, "_reader", None)
    return reader is None or reader.at_eof()
