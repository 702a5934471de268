"""What a measurement stands on: a fresh database for each repetition, and what is told of its kind."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec import Struct

from benchmarks.figures import CheckFailed
from benchmarks.gauge import Gauge
from fluxmesh.storage.registry import masked

PROGRAMS: Final = ("redis-server", "valkey-server")
UNSAVED: Final = ("--save", "", "--appendonly", "no")
UP_S: Final = 10.0
DOWN_S: Final = 20.0


class Unfit(Exception):
    """This storage cannot be measured here; why."""


class Ground(Struct, frozen=True):
    """One fresh database. `floor`: how floor and referee are told of it; `gauge`: of a server."""

    url: str
    floor: str
    gauge: Gauge | None = None


class Grounds(Protocol):
    """Where fresh databases come from."""

    storage: str

    async def check(self) -> dict[str, Any]:
        """What lines tell of the storage. Raises Unfit."""

    def fresh(self, folder: Path) -> AbstractAsyncContextManager[Ground]:
        """A database that is empty, and gone at the end. Its files, if any, are put into the folder."""


class SqliteGrounds:
    """A file each."""

    storage = "sqlite"

    async def check(self) -> dict[str, Any]:
        import apsw

        return {"sqlite": apsw.sqlite_lib_version(), "apsw": apsw.apsw_version()}

    @contextlib.asynccontextmanager
    async def fresh(self, folder: Path) -> AsyncIterator[Ground]:
        yield Ground(f"sqlite:///{folder / 'jobs.db'}", f"sqlite:{folder / 'floor.db'}")


class ServerGrounds:
    """A redis-server each, of our own: nothing of one repetition is left in the memory of the next."""

    storage = "redis"

    def __init__(self) -> None:
        self._program = next(filter(None, map(shutil.which, PROGRAMS)), None)

    async def check(self) -> dict[str, Any]:
        if self._program is None:
            raise Unfit(
                f"neither {' nor '.join(PROGRAMS)} is in PATH: install one, or name a server by --url"
            )
        with tempfile.TemporaryDirectory(prefix="fluxmesh-bench-") as folder:
            return await _facts(self, Path(folder), "one of its own for each repetition")

    @contextlib.asynccontextmanager
    async def fresh(self, folder: Path) -> AsyncIterator[Ground]:
        port = _free_port()
        url = f"redis://127.0.0.1:{port}/0"
        async with self._serving(folder, port) as pid, _client(url) as client:
            gauge = Gauge(client)
            if await gauge.pid() != pid:
                raise CheckFailed(f"another server has taken port {port}")
            yield Ground(url, url, gauge)

    @contextlib.asynccontextmanager
    async def _serving(self, folder: Path, port: int) -> AsyncIterator[int]:
        """Its process id. Its settings are the defaults, but that it saves nothing."""
        assert self._program is not None
        log = folder / "server.log"
        with log.open("ab") as out:
            server = await asyncio.create_subprocess_exec(
                self._program,
                *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *UNSAVED),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C reaches us alone: workers end before their storage does
            )
        try:
            await _until_up(server, port, log)
            yield server.pid
        finally:
            await _end(server)


class GivenGrounds:
    """One database of a server that is there already; it has to be empty, and is emptied after each use."""

    storage = "redis"

    def __init__(self, url: str) -> None:
        self._url = url

    async def check(self) -> dict[str, Any]:
        return await _facts(self, Path(), masked(self._url))

    @contextlib.asynccontextmanager
    async def fresh(self, folder: Path) -> AsyncIterator[Ground]:
        async with _client(self._url) as client:
            if held := await client.dbsize():
                raise CheckFailed(
                    f"{masked(self._url)} holds {held:,} keys, and measuring empties the database:"
                    " give an empty one"
                )
            try:
                yield Ground(self._url, self._url, Gauge(client))
            finally:
                await client.flushdb()


def grounds_of(storage: str, url: str | None) -> Grounds:
    if storage == "sqlite":
        return SqliteGrounds()
    return ServerGrounds() if url is None else GivenGrounds(url)


async def _facts(grounds: Grounds, folder: Path, server: str) -> dict[str, Any]:
    """Which server and driver it is, as they tell themselves."""
    try:
        async with grounds.fresh(folder) as ground:
            assert ground.gauge is not None
            told = await ground.gauge.facts()
    except (CheckFailed, OSError) as error:
        raise Unfit(str(error)) from None
    for package in ("redis", "hiredis"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            told[f"python-{package}"] = importlib.metadata.version(package)
    return {"server": server} | told


@contextlib.asynccontextmanager
async def _client(url: str) -> AsyncIterator[Any]:
    """Of the driver itself. What fails is told as CheckFailed."""
    try:
        import redis.asyncio
    except ImportError:
        raise CheckFailed("the package redis is missing: pip install 'fluxmesh[redis]'") from None
    try:
        client = redis.asyncio.Redis.from_url(url, socket_connect_timeout=UP_S, socket_timeout=None)
    except ValueError as error:
        raise CheckFailed(f"{masked(url)}: {error}") from None
    try:
        yield client
    except redis.RedisError as error:
        raise CheckFailed(f"{masked(url)}: {error}") from error
    finally:
        await client.aclose()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _until_up(server: asyncio.subprocess.Process, port: int, log: Path) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + UP_S
    while server.returncode is None and loop.time() < deadline:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.01)
            continue
        writer.close()
        return
    raise CheckFailed(f"the server is not up: {_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-600:]


async def _end(server: asyncio.subprocess.Process) -> None:
    if server.returncode is None:
        server.terminate()
    try:
        await asyncio.wait_for(server.wait(), DOWN_S)
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()
