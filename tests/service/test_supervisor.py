"""The supervisor: real child processes, told by real signals; the log says when to look."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fluxmesh.clock import SystemClock
from fluxmesh.config import Settings
from fluxmesh.errors import StorageUnreachable
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import Registration
from fluxmesh.worker.child_process import ChildSpec
from fluxmesh.worker.supervisor import HURRY_KILL_S, KILL_SLACK_S, SAME_MOMENT_S, Supervisor
from tests.patience import soon
from tests.service.log_tap import LogTap, tapped

CHILD = Path(__file__).with_name("child.py")
PATHS = os.pathsep.join((str(CHILD.parents[2]), str(CHILD.parents[2] / "src")))
GRACE_S = 0.2


async def out_of_reach(inline: bool) -> Storage:
    raise StorageUnreachable("no storage in this test")


class Scene:
    """A supervisor with its children's journal."""

    def __init__(self, folder: Path, tap: LogTap) -> None:
        self.tap = tap
        self.journal = folder / "journal"
        self._folder = folder

    def spec(self, worker_id: str, *steps: str) -> ChildSpec:
        argv = (sys.executable, str(CHILD), str(self.journal), *steps)
        return ChildSpec(worker_id, argv, {**os.environ, "PYTHONPATH": PATHS})

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def supervisor(
        self,
        *specs: ChildSpec,
        open_storage: Callable[[bool], Awaitable[Storage]] = out_of_reach,
        proof_of_death: bool = True,
    ) -> Supervisor:
        settings = Settings(grace_s=GRACE_S, hard_grace_s=0, proof_of_death=proof_of_death)
        return Supervisor(children=specs, open_storage=open_storage, settings=settings, clock=SystemClock())

    def lines(self, what: str) -> list[str]:
        return [line for line in self.journal.read_text().splitlines() if line.endswith(what)]


Play = Callable[[Scene], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Play], None]:
    """Runs a scenario with its log tapped, within a bound."""

    def run(scenario: Play) -> None:
        async def bounded(tap: LogTap) -> None:
            async with asyncio.timeout(120):
                await scenario(Scene(tmp_path, tap))

        with tapped() as tap:
            asyncio.run(bounded(tap))

    return run


def tell() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def another_moment() -> None:
    """Long enough after a signal for the next one to be another."""
    await asyncio.sleep(SAME_MOMENT_S + 0.02)


