"""Bodies in processes of their own: how many jobs a second, and how long the first waits for a process."""

from __future__ import annotations

from collections.abc import AsyncIterator

from benchmarks.app import ISOLATION_ENV
from benchmarks.bench import Bench
from benchmarks.figures import Figure, rounded
from benchmarks.seen import check_all_completed


async def drain_apart(bench: Bench) -> AsyncIterator[Figure]:
    """The drain with `isolation="process"`, from its first end to its last; the start of the processes is
    told beside it. A process is replaced after every 1,000 jobs, as by default."""
    count = 500 if bench.quick else 5_000
    for concurrency in (1, 8):
        rates, firsts_s = [], []
        for _ in range(bench.repeat):
            async with bench.site() as site:
                await site.submit(count)
                apart = {ISOLATION_ENV: "process"}
                async with site.worker(concurrency=concurrency, ready=False, environment=apart) as worker:
                    await site.until_completed(count, worker)
                seen = await site.read()
            check_all_completed(seen, range(count))
            ends_s = sorted(job.completed_at for job in seen if job.completed_at is not None)
            rates.append((count - 1) / (ends_s[-1] - ends_s[0]))
            firsts_s.append(ends_s[0] - min(job.started_at for job in seen if job.started_at is not None))
        yield Figure(
            name="drain apart",
            unit="jobs/s",
            values=rates,
            parameters={"n": count, "concurrency": concurrency, "workers": 1},
            details={"from_the_first_claim_to_its_end_s": [rounded(value) for value in firsts_s]},
        )
