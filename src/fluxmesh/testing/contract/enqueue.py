"""Producers: enqueue and its keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fluxmesh import codec
from fluxmesh.errors import InvalidOption
from fluxmesh.job import TERMINAL, Status
from fluxmesh.storage.values import Cancelled, Done, TaskSpec, Verdict
from fluxmesh.submission import NewJob, prepare
from fluxmesh.testing.contract.harness import CorruptField
from fluxmesh.testing.contract.lab import COMPLETED, Lab, dead, ids, new_job, retry, scenario

ORDER = {"amount": 10, "currency": "EUR"}
REORDERED = {"currency": "EUR", "amount": 10}


def order(key: str, kwargs: dict[str, object], *args: object) -> NewJob:
    return new_job("pay", *args, kwargs=kwargs, idempotency_key=key)


class TestEnqueue:
    @scenario
    async def test_a_new_job_is_created_and_is_what_was_asked_for(self, lab: Lab) -> None:
        asked = new_job(
            "pay",
            7,
            kwargs={"currency": "EUR"},
            queue="bills",
            priority="high",
            max_retries=5,
            timeout=12.5,
            affinity_key="customer-7",
            concurrency_key="account-1",
            concurrency_limit=2,
            unique_key="bill-9",
            tags=["a", "b"],
            headers={"traceparent": "00-1"},
        )
        (put,) = await lab.enqueue(asked)
        assert (put.id, put.verdict) == (asked.id, Verdict.CREATED)
        job = await lab.job(asked.id)
        assert (job.task, job.args, job.kwargs, job.queue) == ("pay", [7], {"currency": "EUR"}, "bills")
        assert (job.priority, job.status, job.life) == (1, Status.PENDING, 1)
        assert (job.max_retries, job.timeout_seconds, job.affinity_key) == (5, 12.5, "customer-7")
        assert (job.concurrency_key, job.concurrency_limit, job.unique_key) == ("account-1", 2, "bill-9")
        assert (set(job.tags), job.headers) == ({"a", "b"}, {"traceparent": "00-1"})
        assert job.created_at == pytest.approx(lab.clock.wall_us() / 1e6, abs=1e-3)
        assert (job.started_at, job.completed_at, job.worker_id) == (None, None, None)

    @scenario
    async def test_a_batch_is_answered_item_by_item_in_its_order(self, lab: Lab) -> None:
        known = new_job("work", queue="small")
        await lab.enqueue(known)
        fresh, extra = new_job("work", queue="small"), new_job("work", queue="small")
        answers = await lab.enqueue(fresh, known, extra, queue_cap=2)
        assert [answer.verdict for answer in answers] == [Verdict.CREATED, Verdict.EXISTING, Verdict.FULL]
        assert [answer.id for answer in answers[:2]] == [fresh.id, known.id]
        assert await lab.storage.get(extra.id) is None

    @scenario
    async def test_an_empty_batch_is_answered_with_nothing(self, lab: Lab) -> None:
        assert await lab.enqueue() == []

    @scenario
    async def test_a_batch_of_more_than_a_thousand_is_refused_whole(self, lab: Lab) -> None:
        template = prepare({"task": "work"})
        with pytest.raises(InvalidOption):
            await lab.enqueue(*[template.job((), {}) for _ in range(1_001)])
        assert (await lab.storage.counts()).total == 0

    @scenario
    async def test_a_known_id_is_existing_and_changes_nothing(self, lab: Lab) -> None:
        first = new_job("work", 1)
        await lab.enqueue(first)
        (again,) = await lab.enqueue(prepare({"task": "other", "id": first.id}).job((2,), {}))
        assert (again.id, again.verdict, again.by) == (first.id, Verdict.EXISTING, "id")
        assert again.status is Status.PENDING
        job = await lab.job(first.id)
        assert (job.task, job.args) == ("work", [1])
        assert (await lab.storage.counts()).total == 1

    @scenario
    async def test_one_id_twice_in_one_batch_makes_one_job(self, lab: Lab) -> None:
        job = new_job("work")
        answers = await lab.enqueue(job, job)
        assert [answer.verdict for answer in answers] == [Verdict.CREATED, Verdict.EXISTING]

    @scenario
    async def test_what_a_submission_leaves_out_comes_from_the_registration(self, lab: Lab) -> None:
        await lab.worker(tasks=(TaskSpec("mail", queue="mails", tier=1),), queues=("mails",))
        plain, urgent = await lab.put("mail"), await lab.put("mail", priority=0, queue="fast")
        unknown = await lab.put("nobody-knows")
        assert [
            ((await lab.job(i)).queue, (await lab.job(i)).priority) for i in (plain, urgent, unknown)
        ] == [
            ("mails", 1),
            ("fast", 0),
            ("default", 2),
        ]

    @scenario
    async def test_a_delayed_job_is_scheduled_from_the_storages_now(self, lab: Lab) -> None:
        job = await lab.job(await lab.put(delay=5))
        assert job.status is Status.SCHEDULED
        assert job.scheduled_at == pytest.approx(lab.clock.wall_us() / 1e6 + 5, abs=1e-3)

    @scenario
    async def test_run_at_is_a_wall_instant_and_one_in_the_past_is_ready(self, lab: Lab) -> None:
        now = lab.clock.wall_us() / 1e6
        later, past = await lab.put(run_at=now + 60), await lab.put(run_at=now - 60)
        assert await lab.statuses([later, past]) == [Status.SCHEDULED, Status.PENDING]
        assert (await lab.job(later)).scheduled_at == pytest.approx(now + 60, abs=1e-3)

    @scenario
    async def test_a_full_queue_refuses_and_other_queues_do_not(self, lab: Lab) -> None:
        answers = await lab.enqueue(*[new_job("work", queue="narrow") for _ in range(3)], queue_cap=2)
        assert [answer.verdict for answer in answers] == [Verdict.CREATED, Verdict.CREATED, Verdict.FULL]
        (wide,) = await lab.enqueue(new_job("work", queue="wide"), queue_cap=2)
        assert wide.verdict is Verdict.CREATED

    @scenario
    async def test_delayed_jobs_fill_a_queue_and_running_ones_do_not(self, lab: Lab) -> None:
        await lab.put(delay=60)
        (full,) = await lab.enqueue(new_job("work"), queue_cap=1)
        assert full.verdict is Verdict.FULL
        await lab.put("work")
        worker = await lab.worker()
        await worker.claim_one()
        (room,) = await lab.enqueue(new_job("work"), queue_cap=2)
        assert room.verdict is Verdict.CREATED

    @scenario
    async def test_a_key_that_is_known_is_answered_by_a_full_queue_too(self, lab: Lab) -> None:
        (first,) = await lab.enqueue(order("k", ORDER))
        (again,) = await lab.enqueue(order("k", ORDER), queue_cap=1)
        assert (again.id, again.verdict) == (first.id, Verdict.EXISTING)

    @scenario
    async def test_a_refused_job_leaves_no_key_behind(self, lab: Lab) -> None:
        await lab.put(queue="narrow")
        refused = new_job("work", queue="narrow", unique_key="u", idempotency_key="i")
        (full,) = await lab.enqueue(refused, queue_cap=1)
        (later,) = await lab.enqueue(new_job("work", queue="narrow", unique_key="u", idempotency_key="i"))
        assert (full.verdict, later.verdict) == (Verdict.FULL, Verdict.CREATED)


class TestIdempotencyKeys:
    @scenario
    async def test_fifty_parallel_enqueues_of_one_key_make_one_job(self, lab: Lab) -> None:
        """C21, one process; test_processes has eight."""
        others = [await lab.open() for _ in range(4)]
        storages = [lab.storage, *others]
        jobs = [order("order-881", ORDER if index % 2 else REORDERED) for index in range(50)]
        answers = await asyncio.gather(
            *(lab.enqueue(job, storage=storages[index % 5]) for index, job in enumerate(jobs))
        )
        verdicts = [answer.verdict for (answer,) in answers]
        assert sorted(verdicts) == [Verdict.CREATED] + [Verdict.EXISTING] * 49
        assert len({answer.id for (answer,) in answers}) == 1
        assert (await lab.storage.counts()).total == 1

    @scenario
    async def test_reordered_keyword_arguments_are_the_same_payload(self, lab: Lab) -> None:
        first, again = await lab.enqueue(order("k", ORDER), order("k", REORDERED))
        assert (again.id, again.verdict, again.by) == (first.id, Verdict.EXISTING, "idempotency")

    @scenario
    async def test_another_payload_is_a_conflict_and_nothing_is_stored(self, lab: Lab) -> None:
        first, other = await lab.enqueue(order("k", ORDER), order("k", {**ORDER, "amount": 11}))
        assert (other.id, other.verdict) == (first.id, Verdict.CONFLICT)
        assert (await lab.storage.counts()).total == 1
        assert (await lab.job(first.id)).kwargs == ORDER

    @scenario
    async def test_another_task_under_the_key_is_a_conflict(self, lab: Lab) -> None:
        await lab.enqueue(order("k", ORDER))
        (other,) = await lab.enqueue(new_job("refund", kwargs=ORDER, idempotency_key="k"))
        assert other.verdict is Verdict.CONFLICT

    @scenario
    async def test_another_namespace_gets_a_job_of_its_own(self, lab: Lab) -> None:
        beta = await lab.open(namespace="beta")
        (first,) = await lab.enqueue(order("k", ORDER))
        (other,) = await lab.enqueue(order("k", ORDER), storage=beta)
        assert (first.verdict, other.verdict) == (Verdict.CREATED, Verdict.CREATED)
        assert first.id != other.id
        assert await lab.storage.get(other.id) is None
        assert (await beta.counts()).total == (await lab.storage.counts()).total == 1

    @scenario
    async def test_the_key_holds_in_every_state_of_its_job(self, lab: Lab) -> None:
        worker = await lab.worker(tasks=("pay",))
        (first,) = await lab.enqueue(order("k", ORDER))

        async def again() -> Status | None:
            (answer,) = await lab.enqueue(order("k", ORDER))
            assert (answer.id, answer.verdict) == (first.id, Verdict.EXISTING)
            return answer.status

        seen = [await again()]
        job = await worker.claim_one()
        seen.append(await again())
        await worker.settle(job, COMPLETED)
        seen.append(await again())
        assert seen == [Status.PENDING, Status.RUNNING, Status.COMPLETED]

    @scenario
    async def test_a_key_that_was_enqueued_outlives_the_process_that_did_it(self, lab: Lab) -> None:
        first_process = await lab.open()
        (first,) = await lab.enqueue(order("k", ORDER), storage=first_process)
        await first_process.close()
        (again,) = await lab.enqueue(order("k", REORDERED), storage=await lab.open())
        assert (again.id, again.verdict) == (first.id, Verdict.EXISTING)

    @scenario
    async def test_the_job_tells_its_key(self, lab: Lab) -> None:
        (first,) = await lab.enqueue(order("k", ORDER))
        assert (await lab.job(first.id)).idempotency_key == "k"


async def _complete(lab: Lab, job_id: str) -> None:
    worker = await lab.worker("ender")
    job = await worker.claim_one()
    assert job.id == job_id
    await worker.settle(job, COMPLETED)


async def _dead_letter(lab: Lab, job_id: str) -> None:
    worker = await lab.worker("ender")
    job = await worker.claim_one()
    assert job.id == job_id
    await worker.settle(job, dead())


async def _cancel(lab: Lab, job_id: str) -> None:
    assert await lab.storage.cancel([job_id]) == [Cancelled.CANCELLED]


async def _expire(lab: Lab, job_id: str) -> None:
    lab.clock.advance(31)
    await lab.storage.promote(100)
    assert await lab.status(job_id) is Status.EXPIRED


async def _discard(lab: Lab, job_id: str) -> None:
    await _dead_letter(lab, job_id)
    assert await lab.storage.discard([job_id]) == [Done.DONE]


ENDS: dict[str, Callable[[Lab, str], Awaitable[None]]] = {
    "completed": _complete,
    "dead": _dead_letter,
    "cancelled": _cancel,
    "expired": _expire,
    "discarded": _discard,
}


def unique(key: str = "sync-42", **fields: Any) -> NewJob:
    return new_job("work", unique_key=key, expires_in=30, **fields)


class TestUniqueKeys:
    @scenario
    async def test_a_held_key_answers_with_its_holder(self, lab: Lab) -> None:
        (first,) = await lab.enqueue(unique())
        (again,) = await lab.enqueue(unique())
        assert (again.id, again.verdict, again.by) == (first.id, Verdict.EXISTING, "unique")
        assert (await lab.storage.counts()).total == 1

    @scenario
    async def test_parallel_enqueues_of_one_key_make_one_job(self, lab: Lab) -> None:
        others = [await lab.open() for _ in range(3)]
        answers = await asyncio.gather(
            *(lab.enqueue(unique(), storage=storage) for storage in [lab.storage, *others] * 5)
        )
        assert [answer.verdict for (answer,) in answers].count(Verdict.CREATED) == 1
        assert len({answer.id for (answer,) in answers}) == 1

    @scenario
    async def test_the_key_belongs_to_one_queue_and_one_namespace(self, lab: Lab) -> None:
        beta = await lab.open(namespace="beta")
        answers = [
            (await lab.enqueue(unique()))[0],
            (await lab.enqueue(unique(queue="other")))[0],
            (await lab.enqueue(unique(), storage=beta))[0],
        ]
        assert {answer.verdict for answer in answers} == {Verdict.CREATED}

    @scenario
    async def test_the_key_is_held_while_the_job_waits_for_a_retry(self, lab: Lab) -> None:
        worker = await lab.worker()
        (first,) = await lab.enqueue(unique())
        await worker.settle(await worker.claim_one(), retry(5))
        (again,) = await lab.enqueue(unique())
        assert (again.id, again.status) == (first.id, Status.SCHEDULED)

    @scenario
    async def test_the_key_is_held_while_the_job_is_held_running_or_given_back(self, lab: Lab) -> None:
        worker = await lab.worker()
        (first,) = await lab.enqueue(unique())

        async def holder() -> tuple[str, Status | None]:
            (answer,) = await lab.enqueue(unique())
            return answer.id, answer.status

        job = await worker.hold_one()
        assert await holder() == (first.id, Status.CLAIMED)
        await worker.begin(job)
        assert await holder() == (first.id, Status.RUNNING)
        await worker.release(job)
        assert await holder() == (first.id, Status.PENDING)

    @scenario
    async def test_a_delayed_job_holds_its_key(self, lab: Lab) -> None:
        (first,) = await lab.enqueue(unique(delay=10))
        (again,) = await lab.enqueue(unique())
        assert again.id == first.id

    @pytest.mark.parametrize("end", sorted(ENDS))
    @scenario
    async def test_the_key_is_free_as_soon_as_the_job_is(self, lab: Lab, end: str) -> None:
        """C20: completed, dead, cancelled, expired, discarded."""
        (first,) = await lab.enqueue(unique())
        await ENDS[end](lab, first.id)
        second, third = await lab.enqueue(unique(), unique())
        assert (second.verdict, third.verdict) == (Verdict.CREATED, Verdict.EXISTING)
        assert second.id != first.id

    @scenario
    async def test_the_key_is_free_once_a_reaped_job_completed(self, lab: Lab) -> None:
        """C20 b."""
        survivor = await lab.worker("w2")
        await lab.arm(survivor)
        (first,) = await lab.enqueue(unique())
        victim = await lab.worker("w1")
        await victim.claim_one()
        await lab.storage.declare_dead(victim.ref, "killed")
        assert await lab.reap_all() == [first.id]
        (meanwhile,) = await lab.enqueue(unique())
        assert (meanwhile.id, meanwhile.verdict) == (first.id, Verdict.EXISTING)
        await survivor.complete(await survivor.claim_one())
        (after,) = await lab.enqueue(unique())
        assert after.verdict is Verdict.CREATED

    @scenario
    async def test_a_job_that_is_a_duplicate_by_two_keys_is_judged_by_its_payload_first(
        self, lab: Lab
    ) -> None:
        (first,) = await lab.enqueue(new_job("work", 1, unique_key="u", idempotency_key="i"))
        (other,) = await lab.enqueue(new_job("work", 2, unique_key="u", idempotency_key="i"))
        assert (other.id, other.verdict) == (first.id, Verdict.CONFLICT)


class TestOpaqueRecords:
    """C06: what storage cannot read it hands out as it is, and nothing around it suffers."""

    JUNK = bytes.fromhex("ff001337")

    async def _ten_with_two_bad(self, lab: Lab) -> list[str]:
        made = await lab.put_many(10, tags=["x"])
        lab.backend.corrupt(made[3], "payload", self.JUNK)
        lab.backend.corrupt(made[6], "options", self.JUNK)
        return made

    @scenario
    async def test_bad_records_are_handed_out_among_the_good_ones(self, lab: Lab) -> None:
        made = await self._ten_with_two_bad(lab)
        given = await (await lab.worker()).claim(20)
        assert [job.id for job in given] == made
        assert (given[3].payload, given[6].options) == (self.JUNK, self.JUNK)
        assert codec.decode_payload(given[4].payload) == ([4], {})

    @scenario
    async def test_a_bad_payload_is_shown_as_raw_bytes(self, lab: Lab) -> None:
        made = await self._ten_with_two_bad(lab)
        job = await lab.job(made[3])
        assert (job.args, job.kwargs, job.raw_payload) == (None, None, self.JUNK.hex())

    @scenario
    async def test_bad_options_do_not_break_reads(self, lab: Lab) -> None:
        made = await self._ten_with_two_bad(lab)
        assert (await lab.job(made[6])).status is Status.PENDING
        assert {job.id for job in await lab.everything()} == set(made)

    @pytest.mark.parametrize("field", ["result", "error", "history"])
    @scenario
    async def test_a_bad_field_of_an_ended_job_breaks_nothing(self, lab: Lab, field: CorruptField) -> None:
        job_id = await lab.end(dead("ended"))
        lab.backend.corrupt(job_id, field, self.JUNK)
        assert await lab.status(job_id) is Status.DEAD_LETTER
        assert ids(await lab.everything()) == [job_id]
        assert await lab.storage.history(job_id) is not None
        assert len(await lab.storage.dlq_groups(10)) == 1
        assert await lab.storage.replay([job_id]) == [Done.DONE]

    @scenario
    async def test_a_job_with_bad_bytes_can_still_be_settled_beside_others(self, lab: Lab) -> None:
        made = await self._ten_with_two_bad(lab)
        worker = await lab.worker()
        given = await worker.claim(10)
        lab.backend.corrupt(made[8], "history", self.JUNK)
        await worker.complete(*given)
        assert set(await lab.statuses(made)) <= TERMINAL

    @scenario
    async def test_bad_options_reach_whoever_has_to_decide_about_an_orphan(self, lab: Lab) -> None:
        made = await self._ten_with_two_bad(lab)
        worker = await lab.worker()
        await worker.claim(10)
        await lab.storage.declare_dead(worker.ref, "killed")
        found = {job.id: job for job in await lab.orphans()}
        assert set(found) == set(made)
        assert found[made[6]].options == self.JUNK
