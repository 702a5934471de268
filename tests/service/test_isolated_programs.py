"""Bodies in processes of their own beside real programs: how their tasks are found, and that none outlives
its worker."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fluxmesh import Queue, Status
from fluxmesh.bodies import source_of_registry
from tests.service.isolated_tasks import lives

BOUND_S = 60
PROGRAM = """
import functools
import os
import sys
import time
from fluxmesh import Queue

queue = Queue(db_path="jobs.db", settings={"lease_s": 3})

def louder(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs) + "!"
    return inner

@queue.task(isolation="process")
def where():
    return [__name__, os.getpid(), os.getppid(), where.name]

@queue.task(isolation="process", name="shout")
@louder
def shout(text):
    return text

@louder
@queue.task(isolation="process", name="murmur")
def murmur(text):
    return text

class Jobs:
    @staticmethod
    def plain(number):
        return number + 1

plain = queue.task(isolation="process", name="plain")(Jobs.plain)

@queue.worker_resource
def greeting():
    return "hello"

@queue.task(isolation="process")
async def greets(greeting):
    return [greeting, await queue.submit("shout", ["x"]).aio.refresh()]

@queue.task(isolation="process")
def stays():
    print("pid", os.getpid(), flush=True)
    time.sleep(600)
"""
RUN = """
if __name__ == "__main__":
    queue.run_worker(worker_id="w1", concurrency=2, grace_s=0)
"""


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(db_path=tmp_path / "jobs.db", settings={"lease_s": 3})
    yield queue
    queue.close()


@contextmanager
def program(folder: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-W", "error", *argv],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def next_pid(process: subprocess.Popen[str]) -> int:
    """What the next body tells of itself on the program's standard output."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], BOUND_S)
    assert ready, "no body has begun"
    return int(process.stdout.readline().split()[1])


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["by path", "by name", "a package"])
def test_tasks_of_the_main_program_are_found(queue: Queue, tmp_path: Path, way: str) -> None:
    (tmp_path / "shop").mkdir()
    place = {"by path": "shop/app.py", "by name": "shop/app.py", "a package": "shop/__main__.py"}[way]
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / place).write_text(PROGRAM + RUN)
    argv = {"by path": [place], "by name": ["-m", "shop.app"], "a package": ["-m", "shop"]}[way]
    name = {"by path": "app", "by name": "shop.app", "a package": "shop"}[way]
    with program(tmp_path, *argv) as process:
        [module, pid, parent, own_name] = queue.submit(f"{name}.where").result(timeout=BOUND_S)
        assert module != "__main__"
        assert (own_name, parent) == (f"{name}.where", process.pid)
        assert pid != process.pid
        assert queue.submit("shout", ["hey"]).result(timeout=BOUND_S) == "hey!"
        assert queue.submit("murmur", ["hey"]).result(timeout=BOUND_S) == "hey"
        assert queue.submit("plain", [1]).result(timeout=BOUND_S) == 2
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=BOUND_S)
    assert (process.returncode, stdout, stderr) == (0, "", "")


def test_a_program_that_runs_its_worker_without_a_guard_is_told_so(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import logging\nlogging.basicConfig(level='WARNING')\n" + PROGRAM + "queue.run_worker(grace_s=0)\n"
    )
    with program(tmp_path, "app.py") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        while "body process cannot start" not in line:
            assert line, "it ended"
            line = process.stderr.readline()
        assert '__name__ == "__main__"' in line
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=BOUND_S)


def test_a_program_that_cannot_be_loaded_twice_is_told_of_the_guard(queue: Queue, tmp_path: Path) -> None:
    once = "import pathlib\npathlib.Path('lock').touch(exist_ok=False)\n"
    (tmp_path / "app.py").write_text(
        "import logging\nlogging.basicConfig(level='WARNING')\n" + once + PROGRAM + RUN
    )
    with program(tmp_path, "app.py") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        while "body process cannot start" not in line:
            assert line, "it ended"
            line = process.stderr.readline()
        assert "FileExistsError" in line
        assert '__name__ == "__main__"' in line
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=BOUND_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_body_process_outlives_its_worker(queue: Queue, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "app.py").write_text(PROGRAM + RUN)
    jobs = [queue.submit("app.stays", max_crashes=1) for _ in range(2)]
    with program(tmp_path, "app.py") as process:
        pids = [next_pid(process) for _ in jobs]
        assert all(lives(pid) for pid in pids)
        process.send_signal(number)
        process.wait(BOUND_S)
        until(lambda: not any(lives(pid) for pid in pids))
    if number == signal.SIGTERM:
        assert [job.status for job in jobs] == [Status.PENDING] * 2


def test_bodies_of_a_worker_command_end_with_it_and_their_jobs_run_elsewhere(
    queue: Queue, tmp_path: Path
) -> None:
    """The supervisor is killed with everything else of its group; the body process leads none of its own."""
    (tmp_path / "app.py").write_text(PROGRAM)
    argv = ["-m", "fluxmesh.cli", "worker", "--app", "app:queue", "--concurrency", "1", "--id"]
    job = queue.submit("app.stays")
    with program(tmp_path, *argv, "w1") as first:
        pid = next_pid(first)
        [row] = queue.list_workers()
        os.kill(row.pid, signal.SIGKILL)  # the worker alone: its supervisor replaces it
        until(lambda: not lives(pid))
        again = next_pid(first)
        assert again != pid
        assert (job.refresh(), job.record.crashes)[1] == 1
        first.send_signal(signal.SIGTERM)
        until(lambda: not lives(again))
        first.wait(BOUND_S)
    assert (job.refresh(), job.record.status)[1] in (Status.PENDING, Status.RUNNING)


def test_why_a_task_cannot_be_found_is_told(queue: Queue) -> None:
    @queue.task(name="local")
    def local() -> None: ...

    queue.task(name="anonymous")(lambda: None)
    renamed = vars(sys.modules[__name__])["until"]
    queue.task(name="module level")(renamed)

    def imposter() -> None: ...

    imposter.__qualname__ = "lives"
    queue.task(name="imposter")(imposter)
    hidden = source_of_registry(queue.registry).hidden
    assert sorted(hidden) == ["anonymous", "imposter", "local"]
    assert "defined inside another" in hidden["local"]
    assert hidden["imposter"] == f"its function is not {__name__}.lives, as its name says"


def test_a_task_that_takes_a_hidden_resource_is_hidden(queue: Queue) -> None:
    queue.task(name="plain")(until)

    @queue.worker_resource(name="holds")
    def local() -> None: ...

    assert source_of_registry(queue.registry).hidden == {
        "plain": "the resource 'holds' is defined inside another "
        "(test_a_task_that_takes_a_hidden_resource_is_hidden.<locals>.local)"
    }
