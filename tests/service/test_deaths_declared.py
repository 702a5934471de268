"""The supervisor beside a real storage: a child's death frees its jobs at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fluxmesh.clock import SystemClock
from fluxmesh.config import Settings
from fluxmesh.errors import StorageUnreachable
from fluxmesh.job import Status
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import ExchangeRequest, OnDeath, ProgressNote, Registration, TaskSpec, WorkerRef
from fluxmesh.submission import prepare
from fluxmesh.worker.child_process import ChildSpec
from fluxmesh.worker.guard import ChildGuard
from fluxmesh.worker.supervisor import EXIT_SLACK_S, HURRY_EXIT_S, SAME_MOMENT_S, Supervisor
from tests.patience import soon
from tests.service.log_tap import LogTap, tapped

CHILD = Path(__file__).with_name("child.py")
ROOT = CHILD.parents[2]
PATHS = os.pathsep.join((str(ROOT), str(ROOT / "src")))
SETTINGS = Settings(grace_s=0, hard_grace_s=0, proof_of_death=True)


class Scene:
    """A storage in which this test has registered a run of worker "w", whose jobs a child process "runs"."""

    def __init__(self, folder: Path, tap: LogTap) -> None:
        self.tap = tap
        self.folder = folder
        self.url = f"sqlite:///{folder / 'test.db'}"
        self.refusals = 0
        self.silent = False
        self.storage: Storage
        self.worker: WorkerRef

    async def open(self, inline: bool = False) -> Storage:
        if self.silent:
            await asyncio.Event().wait()
        if self.refusals:
            self.refusals -= 1
            raise StorageUnreachable("locked for a while")
        return await open_storage(self.url, SETTINGS, create=True, inline=inline)

    async def set_up(self) -> None:
        self.storage = await self.open()
        registration = Registration("w", ("default",), (0, 1, 2, 3), (TaskSpec("t"),), 8, 6.0, 2.0)
        self.worker = WorkerRef("w", await self.storage.register(registration))

    async def running(self, count: int) -> list[str]:
        """Ids of jobs that the child's epoch runs."""
        template = prepare({"task": "t"})
        await self.storage.enqueue([template.job((), {}) for _ in range(count)], queue_cap=1_000)
        answer = await self.storage.exchange(ExchangeRequest(self.worker, 1, slots=count))
        self.tokens = {job.id: job.token for job in answer.running}
        assert len(self.tokens) == count
        return list(self.tokens)

    def supervisor(self, *steps: str) -> Supervisor:
        argv = (
            sys.executable,
            str(CHILD),
            str(self.folder / "journal"),
            f"epoch={self.worker.epoch}",
            *steps,
        )
        spec = ChildSpec("w", argv, {**os.environ, "PYTHONPATH": PATHS})
        return Supervisor(children=[spec], open_storage=self.open, settings=SETTINGS, clock=SystemClock())

    async def counters(self, job_id: str) -> tuple[Status, int, int, int]:
        job = await self.storage.get(job_id)
        assert job is not None
        return job.status, job.attempts, job.crashes, job.interruptions


Play = Callable[[Scene], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Play], None]:
    def run(scenario: Play) -> None:
        async def bounded(tap: LogTap) -> None:
            async with asyncio.timeout(120):
                scene = Scene(tmp_path, tap)
                await scene.set_up()
                try:
                    await scenario(scene)
                finally:
                    await scene.storage.close()

        with tapped() as tap:
            asyncio.run(bounded(tap))

    return run


