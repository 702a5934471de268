"""All the work lies with one worker: how long it takes when the others take from it, and when they do not."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final

from msgspec import Struct

from benchmarks.bench import Bench, Site
from benchmarks.figures import CheckFailed, Figure, rounded
from benchmarks.seen import Seen, check_all_completed
from benchmarks.shares import keys_of, started, submit_naps
from benchmarks.team import Member, counters, free_ports, mesh_flags, team

NAMES: Final = ("north", "south", "east", "west")
WARM: Final = 500
WARM_NAP_S: Final = 0.001
JOBS: Final = 64  # as many as a buffer has room for
NAP_S: Final = 0.25
FILL_S: Final = 5.0
KEYED: Final = 640
KEYED_NAP_S: Final = 0.05
KEYED_SLOTS: Final = 4
KEYS: Final = 16
DONE_S: Final = 120.0


class Lasted(Struct, frozen=True):
    """`total_s` from the submission to the last end; `start_s` from the submission until the last worker
    was there."""

    total_s: float
    start_s: float
    told: dict[str, Any]


async def skewed(bench: Bench) -> AsyncIterator[Figure]:
    """One worker's buffer holds all jobs when two others start; and all jobs have keys of one worker."""
    for steal in (True, False):
        runs = [await _buffered(bench, steal=steal) for _ in range(bench.repeat)]
        yield Figure(
            name="skewed buffer",
            unit="s",
            values=[run.total_s - 2 * run.start_s / 3 if steal else run.total_s for run in runs],
            parameters={
                "what": "total less 2/3 of the others' start-up" if steal else "total",
                "steal": steal,
                "jobs": JOBS,
                "body_ms": NAP_S * 1e3,
                "workers": 3,
                "concurrency": 1,
            },
            bound=bench.bound("skewed-buffer" if steal else "skewed-buffer-alone"),
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
    return {"total_s": rounded(run.total_s), "start_s": rounded(run.start_s), **run.told}


async def _buffered(bench: Bench, *, steal: bool) -> Lasted:
    flags = () if steal else ("--no-mesh-steal",)
    seed = free_ports()
    async with bench.site() as site, contextlib.AsyncExitStack() as others:
        alone = site.worker(worker_id=NAMES[0], concurrency=1, flags=[*mesh_flags(seed, first=True), *flags])
        worker = await others.enter_async_context(alone)
        await site.produce("burst", "--count", WARM, "--nap", WARM_NAP_S)
        await site.until_completed(WARM, worker, DONE_S)
        await submit_naps(site, [(WARM + number, None) for number in range(JOBS)], NAP_S)
        held = await _filled(site)
        more = [
            await others.enter_async_context(
                site.worker(worker_id=name, concurrency=1, ready=False, flags=[*mesh_flags(seed), *flags])
            )
            for name in NAMES[1:3]
        ]
        for one in more:
            await site.until_ready(one)
        there = {info.worker_id: info.started_at for info in await site.storage.fleet()}
        await site.until_completed(WARM + JOBS, worker, DONE_S)
        seen = await site.read()
        counted = await counters(site, lambda told: started(told) >= WARM + JOBS)
    check_all_completed(seen, range(WARM + JOBS))
    jobs = [job for job in seen if job.number >= WARM]
    return _lasted(jobs, max(there[name] for name in NAMES[1:3]), {"held_at_most": held, "counters": counted})


async def _filled(site: Site) -> int:
    """Wait until nothing is left in the queue but what the first worker holds, if that is to be. What it
    held at most."""
    most = 0

    async def full() -> bool:
        nonlocal most
        held = sum([info.held for info in await site.storage.fleet()])
        most = max(most, held)
        ended = await site.completed() - WARM
        return held + ended + 1 >= JOBS

    with contextlib.suppress(CheckFailed):
        await site.until(full, FILL_S)
    return most


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
    return _lasted(seen, min(job.created_at for job in seen), {"counters": counted})


def _lasted(seen: list[Seen], there: float, told: dict[str, Any]) -> Lasted:
    began = min(job.created_at for job in seen)
    ended = max(job.completed_at for job in seen if job.completed_at is not None)
    shares = {str(name): many for name, many in Counter(job.worker_id for job in seen).most_common()}
    return Lasted(ended - began, max(0.0, there - began), {"jobs_by_worker": shares, **told})
