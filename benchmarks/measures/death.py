"""What a process that dies costs: the calls that take its jobs back, the time until they run elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.app import read_journal
from benchmarks.bench import Bench, Site
from benchmarks.crew import is_gone, kill
from benchmarks.figures import Bound, CheckFailed, Figure, rounded
from benchmarks.owner import OWNER
from benchmarks.seen import check_all_completed
from fluxmesh.config import Settings
from fluxmesh.job import Status
from fluxmesh.scheduler.housekeeping import decide_orphan
from fluxmesh.storage.values import Settled, WorkerRef

OWNED: Final = 1_000
HELD: Final = 4
KILLS: Final = 10
SHORTEST_LEASE_S: Final = {"sqlite": 3.0, "redis": 2.0}
GIVE_UP_S: Final = 30.0


async def reap_call(bench: Bench) -> AsyncIterator[Figure]:
    """One killed owner of many jobs: the calls that take them all back. SQLite finds the freed lock itself;
    a server has to be told by somebody who saw the death."""
    totals, parts = [], []
    said = bench.grounds.storage != "sqlite"
    for _ in range(bench.repeat):
        async with bench.site() as site:
            await site.submit(OWNED)
            async with site.owner(OWNED) as owner:
                owned, epoch = await owner.start()
                if owned != OWNED:
                    raise CheckFailed(f"the owner was given {owned:,} of {OWNED:,} jobs")
                await owner.kill()
            took_s = await _reap(site, WorkerRef(OWNER, epoch) if said else None)
            counts = (await site.storage.counts()).by_status
            if counts.get(Status.PENDING, 0) != OWNED:
                raise CheckFailed(f"after the reap: {dict(counts)}")
            totals.append(sum(took_s.values()) * 1e3)
            parts.append({call: rounded(seconds * 1e3) for call, seconds in took_s.items()})
    yield Figure(
        name="reap call",
        unit="ms",
        values=totals,
        parameters={"owned": OWNED, "calls": ", ".join(parts[0])},
        details={"ms": parts},
    )


async def _reap(site: Site, dead: WorkerRef | None) -> dict[str, float]:
    """Seconds of each call. `dead`: whose death is told first."""
    rng, settings = random.Random(OWNED), Settings()
    took_s: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(call: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        took_s[call] = time.perf_counter() - began

    if dead is not None:
        with timed("declare_dead"):
            await site.storage.declare_dead(dead, "its parent saw it end")
    with timed("orphans"):
        answer = await site.storage.orphans(OWNED)
    if len(answer.jobs) != OWNED:
        raise CheckFailed(f"{len(answer.jobs):,} of {OWNED:,} orphans were found")
    items = [decide_orphan(orphan, settings, rng) for orphan in answer.jobs]
    with timed("reap"):
        settled = await site.storage.reap(items)
    if set(settled) != {Settled.APPLIED}:
        raise CheckFailed(f"the reap answered {dict(Counter(settled))}")
    return took_s


# -- kill -9 -------------------------------------------------------------------------------------------


async def kill_proven(bench: Bench) -> AsyncIterator[Figure]:
    """kill -9 of a worker process beside an idle worker; its death is proven by its supervisor."""
    yield await _kills(bench, "kill to restart", {}, bench.bound("kill"))


async def kill_lapsed(bench: Bench) -> AsyncIterator[Figure]:
    """The same with proofs switched off: the lease has to run out."""
    environment = {"FLUXMESH_PROOF_OF_DEATH": "false"}
    bound = bench.bound("kill-lapsed")
    yield await _kills(bench, "kill to restart without proof", environment, bound)


async def kill_shortest(bench: Bench) -> AsyncIterator[Figure]:
    """And with the shortest lease that this storage allows."""
    lease_s = SHORTEST_LEASE_S[bench.grounds.storage]
    environment = {"FLUXMESH_PROOF_OF_DEATH": "false", "FLUXMESH_LEASE_S": f"{lease_s:g}"}
    bound = bench.bound("kill-shortest")
    yield await _kills(bench, "kill to restart on the shortest lease", environment, bound)


async def _kills(bench: Bench, name: str, environment: dict[str, str], bound: Bound | None) -> Figure:
    slowest, runs = [], []
    for _ in range(2 if bench.quick else KILLS):
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
            "kills": len(slowest),
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
