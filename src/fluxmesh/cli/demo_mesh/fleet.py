"""The five processes: started, listened to, killed, started again, and gone at the end whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from fluxmesh.cli.demo_mesh.atlas import LOOPBACK, REGIONS, weather_of
from fluxmesh.cli.demo_mesh.telling import Orders, Telling
from fluxmesh.config import ENV_PREFIX, TEST_PREFIX
from fluxmesh.errors import FluxMeshError
from fluxmesh.mesh.delays import WEATHER_ENV

READY_MOST_S: Final = 30.0
STOP_MOST_S: Final = 6.0
LINE_BYTES: Final = 4 << 20  # of one telling
LAST_WORDS: Final = 2_000  # characters of what a region logged
_LOOK_S: Final = 0.05
_PORTS: Final = (20_000, 30_000)  # below those that the kernel gives to connections
_TRIES: Final = 200
_decode: Final = msgspec.json.Decoder(Telling).decode
OnEvent = Callable[[str, dict[str, Any]], None]


class Run:
    """One process of a region. `told` is its last word, `ended` the jobs whose bodies it has ended."""

    def __init__(self, region: str, process: asyncio.subprocess.Process) -> None:
        self.region = region
        self.process = process
        self.killed = False
        self.told: Telling | None = None
        self.ended: list[str] = []
        self.last_words = ""
        self.readers: tuple[asyncio.Task[None], ...] = ()

    @property
    def alive(self) -> bool:
        return self.process.returncode is None


class Fleet:
    """`on_event(region, fields)` hears of every event that a region logs."""

    def __init__(self, folder: Path, orders: Mapping[str, Orders], key: str, on_event: OnEvent) -> None:
        self._folder = folder
        self._orders = orders
        self._key = key
        self._on_event = on_event
        self.runs: list[Run] = []  # all of them, the dead too
        self.now: dict[str, Run] = {}

    # -- life ------------------------------------------------------------------------------------------
    async def start(self, region: str) -> None:
        """Start its process; it joins by itself."""
        orders = self._orders[region]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fluxmesh.cli.demo_mesh.region",
            msgspec.json.encode(orders).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._folder,
            env=self._environment(region),
            limit=LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the demo, which ends its regions in order
        )
        run = Run(region, process)
        self.runs.append(run)
        self.now[region] = run
        run.readers = (asyncio.create_task(self._hear(run)), asyncio.create_task(self._read_log(run)))

    def _environment(self, region: str) -> dict[str, str]:
        ours = {key: value for key, value in os.environ.items() if not _is_setting(key)}
        ours[f"{ENV_PREFIX}MESH_ENCRYPTION_KEY"] = self._key
        ports = {name: orders.port for name, orders in self._orders.items()}
        ours[WEATHER_ENV] = weather_of(region, ports)
        return ours

    def kill(self, region: str) -> bool:
        """kill -9. False: it was not there."""
        run = self.now[region]
        if not run.alive:
            return False
        run.killed = True
        with contextlib.suppress(ProcessLookupError):
            run.process.send_signal(signal.SIGKILL)
        return True

    async def wait_until_met(self) -> None:
        """Return when each region has all of them on its ring. Raises FluxMeshError."""
        for _ in range(round(READY_MOST_S / _LOOK_S)):
            self.check()
            told = [run.told for run in self.now.values()]
            if all(one is not None and one.on_ring == len(REGIONS) for one in told):
                return
            await asyncio.sleep(_LOOK_S)
        raise FluxMeshError(
            f"the regions did not meet in {READY_MOST_S:g} s", hint="is this machine busy? Then try again"
        )

    def check(self) -> None:
        """Raises FluxMeshError if a region has ended that nobody killed."""
        for run in self.now.values():
            if not run.alive and not run.killed:
                raise FluxMeshError(
                    f"{run.region} ended early, exit {run.process.returncode}: {run.last_words.strip()}",
                    hint="is there room for five processes, and ports on 127.0.0.1? Then try again",
                )

    async def stop(self) -> None:
        """Let all end, in order if they do so in time; none is there afterwards."""
        for run in self.runs:
            if run.process.stdin is not None:
                run.process.stdin.close()
        waits = [asyncio.create_task(run.process.wait()) for run in self.runs if run.alive]
        if waits:
            await asyncio.wait(waits, timeout=STOP_MOST_S)
        for run in self.runs:
            if run.alive:
                with contextlib.suppress(ProcessLookupError):
                    run.process.kill()
            await run.process.wait()
        readers = [reader for run in self.runs for reader in run.readers]
        if readers:
            await asyncio.wait(readers, timeout=1.0)
        for reader in readers:
            reader.cancel()

    # -- what it hears ---------------------------------------------------------------------------------
    async def _hear(self, run: Run) -> None:
        assert run.process.stdout is not None
        async for line in run.process.stdout:
            try:
                told = _decode(line)
            except (msgspec.MsgspecError, ValueError):
                continue  # the half of a line, from one that was killed
            run.told = told
            run.ended.extend(told.ended)

    async def _read_log(self, run: Run) -> None:
        assert run.process.stderr is not None
        async for line in run.process.stderr:
            try:
                fields = msgspec.json.decode(line)
            except msgspec.MsgspecError:
                run.last_words = (run.last_words + line.decode("utf-8", "replace"))[-LAST_WORDS:]
                continue
            if isinstance(fields, dict) and isinstance(fields.get("event"), str):
                if fields.get("level") == "error":
                    run.last_words = f"{run.last_words}{fields}\n"[-LAST_WORDS:]
                self._on_event(run.region, fields)


@contextlib.asynccontextmanager
async def fleet_of(
    folder: Path, orders: Mapping[str, Orders], key: str, on_event: OnEvent
) -> AsyncIterator[Fleet]:
    """All regions, started; stopped at the end whatever happens."""
    fleet = Fleet(folder, orders, key, on_event)
    try:
        for region in orders:
            await fleet.start(region)
        yield fleet
    finally:
        await asyncio.shield(fleet.stop())


def free_ports(rng: random.Random) -> dict[str, int]:
    """For each region the first of two ports that nobody has just now. Raises FluxMeshError."""
    for _ in range(_TRIES):
        first = rng.randrange(_PORTS[0], _PORTS[1] - 2 * len(REGIONS), 2)
        ports = {region: first + 2 * number for number, region in enumerate(REGIONS)}
        if all(_is_free(port) and _is_free(port + 1) for port in ports.values()):
            return ports
    raise FluxMeshError("no ten neighbouring ports of 127.0.0.1 are free", hint="what has all of them?")


def _is_free(port: int) -> bool:
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(socket.AF_INET, kind) as sock:
            try:
                sock.bind((LOOPBACK, port))
            except OSError:
                return False
    return True


def _is_setting(key: str) -> bool:
    return key.startswith(ENV_PREFIX) and not key.startswith(TEST_PREFIX)