def tell() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_jobs_whose_bodies_a_drained_child_left_running_are_free_when_it_is_gone(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        [job_id] = await scene.running(1)
        note = ProgressNote(job_id, scene.tokens[job_id], on_death=OnDeath.INTERRUPTED)
        await scene.storage.progress(scene.worker, [note])
        assert await scene.supervisor("left=1", "exit=0").run() == 0
        assert scene.tap.found("death declared", how="stopped")
        assert await scene.counters(job_id) == (Status.PENDING, 0, 0, 1)

    play(scenario)


def test_a_killed_childs_jobs_are_ready_again_within_a_second(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        ids = await scene.running(4)
        run = asyncio.create_task(scene.supervisor("obey").run())
        pid = (await scene.tap.until("worker ready"))["pid"]
        loop = asyncio.get_running_loop()
        os.kill(pid, signal.SIGKILL)
        killed_at = loop.time()
        reaped = await scene.tap.until("jobs reaped", worker="w")
        assert loop.time() - killed_at < soon(1.0)
        assert (reaped["count"], reaped["how"]) == (4, "killed by SIGKILL")
        for job_id in ids:
            assert await scene.counters(job_id) == (Status.PENDING, 0, 1, 0)
        tell()
        assert await run == 0
        assert len(scene.tap.found("death declared")) == 1

    play(scenario)


def test_a_retired_childs_overdue_job_is_a_timeout_and_the_others_are_interrupted(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        overdue, other = await scene.running(2)
        await scene.storage.progress(
            scene.worker,
            [
                ProgressNote(overdue, scene.tokens[overdue], on_death=OnDeath.TIMEOUT),
                ProgressNote(other, scene.tokens[other], on_death=OnDeath.INTERRUPTED),
            ],
        )
        run = asyncio.create_task(scene.supervisor(f"once={scene.folder / 'first'}", "exit=75").run())
        await scene.tap.until("jobs reaped", how="retired: a body could not be stopped")
        assert await scene.counters(overdue) == (Status.SCHEDULED, 1, 0, 0)
        assert await scene.counters(other) == (Status.PENDING, 0, 0, 1)
        tell()
        assert await run == 0

    play(scenario)


def test_jobs_of_a_child_that_had_to_be_killed_at_a_stop_are_charged_nothing(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        (job_id,) = await scene.running(1)
        run = asyncio.create_task(scene.supervisor("deaf").run())
        await scene.tap.until("worker ready")
        tell()
        await scene.tap.until("worker stops")
        await asyncio.sleep(SAME_MOMENT_S + 0.02)  # sooner it would be the same telling
        tell()
        assert await run == 1
        assert scene.tap.found("death declared", how="stopped")
        assert await scene.counters(job_id) == (Status.PENDING, 0, 0, 1)

    play(scenario)


@pytest.mark.parametrize("guarded", [False, True], ids=["", "its guard waits for it too"])
@pytest.mark.parametrize(("tellings", "bound_s"), [(1, EXIT_SLACK_S), (2, HURRY_EXIT_S)])
def test_a_silent_storage_does_not_hold_up_the_end_of_a_worker(
    play: Callable[[Play], None],
    tellings: int,
    bound_s: float,
    guarded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither grace is any here, and the child has to be killed."""

    async def never(_: ChildGuard, _timeout_s: float) -> None:
        await asyncio.Event().wait()

    if guarded:
        monkeypatch.setattr(ChildGuard, "close", never)

    async def scenario(scene: Scene) -> None:
        await scene.running(1)
        run = asyncio.create_task(scene.supervisor("deaf").run())
        await scene.tap.until("worker ready")
        scene.silent = True
        for _ in range(tellings):
            tell()
            told_at = asyncio.get_running_loop().time()
            await asyncio.sleep(SAME_MOMENT_S + 0.02)
        assert await run == tellings - 1
        assert asyncio.get_running_loop().time() - told_at <= soon(bound_s)
        assert scene.tap.found("deaths not declared", count=1)

    play(scenario)


def test_a_death_is_declared_as_soon_as_storage_can_be_reached(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        (job_id,) = await scene.running(1)
        run = asyncio.create_task(scene.supervisor("obey").run())
        pid = (await scene.tap.until("worker ready"))["pid"]
        scene.refusals = 2
        os.kill(pid, signal.SIGKILL)
        await scene.tap.until("service round failed", service="death reporter", count=2)
        await scene.tap.until("jobs reaped", count=1)
        assert await scene.counters(job_id) == (Status.PENDING, 0, 1, 0)
        tell()
        assert await run == 0

    play(scenario)
