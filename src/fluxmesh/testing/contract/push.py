"""Push, not polling: what wakes workers, notices, waiters of a job, and events; and the housekeepers' key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from fluxmesh.errors import InvalidOption
from fluxmesh.events import MAX_EVENT_BYTES, Event
from fluxmesh.job import Status
from fluxmesh.storage.values import HELD_TAKEABLE_AFTER_S, Cancelled
from fluxmesh.testing.contract.lab import INTERRUPTED, WAIT_S, Lab, Puppet, dead, ids, new_job, own, scenario

SHORT_S = 0.05  # long enough for a signal that is already there, short enough to wait for one that is not
T = TypeVar("T")


async def idle_worker(lab: Lab, worker_id: str = "idle", **fields: object) -> Puppet:
    """A worker on a storage of its own whose last claim found nothing."""
    worker = await lab.worker(worker_id, storage=await lab.open(), **fields)  # type: ignore[arg-type]
    assert await worker.claim(1) == []
    # A wake-up may be left over from before; the claim above has made it void.
    await worker.storage.wait_for_work(worker.ref, 0.0)
    return worker


async def is_woken(worker: Puppet, act: Callable[[], Awaitable[object]]) -> bool:
    """Whether a worker that already waits is woken by this."""
    waiting = asyncio.create_task(worker.storage.wait_for_work(worker.ref, WAIT_S))
    await asyncio.sleep(0)
    await act()
    return await waiting


class TestWakeUps:
    @scenario
    async def test_without_work_a_wait_ends_with_false(self, lab: Lab) -> None:
        worker = await idle_worker(lab)
        assert not await worker.storage.wait_for_work(worker.ref, SHORT_S)

    @scenario
    async def test_an_enqueue_wakes_a_waiting_worker(self, lab: Lab) -> None:
        worker = await idle_worker(lab)
        assert await is_woken(worker, lab.put)
        assert len(await worker.claim(1)) == 1

    @scenario
    async def test_a_wake_up_between_the_exchange_and_the_wait_is_not_missed(self, lab: Lab) -> None:
        worker = await idle_worker(lab)
        await lab.put()
        assert await worker.storage.wait_for_work(worker.ref, WAIT_S)

    @scenario
    async def test_as_many_workers_are_woken_as_jobs_arrive(self, lab: Lab) -> None:
        workers = [await idle_worker(lab, f"w{n}") for n in range(3)]
        await lab.enqueue(new_job("work"), new_job("work"), new_job("work"))
        for worker in workers:
            assert await worker.storage.wait_for_work(worker.ref, WAIT_S)

    @scenario
    async def test_each_of_ten_rounds_wakes_again(self, lab: Lab) -> None:
        worker = await idle_worker(lab)
        for _ in range(10):
            assert await is_woken(worker, lab.put)
            await worker.complete(*await worker.claim(5))
            assert await worker.claim(5) == []

    @scenario
    async def test_a_worker_that_cannot_run_the_job_is_not_the_one_that_is_woken(self, lab: Lab) -> None:
        for name, fields in (
            ("a", {"queues": ("other",)}),
            ("b", {"tasks": ("alien",)}),
            ("c", {"tiers": (3,)}),
        ):
            await idle_worker(lab, name, **fields)
        able = await idle_worker(lab, "able")
        assert await is_woken(able, lab.put)

    @scenario
    async def test_a_worker_that_claims_no_more_is_not_the_one_that_is_woken(self, lab: Lab) -> None:
        draining = await idle_worker(lab, "draining")
        quiet = await idle_worker(lab, "quiet")
        await draining.beat(status="draining")
        await lab.storage.command("quiet", "quiet")
        ready = await idle_worker(lab, "ready")
        assert await is_woken(ready, lab.put)
        for asleep in (draining, quiet):
            assert not await asleep.storage.wait_for_work(asleep.ref, SHORT_S)

    @scenario
    async def test_one_that_took_held_jobs_for_all_its_slots_is_not_the_one_that_is_woken(
        self, lab: Lab
    ) -> None:
        """It would sleep through its ring, and the idle one beside it through the job."""
        await lab.put()
        owner = await lab.worker("owner")
        await owner.hold_one()
        full = await idle_worker(lab, "full")
        idle = await idle_worker(lab, "idle")
        lab.clock.advance(HELD_TAKEABLE_AFTER_S + 0.01)
        assert len((await full.take_held(1)).running) == 1
        assert await is_woken(idle, lab.put)
        assert not await full.storage.wait_for_work(full.ref, SHORT_S)

    @scenario
    async def test_one_that_was_woken_and_took_held_jobs_instead_passes_it_on(self, lab: Lab) -> None:
        await lab.put()
        owner = await lab.worker("owner")
        await owner.hold_one()
        full = await idle_worker(lab, "full")
        idle = await idle_worker(lab, "idle")
        lab.clock.advance(HELD_TAKEABLE_AFTER_S + 0.01)
        await lab.put()
        assert await full.storage.wait_for_work(full.ref, WAIT_S)
        assert len((await full.take_held(1)).running) == 1
        assert await idle.storage.wait_for_work(idle.ref, WAIT_S)

    @scenario
    async def test_one_that_leaves_held_jobs_behind_has_another_hear_of_them(self, lab: Lab) -> None:
        """Their owner may not say a word for as long as its running jobs last."""
        owner = await lab.worker("owner")
        first, second = await idle_worker(lab, "first"), await idle_worker(lab, "second")
        await lab.put_many(3)
        await owner.hold(3)
        for worker in (first, second):
            await worker.storage.wait_for_work(worker.ref, SHORT_S)
            assert await worker.claim(1) == []
        lab.clock.advance(HELD_TAKEABLE_AFTER_S + 0.01)
        assert len((await first.take_held(1)).running) == 1
        assert await second.storage.wait_for_work(second.ref, WAIT_S)
        assert len((await second.take_held(1)).running) == 1

    @scenario
    async def test_one_that_took_fewer_held_jobs_than_it_has_slots_still_waits(self, lab: Lab) -> None:
        await lab.put()
        owner = await lab.worker("owner")
        await owner.hold_one()
        worker = await idle_worker(lab)
        lab.clock.advance(HELD_TAKEABLE_AFTER_S + 0.01)
        assert len((await worker.take_held(2)).running) == 1
        assert await is_woken(worker, lab.put)

    @scenario
    async def test_a_delayed_job_that_becomes_the_earliest_wakes(self, lab: Lab) -> None:
        await lab.put(delay=60)
        worker = await idle_worker(lab)
        assert await is_woken(worker, lambda: lab.put(delay=5))
        assert (await worker.exchange(slots=1)).next_due_s == pytest.approx(5, abs=0.01)

    @scenario
    async def test_a_claim_that_leaves_ready_jobs_behind_wakes_one_more(self, lab: Lab) -> None:
        await lab.put_many(3, delay=1)
        first, second = await idle_worker(lab, "w1"), await idle_worker(lab, "w2")
        lab.clock.advance(1)
        assert await is_woken(second, lambda: first.claim(1))
        assert len(await second.claim(1)) == 1

    @pytest.mark.parametrize("how", ["release", "interrupt", "reap", "replay", "resume", "promote", "permit"])
    @scenario
    async def test_whatever_makes_a_job_ready_wakes(self, lab: Lab, how: str) -> None:
        busy = await lab.worker("busy")
        await lab.put(concurrency_key="k" if how == "permit" else None)
        job = await busy.claim_one()
        if how == "promote":
            await lab.put(delay=1)
        if how == "replay":
            await busy.settle(job, dead())
        if how == "permit":
            await lab.put(concurrency_key="k")
        if how == "resume":
            await lab.storage.pause("default")
            await busy.release(job)
        worker = await idle_worker(lab)
        if how == "reap":
            await lab.storage.declare_dead(busy.ref, "killed")
        if how == "promote":
            lab.clock.advance(1)
        acts: dict[str, Callable[[], Awaitable[object]]] = {
            "release": lambda: busy.release(job),
            "interrupt": lambda: busy.settle(job, INTERRUPTED),
            "reap": lab.reap_all,
            "replay": lambda: lab.storage.replay([job.id]),
            "resume": lambda: lab.storage.resume("default"),
            "promote": lambda: lab.storage.promote(10),
            "permit": lambda: busy.settle(job),
        }
        assert await is_woken(worker, acts[how])
        assert len(await worker.claim(1)) == 1

    @scenario
    async def test_an_exchange_that_holds_jobs_wakes_who_may_take_them(self, lab: Lab) -> None:
        await lab.put_many(2, delay=1)
        idle = await idle_worker(lab)
        owner = await lab.worker("owner")
        lab.clock.advance(1)
        assert await is_woken(idle, lambda: owner.exchange(slots=1, extra=1))
        lab.clock.advance(HELD_TAKEABLE_AFTER_S + 0.01)
        assert len((await idle.take_held()).running) == 1

    @scenario
    async def test_a_parked_job_wakes_the_worker_that_knows_its_task(self, lab: Lab) -> None:
        able = await idle_worker(lab, "able", tasks=("rare",))
        await lab.worker("ordinary")
        assert await is_woken(able, lambda: lab.put("rare"))


async def is_noticed(worker: Puppet, act: Callable[[], Awaitable[object]]) -> bool:
    """Whether a worker that already waits for a notice gets one by this."""
    waiting = asyncio.create_task(worker.storage.wait_for_notice(worker.ref, WAIT_S))
    await asyncio.sleep(0)
    await act()
    return await waiting


class TestNotices:
    """What the answer of a beat tells, its worker shall ask for at once."""

    @scenario
    async def test_without_anything_to_tell_a_wait_ends_with_false(self, lab: Lab) -> None:
        worker = await lab.worker(storage=await lab.open())
        await worker.storage.wait_for_notice(worker.ref, 0.0)
        await lab.put()
        await worker.complete(await worker.claim_one())
        assert not await worker.storage.wait_for_notice(worker.ref, SHORT_S)

    @scenario
    async def test_a_cancel_that_is_requested_is_noticed_and_the_next_beat_tells_of_it(
        self, lab: Lab
    ) -> None:
        worker = await lab.worker(storage=await lab.open())
        await lab.put()
        job = await worker.claim_one()
        for _ in range(3):  # each request anew: an earlier notice may have been lost
            assert await is_noticed(worker, lambda: lab.storage.cancel([job.id]))
            assert (await worker.beat()).cancelled == (job.id,)

    @scenario
    async def test_a_notice_between_the_beat_and_the_wait_is_not_missed(self, lab: Lab) -> None:
        worker = await lab.worker(storage=await lab.open())
        await worker.storage.wait_for_notice(worker.ref, 0.0)
        await lab.put()
        job = await worker.claim_one()
        await lab.storage.cancel([job.id])
        assert await worker.storage.wait_for_notice(worker.ref, WAIT_S)
        assert not await worker.storage.wait_for_notice(worker.ref, SHORT_S)

    @scenario
    async def test_of_many_owners_each_is_noticed_and_nobody_else(self, lab: Lab) -> None:
        owners = [await lab.worker(f"w{n}", storage=await lab.open()) for n in range(3)]
        bystander = await lab.worker("bystander", storage=await lab.open())
        await lab.put_many(6)
        jobs = [job for owner in owners for job in await owner.claim(2)]
        for worker in (*owners, bystander):
            await worker.storage.wait_for_notice(worker.ref, 0.0)
        assert await lab.storage.cancel(ids(jobs)) == [Cancelled.REQUESTED] * 6
        for owner in owners:
            assert await owner.storage.wait_for_notice(owner.ref, WAIT_S)
        assert not await bystander.storage.wait_for_notice(bystander.ref, SHORT_S)

    @scenario
    async def test_a_notice_is_no_work(self, lab: Lab) -> None:
        worker = await idle_worker(lab)
        await lab.put()
        job = await worker.claim_one()
        assert await worker.claim(1) == []
        await worker.storage.wait_for_work(worker.ref, 0.0)
        assert await is_noticed(worker, lambda: lab.storage.cancel([job.id]))
        assert not await worker.storage.wait_for_work(worker.ref, SHORT_S)

    @scenario
    async def test_work_is_no_notice(self, lab: Lab) -> None:
        worker = await idle_worker(lab)
        await worker.storage.wait_for_notice(worker.ref, 0.0)
        assert await is_woken(worker, lab.put)
        assert not await worker.storage.wait_for_notice(worker.ref, SHORT_S)

    @pytest.mark.parametrize("state", ["ready", "ended"])
    @scenario
    async def test_a_cancel_that_no_owner_has_to_hear_of_notices_nobody(self, lab: Lab, state: str) -> None:
        worker = await lab.worker(storage=await lab.open())
        await worker.storage.wait_for_notice(worker.ref, 0.0)
        job_id = await lab.put()
        if state == "ended":
            await worker.complete(await worker.claim_one())
        await lab.storage.cancel([job_id])
        assert not await worker.storage.wait_for_notice(worker.ref, SHORT_S)

    @scenario
    async def test_the_cancel_of_a_job_whose_owner_is_gone_waits_for_its_end(self, lab: Lab) -> None:
        gone = await lab.worker("gone")
        await lab.put()
        job = await gone.claim_one()
        await lab.storage.declare_dead(gone.ref, "killed")
        assert await lab.storage.cancel([job.id]) == [Cancelled.REQUESTED]
        await lab.reap_all()
        assert await lab.status(job.id) is Status.CANCELLED

    @pytest.mark.parametrize("word", ["quiet", "stop", None])
    @scenario
    async def test_a_command_is_noticed(self, lab: Lab, word: str | None) -> None:
        worker = await lab.worker("told", storage=await lab.open())
        assert await is_noticed(worker, lambda: lab.storage.command("told", word))
        assert (await worker.beat()).command == word


class TestWaitFor:
    @scenario
    async def test_an_ended_job_is_given_at_once(self, lab: Lab) -> None:
        job_id = await lab.end()
        job = await lab.storage.wait_for(job_id, WAIT_S)
        assert job == await lab.job(job_id)

    @pytest.mark.parametrize("how", ["completed", "dead", "cancelled", "expired"])
    @scenario
    async def test_a_waiter_in_another_process_hears_of_every_end(self, lab: Lab, how: str) -> None:
        job_id = await lab.put(expires_in=9)
        worker = await lab.worker()
        waiter = await lab.open()
        waiting = asyncio.create_task(waiter.wait_for(job_id, WAIT_S))
        await self._is_waiting(lab)
        if how == "cancelled":
            await lab.storage.cancel([job_id])
        elif how == "expired":
            lab.clock.advance(10)
            await lab.storage.promote(10)
        else:
            job = await worker.claim_one()
            await (worker.complete(job) if how == "completed" else worker.settle(job, dead()))
        ended = await waiting
        assert ended is not None
        assert ended.ended

    @scenario
    async def test_many_waiters_of_one_job_all_hear(self, lab: Lab) -> None:
        job_id = await lab.put()
        storages = [await lab.open() for _ in range(3)]
        waits = [asyncio.create_task(storage.wait_for(job_id, WAIT_S)) for storage in storages * 2]
        await self._is_waiting(lab)
        worker = await lab.worker()
        await worker.complete(await worker.claim_one())
        assert [job is not None and job.status for job in await asyncio.gather(*waits)] == [
            Status.COMPLETED
        ] * 6

    @scenario
    async def test_when_the_time_is_up_the_job_is_given_as_it_is(self, lab: Lab) -> None:
        job_id = await lab.put()
        job = await lab.storage.wait_for(job_id, SHORT_S)
        assert job is not None
        assert job.status is Status.PENDING

    @scenario
    async def test_a_retry_does_not_end_a_wait_and_a_later_end_does(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        waiter = await lab.open()
        waiting = asyncio.create_task(waiter.wait_for(job_id, WAIT_S))
        await self._is_waiting(lab)
        await worker.settle(await worker.claim_one(), INTERRUPTED)
        assert not waiting.done()
        await worker.complete(await worker.claim_one())
        job = await waiting
        assert job is not None
        assert job.status is Status.COMPLETED

    async def _is_waiting(self, lab: Lab) -> None:
        """Give the waiters' first look at the storage its turn: a few round trips of another one."""
        for _ in range(5):
            await lab.storage.counts()
            await lab.storage.promote(1)


