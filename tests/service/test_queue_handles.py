"""Job handles: results, failures, waiting, refreshing, and what an operator does with one job."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import (
    JobCancelled,
    JobConflict,
    JobExpired,
    JobFailed,
    JobHandle,
    JobNotFound,
    Queue,
    Status,
    WaitTimeout,
    WouldDeadlock,
)
from fluxmesh.calls import AsyncTask
from fluxmesh.clock import ManualClock
from fluxmesh.context import Context, current_run
from fluxmesh.ids import new_job_id
from fluxmesh.job import JobOptions, Outcome
from fluxmesh.portal import run
from fluxmesh.storage.values import Cancelled, Retention
from tests.service.hands import Hands


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(tmp_path: Path, clock: ManualClock) -> Iterator[Queue]:
    queue = Queue(db_path=tmp_path / "jobs.db", clock=clock)
    yield queue
    queue.close()


@pytest.fixture
def task(queue: Queue) -> AsyncTask[..., Any]:
    async def body(*args: Any, **kwargs: Any) -> Any: ...

    return queue.task(name="body", max_retries=0)(body)


Ask = Callable[[JobHandle[Any]], Any]


def awaited(job: JobHandle[Any]) -> Any:
    async def main() -> Any:
        return await job

    return asyncio.run(main())


RESULT_FACES = [
    pytest.param(lambda job: job.result(timeout=10), id="blocking"),
    pytest.param(lambda job: asyncio.run(job.aio.result(10)), id="async"),
    pytest.param(awaited, id="await"),
]


@pytest.mark.parametrize("ask", RESULT_FACES)
def test_the_result_of_a_completed_job_comes_back(queue: Queue, task: AsyncTask[..., Any], ask: Ask) -> None:
    job = task.delay()
    Hands(queue).complete({"answer": [42, None, "text"]})
    assert ask(job) == {"answer": [42, None, "text"]}
    assert job.record.progress == 100


@pytest.mark.parametrize("ask", RESULT_FACES)
def test_a_failed_job_raises_its_failure(queue: Queue, task: AsyncTask[..., Any], ask: Ask) -> None:
    job = task.delay()
    Hands(queue).fail("no such order")
    with pytest.raises(JobFailed, match=r"body.*ValueError: no such order") as caught:
        ask(job)
    error = caught.value
    assert (error.job_id, error.reason, error.error_type) == (job.id, "error", "ValueError")
    assert (error.error_message, error.frames) == ("no such order", ("app.py:7 body",))


@pytest.mark.parametrize("ask", RESULT_FACES)
def test_a_cancelled_job_raises_so(task: AsyncTask[..., Any], ask: Ask) -> None:
    job = task.delay()
    job.cancel()
    with pytest.raises(JobCancelled, match=job.id):
        ask(job)


@pytest.mark.parametrize("ask", RESULT_FACES)
def test_an_expired_job_raises_so(
    queue: Queue, task: AsyncTask[..., Any], clock: ManualClock, ask: Ask
) -> None:
    job = task.options(expires_in=5).delay()
    clock.advance(6)
    run(queue._link.use(lambda storage: storage.promote(10)))
    with pytest.raises(JobExpired, match="not started in time"):
        ask(job)


@pytest.mark.parametrize("ask", RESULT_FACES)
def test_a_job_that_is_gone_is_not_found(queue: Queue, ask: Ask) -> None:
    with pytest.raises(JobNotFound, match="retention"):
        ask(JobHandle(queue._link, new_job_id()))


def test_a_wait_that_is_over_says_what_the_job_waits_for(task: AsyncTask[..., Any]) -> None:
    job = task.delay()
    with pytest.raises(WaitTimeout, match=r"is PENDING after 0 s .*worker"):
        job.result(timeout=0)
    with pytest.raises(TimeoutError):  # as callers of other libraries expect it
        asyncio.run(job.aio.result(0.01))


@pytest.mark.parametrize("timeout", [-1, float("nan"), True])
def test_an_impossible_timeout_is_refused(task: AsyncTask[..., Any], timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        task.delay().result(timeout=timeout)


def test_a_waiting_caller_hears_of_the_end(queue: Queue, task: AsyncTask[..., Any]) -> None:
    job = task.delay()
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(job.result(timeout=30)))
    waiting.start()
    Hands(queue).complete("done")
    waiting.join(30)
    assert results == ["done"]


def test_refresh_reads_at_once_without_a_loop(queue: Queue, task: AsyncTask[..., Any]) -> None:
    job = task.delay()
    assert job.record.status is Status.PENDING
    Hands(queue).complete()
    assert job.record.status is Status.PENDING
    job.refresh()
    assert job.record.status is Status.COMPLETED


def test_refresh_is_awaited_on_a_loop(queue: Queue, task: AsyncTask[..., Any]) -> None:
    async def main() -> None:
        job = await task.enqueue()
        assert (await job.refresh()) is job
        assert job.record.status is Status.PENDING
        await asyncio.to_thread(Hands(queue).complete)
        await job.refresh()
        assert job.record.status is Status.COMPLETED

    asyncio.run(main())


def test_refresh_of_a_job_that_is_gone_raises_in_both_ways(queue: Queue) -> None:
    job = JobHandle[Any](queue._link, new_job_id())
    with pytest.raises(JobNotFound):
        job.refresh()

    async def main() -> None:
        await job.refresh()

    with pytest.raises(JobNotFound):
        asyncio.run(main())


def test_the_status_is_read_anew_at_every_look(queue: Queue, task: AsyncTask[..., Any]) -> None:
    job = task.delay()
    assert job.status is Status.PENDING
    hands = Hands(queue)
    claimed = hands.claim()
    assert job.status is Status.RUNNING
    assert claimed.id == job.id


def test_cancel_answers_what_became_of_the_job(queue: Queue, task: AsyncTask[..., Any]) -> None:
    job = task.delay()
    assert job.cancel() is Cancelled.CANCELLED
    assert job.cancel() is Cancelled.ENDED
    running = task.delay()
    Hands(queue).claim()
    assert running.cancel() is Cancelled.REQUESTED
    assert running.status is Status.RUNNING
    with pytest.raises(JobNotFound):
        JobHandle[Any](queue._link, new_job_id()).cancel()


def test_a_replayed_job_lives_again_and_keeps_its_history(queue: Queue, task: AsyncTask[..., Any]) -> None:
    job = task.delay(1)
    hands = Hands(queue)
    hands.fail()
    with pytest.raises(JobFailed):
        job.result(10)

    job.replay()
    with pytest.raises(JobConflict, match="PENDING and cannot be replayed"):
        job.replay()
    hands.complete("mended")

    assert job.result(10) == "mended"
    assert job.record.life == 2
    history = job.history()
    assert [(entry.life, entry.outcome) for entry in history] == [
        (1, Outcome.FAILED),
        (2, Outcome.COMPLETED),
    ]
    with pytest.raises(JobConflict, match="COMPLETED and cannot be replayed"):
        job.replay()


def test_a_job_is_discarded_once_it_has_ended(task: AsyncTask[..., Any]) -> None:
    job = task.delay()
    with pytest.raises(JobConflict, match=r"PENDING and cannot be discarded \(cancel it first"):
        job.discard()
    job.cancel()
    job.discard()
    for verb in (job.discard, job.replay, job.history, job.cancel):
        with pytest.raises(JobNotFound):
            verb()


def test_a_job_moves_to_another_tier_until_it_has_ended(queue: Queue, task: AsyncTask[..., Any]) -> None:
    first, second = task.delay(1), task.delay(2)
    second.reprioritise("critical")
    hands = Hands(queue)
    assert [hands.complete(), hands.complete()] == [second.id, first.id]
    with pytest.raises(JobConflict, match="has ended"):
        second.reprioritise("low")


@pytest.mark.parametrize("ask", RESULT_FACES)
def test_waiting_for_a_job_inside_a_body_is_refused_at_once(
    queue: Queue, task: AsyncTask[..., Any], ask: Ask
) -> None:
    job = task.delay()
    claimed = Hands(queue).claim()
    here = copy_context()
    here.run(current_run.set, Context(claimed, JobOptions(), lambda _: None))
    with pytest.raises(WouldDeadlock, match="holds a slot"):
        here.run(ask, job)


def test_handles_of_one_job_are_equal(queue: Queue, task: AsyncTask[..., Any]) -> None:
    job = task.delay()
    assert queue.get(job.id) == job
    assert {job, queue.get(job.id)} == {job}
    assert job != task.delay()
    assert job.id in repr(job)


def test_a_forgotten_job_is_remembered_by_its_key(
    queue: Queue, task: AsyncTask[..., Any], clock: ManualClock
) -> None:
    """C21: a key outlives its job, and the same submission is still not run twice."""
    keyed = task.options(idempotency_key="order-881")
    job = keyed.delay(10)
    Hands(queue).complete()
    clock.advance(queue.settings.result_ttl / 2)
    retention = Retention(1.0, 1.0, 86_400.0)
    run(queue._link.use(lambda storage: storage.prune(retention, 1_000)))

    again = keyed.delay(10)

    assert (again.id, again.deduplicated) == (job.id, True)
    with pytest.raises(JobNotFound):
        again.result(10)
