"""Connections to one server: taken one at a time, bounded in time, and never asked twice.

What fails before anything was sent is StorageUnreachable; what fails after is OutcomeUnknown, and the
connection on which it failed is dropped, so that no late answer can be taken for another's. A refusal by a
server that is not, or no longer, in charge has done nothing: then, and only then, the next one is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis import exceptions as driver
from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot

from fluxmesh.errors import OutcomeUnknown, StorageError, StorageRefused, StorageUnreachable
from fluxmesh.storage.redis import refusals
from fluxmesh.storage.redis.dialer import LOST, Dialer, hang_up
from fluxmesh.storage.redis.keys import prefix_of
from fluxmesh.storage.redis.route import ClusterRoute, FixedRoute, Route, SentinelRoute
from fluxmesh.storage.redis.target import parse_target

WAIT_MS: Final = 2_000  # for replicas to have what was written
_ELSEWHERE_MOST: Final = 3
MOST: Final = 32
_CLOSE_S: Final = 2.0
_OLDEST: Final = (6, 2)
_FLAGS_SINCE: Final = 7


class Connections:
    """The idle connections of one storage, and the way to ask one."""

    kind = "redis"
    has_msgpack = True  # the server's Lua has cmsgpack

    def __init__(self, url: str) -> None:
        target = parse_target(url)
        self._set_up(target.shown, target.most or MOST)
        self._hosts = target.hosts
        self._dialer = Dialer(target)
        self._route: Route = (
            FixedRoute(self._dialer, target.hosts)
            if target.service is None
            else SentinelRoute(self._dialer, target.hosts, target.service)
        )

    def _set_up(self, where: str, most: int) -> None:
        self.where = where
        self.version = ""
        self.knows_flags = False
        self.in_cluster = False
        self.on_doubt: list[Callable[[], None]] = []  # called when all connections had to be given up
        self._pid = os.getpid()
        self._idle: list[AbstractConnection] = []
        self._busy: set[AbstractConnection] = set()
        self._trusted: set[AbstractConnection] = set()  # opened since there was a doubt
        self._room = asyncio.Semaphore(most)
        self._closed = False
        self._quiet = asyncio.Event()  # set when the last verb under way has its answer, of a closed storage

    # -- opening -------------------------------------------------------------------------------------
    async def check(self, namespace: str) -> None:
        """Find the server of a namespace; refuse one that is too old, that throws keys away when its memory
        is full, or that cannot be written to."""
        try:
            found = await self.said()
            if found.get("redis_mode") == "cluster":
                self._go_by_slot(namespace)
                found = await self.said()
            elif len(self._hosts) > 1 and isinstance(self._route, FixedRoute):
                raise StorageRefused(
                    f"{self.where} names several servers, which are no cluster",
                    hint="name the primary alone, or Sentinels: redis+sentinel://",
                )
        except OutcomeUnknown as error:
            raise StorageUnreachable(error.message, hint=self._dialer.hung_up_hint) from error
        self._check_server(found)

    def _check_server(self, found: dict[str, str]) -> None:
        self.version = found.get("redis_version", "")
        numbers = tuple(int(part) for part in self.version.split(".")[:2] if part.isdigit())
        if numbers < _OLDEST:
            raise StorageRefused(
                f"{self.where} is Redis {self.version or '?'}", hint="6.2 is the oldest that will do"
            )
        self.knows_flags = numbers[0] >= _FLAGS_SINCE
        self.check_policy(found)
        if found.get("role", "master") != "master":
            raise StorageRefused(
                f"{self.where} is a replica, which takes nothing",
                hint="name its primary, or Sentinels: redis+sentinel://",
            )

    def check_policy(self, found: dict[str, str]) -> None:
        """Refuse a server that throws keys away: it may have been told to since it was opened."""
        policy = found.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys"):
            raise StorageRefused(
                f"{self.where} evicts keys when its memory is full ({policy})",
                hint="maxmemory-policy noeviction",
            )

    def _go_by_slot(self, namespace: str) -> None:
        """All keys of a namespace have one hash tag, and so one node that owns them."""
        self.in_cluster = True
        slot = key_slot(prefix_of(namespace, in_cluster=True).encode())
        self._route = ClusterRoute(self._dialer, self._hosts, slot)
        self._doubt()

    async def said(self) -> dict[str, str]:
        """What the server says of itself."""
        found: dict[str, str] = {}
        for section in ("server", "memory", "persistence", "replication"):
            text: bytes = await self.command("INFO", section)
            lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
            found.update({name: value for name, _, value in lines})
        # Valkey calls it otherwise.
        found.setdefault("redis_mode", found.get("server_mode", "unknown"))
        return found

    def check_usable(self) -> None:
        if self._closed:
            raise StorageUnreachable(f"{self.where} has been closed", hint="open it again")
        if os.getpid() != self._pid:
            raise StorageUnreachable(f"{self.where} was opened before a fork", hint="open it in the child")

    async def open(self) -> AbstractConnection:
        """A connection of its own. Raises StorageUnreachable, or StorageRefused where somebody has to change
        something first."""
        return await self._route.connect()

    # -- asking --------------------------------------------------------------------------------------
    async def command(self, *command: Any) -> Any:
        """Its answer: bytes, ints, lists. Raises NoScriptError as it is."""
        (answer,) = await self._ask([command])
        return self._answer(answer)

    async def replicated(self, replicas: int, *command: Any) -> Any:
        """The same for a command that writes, once so many replicas have what it wrote. Raises
        OutcomeUnknown if they had not in time."""
        # On the very connection that wrote: WAIT waits for what its own connection has written.
        answer, reached = await self._ask([command, ("WAIT", replicas, WAIT_MS)])
        found = self._answer(answer)
        if not isinstance(reached, int) or reached < replicas:
            if not isinstance(self._route, FixedRoute):
                self._doubt()  # a primary that was cut off keeps its clients: let the next one be looked up
            have = f"{reached} of {replicas} replicas have it" if isinstance(reached, int) else str(reached)
            raise OutcomeUnknown(
                f"{self.where}: outcome unknown: it is stored, but {have} after {WAIT_MS / 1e3:g} s",
                hint="safe to repeat; wait_replicas says how many it takes",
            )
        return found

    async def commands(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Answers of several commands sent together, which change nothing."""
        if not commands:
            return []
        return [refusals.checked(self.where, answer) for answer in await self._ask(commands)]

    def _answer(self, answer: Any) -> Any:
        if isinstance(answer, driver.NoScriptError):
            raise answer
        return refusals.checked(self.where, answer)

    async def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """If the first command is refused by a server that is not in charge, nothing has been done, and the
        server that is in charge is asked; not without end."""
        answers = await self._ask_one(commands)
        for _ in range(_ELSEWHERE_MOST):
            if refusals.word_of(answers[0]) not in refusals.ELSEWHERE:
                break
            answers = await self._ask_one(commands)
        return answers

    async def _ask_one(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.check_usable()
        async with self._room:
            self.check_usable()
            connection = await self._take()
            self._busy.add(connection)
            try:
                answers = await self._talk(connection, commands)
                for answer in answers:
                    if refusals.word_of(answer) in refusals.DOUBTFUL:
                        self._route.heard(answer)
                        self._doubt(connection)
                return answers
            finally:
                self._busy.discard(connection)
                if self._closed:
                    await hang_up(connection)
                    if not self._busy:
                        self._quiet.set()
                elif connection.is_connected and connection in self._trusted:
                    self._idle.append(connection)
                else:
                    self._trusted.discard(connection)
                    await hang_up(connection)

    async def _take(self) -> AbstractConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection in self._trusted and connection.is_connected and not _has_hung_up(connection):
                return connection
            self._trusted.discard(connection)
            await hang_up(connection)
        connection = await self.open()
        self._trusted.add(connection)
        return connection

    async def _talk(self, connection: AbstractConnection, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        answers: list[Any] = []
        try:
            packed = connection.pack_commands(commands)
            async with asyncio.timeout(self._answer_s()):
                await connection.send_packed_command(packed, check_health=False)
                for _ in commands:
                    try:
                        answers.append(
                            await connection.read_response(disable_decoding=True, disconnect_on_error=False)
                        )
                    except driver.ResponseError as error:
                        answers.append(error)
                    except (driver.BusyLoadingError, driver.AuthenticationError) as error:
                        # Answers too, though the driver takes them for the end of the connection.
                        self._doubt(connection)
                        return [error for _ in commands]
        except BaseException as error:
            # Answers may still be on their way: nobody may take them for his own.
            await hang_up(connection)
            if isinstance(error, LOST):
                self._doubt(connection)
                raise self._lost(error) from error
            raise
        return answers

    def _answer_s(self) -> float:
        return self._dialer.answer_s

    def _lost(self, error: BaseException) -> StorageError:
        trouble = refusals.tls_trouble(self.where, error)
        if trouble is not None:
            return trouble
        if refusals.is_full(error):
            return StorageUnreachable(f"{self.where}: {error}", hint="it has as many clients as it may")
        why = str(error) or "in time"
        return OutcomeUnknown(f"{self.where}: no answer ({why})", hint="repeat the call")

    def _doubt(self, connection: AbstractConnection | None = None) -> None:
        """The server may not be in charge any more: those who come now connect anew. Of connections that
        fail together, which were opened before, only the first is heard."""
        if self._closed or (connection is not None and connection not in self._trusted):
            return
        self._trusted.clear()
        for tell in self.on_doubt:
            tell()

    async def close(self) -> None:
        """Verbs under way get their answers, if they come soon."""
        if self._closed:
            return
        self._closed = True
        if self._busy:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._quiet.wait()
        for connection in [*self._idle, *self._busy]:
            await hang_up(connection)
        self._idle.clear()
        self._trusted.clear()


def _has_hung_up(connection: AbstractConnection) -> bool:
    reader = getattr(connection, "_reader", None)
    return reader is None or reader.at_eof()
