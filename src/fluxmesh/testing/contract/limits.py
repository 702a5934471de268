"""What may not run now: parking, limits, paused queues, jobs that expire."""

from __future__ import annotations

import pytest

from fluxmesh.job import Status
from fluxmesh.storage.values import PARK_CAP, Begun, Settle, Settled, TaskSpec
from fluxmesh.testing.contract.lab import (
    CRASHED,
    INTERRUPTED,
    Lab,
    Puppet,
    dead,
    ids,
    own,
    retry,
    scenario,
    snooze,
)


async def running_of(lab: Lab, job_ids: list[str]) -> int:
    return (await lab.statuses(job_ids)).count(Status.RUNNING)


class TestParking:
    @scenario
    async def test_a_job_of_an_unknown_task_is_set_aside_and_says_so(self, lab: Lab) -> None:
        alien, mine = await lab.put("alien"), await lab.put()
        assert ids(await (await lab.worker()).claim(5)) == [mine]
        job = await lab.job(alien)
        assert (job.status, job.waiting_for is not None) == (Status.PENDING, True)
        (stats,) = await lab.storage.queue_stats()
        assert (stats.parked, stats.queued, stats.running) == (1, (0, 0, 1, 0), 1)
        assert (await lab.storage.counts()).queued == {("default", 2): 1}

    @scenario
    async def test_a_worker_that_knows_the_task_drains_the_parked_in_arrival_order(self, lab: Lab) -> None:
        made = [await lab.put(task) for task in ("alien", "work", "alien", "work", "alien", "work")]
        ordinary = await lab.worker("w1")
        mine = await ordinary.claim(5)
        assert ids(mine) == made[1::2]
        await ordinary.release(*mine)
        late = await lab.put("alien")
        able = await lab.worker("w2", tasks=("work", "alien"))
        assert ids(await able.claim(3)) + ids(await able.claim(9)) == [*made, late]

    @scenario
    async def test_a_given_job_waits_for_nothing(self, lab: Lab) -> None:
        alien = await lab.put("alien")
        await (await lab.worker("w1")).claim(1)
        await (await lab.worker("w2", tasks=("alien",))).claim(1)
        assert (await lab.job(alien)).waiting_for is None

    @scenario
    async def test_a_thousand_are_parked_a_call_and_nothing_lower_is_given_before_the_rest(
        self, lab: Lab
    ) -> None:
        await lab.put_many(PARK_CAP + 500, "alien", priority=0)
        mine = await lab.put(priority=2)
        worker = await lab.worker()
        first = await worker.exchange(slots=1, extra=1)
        assert (first.running, first.held, first.more) == ((), (), True)
        (stats,) = await lab.storage.queue_stats()
        assert stats.parked == PARK_CAP
        second = await worker.exchange(slots=1)
        assert (ids(second.running), second.more) == ([mine], False)
        (stats,) = await lab.storage.queue_stats()
        assert stats.parked == PARK_CAP + 500

    @scenario
    async def test_a_parked_job_can_be_held_and_begun(self, lab: Lab) -> None:
        alien = await lab.put("alien")
        await (await lab.worker("w1")).claim(1)
        able = await lab.worker("w2", tasks=("alien",))
        held = await able.hold_one()
        assert (held.id, await able.begin(held)) == (alien, [Begun.BEGUN])

    @scenario
    async def test_a_worker_knows_only_the_tasks_of_its_last_registration(self, lab: Lab) -> None:
        await lab.put("rare")
        await lab.worker("w1", tasks=("rare",))
        assert await (await lab.worker("w1", tasks=("work",))).claim(1) == []
        assert len(await (await lab.worker("w1", tasks=("work", "rare"))).claim(1)) == 1


