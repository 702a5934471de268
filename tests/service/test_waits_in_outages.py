"""Whoever waits for a job waits on while the storage is restarted: `job.result()`, `await`, `jobs wait`."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import Queue
from fluxmesh.link import Link
from tests.cli.harness import FLUXMESH, PATIENCE_S, environment, run
from tests.redis_server import Server

BOUND_S = 20.0


@pytest.fixture
def keeping(tmp_path: Path) -> Any:
    """A server that has its data still when it was killed and started again."""
    server = Server(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.stop()


@pytest.mark.parametrize("way", ["blocking", "async"])
def test_a_wait_for_a_result_outlives_a_restart_of_the_server(
    keeping: Server, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    failed = threading.Event()
    use = Link.use

    async def watched(self: Link, verb: Any) -> Any:
        try:
            return await use(self, verb)
        except Exception:
            failed.set()
            raise

    monkeypatch.setattr(Link, "use", watched)
    queue = Queue(keeping.url())

    @queue.task(name="double")
    def double(number: int) -> int:
        return 2 * number

    job = double.delay(21)
    with ThreadPoolExecutor(1) as waiters:
        if way == "blocking":
            waiting = waiters.submit(job.result, BOUND_S)
        else:
            waiting = waiters.submit(lambda: asyncio.run(job.aio.result(BOUND_S)))
        keeping.kill()
        assert failed.wait(BOUND_S), "the wait never met the outage"
        keeping.start()
        worker = queue.worker()
        worker.start()
        assert waiting.result(BOUND_S) == 42
        worker.stop()
    queue.close()


def test_a_wait_on_the_command_line_outlives_a_restart_of_the_server(keeping: Server, tmp_path: Path) -> None:
    job_id = run(
        "submit", "--task", "slow_task", "--args", "[0]", "--url", keeping.url(), cwd=tmp_path
    ).out.strip()
    waiting = subprocess.Popen(
        [*FLUXMESH, "jobs", "wait", job_id, "--url", keeping.url()],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert waiting.stderr is not None
        for line in waiting.stderr:
            if "PENDING" in line:
                break
        keeping.kill()
        for line in waiting.stderr:
            if "still waiting" in line:
                break
        keeping.start()
        cancelled = run("jobs", "cancel", job_id, "--url", keeping.url(), cwd=tmp_path)
        assert cancelled.code == 0, cancelled
        waiting.communicate(timeout=PATIENCE_S)
        assert waiting.returncode == 10
    finally:
        waiting.kill()
        waiting.wait()
