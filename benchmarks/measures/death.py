"""What a process that dies costs: the calls that take its jobs back, the time until they run elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from benchmarks.app import read_journal
from benchmarks.bench import Bench, Site
from benchmarks.crew import is_gone, kill
from benchmarks.figures import Bound, CheckFailed, Figure, rounded
from benchmarks.seen import check_all_completed
from fluxmesh.config import Settings
from fluxmesh.job import Status
from fluxmesh.scheduler.housekeeping import decide_orphan
from fluxmesh.storage.values import Settled

OWNED: Final = 1_000
HELD: Final = 4
GIVE_UP_S: Final = 30.0


async def reap_call(bench: Bench) -> AsyncIterator[Figure]:
    """One killed owner of many jobs: the two calls, orphans and reap, that take them all back."""
    totals, parts = [], []
    for _ in range(bench.repeat):
        async with bench.site() as site:
            await site.submit(OWNED)
            async with site.owner(OWNED) as owner:
                owned = await owner.start()
                if owned != OWNED:
                    raise CheckFailed(f"the owner was given {owned:,} of {OWNED:,} jobs")
                await owner.kill()
            found_s, reaped_s = await _reap(site)
            counts = (await site.storage.counts()).by_status
            if counts.get(Status.PENDING, 0) != OWNED:
                raise CheckFailed(f"after the reap: {dict(counts)}")
            totals.append((found_s + reaped_s) * 1e3)
            parts.append({"orphans": rounded(found_s * 1e3), "reap": rounded(reaped_s * 1e3)})
    yield Figure(
        name="reap call",
        unit="ms",
        values=totals,
        parameters={"owned": OWNED, "calls": "orphans, reap"},
        details={"ms": parts},
    )


async def _reap(site: Site) -> tuple[float, float]:
    """Seconds of the look and of the taking back."""
    rng, settings = random.Random(OWNED), Settings()
    began = time.perf_counter()
    answer = await site.storage.orphans(OWNED)
    found_s = time.perf_counter() - began
    if len(answer.jobs) != OWNED:
        raise CheckFailed(f"{len(answer.jobs):,} of {OWNED:,} orphans were found")
    items = [decide_orphan(orphan, settings, rng) for orphan in answer.jobs]
    began = time.perf_counter()
    settled = await site.storage.reap(items)
    reaped_s = time.perf_counter() - began
    if set(settled) != {Settled.APPLIED}:
        raise CheckFailed(f"the reap answered {dict(Counter(settled))}")
    return found_s, reaped_s


# -- kill -9 -------------------------------------------------------------------------------------------


async def kill_proven(bench: Bench) -> AsyncIterator[Figure]:
    """kill -9 of a worker process beside an idle worker; its death is proven by its supervisor."""
    yield await _kills(bench, "kill to restart", {}, bench.bound("kill"))


async def kill_lapsed(bench: Bench) -> AsyncIterator[Figure]:
    """The same with proofs switched off: the lease has to run out."""
    environment = {"FLUXMESH_PROOF_OF_DEATH": "false"}
    bound = bench.bound("kill-lapsed")
    yield await _kills(bench, "kill to restart without proof", environment, bound)


async def _kills(bench: Bench, name: str, environment: dict[str, str], bound: Bound | None) -> Figure:
    slowest, runs = [], []
    for _ in range(2 if bench.quick else 5):
        run = await _kill_once(bench, environment)
        slowest.append(run["slowest_s"])
        runs.append(run)
    return Figure(
        name=name,
        unit="s",
        values=slowest,
        parameters={"running": HELD, "workers": 2, "concurrency": 8, **environment},
        bound=bound,
        details={
            "worst": rounded(max(slowest)),
            "lost": sum(run["lost"] for run in runs),
            "doubles": sum(run["doubles"] for run in runs),
            "repetitions": runs,
        },
    )


async def _kill_once(bench: Bench, environment: dict[str, str]) -> dict[str, Any]:
    """One kill. The times are those that the bodies wrote down themselves, on the machine's one clock."""
    async with bench.site() as site, contextlib.AsyncExitStack() as workers:
        journal = site.folder / "journal"
        first = await workers.enter_async_context(site.worker(worker_id="first", environment=environment))
        await site.produce("hold", "--count", HELD, "--journal", journal)
        await site.until(lambda: _starts(journal, HELD), GIVE_UP_S, first)
        second = await workers.enter_async_context(site.worker(worker_id="second", environment=environment))
        await asyncio.sleep(1)  # the second is idle by now
        (victim,) = {int(str(entry["pid"])) for entry in read_journal(journal)}
        killed_at = time.time()
        kill(victim)
        await site.until(lambda: _starts(journal, 2 * HELD), GIVE_UP_S, second)
        await site.until_completed(HELD, second, GIVE_UP_S)
        if not is_gone(victim):
            raise CheckFailed(f"process {victim} was killed and lives")
        seen = await site.read()
        entries = read_journal(journal)
    check_all_completed(seen, range(HELD), crashes=1)
    restarts = [entry for entry in entries if entry["event"] == "start" and entry["pid"] != victim]
    times = sorted(float(str(entry["at"])) - killed_at for entry in restarts)
    if times[0] < 0:
        raise CheckFailed("a job was restarted before its process was killed")
    starts = Counter(entry["job"] for entry in entries if entry["event"] == "start")
    ends = Counter(entry["job"] for entry in entries if entry["event"] == "end")
    return {
        "slowest_s": rounded(times[-1]),
        "fastest_s": rounded(times[0]),
        "restarted_by": dict(Counter(str(job.worker_id) for job in seen)),
        "lost": sum(ends[job.id] == 0 for job in seen),
        "doubles": sum(starts[job.id] > 2 or ends[job.id] > 1 for job in seen),
    }


async def _starts(journal: Path, count: int) -> bool:
    return sum(entry["event"] == "start" for entry in read_journal(journal)) >= count
