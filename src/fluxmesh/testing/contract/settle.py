"""The round trip of a worker: settle, and the memory of requests."""

from __future__ import annotations

import pytest

from fluxmesh.ids import new_job_id
from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import Charge, Transition
from fluxmesh.storage.values import Settle, Settled
from fluxmesh.testing.contract.lab import (
    COMPLETED,
    INTERRUPTED,
    Lab,
    dead,
    ids,
    retry,
    scenario,
    snooze,
)

REMEMBERED = 8  # requests of a worker epoch


class TestSettle:
    @scenario
    async def test_a_completed_job_keeps_its_result_and_its_end(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        given = await worker.claim_one()
        lab.clock.advance(2)
        answer = await worker.exchange(settle=[Settle(given.id, given.token, COMPLETED, 100.0, "done")])
        assert answer.settled == (Settled.APPLIED,)
        job = await lab.job(job_id)
        assert (job.status, job.result, job.attempts, job.progress) == (Status.COMPLETED, 7, 1, 100.0)
        assert (job.completed_at or 0) - (job.started_at or 0) == pytest.approx(2, abs=1e-3)

    @scenario
    async def test_a_retry_is_scheduled_charged_and_remembers_its_error(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        await worker.settle(await worker.claim_one(), retry(4))
        job = await lab.job(job_id)
        assert (job.status, job.attempts, job.worker_id) == (Status.SCHEDULED, 1, None)
        assert job.scheduled_at == pytest.approx(lab.clock.wall_us() / 1e6 + 4, abs=1e-3)
        assert await worker.claim(1) == []
        lab.clock.advance(4)
        again = await worker.claim_one()
        assert (again.id, again.attempts) == (job_id, 1)

    @scenario
    async def test_an_interruption_with_a_delay_is_scheduled(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        later = Transition(Status.SCHEDULED, Outcome.INTERRUPTED, Charge.INTERRUPTION, delay_s=4)
        await worker.settle(await worker.claim_one(), later)
        job = await lab.job(job_id)
        assert (job.status, job.attempts, job.interruptions) == (Status.SCHEDULED, 0, 1)
        assert await worker.claim(1) == []
        lab.clock.advance(4)
        assert (await worker.claim_one()).id == job_id

    @scenario
    async def test_snoozes_and_interruptions_are_counted_apart(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        await worker.settle(await worker.claim_one(), snooze(1))
        lab.clock.advance(1)
        await worker.settle(await worker.claim_one(), INTERRUPTED)
        again = await worker.claim_one()
        assert (again.id, again.attempts, again.snoozes, again.interruptions) == (job_id, 0, 1, 1)

    @scenario
    async def test_an_interrupted_job_is_back_in_its_old_place(self, lab: Lab) -> None:
        first, second = await lab.put(), await lab.put()
        worker = await lab.worker()
        assert await worker.settle(await worker.claim_one(), INTERRUPTED) is Settled.APPLIED
        assert ids(await worker.claim(2)) == [first, second]

    @scenario
    async def test_a_dead_letter_keeps_error_reason_and_fingerprint(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        end = dead()
        await worker.settle(await worker.claim_one(), end)
        job = await lab.job(job_id)
        assert (job.status, job.error, job.reason) == (Status.DEAD_LETTER, end.error, "error")
        assert job.fingerprint == end.fingerprint

    @pytest.mark.parametrize(
        "end", [COMPLETED, retry(), dead(), INTERRUPTED, snooze(3)], ids=lambda t: t.outcome
    )
    @scenario
    async def test_a_settle_that_was_applied_is_already_applied_when_it_comes_again(
        self, lab: Lab, end: object
    ) -> None:
        await lab.put()
        worker = await lab.worker()
        given = await worker.claim_one()
        assert await worker.settle(given, end) is Settled.APPLIED  # type: ignore[arg-type]
        before = await lab.job(given.id)
        assert await worker.settle(given, end) is Settled.ALREADY  # type: ignore[arg-type]
        assert await lab.job(given.id) == before
        assert (await lab.storage.counts()).stale_settles == 0

    @scenario
    async def test_a_repeated_settle_is_already_applied_after_a_replay_too(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        given = await worker.claim_one()
        await worker.settle(given, dead())
        await lab.storage.replay([given.id])
        assert await worker.settle(given, dead()) is Settled.ALREADY
        assert await lab.status(given.id) is Status.PENDING

    @scenario
    async def test_a_stale_settle_is_refused_counted_and_changes_nothing(self, lab: Lab) -> None:
        job_id = await lab.put()
        one, two = await lab.worker("w1"), await lab.worker("w2")
        old = await one.claim_one()
        await one.release(old)
        new = await two.claim_one()
        before = await lab.job(job_id)
        assert await one.settle(old) is Settled.STALE
        assert await lab.job(job_id) == before
        assert (await lab.storage.counts()).stale_settles == 1
        assert await two.settle(new) is Settled.APPLIED
        assert await one.settle(old) is Settled.STALE
        assert (await lab.storage.counts()).stale_settles == 2

    @scenario
    async def test_another_worker_cannot_settle_by_knowing_the_token(self, lab: Lab) -> None:
        await lab.put()
        one, two = await lab.worker("w1"), await lab.worker("w2")
        given = await one.claim_one()
        assert await two.settle(given) is Settled.STALE
        assert await lab.status(given.id) is Status.RUNNING

    @scenario
    async def test_a_held_job_cannot_be_settled(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        held = await worker.hold_one()
        assert await worker.settle(held) is Settled.STALE
        assert await lab.status(held.id) is Status.CLAIMED

    @scenario
    async def test_one_stale_settle_does_not_hurt_its_batch(self, lab: Lab) -> None:
        await lab.put_many(3)
        worker = await lab.worker()
        one, two, three = await worker.claim(3)
        settles = [
            Settle(one.id, one.token, COMPLETED),
            Settle(two.id, two.token - 1, COMPLETED),
            Settle(new_job_id(), 1, COMPLETED),
            Settle(three.id, three.token, COMPLETED),
        ]
        answer = await worker.exchange(settle=settles)
        assert answer.settled == (Settled.APPLIED, Settled.STALE, Settled.STALE, Settled.APPLIED)

    @scenario
    async def test_only_the_epoch_that_runs_a_job_settles_it_though_it_is_fenced(self, lab: Lab) -> None:
        await lab.put()
        older = await lab.worker("w1")
        given = await older.claim_one()
        newer = await lab.worker("w1")
        assert await newer.settle(given) is Settled.STALE
        assert await older.settle(given) is Settled.APPLIED


class TestRequests:
    @scenario
    async def test_a_repeated_request_gets_the_same_jobs_under_the_same_tokens(self, lab: Lab) -> None:
        await lab.put_many(6)
        worker = await lab.worker()
        request = worker.request(slots=2, extra=1)
        first, again = await worker.send(request), await worker.send(request)
        assert (again.running, again.held) == (first.running, first.held)
        assert (await lab.storage.counts()).by_status[Status.PENDING] == 3

    @scenario
    async def test_a_repeated_request_leaves_out_what_is_no_longer_its_own(self, lab: Lab) -> None:
        await lab.put_many(4)
        worker = await lab.worker()
        request = worker.request(slots=2, extra=2)
        first = await worker.send(request)
        await worker.complete(first.running[0])
        await worker.release(first.held[1])
        again = await worker.send(request)
        assert (again.running, again.held) == (first.running[1:], first.held[:1])

    @scenario
    async def test_a_job_given_back_and_given_again_never_comes_under_its_old_token(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        request = worker.request(slots=1)
        (job,) = (await worker.send(request)).running
        await worker.release(job)
        given = await worker.claim_one()
        assert given.id == job.id
        assert (await worker.send(request)).running in ((), (given,))

    @scenario
    async def test_the_last_eight_requests_are_remembered(self, lab: Lab) -> None:
        await lab.put_many(REMEMBERED)
        worker = await lab.worker()
        requests = [worker.request(slots=1) for _ in range(REMEMBERED)]
        first = [ids((await worker.send(request)).running) for request in requests]
        again = [ids((await worker.send(request)).running) for request in requests]
        assert again == first

    @scenario
    async def test_of_two_requests_the_later_may_be_done_first_and_each_is_remembered(self, lab: Lab) -> None:
        made = await lab.put_many(5)
        worker = await lab.worker()
        earlier, later = worker.request(slots=2), worker.request(slots=2)
        first = [await worker.send(later), await worker.send(earlier)]
        assert [ids(answer.running) for answer in first] == [made[:2], made[2:4]]
        again = [await worker.send(earlier), await worker.send(later)]
        assert [answer.running for answer in again] == [answer.running for answer in first[::-1]]

    @scenario
    async def test_request_ids_of_another_epoch_mean_nothing_to_this_one(self, lab: Lab) -> None:
        await lab.put_many(2)
        older = await lab.worker("w1")
        first = await older.claim_one()
        newer = await lab.worker("w1")
        assert older.requests == newer.requests + 1
        assert (await newer.claim_one()).id != first.id
