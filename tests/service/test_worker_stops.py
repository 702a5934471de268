"""The end of a worker: what is finished, what is handed back, what stays owned (C17), and cancels (C18)."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from fluxmesh.context import Context
from fluxmesh.errors import StorageMissing, StorageUnreachable
from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import JobInterrupted
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Cancelled
from fluxmesh.worker.config import WorkerEnd
from fluxmesh.worker.observe import BodyUnstoppable, JobEnded, JobStarted
from fluxmesh.worker.worker import Worker
from tests.patience import soon
from tests.service.test_worker_outages import Lines
from tests.service.workshop import Witness, Workshop, workshop


async def ended_within(worker: Worker, seconds: float) -> WorkerEnd:
    async with asyncio.timeout(seconds):
        return await worker.wait()


@workshop()
async def test_a_drain_lets_short_jobs_end_and_hands_long_ones_back_uncharged(shop: Workshop) -> None:
    finish = asyncio.Event()

    @shop.task("short", max_retries=0)
    async def short() -> str:
        await finish.wait()
        return "done"

    @shop.task("coro", max_retries=0)
    async def coro() -> None:
        await asyncio.Event().wait()

    @shop.task("sync", max_retries=0)
    def sync() -> None:
        while True:
            pass

    short_id, *long_ids = [await shop.put(task) for task in ("short", "coro", "sync")]
    worker = await shop.worker(concurrency=3)
    await shop.witness.saw(JobStarted, 3)
    waiting_id = await shop.put("short")
    stopping = asyncio.create_task(worker.stop(0.3))
    await asyncio.sleep(0)
    finish.set()
    assert await ended_within(worker, 3) is WorkerEnd.STOPPED
    await stopping
    assert (await shop.job(short_id)).result == "done"
    for job_id in long_ids:
        job = await shop.job(job_id)
        assert (job.status, job.attempts, job.interruptions, job.crashes) == (Status.PENDING, 0, 1, 0)
        assert [entry.outcome for entry in await shop.history(job_id)] == [Outcome.INTERRUPTED]
    assert await shop.status(waiting_id) is Status.PENDING
    assert await shop.storage.fleet() == []  # it said good-bye

    other = await shop.worker("w2", concurrency=3, witness=Witness())
    assert (await shop.ended(waiting_id)).result == "done"
    await other.stop(0)


@workshop()
async def test_a_body_that_ends_by_itself_while_it_is_being_stopped_keeps_its_end(shop: Workshop) -> None:
    @shop.task("returns")
    async def returns() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "cleaned up"
        return "never"

    @shop.task("raises", max_retries=0)
    def raises(ctx: Context) -> None:
        try:
            while True:
                ctx.progress(1)
        except JobInterrupted:
            raise ValueError("half done") from None

    ids = [await shop.put(task) for task in ("returns", "raises")]
    worker = await shop.worker()
    await shop.witness.saw(JobStarted, 2)
    await shop.until(ids[1], lambda job: job.progress == 1)
    await worker.stop(0)
    assert (await shop.job(ids[0])).result == "cleaned up"
    job = await shop.job(ids[1])
    assert (job.status, job.attempts) == (Status.DEAD_LETTER, 1)


@workshop(hard_grace_s=5.0)
async def test_a_timeout_that_passes_while_a_body_is_being_stopped_charges_nothing(shop: Workshop) -> None:
    loop = asyncio.get_running_loop()

    @shop.task("cleans up", timeout=0.5, max_retries=0)
    async def cleans_up() -> None:
        began = loop.time()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(max(0.0, began + 0.8 - loop.time()))

    job_id = await shop.put("cleans up")
    worker = await shop.worker()
    await shop.witness.saw(JobStarted)
    await worker.stop(0)
    job = await shop.job(job_id)
    assert (job.status, job.attempts, job.interruptions) == (Status.PENDING, 0, 1)


@workshop()
async def test_a_stop_is_idempotent_and_an_unstarted_worker_has_nothing_to_stop(shop: Workshop) -> None:
    await shop.make_worker().stop()
    worker = await shop.worker()
    await asyncio.gather(worker.stop(), worker.stop(0), worker.stop())
    assert await worker.wait() is WorkerEnd.STOPPED
    await worker.stop()
    worker.stop_now()
    with pytest.raises(RuntimeError, match="started once"):
        await worker.start()


@pytest.mark.parametrize(
    ("now", "end"), [(False, WorkerEnd.STOPPED), (True, WorkerEnd.HURRIED)], ids=["drain", "now"]
)
@workshop()
async def test_a_worker_told_to_end_while_it_starts_ends_once_it_has(
    shop: Workshop, now: bool, end: WorkerEnd
) -> None:
    """A supervisor may die, or be told to stop, at that very moment."""

    async def opened(inline: bool) -> Storage:
        if now:
            worker.stop_now()
            await asyncio.sleep(0)
        else:
            await worker.stop()
        return await shop.open(inline)

    worker = shop.make_worker(open_storage=opened)
    await worker.start()
    shop.workers.append(worker)
    assert await ended_within(worker, 3) is end
    assert await shop.storage.fleet() == []


@workshop(hard_grace_s=60.0)
async def test_a_second_signal_ends_the_worker_within_a_second(shop: Workshop) -> None:
    release, inside = shop.gate(), threading.Event()

    @shop.task("coro", max_retries=0)
    async def coro() -> None:
        await asyncio.Event().wait()

    @shop.task("stuck", max_retries=0)
    def stuck() -> None:
        inside.set()
        release.wait(20)

    ids = [await shop.put(task) for task in ("coro", "stuck")]
    worker = await shop.worker(grace_s=60.0)
    await shop.witness.saw(JobStarted, 2)
    await asyncio.to_thread(inside.wait, 10)
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    threading.Thread(target=worker.stop_now).start()
    assert await ended_within(worker, 1) is WorkerEnd.HURRIED
    await stopping
    job = await shop.job(ids[0])
    assert (job.status, job.attempts, job.interruptions) == (Status.PENDING, 0, 1)
    assert await shop.status(ids[1]) is Status.RUNNING
    release.set()


@workshop(hard_grace_s=0.1)
async def test_the_job_of_a_body_that_outlives_its_worker_stays_owned_until_the_body_ends(
    shop: Workshop,
) -> None:
    release, inside = shop.gate(), threading.Event()
    starts: list[str] = []

    @shop.task("stuck", max_retries=0)
    def stuck(ctx: Context) -> str:
        starts.append(ctx.job_id)
        try:
            inside.set()
            release.wait(30)
        except JobInterrupted:
            pass
        return "in the end"

    job_id = await shop.put("stuck")
    worker = await shop.worker()
    await asyncio.to_thread(inside.wait, 10)
    await worker.stop(0)
    assert await worker.wait() is WorkerEnd.STOPPED
    assert shop.witness.all(BodyUnstoppable, job_id=job_id)

    other = Witness()
    await shop.worker("w2", witness=other)
    # Longer than a lease: only beats of the first worker keep the second from taking the job.
    with pytest.raises(TimeoutError):
        await other.saw(JobStarted, limit_s=shop.settings.lease_s + 1.5)
    assert await shop.status(job_id) is Status.RUNNING
    release.set()
    job = await shop.ended(job_id)
    assert (job.status, job.result, starts) == (Status.COMPLETED, "in the end", [job_id])


@workshop()
async def test_the_storage_can_tell_a_worker_to_be_quiet_and_to_stop(shop: Workshop) -> None:
    @shop.task("quick")
    async def quick() -> str:
        return "done"

    worker = await shop.worker()
    assert (await shop.ended(await shop.put("quick"))).result == "done"
    assert await shop.storage.command("w1", "quiet")
    await asyncio.sleep(1.2 * shop.settings.beat_every_s)  # the next beat tells it
    job_id = await shop.put("quick")
    assert (await shop.storage.wait_for(job_id, 0.5)).status is Status.PENDING  # type: ignore[union-attr]
    await shop.storage.command("w1", None)
    assert (await shop.ended(job_id)).result == "done"
    await shop.storage.command("w1", "stop")
    assert await ended_within(worker, 5) is WorkerEnd.STOPPED


@workshop()
async def test_a_newer_run_of_the_same_worker_id_fences_the_older_one(shop: Workshop) -> None:
    @shop.task("long", max_retries=0)
    async def long() -> None:
        await asyncio.Event().wait()

    job_id = await shop.put("long")
    older = await shop.worker("w1")
    await shop.witness.saw(JobStarted)
    newer_witness = Witness()
    newer = await shop.worker("w1", witness=newer_witness)
    assert newer.epoch > older.epoch
    assert await ended_within(older, 5) is WorkerEnd.FENCED
    await newer_witness.saw(JobStarted, job_id=job_id)
    job = await shop.job(job_id)
    assert (job.status, job.attempts, job.crashes) == (Status.RUNNING, 0, 0)


@workshop()
async def test_a_worker_that_cannot_start_says_why_and_leaves_nothing_behind(shop: Workshop) -> None:
    async def missing(inline: bool) -> Storage:
        raise StorageMissing("no such file")

    async def half(inline: bool) -> Storage:
        if inline:
            raise StorageUnreachable("no second connection")
        return await shop._open_for_worker(inline)

    with pytest.raises(StorageMissing):
        await shop.make_worker("nobody", open_storage=missing).start()
    with pytest.raises(StorageUnreachable, match="second connection"):
        await shop.make_worker("nobody", open_storage=half).start()
    assert await shop.storage.fleet() == []


@workshop(hard_grace_s=0.1)
async def test_a_storage_that_neither_answers_nor_closes_does_not_hold_up_the_end(shop: Workshop) -> None:
    lines = Lines(shop)
    worker = await shop.worker(open_storage=lines.open)
    for line in (lines.main, lines.beats):
        line.slow |= {"exchange", "beat", "declare_dead", "close"}
    began_at = time.monotonic()
    await worker.stop(0.0)
    assert await worker.wait() is WorkerEnd.STOPPED
    assert time.monotonic() - began_at < soon(0.1 + 2.0)
    lines.main.arrive.set()
    lines.beats.arrive.set()


@workshop()
async def test_a_cancelled_job_ends_within_two_seconds_in_a_coroutine_and_on_a_thread(shop: Workshop) -> None:
    @shop.task("coro", max_retries=5)
    async def coro() -> None:
        await asyncio.Event().wait()

    @shop.task("polls", max_retries=5)
    def polls(ctx: Context) -> str:
        while not ctx.cancelled:
            time.sleep(0.01)
        return "never seen: the exception comes first"

    @shop.task("raises", max_retries=5)
    async def raises() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("on the way out") from None

    @shop.task("quick")
    async def quick() -> str:
        return "done"

    ids = [await shop.put(task) for task in ("coro", "polls", "raises")]
    await shop.worker(concurrency=3)
    await shop.witness.saw(JobStarted, 3)
    assert await shop.storage.cancel(ids) == [Cancelled.REQUESTED] * 3
    for job_id in ids:
        job = await shop.ended(job_id, limit_s=2)
        assert (job.status, job.attempts) == (Status.CANCELLED, 0)
        assert [entry.outcome for entry in await shop.history(job_id)] == [Outcome.CANCELLED]
    assert (await shop.ended(await shop.put("quick"))).result == "done"


@workshop()
async def test_a_body_that_returns_normally_is_completed_though_it_was_cancelled(shop: Workshop) -> None:
    @shop.task("finishes")
    async def finishes(ctx: Context) -> bool:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return ctx.cancelled
        return False

    job_id = await shop.put("finishes")
    await shop.worker()
    await shop.witness.saw(JobStarted)
    await shop.storage.cancel([job_id])
    job = await shop.ended(job_id)
    assert (job.status, job.result) == (Status.COMPLETED, True)


@workshop()
async def test_a_cancel_is_honoured_on_a_worker_that_drains(shop: Workshop) -> None:
    @shop.task("long", max_retries=5)
    async def long() -> None:
        await asyncio.Event().wait()

    job_id = await shop.put("long")
    worker = await shop.worker()
    await shop.witness.saw(JobStarted)
    stopping = asyncio.create_task(worker.stop(4))
    await asyncio.sleep(0)
    await shop.storage.cancel([job_id])
    assert (await shop.ended(job_id, limit_s=2)).status is Status.CANCELLED
    await stopping


@workshop()
async def test_a_job_cancelled_or_delayed_before_any_worker_came_never_starts(shop: Workshop) -> None:
    @shop.task("quick")
    async def quick() -> str:
        return "done"

    ids = [await shop.put("quick"), await shop.put("quick", delay=0.2)]
    assert await shop.storage.cancel(ids) == [Cancelled.CANCELLED] * 2
    await shop.worker()
    assert (await shop.ended(await shop.put("quick", delay=0.3))).result == "done"
    assert [event.job_id for event in shop.witness.all(JobStarted) if event.job_id in ids] == []
    assert not [event for event in shop.witness.all(JobEnded) if event.job_id in ids]
