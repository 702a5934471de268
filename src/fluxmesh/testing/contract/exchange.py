"""The round trip of a worker: claim and begin, and who may."""

from __future__ import annotations

import asyncio

import pytest

from fluxmesh.errors import InvalidOption
from fluxmesh.ids import new_job_id
from fluxmesh.job import Status
from fluxmesh.storage.values import (
    Begun,
    Owned,
    Settle,
    Settled,
    Standing,
)
from fluxmesh.testing.contract.lab import (
    COMPLETED,
    Lab,
    ids,
    new_job,
    scenario,
)

OLD_ID = "01890000-0000-7000-8000-000000000001"  # by its time the oldest of all, whenever it arrives


class TestClaim:
    @scenario
    async def test_a_claim_gives_up_to_its_slots_running_then_its_extra_held(self, lab: Lab) -> None:
        made = await lab.put_many(7)
        worker = await lab.worker()
        answer = await worker.exchange(slots=2, extra=3)
        assert (ids(answer.running), ids(answer.held)) == (made[:2], made[2:5])
        assert await lab.statuses(made) == [Status.RUNNING] * 2 + [Status.CLAIMED] * 3 + [Status.PENDING] * 2

    @scenario
    async def test_a_large_claim_among_jobs_it_may_not_run_keeps_the_order(self, lab: Lab) -> None:
        """Whatever the storage reads at a time, and whatever it takes out of the way meanwhile."""
        jobs = [new_job("alien" if n % 3 == 0 or 200 <= n < 520 else "work") for n in range(900)]
        await lab.enqueue(*jobs)
        worker = await lab.worker()
        given = [job for slots in (300, 100) for job in await worker.claim(slots)]
        assert [job.id for job in given] == [job.id for job in jobs if job.task == "work"]
        assert (await lab.storage.counts()).by_status[Status.PENDING] == len(jobs) - len(given)

    @scenario
    async def test_a_claimed_job_brings_all_that_is_needed_to_run_it(self, lab: Lab) -> None:
        asked = new_job("work", 1, kwargs={"a": 2}, priority=1, max_retries=9)
        await lab.enqueue(asked)
        job = await (await lab.worker()).claim_one()
        assert (job.id, job.task, job.queue, job.tier) == (asked.id, "work", "default", 1)
        assert (job.payload, job.options, job.life) == (asked.payload, asked.options, 1)
        assert (job.attempts, job.crashes, job.snoozes, job.interruptions) == (0, 0, 0, 0)

    @scenario
    async def test_a_running_job_names_its_worker_its_token_and_its_start(self, lab: Lab) -> None:
        await lab.put()
        lab.clock.advance(3)
        given = await (await lab.worker("w1")).claim_one()
        job = await lab.job(given.id)
        assert (job.worker_id, job.token) == ("w1", given.token)
        assert job.started_at == pytest.approx(lab.clock.wall_us() / 1e6, abs=1e-3)

    @scenario
    async def test_a_token_is_storage_time_or_one_more_than_the_last(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        first = await worker.claim_one()
        assert first.token == lab.clock.wall_us()
        await worker.release(first)
        second = await worker.claim_one()
        assert second.token > (await lab.job(second.id)).token - 1 > first.token
        lab.clock.step_wall(-3_600)
        await worker.release(second)
        assert (await worker.claim_one()).token > second.token

    @scenario
    async def test_tiers_are_strict_whatever_the_order_of_arrival(self, lab: Lab) -> None:
        low, default, high, critical = [await lab.put(priority=tier) for tier in (3, 2, 1, 0)]
        worker = await lab.worker()
        assert ids(await worker.claim(4)) == [critical, high, default, low]

    @scenario
    async def test_held_jobs_come_by_tier_too(self, lab: Lab) -> None:
        low, high = await lab.put(priority=3), await lab.put(priority=1)
        answer = await (await lab.worker()).exchange(slots=1, extra=1)
        assert (ids(answer.running), ids(answer.held)) == ([high], [low])

    @scenario
    async def test_inside_a_queue_jobs_come_by_arrival_and_not_by_id_or_producers_time(
        self, lab: Lab
    ) -> None:
        first = await lab.put(id=new_job_id())
        second = await lab.put(id=OLD_ID)
        assert ids(await (await lab.worker()).claim(2)) == [first, second]

    @scenario
    async def test_queues_of_one_tier_take_turns_in_one_claim(self, lab: Lab) -> None:
        many = await lab.put_many(10, queue="a")
        few = await lab.put_many(10, queue="b")
        given = ids(await (await lab.worker(queues=("a", "b"))).claim(4))
        assert ([i for i in given if i in many], [i for i in given if i in few]) == (many[:2], few[:2])

    @scenario
    async def test_queues_of_one_tier_take_turns_from_claim_to_claim(self, lab: Lab) -> None:
        many = await lab.put_many(10, queue="a")
        await lab.put_many(10, queue="b")
        worker = await lab.worker(queues=("a", "b"))
        given = [(await worker.claim_one()).id in many for _ in range(8)]
        assert given.count(True) == given.count(False) == 4

    @scenario
    async def test_a_worker_gets_only_its_queues_tiers_and_tasks(self, lab: Lab) -> None:
        mine = await lab.put("mine", queue="q", priority=1)
        for task, queue, tier in (("mine", "other", 1), ("mine", "q", 0), ("alien", "q", 1)):
            await lab.put(task, queue=queue, priority=tier)
        worker = await lab.worker(tasks=("mine",), queues=("q",), tiers=(1, 2))
        assert ids(await worker.claim(10)) == [mine]

    @scenario
    async def test_slots_reserved_for_a_tier_are_given_to_no_other(self, lab: Lab) -> None:
        ordinary = await lab.put_many(4)
        worker = await lab.worker()
        reserve = (1, 0, 0, 0)
        assert ids((await worker.exchange(slots=3, reserve=reserve)).running) == ordinary[:2]
        urgent = await lab.put(priority=0)
        assert ids((await worker.exchange(slots=1, reserve=reserve)).running) == [urgent]
        assert ids((await worker.exchange(slots=1)).running) == [ordinary[2]]

    @scenario
    async def test_many_storages_that_claim_at_once_never_share_a_job(self, lab: Lab) -> None:
        made = await lab.put_many(200)
        workers = [await lab.worker(f"w{n}", storage=await lab.open()) for n in range(8)]
        given: list[str] = []
        for _ in range(5):
            for jobs in await asyncio.gather(*(worker.claim(7) for worker in workers)):
                given += ids(jobs)
        assert sorted(given) == sorted(made)

    @scenario
    async def test_a_due_job_is_promoted_by_the_claim_that_needs_it(self, lab: Lab) -> None:
        later, sooner = await lab.put(delay=2), await lab.put(delay=1)
        worker = await lab.worker()
        assert await worker.claim(5) == []
        lab.clock.advance(2)
        assert ids(await worker.claim(5)) == [sooner, later]

    @scenario
    async def test_an_answer_tells_when_the_next_job_is_due(self, lab: Lab) -> None:
        worker = await lab.worker()
        assert (await worker.exchange(slots=1)).next_due_s is None
        await lab.put(delay=30)
        await lab.put(delay=7)
        lab.clock.advance(1)
        assert (await worker.exchange(slots=1)).next_due_s == pytest.approx(6, abs=1e-3)

    @scenario
    async def test_a_promoted_job_comes_after_what_arrived_before_its_time(self, lab: Lab) -> None:
        delayed = await lab.put(delay=1)
        waiting = await lab.put()
        lab.clock.advance(1)
        worker = await lab.worker()
        assert ids(await worker.claim(2)) == [waiting, delayed]

    @scenario
    async def test_more_than_a_batch_of_settles_or_begins_is_refused(self, lab: Lab) -> None:
        worker = await lab.worker()
        many = [Owned(new_job_id(), 1) for _ in range(1_001)]
        settles = [Settle(item.id, item.token, COMPLETED) for item in many]
        for request in (worker.request(begin=many), worker.request(settle=settles)):
            with pytest.raises(InvalidOption):
                await worker.storage.exchange(request)


class TestStanding:
    @scenario
    async def test_a_newer_epoch_is_greater_and_fences_the_older_one(self, lab: Lab) -> None:
        await lab.put_many(3)
        older = await lab.worker("w1")
        mine = await older.claim_one()
        newer = await lab.worker("w1")
        assert newer.ref.epoch > older.ref.epoch
        answer = await older.exchange(slots=1, extra=1)
        assert (answer.standing, answer.running, answer.held) == (Standing.FENCED, (), ())
        assert await older.settle(mine) is Settled.APPLIED
        assert len(await newer.claim(1)) == 1

    @scenario
    async def test_epochs_grow_over_all_workers_of_the_namespace(self, lab: Lab) -> None:
        epochs = [(await lab.worker(name)).ref.epoch for name in ("a", "b", "a", "c")]
        assert epochs == sorted(set(epochs))

    @scenario
    async def test_an_older_epoch_begins_nothing(self, lab: Lab) -> None:
        await lab.put()
        older = await lab.worker("w1")
        job = await older.hold_one()
        await lab.worker("w1")
        assert await older.begin(job) != [Begun.BEGUN]
        assert await lab.status(job.id) is not Status.RUNNING

    @scenario
    async def test_an_unknown_worker_is_told_so_and_gets_nothing(self, lab: Lab) -> None:
        await lab.put_many(2)
        worker = await lab.worker()
        mine = await worker.claim_one()
        lab.backend.forget_worker(worker.ref)
        answer = await worker.exchange(slots=1)
        assert (answer.standing, answer.running) == (Standing.UNKNOWN, ())
        assert await worker.settle(mine) is Settled.APPLIED

    @scenario
    async def test_one_that_was_declared_dead_gets_nothing_ever_again(self, lab: Lab) -> None:
        await lab.put_many(2)
        worker = await lab.worker()
        await worker.claim_one()
        await lab.storage.declare_dead(worker.ref, "killed")
        assert (await worker.exchange(slots=1)).standing is Standing.FENCED
        assert (await worker.beat()).standing is Standing.FENCED
        assert await worker.claim(1) == []
