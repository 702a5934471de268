"""`fluxmesh scheduler`: a loop of housekeeping that ends when it is told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import apsw
import pytest

from fluxmesh.clock import SystemClock
from fluxmesh.config import Settings
from fluxmesh.errors import StorageMissing
from fluxmesh.scheduler.runner import FINISH_S, run_scheduler
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import ExchangeRequest, Registration, TaskSpec, WorkerRef
from fluxmesh.submission import prepare
from tests.service.log_tap import LogTap, tapped

SETTINGS = Settings()
Open = Callable[[bool], Awaitable[Storage]]


def opener(folder: Path, *, create: bool = True) -> Open:
    async def open(inline: bool) -> Storage:
        return await open_storage(f"sqlite:///{folder / 'test.db'}", SETTINGS, create=create, inline=inline)

    return open


def play(scenario: Callable[[LogTap], Awaitable[None]]) -> None:
    async def bounded(tap: LogTap) -> None:
        async with asyncio.timeout(30):
            await scenario(tap)

    with tapped() as tap:
        asyncio.run(bounded(tap))


def scheduler(open: Open) -> asyncio.Task[int]:
    return asyncio.ensure_future(run_scheduler(open_storage=open, settings=SETTINGS, clock=SystemClock()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_runs_until_a_signal_and_ends_with_0(tmp_path: Path, number: signal.Signals) -> None:
    async def scenario(tap: LogTap) -> None:
        run = scheduler(opener(tmp_path))
        await tap.until("scheduler started")
        os.kill(os.getpid(), number)
        assert await run == 0

    play(scenario)


def test_a_second_signal_cuts_the_round_at_hand_short_and_ends_with_1(tmp_path: Path) -> None:
    async def scenario(tap: LogTap) -> None:
        await (await opener(tmp_path)(False)).close()
        blocker = apsw.Connection(str(tmp_path / "test.db"))
        blocker.execute("begin immediate")  # the first round will wait for this
        run = scheduler(opener(tmp_path))
        await tap.until("scheduler started")
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(FINISH_S / 2):
            assert await run == 1
        blocker.close()

    play(scenario)


def test_a_due_job_is_made_ready_and_wakes_a_waiting_worker(tmp_path: Path) -> None:
    async def scenario(tap: LogTap) -> None:
        storage = await opener(tmp_path)(False)
        registration = Registration("w", ("default",), (0, 1, 2, 3), (TaskSpec("t"),), 8, 6.0, 2.0)
        worker = WorkerRef("w", await storage.register(registration))
        job = prepare({"task": "t", "delay_seconds": 0.5}).job((), {})
        await storage.enqueue([job], queue_cap=10)
        assert (await storage.exchange(ExchangeRequest(worker, 1, slots=1))).running == ()
        run = scheduler(opener(tmp_path))
        await storage.wait_for_work(worker, 0.01)  # what rang before the job was due
        assert await storage.wait_for_work(worker, 10)
        answer = await storage.exchange(ExchangeRequest(worker, 2, slots=1))
        assert [given.id for given in answer.running] == [job.id]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run == 0
        await storage.close()

    play(scenario)


def test_a_storage_that_is_missing_is_an_error_at_the_start(tmp_path: Path) -> None:
    async def scenario(tap: LogTap) -> None:
        with pytest.raises(StorageMissing):
            await scheduler(opener(tmp_path, create=False))

    play(scenario)
