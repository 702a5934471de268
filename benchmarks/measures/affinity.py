"""What the weight of affinity does to where jobs run, to the loads of workers and to waiting times."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from msgspec import Struct

from benchmarks.bench import Bench, Site
from benchmarks.crew import WorkerProcess
from benchmarks.figures import Figure, rounded, spread
from benchmarks.measures.waiting import RATE, open_loop
from benchmarks.seen import Seen, check_all_completed, pick_up_ms
from benchmarks.shares import LoadSums, Shares, drawn, falls, load_bound, shares, started, submit_naps
from benchmarks.team import Member, counters, team

WEIGHTS: Final = (0.0, 0.5, 0.7, 0.9, 1.0)
# With these names no worker owns more than 18 of the 60 keys, so that at weight 1 each can do all of its own.
NAMES: Final = ("north", "south", "east", "west")
KEYS: Final = 60
CONCURRENCY: Final = 4
NAP_S: Final = 0.1
MEAN_LOAD: Final = 0.8
BURST_EVERY_S: Final = 1.0
BURST: Final = round(MEAN_LOAD * len(NAMES) * CONCURRENCY / NAP_S * BURST_EVERY_S)
WARM_BURSTS: Final = 3  # until the workers know how long a job takes, and storage what belongs to whom
HEAP: Final = 5 * BURST
HEAPS: Final = 3
LOOK_S: Final = 0.2
DONE_S: Final = 90.0
HOT: Final = 0.5
CHANCE: Final = 1 / len(NAMES)


class Seeking(Struct, frozen=True):
    """What was seen at one weight, in one repetition."""

    spread: Shares
    loads: dict[str, float]
    waits_ms: dict[str, float]
    hot_waits_ms: dict[str, float]
    hot: Shares
    heap_s: float
    hot_heap_s: float
    pick_up_ms: dict[str, float]
    counted: dict[str, int]

    def told(self) -> dict[str, Any]:
        return {
            "jobs_by_worker": self.spread.jobs,
            "hot_jobs_by_worker": self.hot.jobs,
            "load_over_mean": {name: rounded(load) for name, load in self.loads.items()},
            "waits_ms": self.waits_ms,
            "hot_waits_ms": self.hot_waits_ms,
            "hot_hit_rate": rounded(self.hot.hits),
            "heap_s": rounded(self.heap_s),
            "hot_heap_s": rounded(self.hot_heap_s),
            "idle_pick_up_ms": self.pick_up_ms,
            "counters": self.counted,
        }


async def affinity(bench: Bench) -> AsyncIterator[Figure]:
    """Keyed jobs in bursts, at a mean load that leaves each worker time and each burst a backlog."""
    found: dict[float, list[Seeking]] = {weight: [] for weight in WEIGHTS}
    for turn in range(bench.repeat):
        for weight in WEIGHTS if turn % 2 == 0 else WEIGHTS[::-1]:
            found[weight].append(await _seek(bench, weight, seed=turn))
    for weight, runs in found.items():
        for figure in _of_weight(bench, weight, runs):
            yield figure
    for figure in _of_all(bench, found):
        yield figure


def _parameters(bench: Bench, weight: float) -> dict[str, Any]:
    return {
        "weight": weight,
        "keys": KEYS,
        "workers": len(NAMES),
        "concurrency": CONCURRENCY,
        "body_ms": NAP_S * 1e3,
        "burst": BURST,
        "every_s": BURST_EVERY_S,
        "bursts": _bursts(bench),
    }


def _bursts(bench: Bench) -> int:
    return 4 if bench.quick else 20


def _of_weight(bench: Bench, weight: float, runs: Sequence[Seeking]) -> list[Figure]:
    parameters = _parameters(bench, weight)
    busiest = [max(run.loads.values()) for run in runs]
    return [
        Figure(
            name="affinity hit rate",
            unit="of all jobs",
            values=[run.spread.hits for run in runs],
            parameters=parameters,
            bound=bench.bound(f"affinity-hits-{weight:g}"),
            details={"repetitions": [run.told() for run in runs]},
        ),
        Figure(
            name="affinity load",
            unit="of the mean",
            values=busiest,
            parameters=parameters | {"bound": rounded(load_bound(weight)) if weight < 1 else None},
            bound=bench.bound(f"affinity-load-{weight:g}"),
            details={"busiest_by_jobs": [rounded(run.spread.busiest) for run in runs]},
        ),
        Figure(
            name="affinity wait p50",
            unit="ms",
            values=[run.waits_ms["p50"] for run in runs],
            parameters=parameters,
            details={"ms": [run.waits_ms for run in runs]},
        ),
        Figure(
            name="affinity hot key",
            unit="of the time without it",
            values=[run.hot_heap_s / run.heap_s for run in runs],
            parameters={
                "weight": weight,
                "hot_key": f"{HOT:g} of all jobs",
                "jobs": HEAP,
                "workers": len(NAMES),
                "concurrency": CONCURRENCY,
                "body_ms": NAP_S * 1e3,
            },
            bound=bench.bound("affinity-hot") if weight < 1 else None,
            details={"heap_s": [[rounded(run.heap_s), rounded(run.hot_heap_s)] for run in runs]},
        ),
    ]


def _of_all(bench: Bench, found: dict[float, list[Seeking]]) -> list[Figure]:
    """What compares weights, each repetition by itself."""
    turns = range(bench.repeat)
    rates = [[found[weight][turn].spread.hits for weight in WEIGHTS] for turn in turns]
    parameters = {"weights": ", ".join(f"{weight:g}" for weight in WEIGHTS)}
    return [
        Figure(
            name="affinity hit rate off chance at 0",
            unit="of all jobs",
            values=[abs(rate[0] - CHANCE) for rate in rates],
            parameters={"chance": CHANCE},
            bound=bench.bound("affinity-chance"),
        ),
        Figure(
            name="affinity hit rate falls",
            unit="of all jobs",
            values=[falls(rate) for rate in rates],
            parameters=parameters,
            bound=bench.bound("affinity-falls"),
        ),
        Figure(
            name="affinity idle pick-up p50 at 0.7 beyond that at 0",
            unit="ms",
            values=[
                found[0.7][turn].pick_up_ms["p50"] - found[0.0][turn].pick_up_ms["p50"] for turn in turns
            ],
            parameters={"rate_per_s": RATE, "workers": len(NAMES), "keys": KEYS},
            bound=bench.bound("affinity-pick-up"),
        ),
    ]


# -- one weight ----------------------------------------------------------------------------------------


async def _seek(bench: Bench, weight: float, *, seed: int) -> Seeking:
    members = [Member(name, ("--mesh-affinity-weight", f"{weight:g}")) for name in NAMES]
    bursts = _bursts(bench)
    async with bench.site() as site, team(site, members, concurrency=CONCURRENCY) as crew:
        given = Given(site, crew[0], seed)
        await given.bursts(WARM_BURSTS, hot=0.0)
        loads = LoadSums(NAMES)
        async with _looking(site, loads):
            even = await given.bursts(bursts, hot=0.0)
        hot = await given.bursts(bursts, hot=HOT)
        # In turns: a neighbour that takes the machine for some seconds meets both.
        heaps = [(await given.heap(hot=0.0), await given.heap(hot=HOT)) for _ in range(HEAPS)]
        await given.singles(40 if bench.quick else 200)
        seen, single = await given.read()
        counted = await counters(site, lambda told: started(told) >= len(given.keys))

    def of(numbers: range) -> list[Seen]:
        return [seen[number] for number in numbers]

    return Seeking(
        spread=shares(of(even), given.keys, NAMES),
        loads=loads.over_mean(),
        waits_ms=spread(pick_up_ms(of(even))),
        hot_waits_ms=spread(pick_up_ms(of(hot))),
        hot=shares(of(hot), given.keys, NAMES),
        heap_s=statistics.median(_lasted_s(of(heap)) for heap, _ in heaps),
        hot_heap_s=statistics.median(_lasted_s(of(heap)) for _, heap in heaps),
        pick_up_ms=spread(pick_up_ms(single)),
        counted=counted,
    )


class Given:
    """Jobs given to one site so far, all numbered, and their keys. What gives some returns their numbers when
    they are done."""

    def __init__(self, site: Site, worker: WorkerProcess, seed: int) -> None:
        self.keys: dict[int, str] = {}
        self._site = site
        self._worker = worker
        self._seed = seed
        self._singles = 0

    async def bursts(self, many: int, *, hot: float) -> range:
        """So many, each at its instant whatever became of those before it."""
        loop = asyncio.get_running_loop()
        due, first = loop.time(), len(self.keys)
        for _ in range(many):
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._submit(BURST, hot)
            due += BURST_EVERY_S
        return await self._done(first)

    async def heap(self, *, hot: float) -> range:
        """Many at once."""
        first = len(self.keys)
        await self._submit(HEAP, hot)
        return await self._done(first)

    async def singles(self, count: int) -> None:
        """One at a time, to workers that are idle; of another task, and numbered for themselves."""
        await open_loop(self._site, count, "--keys", str(KEYS))
        self._singles += count
        await self._done(len(self.keys))

    async def read(self) -> tuple[dict[int, Seen], list[Seen]]:
        """All by their numbers, and the single ones."""
        seen = await self._site.read()
        numbered, single = ([job for job in seen if job.task == task] for task in ("nap", "noop"))
        check_all_completed(numbered, self.keys)
        check_all_completed(single, range(self._singles))
        return {job.number: job for job in numbered}, single

    async def _submit(self, count: int, hot: float) -> None:
        first = len(self.keys)
        keys = drawn(count, KEYS, hot=hot, seed=self._seed * 1_000_000 + first)
        jobs = list(enumerate(keys, first))
        self.keys.update(jobs)
        await submit_naps(self._site, jobs, NAP_S)

    async def _done(self, first: int) -> range:
        await self._site.until_completed(len(self.keys) + self._singles, self._worker, DONE_S)
        return range(first, len(self.keys))


@contextlib.asynccontextmanager
async def _looking(site: Site, loads: LoadSums) -> AsyncIterator[None]:
    """Look at the loads of all workers, seldom enough to be no load itself."""

    async def look() -> None:
        while True:
            fleet = await site.storage.fleet()
            loads.look({info.worker_id: (info.running + info.held) / info.capacity for info in fleet})
            await asyncio.sleep(LOOK_S)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _lasted_s(seen: Sequence[Seen]) -> float:
    return max(job.completed_at or 0.0 for job in seen) - min(job.created_at for job in seen)
