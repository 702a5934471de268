"""A million jobs through one worker, in rounds: its memory does not grow, and nothing that has ended stays.

Each round is submitted, drained and pruned before the next begins: so every job is seen to have completed,
and what is left then should be the same each time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import apsw

from benchmarks.bench import Bench, Site
from benchmarks.crew import WorkerProcess
from benchmarks.figures import CheckFailed, Figure, rounded
from fluxmesh.config import BATCH_MAX
from fluxmesh.job import Status
from fluxmesh.storage.values import Retention

JOBS: Final = 1_000_000
JOBS_QUICK: Final = 20_000
ROUND: Final = 50_000  # the memory of the worker counts from the end of the first one
ROUND_QUICK: Final = 5_000
CONCURRENCY: Final = 64
SAMPLE_S: Final = 1.0
PRUNE_S: Final = 120.0
PRUNES: Final = 50  # between two looks
AT_ONCE: Final = Retention(0.0, 0.0, 0.0, worker_ttl_s=86_400.0)


class Samples:
    """Memory of the process that runs the bodies, seldom enough to be no load."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._next_at = 0.0
        self.mb: list[float] = []

    def take(self) -> None:
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + SAMPLE_S
            self.mb.append(rounded(resident_mb(self._pid)))


def resident_mb(pid: int) -> float:
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    [line] = [field for field in fields if field.startswith("VmRSS:")]
    return int(line.split()[1]) * 1_024 / 1e6


async def endurance(bench: Bench) -> AsyncIterator[Figure]:
    """Two figures of one run: what the worker's memory grew by, and what stays in the storage."""
    jobs, size = (JOBS_QUICK, ROUND_QUICK) if bench.quick else (JOBS, ROUND)
    async with bench.site() as site, site.worker(concurrency=CONCURRENCY) as worker:
        [member] = [info for info in await site.storage.fleet() if info.worker_id == worker.worker_id]
        samples = Samples(member.pid)
        kept: list[dict[str, int]] = []
        drained_s = 0.0
        for number in range(jobs // size):
            drained_s += await _round(site, worker, size, samples if number else None)
            kept.append(await stored(site))
    parameters = {"jobs": jobs, "round": size, "concurrency": CONCURRENCY}
    drift = max(samples.mb) - samples.mb[0]
    yield Figure(
        name="endurance: memory of the worker grew by",
        unit="MB",
        values=[drift],
        parameters=parameters,
        bound=bench.bound("endurance-memory"),
        details={"first_mb": samples.mb[0], "worst_mb": max(samples.mb), "last_mb": samples.mb[-1]}
        | {"samples": len(samples.mb), "seconds_of_draining": rounded(drained_s)},
    )
    yield Figure(
        name="endurance: rows or keys more than after the first round",
        unit="",
        values=[float(kept[-1]["records"] - kept[0]["records"])],
        parameters=parameters,
        bound=bench.bound("endurance-records"),
        details={"first": kept[0], "last": kept[-1]},
    )


async def _round(site: Site, worker: WorkerProcess, size: int, samples: Samples | None) -> float:
    """Seconds from the end of the submission to the last job's end."""
    await site.submit(size)
    began = time.perf_counter()

    async def look(_: int) -> None:
        if samples is not None:
            samples.take()

    await site.until_completed(size, worker, look=look)
    took_s = time.perf_counter() - began
    counts = {status: n for status, n in (await site.storage.counts()).by_status.items() if n}
    if counts != {Status.COMPLETED: size}:
        raise CheckFailed(f"after a round of {size:,}: {counts}")
    await site.until(lambda: _pruned(site), PRUNE_S)
    return took_s


async def _pruned(site: Site) -> bool:
    """A few batches more; whether that was all."""
    for _ in range(PRUNES):
        await site.storage.prune(AT_ONCE, BATCH_MAX)
    return not (await site.storage.counts()).total


async def stored(site: Site) -> dict[str, int]:
    """What the storage holds: rows or keys, and bytes."""
    if site.gauge is not None:
        return await site.gauge.held()
    return file_holds(path_of(site.url))


def path_of(url: str) -> Path:
    return Path(url.partition(":///")[2])


def file_holds(path: Path) -> dict[str, int]:
    """Rows of all tables; the file, of which pages that are free are used again."""
    with contextlib.closing(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)) as db:
        names: list[Any] = [
            name for (name,) in db.execute("select name from sqlite_schema where type = 'table'")
        ]
        records = sum(next(db.execute(f'select count(*) from "{name}"'))[0] for name in names)
        size, free, page = (
            next(db.execute(f"pragma {name}"))[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return {"records": records, "bytes": size * page, "free_bytes": free * page}
