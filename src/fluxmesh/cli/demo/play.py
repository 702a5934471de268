"""The demo itself, act by act."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Final

from fluxmesh.cli import output
from fluxmesh.cli.demo import stage
from fluxmesh.cli.demo.cast import DELAY_S, Cast, make_cast, submit
from fluxmesh.cli.demo.crew import Crew, crew
from fluxmesh.cli.demo.figures import TierFigures, first_start, place_of, tier_figures
from fluxmesh.cli.demo.files import Found
from fluxmesh.cli.demo.proof import prove
from fluxmesh.cli.demo.scene import Scene
from fluxmesh.cli.session import storage_of
from fluxmesh.clock import system_clock
from fluxmesh.errors import WaitTimeout
from fluxmesh.ids import new_nonce
from fluxmesh.job import Job, Status
from fluxmesh.query import PAGE_MAX, Query
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Done, QueueStats

LOOK_S: Final = 0.1
STANDSTILL_S: Final = 60.0
REPLAY_MOST_S: Final = 15.0
MENDED_TEXT: Final = "Better late than never.\n"


async def play(scene: Scene, found: Found) -> int:
    """0 if every job ended as it should; the workers are stopped either way."""
    late = scene.folder / "late.txt"
    cast = make_cast(found.files, str(late), scene.queue, scene.settings)
    name = f"demo-{new_nonce()[:4]}"
    async with storage_of(scene.settings, create=True) as storage:
        async with crew(scene.url, scene.settings.namespace, scene.queue, name, scene.folder) as workers:
            pids = await workers.wait_until_ready(storage)
            stage.say(f"workers   {len(pids)} processes: {', '.join(str(pid) for pid in pids)}")
            stage.heading(f"{len(cast.jobs):,} jobs on four tiers, the urgent one last")
            await _backlog(storage, scene, cast)
            await _watch(storage, workers, scene.queue, cast)
            jobs = await _all_jobs(storage, scene.queue)
            well = await _tell(storage, cast, jobs)
            well = await _mend(storage, cast, late) and well
            well = await prove(scene, found.files) and well
        left = [one.worker_id for one in await storage.fleet() if one.worker_id.startswith(f"{name}.")]
        well = well and not left
        stage.heading("Done" if well else "Done, but not as it should be")
        ended = f"still there: {', '.join(left)}" if left else "and their supervisor have stopped"
        stage.say(f"{len(pids)} worker processes {ended}")
    return 0 if well else 1


async def _backlog(storage: Storage, scene: Scene, cast: Cast) -> None:
    """Everything is submitted while the queue is paused, so that there is a backlog to jump."""
    await storage.pause(scene.queue)
    try:
        await submit(storage, cast, scene.settings)
    finally:
        await storage.resume(scene.queue)


# -- while it runs -----------------------------------------------------------------------------------


async def _watch(storage: Storage, workers: Crew, queue: str, cast: Cast) -> None:
    """Until nothing of the queue waits, runs or is scheduled. Raises WaitTimeout after a standstill."""
    clock = system_clock()
    began = moved_at = clock.mono_s()
    last = None
    with stage.progress(cast.by_tier) as shown:
        chronicle = _Chronicle(cast, shown)
        while True:
            stats = await _stats_of(storage, queue)
            now = clock.mono_s()
            shown.update(now - began, stats)
            await chronicle.look(storage)
            left = (stats.queued, stats.running, stats.scheduled)
            if not any(stats.queued) and not stats.running and not stats.scheduled:
                return
            if left != last:
                last, moved_at = left, now
            if now - moved_at > STANDSTILL_S:
                raise WaitTimeout(
                    f"nothing has moved for {STANDSTILL_S:g} s", hint=workers.last_words()[-300:]
                )
            workers.check()
            await asyncio.sleep(LOOK_S)


async def _stats_of(storage: Storage, queue: str) -> QueueStats:
    for stats in await storage.queue_stats():
        if stats.queue == queue:
            return stats
    return QueueStats(queue, False, (0, 0, 0, 0), 0, 0, 0, None)


class _Chronicle:
    """Tells what happens to the four jobs that have a part of their own."""

    def __init__(self, cast: Cast, shown: stage.Progress) -> None:
        self._parts = {part: getattr(cast, part) for part in ("urgent", "flaky", "failing", "delayed")}
        self._shown = shown
        self._seen: dict[str, str] = {}

    async def look(self, storage: Storage) -> None:
        for part, job_id in self._parts.items():
            job = await storage.get(job_id)
            text = "" if job is None else self._text(job)
            if text and text != self._seen.get(part):
                self._seen[part] = text
                self._shown.remark(f"{part}: {text}")

    @staticmethod
    def _text(job: Job) -> str:
        failure = f"{job.error.type}: {job.error.message}" if job.error else ""
        match job.status:
            case Status.SCHEDULED if job.attempts:
                return f"attempt {job.attempts} failed ({failure}), to be retried"
            case Status.SCHEDULED:
                return "scheduled for later"
            case Status.COMPLETED:
                return "completed"
            case Status.DEAD_LETTER:
                return f"given up after {job.attempts} attempts ({failure})"
        return ""


async def _all_jobs(storage: Storage, queue: str) -> list[Job]:
    jobs: list[Job] = []
    cursor: str | None = None
    while True:
        page = await storage.find(Query(queue=queue), cursor=cursor, limit=PAGE_MAX)
        jobs.extend(page.items)
        cursor = page.next_cursor
        if cursor is None:
            return jobs


# -- when it has run ---------------------------------------------------------------------------------


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:,.0f} ms"


def _row(figures: TierFigures) -> tuple[str, ...]:
    waits = (_seconds(figures.wait_median_s), _seconds(figures.wait_most_s))
    return (figures.tier, f"{figures.jobs:,}", f"{figures.completed:,}", *waits)


async def _tell(storage: Storage, cast: Cast, jobs: list[Job]) -> bool:
    """The result. True if it is as it should be: all completed but the one that cannot be."""
    stage.heading("Result")
    columns = ("TIER", "FILES", "COMPLETED", "MEDIAN WAIT", "LONGEST WAIT")
    output.table(columns, [_row(figures) for figures in tier_figures(jobs, cast)], right=columns[1:])
    known = {job.id: job for job in jobs}
    starts: dict[str, float] = {}
    for job in jobs:
        history = await storage.history(job.id) if job.attempts > 1 else None
        start = first_start(job, history or ())
        if start is not None:
            starts[job.id] = start
    lost = [job for job in jobs if job.status is not Status.COMPLETED and job.id != cast.failing]
    retries = sum(max(job.attempts - 1, 0) for job in jobs)
    stage.say(f"{len(jobs) - len(lost) - 1:,} completed, {len(lost) + 1} given up, {retries} retries")
    if cast.urgent in starts:
        place = place_of(cast.urgent, [job.id for job in cast.jobs], starts)
        stage.say(
            f"urgent    submitted as number {place.submitted:,}, started as number {place.started:,}: "
            f"it came before {place.overtaken:,} jobs that had been there first"
        )
    await _tell_flaky(storage, known[cast.flaky])
    delayed = known[cast.delayed]
    if cast.delayed in starts:
        late_s = starts[cast.delayed] - delayed.created_at - DELAY_S
        stage.say(f"delayed   asked for {DELAY_S:g} s, started {_seconds(late_s)} after that")
    for job in lost[:5]:
        why = f"{job.error.type}: {job.error.message}" if job.error else ""
        stage.say(f"{job.status.value}: {job.id} {job.task} {why}")
    return not lost


async def _tell_flaky(storage: Storage, flaky: Job) -> None:
    ends = [attempt.ended_at for attempt in await storage.history(flaky.id) or ()]
    gaps = ", ".join(_seconds(after - before) for before, after in pairwise(ends))
    stage.say(
        f"flaky     {flaky.status.value.lower()} at attempt {flaky.attempts}; between the attempts {gaps}"
    )


async def _mend(storage: Storage, cast: Cast, late: Path) -> bool:
    """Show the dead letter, mend its cause, replay it. True if it completes."""
    stage.heading("A dead letter")
    job = await storage.get(cast.failing)
    if job is None or job.status is not Status.DEAD_LETTER or job.error is None:
        stage.say(f"{cast.failing} should be a dead letter, and is not")
        return False
    stage.say(f"{job.id} {job.task}, given up after {job.attempts} attempts ({job.reason})")
    stage.stack(job.error.text or "\n".join((*job.error.frames, f"{job.error.type}: {job.error.message}")))
    await asyncio.to_thread(late.write_text, MENDED_TEXT, encoding="utf-8")
    stage.say(f"mended    {late} exists now")
    (answer,) = await storage.replay([job.id])
    if answer is not Done.DONE:
        stage.say(f"the replay was refused: {answer.value}")
        return False
    job = await storage.wait_for(job.id, REPLAY_MOST_S)
    if job is None or job.status is not Status.COMPLETED:
        stage.say(f"replayed  and still {job.status.value if job else 'unknown'}")
        return False
    stage.say(f"replayed  {job.status.value.lower()} in life {job.life}: {output.shown(job.result)}")
    return True
