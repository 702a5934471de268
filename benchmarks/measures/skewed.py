"""All the work lies with one worker: how long it takes when the others take from it, and when they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from benchmarks.bench import Bench, Site
from benchmarks.figures import CheckFailed, Figure, rounded
from benchmarks.seen import Seen, check_all_completed
from benchmarks.shares import keys_of, started, submit_naps
from benchmarks.stage import GATE
from benchmarks.team import Member, counters, taken, team
from fluxmesh.job import Status

NAMES: Final = ("north", "south", "east", "west")
WARM: Final = 500
WARM_NAP_S: Final = 0.0  # so short that the first worker wants a whole buffer
JOBS: Final = 64  # as many as a buffer has room for
NAP_S: Final = 0.25
GATE_S: Final = 1.0  # the others are busy so long; what is held longer than 5 s is given back
OWN: Final = "own"  # a queue of the first worker, to learn there how short jobs are
KEYED: Final = 640
KEYED_NAP_S: Final = 0.05
KEYED_SLOTS: Final = 4
KEYS: Final = 16
DONE_S: Final = 120.0


class Lasted(Struct, frozen=True):
    """`total_s`: from when the others are there and idle to the last end."""

    total_s: float
    told: dict[str, Any]


async def skewed(bench: Bench) -> AsyncIterator[Figure]:
    """One worker's buffer has all jobs when two others become idle; and all jobs have keys of one worker."""
    for steal in (True, False):
        runs = [await _buffered(bench, steal=steal) for _ in range(bench.repeat)]
        yield Figure(
            name="skewed buffer",
            unit="s",
            values=[run.total_s for run in runs],
            parameters={
                "steal": steal,
                "jobs": JOBS,
                "body_ms": NAP_S * 1e3,
                "workers": 3,
                "concurrency": 1,
                "evenly_s": rounded(JOBS * NAP_S / 3),
            },
            bound=bench.bound("skewed-buffer") if steal else None,
            details={"repetitions": [_told(run) for run in runs]},
        )
    for steal in (True, False):
        runs = [await _keyed(bench, steal=steal) for _ in range(bench.repeat)]
        yield Figure(
            name="skewed keys",
            unit="s",
            values=[run.total_s for run in runs],
            parameters={
                "steal": steal,
                "jobs": KEYED,
                "body_ms": KEYED_NAP_S * 1e3,
                "workers": len(NAMES),
                "concurrency": KEYED_SLOTS,
                "evenly_s": rounded(KEYED * KEYED_NAP_S / KEYED_SLOTS / len(NAMES)),
            },
            details={"repetitions": [_told(run) for run in runs]},
        )


def _told(run: Lasted) -> dict[str, Any]:
    return {"total_s": rounded(run.total_s), **run.told}


async def _buffered(bench: Bench, *, steal: bool) -> Lasted:
    """The others are kept busy by a job of their own queue, and hold nothing, until the first one has all."""
    flags = () if steal else ("--no-mesh-steal",)
    others = ("--queues", f"default,{GATE}", "--mesh-local-buffer", "0", *flags)
    members = [
        Member(NAMES[0], ("--queues", f"default,{OWN}", *flags)),
        *(Member(name, others) for name in NAMES[1:3]),
    ]
    gates = range(WARM + JOBS, WARM + JOBS + len(members) - 1)
    async with bench.site() as site, team(site, members, concurrency=1) as workers:
        await submit_naps(site, [(number, None) for number in range(WARM)], WARM_NAP_S, queue=OWN)
        await site.until_completed(WARM, workers[0], DONE_S)
        await submit_naps(site, [(number, None) for number in gates], GATE_S, queue=GATE)
        await site.until(lambda: _are_busy(site, len(gates)), GATE_S)
        await submit_naps(site, [(number, None) for number in range(WARM, WARM + JOBS)], NAP_S)
        await site.until(lambda: _has_all(site), GATE_S)
        await site.until_completed(WARM + JOBS + len(gates), workers[0], DONE_S)
        seen = await site.read()
        counted = await counters(site, lambda told: taken(told) >= moved(seen))
    check_all_completed(seen, range(gates.stop))
    opened = max(job.completed_at or 0.0 for job in seen if job.number in gates)
    jobs = [job for job in seen if WARM <= job.number < gates.start]
    early = [job for job in jobs if job.worker_id != NAMES[0] and (job.started_at or 0.0) < opened - 0.1]
    if early:
        raise CheckFailed(f"{len(early)} jobs ran on others while those should have been busy")
    return _lasted(jobs, opened, counted)


def moved(seen: Sequence[Seen]) -> int:
    """Jobs that did not run where all of them were held."""
    return sum(WARM <= job.number < WARM + JOBS and job.worker_id != NAMES[0] for job in seen)


async def _are_busy(site: Site, many: int) -> bool:
    return (await site.storage.counts()).by_status.get(Status.RUNNING, 0) == many


async def _has_all(site: Site) -> bool:
    """Nothing is left in the queue: the first worker holds it all."""
    return not (await site.storage.counts()).by_status.get(Status.PENDING, 0)


async def _keyed(bench: Bench, *, steal: bool) -> Lasted:
    flags = () if steal else ("--no-mesh-steal",)
    keys = keys_of(NAMES[0], NAMES, KEYS)
    async with bench.site() as site:
        members = [Member(name, flags) for name in NAMES]
        async with team(site, members, concurrency=KEYED_SLOTS) as workers:
            await submit_naps(site, [(number, keys[number % KEYS]) for number in range(KEYED)], KEYED_NAP_S)
            await site.until_completed(KEYED, workers[0], DONE_S)
            seen = await site.read()
            counted = await counters(site, lambda told: started(told) >= KEYED)
    check_all_completed(seen, range(KEYED))
    return _lasted(seen, min(job.created_at for job in seen), counted)


def _lasted(seen: Sequence[Seen], began: float, counted: Mapping[str, int]) -> Lasted:
    ended = max(job.completed_at for job in seen if job.completed_at is not None)
    shares = {str(name): many for name, many in Counter(job.worker_id for job in seen).most_common()}
    return Lasted(ended - began, {"jobs_by_worker": shares, "counters": dict(counted)})
