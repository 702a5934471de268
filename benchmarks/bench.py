"""What a measurement works with: fresh databases, processes on them, and what the run knows so far."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.bounds import BOUNDS
from benchmarks.crew import OwnerProcess, WorkerProcess, run_module, working
from benchmarks.figures import ROOT, Bound, CheckFailed, Floor
from benchmarks.grounds import Ground, Grounds
from benchmarks.seen import Seen
from fluxmesh.config import ENV_PREFIX, Settings
from fluxmesh.job import Status
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage

LOOK_S: Final = 0.1
READY_S: Final = 90.0
SLOWEST_RATE: Final = 200.0  # jobs/s below which a run is given up
_decode_seen = msgspec.json.Decoder(list[Seen]).decode


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without settings of FluxMesh: defaults are what is measured."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    before = kept.get("PYTHONPATH")
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    return kept | more


class Site:
    """One fresh database in a folder of its own, with the processes that work on it."""

    def __init__(self, folder: Path, storage: Storage, ground: Ground, environment: dict[str, str]) -> None:
        self.folder = folder
        self.storage = storage
        self.url = ground.url
        self.gauge = ground.gauge
        self.environment = environment

    async def produce(self, mode: str, *arguments: object, within_s: float = 120.0) -> dict[str, Any]:
        """Run a producer to its end; what it tells."""
        words = [str(argument) for argument in arguments]
        out = await run_module(
            "benchmarks.producer",
            mode,
            *words,
            environment=self.environment,
            folder=self.folder,
            within_s=within_s,
        )
        told: dict[str, Any] = json.loads(out)
        return told

    async def submit(self, count: int) -> float:
        """Jobs 0 to count-1 of the task that does nothing, by `task.map` in a process of its own; jobs/s."""
        told = await self.produce("bulk", "--count", count, within_s=60 + count / SLOWEST_RATE)
        if told["submitted"] != count:
            raise CheckFailed(f"{told['submitted']:,} of {count:,} jobs were submitted")
        return count / float(told["seconds"])

    async def completed(self) -> int:
        return (await self.storage.counts()).by_status.get(Status.COMPLETED, 0)

    async def check_stored(self, count: int) -> None:
        stored = (await self.storage.counts()).total
        if stored != count:
            raise CheckFailed(f"{stored:,} of {count:,} submitted jobs are stored")

    async def read(self) -> list[Seen]:
        """All jobs and histories, read by another process."""
        out = await run_module(
            "benchmarks.reader", self.url, environment=self.environment, folder=self.folder, within_s=600
        )
        return _decode_seen(out)

    @contextlib.asynccontextmanager
    async def worker(
        self,
        *,
        worker_id: str = "bench",
        concurrency: int = 8,
        processes: int | None = None,
        ready: bool = True,
        environment: dict[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> AsyncIterator[WorkerProcess]:
        """`fluxmesh worker` on this database; `ready`: from when all its processes wait for work."""
        process = WorkerProcess(
            self.folder,
            self.environment | (environment or {}),
            worker_id=worker_id,
            concurrency=concurrency,
            processes=processes,
            flags=flags,
        )
        async with working(process):
            if ready:
                await self.until_ready(process, processes or 1)
            yield process

    async def until_ready(self, worker: WorkerProcess, processes: int = 1) -> None:
        """Return when all processes of the worker are registered."""
        await self.until(lambda: self._ready(worker.worker_id, processes), READY_S, worker)

    @contextlib.asynccontextmanager
    async def owner(self, count: int) -> AsyncIterator[OwnerProcess]:
        process = OwnerProcess(self.folder, self.environment, self.url, count)
        try:
            yield process
        finally:
            await process.kill()

    async def until_completed(
        self,
        count: int,
        worker: WorkerProcess,
        within_s: float | None = None,
        look: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`look` is told at each look how many have completed."""

        async def completed() -> bool:
            done = await self.completed()
            if look is not None:
                await look(done)
            return done >= count

        limit_s = 60 + count / SLOWEST_RATE if within_s is None else within_s
        await self.until(completed, limit_s, worker)

    async def until(
        self, holds: Callable[[], Awaitable[bool]], within_s: float, worker: WorkerProcess | None = None
    ) -> None:
        """Look again and again, seldom enough to be no load. Raises CheckFailed when the time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while not await holds():
            if worker is not None:
                worker.check_alive()
            if loop.time() > deadline:
                counts = (await self.storage.counts()).by_status
                raise CheckFailed(f"not done after {within_s:g} s; jobs: {dict(counts)}")
            await asyncio.sleep(LOOK_S)

    async def _ready(self, worker_id: str, processes: int) -> bool:
        fleet = await self.storage.fleet()
        names = {worker_id, *(f"{worker_id}.{number}" for number in range(processes))}
        return sum(info.worker_id in names and info.status == "ready" for info in fleet) >= processes


class Bench:
    """One run on one storage: its options, and the floor once it is measured."""

    def __init__(
        self,
        *,
        grounds: Grounds,
        folder: Path,
        n: int,
        repeat: int,
        quick: bool,
        full: bool,
        concurrencies: Sequence[int],
        referee: Path | None,
        referee_note: str | None,
    ) -> None:
        self.grounds = grounds
        self.folder = folder
        self.n = n
        self.repeat = repeat
        self.quick = quick
        self.full = full
        self.concurrencies = concurrencies
        self.referee = referee
        self.referee_note = referee_note
        self.floors: dict[str, Floor] = {}
        self.standing = "not compared: the floor was not measured in this run"

    @property
    def configuration(self) -> dict[str, Any]:
        """What was measured with: the settings in force, and how much of it."""
        settings = msgspec.to_builtins(Settings())
        options = {"n": self.n, "repeat": self.repeat, "quick": self.quick}
        return {"storage": self.grounds.storage, "settings": settings, **options}

    def bound(self, name: str) -> Bound | None:
        """What this storage is held to."""
        return BOUNDS[self.grounds.storage].get(name)

    def floor(self, figure: str, batch: int | None = None) -> Floor | None:
        """A figure of this run's floor; None if it was not measured."""
        return self.floors.get(figure if batch is None else f"{figure} at batch {batch}")

    def note_floor(self, name: str, values: Sequence[float]) -> None:
        self.floors[name] = Floor(name, statistics.median(values))

    @contextlib.asynccontextmanager
    async def ground(self) -> AsyncIterator[tuple[Path, Ground]]:
        """An empty folder and an empty database; both gone at the end."""
        folder = Path(tempfile.mkdtemp(prefix="site-", dir=self.folder))
        try:
            async with self.grounds.fresh(folder) as ground:
                yield folder, ground
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def site(self) -> AsyncIterator[Site]:
        """A fresh database of FluxMesh; gone at the end."""
        async with self.ground() as (folder, ground):
            url = ground.url
            storage = await open_storage(url, Settings(url=url), create=True)
            try:
                yield Site(folder, storage, ground, clean_environment(FLUXMESH_URL=url))
            finally:
                await storage.close()
