"""What being in a mesh costs a worker that has plenty to do, and a job that finds it idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from msgspec import Struct

from benchmarks.bench import Bench, Site
from benchmarks.crew import WorkerProcess, usage_of_tree
from benchmarks.figures import Figure, percentile, rounded, spread
from benchmarks.gauge import Spent
from benchmarks.measures.speed import floor_of_drain
from benchmarks.measures.waiting import RATE, SETTLE_DOWN_S, open_loop, write_count
from benchmarks.seen import Seen, check_all_completed, pick_up_ms, span_s
from benchmarks.team import Member, team

FLEETS: Final = (1, 2, 4, 8)
CONCURRENCY: Final = 8
MOST: Final = 20_000
BLOCKS: Final = 3
BLOCK: Final = 100


class Cost(Struct, frozen=True):
    """Of one drain. `calls`: scripts on Redis, write transactions on SQLite, a job."""

    rate: float
    calls: float
    told: dict[str, Any]


async def mesh_cost(bench: Bench) -> AsyncIterator[Figure]:
    """No-op jobs that wait in a paused queue beside live workers; from the first claim after it is opened to
    the last settle. With and without a mesh in turns, so that both see the machine in the same states."""
    count = min(bench.n, MOST)
    floor = await floor_of_drain(bench, CONCURRENCY)
    for workers in FLEETS:
        costs: dict[bool, list[Cost]] = {False: [], True: []}
        for turn in range(bench.repeat):
            for mesh in (False, True) if turn % 2 == 0 else (True, False):
                costs[mesh].append(await _cost(bench, count, workers, mesh=mesh))
        for mesh, found in costs.items():
            parameters = {"n": count, "workers": workers, "concurrency": CONCURRENCY, "mesh": mesh}
            details = {"cost": [one.told for one in found]}
            if mesh:
                pairs = zip(costs[True], costs[False], strict=True)
                details["rate_to_that_without"] = [rounded(one.rate / other.rate) for one, other in pairs]
            yield Figure(
                name="mesh drain",
                unit="jobs/s",
                values=[one.rate for one in found],
                parameters=parameters | {"floor_batch": CONCURRENCY},
                floor=floor,
                details=details,
            )
            yield Figure(
                name="mesh storage calls",
                unit="scripts/job" if bench.grounds.storage == "redis" else "transactions/job",
                values=[one.calls for one in found],
                parameters=parameters,
            )


async def _cost(bench: Bench, count: int, workers: int, *, mesh: bool) -> Cost:
    members = [Member(f"worker-{number}", in_mesh=mesh) for number in range(workers)]
    async with bench.site() as site, team(site, members, concurrency=CONCURRENCY) as crew:
        await asyncio.sleep(SETTLE_DOWN_S)
        await site.storage.pause("default")
        await site.submit(count)
        looks = 0

        async def look(_: int) -> None:
            nonlocal looks
            looks += 1

        cpu_s, calls, before = _cpu_s(crew), await _calls(site), await _spent(site)
        await site.storage.resume("default")
        await site.until_completed(count, crew[0], look=look)
        after, cpu_s = await _spent(site), _cpu_s(crew) - cpu_s
        # A look is a script, and the opening of the queue is one too or a transaction.
        calls = await _calls(site) - calls - 1 - (looks if site.gauge is not None else 0)
        seen = await site.read()
    check_all_completed(seen, range(count))
    told: dict[str, Any] = {
        "worker_cpu_s_per_1000_jobs": rounded(cpu_s * 1e3 / count),
        "jobs_by_worker": _by_worker(seen, members),
    }
    if before is not None and after is not None:
        told |= {
            "server_cpu_s_per_1000_jobs": rounded((after.cpu_s - before.cpu_s) * 1e3 / count),
            "evalsha_usec_per_job": rounded((after.scripts_s - before.scripts_s) * 1e6 / count),
        }
    return Cost(count / span_s(seen), calls / count, told)


async def _spent(site: Site) -> Spent | None:
    return None if site.gauge is None else await site.gauge.spent()


def _by_worker(seen: Sequence[Seen], members: Sequence[Member]) -> list[int]:
    return [sum(job.worker_id == member.name for job in seen) for member in members]


def _cpu_s(crew: Sequence[WorkerProcess]) -> float:
    return sum(usage_of_tree(worker.pid).cpu_s for worker in crew)


async def _calls(site: Site) -> int:
    return write_count(site) if site.gauge is None else (await site.gauge.spent()).scripts


# -- an idle worker ------------------------------------------------------------------------------------


async def mesh_pickup(bench: Bench) -> AsyncIterator[Figure]:
    """Single jobs to an idle worker that is in a mesh, and to one that is not, in turns."""
    plain, meshed, more = [], [], []
    for _ in range(bench.repeat):
        without, with_it = await _pick_ups(bench)
        plain.append(spread(without))
        meshed.append(spread(with_it))
        more.append(percentile(with_it, 0.5) - percentile(without, 0.5))
    parameters = {"n": BLOCKS * BLOCK, "rate_per_s": RATE, "arrivals": "poisson, open loop", "concurrency": 8}
    for mesh, spreads in ((False, plain), (True, meshed)):
        yield Figure(
            name="mesh pick-up p50",
            unit="ms",
            values=[one["p50"] for one in spreads],
            parameters={"mesh": mesh, **parameters},
            details={"ms": spreads},
        )
    yield Figure(
        name="mesh pick-up p50 beyond that without",
        unit="ms",
        values=more,
        parameters=parameters,
        bound=bench.bound("mesh-pickup"),
    )


async def _pick_ups(bench: Bench) -> tuple[list[float], list[float]]:
    """Of the plain worker, and of the one in a mesh; both are there all the time."""
    found: dict[bool, list[float]] = {False: [], True: []}
    blocks, block = (1, 40) if bench.quick else (BLOCKS, BLOCK)
    async with (
        bench.site() as plain,
        bench.site() as meshed,
        team(plain, [Member("north", in_mesh=False)], concurrency=CONCURRENCY) as alone,
        team(meshed, [Member("north")], concurrency=CONCURRENCY) as members,
    ):
        await asyncio.sleep(SETTLE_DOWN_S)
        for _ in range(blocks):
            for site in (plain, meshed):
                await open_loop(site, block)
        for site, (worker,) in ((plain, alone), (meshed, members)):
            await site.until_completed(blocks * block, worker, 30)
            seen = await site.read()
            check_all_completed(seen, [*range(block)] * blocks)
            found[site is meshed] = pick_up_ms(seen)
    return found[False], found[True]
