"""The way from a verb to its Lua script: one msgpack argument there, one answer back, one round trip.

A script is the file lua/<verb>.lua behind the prelude and the libraries that its `-- uses:` line names.
Nothing is ever sent twice: what was sent and not answered is OutcomeUnknown, what was not sent is
StorageUnreachable. EVALSHA's NOSCRIPT is an answer, after which the text itself is sent.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
from redis import exceptions as driver

from fluxmesh.clock import Clock, SystemClock
from fluxmesh.storage.redis.connection import Connections
from fluxmesh.storage.redis.keys import key, lua_keys

_FOLDER: Final = Path(__file__).with_name("lua")
_USES: Final = re.compile(r"^-- uses: (.+)$", re.MULTILINE)
# Ends and hand-backs must get through when memory is full: they free it.
_ALLOW_OOM: Final = frozenset(
    {"exchange", "release", "reap", "beat", "orphans", "cancel", "discard", "prune"}
)
_encode = msgspec.msgpack.Encoder().encode


def blob(value: bytes | None) -> msgspec.Raw | None:
    """Bytes as an argument: Lua reads them as a string (its msgpack knows no binary type)."""
    if value is None:
        return None
    return msgspec.Raw(b"\xdb" + len(value).to_bytes(4, "big") + value)


@cache
def script_text(verb: str, *, has_msgpack: bool = True) -> str:
    """The whole script of a verb, without a header. `has_msgpack`: the server brings its own."""
    body = (_FOLDER / f"{verb}.lua").read_text(encoding="utf-8")
    found = _USES.search(body)
    names = ["prelude", *(found[1].replace(" ", "").split(",") if found else [])]
    libraries = [(_FOLDER / f"{name}.lua").read_text(encoding="utf-8") for name in names]
    if not has_msgpack:
        own = (_FOLDER / "cmsgpack.lua").read_text(encoding="utf-8")
        libraries.insert(0, f"local cmsgpack = (function()\n{own}\nreturn cmsgpack\nend)()")
    text = "\n".join([*libraries, body])
    return "local P = KEYS[1]\n" + lua_keys(text) + text


class Scripts:
    """The verbs' door to one namespace of one server."""

    def __init__(self, connections: Connections, prefix: str, clock: Clock) -> None:
        self.connections = connections
        self.prefix = prefix
        self.clock = clock
        # The server's own time counts, unless a test brings a clock.
        self._server_time = type(clock) is SystemClock
        self._texts: dict[str, tuple[str, str]] = {}

    def key(self, name: str, *parts: object) -> str:
        return key(self.prefix, name, *parts)

    def now_argument(self) -> int:
        return 0 if self._server_time else int(self.clock.wall_us())

    def _text(self, verb: str) -> tuple[str, str]:
        known = self._texts.get(verb)
        if known is None:
            text = script_text(verb, has_msgpack=self.connections.has_msgpack)
            if verb in _ALLOW_OOM and self.connections.knows_flags:
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
