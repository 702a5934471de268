"""Timeouts: soft ones stop a body, and a body that cannot be stopped costs its slot nothing (C16)."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import JobTimeout, Snooze
from fluxmesh.worker.config import WorkerEnd
from fluxmesh.worker.observe import BodyUnstoppable, Claimed, JobEnded, JobsReleased, JobStarted
from tests.service.workshop import Workshop, workshop

QUICK = {"timeout": 0.25, "max_retries": 0}


@workshop()
async def test_a_body_that_waits_or_spins_is_stopped_at_its_soft_timeout(shop: Workshop) -> None:
    @shop.task("waits", **QUICK)
    async def waits() -> None:
        await asyncio.Event().wait()

    @shop.task("spins", **QUICK)
    def spins() -> None:
        while True:
            pass

    @shop.task("polls", **QUICK)
    def polls() -> None:
        never = threading.Event()
        while True:
            try:
                never.wait(0.01)
            except Exception:
                pass  # a body that swallows its errors does not swallow its timeout

    @shop.task("after")
    async def after() -> str:
        return "done"

    worker = await shop.worker(concurrency=2)
    for task in ("waits", "spins", "polls"):
        job = await shop.ended(await shop.put(task))
        assert (job.status, job.reason) == (Status.DEAD_LETTER, "timeout"), task
        assert job.error is not None
        assert (job.error.type, job.error.message) == ("JobTimeout", "ran longer than its timeout of 0.25 s")
        assert any(frame.endswith(task) for frame in job.error.frames), job.error.frames
        assert [entry.outcome for entry in await shop.history(job.id)] == [Outcome.TIMEOUT]
    assert (await shop.ended(await shop.put("after"))).result == "done"
    assert worker.running_count == 0
    assert not shop.witness.all(BodyUnstoppable)


@workshop()
async def test_a_timeout_is_an_attempt_and_is_retried(shop: Workshop) -> None:
    tries: list[int] = []

    @shop.task("slow", timeout=0.05, max_retries=2, backoff_base_seconds=0.01)
    def slow() -> str:
        tries.append(1)
        if len(tries) < 3:
            while True:
                pass
        return "third time"

    await shop.worker()
    job = await shop.ended(await shop.put("slow"))
    assert (job.result, job.attempts) == ("third time", 3)


@workshop()
async def test_a_body_may_use_the_hard_grace_to_return_or_to_say_more(shop: Workshop) -> None:
    @shop.task("coro", **QUICK)
    async def coro() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "part of it"
        return "never"

    @shop.task("sync", **QUICK)
    def sync() -> str:
        try:
            while True:
                pass
        except JobTimeout:
            return "part of it"

    @shop.task("snoozes", **QUICK)
    async def snoozes() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Snooze(3_600) from None

    await shop.worker(concurrency=3)
    snoozed = await shop.put("snoozes")
    for task in ("coro", "sync"):
        assert (await shop.ended(await shop.put(task))).result == "part of it"
    job = await shop.until(snoozed, lambda job: job.status is Status.SCHEDULED)
    assert (job.snoozes, job.attempts) == (1, 0)


@workshop(hard_grace_s=0.1, retire_after_s=600)
async def test_an_unstoppable_body_keeps_its_job_and_gives_its_slot_back(shop: Workshop) -> None:
    release = shop.gate()
    calls: list[str] = []

    @shop.task("stuck", timeout=0.25, max_retries=1, backoff_base_seconds=0.01)
    def stuck() -> str:
        calls.append("begins")
        if len(calls) == 1:
            try:
                release.wait(20)  # one call into C: no exception reaches it
            finally:
                calls.append("ends")
        return "late"

    @shop.task("quick")
    def quick() -> str:
        return "done"

    worker = await shop.worker(concurrency=1)
    job_id = await shop.put("stuck")
    await shop.witness.saw(BodyUnstoppable, job_id=job_id)
    job = await shop.until(job_id, lambda job: job.timed_out)
    assert (job.status, job.worker_id) == (Status.RUNNING, "w1")
    assert worker.running_count == 0
    assert (await shop.ended(await shop.put("quick"))).result == "done"
    assert calls == ["begins"]  # not started again while its first body runs
    release.set()
    job = await shop.ended(job_id)
    assert calls == ["begins", "ends", "begins"]
    assert (job.status, job.result, job.attempts) == (Status.COMPLETED, "late", 2)
    assert [entry.outcome for entry in await shop.history(job_id)] == [Outcome.TIMEOUT, Outcome.COMPLETED]


@workshop(hard_grace_s=0.1, retire_after_s=600)
async def test_an_async_body_that_swallows_its_cancellation_gives_its_slot_back(shop: Workshop) -> None:
    release = asyncio.Event()
    shop.gates.append(release)

    @shop.task("stuck", **QUICK)
    async def stuck() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                pass

    @shop.task("quick")
    async def quick() -> str:
        return "done"

    await shop.worker(concurrency=1)
    job_id = await shop.put("stuck")
    await shop.witness.saw(BodyUnstoppable, job_id=job_id)
    assert (await shop.ended(await shop.put("quick"))).result == "done"
    assert await shop.status(job_id) is Status.RUNNING
    release.set()
    job = await shop.ended(job_id)
    assert (job.status, job.reason) == (Status.DEAD_LETTER, "timeout")
    assert job.error is not None
    assert "could not be stopped in time" in job.error.message


@workshop(hard_grace_s=0.1, retire_after_s=0.5)
async def test_a_worker_with_an_unstoppable_body_retires_and_its_other_jobs_end(shop: Workshop) -> None:
    release, finish = shop.gate(), asyncio.Event()

    @shop.task("stuck", **QUICK)
    def stuck() -> None:
        release.wait(20)

    @shop.task("short")
    async def short() -> str:
        await finish.wait()
        return "done"

    @shop.task("long", max_retries=0)
    async def long() -> None:
        await asyncio.Event().wait()

    worker = await shop.worker(concurrency=3, grace_s=0.2)
    stuck_id, short_id, long_id = [await shop.put(task) for task in ("stuck", "short", "long")]
    await shop.witness.saw(BodyUnstoppable, job_id=stuck_id)
    finish.set()
    assert await worker.wait() is WorkerEnd.RETIRED
    assert (await shop.job(short_id)).result == "done"
    interrupted = await shop.job(long_id)
    assert (interrupted.status, interrupted.attempts, interrupted.interruptions) == (Status.PENDING, 0, 1)
    assert (await shop.job(stuck_id)).status is Status.RUNNING
    late = await shop.put("short")
    release.set()
    job = await shop.ended(stuck_id)  # its body has really ended: settled by what is left of the worker
    assert (job.status, job.reason) == (Status.DEAD_LETTER, "timeout")
    assert await shop.status(late) is Status.PENDING


@workshop(hard_grace_s=0.05, retire_after_s=0.8)
async def test_a_worker_does_not_retire_for_a_body_that_ended_meanwhile(shop: Workshop) -> None:
    release = shop.gate()

    @shop.task("stuck", **QUICK)
    def stuck() -> None:
        release.wait(20)

    @shop.task("quick")
    async def quick() -> str:
        return "done"

    worker = await shop.worker(grace_s=0.1)
    await shop.put("stuck")
    await shop.witness.saw(BodyUnstoppable)
    release.set()
    await shop.witness.saw(JobEnded)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.wait(), 1.0)
    assert (await shop.ended(await shop.put("quick"))).result == "done"


@workshop(hard_grace_s=0.0, retire_after_s=600)
async def test_too_many_unstoppable_bodies_end_the_worker_at_once(shop: Workshop) -> None:
    release = shop.gate()

    @shop.task("stuck", timeout=0.25, max_retries=0)
    def stuck() -> None:
        release.wait(20)

    ids = [await shop.put("stuck") for _ in range(6)]
    worker = await shop.worker(concurrency=1, grace_s=0.0)
    assert await worker.wait() is WorkerEnd.RETIRED
    # On a busy machine a timeout may come before its body has got stuck: such a job ends, and another starts.
    started = [event.job_id for event in shop.witness.all(JobStarted)]
    stopped = [event.job_id for event in shop.witness.all(JobEnded)]
    assert len(started) == len(stopped) + 3
    assert len(shop.witness.all(BodyUnstoppable)) == 3
    for job_id in ids[len(started) :]:
        assert await shop.status(job_id) is Status.PENDING
    release.set()
    for job_id in started:
        assert (await shop.ended(job_id)).reason == "timeout"
    await worker.gone()
    assert len(shop.witness.all(Claimed, got=1)) == len(started)  # none for a worker that ends
    assert not shop.witness.all(JobsReleased)