class TestEvents:
    @scenario
    async def test_an_event_reaches_every_listener_to_its_topic_and_nobody_else(self, lab: Lab) -> None:
        one, two, three = [await lab.open() for _ in range(3)]
        async with (
            one.subscribe(["jobs"]) as a,
            two.subscribe(["jobs", "x"]) as b,
            three.subscribe(["x"]) as c,
        ):
            assert await lab.storage.publish(Event("jobs", b"1")) == 2
            assert await lab.storage.publish(Event("x", b"2")) == 2
            heard = [await self._next(a), await self._next(b), await self._next(b), await self._next(c)]
        assert heard == [Event("jobs", b"1"), Event("jobs", b"1"), Event("x", b"2"), Event("x", b"2")]

    async def _next(self, events: object) -> Event:
        async with asyncio.timeout(WAIT_S):
            event: Event = await anext(events)  # type: ignore[call-overload]
            return event

    @scenario
    async def test_nobody_listens_before_the_entry_or_after_the_exit(self, lab: Lab) -> None:
        listener = await lab.open()
        assert await lab.storage.publish(Event("jobs", b"before")) == 0
        async with listener.subscribe(["jobs"]) as events:
            await lab.storage.publish(Event("jobs", b"during"))
            assert (await self._next(events)).body == b"during"
        assert await lab.storage.publish(Event("jobs", b"after")) == 0

    @scenario
    async def test_a_process_hears_its_own_events(self, lab: Lab) -> None:
        async with lab.storage.subscribe(["jobs"]) as events:
            await lab.storage.publish(Event("jobs", b"mine"))
            assert (await self._next(events)).body == b"mine"

    @scenario
    async def test_namespaces_do_not_hear_each_other(self, lab: Lab) -> None:
        foreign = await lab.open(namespace="foreign")
        async with foreign.subscribe(["jobs"]):
            assert await lab.storage.publish(Event("jobs")) == 0

    @scenario
    async def test_a_slow_reader_loses_events_and_blocks_nobody(self, lab: Lab) -> None:
        listener = await lab.open()
        async with listener.subscribe(["jobs"]) as events:
            for number in range(2_500):
                await lab.storage.publish(Event("jobs", str(number).encode()))
            heard = [int((await self._next(events)).body)]
            while heard[-1] != 2_499:
                heard.append(int((await self._next(events)).body))
        assert heard == sorted(set(heard))
        assert 0 < len(heard) < 2_500

    @scenario
    async def test_an_event_that_is_too_large_is_refused(self, lab: Lab) -> None:
        with pytest.raises(InvalidOption):
            await lab.storage.publish(Event("jobs", b"x" * MAX_EVENT_BYTES))


