"""Opening connections to addresses, and a first question on one. TLS is made ready once."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

from redis import exceptions as driver
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from fluxmesh.errors import InvalidOption, StorageRefused, StorageUnreachable
from fluxmesh.storage.redis import refusals
from fluxmesh.storage.redis.target import Address, Target

CONNECT_S: Final = 5.0
ANSWER_S: Final = 10.0
FOUND_ANSWER_S: Final = 5.0  # where another server may take over meanwhile
_QUESTION_S: Final = 1.0
_WANTS_TLS: Final = "a server that wants TLS is named by rediss://"
_WANTS_CERTIFICATE: Final = "it may want a certificate of ours: ssl_certfile=… and ssl_keyfile=… in the URL"
LOST: Final = (driver.ConnectionError, driver.TimeoutError, OSError, EOFError, TimeoutError)
# A peer that is gone without a word is noticed by the kernel, at no command of ours.
_KEEPALIVE: Final = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}


def shown(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Dialer:
    """Makes connections as a Target wants them."""

    def __init__(self, target: Target) -> None:
        self.where = target.shown
        self._target = target
        self._kind: type[Any] = SSLConnection if target.tls else Connection
        self._common: dict[str, Any] = {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "decode_responses": False,
            "socket_keepalive": True,
            "socket_keepalive_options": _KEEPALIVE,
        }
        self._tls: Any = None
        if target.tls:
            self._tls = self._ready_tls()

    def _ready_tls(self) -> Any:
        try:
            one = self.make(self._target.hosts[0])
            one.ssl_context.get()
        except (OSError, ValueError, TypeError, driver.RedisError) as error:
            said = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise InvalidOption(
                "url", f"{self.where!r}: its TLS options cannot be used: {said}", hint="see docs/redis.md"
            ) from error
        return one.ssl_context

    @property
    def answer_s(self) -> float:
        """How long an answer may take."""
        own: float | None = self._target.options.get("socket_timeout")
        return own or (FOUND_ANSWER_S if self._target.service else ANSWER_S)

    @property
    def hung_up_hint(self) -> str:
        """Why a server may hang up on whoever has just come."""
        return _WANTS_CERTIFICATE if self._target.tls else _WANTS_TLS

    def make(self, address: Address, *, sentinel: bool = False) -> Any:
        """A connection that is not open yet."""
        chosen = dict(self._target.asking if sentinel else self._target.options)
        chosen.setdefault("socket_connect_timeout", _QUESTION_S if sentinel else CONNECT_S)
        # Answers are waited for by whoever asks, within `answer_s`: the driver's own way, asyncio.wait_for,
        # swallows a cancellation that comes as the wait ends (on Python 3.11).
        chosen["socket_timeout"] = None
        host, port = address
        made = self._kind(host=host, port=port, **chosen, **self._common)
        if self._tls is not None:
            made.ssl_context = self._tls
        return made

    async def dial(self, address: Address, *, sentinel: bool = False) -> AbstractConnection:
        """An open connection. Raises StorageUnreachable, or StorageRefused where somebody has to change
        something first."""
        connection: AbstractConnection = self.make(address, sentinel=sentinel)
        try:
            async with asyncio.timeout(connection.socket_connect_timeout):
                await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException as error:
            await hang_up(connection)
            if isinstance(error, driver.ResponseError | driver.AuthenticationError):
                raise refusals.refusal(self.where, error) from error
            if isinstance(error, (*LOST, driver.RedisError)):
                raise self.lost(error) from error
            raise
        return connection

    def lost(self, error: BaseException) -> StorageUnreachable | StorageRefused:
        """What to say of a connection that failed before anything was asked on it."""
        trouble = refusals.tls_trouble(self.where, error)
        if trouble is not None:
            return trouble
        late = isinstance(error, TimeoutError | driver.TimeoutError)
        hint = "is the server running?"
        if late and self._target.tls:
            hint = "is the server running, and does its port speak TLS? redis:// is without it"
        elif isinstance(_cause(error), ConnectionResetError | EOFError | asyncio.IncompleteReadError):
            hint = self.hung_up_hint
        return StorageUnreachable(f"{self.where}: {str(error) or 'no answer in time'}", hint=hint)

    async def question(self, address: Address, *words: Any, sentinel: bool = False) -> Any:
        """The answer to one small question, asked on a connection of its own."""
        connection = await self.dial(address, sentinel=sentinel)
        try:
            return await ask(self.where, connection, *words)
        finally:
            await hang_up(connection)


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return error


async def hang_up(connection: AbstractConnection) -> None:
    """Close at once. TLS would wait for the other side's good-bye, which a dead one does not say."""
    writer = getattr(connection, "_writer", None)
    if writer is not None and isinstance(connection, SSLConnection):
        writer.transport.abort()
    await connection.disconnect(nowait=True)


async def ask(where: str, connection: AbstractConnection, *question: Any) -> Any:
    """A small question that changes nothing, on an open connection."""
    try:
        async with asyncio.timeout(_QUESTION_S):
            await connection.send_command(*question, check_health=False)
            return await connection.read_response(disable_decoding=True, disconnect_on_error=False)
    except (driver.ResponseError, driver.AuthenticationError) as error:
        raise refusals.refusal(where, error) from error
    except LOST as error:
        raise StorageUnreachable(f"{where}: {str(error) or 'no answer in time'}") from error
