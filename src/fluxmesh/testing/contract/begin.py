"""The round trip of a worker: the start of what it holds, and what its answers tell of the jobs they give."""

from __future__ import annotations

import msgspec
import pytest

from fluxmesh.affinity import slot_of
from fluxmesh.ids import new_job_id
from fluxmesh.job import Status
from fluxmesh.storage.values import (
    HELD_TAKEABLE_AFTER_S,
    PARK_CAP,
    Begun,
    Owned,
    Settle,
    Settled,
    TaskSpec,
)
from fluxmesh.testing.contract.lab import (
    COMPLETED,
    WAIT_S,
    Lab,
    ids,
    new_job,
    own,
    retry,
    scenario,
)


class TestBegin:
    @scenario
    async def test_a_held_job_begins_under_the_token_of_its_claim(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        lab.clock.advance(5)
        assert await worker.begin(held) == [Begun.BEGUN]
        job = await lab.job(held.id)
        assert (job.status, job.token) == (Status.RUNNING, held.token)
        assert job.started_at == pytest.approx(lab.clock.wall_us() / 1e6, abs=1e-3)
        assert await worker.settle(held) is Settled.APPLIED

    @scenario
    async def test_a_begin_that_was_applied_is_answered_alike_when_repeated(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        request = worker.request(begin=[own(held)])
        first, again = await worker.send(request), await worker.send(request)
        assert first.begun == again.begun == (Begun.BEGUN,)
        assert (await lab.job(held.id)).status is Status.RUNNING

    @scenario
    async def test_what_is_not_held_by_the_worker_is_lost(self, lab: Lab) -> None:
        first, second = await lab.put(), await lab.put()
        one, two = await lab.worker("w1"), await lab.worker("w2")
        mine, others = await one.hold_one(), await two.hold_one()
        assert (mine.id, others.id) == (first, second)
        await one.release(mine)
        wrong = [own(mine), own(others), Owned(new_job_id(), 5), Owned(others.id, others.token - 1)]
        answer = await one.exchange(begin=wrong)
        assert (answer.begun, ids(answer.running)) == ((Begun.LOST,) * 4, [first])
        assert await lab.status(second) is Status.CLAIMED

    @scenario
    async def test_one_outranked_by_a_ready_job_is_given_back_to_its_old_place(self, lab: Lab) -> None:
        first, second = await lab.put(), await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        urgent = await lab.put(priority="high")
        answer = await worker.exchange(begin=[own(held)])
        assert (answer.begun, ids(answer.running)) == ((Begun.OUTRANKED,), [urgent])
        job = await lab.job(first)
        assert (job.status, job.worker_id) == (Status.PENDING, None)
        assert job.token > held.token
        assert ids(await worker.claim(3)) == [first, second]

    @scenario
    async def test_a_due_job_outranks_although_nobody_has_promoted_it(self, lab: Lab) -> None:
        await lab.put(priority=0, delay=1)
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        lab.clock.advance(1)
        assert await worker.begin(held) == [Begun.OUTRANKED]

    @scenario
    async def test_a_parked_job_outranks_at_begin(self, lab: Lab) -> None:
        await lab.put("work")
        able = await lab.worker("w2", tasks=("work", "rare"))
        held = await able.hold_one()
        parked = await lab.put("rare", priority=0)
        assert await (await lab.worker("w0")).claim(1) == []
        assert (await lab.job(parked)).waiting_for is not None
        assert await able.begin(held) == [Begun.OUTRANKED]

    @pytest.mark.parametrize("why", ["tier", "queue", "task", "paused", "limit"])
    @scenario
    async def test_what_this_worker_could_not_run_does_not_outrank(self, lab: Lab, why: str) -> None:
        await lab.put()
        worker = await lab.worker(tiers=(1, 2), queues=("default", "shut"))
        held = await worker.hold_one()
        if why == "limit":
            other = await lab.worker("w2")
            await lab.put(concurrency_key="k", priority=1)
            await other.claim_one()
        if why == "paused":
            await lab.storage.pause("shut")
        await lab.put(
            "alien" if why == "task" else "work",
            priority=0 if why == "tier" else 1,
            queue={"queue": "elsewhere", "paused": "shut"}.get(why, "default"),
            **({"concurrency_key": "k"} if why == "limit" else {}),
        )
        assert await worker.begin(held) == [Begun.BEGUN]

    @scenario
    async def test_an_equal_tier_does_not_outrank(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        await lab.put()
        assert await worker.begin(held) == [Begun.BEGUN]

    @scenario
    async def test_each_of_a_batch_is_judged_by_its_own_tier(self, lab: Lab) -> None:
        await lab.put(priority=1)
        await lab.put(priority=3)
        worker = await lab.worker()
        high, low = await worker.hold(2)
        await lab.put(priority=2)
        assert await worker.begin(high, low) == [Begun.BEGUN, Begun.OUTRANKED]

    @scenario
    async def test_settle_comes_before_begin_and_begin_before_claim(self, lab: Lab) -> None:
        """A settle frees a permit; what waited for it outranks the begin and is claimed, in one step."""
        await lab.put(concurrency_key="k", priority=1)
        worker = await lab.worker()
        running = await worker.claim_one()
        await lab.put(priority=2)
        held = await worker.hold_one()
        waiting = await lab.put(concurrency_key="k", priority=1)
        answer = await worker.exchange(
            settle=[Settle(running.id, running.token, COMPLETED)], begin=[own(held)], slots=1
        )
        assert (answer.settled, answer.begun) == ((Settled.APPLIED,), (Begun.OUTRANKED,))
        assert ids(answer.running) == [waiting, held.id]

    @scenario
    async def test_a_look_that_was_cut_short_by_parking_lets_nothing_begin(self, lab: Lab) -> None:
        """Nobody knows what stands behind so many: here a job that outranks."""
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        await lab.put_many(PARK_CAP, "alien", priority=0)
        urgent = await lab.put(priority=0)
        answer = await worker.exchange(begin=[own(held)], slots=1)
        assert (answer.begun, answer.more) == ((Begun.OUTRANKED,), True)
        assert {job.tier for job in answer.running} <= {0}
        given = ids(answer.running) or ids(await worker.claim(1))
        assert given == [urgent]

    @scenario
    async def test_a_job_whose_task_was_limited_since_begins_within_its_limit(self, lab: Lab) -> None:
        """What may not start is given back, where it waits for a permit as others do."""
        made = await lab.put_many(3)
        worker = await lab.worker()
        held = await worker.hold(3)
        await lab.worker("w2", tasks=(TaskSpec("work", max_concurrent=1),))
        assert await worker.begin(*held) == [Begun.BEGUN, Begun.OUTRANKED, Begun.OUTRANKED]
        assert await lab.statuses(made) == [Status.RUNNING, Status.PENDING, Status.PENDING]
        answer = await worker.exchange(settle=[Settle(held[0].id, held[0].token, COMPLETED)], slots=3)
        assert ids(answer.running) == made[1:2]

    @scenario
    async def test_a_job_begun_under_a_rate_limit_uses_a_permit(self, lab: Lab) -> None:
        made = await lab.put_many(3)
        worker = await lab.worker()
        held = await worker.hold(2)
        await lab.worker("w2", tasks=(TaskSpec("work", rate_limit="1/h"),))
        answer = await worker.exchange(begin=[own(job) for job in held], slots=2)
        assert answer.begun == (Begun.BEGUN, Begun.OUTRANKED)
        assert answer.running == ()
        assert answer.next_due_s == pytest.approx(3_600, abs=1)
        assert await lab.statuses(made) == [Status.RUNNING, Status.PENDING, Status.PENDING]


class TestSlotsLeft:
    """A job that is not begun leaves its slot to the claim of the same exchange."""

    @scenario
    async def test_the_slot_of_an_outranked_job_is_given_beyond_the_slots_asked_for(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        urgent = await lab.put_many(4, priority=0)
        answer = await worker.exchange(begin=[own(held)], slots=2)
        assert (answer.begun, ids(answer.running)) == ((Begun.OUTRANKED,), urgent[:3])

    @scenario
    async def test_the_slot_of_a_lost_job_too_though_none_was_asked_for(self, lab: Lab) -> None:
        made = await lab.put_many(3)
        worker, thief = await lab.worker("w1"), await lab.worker("w2")
        held = await worker.hold_one()
        await thief.transfer(held)
        answer = await worker.exchange(begin=[own(held)], extra=1)
        assert answer.begun == (Begun.LOST,)
        assert (ids(answer.running), ids(answer.held)) == (made[1:2], made[2:])

    @scenario
    async def test_a_job_that_begins_leaves_none(self, lab: Lab) -> None:
        made = await lab.put_many(3)
        worker = await lab.worker()
        held = await worker.hold_one()
        answer = await worker.exchange(begin=[own(held)], extra=1)
        assert (answer.begun, answer.running, ids(answer.held)) == ((Begun.BEGUN,), (), made[1:2])

    @scenario
    async def test_a_job_given_back_may_come_again_under_a_new_token(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        urgent = await lab.put(priority=0)
        answer = await worker.exchange(begin=[own(held)], slots=1)
        assert (answer.begun, ids(answer.running)) == ((Begun.OUTRANKED,), [urgent, held.id])
        assert answer.running[1].token > held.token

    @scenario
    async def test_a_repeated_request_does_not_give_it_twice(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        urgent = await lab.put_many(2, priority=0)
        request = worker.request(begin=[own(held)])
        first, again = await worker.send(request), await worker.send(request)
        assert ids(first.running) == urgent[:1]
        assert again.running == first.running
        assert await lab.status(urgent[1]) is Status.PENDING

    @scenario
    async def test_reserves_hold_for_it(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        high = await lab.put_many(3, priority=1)
        answer = await worker.exchange(begin=[own(held)], slots=1, reserve=(1, 0, 0, 0))
        assert (answer.begun, ids(answer.running)) == ((Begun.OUTRANKED,), high[:1])

    @scenario
    async def test_one_that_finds_nothing_for_it_waits_for_work(self, lab: Lab) -> None:
        await lab.put()
        worker, thief = await lab.worker("w1"), await lab.worker("w2")
        held = await worker.hold_one()
        await thief.transfer(held)
        assert (await worker.exchange(begin=[own(held)])).begun == (Begun.LOST,)
        await lab.put()
        assert await worker.storage.wait_for_work(worker.ref, WAIT_S)

    @scenario
    async def test_one_that_wants_held_jobs_only_does_not_wait_and_one_with_slots_is_woken(
        self, lab: Lab
    ) -> None:
        full, idle = await lab.worker("w1"), await lab.worker("w2")
        assert (await full.exchange(extra=2)).held == ()
        assert await idle.claim(1) == []
        await lab.put()
        assert await idle.storage.wait_for_work(idle.ref, WAIT_S)

    @scenario
    async def test_of_a_fenced_worker_nothing_is_left_to_give(self, lab: Lab) -> None:
        await lab.put_many(2)
        older = await lab.worker("w1")
        held = await older.hold_one()
        await lab.worker("w1")
        answer = await older.exchange(begin=[own(held)])
        assert (answer.begun, answer.running) == ((Begun.LOST,), ())


class TestSlotAndHops:
    """What every answer that gives jobs tells of them."""

    @scenario
    async def test_a_job_comes_with_the_slot_of_its_key(self, lab: Lab) -> None:
        await lab.enqueue(new_job(affinity_key="user:7"), new_job(), new_job(affinity_key="user:8"))
        slots = [slot_of("user:7"), None, slot_of("user:8")]
        worker, thief, taker = await lab.worker("w1"), await lab.worker("w2"), await lab.worker("w3")
        request = worker.request(slots=1, extra=2)
        answer = await worker.send(request)
        given = (*answer.running, *answer.held)
        assert [(job.slot, job.hops) for job in given] == [(slot, 0) for slot in slots]
        assert await worker.send(request) == answer
        moved = await thief.transfer(*answer.held)
        assert [(job.slot, job.hops) for job in moved] == [(slot, 1) for slot in slots[1:]]
        lab.clock.advance(HELD_TAKEABLE_AFTER_S + 0.01)
        taken = (await taker.take_held(2)).running
        assert [(job.slot, job.hops) for job in taken] == [(slot, 2) for slot in slots[1:]]

    @scenario
    async def test_hops_are_those_of_the_present_claim(self, lab: Lab) -> None:
        await lab.put(affinity_key="k", expires_in=50)
        worker, thief = await lab.worker("w1"), await lab.worker("w2")
        (moved,) = await thief.transfer(await worker.hold_one())
        await thief.release(moved)
        again = await worker.claim_one()
        assert (moved.hops, again.hops, again.slot) == (1, 0, slot_of("k"))

    @pytest.mark.parametrize("slot", [0, 4_095])
    @scenario
    async def test_the_first_and_the_last_slot_are_slots_like_others(self, lab: Lab, slot: int) -> None:
        await lab.enqueue(msgspec.structs.replace(new_job(), slot=slot))
        assert (await (await lab.worker()).claim_one()).slot == slot

    @scenario
    async def test_a_retry_keeps_it(self, lab: Lab) -> None:
        await lab.put(affinity_key="k", delay=1)
        worker = await lab.worker()
        lab.clock.advance(1)
        await worker.settle(await worker.claim_one(), retry(1))
        lab.clock.advance(1)
        again = await worker.claim_one()
        assert (again.attempts, again.slot) == (1, slot_of("k"))
