"""How long a job waits for a worker that has nothing else to do, and what that worker costs meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from benchmarks.bench import Bench, Site
from benchmarks.crew import WorkerProcess, usage_of_tree
from benchmarks.figures import Bound, CheckFailed, Figure, rounded, spread
from benchmarks.gauge import Gauge
from benchmarks.seen import check_all_completed, lateness_ms, pick_up_ms

RATE: Final = 20.0
SETTLE_DOWN_S: Final = 3.0  # after its start a worker opens, registers, imports: not what is measured
DELAYS_S: Final = (2.0, 6.0)


async def pick_up(bench: Bench) -> AsyncIterator[Figure]:
    """Single jobs from another process to an idle worker; from submission to start, by storage stamps."""
    count = 60 if bench.quick else 300
    spreads = []
    for _ in range(bench.repeat):
        async with bench.site() as site, site.worker() as worker:
            await asyncio.sleep(SETTLE_DOWN_S)
            told = await open_loop(site, count)
            await site.until_completed(count, worker, 30)
            seen = await site.read()
            check_all_completed(seen, range(count))
            spreads.append(spread(pick_up_ms(seen)) | {"producer_late": rounded(told["late_ms"])})
    yield _of_spreads("pick-up", "p50", spreads, count, bench.bound("pick-up"), {"concurrency": 8})


async def result(bench: Bench) -> AsyncIterator[Figure]:
    """The same jobs, each awaited by its producer: from the call of enqueue to the result in its hands."""
    count = 60 if bench.quick else 300
    spreads = []
    for _ in range(bench.repeat):
        async with bench.site() as site, site.worker() as worker:
            await asyncio.sleep(SETTLE_DOWN_S)
            told = await open_loop(site, count, "--results")
            await site.until_completed(count, worker, 30)
            check_all_completed(await site.read(), range(count))
            spreads.append(spread(told["result_ms"]) | {"producer_late": rounded(told["late_ms"])})
    yield _of_spreads("result", "p50", spreads, count, None, {"concurrency": 8})


async def open_loop(site: Site, count: int, *flags: str) -> dict[str, Any]:
    """Single jobs at the rate of this file, by a process of their own."""
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
        bound=bench.bound("delayed"),
        details={"ms": spreads},
    )


# -- doing nothing -------------------------------------------------------------------------------------


class Rest(Struct, frozen=True):
    """What was seen of a worker without jobs."""

    share: float  # of a core, in percent
    commands_per_s: float | None  # sent to the server, where there is one
    told: dict[str, Any]


async def idle(bench: Bench) -> AsyncIterator[Figure]:
    """Supervisor and child together while there is no job: their CPU time as a share of one core, and the
    commands that they send to a server."""
    for_s = 10.0 if bench.quick else 60.0
    rests = []
    for _ in range(1 if bench.quick else min(bench.repeat, 2)):
        async with bench.site() as site, site.worker() as worker:
            await asyncio.sleep(SETTLE_DOWN_S)
            rests.append(await _watch(site, worker, for_s))
    parameters = {"seconds": for_s, "concurrency": 8, "what": "supervisor and child"}
    details = {"repetitions": [rest.told for rest in rests]}
    yield Figure(
        name="idle worker",
        unit="% of a core",
        values=[rest.share for rest in rests],
        parameters=parameters,
        bound=bench.bound("idle"),
        details=details,
    )
    sent = [rest.commands_per_s for rest in rests if rest.commands_per_s is not None]
    if sent:
        yield Figure(
            name="idle worker commands",
            unit="commands/s",
            values=sent,
            parameters=parameters,
            bound=bench.bound("idle-commands"),
            details=details,
        )


async def _watch(site: Site, worker: WorkerProcess, for_s: float) -> Rest:
    loop = asyncio.get_running_loop()
    before, switches = usage_of_tree(worker.pid), _switches(worker)
    if len(before.pids) < 2:
        raise CheckFailed("the worker has no child")
    began = loop.time()
    commands_per_s, told = await (_hear(site.gauge, for_s) if site.gauge else _count_writes(site, for_s))
    took_s = loop.time() - began
    after = usage_of_tree(worker.pid)
    if after.pids != before.pids:
        raise CheckFailed("a process of the worker was replaced meanwhile")
    seen = {
        "processes": len(after.pids),
        "wake_ups_per_s": rounded((_switches(worker) - switches) / took_s),
        **told,
    }
    return Rest(100 * (after.cpu_s - before.cpu_s) / took_s, commands_per_s, seen)


async def _hear(gauge: Gauge, for_s: float) -> tuple[float, dict[str, Any]]:
    heard = await gauge.heard(asyncio.sleep(for_s))
    return heard.sent / heard.seconds, {
        "sent": heard.by_name,
        "called_by_scripts_per_s": rounded(heard.inside_scripts / heard.seconds),
        "server_percent_of_a_core": rounded(100 * heard.server_cpu_s / heard.seconds),
    }


async def _count_writes(site: Site, for_s: float) -> tuple[None, dict[str, Any]]:
    before = write_count(site)
    await asyncio.sleep(for_s)
    return None, {"write_transactions_per_s": rounded((write_count(site) - before) / for_s)}


def write_count(site: Site) -> int:
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
