"""How many jobs a second: through the floor, through a worker, into the storage."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from benchmarks.bench import Bench, clean_environment
from benchmarks.crew import output_of, run_module
from benchmarks.figures import Bound, CheckFailed, Figure, Floor, judged, rounded
from benchmarks.seen import check_all_completed, span_s
from benchmarks.toll import Toll

RATES: Final = ("drain", "bulk_enqueue", "awaited_enqueue")
TRIP: Final = "round_trip_us"
FLOOR_S: Final = 600.0


# -- the floor -----------------------------------------------------------------------------------------


async def floor(bench: Bench) -> AsyncIterator[Figure]:
    """Ours and the referee in turns, so that both see the machine in the same states."""
    ours: dict[tuple[str, int], list[float]] = defaultdict(list)
    theirs: dict[tuple[str, int], list[float]] = defaultdict(list)
    loop = referee_sha256 = None
    for batch in bench.concurrencies:
        for turn in range(bench.repeat):
            both = [(ours, None), (theirs, bench.referee)] if bench.referee else [(ours, None)]
            # Who goes second meets a warmer machine.
            for figures, script in both if turn % 2 == 0 else both[::-1]:
                told = await _run_floor(bench, batch, script)
                if script is None:
                    loop = told["loop"]
                else:
                    referee_sha256 = told.get("sha256")
                for name in (*RATES, TRIP):
                    figures[name, batch].append(float(told[name]))
    _remember(bench, ours, theirs)
    for (name, batch), values in ours.items():
        yield Figure(
            name=f"floor {name}",
            unit="us" if name == TRIP else "jobs/s",
            values=values,
            parameters={"n": bench.n, "batch": batch},
            details={
                "loop": loop,
                "referee": _beside(bench, values, theirs[name, batch], referee_sha256),
            },
        )


async def floor_of_drain(bench: Bench, batch: int) -> Floor:
    """The floor's drain at this batch, measured now unless this run has done so already."""
    known = bench.floor("drain", batch)
    if known is None:
        told = [await _run_floor(bench, batch) for _ in range(bench.repeat)]
        bench.note_floor(f"drain at batch {batch}", [float(one["drain"]) for one in told])
        known = bench.floor("drain", batch)
    assert known is not None
    return known


async def _run_floor(bench: Bench, batch: int, script: Path | None = None) -> dict[str, Any]:
    what = "floor" if script is None else "referee"
    environment = clean_environment()
    async with bench.ground() as (folder, ground):
        arguments = [ground.floor, "--n", str(bench.n), "--batch", str(batch)]
        if script is None:
            out = await run_module(
                "benchmarks.floor", *arguments, environment=environment, folder=folder, within_s=FLOOR_S
            )
        else:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(script),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                cwd=folder,
            )
            out = await output_of(process, f"the {what}", FLOOR_S)
    try:
        told: dict[str, Any] = json.loads(out)
        missing = [name for name in (*RATES, TRIP) if not float(told[name]) > 0]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckFailed(f"the {what} told no figures: {error!r} in {out[:200]!r}") from None
    if missing:
        raise CheckFailed(f"the {what} told no sound {', '.join(missing)}")
    return told


def _remember(
    bench: Bench, ours: dict[tuple[str, int], list[float]], theirs: dict[tuple[str, int], list[float]]
) -> None:
    """The medians that ratios are taken to, and whether they may be."""
    ratios = {}
    for name, batches in (
        *((f"drain at batch {batch}", (batch,)) for batch in bench.concurrencies),
        ("bulk_enqueue", bench.concurrencies),  # an enqueue knows no batch
        ("awaited_enqueue", bench.concurrencies),
    ):
        rate = name.partition(" ")[0]
        own = [value for batch in batches for value in ours[rate, batch]]
        other = [value for batch in batches for value in theirs[rate, batch]]
        bench.note_floor(name, own)
        if other:
            ratios[name] = [a / b for a, b in zip(own, other, strict=True)]
    bench.standing = judged(ratios) if ratios else bench.referee_note or bench.standing


def _beside(bench: Bench, ours: list[float], theirs: list[float], sha256: str | None) -> Any:
    if not theirs:
        return bench.referee_note
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        "values": [rounded(value) for value in theirs],
        "ours_to_it": [rounded(ratio) for ratio in ratios],
        "sha256": sha256,
    }


# -- through a worker ----------------------------------------------------------------------------------


async def drain(bench: Bench) -> AsyncIterator[Figure]:
    """Jobs that wait when the worker starts; from its first claim to its last settle, by storage stamps."""
    for concurrency in bench.concurrencies:
        rates, costs = [], []
        for _ in range(bench.repeat):
            async with bench.site() as site:
                await site.submit(bench.n)
                async with site.worker(concurrency=concurrency, ready=False) as worker:
                    toll = Toll(site, worker, bench.n)
                    await site.until_completed(bench.n, worker, look=toll.look)
                seen = await site.read()
            check_all_completed(seen, range(bench.n))
            rates.append(bench.n / span_s(seen))
            costs.append(toll.told())
        yield Figure(
            name="drain",
            unit="jobs/s",
            values=rates,
            parameters={
                "n": bench.n,
                "concurrency": concurrency,
                "floor_batch": concurrency,
                "workers": 1,
            },
            bound=bench.bound("drain"),
            floor=bench.floor("drain", concurrency),
            details={
                "checked": f"{bench.n:,} results and histories, each repetition, by another process",
                "cost": costs,
            },
        )


# -- into the storage ----------------------------------------------------------------------------------


async def bulk_enqueue(bench: Bench) -> AsyncIterator[Figure]:
    """`task.map` of all jobs in one call."""
    rates = []
    for _ in range(bench.repeat):
        async with bench.site() as site:
            rates.append(await site.submit(bench.n))
            await site.check_stored(bench.n)
    yield Figure(
        name="bulk enqueue",
        unit="jobs/s",
        values=rates,
        parameters={"n": bench.n, "by": "task.map"},
        bound=bench.bound("bulk-enqueue"),
        floor=bench.floor("bulk_enqueue"),
    )


async def awaited_enqueue(bench: Bench) -> AsyncIterator[Figure]:
    """`await task.enqueue(…)`, one after the other."""
    bound = bench.bound("awaited-enqueue")
    yield await _singles(bench, "awaited enqueue", "awaited", "await task.enqueue", bound)


async def delay_enqueue(bench: Bench) -> AsyncIterator[Figure]:
    """`task.delay(…)`, one after the other."""
    yield await _singles(bench, "delay enqueue", "delay", "task.delay")


async def _singles(bench: Bench, name: str, mode: str, by: str, bound: Bound | None = None) -> Figure:
    count = 500 if bench.quick else 4_000
    rates = []
    for _ in range(bench.repeat):
        async with bench.site() as site:
            told = await site.produce(mode, "--count", count)
            await site.check_stored(count)
            rates.append(count / float(told["seconds"]))
    return Figure(
        name=name,
        unit="jobs/s",
        values=rates,
        parameters={"n": count, "by": by},
        bound=bound,
        floor=bench.floor("awaited_enqueue"),
    )
