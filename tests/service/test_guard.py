"""A supervisor beside a real storage, and children that stand still in every way."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from fluxmesh.clock import SystemClock
from fluxmesh.config import Settings
from fluxmesh.errors import StorageUnreachable
from fluxmesh.job import Status
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import (
    ExchangeRequest,
    Ground,
    OnDeath,
    ProgressNote,
    Registration,
    TaskSpec,
    WorkerRef,
)
from fluxmesh.submission import prepare
from fluxmesh.worker import guard
from fluxmesh.worker.child_process import ChildSpec
from fluxmesh.worker.guard import store_notes
from fluxmesh.worker.supervisor import Supervisor
from tests.service.log_tap import LogTap, tapped

CHILD = Path(__file__).with_name("child.py")
ROOT = CHILD.parents[2]
PATHS = os.pathsep.join((str(ROOT), str(ROOT / "src")))
LEASE_S = 2.0
FAR_S = 600.0
BOUND_S = 30.0


class Scene:
    """A storage in which this test has registered a run of worker "w", whose jobs a child process "runs"."""

    def __init__(self, folder: Path, tap: LogTap) -> None:
        self.tap = tap
        self.folder = folder
        self.settings = Settings(grace_s=0, hard_grace_s=0, lease_s=LEASE_S, stall_limit_s=2.0)
        self.reachable = asyncio.Event()
        self.reachable.set()
        self.storage: Storage
        self.worker: WorkerRef
        self.tokens: dict[str, int] = {}

    async def open(self, inline: bool = False) -> Storage:
        if not self.reachable.is_set():
            raise StorageUnreachable("out of reach for a while")
        url = f"sqlite:///{self.folder / 'test.db'}"
        return await open_storage(url, self.settings, create=True, inline=inline)

    async def set_up(self) -> None:
        self.storage = await self.open()
        registration = Registration(
            "w", ("default",), (0, 1, 2, 3), (TaskSpec("t"),), 8, LEASE_S, LEASE_S / 3
        )
        self.worker = WorkerRef("w", await self.storage.register(registration))

    async def running(self, count: int) -> list[str]:
        template = prepare({"task": "t"})
        await self.storage.enqueue([template.job((), {}) for _ in range(count)], queue_cap=1_000)
        answer = await self.storage.exchange(ExchangeRequest(self.worker, 1, slots=count))
        self.tokens = {job.id: job.token for job in answer.running}
        assert len(self.tokens) == count
        return list(self.tokens)

    def job(self, job_id: str, hard_in_s: float) -> str:
        return f"job={job_id},{self.tokens[job_id]},{hard_in_s}"

    def way(self, name: str) -> str:
        return f"{name}={self.worker.epoch}"

    def supervisor(self, *steps: str, once: bool = True) -> Supervisor:
        """Of a child that does this; the next one is as it should be."""
        first = [f"once={self.folder / 'first'}"] if once else []
        argv = (sys.executable, str(CHILD), str(self.folder / "journal"), f"epoch={self.worker.epoch}")
        spec = ChildSpec("w", (*argv, *first, *steps), {**os.environ, "PYTHONPATH": PATHS})
        return Supervisor(
            children=[spec], open_storage=self.open, settings=self.settings, clock=SystemClock()
        )

    async def counters(self, job_id: str) -> tuple[Status, int, int, int]:
        job = await self.storage.get(job_id)
        assert job is not None
        return job.status, job.attempts, job.crashes, job.interruptions


Play = Callable[[Scene], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Play], None]:
    def run(scenario: Play) -> None:
        async def bounded(tap: LogTap) -> None:
            async with asyncio.timeout(180):
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


@pytest.mark.parametrize("way", ["stands", "mute"])
def test_the_overdue_job_is_a_timeout_its_neighbour_is_interrupted_and_a_new_child_comes_at_once(
    play: Callable[[Play], None], way: str
) -> None:
    async def scenario(scene: Scene) -> None:
        late, other = await scene.running(2)
        steps = (scene.way(way), scene.job(other, FAR_S), scene.job(late, 0.1), "eof")
        run = asyncio.create_task(scene.supervisor(*steps).run())
        killed = await scene.tap.until("worker killed")
        assert "past the hard timeout of a job" in killed["why"]
        await scene.tap.until("jobs reaped", worker="w")
        assert await scene.counters(late) == (Status.SCHEDULED, 1, 0, 0)
        assert await scene.counters(other) == (Status.PENDING, 0, 0, 1)
        assert (await scene.tap.until("worker restarts"))["delay_s"] == 0
        await scene.tap.until("worker ready", count=2)
        tell()
        assert await run == 0

    play(scenario)


def test_a_child_that_stands_still_is_ended_though_storage_is_out_of_reach_and_charged_when_it_is_back(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        late, other = await scene.running(2)
        steps = (scene.way("stands"), scene.job(other, FAR_S), scene.job(late, 0.1), "eof")
        scene.reachable.clear()
        run = asyncio.create_task(scene.supervisor(*steps).run())
        await scene.tap.until("storage does not answer", verb="progress")
        await scene.tap.until("worker killed")
        await scene.tap.until("service round failed", service="death reporter")
        assert (await scene.counters(late))[0] is Status.RUNNING
        scene.reachable.set()
        await scene.tap.until("jobs reaped", worker="w")
        assert await scene.counters(late) == (Status.SCHEDULED, 1, 0, 0)
        assert await scene.counters(other) == (Status.PENDING, 0, 0, 1)
        tell()
        assert await run == 0

    play(scenario)


def test_a_child_that_recovers_while_storage_is_told_of_its_end_goes_on_and_that_is_taken_back(
    play: Callable[[Play], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(scene: Scene) -> None:
        late, other = await scene.running(2)
        recovers, stored = scene.folder / "recovers", asyncio.Event()

        async def storing(storage: Storage, worker: WorkerRef, notes: Sequence[ProgressNote]) -> None:
            await store_notes(storage, worker, notes)
            if {note.on_death for note in notes} == {OnDeath.CRASH}:
                stored.set()
                return
            recovers.touch()
            while not recovers.with_suffix(".done").exists():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)

        monkeypatch.setattr(guard, "store_notes", storing)
        monkeypatch.setattr(guard, "NOTE_S", BOUND_S)
        steps = (scene.way("stands"), scene.job(other, FAR_S), scene.job(late, 0.1), f"recovers={recovers}")
        run = asyncio.create_task(scene.supervisor(*steps, "eof").run())
        taken_back = await scene.tap.until("worker goes on")
        assert "past the hard timeout of a job" in taken_back["no_more"]
        assert scene.tap.found("worker killed") == []
        async with asyncio.timeout(BOUND_S):
            await stored.wait()
        os.kill(taken_back["pid"], signal.SIGKILL)
        await scene.tap.until("jobs reaped", worker="w")
        assert (await scene.counters(late))[1:] == (1, 0, 0)  # it is past its time
        assert (await scene.counters(other))[1:] == (0, 1, 0)
        assert scene.tap.found("worker killed") == []
        tell()
        assert await run == 0

    play(scenario)


def test_what_blocks_the_loop_for_longer_than_the_stall_limit_is_a_timeout_whatever_its_own(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        other, blocks = await scene.running(2)
        steps = (scene.way("stands"), scene.job(other, FAR_S), scene.job(blocks, FAR_S), "eof")
        run = asyncio.create_task(scene.supervisor(*steps).run())
        assert "for 2 s" in (await scene.tap.until("worker killed"))["why"]
        await scene.tap.until("jobs reaped", worker="w")
        assert await scene.counters(blocks) == (Status.SCHEDULED, 1, 0, 0)
        assert await scene.counters(other) == (Status.PENDING, 0, 0, 1)
        tell()
        assert await run == 0

    play(scenario)


def test_a_child_that_is_well_is_left_alone_though_a_job_is_long_overdue(
    play: Callable[[Play], None],
) -> None:
    """Its loop has dealt with that: the body cannot be stopped, and the worker retires for it in time."""

    async def scenario(scene: Scene) -> None:
        [late] = await scene.running(1)
        steps = (scene.way("well"), scene.job(late, 0.1), "obey")
        run = asyncio.create_task(scene.supervisor(*steps).run())
        await scene.tap.until("worker ready")
        await asyncio.sleep(2 * scene.settings.stall_limit_s)  # nothing happens: there is no signal for that
        assert scene.tap.found("worker killed") == []
        tell()
        assert await run == 0

    play(scenario)


def test_the_lease_of_a_stopped_child_is_not_kept_and_it_is_not_killed(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        scene.settings = Settings(grace_s=0, hard_grace_s=0, lease_s=LEASE_S)
        [job_id] = await scene.running(1)
        steps = (scene.way("well"), scene.job(job_id, 0.1), "obey")
        run = asyncio.create_task(scene.supervisor(*steps).run())
        pid = (await scene.tap.until("worker ready"))["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(3 * LEASE_S + 5):
                while not (found := (await scene.storage.orphans(10)).jobs):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert [(job.id, job.ground) for job in found] == [(job_id, Ground.LAPSED)]
            assert scene.tap.found("lease kept for a silent process") == []
        finally:
            os.kill(pid, signal.SIGCONT)
        assert scene.tap.found("worker killed") == []
        tell()
        assert await run == 0

    play(scenario)


def test_the_lease_of_a_silent_child_is_kept(play: Callable[[Play], None]) -> None:
    """Its jobs have all the time they need, so nothing but the lease is at stake."""

    async def scenario(scene: Scene) -> None:
        scene.settings = Settings(grace_s=0, hard_grace_s=0, lease_s=LEASE_S)
        [job_id] = await scene.running(1)
        steps = (scene.way("mute"), scene.job(job_id, FAR_S), "obey")
        run = asyncio.create_task(scene.supervisor(*steps).run())
        await scene.tap.until("lease kept for a silent process")
        loop = asyncio.get_running_loop()
        until = loop.time() + 3 * LEASE_S
        while loop.time() < until:
            assert (await scene.storage.orphans(10)).jobs == ()
            await asyncio.sleep(0.1)
        tell()
        assert await run == 0

    play(scenario)


def test_where_one_child_after_another_stands_still_they_come_ever_later(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        [job_id] = await scene.running(1)
        steps = (scene.way("stands"), scene.job(job_id, 0.1), "eof")
        run = asyncio.create_task(scene.supervisor(*steps, once=False).run())
        for count in range(1, 5):
            await scene.tap.until("worker restarts", count=count)
        assert [event["delay_s"] for event in scene.tap.found("worker restarts")] == [0, 0, 0, 0.5]
        tell()
        assert await run == 0

    play(scenario)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_twenty_children_leave_no_descriptor_and_no_process_behind(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        run = asyncio.create_task(scene.supervisor(scene.way("well"), "ready", "exit=75", once=False).run())
        await scene.tap.until("worker ended", count=2)
        before = descriptors()
        for count in range(4, 23, 2):
            await scene.tap.until("worker ended", count=count)
        tell()
        await run
        assert descriptors() <= before
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()  # noqa: ASYNC240
        assert children == ""

    play(scenario)
