"""Owned jobs on the move: release, transfer, take_held, progress."""

from __future__ import annotations

import asyncio

import pytest

from fluxmesh.ids import new_job_id
from fluxmesh.job import Status
from fluxmesh.storage.values import (
    HELD_TAKEABLE_AFTER_S,
    MAX_HOPS,
    PARK_CAP,
    Begun,
    Owned,
    Settle,
    Settled,
    TakeAnswer,
    TaskSpec,
)
from fluxmesh.testing.contract.lab import COMPLETED, INTERRUPTED, LEASE_S, Lab, ids, scenario

TAKEABLE_S = HELD_TAKEABLE_AFTER_S + 0.01


class TestRelease:
    @scenario
    async def test_released_jobs_are_back_in_their_old_places_and_nothing_is_charged(self, lab: Lab) -> None:
        made = await lab.put_many(4)
        worker = await lab.worker()
        answer = await worker.exchange(slots=1, extra=2)
        assert await worker.release(*answer.running, *answer.held) == [True] * 3
        again = await worker.claim(4)
        assert ids(again) == made
        assert {(job.attempts, job.crashes, job.interruptions, job.life) for job in again} == {(0, 0, 0, 1)}

    @scenario
    async def test_a_released_job_has_a_new_token_and_the_old_one_is_worth_nothing(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        old = await worker.claim_one()
        await worker.release(old)
        free = await lab.job(old.id)
        assert (free.status, free.worker_id) == (Status.PENDING, None)
        assert free.token > old.token
        assert await worker.release(old) == [False]
        assert await worker.settle(old) is Settled.STALE
        new = await worker.claim_one()
        assert new.token > free.token

    @scenario
    async def test_only_the_owner_releases_and_each_item_is_answered_by_itself(self, lab: Lab) -> None:
        await lab.put_many(2)
        one, two = await lab.worker("w1"), await lab.worker("w2")
        mine, others = await one.claim_one(), await two.claim_one()
        wrong = [Owned(others.id, others.token), Owned(mine.id, mine.token - 1), Owned(new_job_id(), 1)]
        answers = await lab.storage.release(one.ref, [*wrong, Owned(mine.id, mine.token)])
        assert answers == [False, False, False, True]
        assert await lab.status(others.id) is Status.RUNNING

    @scenario
    async def test_a_release_while_the_cancel_flag_stands_is_a_cancel(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        job = await worker.claim_one()
        await lab.storage.cancel([job.id])
        assert await worker.release(job) == [True]
        assert await lab.status(job.id) is Status.CANCELLED


class TestTransfer:
    @scenario
    async def test_a_held_job_becomes_the_thiefs_under_a_new_token(self, lab: Lab) -> None:
        await lab.put()
        owner, thief = await lab.worker("w1"), await lab.worker("w2")
        held = await owner.hold_one()
        (moved,) = await thief.transfer(held)
        assert moved.id == held.id
        assert moved.token > held.token
        job = await lab.job(held.id)
        assert (job.status, job.worker_id, job.token) == (Status.CLAIMED, "w2", moved.token)
        assert await owner.begin(held) == [Begun.LOST]
        assert await thief.begin(moved) == [Begun.BEGUN]

    @scenario
    async def test_a_transferred_job_keeps_its_old_place(self, lab: Lab) -> None:
        made = await lab.put_many(2)
        owner, thief = await lab.worker("w1"), await lab.worker("w2")
        (moved,) = await thief.transfer(await owner.hold_one())
        await thief.release(moved)
        assert ids(await owner.claim(2)) == made

    @scenario
    async def test_running_unheld_unknown_and_stale_ones_do_not_move(self, lab: Lab) -> None:
        await lab.put_many(3)
        owner, thief = await lab.worker("w1"), await lab.worker("w2")
        answer = await owner.exchange(slots=1, extra=1)
        (running,), (held,) = answer.running, answer.held
        wrong = [Owned(running.id, running.token), Owned(held.id, held.token - 1), Owned(new_job_id(), 1)]
        assert await lab.storage.transfer(thief.ref, wrong) == []
        assert await lab.statuses([running.id, held.id]) == [Status.RUNNING, Status.CLAIMED]

    @scenario
    async def test_of_two_thieves_at_once_one_gets_the_job(self, lab: Lab) -> None:
        await lab.put()
        owner = await lab.worker("w1")
        held = await owner.hold_one()
        thieves = [await lab.worker(f"t{n}", storage=await lab.open()) for n in range(4)]
        moved = await asyncio.gather(*(thief.transfer(held) for thief in thieves))
        assert sorted(len(jobs) for jobs in moved) == [0, 0, 0, 1]

    @pytest.mark.parametrize("why", ["fenced", "dead", "unknown"])
    @scenario
    async def test_a_thief_must_be_of_good_standing(self, lab: Lab, why: str) -> None:
        await lab.put()
        owner, thief = await lab.worker("w1"), await lab.worker("w2")
        held = await owner.hold_one()
        if why == "fenced":
            await lab.worker("w2")
        elif why == "dead":
            await lab.storage.declare_dead(thief.ref, "killed")
        else:
            lab.backend.forget_worker(thief.ref)
        assert await thief.transfer(held) == []
        assert await owner.begin(held) == [Begun.BEGUN]

    @scenario
    async def test_a_job_is_moved_twice_at_most(self, lab: Lab) -> None:
        """D28."""
        await lab.put()
        workers = [await lab.worker(f"w{n}") for n in range(MAX_HOPS + 2)]
        held = await workers[0].hold_one()
        for thief in workers[1 : MAX_HOPS + 1]:
            (held,) = await thief.transfer(held)
        assert await workers[-1].transfer(held) == []
        lab.clock.advance(TAKEABLE_S)
        assert (await workers[-1].take_held()).running == ()
        assert await workers[MAX_HOPS].begin(held) == [Begun.BEGUN]


class TestTakeHeld:
    @scenario
    async def test_what_was_held_for_a_while_can_be_taken_and_runs_at_once(self, lab: Lab) -> None:
        await lab.put()
        owner, idle = await lab.worker("w1"), await lab.worker("w2", storage=await lab.open())
        held = await owner.hold_one()
        early = await idle.take_held()
        assert early.running == ()
        assert early.next_held_s == pytest.approx(HELD_TAKEABLE_AFTER_S, abs=0.005)
        lab.clock.advance(TAKEABLE_S)
        (taken,) = (await idle.take_held()).running
        assert taken.id == held.id
        assert taken.token > held.token
        job = await lab.job(held.id)
        assert (job.status, job.worker_id) == (Status.RUNNING, "w2")
        assert await owner.begin(held) == [Begun.LOST]
        assert await idle.settle(taken) is Settled.APPLIED

    @scenario
    async def test_a_claim_that_finds_nothing_tells_when_a_held_job_may_be_taken(self, lab: Lab) -> None:
        await lab.put()
        owner, idle = await lab.worker("w1"), await lab.worker("w2")
        assert (await idle.exchange(begin=[])).next_held_s is None
        await owner.hold_one()
        lab.clock.advance(0.04)
        answer = await idle.exchange(slots=1)
        assert answer.next_held_s == pytest.approx(HELD_TAKEABLE_AFTER_S - 0.04, abs=0.005)

    @scenario
    async def test_a_running_job_is_never_taken(self, lab: Lab) -> None:
        await lab.put_many(2)
        owner, idle = await lab.worker("w1"), await lab.worker("w2")
        answer = await owner.exchange(slots=1, extra=1)
        await owner.begin(*answer.held)
        lab.clock.advance(5)
        taken = await idle.take_held(5)
        assert (taken.running, taken.next_held_s) == ((), None)

    @scenario
    async def test_nobody_takes_from_itself_or_from_one_that_does_not_donate(self, lab: Lab) -> None:
        await lab.put_many(2)
        keeps, gives = await lab.worker("w1", donates=False), await lab.worker("w2")
        await keeps.hold_one()
        mine = await gives.hold_one()
        lab.clock.advance(TAKEABLE_S)
        assert (await gives.take_held(5)).running == ()
        idle = await lab.worker("w3")
        assert ids((await idle.take_held(5)).running) == [mine.id]

    @scenario
    async def test_only_what_the_worker_can_run_is_taken(self, lab: Lab) -> None:
        await lab.put("work")
        await lab.put("alien")
        await lab.put("work", queue="other")
        await lab.put("work", priority=3)
        owner = await lab.worker("w1", tasks=("work", "alien"), queues=("default", "other"))
        assert len(await owner.hold(4)) == 4
        lab.clock.advance(TAKEABLE_S)
        idle = await lab.worker("w2", tiers=(0, 1, 2))
        (taken,) = (await idle.take_held(9)).running
        assert (taken.task, taken.queue, taken.tier) == ("work", "default", 2)

    @scenario
    async def test_the_best_tier_and_the_oldest_is_taken_first(self, lab: Lab) -> None:
        owner, idle = await lab.worker("w1"), await lab.worker("w2")
        order = []
        for tier in (2, 2, 1):
            order.append(await lab.put(priority=tier))
            await owner.hold_one()
            lab.clock.advance(0.01)
        lab.clock.advance(TAKEABLE_S)
        taken = [ids((await idle.take_held(1)).running)[0] for _ in order]
        assert taken == [order[2], order[0], order[1]]

    @scenario
    async def test_no_more_are_taken_than_there_are_slots(self, lab: Lab) -> None:
        await lab.put_many(5)
        owner, idle = await lab.worker("w1"), await lab.worker("w2")
        await owner.hold(5)
        lab.clock.advance(TAKEABLE_S)
        assert len((await idle.take_held(2)).running) == 2
        assert (await lab.storage.counts()).queued == {("default", 2): 3}

    @scenario
    async def test_nothing_is_taken_below_a_ready_job_of_a_higher_tier(self, lab: Lab) -> None:
        """D30."""
        owner, idle = await lab.worker("w1"), await lab.worker("w2")
        await lab.put(priority=2)
        held = await owner.hold_one()
        urgent = await lab.put(priority=1)
        lab.clock.advance(TAKEABLE_S)
        assert (await idle.take_held()).running == ()
        assert ids(await idle.claim(1)) == [urgent]
        assert ids((await idle.take_held()).running) == [held.id]

    @scenario
    async def test_nothing_is_taken_if_the_look_at_higher_tiers_was_cut_short_by_parking(
        self, lab: Lab
    ) -> None:
        owner, idle = await lab.worker("w1"), await lab.worker("w2")
        await lab.put(priority=2)
        held = await owner.hold_one()
        await lab.put_many(PARK_CAP, "alien", priority=1)
        urgent = await lab.put(priority=1)
        lab.clock.advance(TAKEABLE_S)
        assert (await idle.take_held()).running == ()
        assert ids(await idle.claim(1)) == [urgent]
        assert ids((await idle.take_held()).running) == [held.id]

    @scenario
    async def test_one_whose_lease_has_lapsed_takes_nothing_by_either_way(self, lab: Lab) -> None:
        """What it took would be taken from it at once."""
        await lab.put_many(2)
        owner, silent = await lab.worker("w1"), await lab.worker("w2")
        held = await owner.hold(2)
        await lab.pass_time(LEASE_S + 0.1, owner)
        assert (await silent.take_held(2)).running == ()
        assert await silent.transfer(*held) == []
        await silent.beat()
        assert len(await silent.transfer(held[0])) == len((await silent.take_held(1)).running) == 1

    @scenario
    async def test_a_paused_queue_gives_nothing_to_take(self, lab: Lab) -> None:
        await lab.put()
        owner, idle = await lab.worker("w1"), await lab.worker("w2")
        await owner.hold_one()
        await lab.storage.pause("default")
        lab.clock.advance(TAKEABLE_S)
        assert (await idle.take_held()).running == ()

    @scenario
    async def test_an_expired_job_is_not_taken(self, lab: Lab) -> None:
        await lab.put(expires_in=1)
        owner, idle = await lab.worker("w1"), await lab.worker("w2")
        held = await owner.hold_one()
        lab.clock.advance(2)
        assert (await idle.take_held()).running == ()
        assert await lab.status(held.id) is not Status.RUNNING

    @scenario
    async def test_one_without_good_standing_takes_nothing(self, lab: Lab) -> None:
        await lab.put()
        owner, idle = await lab.worker("w1"), await lab.worker("w2")
        await owner.hold_one()
        await lab.worker("w2")
        lab.clock.advance(TAKEABLE_S)
        assert (await idle.take_held()).running == ()

    @scenario
    async def test_a_taken_job_counts_a_hop(self, lab: Lab) -> None:
        await lab.put()
        one, two, three, four = [await lab.worker(f"w{n}") for n in range(4)]
        (moved,) = await two.transfer(await one.hold_one())
        (moved,) = await three.transfer(moved)
        lab.clock.advance(TAKEABLE_S)
        assert (await four.take_held()).running == ()
        assert await three.begin(moved) == [Begun.BEGUN]

    @scenario
    async def test_of_many_that_take_at_once_each_job_goes_to_one(self, lab: Lab) -> None:
        made = await lab.put_many(12)
        owner = await lab.worker("w1")
        assert len(await owner.hold(12)) == 12
        lab.clock.advance(TAKEABLE_S)
        idle = [await lab.worker(f"i{n}", storage=await lab.open()) for n in range(5)]
        answers = await asyncio.gather(*(worker.take_held(3) for worker in idle))
        taken = [job.id for answer in answers for job in answer.running]
        assert sorted(taken) == sorted(made)

    @scenario
    async def test_nobody_is_told_to_come_for_a_job_whose_task_was_limited_since(self, lab: Lab) -> None:
        """It would come again and again, and go with nothing."""
        await lab.put()
        owner = await lab.worker("w1")
        await owner.hold_one()
        idle = await lab.worker("w2", tasks=(TaskSpec("work", rate_limit="1/h"),))
        lab.clock.advance(TAKEABLE_S)
        assert (await idle.exchange(slots=1)).next_held_s is None
        assert await idle.take_held() == TakeAnswer()

    @scenario
    async def test_a_job_whose_task_was_limited_since_is_not_taken_beyond_its_limit(self, lab: Lab) -> None:
        """It was held before any registration limited it."""
        made = await lab.put_many(2)
        owner = await lab.worker("w1")
        await owner.hold(2)
        idle = await lab.worker("w2", tasks=(TaskSpec("work", max_concurrent=1),))
        lab.clock.advance(TAKEABLE_S)
        assert len((await idle.take_held(2)).running) <= 1
        assert (await lab.statuses(made)).count(Status.RUNNING) <= 1


class TestProgress:
    @scenario
    async def test_the_last_progress_of_an_owned_job_is_kept(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        job = await worker.claim_one()
        assert await worker.note(job, percent=10.0, message="read")
        assert await worker.note(job, percent=60.0, message="half")
        shown = await lab.job(job.id)
        assert (shown.progress, shown.progress_message, shown.token) == (60.0, "half", job.token)

    @scenario
    async def test_progress_of_what_is_not_owned_is_refused_and_changes_nothing(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        job = await worker.claim_one()
        await worker.release(job)
        assert not await worker.note(job, percent=50.0)
        again = await worker.claim_one()
        assert not await worker.note(job, percent=50.0)
        assert (await lab.job(again.id)).progress == 0.0

    @scenario
    async def test_a_settle_brings_the_last_progress_with_it(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        job = await worker.claim_one()
        await worker.exchange(settle=[Settle(job.id, job.token, INTERRUPTED, 30.0, "so far")])
        shown = await lab.job(job.id)
        assert (shown.progress, shown.progress_message) == (30.0, "so far")

    @scenario
    async def test_a_completed_job_shows_a_hundred_percent(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        await worker.settle(await worker.claim_one(), COMPLETED)
        (job,) = await lab.everything()
        assert job.progress == 100.0