class TestRateLimit:
    @scenario
    async def test_a_rate_gives_its_burst_then_one_per_interval(self, lab: Lab) -> None:
        made = await lab.put_many(6)
        worker = await lab.worker(tasks=(TaskSpec("work", rate_limit="2/s"),))
        first = await worker.exchange(slots=5)
        assert ids(first.running) == made[:2]
        assert first.next_due_s == pytest.approx(0.5, abs=0.01)
        lab.clock.advance(0.4)
        assert await worker.claim(5) == []
        lab.clock.advance(0.11)
        assert ids(await worker.claim(5)) == [made[2]]
        lab.clock.advance(60)
        assert ids(await worker.claim(5)) == made[3:5]

    @scenario
    async def test_a_rate_is_one_for_the_whole_fleet(self, lab: Lab) -> None:
        await lab.put_many(6)
        spec = TaskSpec("work", rate_limit="3/m")
        one = await lab.worker("w1", tasks=(spec,))
        two = await lab.worker("w2", tasks=(spec,), storage=await lab.open())
        assert [len(await one.claim(2)), len(await two.claim(2)), len(await one.claim(2))] == [2, 1, 0]

    @scenario
    async def test_a_rate_of_one_task_does_not_hold_up_another(self, lab: Lab) -> None:
        await lab.put_many(3, "slow", priority=0)
        other = await lab.put("work", priority=3)
        worker = await lab.worker(tasks=("work", TaskSpec("slow", rate_limit="1/h")))
        given = await worker.claim(3)
        assert [job.task for job in given] == ["slow", "work"]
        assert given[1].id == other

    @scenario
    async def test_a_rate_limited_job_is_never_held(self, lab: Lab) -> None:
        limited, plain = await lab.put("slow"), await lab.put("work")
        worker = await lab.worker(tasks=("work", TaskSpec("slow", rate_limit="9/s")))
        assert ids(await worker.hold(5)) == [plain]
        assert ids(await worker.claim(1)) == [limited]

    @scenario
    async def test_a_waiting_job_says_what_it_waits_for(self, lab: Lab) -> None:
        made = await lab.put_many(2)
        await (await lab.worker(tasks=(TaskSpec("work", rate_limit="1/h"),))).claim(2)
        waiting = await lab.job(made[1])
        assert (waiting.status, waiting.waiting_for is not None) == (Status.PENDING, True)


LIMITED = TaskSpec("work", max_concurrent=2)
FREE_A_PERMIT = ("complete", "retry", "dead", "snooze", "interrupt", "release", "reap")


async def free_permit(lab: Lab, worker: Puppet, how: str) -> None:
    """End, in this way, one of the running jobs of the worker."""
    job = worker.given[next(iter(worker.owned))]
    ends = {"retry": retry(600), "dead": dead(), "snooze": snooze(600), "interrupt": INTERRUPTED}
    if how == "release":
        assert await worker.release(job) == [True]
    elif how == "reap":
        await lab.storage.declare_dead(worker.ref, "killed")
        assert job.id in await lab.reap_all(CRASHED)
    elif how == "complete":
        await worker.complete(job)
    else:
        assert await worker.settle(job, ends[how]) is Settled.APPLIED


class TestMaxConcurrent:
    @scenario
    async def test_no_more_run_than_the_task_allows(self, lab: Lab) -> None:
        made = await lab.put_many(5)
        one = await lab.worker("w1", tasks=(LIMITED,))
        two = await lab.worker("w2", tasks=(LIMITED,), storage=await lab.open())
        assert ids(await one.claim(1)) + ids(await two.claim(5)) + ids(await one.claim(5)) == made[:2]
        assert await running_of(lab, made) == 2

    @pytest.mark.parametrize("how", FREE_A_PERMIT)
    @scenario
    async def test_every_end_of_a_run_frees_its_permit(self, lab: Lab, how: str) -> None:
        made = await lab.put_many(5)
        one, two = await lab.worker("w1", tasks=(LIMITED,)), await lab.worker("w2", tasks=(LIMITED,))
        assert len(await one.claim(5)) == 2
        await free_permit(lab, one, how)
        free = 2 if how == "reap" else 1
        assert len(await two.claim(5)) == free
        assert await running_of(lab, made) == 2

    @scenario
    async def test_the_waiting_are_drained_in_arrival_order(self, lab: Lab) -> None:
        made = await lab.put_many(4)
        worker = await lab.worker(tasks=(TaskSpec("work", max_concurrent=1),))
        given = []
        for _ in made:
            job = await worker.claim_one()
            given.append(job.id)
            await worker.complete(job)
        assert given == made

    @scenario
    async def test_a_limited_job_is_never_held(self, lab: Lab) -> None:
        await lab.put_many(3)
        worker = await lab.worker(tasks=(LIMITED,))
        answer = await worker.exchange(slots=1, extra=3)
        assert (len(answer.running), len(answer.held)) == (1, 0)

    @scenario
    async def test_the_newest_registration_sets_the_limit(self, lab: Lab) -> None:
        made = await lab.put_many(6)
        one = await lab.worker("w1", tasks=(TaskSpec("work", max_concurrent=1),))
        assert len(await one.claim(6)) == 1
        two = await lab.worker("w2", tasks=(TaskSpec("work", max_concurrent=3),))
        assert len(await two.claim(6)) + len(await one.claim(6)) == 2
        three = await lab.worker("w3", tasks=("work",))
        assert len(await three.claim(6)) == 3
        assert await running_of(lab, made) == 6

    @scenario
    async def test_the_limited_do_not_hold_up_a_lower_tier(self, lab: Lab) -> None:
        await lab.put_many(3, "solo", priority=0)
        low = await lab.put("work", priority=3)
        worker = await lab.worker(tasks=("work", TaskSpec("solo", max_concurrent=1)))
        assert [job.task for job in await worker.claim(4)] == ["solo", "work"]
        assert await lab.status(low) is Status.RUNNING


