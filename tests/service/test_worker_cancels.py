"""A cancel of a running job is heard at once, however seldom the worker beats; and in any case."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from fluxmesh.context import Context
from fluxmesh.job import Outcome, Status
from fluxmesh.storage.values import Cancelled
from fluxmesh.worker.config import WorkerEnd
from fluxmesh.worker.notices import ECHO_S
from fluxmesh.worker.observe import Claimed, JobStarted
from tests.service.test_worker_outages import Lines
from tests.service.workshop import Workshop, workshop

SELDOM = {"lease_s": 120.0, "beat_s": 40.0}  # what ends within LIMIT_S was not told by a beat in its own time


@pytest.mark.parametrize("body", ["coroutine", "polling thread", "busy thread"])
@workshop(**SELDOM)
async def test_a_running_job_is_cancelled_long_before_the_next_beat_is_due(shop: Workshop, body: str) -> None:
    @shop.task("coroutine", max_retries=5)
    async def coroutine() -> None:
        await asyncio.Event().wait()

    @shop.task("polling thread", max_retries=5)
    def polls(ctx: Context) -> None:
        while not ctx.cancelled:
            time.sleep(0.01)

    @shop.task("busy thread", max_retries=5)
    def busy() -> None:
        while True:
            pass

    await shop.worker()
    for number in range(1, 4):  # one after the other: what was noticed before is no help
        job_id = await shop.put(body)
        await shop.witness.saw(JobStarted, number)
        assert await shop.storage.cancel([job_id]) == [Cancelled.REQUESTED]
        job = await shop.ended(job_id)
        assert (job.status, job.attempts) == (Status.CANCELLED, 0)
        assert [entry.outcome for entry in await shop.history(job_id)] == [Outcome.CANCELLED]


@workshop(**SELDOM)
async def test_a_body_in_a_call_that_blocks_is_cancelled_when_the_call_returns(shop: Workshop) -> None:
    door = threading.Event()

    @shop.task("blocks", max_retries=5)
    def blocks() -> str:
        door.wait(30)
        return "never told: the exception waits behind the call"

    job_id = await shop.put("blocks")
    worker = await shop.worker()
    await shop.witness.saw(JobStarted)
    assert await shop.storage.cancel([job_id]) == [Cancelled.REQUESTED]
    await shop.until(job_id, lambda job: worker._table.runs[job_id].cancelled)
    assert await shop.status(job_id) is Status.RUNNING
    door.set()
    assert (await shop.ended(job_id)).status is Status.CANCELLED


@workshop(**SELDOM)
async def test_a_cancel_of_a_job_whose_claim_is_still_on_its_way_is_heard_when_it_has_come(
    shop: Workshop,
) -> None:
    """The beat that the notice brings about does not list the job yet."""

    @shop.task("long")
    async def long() -> None:
        await asyncio.Event().wait()

    lines = Lines(shop)
    await shop.worker(open_storage=lines.open)
    await _first_beats_are_over(lines)
    await shop.witness.saw(Claimed)  # else it is the first exchange, which finds nothing, that is held up
    lines.main.slow.add("exchange")
    job_id = await shop.put("long")
    await shop.until(job_id, lambda job: job.status is Status.RUNNING)
    beats = lines.beats.calls["beat"]
    assert await shop.storage.cancel([job_id]) == [Cancelled.REQUESTED]
    await shop.until(job_id, lambda job: lines.beats.calls["beat"] > beats)
    lines.main.slow.clear()
    lines.main.arrive.set()
    assert (await shop.ended(job_id)).status is Status.CANCELLED


async def _first_beats_are_over(lines: Lines) -> None:
    async with asyncio.timeout(15):
        while not lines.beats.calls["beat"]:  # noqa: ASYNC110 - a counter, which tells nobody
            await asyncio.sleep(0.01)


@workshop(**SELDOM)
async def test_many_cancels_at_once_take_few_beats(shop: Workshop) -> None:
    @shop.task("long")
    async def long() -> None:
        await asyncio.Event().wait()

    lines = Lines(shop)
    ids = [await shop.put("long") for _ in range(100)]
    await shop.worker(concurrency=100, open_storage=lines.open)
    await shop.witness.saw(JobStarted, 100)
    before, began_at = lines.beats.calls["beat"], time.monotonic()
    await asyncio.gather(*(shop.storage.cancel([job_id]) for job_id in ids))
    assert {(await shop.ended(job_id)).status for job_id in ids} == {Status.CANCELLED}
    took_s = time.monotonic() - began_at
    assert lines.beats.calls["beat"] - before <= 3 + took_s * 20, "one for each 50 ms, and an echo"


@workshop(lease_s=3.0)
async def test_a_notice_that_is_lost_costs_one_beat(shop: Workshop) -> None:
    @shop.task("long")
    async def long() -> None:
        await asyncio.Event().wait()

    lines = Lines(shop)
    job_id = await shop.put("long")
    await shop.worker(open_storage=lines.open)
    await shop.witness.saw(JobStarted)
    lines.main.down.add("wait_for_notice")
    await shop.storage.cancel([job_id])
    assert (await shop.ended(job_id, limit_s=3)).status is Status.CANCELLED


@workshop(**SELDOM)
async def test_a_worker_that_drains_hears_of_a_cancel_at_once(shop: Workshop) -> None:
    @shop.task("long", max_retries=5)
    async def long() -> None:
        await asyncio.Event().wait()

    lines = Lines(shop)
    job_id = await shop.put("long")
    worker = await shop.worker(open_storage=lines.open)
    await shop.witness.saw(JobStarted)
    stopping = asyncio.create_task(worker.stop(30))
    await asyncio.sleep(0)
    beats = lines.beats.calls["beat"]
    await shop.until(job_id, lambda job: lines.beats.calls["beat"] > beats)  # that it drains
    await asyncio.sleep(2 * ECHO_S)
    await shop.storage.cancel([job_id])
    assert (await shop.ended(job_id)).status is Status.CANCELLED
    await stopping


@workshop(**SELDOM)
async def test_a_worker_told_to_stop_by_storage_stops_at_once(shop: Workshop) -> None:
    worker = await shop.worker("told")
    assert await shop.storage.command("told", "stop")
    async with asyncio.timeout(15):
        assert await worker.wait() is WorkerEnd.STOPPED


@workshop(**SELDOM)
async def test_an_end_of_the_worker_is_not_held_up_by_its_wait_for_notices(shop: Workshop) -> None:
    worker = await shop.worker()
    began_at = time.monotonic()
    await worker.stop()
    assert await worker.wait() is WorkerEnd.STOPPED
    assert time.monotonic() - began_at < 5
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not {name for name in names if "notice" in name}