def test_one_signal_drains_every_child_and_ends_with_0(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        run = asyncio.create_task(
            scene.supervisor(scene.spec("w.0", "obey"), scene.spec("w.1", "obey")).run()
        )
        await scene.tap.until("worker ready", count=2)
        os.kill(os.getpid(), signal.SIGINT)
        assert await run == 0
        assert len(scene.lines("told once")) == 2
        assert scene.lines("told twice") == []

    play(scenario)


def test_children_share_the_supervisors_process_group(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        run = asyncio.create_task(scene.supervisor(scene.spec("w", "obey")).run())
        pid = (await scene.tap.until("worker ready"))["pid"]
        assert os.getpgid(pid) == os.getpgrp()
        tell()
        await run

    play(scenario)


def test_a_second_signal_ends_a_lingering_child_with_1(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        run = asyncio.create_task(scene.supervisor(scene.spec("w", "linger")).run())
        await scene.tap.until("worker ready")
        tell()
        await scene.tap.until("worker stops")
        await another_moment()
        tell()  # soon after the first: forwarded so much later that the child counts two
        assert await run == 1
        assert len(scene.lines("told once")) == len(scene.lines("told twice")) == 1

    play(scenario)


def test_two_signals_of_one_moment_are_one_telling(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        run = asyncio.create_task(scene.supervisor(scene.spec("w", "linger")).run())
        await scene.tap.until("worker ready")
        tell()
        await scene.tap.until("worker stops")
        tell()  # as from a process manager that signals the process and its group
        await another_moment()
        assert not run.done()
        tell()
        assert await run == 1
        assert len(scene.tap.found("worker stops at once")) == 1

    play(scenario)


def test_a_terminals_signal_that_reaches_the_child_too_is_one_telling(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        run = asyncio.create_task(scene.supervisor(scene.spec("w", "linger")).run())
        pid = (await scene.tap.until("worker ready"))["pid"]
        os.kill(pid, signal.SIGINT)
        tell()
        await scene.tap.until("worker killed: it did not end in time")
        assert await run == 0
        assert len(scene.lines("told once")) == 1
        assert scene.lines("told twice") == []

    play(scenario)


def test_a_deaf_child_is_killed_when_its_grace_is_over(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        run = asyncio.create_task(scene.supervisor(scene.spec("w", "deaf")).run())
        await scene.tap.until("worker ready")
        tell()
        told_at = loop.time()
        assert await run == 0
        assert loop.time() - told_at >= GRACE_S + KILL_SLACK_S - 0.1
        assert scene.tap.found("worker ended", how="stopped")

    play(scenario)


def test_a_deaf_child_is_killed_soon_after_the_second_signal(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        run = asyncio.create_task(scene.supervisor(scene.spec("w", "deaf")).run())
        await scene.tap.until("worker ready")
        tell()
        await scene.tap.until("worker stops")
        await another_moment()
        tell()
        told_at = loop.time()
        assert await run == 1
        assert HURRY_KILL_S - 0.1 <= loop.time() - told_at < soon(1.0)

    play(scenario)


@pytest.mark.parametrize("code", [2, 3, 4])
def test_a_child_that_cannot_start_ends_the_worker_with_its_code(
    play: Callable[[Play], None], code: int
) -> None:
    async def scenario(scene: Scene) -> None:
        starting = scene.spec("w.0", f"after={scene.path('never')}")
        supervisor = scene.supervisor(starting, scene.spec("w.1", f"exit={code}"))
        assert await supervisor.run() == code
        assert len(scene.lines("started")) <= 2

    play(scenario)


def test_a_child_that_worked_before_is_restarted_whatever_its_code(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        spec = scene.spec("w", "ready", f"once={scene.path('first')}", "exit=3")
        run = asyncio.create_task(scene.supervisor(spec).run())
        await scene.tap.until("worker ready", count=2)
        tell()
        assert await run == 0
        assert scene.tap.found("worker ended", how="exit status 3")

    play(scenario)


def test_a_child_that_cannot_start_is_tried_again_where_another_works(play: Callable[[Play], None]) -> None:
    """The command line, the app and the storage are the same: it is something that passes."""

    async def scenario(scene: Scene) -> None:
        works = scene.spec("w.0", "obey")
        opened = scene.path("opened")
        late = scene.spec("w.1", f"after={opened}", f"once={scene.path('first')}", "exit=4")
        run = asyncio.create_task(scene.supervisor(works, late).run())
        await scene.tap.until("worker ready")
        os.close(os.open(opened, os.O_CREAT))
        await scene.tap.until("worker ready", count=2)
        tell()
        assert await run == 0
        assert scene.tap.found("worker ended", how="exit status 4")

    play(scenario)


def test_a_killed_child_is_replaced_at_once(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        run = asyncio.create_task(scene.supervisor(scene.spec("w", "obey")).run())
        pid = (await scene.tap.until("worker ready"))["pid"]
        os.kill(pid, signal.SIGKILL)
        assert (await scene.tap.until("worker restarts"))["delay_s"] == 0
        assert (await scene.tap.until("worker ready", count=2))["pid"] != pid
        assert scene.tap.found("worker ended", pid=pid, how="killed by SIGKILL")
        tell()
        assert await run == 0

    play(scenario)


def test_a_child_that_dies_again_and_again_is_restarted_ever_later(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        run = asyncio.create_task(scene.supervisor(scene.spec("w", "exit=9")).run())
        await scene.tap.until("worker restarts", count=3)
        assert [event["delay_s"] for event in scene.tap.found("worker restarts")] == [0, 0.5, 1]
        tell()  # cuts the rest short
        assert await run == 0

    play(scenario)


def test_a_retired_child_is_replaced_without_back_off(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        spec = scene.spec("w", f"once={scene.path('first')}", "epoch=5", "exit=75")
        run = asyncio.create_task(scene.supervisor(spec).run())
        await scene.tap.until("worker ready")
        assert scene.tap.found("worker restarts") == []
        assert scene.tap.found("worker ended", epoch=5, how="retired: a body could not be stopped")
        tell()
        assert await run == 0

    play(scenario)


def test_a_worker_whose_children_all_left_of_their_own_accord_ends(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        assert await scene.supervisor(scene.spec("w", "epoch=5", "ended", "exit=0")).run() == 0
        assert scene.tap.found("service round failed") == []  # a clean end is not declared

    play(scenario)


def test_junk_on_the_report_pipe_is_told_and_harms_nothing(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        run = asyncio.create_task(scene.supervisor(scene.spec("w", "junk", "epoch=5", "obey")).run())
        await scene.tap.until("worker ready")
        assert len(scene.tap.found("report not understood")) == 2
        tell()
        assert await run == 0
        assert scene.tap.found("worker ended", epoch=5)

    play(scenario)


def test_a_command_that_does_not_exist_is_tried_again_not_raised(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        run = asyncio.create_task(scene.supervisor(ChildSpec("w", ("/nonexistent/python",))).run())
        await scene.tap.until("worker cannot be started")
        await scene.tap.until("worker restarts", count=2)
        tell()
        assert await run == 0

    play(scenario)


def test_a_death_that_storage_cannot_be_told_of_does_not_keep_the_worker_from_ending(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        spec = scene.spec("w", "epoch=5", f"once={scene.path('first')}", "exit=9")
        run = asyncio.create_task(scene.supervisor(spec).run())
        await scene.tap.until("service round failed", service="death reporter", count=2)
        tell()
        assert await run == 0
        assert scene.tap.found("deaths not declared", count=1)

    play(scenario)


def test_without_proof_of_death_nothing_is_declared(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        spec = scene.spec("w", "epoch=5", f"once={scene.path('first')}", "exit=9")
        run = asyncio.create_task(scene.supervisor(spec, proof_of_death=False).run())
        await scene.tap.until("worker ready")
        tell()
        assert await run == 0
        assert scene.tap.found("service round failed") == []
        assert scene.tap.found("deaths not declared") == []

    play(scenario)


SUPERVISE = """
    import asyncio, sys
    from fluxmesh.clock import SystemClock
    from fluxmesh.config import Settings
    from fluxmesh.errors import StorageUnreachable
    from fluxmesh.worker.child_process import ChildSpec
    from fluxmesh.worker.supervisor import Supervisor

    async def out_of_reach(inline):
        raise StorageUnreachable("no storage in this test")

    async def main():
        spec = ChildSpec("w", tuple(sys.argv[1:]))
        await Supervisor(
            children=[spec], open_storage=out_of_reach, settings=Settings(), clock=SystemClock()
        ).run()

    from fluxmesh.obs import log
    log.configure("info", "json")
    asyncio.run(main())
"""


def supervised(journal: Path, *steps: str) -> tuple[subprocess.Popen[str], int]:
    """A supervisor in a process group of its own, and the pid of its one child, which is ready."""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SUPERVISE), sys.executable, str(CHILD), str(journal), *steps],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    assert supervisor.stderr is not None
    for line in supervisor.stderr:
        if "worker ready" in line:
            return supervisor, int(journal.read_text().split()[0])
    raise AssertionError("the child never became ready")


def ended(pid_fd: int) -> bool:
    """True once the process of this fd has ended; False after 10 s."""
    return bool(select.select([pid_fd], [], [], 10)[0])


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd")
def test_children_hear_of_their_supervisors_death_by_end_of_file(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    supervisor, pid = supervised(journal, "eof")
    child = os.pidfd_open(pid)
    try:
        supervisor.kill()
        assert ended(child)
        assert "end of file" in journal.read_text()
    finally:
        os.close(child)
        supervisor.communicate(timeout=10)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd")
def test_killing_the_group_kills_the_child_too(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    supervisor, pid = supervised(journal, "eof")
    child = os.pidfd_open(pid)
    try:
        os.killpg(supervisor.pid, signal.SIGKILL)
        assert ended(child)
        assert "end of file" not in journal.read_text()
    finally:
        os.close(child)
        supervisor.communicate(timeout=10)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such a signal")
def test_a_child_that_says_nothing_dies_with_its_supervisor(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    supervisor, pid = supervised(journal, "mute=1", "eof")
    child = os.pidfd_open(pid)
    try:
        assert supervisor.stderr is not None
        while "storage does not answer" not in supervisor.stderr.readline():
            pass  # a beat in its name was tried: the supervisor has seen that it is silent
        assert not select.select([child], [], [], 1.0)[0]  # it is let live while its supervisor does
        supervisor.kill()
        assert ended(child)
        assert "end of file" not in journal.read_text()
    finally:
        os.close(child)
        supervisor.communicate(timeout=10)


def test_a_worker_whose_id_a_later_one_took_over_ends_instead_of_taking_it_back(
    play: Callable[[Play], None],
) -> None:
    async def scenario(scene: Scene) -> None:
        settings = Settings()

        async def opened(inline: bool) -> Storage:
            url = f"sqlite:///{scene.path('tasks.db')}"
            return await open_storage(url, settings, create=True, inline=inline)

        storage = await opened(False)
        later = Registration(
            "w", ("default",), (2,), (), 1, settings.lease_s, settings.beat_every_s, "box", 7
        )
        epoch = await storage.register(later)
        spec = scene.spec("w", f"epoch={epoch - 1}", "ready", "exit=76")
        assert await scene.supervisor(spec, open_storage=opened).run() == 1
        [taken] = scene.tap.found("worker id taken")
        assert (taken["by_pid"], taken["by_host"]) == (7, "box")
        assert len(scene.tap.found("worker started")) == 1
        await storage.close()

    play(scenario)


def test_a_fenced_worker_starts_again_if_nobody_has_its_id(play: Callable[[Play], None]) -> None:
    async def scenario(scene: Scene) -> None:
        spec = scene.spec("w", "epoch=1", f"once={scene.path('mark')}", "exit=76")
        run = asyncio.create_task(scene.supervisor(spec).run())
        await scene.tap.until("worker started", count=2)
        await scene.tap.until("worker ready")
        tell()
        assert await run == 0

    play(scenario)
