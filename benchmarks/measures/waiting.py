"""How long a job waits for a worker that has nothing else to do, and what that worker costs meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from benchmarks.bench import Bench, Site
from benchmarks.crew import WorkerProcess, usage_of_tree
from benchmarks.figures import Bound, CheckFailed, Figure, rounded, spread
from benchmarks.seen import check_all_completed, lateness_ms, pick_up_ms

RATE: Final = 20.0
SETTLE_DOWN_S: Final = 3.0  # after its start a worker opens, registers, imports: not what is measured
DELAYS_S: Final = (2.0, 6.0)
PICK_UP: Final = Bound(5.0, at_most=True)
LATE: Final = Bound(20.0, at_most=True)
IDLE: Final = Bound(0.5, at_most=True)


async def pick_up(bench: Bench) -> AsyncIterator[Figure]:
    """Single jobs from another process to an idle worker; from submission to start, by storage stamps."""
    count = 60 if bench.quick else 300
    spreads = []
    for _ in range(bench.repeat):
        async with bench.site() as site, site.worker() as worker:
            await asyncio.sleep(SETTLE_DOWN_S)
            told = await _open_loop(site, count)
            await site.until_completed(count, worker, 30)
            seen = await site.read()
            check_all_completed(seen, range(count))
            spreads.append(spread(pick_up_ms(seen)) | {"producer_late": rounded(told["late_ms"])})
    yield _of_spreads("pick-up", "p50", spreads, count, PICK_UP, {"concurrency": 8})


async def result(bench: Bench) -> AsyncIterator[Figure]:
    """The same jobs, each awaited by its producer: from the call of enqueue to the result in its hands."""
    count = 60 if bench.quick else 300
    spreads = []
    for _ in range(bench.repeat):
        async with bench.site() as site, site.worker() as worker:
            await asyncio.sleep(SETTLE_DOWN_S)
            told = await _open_loop(site, count, "--results")
            await site.until_completed(count, worker, 30)
            check_all_completed(await site.read(), range(count))
            spreads.append(spread(told["result_ms"]) | {"producer_late": rounded(told["late_ms"])})
    yield _of_spreads("result", "p50", spreads, count, None, {"concurrency": 8})


async def _open_loop(site: Site, count: int, *flags: str) -> dict[str, Any]:
    return await site.produce(
        "open", "--count", count, "--rate", RATE, *flags, within_s=60 + 3 * count / RATE
    )


def _of_spreads(
    name: str,
    share: str,
    spreads: list[dict[str, float]],
    count: int,
    bound: Bound | None,
    parameters: dict[str, Any],
) -> Figure:
    return Figure(
        name=f"{name} {share}",
        unit="ms",
        values=[seen[share] for seen in spreads],
        parameters={"n": count, "rate_per_s": RATE, "arrivals": "poisson, open loop", **parameters},
        bound=bound,
        details={"ms": spreads},
    )


async def delayed(bench: Bench) -> AsyncIterator[Figure]:
    """Jobs with a delay; from their due instant to their start, by storage stamps."""
    count = 40 if bench.quick else 200
    spreads = []
    for _ in range(bench.repeat):
        async with bench.site() as site, site.worker() as worker:
            least, most = DELAYS_S
            await site.produce("delayed", "--count", count, "--from", least, "--to", most)
            await site.until_completed(count, worker, most + 30)
            seen = await site.read()
            check_all_completed(seen, range(count))
            spreads.append(spread(lateness_ms(seen)))
    yield Figure(
        name="delayed p99",
        unit="ms late",
        values=[seen["p99"] for seen in spreads],
        parameters={"n": count, "delays_s": f"{DELAYS_S[0]:g} to {DELAYS_S[1]:g}", "concurrency": 8},
        bound=LATE,
        details={"ms": spreads},
    )


# -- doing nothing -------------------------------------------------------------------------------------


async def idle(bench: Bench) -> AsyncIterator[Figure]:
    """CPU time of supervisor and child together while there is no job, as a share of one core."""
    for_s = 10.0 if bench.quick else 60.0
    shares, details = [], []
    for _ in range(1 if bench.quick else min(bench.repeat, 2)):
        async with bench.site() as site, site.worker() as worker:
            await asyncio.sleep(SETTLE_DOWN_S)
            share, seen = await _watch(site, worker, for_s)
            shares.append(share)
            details.append(seen)
    yield Figure(
        name="idle worker",
        unit="% of a core",
        values=shares,
        parameters={"seconds": for_s, "concurrency": 8, "what": "supervisor and child"},
        bound=IDLE,
        details={"repetitions": details},
    )


async def _watch(site: Site, worker: WorkerProcess, for_s: float) -> tuple[float, dict[str, float]]:
    loop = asyncio.get_running_loop()
    before, writes, switches = usage_of_tree(worker.pid), _write_count(site), _switches(worker)
    if len(before.pids) < 2:
        raise CheckFailed("the worker has no child")
    began = loop.time()
    await asyncio.sleep(for_s)
    took_s = loop.time() - began
    after = usage_of_tree(worker.pid)
    if after.pids != before.pids:
        raise CheckFailed("a process of the worker was replaced meanwhile")
    return 100 * (after.cpu_s - before.cpu_s) / took_s, {
        "processes": len(after.pids),
        "write_transactions_per_s": rounded((_write_count(site) - writes) / took_s),
        "wake_ups_per_s": rounded((_switches(worker) - switches) / took_s),
    }


def _write_count(site: Site) -> int:
    """Write transactions so far, of all processes: the counter in the header of SQLite's WAL index
    ("iChange", the third word; sqlite.org/walformat.html)."""
    with (site.folder / "jobs.db-shm").open("rb") as file:
        return int.from_bytes(file.read(12)[8:], sys.byteorder)


def _switches(worker: WorkerProcess) -> int:
    """How often threads of the tree have gone to sleep and been woken so far."""
    total = 0
    for pid in usage_of_tree(worker.pid).pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            for text in status.read_text().splitlines():
                if text.startswith("voluntary_ctxt_switches"):
                    total += int(text.split()[1])
    return total