class TestLeader:
    @scenario
    async def test_one_leads_until_its_time_is_over(self, lab: Lab) -> None:
        other = await lab.open()
        assert await lab.storage.lead("one", 5)
        assert not await other.lead("two", 5)
        lab.clock.advance(4)
        assert await lab.storage.lead("one", 5)
        lab.clock.advance(4)
        assert not await other.lead("two", 5)
        lab.clock.advance(1.5)
        assert await other.lead("two", 5)
        assert not await lab.storage.lead("one", 5)

    @scenario
    async def test_promote_makes_due_jobs_ready_oldest_first_and_tells_the_next(self, lab: Lab) -> None:
        late, soon, next_one = await lab.put(delay=2), await lab.put(delay=1), await lab.put(delay=30)
        lab.clock.advance(3)
        first = await lab.storage.promote(1)
        assert first.count == 1
        assert await lab.statuses([late, soon]) == [Status.SCHEDULED, Status.PENDING]
        second = await lab.storage.promote(10)
        assert second.count == 1
        assert second.next_due_s == pytest.approx(27, abs=0.01)
        worker = await lab.worker()
        given = await worker.claim(5)
        assert ids(given) == [soon, late]
        assert await lab.status(next_one) is Status.SCHEDULED
        assert await worker.storage.release(worker.ref, [own(job) for job in given]) == [True, True]
