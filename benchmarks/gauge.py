"""What a Redis server tells of its own work: processor time, scripts, and which commands its clients sent.

The driver is imported where it is used: whoever measures SQLite needs none."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from benchmarks.figures import CheckFailed

PATIENCE_S: Final = 10.0
SETTINGS: Final = ("save", "appendonly", "io-threads", "maxmemory", "maxmemory-policy")
FLAGGED: Final = "#!lua flags=allow-oom\n"
INSIDE_A_SCRIPT: Final = "lua"  # as MONITOR tells of a command whose client is a script


class Spent(Struct, frozen=True):
    """What the server has done so far. Times in seconds."""

    cpu_s: float
    commands: int  # all that it processed; those that scripts call are among them
    scripts: int  # EVALSHA and EVAL
    scripts_s: float  # the commands that they call included


class Heard(Struct, frozen=True):
    """Which commands clients sent meanwhile, the gauge's own left out."""

    seconds: float
    sent: int
    by_name: dict[str, int]
    inside_scripts: int
    server_cpu_s: float


class Gauge:
    """One connection to the server, and another while it listens."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def facts(self) -> dict[str, Any]:
        """Version and settings. A setting that the server does not give out is told as null."""
        from redis.exceptions import RedisError

        told = await self._client.info("server")
        facts: dict[str, Any] = {"redis": told["redis_version"]}
        for name in SETTINGS:
            try:
                facts[name] = (await self._client.config_get(name)).get(name)
            except RedisError:
                facts[name] = None
        return facts

    async def pid(self) -> int:
        return int((await self._client.info("server"))["process_id"])

    async def held(self) -> dict[str, int]:
        """Keys, and the memory that the server uses."""
        memory = await self._client.info("memory")
        return {"records": int(await self._client.dbsize()), "bytes": int(memory["used_memory"])}

    async def spent(self) -> Spent:
        """One command, so that it can be told apart in what MONITOR shows."""
        told = await self._client.info("all")
        scripts = [told.get(f"cmdstat_{name}", {"calls": 0, "usec": 0}) for name in ("evalsha", "eval")]
        return Spent(
            cpu_s=told["used_cpu_user"] + told["used_cpu_sys"],
            commands=told["total_commands_processed"],
            scripts=sum(stat["calls"] for stat in scripts),
            scripts_s=sum(stat["usec"] for stat in scripts) / 1e6,
        )

    async def heard(self, meanwhile: Awaitable[object]) -> Heard:
        """Listen until `meanwhile` is over.

        What was sent is what the server processed less what MONITOR marks as called by a script: so a command
        that MONITOR hides is counted too. Raises CheckFailed if the two do not fit together."""
        loop = asyncio.get_running_loop()
        async with self._client.monitor() as monitor:
            own = (await self._client.client_info())[
                "addr"
            ]  # asked only now: the monitor has taken a connection
            reading = asyncio.ensure_future(_between(monitor, own))
            try:
                before, began = await self.spent(), loop.time()
                await meanwhile
                after, took_s = await self.spent(), loop.time() - began
                shown = await asyncio.wait_for(reading, PATIENCE_S)
            except TimeoutError:
                raise CheckFailed("MONITOR does not show what was sent") from None
            finally:
                reading.cancel()
        inside = sum(client == INSIDE_A_SCRIPT for client, _ in shown)
        processed = after.commands - before.commands - 1  # the first look itself
        if processed < len(shown):
            raise CheckFailed(f"the server counts {processed:,} commands, and MONITOR shows {len(shown):,}")
        names = Counter(name for client, name in shown if client != INSIDE_A_SCRIPT)
        if hidden := processed - len(shown):
            names["(hidden)"] = hidden
        return Heard(
            took_s, processed - inside, dict(names.most_common()), inside, after.cpu_s - before.cpu_s
        )


def _verbs() -> dict[str, str]:
    """Which verb the script of a hash is, whether it was sent with the flag or without."""
    from fluxmesh.storage.redis import scripts

    folder = Path(scripts.__file__).with_name("lua")
    texts = {path.stem: scripts.script_text(path.stem) for path in folder.glob("*.lua")}
    return {
        hashlib.sha1((header + text).encode(), usedforsecurity=False).hexdigest(): f"EVALSHA {verb}"
        for verb, text in texts.items()
        for header in ("", FLAGGED)
    }


async def _between(monitor: Any, own: str) -> list[tuple[str, str]]:
    """Client and name of each command between the first and the second INFO of the client `own`."""
    verbs = _verbs()
    shown: list[tuple[str, str]] = []
    marks = 0
    while marks < 2:
        line = await monitor.next_command()
        client = line["client_type"] if line["client_type"] != "tcp" else _address(line)
        name, _, arguments = line["command"].partition(" ")
        if client == own and name.upper() == "INFO":
            marks += 1
        elif marks:
            shown.append((client, verbs.get(arguments.partition(" ")[0], name.upper())))
    return shown


def _address(line: dict[str, str]) -> str:
    return f"{line['client_address']}:{line['client_port']}"
