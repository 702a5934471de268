"""What users test their tasks with: the fixtures of the plugin, tried as a user would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import Context, Queue, Snooze, Status, WaitTimeout
from fluxmesh.testing import DrivenWorker, ManualClock
from tests.architecture.test_package import LATE, WEB, loaded_by

app = Queue("sqlite:///production.db")


@app.task
def double(number: int) -> int:
    return 2 * number


def test_jobs_run_until_nothing_is_left(fluxmesh_queue: Queue, fluxmesh_worker: DrivenWorker) -> None:
    @fluxmesh_queue.task
    async def count_down(number: int, ctx: Context | None = None) -> int:
        assert ctx is not None
        ctx.progress(50, "half")
        if number:
            await count_down.enqueue(number - 1)
        return number

    job = count_down.delay(5)
    assert fluxmesh_worker.run_until_idle() == 6
    assert job.result(timeout=0) == 5
    assert fluxmesh_queue.counts().by_status[Status.COMPLETED] == 6
    assert fluxmesh_queue.list_workers() == []
    assert fluxmesh_worker.run_until_idle() == 0


def test_time_passes_when_the_test_says_so(
    fluxmesh_queue: Queue, fluxmesh_worker: DrivenWorker, fluxmesh_clock: ManualClock
) -> None:
    starts = []

    @fluxmesh_queue.task(max_retries=1, backoff_strategy="fixed", backoff_base_seconds=60, jitter="none")
    def flaky() -> str:
        starts.append(fluxmesh_clock.wall_us())
        if len(starts) == 1:
            raise Snooze(3_600)
        if len(starts) == 2:
            raise ValueError("not yet")
        return "done"

    job = flaky.options(delay=86_400).delay()
    assert fluxmesh_worker.run_until_idle() == 0
    for seconds in (86_400, 3_600, 60):
        fluxmesh_clock.advance(seconds - 1)
        assert fluxmesh_worker.run_until_idle() == 0
        fluxmesh_clock.advance(1)
        assert fluxmesh_worker.run_until_idle() == 1
    assert job.result(timeout=0) == "done"
    assert (job.record.attempts, job.record.snoozes) == (2, 1)


def test_a_retry_without_delay_runs_at_once(fluxmesh_queue: Queue, fluxmesh_worker: DrivenWorker) -> None:
    @fluxmesh_queue.task(max_retries=3, backoff_base_seconds=0)
    def failing() -> None:
        raise ValueError("always")

    job = failing.delay()
    assert fluxmesh_worker.run_until_idle() == 4
    assert job.status is Status.DEAD_LETTER


def test_only_the_queues_asked_for_are_served(fluxmesh_queue: Queue, fluxmesh_worker: DrivenWorker) -> None:
    @fluxmesh_queue.task(queue="mail")
    def send() -> None: ...

    send.delay()
    assert fluxmesh_worker.run_until_idle() == 0
    assert fluxmesh_worker.run_until_idle("mail", "default") == 1


def test_jobs_that_never_cease_are_an_error(fluxmesh_queue: Queue, fluxmesh_worker: DrivenWorker) -> None:
    @fluxmesh_queue.task(name="again")
    def again() -> None:
        again.delay()

    again.delay()
    with pytest.raises(WaitTimeout, match=r"after 0\.2 s"):
        fluxmesh_worker.run_until_idle(timeout=0.2)


def test_an_applications_own_queue_is_taken_for_the_test(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fluxmesh_use: Callable[[Queue], DrivenWorker],
    fluxmesh_clock: ManualClock,
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = fluxmesh_use(app)
    job = double.options(delay=5).delay(21)
    fluxmesh_clock.advance(5)
    assert worker.run_until_idle() == 1
    assert job.result(timeout=0) == 42
    assert app.submit(double.name, [1]).status is Status.PENDING
    assert not Path("production.db").exists()


def test_afterwards_it_is_the_applications_again() -> None:
    assert app.url == "sqlite:///production.db"
    assert app._link.clock is None


def test_the_plugin_loads_nothing_that_a_test_run_without_it_would_not() -> None:
    loaded = loaded_by("import pytest; import fluxmesh.testing.plugin")
    assert loaded & (WEB | LATE | {"msgspec", "structlog"}) == set()


def test_the_fixtures_are_there_wherever_fluxmesh_is_installed(tmp_path: Path) -> None:
    (tmp_path / "test_users.py").write_text(
        "def test_mail(fluxmesh_queue, fluxmesh_worker):\n"
        "    @fluxmesh_queue.task\n"
        "    def mail(to): return f'sent to {to}'\n"
        "    job = mail.delay('x')\n"
        "    fluxmesh_worker.run_until_idle()\n"
        "    assert job.result(timeout=0) == 'sent to x'\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_context_may_stand_anywhere_among_the_parameters(
    fluxmesh_queue: Queue, fluxmesh_worker: DrivenWorker
) -> None:
    @fluxmesh_queue.task
    def first(ctx: Context, number: int) -> list[int]:
        return [ctx.attempt, number]

    @fluxmesh_queue.task
    async def middle(number: int, ctx: Context | None = None, more: int = 0) -> list[int]:
        assert ctx is not None
        return [ctx.attempt, number, more]

    untyped: Any = first
    jobs = [untyped.delay(7), middle.delay(7, None, 8), middle.delay(7, more=8)]
    assert fluxmesh_worker.run_until_idle() == 3
    assert [job.result(timeout=0) for job in jobs] == [[1, 7], [1, 7, 8], [1, 7, 8]]
