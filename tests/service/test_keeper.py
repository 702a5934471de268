"""The process beside a worker that a program runs inside itself: when there is one, and what it is good
for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fluxmesh import Queue
from fluxmesh.clock import ManualClock
from fluxmesh.config import Settings
from fluxmesh.running import keeper_for
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import PROCESS_GONE, Ground, OrphansAnswer
from fluxmesh.worker.deaths import restart_delay_s
from fluxmesh.worker.keeper_process import failures_after
from tests.service.log_tap import LogTap, tapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
BOUND_S = 30
SOURCE = Path(__file__).parents[2] / "src"
T = TypeVar("T")


def until(look: Callable[[], T]) -> T:
    """The first true answer; looked for often."""
    deadline = time.monotonic() + BOUND_S
    while not (answer := look()):
        assert time.monotonic() < deadline, f"not within {BOUND_S} s"
        time.sleep(0.02)
    return answer


def keepers_of(pid: int) -> list[int]:
    """Processes that this one has started as keepers, dead ones that nobody has waited for included."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
                command = (folder / "cmdline").read_text()
            except OSError:
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if int(parent) == pid and ("fluxmesh.worker.keeper" in command or state == "Z"):
                found.append(int(folder.name))
    return found


def descriptors() -> int:
    """Open ones, but for those of a database: its connections are opened when they are needed."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        try:
            found += ".db" not in os.readlink(one)
        except OSError:
            continue
    return found


@pytest.fixture
def tap() -> Iterator[LogTap]:
    with tapped() as tap:
        yield tap


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(db_path=tmp_path / "jobs.db", settings={"lease_s": 3})
    yield queue
    queue.close()


def test_a_worker_has_a_keeper_for_as_long_as_it_lives(queue: Queue, tap: LogTap) -> None:
    @queue.task
    def double(number: int) -> int:
        return 2 * number

    worker = queue.worker()
    worker.start()
    until(lambda: tap.found("keeper ready"))
    [pid] = keepers_of(os.getpid())
    assert double.delay(21).result(timeout=BOUND_S) == 42
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert command[1:4] == ["-m", "fluxmesh.worker.keeper", "--ledger-fd"]
    assert "jobs.db" not in "".join(command)  # a URL may hold a password
    worker.stop()
    until(lambda: not keepers_of(os.getpid()))
    assert tap.found("no keeper: another will be started") == tap.found("the keeper says") == []


def test_workers_leave_no_keeper_and_no_descriptor_behind(queue: Queue, tap: LogTap) -> None:
    def run_one(number: int) -> None:
        worker = queue.worker()
        worker.start()
        until(lambda: len(tap.found("keeper ready")) == number)
        worker.stop()

    run_one(1)
    until(lambda: not keepers_of(os.getpid()))
    before = descriptors()
    for number in range(2, 5):
        run_one(number)
    until(lambda: not keepers_of(os.getpid()))
    until(lambda: descriptors() <= before)
    assert tap.found("no keeper: another will be started") == tap.found("the keeper says") == []


def test_a_worker_that_ends_at_once_has_none(queue: Queue, tap: LogTap) -> None:
    worker = queue.worker()
    worker.start()
    worker.stop()
    until(lambda: "fluxmesh-keeper" not in {thread.name for thread in threading.enumerate()})
    assert keepers_of(os.getpid()) == []
    assert tap.found("keeper ready") == tap.found("no keeper: another will be started") == []


def test_a_keeper_that_is_killed_is_replaced_for_as_long_as_its_worker_lives(
    queue: Queue, tap: LogTap
) -> None:
    """What it was there for is there again: the next one knows the worker, and leaves nothing behind."""
    before = descriptors()
    worker = queue.worker()
    worker.start()
    killed = []
    for number in range(1, 4):
        ready = until(lambda: tap.found("keeper ready")[number - 1 :])  # noqa: B023 - called here and now
        killed.append(ready[0]["pid"])
        os.kill(killed[-1], signal.SIGKILL)
    until(lambda: tap.found("keeper ready")[3:])
    told = tap.found("no keeper: another will be started")
    assert [event["delay_s"] for event in told] == [0, 0.5, 1]
    assert {event["why"] for event in told} == {"killed by SIGKILL"}
    [pid] = keepers_of(os.getpid())
    assert pid not in killed
    worker.stop()
    until(lambda: not keepers_of(os.getpid()))
    until(lambda: "fluxmesh-keeper" not in {thread.name for thread in threading.enumerate()})
    until(lambda: descriptors() <= before)


def test_no_keeper_is_left_for_a_worker_that_ended_while_it_had_none(queue: Queue, tap: LogTap) -> None:
    worker = queue.worker()
    worker.start()
    for number in range(1, 4):  # the next one is due in a second only
        ready = until(lambda: tap.found("keeper ready")[number - 1 :])  # noqa: B023 - called here and now
        os.kill(ready[0]["pid"], signal.SIGKILL)
    until(lambda: tap.found("no keeper: another will be started")[2:])
    worker.stop()
    until(lambda: "fluxmesh-keeper" not in {thread.name for thread in threading.enumerate()})
    assert keepers_of(os.getpid()) == []
    assert len(tap.found("keeper ready")) == 3


def test_a_keeper_that_lived_long_is_replaced_at_once_again() -> None:
    assert [restart_delay_s(failures_after(9, lived_s)) for lived_s in (59.0, 60.0)] == [30.0, 0.0]


@pytest.mark.parametrize(
    ("url", "settings", "clock"),
    [
        ("sqlite:///jobs.db", {"keeper": False}, None),
        ("sqlite:///jobs.db", {}, ManualClock()),
        ("memory://", {}, None),
    ],
)
def test_there_is_none_where_it_is_switched_off_or_could_see_nothing(
    url: str,
    settings: dict[str, Any],
    clock: ManualClock | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    queue = Queue(url, settings=settings, clock=clock)
    assert keeper_for(queue.url, queue.settings, clock) is None


def test_a_keeper_that_cannot_be_started_is_told_and_harms_nobody(
    queue: Queue, tap: LogTap, monkeypatch: pytest.MonkeyPatch
) -> None:
    @queue.task
    def double(number: int) -> int:
        return 2 * number

    worker = queue.worker()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    worker.start()
    until(lambda: tap.found("no keeper: another will be started"))
    assert double.delay(21).result(timeout=BOUND_S) == 42
    worker.stop()


PROGRAM = """
import os, sys, time
from fluxmesh import Queue
from fluxmesh.obs.log import configure
configure("info", "json", sys.stdout)
queue = Queue(db_path="jobs.db", settings={"lease_s": 60})