class TestConcurrencyKey:
    @scenario
    async def test_no_more_run_with_a_key_than_its_limit(self, lab: Lab) -> None:
        """C04's key: one at a time, over queues and workers."""
        first = await lab.put(concurrency_key="acct-7")
        second = await lab.put(concurrency_key="acct-7", queue="other")
        third = await lab.put(concurrency_key="acct-8")
        queues = ("default", "other")
        one = await lab.worker("w1", queues=queues)
        two = await lab.worker("w2", queues=queues, storage=await lab.open())
        given = [*ids(await one.claim(5)), *ids(await two.claim(5))]
        assert sorted(given) in (sorted([first, third]), sorted([second, third]))

    @scenario
    async def test_a_limit_above_one_is_kept_too(self, lab: Lab) -> None:
        made = await lab.put_many(5, concurrency_key="k", concurrency_limit=3)
        worker = await lab.worker()
        given = await worker.claim(5)
        assert ids(given) == made[:3]
        await worker.complete(given[1])
        assert ids(await worker.claim(5)) == [made[3]]

    @pytest.mark.parametrize("how", FREE_A_PERMIT)
    @scenario
    async def test_every_end_of_a_run_frees_the_key(self, lab: Lab, how: str) -> None:
        made = await lab.put_many(3, concurrency_key="k")
        one, two = await lab.worker("w1"), await lab.worker("w2")
        (given,) = await one.claim(5)
        assert await two.claim(5) == []
        await free_permit(lab, one, how)
        back = how in ("release", "interrupt", "reap")
        assert ids(await two.claim(5)) == [given.id if back else made[1]]

    @scenario
    async def test_the_waiting_of_a_key_are_drained_in_arrival_order(self, lab: Lab) -> None:
        made = [await lab.put(task, concurrency_key="k") for task in ("work", "mail", "work", "mail")]
        worker = await lab.worker(tasks=("work", "mail"))
        given = []
        for _ in made:
            (job,) = await worker.claim(4)
            given.append(job.id)
            await worker.complete(job)
        assert given == made

    @scenario
    async def test_a_keyed_job_is_never_held(self, lab: Lab) -> None:
        await lab.put(concurrency_key="k")
        assert await (await lab.worker()).hold(2) == []

    @scenario
    async def test_a_job_with_two_limits_needs_both_permits(self, lab: Lab) -> None:
        await lab.put_many(2, concurrency_key="a")
        await lab.put_many(2, concurrency_key="b")
        worker = await lab.worker(tasks=(LIMITED,))
        given = await worker.claim(9)
        assert [(await lab.job(job.id)).concurrency_key for job in given] == ["a", "b"]
        await worker.complete(given[0])
        (freed,) = await worker.claim(9)
        assert (await lab.job(freed.id)).concurrency_key == "a"

    @scenario
    async def test_a_parked_job_of_a_closed_key_does_not_outrank(self, lab: Lab) -> None:
        await lab.put_many(2, concurrency_key="k", priority=0)
        await lab.put(priority=2)
        worker = await lab.worker()
        await worker.claim_one()
        (held,) = await worker.hold(1)
        assert await worker.begin(held) == [Begun.BEGUN]

    @scenario
    async def test_a_settle_lets_the_waiting_of_its_key_be_claimed_in_the_same_exchange(
        self, lab: Lab
    ) -> None:
        """Else a lower tier would be started before it."""
        made = await lab.put_many(2, concurrency_key="k", priority=0)
        low = await lab.put(priority=3)
        worker = await lab.worker()
        (first,) = await worker.claim(1)
        (held,) = await worker.hold(1)
        assert held.id == low
        settle = [Settle(first.id, first.token, dead())]
        answer = await worker.exchange(settle=settle, begin=[own(held)], slots=1)
        assert (answer.begun, ids(answer.running)) == ((Begun.OUTRANKED,), [made[1], low])

    @scenario
    async def test_cancelling_a_waiting_job_leaves_the_others_their_turn(self, lab: Lab) -> None:
        made = await lab.put_many(3, concurrency_key="k")
        worker = await lab.worker()
        (first,) = await worker.claim(3)
        await lab.storage.cancel([made[1]])
        await worker.complete(first)
        assert ids(await worker.claim(3)) == [made[2]]


