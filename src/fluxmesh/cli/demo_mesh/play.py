"""The demo from its first process to its summary."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from fluxmesh.cli.demo.stage import heading, say
from fluxmesh.cli.demo_mesh import keyboard
from fluxmesh.cli.demo_mesh.atlas import BUSY, LOOPBACK, REGIONS
from fluxmesh.cli.demo_mesh.figures import (
    Line,
    Look,
    Rate,
    RegionLook,
    Summary,
    Theft,
    counted,
    ended_twice,
    has_doubled,
    lost_of,
    round_trips,
    standing_of,
)
from fluxmesh.cli.demo_mesh.fleet import Fleet, fleet_of, free_ports
from fluxmesh.cli.demo_mesh.region import TASK
from fluxmesh.cli.demo_mesh.screen import Screen, screen
from fluxmesh.cli.demo_mesh.telling import Orders
from fluxmesh.cli.demo_mesh.traffic import BURST, BURST_EVERY_S, WAVE_EVERY_S, Traffic
from fluxmesh.cli.session import storage_of
from fluxmesh.clock import system_clock
from fluxmesh.config import Settings
from fluxmesh.errors import QueueFull
from fluxmesh.job import Job
from fluxmesh.mesh.options import keygen
from fluxmesh.query import PAGE_MAX, Query
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Verdict
from fluxmesh.submission import NewJob

QUEUE: Final = "demo"
CONCURRENCY: Final = 3
PERIOD_MS: Final = 1_000  # of probes: the longest round trip has to fit into half of it
LOOK_S: Final = 0.2
STANDSTILL_S: Final = 20.0  # at the end: nothing more is waited for then,
DRAIN_MOST_S: Final = 120.0  # or after so long,
HURRIED_S: Final = 5.0  # or, if it is ended by a key
BACK_AFTER_S: Final = 6.0  # a killed region comes back by itself
KEY_GRANTS_S: Final = 30.0  # more time after a key
SECONDS_MOST: Final = 600.0
JOBS_MOST: Final = 50_000
_TOLD: Final = {"member suspected": "is suspected", "member dead": "is dead", "peer restarted": "is back"}


class Plan(Struct, frozen=True):
    """`seconds`: how long jobs are submitted. `kills_at_s`: when a region is killed unasked; None: never."""

    folder: Path
    settings: Settings
    seconds: float
    kills_at_s: float | None
    interactive: bool
    quiet: bool
    steal: bool


async def play(plan: Plan) -> Summary:
    """Everything, from the first process to the last; the processes are gone afterwards."""
    async with storage_of(plan.settings, create=True) as storage:
        rng = random.Random(int.from_bytes(os.urandom(8), "big"))
        ports = free_ports(rng)
        orders = {region: _orders(region, ports, plan) for region in REGIONS}
        hear = _Hearing()
        async with fleet_of(plan.folder, orders, keygen(), hear) as fleet:
            if not plan.quiet:
                heading("Five regions, one mesh")
                say(f"regions   {', '.join(f'{one} {fleet.now[one].process.pid}' for one in REGIONS)}")
                say(f"jobs      most are of tenants whose keys belong to {' and '.join(BUSY)}")
                say("storage   one file beside all of them, with no delay to it: what is not taken over")
                say("          the mesh in a tenth of a second, idle regions take through the storage")
            await fleet.wait_until_met()
            with screen(drawn=plan.interactive, quiet=plan.quiet) as shown:
                director = _Director(plan, storage, fleet, shown, hear, rng)
                with keyboard.keys(director.key) if plan.interactive else contextlib.nullcontext():
                    await director.direct()
        return await director.summary()


def _orders(region: str, ports: dict[str, int], plan: Plan) -> Orders:
    first = f"{LOOPBACK}:{ports[REGIONS[0]]}"
    second = f"{LOOPBACK}:{ports[REGIONS[1]]}"
    return Orders(
        region=region,
        url=plan.settings.url or "",
        queue=QUEUE,
        port=ports[region],
        seeds=(first, second),
        concurrency=CONCURRENCY,
        steal=plan.steal,
        period_ms=PERIOD_MS,
    )


class _Hearing:
    """What regions log, as far as it is worth a remark; the same of several regions is one remark."""

    def __init__(self) -> None:
        self._seen_by: dict[tuple[str, str], list[str]] = {}
        self._stolen: Counter[tuple[str, str]] = Counter()
        self.thefts: Counter[tuple[str, str]] = Counter()  # thief, victim -> jobs, since the start

    def __call__(self, region: str, fields: dict[str, Any]) -> None:
        event, member, jobs = fields["event"], str(fields.get("member")), fields.get("jobs")
        if event in _TOLD:
            self._seen_by.setdefault((event, member), []).append(region)
        elif event == "jobs stolen" and isinstance(jobs, int) and member in REGIONS:
            self._stolen[region, member] += jobs
            self.thefts[region, member] += jobs

    def remarks(self) -> Iterator[str]:
        stolen, self._stolen = self._stolen, Counter()
        for (thief, victim), jobs in stolen.items():
            yield f"{thief} took {jobs} from {victim}"
        seen_by, self._seen_by = self._seen_by, {}
        for (event, member), regions in seen_by.items():
            yield f"{member} {_TOLD[event]}, says {', '.join(regions)}"


class _Director:
    """What happens when. Keys only note a wish; the next look carries it out."""

    def __init__(
        self, plan: Plan, storage: Storage, fleet: Fleet, shown: Screen, hear: _Hearing, rng: random.Random
    ) -> None:
        self._plan = plan
        self._storage = storage
        self._fleet = fleet
        self._shown = shown
        self._hear = hear
        self._rng = rng
        self._traffic = Traffic(TASK, QUEUE, rng)
        self._clock = system_clock()
        self._began_s = self._clock.mono_s()
        self._until_s = plan.seconds
        self._wave_s = 0.0
        self._burst_s = 1.5
        self._kill_s = plan.kills_at_s
        self._back_s: dict[str, float] = {}
        self._wishes = ""
        self._over = False
        self._submitted: list[str] = []
        self._kills = 0
        self._rate = Rate()
        self._seconds = 0.0
        self._done = 0
        self._moved_s = 0.0

    def key(self, key: str) -> None:
        if len(self._wishes) < 100:
            self._wishes += key

    @property
    def _now_s(self) -> float:
        return self._clock.mono_s() - self._began_s

    async def direct(self) -> None:
        """Until the time is up and nothing is left to run, or it is to end at once."""
        draining_s: float | None = None  # since when
        while True:
            now_s = self._now_s
            await self._obey(now_s)
            if not self._over and now_s < self._until_s:
                await self._submit_what_is_due(now_s)
            elif draining_s is None:
                draining_s = self._moved_s = now_s
            await self._bring_back(now_s, everybody=draining_s is not None)
            self._fleet.check()
            look = await self._look(now_s)
            self._seconds = now_s
            if look.done != self._done:
                self._done, self._moved_s = look.done, now_s
            if draining_s is not None and (not look.left or self._is_long_enough(now_s, draining_s)):
                return
            await asyncio.sleep(LOOK_S)

    def _is_long_enough(self, now_s: float, draining_s: float) -> bool:
        most_s = HURRIED_S if self._over else DRAIN_MOST_S
        return now_s - draining_s > most_s or now_s - self._moved_s > STANDSTILL_S

    # -- what happens ------------------------------------------------------------------------------------
    async def _obey(self, now_s: float) -> None:
        wishes, self._wishes = self._wishes, ""
        if self._kill_s is not None and now_s >= self._kill_s:
            self._kill_s, wishes = None, wishes + "k"
        for wish in wishes:
            if self._plan.interactive and wish in "bkr":
                self._until_s = min(max(self._until_s, now_s + KEY_GRANTS_S), SECONDS_MOST)
            match wish:
                case "b":
                    await self._submit(self._traffic.burst())
                    self._shown.remark(now_s, f"a burst of {BURST} long jobs")
                case "k":
                    self._kill(now_s)
                case "r":
                    self._back_s = dict.fromkeys(self._back_s, now_s)
                case "q":
                    self._over = True

    def _kill(self, now_s: float) -> None:
        """One that has something to lose, if there is one."""
        there = [region for region in REGIONS if self._fleet.now[region].alive]
        if len(there) < 2:
            self._shown.remark(now_s, "one region has to stay")
            return
        busiest = max(there, key=lambda region: (self._load(region), self._rng.random()))
        if self._fleet.kill(busiest):
            self._kills += 1
            self._back_s[busiest] = now_s + BACK_AFTER_S
            self._shown.remark(now_s, f"{busiest} is killed (-9) with {self._load(busiest)} jobs")

    def _load(self, region: str) -> int:
        told = self._fleet.now[region].told
        return 0 if told is None else told.running + told.held

    async def _bring_back(self, now_s: float, *, everybody: bool) -> None:
        for region, at_s in list(self._back_s.items()):
            if (now_s >= at_s or everybody) and not self._fleet.now[region].alive:
                del self._back_s[region]
                await self._fleet.start(region)
                self._shown.remark(now_s, f"{region} starts again")

    async def _submit_what_is_due(self, now_s: float) -> None:
        if now_s >= self._wave_s:
            self._wave_s = now_s + WAVE_EVERY_S
            await self._submit(self._traffic.wave())
        if now_s >= self._burst_s:
            self._burst_s = now_s + BURST_EVERY_S
            await self._submit(self._traffic.burst())
            self._shown.remark(now_s, f"a burst of {BURST} long jobs")

    async def _submit(self, jobs: Sequence[NewJob]) -> None:
        if len(self._submitted) + len(jobs) > JOBS_MOST:
            return
        answers = await self._storage.enqueue(jobs, queue_cap=JOBS_MOST)
        if any(answer.verdict is Verdict.FULL for answer in answers):
            raise QueueFull("the demo's queue is full", hint="that is more than it should ever hold")
        self._submitted.extend(job.id for job in jobs)

    # -- what is seen ------------------------------------------------------------------------------------
    async def _look(self, now_s: float) -> Look:
        fleet = self._fleet
        stats = [one for one in await self._storage.queue_stats() if one.queue == QUEUE]
        waiting = sum(sum(one.queued) + one.scheduled for one in stats)
        running = sum(one.running for one in stats)
        done = sum(len(run.ended) for run in fleet.runs)
        look = Look(
            elapsed_s=now_s,
            regions=tuple(self._region(region) for region in REGIONS),
            round_trips_ms=round_trips({name: run.told for name, run in fleet.now.items() if run.alive}),
            submitted=len(self._submitted),
            done=done,
            waiting=waiting,
            left=waiting + running,
            done_per_s=self._rate.note(now_s, done),
        )
        for remark in self._hear.remarks():
            self._shown.remark(now_s, remark)
        self._shown.show(look)
        return look

    def _region(self, region: str) -> RegionLook:
        fleet = self._fleet
        run = fleet.now[region]
        counters = counted(one.told for one in fleet.runs if one.region == region)
        told = run.told if run.alive else None
        living = {name: one.told for name, one in fleet.now.items() if one.alive}
        return RegionLook(
            region=region,
            pid=run.process.pid,
            alive=run.alive,
            standing=standing_of(region, living),
            running=0 if told is None else told.running,
            held=0 if told is None else told.held,
            done=sum(len(one.ended) for one in fleet.runs if one.region == region),
            own=counters["affinity_hits"],
            took=counters["jobs_stolen_in"],
            took_by_storage=counters["jobs_taken_held"],
            left=counters["jobs_stolen_out"],
        )

    # -- how it went -------------------------------------------------------------------------------------
    async def summary(self) -> Summary:
        """Once all regions have ended: nothing changes any more."""
        jobs = {job.id: job for job in await all_jobs(self._storage)}
        lost = lost_of(self._submitted, jobs)
        again = [job.id for job in jobs.values() if job.crashes or job.interruptions or job.attempts]
        doubled = ended_twice((run.killed, run.ended) for run in self._fleet.runs)
        for job_id in again:
            if has_doubled(await self._storage.history(job_id) or ()):
                doubled.add(job_id)
        total = counted(run.told for run in self._fleet.runs)
        unfinished = sum(not job.ended for job in jobs.values())
        completed = len(self._submitted) - len(lost) - unfinished
        by_region = Counter(job.worker_id for job in jobs.values())
        return Summary(
            jobs=len(self._submitted),
            completed=completed,
            lost=len(lost),
            unfinished=unfinished,
            doubled=len(doubled),
            ran_again=len([job for job in jobs.values() if job.crashes]),
            kills=self._kills,
            seconds=round(self._seconds, 2),
            jobs_per_s=round(completed / self._seconds, 1) if self._seconds else 0.0,
            steals_initiated=total["steals_initiated"],
            steals_succeeded=total["steals_succeeded"],
            jobs_stolen_in=total["jobs_stolen_in"],
            jobs_stolen_out=total["jobs_stolen_out"],
            jobs_taken_held=total["jobs_taken_held"],
            affinity_hits=total["affinity_hits"],
            affinity_misses=total["affinity_misses"],
            starts_counted=total["affinity_hits"] + total["affinity_misses"],
            regions=tuple(self._line(region, by_region[region]) for region in REGIONS),
            thefts=tuple(
                Theft(thief=thief, victim=victim, jobs=jobs)
                for (thief, victim), jobs in self._hear.thefts.most_common()
            ),
            ended_by_key=self._over,
        )

    def _line(self, region: str, completed: int) -> Line:
        runs = [run for run in self._fleet.runs if run.region == region]
        counters = counted(run.told for run in runs)
        return Line(
            region=region,
            completed=completed,
            own=counters["affinity_hits"],
            others=counters["affinity_misses"],
            stolen_in=counters["jobs_stolen_in"],
            stolen_out=counters["jobs_stolen_out"],
            taken_held=counters["jobs_taken_held"],
            runs=len(runs),
        )


async def all_jobs(storage: Storage) -> list[Job]:
    jobs: list[Job] = []
    cursor: str | None = None
    while True:
        page = await storage.find(Query(queue=QUEUE), cursor=cursor, limit=PAGE_MAX)
        jobs.extend(page.items)
        cursor = page.next_cursor
        if cursor is None:
            return jobs