@queue.task(name="forks")
def forks():
    if os.fork() == 0:
        os.write(1, b"forked\\n")
        time.sleep(600)
    time.sleep(600)

forks.delay()
queue.run_worker(worker_id="w", concurrency=1)
"""


async def looked_for_orphans(folder: Path) -> OrphansAnswer:
    """By somebody who does not look at locks: only a declared death is a proof."""
    settings = Settings(proof_of_death=False)
    storage = await open_storage(f"sqlite:///{folder / 'jobs.db'}", settings, create=False)
    try:
        return await storage.orphans(10)
    finally:
        await storage.close()


@pytest.mark.parametrize("ready", [True, False])
def test_the_death_of_a_program_is_proven_though_a_copy_of_it_lives_on(
    queue: Queue, tmp_path: Path, ready: bool
) -> None:
    """The lease is long, and a copy may hold the pipe to the keeper; also before it has called itself
    ready."""
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, start_new_session=True
    ) as program:
        try:
            assert program.stdout is not None
            said = b""
            while not (b"forked" in said and (b"keeper ready" in said or not ready)):
                line = program.stdout.readline()
                assert line
                said += line
            [keeper] = until(lambda: keepers_of(program.pid))
            if ready:
                os.kill(
                    keeper, signal.SIGTERM
                )  # to the whole group, say: it means the program, not its keeper
            program.kill()
            killed_at = time.monotonic()

            def found() -> list[tuple[Ground, str]]:
                # The keeper reaps as soon as it has declared; what is looked for is whichever is there.
                answer = asyncio.run(looked_for_orphans(tmp_path))
                history = queue.get(queue.find("task:forks").items[0].id).history()
                return [(job.ground, job.how) for job in answer.jobs] or [
                    (Ground.PROVEN, attempt.error.message) for attempt in history if attempt.error
                ]

            [(ground, how)] = until(found)
            assert time.monotonic() - killed_at < BOUND_S
            assert (ground, PROCESS_GONE in how) == (Ground.PROVEN, True)
            until(lambda: not Path(f"/proc/{keeper}").exists())
        finally:
            os.killpg(program.pid, signal.SIGKILL)
