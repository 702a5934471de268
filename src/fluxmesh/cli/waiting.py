"""Waiting for the end of a job: a progress bar on a terminal, lines on stderr otherwise."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from fluxmesh.cli import output
from fluxmesh.clock import Clock, MonoS, system_clock
from fluxmesh.errors import FluxMeshError, JobCancelled, JobExpired, JobFailed, JobNotFound, WaitTimeout
from fluxmesh.job import Job, Status
from fluxmesh.outage import AWAY, Outage
from fluxmesh.storage.base import Storage

LOOK_S: Final = 0.2  # how often a progress bar is brought up to date
LINE_S: Final = 1.0
LONELY_AFTER_S: Final = 3.0
Show = Callable[[Job], None]


def unknown(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id[:80]!r}", hint="`fluxmesh jobs list` shows the ids")


async def wait_for_end(storage: Storage, job_id: str, timeout_s: float | None) -> tuple[Job, bool]:
    """The job and whether it has ended. Raises JobNotFound. `timeout_s` None waits as long as it takes.

    A storage that has answered once may be away for a while after that."""
    clock = system_clock()
    until = None if timeout_s is None else MonoS(clock.mono_s() + timeout_s)
    outage, met = Outage(), False
    with _display() as (show, look_s):
        loneliness = _Loneliness(clock)
        while True:
            left_s = look_s if until is None else min(look_s, max(until - clock.mono_s(), 0.0))
            try:
                job = await storage.wait_for(job_id, left_s)
            except AWAY as error:
                if not met:
                    raise
                pause_s = outage.bear(error, clock.mono_s(), until)
                if outage.began:
                    output.note(f"the storage does not answer, still waiting: {output.safe(str(error))}")
                await asyncio.sleep(pause_s)
                continue
            outage.answered()
            met = True
            if job is None:
                raise unknown(job_id)
            show(job)
            if job.ended:
                return job, True
            if until is not None and clock.mono_s() >= until:
                return job, False
            await loneliness.remark(storage, job)


class _Loneliness:
    """Says once that nobody is there to run the job: the commonest reason of a wait without end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: MonoS = clock.mono_s()
        self._said = False

    async def remark(self, storage: Storage, job: Job) -> None:
        waiting = job.status is Status.PENDING
        if self._said or not waiting or self._clock.mono_s() - self._since < LONELY_AFTER_S:
            return
        self._said = True
        try:
            fleet = await storage.fleet()
        except AWAY:
            self._said = False  # at another look
            return
        if not any(worker.status in ("ready", "draining", "retiring") for worker in fleet):
            output.note("no worker is alive; start one with `fluxmesh worker`")
        elif job.waiting_for is not None:
            output.note(f"the job waits for {output.safe(job.waiting_for)}")


@contextmanager
def _display() -> Iterator[tuple[Show, float]]:
    if sys.stderr is not None and sys.stderr.isatty():
        with _bar() as show:
            yield show, LOOK_S
    else:
        yield _line_on_change(), LINE_S


def _line_on_change() -> Show:
    last: list[str] = [""]

    def show(job: Job) -> None:
        message = f" {output.safe(job.progress_message)}" if job.progress_message else ""
        text = f"{job.id} {job.status.value} {job.progress:.0f} %{message}"
        if text != last[0]:
            output.note(text)
            last[0] = text

    return show


@contextmanager
def _bar() -> Iterator[Show]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.fields[status]:<11}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=100, status="")

        def show(job: Job) -> None:
            message = escape(output.safe(job.progress_message or "", most=80))
            progress.update(bar, completed=job.progress, description=message, status=job.status.value)

        yield show


def failure_of(job: Job, *, ended: bool) -> FluxMeshError | None:
    """Why a waited-for job is no success: exit 10, or 124 if it has not ended."""
    hint = f"`fluxmesh jobs show {job.id}` tells more"
    if not ended:
        return WaitTimeout(f"job {job.id} is still {job.status.value}", hint=hint)
    match job.status:
        case Status.COMPLETED:
            return None
        case Status.CANCELLED:
            return JobCancelled(f"job {job.id} was cancelled", job_id=job.id, hint=hint)
        case Status.EXPIRED:
            return JobExpired(f"job {job.id} expired before it was started", job_id=job.id, hint=hint)
    why = f"{job.error.type}: {job.error.message[:500]}" if job.error else job.reason or "given up"
    return JobFailed(f"job {job.id} failed: {why}", job_id=job.id, hint=hint)
