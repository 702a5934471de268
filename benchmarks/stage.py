"""Two workers, rounds of jobs, and what is seen in each: an idle one beside a surplus of the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from benchmarks.bench import Site
from benchmarks.figures import CheckFailed
from benchmarks.marks import Crossing, Mark, check_clocks, read_marks, starts_of
from benchmarks.reader import seen_of
from benchmarks.seen import Seen, check_all_completed
from benchmarks.team import Member
from fluxmesh.job import Status
from fluxmesh.submission import prepare

GATE: Final = "gate"  # a queue of those that are to be kept busy
QUEUE_CAP: Final = 1_000_000
ROUND_S: Final = 15.0
LOOK_S: Final = 0.02
LOOK_SOON_S: Final = 0.002

Judge = Callable[[Sequence[Seen], dict[int, Mark], Mark], Crossing | None]


class Scene(Struct, frozen=True):
    """How a surplus and an idle worker come together. The second member, the thief, is kept busy for `gate_s`
    by a job of a queue of its own; meanwhile `jobs` are given at once, each of which takes `nap_s`, and the
    first member has all of them; a round in which it has not counts for nothing. `judge` says what came of
    the others. `turns`: one pair at a time, since the jobs are short and the processors are few."""

    members: tuple[Member, ...]
    jobs: int
    nap_s: float
    gate_s: float
    judge: Judge
    turns: bool = True


class Stage:
    """One pair of workers, and the jobs that they were given so far."""

    def __init__(self, site: Site, scene: Scene) -> None:
        self._site = site
        self._scene = scene
        self._given = 0
        self._rounds = 0

    async def play(self) -> Crossing | None:
        """One round, to the end of all its jobs. None: the scene did not come about."""
        scene, gate_number = self._scene, self._given
        self._rounds += 1
        journal = self._site.folder / f"round-{self._rounds}"
        await self._give(1, scene.gate_s, journal, GATE)
        await _until(lambda: _has_begun(journal), LOOK_SOON_S)
        first = self._given
        ids = await self._give(scene.jobs, scene.nap_s, journal, "default")
        empty_s = await self._until_held()
        await _until(lambda: _has_ended(journal, self._given - gate_number), LOOK_S)
        await self._site.until(self._completed, ROUND_S)
        marks = read_marks(journal)
        check_clocks(marks)
        jobs = [await self._seen(job_id) for job_id in ids]
        check_all_completed(jobs, range(first, self._given))
        (gate,) = [mark for mark in marks if mark.event == "end" and mark.number == gate_number]
        return scene.judge(jobs, starts_of(marks), gate) if empty_s < gate.mono_s else None

    async def _give(self, count: int, nap_s: float, journal: Path, queue: str) -> list[str]:
        template = prepare({"task": "mark", "queue": queue})
        numbers = range(self._given, self._given + count)
        jobs = [template.job([number, nap_s, str(journal)], {}) for number in numbers]
        self._given += count
        await self._site.storage.enqueue(jobs, queue_cap=QUEUE_CAP)
        return [job.id for job in jobs]

    async def _until_held(self) -> float:
        """Wait until nothing is left in the queue; when that was seen, by the monotonic clock. What the thief
        runs after that it has taken."""
        await _until(self._has_emptied, LOOK_SOON_S)
        return time.monotonic()

    async def _has_emptied(self) -> bool:
        return not (await self._site.storage.counts()).by_status.get(Status.PENDING, 0)

    async def _completed(self) -> bool:
        return await self._site.completed() >= self._given

    async def _seen(self, job_id: str) -> Seen:
        job = await self._site.storage.get(job_id)
        if job is None:
            raise CheckFailed(f"job {job_id} is not stored")
        return await seen_of(self._site.storage, job)


async def _has_begun(journal: Path) -> bool:
    return bool(read_marks(journal))


async def _has_ended(journal: Path, jobs: int) -> bool:
    return sum(mark.event == "end" for mark in read_marks(journal)) == jobs


async def _until(holds: Callable[[], Awaitable[bool]], look_s: float) -> None:
    """Look at what gives no sign when it is there."""
    try:
        async with asyncio.timeout(ROUND_S):
            while not await holds():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(look_s)
    except TimeoutError:
        raise CheckFailed(f"a round is not over after {ROUND_S:g} s") from None
