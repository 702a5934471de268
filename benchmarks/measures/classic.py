"""The classic topology, two worker processes of eight slots each, and strict priority on a live worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from benchmarks.bench import Bench
from benchmarks.figures import CheckFailed, Figure, rounded, spread
from benchmarks.seen import check_all_completed, end_to_end_ms, inversions, pick_up_ms, span_s

WORKERS: Final = 2
SLOTS: Final = 8
NAP_S: Final = 0.001
RATE: Final = 200.0
LOW: Final = 200
CRITICAL: Final = 20
LOW_NAP_S: Final = 0.02
BACKLOG_LEAST: Final = 50  # low jobs that must still have waited when the last critical one started


async def throughput(bench: Bench) -> AsyncIterator[Figure]:
    """Jobs of one millisecond, submitted at once to live workers."""
    count = 200 if bench.quick else 1_000
    rates, spreads, shares = [], [], []
    for _ in range(bench.repeat):
        async with bench.site() as site, site.worker(processes=WORKERS, concurrency=SLOTS) as worker:
            await asyncio.sleep(1)
            await site.produce("burst", "--count", count, "--nap", NAP_S)
            await site.until_completed(count, worker, 60)
            seen = await site.read()
            check_all_completed(seen, range(count))
            rates.append(count / span_s(seen))
            spreads.append(spread(end_to_end_ms(seen)))
            names = {job.worker_id for job in seen}
            shares.append(
                {name: sum(job.worker_id == name for job in seen) for name in sorted(map(str, names))}
            )
    yield Figure(
        name="classic throughput",
        unit="jobs/s",
        values=rates,
        parameters={"n": count, "body_ms": NAP_S * 1e3, "workers": WORKERS, "concurrency": SLOTS},
        details={"end_to_end_ms": spreads, "jobs_by_worker": shares},
    )


async def latency(bench: Bench) -> AsyncIterator[Figure]:
    """The same jobs at a steady rate far below what the workers can do."""
    count = 200 if bench.quick else 1_000
    starts, ends, late = [], [], []
    for _ in range(bench.repeat):
        async with bench.site() as site, site.worker(processes=WORKERS, concurrency=SLOTS) as worker:
            await asyncio.sleep(1)
            told = await site.produce("open", "--count", count, "--rate", RATE, "--nap", NAP_S)
            await site.until_completed(count, worker, 60)
            seen = await site.read()
            check_all_completed(seen, range(count))
            starts.append(spread(pick_up_ms(seen)))
            ends.append(spread(end_to_end_ms(seen)))
            late.append(rounded(told["late_ms"]))
    parameters = {
        "n": count,
        "body_ms": NAP_S * 1e3,
        "workers": WORKERS,
        "concurrency": SLOTS,
        "rate_per_s": RATE,
        "arrivals": "poisson, open loop",
    }
    for name, spreads in (("dispatch", starts), ("end to end", ends)):
        yield Figure(
            name=f"classic {name} p50",
            unit="ms",
            values=[seen["p50"] for seen in spreads],
            parameters=parameters,
            details={"ms": spreads, "producer_late_ms": late},
        )


async def priority(bench: Bench) -> AsyncIterator[Figure]:
    """Critical jobs submitted behind low ones that a live worker is busy with."""
    found, waits = [], []
    for _ in range(bench.repeat):
        async with bench.site() as site, site.worker(concurrency=SLOTS) as worker:
            await asyncio.sleep(1)
            await site.produce("tiers", "--low", LOW, "--critical", CRITICAL, "--nap", LOW_NAP_S)
            await site.until_completed(LOW + CRITICAL, worker, 60)
            seen = await site.read()
        check_all_completed(seen, range(LOW + CRITICAL))
        urgent = [job for job in seen if job.priority == 0]
        low = [job for job in seen if job.priority == 3]
        last = max(job.started_at or 0.0 for job in urgent)
        behind = sum((job.started_at or 0.0) > last for job in low)
        if len(urgent) != CRITICAL or behind < BACKLOG_LEAST:
            raise CheckFailed(f"only {behind} low jobs still waited: the backlog was no backlog")
        found.append(float(inversions(urgent, low)))
        waits.append(spread(pick_up_ms(urgent)))
    yield Figure(
        name="priority inversions",
        unit="pairs",
        values=found,
        parameters={"low": LOW, "critical": CRITICAL, "concurrency": SLOTS, "body_ms": LOW_NAP_S * 1e3},
        bound=bench.bound("priority"),
        details={"critical_wait_ms": waits},
    )
