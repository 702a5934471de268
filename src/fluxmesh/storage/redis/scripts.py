"""The way from a verb to its Lua script: one msgpack argument there, one answer back, one round trip.

Nothing is ever sent twice: what was sent and not answered is OutcomeUnknown, what was not sent is
StorageUnreachable. EVALSHA's NOSCRIPT is an answer, after which the text itself is sent.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from redis import exceptions as driver

from fluxmesh.clock import US, Clock, SkewedClock, SystemClock
from fluxmesh.storage.redis.assembly import script_text
from fluxmesh.storage.redis.connection import Connections
from fluxmesh.storage.redis.keys import key

# When memory is full these are refused. All else must get through: ends, hand-backs and pruning free memory,
# and whoever does them has to register, lead, and be found dead.
_TAKES_WORK_IN: Final = frozenset({"enqueue", "replay"})
_encode = msgspec.msgpack.Encoder().encode


def blob(value: bytes | None) -> msgspec.Raw | None:
    """Bytes as an argument: Lua reads them as a string (its msgpack knows no binary type)."""
    if value is None:
        return None
    return msgspec.Raw(b"\xdb" + len(value).to_bytes(4, "big") + value)


class Scripts:
    """The verbs' door to one namespace of one server."""

    def __init__(self, connections: Connections, prefix: str, clock: Clock) -> None:
        self.connections = connections
        self.prefix = prefix
        self.clock = clock
        # The server's own time counts, unless a test brings a clock.
        self._server_time = type(clock) in (SystemClock, SkewedClock)
        self._texts: dict[str, tuple[str, str]] = {}

    def key(self, name: str, *parts: object) -> str:
        return key(self.prefix, name, *parts)

    def now_argument(self) -> int:
        return 0 if self._server_time else int(self.clock.wall_us())

    async def time_us(self) -> int:
        """What counts as the time here."""
        if not self._server_time:
            return int(self.clock.wall_us())
        seconds, micros = await self.read("TIME")
        return int(seconds) * US + int(micros)

    def _text(self, verb: str) -> tuple[str, str]:
        known = self._texts.get(verb)
        if known is None:
            text = script_text(verb, has_msgpack=self.connections.has_msgpack)
            if verb not in _TAKES_WORK_IN and self.connections.knows_flags:
                text = "#!lua flags=allow-oom\n" + text
            digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            known = self._texts[verb] = (text, digest)
        return known

    async def run(self, verb: str, *args: Any, replicas: int = 0) -> Any:
        """The script's answer as the driver gives it: bytes, ints, lists, None. It comes when so many
        replicas have what the script wrote; it must write then, also if it finds everything done."""
        text, digest = self._text(verb)
        packed = _encode((self.now_argument(), *args))
        try:
            return await self._send(replicas, "EVALSHA", digest, 1, self.prefix, packed)
        except driver.NoScriptError:
            return await self._send(replicas, "EVAL", text, 1, self.prefix, packed)

    async def _send(self, replicas: int, *command: Any) -> Any:
        if replicas:
            return await self.connections.replicated(replicas, *command)
        return await self.connections.command(*command)

    async def read(self, *command: Any) -> Any:
        """One plain command; its answer as the driver gives it."""
        return await self.connections.command(*command)

    async def read_all(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Several plain commands in one round trip, not atomic together."""
        return await self.connections.commands(commands)
