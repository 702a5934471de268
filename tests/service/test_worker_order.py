"""Who runs what, and when: strict priority (C14), nothing held behind a long job (C13), long jobs (C02)."""

from __future__ import annotations

import asyncio
import sys

import pytest

from fluxmesh.context import Context
from fluxmesh.job import Status
from fluxmesh.worker.observe import JobStarted
from tests.service.workshop import Witness, Workshop, workshop


@workshop()
async def test_an_urgent_job_overtakes_the_backlog_of_a_busy_worker(shop: Workshop) -> None:
    order: list[str] = []
    gate = asyncio.Event()

    @shop.task("note")
    async def note(name: str) -> None:
        order.append(name)

    @shop.task("flaky", priority="high", backoff_strategy="fixed", backoff_base_seconds=1, jitter="none")
    async def flaky(ctx: Context) -> None:
        order.append(f"flaky {ctx.attempt}")
        if ctx.attempt == 1:
            raise ValueError("once")

    @shop.task("holds", priority="critical")
    async def holds() -> None:
        order.append("holds")
        await gate.wait()

    await shop.worker(concurrency=1)
    flaky_id = await shop.put("flaky")
    await shop.until(flaky_id, lambda job: job.status is Status.SCHEDULED)
    holds_id = await shop.put("holds")
    await shop.witness.saw(JobStarted, job_id=holds_id)
    low = [await shop.put("note", f"low {number}", priority="low") for number in range(1, 11)]
    plain = [await shop.put("note", f"plain {number}") for number in range(1, 6)]
    urgent = await shop.put("note", "urgent", priority="critical")
    await shop.until(flaky_id, lambda job: job.status is Status.PENDING)  # it is due again
    await shop.storage.reprioritise([low[6]], 1)
    gate.set()
    for job_id in (*low, *plain, urgent, flaky_id):
        assert (await shop.ended(job_id)).status is Status.COMPLETED
    rest = [f"low {number}" for number in range(1, 11) if number != 7]
    assert order == [
        "flaky 1", "holds", "urgent", "flaky 2", "low 7", *[f"plain {n}" for n in range(1, 6)], *rest,
    ]  # fmt: skip


@workshop()
async def test_a_long_job_does_not_sit_on_short_ones(shop: Workshop) -> None:
    gate = asyncio.Event()

    @shop.task("long")
    async def long() -> None:
        await gate.wait()

    @shop.task("short")
    async def short() -> None: ...

    workers = [Witness(), Witness()]
    for number, witness in enumerate(workers):
        await shop.worker(f"w{number}", concurrency=1, witness=witness)
    long_id = await shop.put("long")
    await shop.until(long_id, lambda job: job.status is Status.RUNNING)
    busy = (await shop.job(long_id)).worker_id
    ids = [await shop.put("short") for _ in range(6)]
    for job_id in ids:
        job = await shop.ended(job_id, limit_s=3)
        assert job.worker_id != busy
    gate.set()
    await shop.ended(long_id)


@workshop()
async def test_a_healthy_job_far_longer_than_the_lease_starts_once(shop: Workshop) -> None:
    order: list[str] = []

    @shop.task("long")
    async def long(name: str) -> None:
        order.append(f"{name} begins")
        await asyncio.sleep(1.7 * shop.settings.lease_s)
        order.append(f"{name} ends")

    @shop.task("behind")
    def behind(name: str) -> None:
        order.append(f"{name} begins")

    first = await shop.put("long", "first", concurrency_key="acct")
    for name in ("w1", "w2"):
        await shop.worker(name, witness=Witness())
    await shop.until(first, lambda job: job.status is Status.RUNNING)
    second = await shop.put("behind", "second", concurrency_key="acct")
    for job_id in (first, second):
        job = await shop.ended(job_id)
        assert (job.attempts, job.crashes, job.interruptions) == (1, 0, 0)
    assert order == ["first begins", "first ends", "second begins"]


@workshop()
async def test_the_job_of_a_body_that_outlives_even_its_loop_is_covered_until_the_body_ends(
    shop: Workshop,
) -> None:
    @shop.task("stuck")
    def stuck() -> str:
        return "elsewhere"

    job_id = await shop.put("stuck")
    command = (sys.executable, "-m", "tests.service.outliving", str(shop.path))
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        assert await program.stdout.readline() == b"left\n"
        other = Witness()
        await shop.worker("w2", witness=other)
        with pytest.raises(TimeoutError):  # only beats keep the job from being taken
            await other.saw(JobStarted, limit_s=1.3 * shop.settings.lease_s)
        program.stdin.write(b"let the body end\n")
        job = await shop.ended(job_id, limit_s=shop.settings.lease_s)
        assert (job.worker_id, job.result) == ("w2", "elsewhere")
        assert (job.attempts, job.interruptions, job.crashes) == (1, 1, 0)
    finally:
        program.stdin.write(b"and yourself\n" * 2)
        await asyncio.wait_for(program.communicate(), 10)
    assert program.returncode == 0
