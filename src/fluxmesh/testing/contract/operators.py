"""Operators: cancel, replay, discard, reprioritise. (Pause and resume stand in limits.py.)"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fluxmesh.errors import InvalidOption
from fluxmesh.ids import new_job_id
from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import Transition
from fluxmesh.storage.values import (
    Begun,
    Cancelled,
    Done,
    Owned,
    ProgressNote,
    Reap,
    Settled,
    Verdict,
)
from fluxmesh.testing.contract.lab import (
    CANCELLED,
    COMPLETED,
    CRASHED,
    INTERRUPTED,
    Lab,
    dead,
    ids,
    new_job,
    retry,
    scenario,
    snooze,
)


class TestCancel:
    """C18: in every state."""

    @scenario
    async def test_a_ready_job_is_cancelled_at_once_and_never_given(self, lab: Lab) -> None:
        job_id = await lab.put()
        assert await lab.storage.cancel([job_id]) == [Cancelled.CANCELLED]
        job = await lab.job(job_id)
        assert (job.status, job.completed_at) == (Status.CANCELLED, lab.clock.wall_us() / 1e6)
        assert await (await lab.worker()).claim(1) == []

    @scenario
    async def test_a_delayed_job_is_cancelled_and_never_becomes_due(self, lab: Lab) -> None:
        job_id = await lab.put(delay=1)
        assert await lab.storage.cancel([job_id]) == [Cancelled.CANCELLED]
        lab.clock.advance(2)
        await lab.storage.promote(10)
        assert await lab.status(job_id) is Status.CANCELLED

    @scenario
    async def test_a_parked_job_is_cancelled(self, lab: Lab) -> None:
        job_id = await lab.put("alien")
        await (await lab.worker()).claim(1)
        assert await lab.storage.cancel([job_id]) == [Cancelled.CANCELLED]
        assert await (await lab.worker("w2", tasks=("alien",))).claim(1) == []
        assert not any(stats.parked or any(stats.queued) for stats in await lab.storage.queue_stats())

    @scenario
    async def test_a_held_job_is_cancelled_at_once_and_does_not_begin(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        assert await lab.storage.cancel([held.id]) == [Cancelled.CANCELLED]
        assert await worker.begin(held) == [Begun.LOST]
        assert await lab.status(held.id) is Status.CANCELLED

    @scenario
    async def test_a_running_job_is_asked_and_a_normal_return_still_completes_it(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        job = await worker.claim_one()
        assert await lab.storage.cancel([job.id]) == [Cancelled.REQUESTED]
        assert await lab.storage.cancel([job.id]) == [Cancelled.REQUESTED]
        shown = await lab.job(job.id)
        assert (shown.status, shown.cancel_requested) == (Status.RUNNING, True)
        assert await worker.settle(job, COMPLETED) is Settled.APPLIED
        assert await lab.status(job.id) is Status.COMPLETED

    @pytest.mark.parametrize(
        "end", [retry(), dead(), INTERRUPTED, CRASHED, snooze(3), CANCELLED], ids=lambda end: end.outcome
    )
    @scenario
    async def test_every_other_end_while_the_flag_stands_is_a_cancel(self, lab: Lab, end: Transition) -> None:
        await lab.put(unique_key="u")
        worker = await lab.worker()
        job = await worker.claim_one()
        await lab.storage.cancel([job.id])
        assert await worker.settle(job, end) is Settled.APPLIED
        shown = await lab.job(job.id)
        assert (shown.status, shown.completed_at) == (Status.CANCELLED, lab.clock.wall_us() / 1e6)
        assert [entry.outcome for entry in await lab.storage.history(job.id) or []] == [Outcome.CANCELLED]
        charged = (shown.attempts, shown.crashes, shown.snoozes, shown.interruptions)
        assert charged == (0, 0, 0, 0), "as the history tells"
        (next_one,) = await lab.enqueue(new_job("work", unique_key="u"))
        assert next_one.verdict is Verdict.CREATED

    @pytest.mark.parametrize("end", [COMPLETED, dead("ended")], ids=lambda end: end.status)
    @scenario
    async def test_an_ended_job_stays_as_it_ended(self, lab: Lab, end: Transition) -> None:
        job_id = await lab.end(end)
        before = await lab.job(job_id)
        assert await lab.storage.cancel([job_id]) == [Cancelled.ENDED]
        assert await lab.storage.cancel([job_id]) == [Cancelled.ENDED]
        assert await lab.job(job_id) == before

    @scenario
    async def test_a_cancelled_or_expired_job_stays_as_it_ended(self, lab: Lab) -> None:
        cancelled, expired = await lab.put(), await lab.put(expires_in=1)
        await lab.storage.cancel([cancelled])
        lab.clock.advance(2)
        await lab.storage.promote(10)
        assert await lab.storage.cancel([cancelled, expired]) == [Cancelled.ENDED] * 2
        assert await lab.statuses([cancelled, expired]) == [Status.CANCELLED, Status.EXPIRED]

    @scenario
    async def test_a_batch_is_answered_item_by_item(self, lab: Lab) -> None:
        ended, running, ready = await lab.end(), await lab.put(), await lab.put()
        assert len(await (await lab.worker()).claim(1)) == 1
        answers = await lab.storage.cancel([ended, new_job_id(), running, ready])
        assert answers == [Cancelled.ENDED, Cancelled.UNKNOWN, Cancelled.REQUESTED, Cancelled.CANCELLED]

    @scenario
    async def test_a_replayed_life_does_not_inherit_the_flag(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        job = await worker.claim_one()
        await lab.storage.cancel([job_id])
        await worker.settle(job, CANCELLED)
        await lab.storage.replay([job_id])
        await worker.settle(await worker.claim_one(), retry(1))
        shown = await lab.job(job_id)
        assert (shown.status, shown.cancel_requested) == (Status.SCHEDULED, False)


class TestReplay:
    @scenario
    async def test_a_replay_is_a_new_life_with_id_token_and_history_kept(self, lab: Lab) -> None:
        job_id = await lab.put(delay=1, expires_in=50, idempotency_key="i")
        worker = await lab.worker()
        lab.clock.advance(1)
        given = await worker.claim_one()
        await worker.note(given, percent=40.0, message="so far")
        await worker.settle(given, dead())
        lab.clock.advance(100)
        assert await lab.storage.replay([job_id]) == [Done.DONE]
        job = await lab.job(job_id)
        assert (job.status, job.life, job.token) == (Status.PENDING, 2, given.token)
        assert (job.attempts, job.crashes, job.snoozes, job.interruptions) == (0, 0, 0, 0)
        assert (job.progress, job.progress_message, job.expires_at) == (0.0, None, None)
        assert (job.completed_at, job.error, job.reason, job.fingerprint) == (None, None, None, None)
        history = await lab.storage.history(job_id)
        assert history is not None
        assert [entry.outcome for entry in history] == [Outcome.FAILED]
        again = await worker.claim_one()
        assert (again.id, again.life) == (job_id, 2)
        assert again.token > given.token

    @scenario
    async def test_a_cancelled_and_an_expired_job_can_be_replayed(self, lab: Lab) -> None:
        cancelled, expired = await lab.put(), await lab.put(expires_in=1)
        await lab.storage.cancel([cancelled])
        lab.clock.advance(2)
        await lab.storage.promote(10)
        assert await lab.storage.replay([cancelled, expired]) == [Done.DONE] * 2
        assert ids(await (await lab.worker()).claim(5)) == [cancelled, expired]

    @scenario
    async def test_what_completed_or_has_not_ended_is_a_conflict(self, lab: Lab) -> None:
        completed, running, held, ready, delayed = [
            await lab.end(),
            *await lab.put_many(3),
            await lab.put(delay=9),
        ]
        await (await lab.worker()).exchange(slots=1, extra=1)
        asked = [completed, running, held, ready, delayed, new_job_id()]
        assert await lab.storage.replay(asked) == [Done.CONFLICT] * 5 + [Done.UNKNOWN]
        assert {(await lab.job(job_id)).life for job_id in asked[:5]} == {1}

    @scenario
    async def test_five_racing_replays_make_one_life(self, lab: Lab) -> None:
        job_id = await lab.end(dead("ended"))
        storages = [lab.storage, *[await lab.open() for _ in range(4)]]
        answers = await asyncio.gather(*(storage.replay([job_id]) for storage in storages))
        assert sorted(done for (done,) in answers) == [Done.CONFLICT] * 4 + [Done.DONE]
        assert (await lab.job(job_id)).life == 2
        worker = await lab.worker(tasks=("ended",), queues=("ends",))
        assert ids(await worker.claim(5)) == [job_id]

    @scenario
    async def test_one_id_twice_in_a_batch_is_replayed_once(self, lab: Lab) -> None:
        job_id = await lab.end(dead("ended"))
        assert await lab.storage.replay([job_id, job_id]) == [Done.DONE, Done.CONFLICT]

    @scenario
    async def test_a_replayed_job_arrives_anew(self, lab: Lab) -> None:
        worker = await lab.worker()
        old = await lab.put()
        await worker.settle(await worker.claim_one(), dead())
        waiting = await lab.put_many(2)
        await lab.storage.replay([old])
        assert ids(await worker.claim(3)) == [*waiting, old]

    @scenario
    async def test_a_unique_key_held_by_another_job_forbids_a_replay(self, lab: Lab) -> None:
        worker = await lab.worker()
        old = await lab.put(unique_key="u")
        await worker.settle(await worker.claim_one(), dead())
        other = await lab.put(unique_key="u")
        assert await lab.storage.replay([old]) == [Done.CONFLICT]
        assert await lab.status(old) is Status.DEAD_LETTER
        await lab.storage.cancel([other])
        assert await lab.storage.replay([old]) == [Done.DONE]

    @scenario
    async def test_a_replay_takes_its_unique_key_back(self, lab: Lab) -> None:
        worker = await lab.worker()
        old = await lab.put(unique_key="u")
        await worker.settle(await worker.claim_one(), dead())
        await lab.storage.replay([old])
        (again,) = await lab.enqueue(new_job("work", unique_key="u"))
        assert (again.id, again.verdict) == (old, Verdict.EXISTING)

    @scenario
    async def test_of_two_dead_letters_with_one_unique_key_one_is_replayed(self, lab: Lab) -> None:
        worker = await lab.worker()
        both = []
        for _ in range(2):
            both.append(await lab.put(unique_key="u"))
            await worker.settle(await worker.claim_one(), dead())
        assert await lab.storage.replay(both) == [Done.DONE, Done.CONFLICT]


class TestDiscard:
    @scenario
    async def test_a_discarded_job_is_gone_with_its_history_and_its_keys(self, lab: Lab) -> None:
        job_id = await lab.end(dead("ended"), idempotency_key="i", tags=["x"])
        assert await lab.storage.discard([job_id]) == [Done.DONE]
        assert await lab.storage.get(job_id) is None
        assert await lab.storage.history(job_id) is None
        assert await lab.everything() == []
        assert await lab.storage.discard([job_id]) == [Done.UNKNOWN]
        (anew,) = await lab.enqueue(new_job("other", idempotency_key="i"))
        assert anew.verdict is Verdict.CREATED

    @scenario
    async def test_what_has_not_ended_is_not_discarded(self, lab: Lab) -> None:
        made = [*await lab.put_many(3), await lab.put(delay=9)]
        await (await lab.worker()).exchange(slots=1, extra=1)
        assert await lab.storage.discard(made) == [Done.CONFLICT] * 4
        assert (await lab.storage.counts()).total == 4

    @pytest.mark.parametrize("end", [COMPLETED, dead("ended"), CANCELLED], ids=lambda end: end.status)
    @scenario
    async def test_every_ended_job_can_be_discarded(self, lab: Lab, end: Transition) -> None:
        assert await lab.storage.discard([await lab.end(end)]) == [Done.DONE]
        assert (await lab.storage.counts()).total == 0


class TestReprioritise:
    @scenario
    async def test_a_ready_job_moves_to_its_new_tier_behind_those_who_wait_there(self, lab: Lab) -> None:
        high = await lab.put(priority=1)
        low, later = await lab.put(priority=3), await lab.put(priority=3)
        assert await lab.storage.reprioritise([low], 1) == [Done.DONE]
        newest = await lab.put(priority=1)
        assert (await lab.job(low)).priority == 1
        assert ids(await (await lab.worker()).claim(5)) == [high, low, newest, later]

    @scenario
    async def test_there_and_back_is_a_new_arrival(self, lab: Lab) -> None:
        first, second = await lab.put_many(2)
        await lab.storage.reprioritise([first], 3)
        await lab.storage.reprioritise([first], 2)
        assert ids(await (await lab.worker()).claim(2)) == [second, first]

    @scenario
    async def test_a_delayed_job_becomes_due_in_its_new_tier(self, lab: Lab) -> None:
        delayed = await lab.put(priority=3, delay=1)
        waiting = await lab.put(priority=2)
        await lab.storage.reprioritise([delayed], 0)
        assert await lab.status(delayed) is Status.SCHEDULED
        lab.clock.advance(1)
        assert ids(await (await lab.worker()).claim(2)) == [delayed, waiting]

    @scenario
    async def test_a_held_job_is_given_back(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        assert await lab.storage.reprioritise([held.id], 1) == [Done.DONE]
        job = await lab.job(held.id)
        assert (job.status, job.priority, job.worker_id) == (Status.PENDING, 1, None)
        assert job.token > held.token
        assert await worker.begin(held) == [Begun.LOST]

    @scenario
    async def test_a_held_job_past_its_time_expires_as_it_is_given_back(self, lab: Lab) -> None:
        await lab.put(expires_in=1)
        held = await (await lab.worker()).hold_one()
        lab.clock.advance(1)
        assert await lab.storage.reprioritise([held.id], 1) == [Done.DONE]
        job = await lab.job(held.id)
        assert (job.status, job.priority) == (Status.EXPIRED, 1)
        assert job.token > held.token

    @scenario
    async def test_a_running_job_comes_back_in_its_new_tier(self, lab: Lab) -> None:
        await lab.put(priority=3)
        worker = await lab.worker()
        job = await worker.claim_one()
        waiting = await lab.put(priority=2)
        assert await lab.storage.reprioritise([job.id], 0) == [Done.DONE]
        assert (await lab.status(job.id), (await lab.job(job.id)).token) == (Status.RUNNING, job.token)
        assert await worker.settle(job, INTERRUPTED) is Settled.APPLIED
        assert ids(await worker.claim(2)) == [job.id, waiting]

    @scenario
    async def test_a_running_job_comes_back_behind_those_who_wait_in_its_new_tier(self, lab: Lab) -> None:
        await lab.put(priority=3)
        worker = await lab.worker()
        job = await worker.claim_one()
        waiting = await lab.put(priority=2)
        await lab.storage.reprioritise([job.id], 2)
        later = await lab.put(priority=2)
        await worker.settle(job, INTERRUPTED)
        assert ids(await worker.claim(3)) == [waiting, job.id, later]

    @scenario
    async def test_the_tier_a_job_has_already_leaves_it_in_its_place(self, lab: Lab) -> None:
        """So that a lost reply may be answered by the same call again."""
        made = await lab.put_many(2)
        held = await (await lab.worker()).hold_one()
        assert await lab.storage.reprioritise([held.id], 2) == [Done.DONE]
        assert await lab.statuses(made) == [Status.CLAIMED, Status.PENDING]

    @scenario
    async def test_a_parked_job_is_found_in_its_new_tier(self, lab: Lab) -> None:
        alien = await lab.put("alien", priority=3)
        await (await lab.worker()).claim(1)
        assert await lab.storage.reprioritise([alien], 0) == [Done.DONE]
        able = await lab.worker("w2", tasks=("alien",), tiers=(0,))
        assert ids(await able.claim(1)) == [alien]

    @scenario
    async def test_ended_and_unknown_jobs_do_not_move(self, lab: Lab) -> None:
        ended = await lab.end()
        assert await lab.storage.reprioritise([ended, new_job_id()], 0) == [Done.CONFLICT, Done.UNKNOWN]
        assert (await lab.job(ended)).priority == 2

    @scenario
    async def test_the_counts_follow_the_job(self, lab: Lab) -> None:
        made = await lab.put_many(3, priority=3)
        await lab.storage.reprioritise(made[:2], 1)
        assert (await lab.storage.counts()).queued == {("default", 1): 2, ("default", 3): 1}


class TestBatches:
    VERBS = ("cancel", "replay", "discard", "reprioritise", "release", "transfer", "progress", "reap")

    @pytest.mark.parametrize("verb", VERBS)
    @scenario
    async def test_more_than_a_thousand_items_are_refused(self, lab: Lab, verb: str) -> None:
        many = [new_job_id() for _ in range(1_001)]
        ref = (await lab.worker()).ref
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "cancel": lambda: lab.storage.cancel(many),
            "replay": lambda: lab.storage.replay(many),
            "discard": lambda: lab.storage.discard(many),
            "reprioritise": lambda: lab.storage.reprioritise(many, 1),
            "release": lambda: lab.storage.release(ref, [Owned(job_id, 1) for job_id in many]),
            "transfer": lambda: lab.storage.transfer(ref, [Owned(job_id, 1) for job_id in many]),
            "progress": lambda: lab.storage.progress(ref, [ProgressNote(job_id, 1) for job_id in many]),
            "reap": lambda: lab.storage.reap([Reap(job_id, 1) for job_id in many]),
        }
        with pytest.raises(InvalidOption):
            await calls[verb]()

    @scenario
    async def test_a_thousand_ids_are_done_in_one_call(self, lab: Lab) -> None:
        made = await lab.put_many(1_000)
        assert await lab.storage.reprioritise(made, 0) == [Done.DONE] * 1_000
        assert await lab.storage.cancel(made) == [Cancelled.CANCELLED] * 1_000
        assert await lab.storage.replay(made) == [Done.DONE] * 1_000
        assert await lab.storage.cancel(made) == [Cancelled.CANCELLED] * 1_000
        assert await lab.storage.discard(made) == [Done.DONE] * 1_000
        assert (await lab.storage.counts()).total == 0
