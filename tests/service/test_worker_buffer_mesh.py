"""Whole workers in a mesh: what one holds another runs, and what is told of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fluxmesh import MeshWorker
from fluxmesh.job import Status
from fluxmesh.mesh.node import MeshNode
from fluxmesh.submission import prepare
from fluxmesh.worker.observe import JobStarted
from fluxmesh.worker.worker import Worker
from tests.mesh.sockets import free_port
from tests.service.log_tap import tapped
from tests.service.workshop import Witness, Workshop, workshop


async def until(holds: Callable[[], object], limit_s: float = 20.0) -> None:
    """Return once it holds. What a node sees has no signal for others."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Fleet:
    """Workers of one slot each, in one mesh. Jobs wait at a gate until it opens."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self.gate = shop.gate()
        self.ran: list[tuple[str, int]] = []
        self.seed = f"127.0.0.1:{free_port()}"
        self.witnesses: dict[str, Witness] = {}
        ran, gate = self.ran, self.gate

        @shop.task("warm")
        async def warm() -> None: ...

        @shop.task("wait")
        def wait(number: int) -> None:
            ran.append((threading.current_thread().name.split("-")[0], number))
            gate.wait(60)

    async def worker(self, name: str, **options: Any) -> Worker:
        port = int(self.seed.rpartition(":")[2]) if not self.witnesses else free_port()
        mesh = MeshWorker(port=port, seeds=[self.seed], protocol_period_ms=200, **options)
        self.witnesses[name] = Witness()
        return await self.shop.worker(name, concurrency=1, witness=self.witnesses[name], mesh=mesh)

    async def holder(self, count: int, **options: Any) -> tuple[Worker, list[str]]:
        """A worker that runs one job and holds the rest."""
        one = await self.worker("w1", **options)
        stock = stock_of(one)
        for _ in range(20):
            stock.times.note(0.001)  # whatever this machine does beside
        jobs = [prepare({"task": "wait"}).job([number], {}) for number in range(count)]
        ids = [answer.id for answer in await self.shop.storage.enqueue(jobs, queue_cap=1_000)]
        await until(lambda: len(stock) == count - 1)
        return one, ids


def node_of(worker: Worker) -> MeshNode:
    assert worker.mesh is not None
    return worker.mesh


def stock_of(worker: Worker) -> Any:
    stock = worker._table.stock
    assert stock is not None
    return stock


@workshop()
async def test_what_one_holds_others_run_each_job_once_and_both_sides_count_alike(shop: Workshop) -> None:
    fleet = Fleet(shop)
    one, ids = await fleet.holder(20)
    two, three = await fleet.worker("w2"), await fleet.worker("w3")
    await until(
        lambda: node_of(two).metrics()["jobs_stolen_in"] and node_of(three).metrics()["jobs_stolen_in"]
    )
    fleet.gate.set()
    for job_id in ids:
        job = await shop.ended(job_id)
        assert (job.status, job.attempts) == (Status.COMPLETED, 1)
    assert sorted(number for _, number in fleet.ran) == list(range(20))
    assert {name for name, _ in fleet.ran} == {"w1", "w2", "w3"}
    fleet_of = [node_of(worker) for worker in (one, two, three)]

    def summed(name: str) -> int:
        return sum(node.metrics()[name] for node in fleet_of)

    await until(lambda: summed("jobs_stolen_in") == summed("jobs_stolen_out") > 0)
    assert summed("steals_succeeded") > 0
    assert summed("local_pops") > 0


@workshop()
async def test_a_worker_that_drains_hands_back_what_it_holds(shop: Workshop) -> None:
    fleet = Fleet(shop)
    one, ids = await fleet.holder(12)
    fleet.gate.set()
    await one.stop(5.0)
    jobs = [await shop.job(job_id) for job_id in ids]
    left = Counter(job.status for job in jobs)
    assert left[Status.COMPLETED] >= 1
    assert left[Status.COMPLETED] + left[Status.PENDING] == 12
    two = await fleet.worker("w2")
    for job_id in ids:
        assert (await shop.ended(job_id)).attempts == 1
    assert sorted(number for _, number in fleet.ran) == list(range(12))
    assert node_of(two).metrics()["jobs_stolen_in"] == 0


@workshop()
async def test_held_jobs_live_by_the_beats_of_their_worker(shop: Workshop) -> None:
    fleet = Fleet(shop)
    one, ids = await fleet.holder(5, steal=False)
    stock = stock_of(one)
    async with asyncio.timeout(20):
        while not stock.counts[
            "buffer_released_old"
        ]:  # five seconds, which is more than four beats and a lease
            statuses = Counter([await shop.status(job_id) for job_id in ids])
            if len(stock) == 4:
                assert statuses == {Status.RUNNING: 1, Status.CLAIMED: 4}
            await asyncio.sleep(0.1)
    assert stock.counts["buffer_released_old"] == 4


@workshop()
async def test_one_that_does_not_steal_gives_nothing_and_takes_nothing(shop: Workshop) -> None:
    fleet = Fleet(shop)
    one, _ = await fleet.holder(9, steal=False)
    two = await fleet.worker("w2", steal=False)
    await until(lambda: node_of(two).cluster_info()["total_buffered"] == 8)
    await asyncio.sleep(0.5)  # ten times as long as somebody who stole would have needed
    assert len(stock_of(one)) == 8
    assert not fleet.witnesses["w2"].all(JobStarted)
    assert not node_of(two).should_steal()
    assert node_of(two).metrics()["steals_initiated"] == node_of(one).metrics()["jobs_stolen_out"] == 0


@workshop()
async def test_one_whose_loop_stands_still_holds_nothing_back(shop: Workshop) -> None:
    """If it does not give, nobody may take it; and a loop may stand still for `stall_limit_s`."""
    fleet = Fleet(shop)
    with tapped() as tap:
        one, ids = await fleet.holder(9, steal=False)
        time.sleep(2.5)  # noqa: ASYNC251 - the fault at hand
        assert len(stock_of(one)) == 0
        (line,) = tap.found("jobs released", level="warning")
        assert (line["count"], line["why"]) == (8, "loop blocked")
    fleet.gate.set()
    for job_id in ids:
        assert (await shop.ended(job_id)).attempts == 1
    assert sorted(number for _, number in fleet.ran) == list(range(9))


@workshop()
async def test_a_node_knows_how_much_its_worker_holds_and_may_hold(shop: Workshop) -> None:
    fleet = Fleet(shop)
    one, _ = await fleet.holder(9)
    await until(lambda: node_of(one).cluster_info()["total_buffered"] == 8)
    info = node_of(one).cluster_info()
    assert (info["local_buffer_len"], info["adaptive_prefetch"]) == (8, 16)
    assert info["total_load"] == 9
    assert node_of(one).should_prefetch()
    metrics = node_of(one).metrics()
    assert metrics["prefetch_jobs"] >= 8
    assert metrics["prefetch_count"] >= 1


@workshop()
async def test_storage_and_stock_hear_what_belongs_to_whom(shop: Workshop) -> None:
    fleet = Fleet(shop)
    one, two = await fleet.worker("w1"), await fleet.worker("w2")
    await until(lambda: len(node_of(one).snapshot.in_ring) == len(node_of(two).snapshot.in_ring) == 2)
    owner = node_of(one).preferred_worker("warm")
    sharing = [worker._meshing._sharing for worker in (one, two)]
    await until(lambda: all(share is not None and share._told.parts for share in sharing))
    told = {
        name: share._told.parts[0].tasks
        for name, share in zip(("w1", "w2"), sharing, strict=True)
        if share is not None
    }
    assert [name for name, tasks in told.items() if "warm" in tasks] == [owner]
    for _ in range(6):
        await shop.ended(await shop.put("warm"))
    hits = sum(node_of(worker).metrics()["affinity_hits"] for worker in (one, two))
    misses = sum(node_of(worker).metrics()["affinity_misses"] for worker in (one, two))
    assert hits + misses == 6
    await one.stop(1.0)
    assert sharing[0] is not None
    assert not sharing[0]._told.parts