class TestPausedQueues:
    @scenario
    async def test_pause_and_resume_tell_whether_they_changed_anything(self, lab: Lab) -> None:
        storage = lab.storage
        answers = [await storage.pause("q"), await storage.pause("q"), await storage.resume("q")]
        assert [*answers, await storage.resume("q")] == [True, False, True, False]

    @scenario
    async def test_a_paused_queue_takes_jobs_and_gives_none(self, lab: Lab) -> None:
        await lab.storage.pause("shut")
        waiting = await lab.put(queue="shut", priority=0)
        mine = await lab.put(priority=3)
        worker = await lab.worker(queues=("shut", "default"))
        assert ids(await worker.claim(5)) == [mine]
        assert await worker.hold(5) == []
        (shut,) = [stats for stats in await lab.storage.queue_stats() if stats.queue == "shut"]
        assert (shut.paused, shut.queued) == (True, (1, 0, 0, 0))
        await lab.storage.resume("shut")
        assert ids(await worker.claim(5)) == [waiting]

    @scenario
    async def test_pausing_gives_back_what_is_held_and_lets_run_what_runs(self, lab: Lab) -> None:
        running_id, held_id = await lab.put_many(2)
        worker = await lab.worker()
        answer = await worker.exchange(slots=1, extra=1)
        (running,), (held,) = answer.running, answer.held
        await lab.storage.pause("default")
        assert await lab.statuses([running_id, held_id]) == [Status.RUNNING, Status.PENDING]
        assert await worker.begin(held) != [Begun.BEGUN]
        assert await worker.settle(running) is Settled.APPLIED
        await lab.storage.resume("default")
        assert ids(await worker.claim(2)) == [held_id]

    @scenario
    async def test_a_job_that_comes_back_to_a_paused_queue_stays_there(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        job = await worker.claim_one()
        await lab.storage.pause("default")
        await worker.settle(job, INTERRUPTED)
        assert await worker.claim(1) == []
        await lab.storage.resume("default")
        assert ids(await worker.claim(1)) == [job.id]


class TestExpiry:
    @scenario
    async def test_a_job_that_was_not_started_in_time_is_never_given(self, lab: Lab) -> None:
        stale, fresh = await lab.put(expires_in=10), await lab.put(expires_in=30)
        worker = await lab.worker()
        lab.clock.advance(10.1)
        assert ids(await worker.claim(5)) == [fresh]
        job = await lab.job(stale)
        assert (job.status, job.started_at) == (Status.EXPIRED, None)
        assert job.completed_at is not None

    @scenario
    async def test_promote_expires_what_nobody_claims(self, lab: Lab) -> None:
        made = [await lab.put(expires_in=10, **more) for more in ({}, {"delay": 5}, {"queue": "shut"})]
        parked = await lab.put("alien", expires_in=10)
        await lab.storage.pause("shut")
        worker = await lab.worker(queues=("default",), tiers=(2,))
        first = await worker.claim_one()
        assert first.id == made[0]
        await worker.claim(1)
        lab.clock.advance(10.1)
        await lab.storage.promote(100)
        assert await lab.statuses([*made, parked]) == [Status.RUNNING] + [Status.EXPIRED] * 3

    @scenario
    async def test_a_held_job_that_has_expired_does_not_begin(self, lab: Lab) -> None:
        await lab.put(expires_in=10)
        worker = await lab.worker()
        held = await worker.hold_one()
        lab.clock.advance(10.1)
        assert await worker.begin(held) == [Begun.LOST]
        assert await lab.status(held.id) is Status.EXPIRED

    @scenario
    async def test_a_held_job_given_back_can_still_expire(self, lab: Lab) -> None:
        await lab.put(expires_in=10)
        worker = await lab.worker()
        await worker.release(await worker.hold_one())
        lab.clock.advance(10.1)
        assert await worker.claim(1) == []

    @scenario
    async def test_a_job_that_was_started_does_not_expire_any_more(self, lab: Lab) -> None:
        job_id = await lab.put(expires_in=10)
        worker = await lab.worker()
        await worker.settle(await worker.claim_one(), retry(20))
        lab.clock.advance(21)
        await lab.storage.promote(10)
        assert ids(await worker.claim(1)) == [job_id]

    @scenario
    async def test_a_running_job_does_not_expire(self, lab: Lab) -> None:
        await lab.put(expires_in=10)
        worker = await lab.worker()
        job = await worker.claim_one()
        lab.clock.advance(60)
        await lab.storage.promote(10)
        assert await worker.settle(job) is Settled.APPLIED

    @scenario
    async def test_an_expired_job_does_not_outrank(self, lab: Lab) -> None:
        await lab.put(priority=2)
        worker = await lab.worker()
        held = await worker.hold_one()
        await lab.put(priority=0, expires_in=1)
        lab.clock.advance(2)
        assert (await worker.exchange(begin=[own(held)])).begun == (Begun.BEGUN,)
