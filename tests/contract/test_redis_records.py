"""Redis: what another hand did to a record breaks no list, no batch and no housekeeping; and what only this
backend's sets can get wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from fluxmesh.job import Job, Status
from fluxmesh.outcome import Transition
from fluxmesh.query import Query, encode_cursor
from fluxmesh.storage.redis import find as find_verb
from fluxmesh.storage.values import (
    Cancelled,
    Done,
    OnDeath,
    ProgressNote,
    Settle,
    Settled,
    Standing,
    Verdict,
    WorkerView,
)
from fluxmesh.testing.contract.lab import (
    BEAT_S,
    COMPLETED,
    CRASHED,
    Lab,
    dead,
    ids,
    new_job,
    own,
    retention,
    retry,
    scenario,
)
from fluxmesh.testing.contract.liveness import LEASE_S, victim_with
from tests.contract.test_redis import RedisBackend, backend, redis_server  # noqa: F401

FIELDS = (
    "place", "seq", "rid", "queue", "tier", "task", "token", "life", "attempts", "snoozes", "interruptions",
    "crashes", "created_us", "payload", "options", "due_us", "expires_us", "idempotency_key", "unique_key",
    "concurrency_key", "concurrency_limit", "tags", "lane", "pos", "worker_id", "request", "started_us",
    "waiting_for", "hops", "missed", "cancel", "percent", "message", "on_death", "history", "ended_us",
    "result", "error", "reason", "fingerprint",
)  # fmt: skip
# Bytes that are no text and no number; numbers that Lua takes for such and that are none here; one too many.
JUNK = (b"\xff\x00\xc1", b"nan", b"inf", b"-1", b"1.5", b"9" * 400)
SPOILS = (
    "another type",
    "gone",
    *(f"no {name}" for name in FIELDS),
    *(f"{junk[:4]!r} in {name}" for name in FIELDS for junk in JUNK),
)
_JUNK = {f"{junk[:4]!r}": junk for junk in JUNK}


def spoil(lab: Lab, job_id: str, how: str) -> None:
    """Do this to the record of a job, past the storage's verbs."""
    assert isinstance(lab.backend, RedisBackend)
    client, name = lab.backend.client, f"fluxmesh:jobs:{job_id}"
    if how in ("another type", "gone"):
        assert client.delete(name) == 1
        if how == "another type":
            client.set(name, "a text")
    elif how.startswith("no "):
        client.hdel(name, how.removeprefix("no "))
    else:
        junk, _, field = how.partition(" in ")
        client.hset(name, field, _JUNK[junk])


Body = Callable[[Any, Lab, Sequence[str]], Awaitable[None]]


def with_spoils(body: Body) -> Callable[[Any, RedisBackend], None]:
    """Play it among all kinds of bad records at once; if that fails, among each alone: who is it?"""

    def plays(case: object, redis: RedisBackend, hows: Sequence[str]) -> Exception | None:
        redis.client.flushdb()
        try:
            scenario(body)(case, redis, hows)
        except Exception as error:
            return error
        return None

    def test(self: object, backend: RedisBackend) -> None:  # noqa: F811
        failed = plays(self, backend, SPOILS)
        if failed is not None:
            alone = {how: error for how in SPOILS if (error := plays(self, backend, [how])) is not None}
            told = "\n".join(f"{how}: {str(error)[:300]}" for how, error in alone.items())
            raise AssertionError(f"alone it fails with {len(alone)}:\n{told}") from failed

    test.__doc__ = body.__doc__
    return test


def every_second(made: Sequence[str]) -> tuple[list[str], list[str]]:
    """(those that stay good, those to be spoilt): each bad one stands between two good ones."""
    return list(made[::2]), list(made[1::2])


def spoil_all(lab: Lab, bad: Sequence[str], hows: Sequence[str]) -> None:
    for job_id, how in zip(bad, hows, strict=True):
        spoil(lab, job_id, how)


async def put_among(lab: Lab, hows: Sequence[str], **fields: Any) -> tuple[list[str], list[str], list[str]]:
    """(all, good, bad) new jobs; the bad ones are still as they should be."""
    made = await lab.put_many(2 * len(hows) + 1, **fields)
    return made, *every_second(made)


async def read_everything(lab: Lab, bad: Sequence[str]) -> list[Job]:
    """Every read there is; the jobs that a list of all shows."""
    for state in Status:
        await lab.everything(Query(state=state))
        await lab.everything(Query(state=state, queue="default"))
    for query in (Query(queue="default"), Query(task="work"), Query(tag="x"), Query(worker="w1")):
        await lab.everything(query)
    for job_id in bad:
        await lab.storage.get(job_id)
        await lab.storage.history(job_id)
    await lab.storage.counts()
    await lab.storage.queue_stats()
    await lab.storage.dlq_groups(10)
    await lab.storage.fleet()
    return await lab.everything()


async def end_many(lab: Lab, transition: Transition, count: int, **fields: Any) -> list[str]:
    """Jobs that a worker has ended like this, one instant each."""
    made = await lab.put_many(count, **fields)
    worker = await lab.worker("passing")
    for job in await worker.claim(count):
        lab.clock.advance(0.001)
        assert await worker.settle(job, transition) is Settled.APPLIED
    await lab.storage.declare_dead(worker.ref, "left")
    return made


class TestBadRecords:
    @with_spoils
    async def test_a_bad_record_hides_no_other_job(self, lab: Lab, hows: Sequence[str]) -> None:
        _, good, bad = await put_among(lab, hows, tags=["x"])
        spoil_all(lab, bad, hows)
        shown = ids(await read_everything(lab, bad))
        assert [job_id for job_id in shown if job_id not in bad] == good[::-1]

    @with_spoils
    async def test_a_bad_dead_letter_hides_no_other(self, lab: Lab, hows: Sequence[str]) -> None:
        good, bad = every_second(await end_many(lab, dead(), 2 * len(hows) + 1))
        spoil_all(lab, bad, hows)
        await read_everything(lab, bad)
        found = ids(await lab.everything(Query(state=Status.DEAD_LETTER)))
        assert set(found) - set(bad) == set(good)
        assert sum(group.count for group in await lab.storage.dlq_groups(10)) == len(good) + len(bad)

    @with_spoils
    async def test_an_operator_s_batch_is_done_for_all_the_others(
        self, lab: Lab, hows: Sequence[str]
    ) -> None:
        batch, good, bad = await put_among(lab, hows)
        spoil_all(lab, bad, hows)
        assert set((await lab.storage.reprioritise(batch, 1))[::2]) == {Done.DONE}
        assert set((await lab.storage.cancel(batch))[::2]) == {Cancelled.CANCELLED}
        assert set((await lab.storage.replay(batch))[::2]) == {Done.DONE}
        assert set(await lab.statuses(good)) == {Status.PENDING}
        await lab.storage.cancel(good)
        assert set((await lab.storage.discard(batch))[::2]) == {Done.DONE}

    @with_spoils
    async def test_pause_gives_back_what_it_can_read(self, lab: Lab, hows: Sequence[str]) -> None:
        made, good, bad = await put_among(lab, hows)
        worker = await lab.worker()
        assert len(await worker.hold(len(made))) == len(made)
        spoil_all(lab, bad, hows)
        assert await lab.storage.pause("default")
        assert set(await lab.statuses(good)) == {Status.PENDING}

    @with_spoils
    async def test_retention_comes_to_an_end_and_leaves_no_bad_record(
        self, lab: Lab, hows: Sequence[str]
    ) -> None:
        made = await end_many(lab, COMPLETED, 2 * len(hows) + 1, tags=["x"])
        spoil_all(lab, every_second(made)[1], hows)
        lab.clock.advance(101)
        pruned = 0
        for _ in range(20):
            answer = await lab.storage.prune(retention(), 100)
            pruned += answer.jobs
            if not answer.more:
                break
        assert pruned == len(made)
        assert not await lab.everything()
        assert isinstance(lab.backend, RedisBackend)
        assert lab.backend.rows().get("jobs", 0) == 0


class TestLists:
    @scenario
    async def test_ends_at_one_instant_are_paged_without_loss(self, lab: Lab) -> None:
        made = await lab.put_many(23)
        await lab.storage.cancel(made)
        found: list[str] = []
        cursor = None
        for _ in range(20):
            page = await lab.storage.find(Query(state=Status.CANCELLED), cursor=cursor, limit=2)
            found += ids(page.items)
            if page.next_cursor is None:
                break
            cursor = page.next_cursor
            # The very job at which the next page begins goes away in between.
            await lab.storage.discard([found[-1]])
        assert found == sorted(made, reverse=True)

    @scenario
    async def test_what_waits_for_a_shut_key_is_found_by_its_state(self, lab: Lab) -> None:
        made = await lab.put_many(4, concurrency_key="k:1", concurrency_limit=1)
        alien = await lab.put("alien")
        (running,) = await (await lab.worker()).claim(3)
        found = ids(await lab.everything(Query(state=Status.PENDING)))
        assert sorted(found) == sorted({*made, alien} - {running.id})

    @scenario
    async def test_a_rare_state_is_found_among_very_many_of_a_queue(self, lab: Lab) -> None:
        rare = await lab.put_many(3)
        worker = await lab.worker()
        for job in await worker.claim(3):
            await worker.settle(job, dead())
        await lab.put_many(find_verb.SCAN_CAP + 100)
        query = Query(state=Status.DEAD_LETTER, queue="default")
        page = await lab.storage.find(query, limit=2)
        assert (ids(page.items), page.partial) == (rare[:0:-1], False)
        assert ids((await lab.storage.find(query, cursor=page.next_cursor)).items) == rare[:1]

    @pytest.mark.parametrize("place", [(), ("x",), (1, 2, 3), (1 << 70, "a"), ("a", "b"), (1, "a", "b")])
    @scenario
    async def test_a_forged_place_is_refused_or_ends_the_list(
        self, lab: Lab, place: tuple[int | str, ...]
    ) -> None:
        await lab.put_many(2)
        for query in (Query(), Query(state=Status.PENDING), Query(state=Status.COMPLETED)):
            with pytest.raises(ValueError, match="cursor"):
                await lab.storage.find(query, cursor=encode_cursor(query, place))


class TestKeys:
    @scenario
    async def test_a_key_of_a_pruned_job_is_forgotten_when_its_time_is_over(self, lab: Lab) -> None:
        assert isinstance(lab.backend, RedisBackend)
        await lab.end(COMPLETED, idempotency_key="i")
        lab.clock.advance(101)
        assert (await lab.storage.prune(retention(), 10)).jobs == 1
        lab.clock.advance(9_898)
        await lab.storage.prune(retention(), 10)
        assert lab.backend.rows()["idempotency"] == 1
        lab.clock.advance(1)
        await lab.storage.prune(retention(), 10)
        assert not {"idempotency", "forget"} & set(lab.backend.rows())

    @scenario
    async def test_a_key_that_has_passed_to_a_new_job_stays_when_the_old_one_goes(self, lab: Lab) -> None:
        old = await lab.end(dead("ended"), idempotency_key="i")
        assert isinstance(lab.backend, RedisBackend)
        lab.backend.client.hset("fluxmesh:idempotency:i", "forget_us", "1")
        (new,) = await lab.enqueue(new_job("other", idempotency_key="i"))
        assert new.verdict is Verdict.CREATED
        lab.clock.advance(1_001)
        await lab.storage.prune(retention(), 10)
        assert await lab.storage.get(old) is None
        (again,) = await lab.enqueue(new_job("other", idempotency_key="i"))
        assert (again.id, again.verdict) == (new.id, Verdict.EXISTING)


class TestLostLists:
    @scenario
    async def test_an_owner_that_is_not_listed_is_found_by_its_record(self, lab: Lab) -> None:
        """C05: else its jobs would be nobody's for good."""
        assert isinstance(lab.backend, RedisBackend)
        victim, survivor = await victim_with(lab, 2)
        assert lab.backend.client.hdel("fluxmesh:owners", str(victim.ref.epoch)) == 1
        await lab.pass_time(LEASE_S + 0.5, survivor)
        assert sorted(job.id for job in await lab.orphans()) == sorted(victim.owned)
        assert len(await lab.reap_all()) == 2

    @scenario
    async def test_nobody_waits_without_a_record_for_ever(self, lab: Lab) -> None:
        assert isinstance(lab.backend, RedisBackend)
        worker = await lab.worker()
        assert await worker.claim(1) == []
        assert lab.backend.client.zcard("fluxmesh:waiting") == 1
        lab.backend.forget_worker(worker.ref)
        await lab.storage.prune(retention(), 10)
        assert lab.backend.client.exists("fluxmesh:waiting") == 0


# What is not there is as it was at the beginning: a record without a token or counters is a plain job's.
TOO_LITTLE = [
    how
    for how in SPOILS
    if how.split(" ")[-1] in ("token", "life", "attempts") and not how.startswith(("b'-1", "no "))
]


class TestWorkersAmongBadRecords:
    """A spoilt record neither stops a batch nor is half of one ever applied."""

    @with_spoils
    async def test_a_claim_gives_all_the_others(self, lab: Lab, hows: Sequence[str]) -> None:
        made, good, bad = await put_among(lab, hows)
        spoil_all(lab, bad, hows)
        worker = await lab.worker()
        given = await worker.claim(len(made))
        assert set(ids(given)) >= set(good)
        await worker.complete(*(job for job in given if job.id in good))

    @pytest.mark.parametrize("how", TOO_LITTLE)
    @scenario
    async def test_a_job_of_which_too_little_is_left_is_a_dead_letter(self, lab: Lab, how: str) -> None:
        made = await lab.put_many(3, expires_in=60)
        spoil(lab, made[1], how)
        await (await lab.worker()).claim(3)
        job = await lab.job(made[1])
        assert (job.status, job.reason) == (Status.DEAD_LETTER, "undecodable")
        counts = await lab.storage.counts()
        assert (counts.by_status[Status.DEAD_LETTER], counts.by_status[Status.PENDING]) == (1, 0)
        assert await lab.storage.replay([made[1]]) == [Done.DONE]

    @with_spoils
    async def test_due_jobs_are_promoted(self, lab: Lab, hows: Sequence[str]) -> None:
        made, good, bad = await put_among(lab, hows, delay=5, expires_in=60)
        spoil_all(lab, bad, hows)
        worker = await lab.worker()
        lab.clock.advance(6)
        given: set[str] = set()
        for _ in range(10):  # at most 250 are promoted in one exchange
            given |= set(ids(await worker.claim(len(made))))
        assert given >= set(good)

    @with_spoils
    async def test_late_jobs_expire(self, lab: Lab, hows: Sequence[str]) -> None:
        made, good, bad = await put_among(lab, hows, expires_in=1)
        spoil_all(lab, bad, hows)
        lab.clock.advance(6)
        await lab.storage.promote(len(made))
        assert set(await lab.statuses(good)) == {Status.EXPIRED}

    @pytest.mark.parametrize("end", [COMPLETED, dead()], ids=lambda end: end.status)
    def test_a_batch_of_ends_is_settled(self, backend: RedisBackend, end: Transition) -> None:  # noqa: F811
        async def body(_: object, lab: Lab, hows: Sequence[str]) -> None:
            made, good, bad = await put_among(lab, hows)
            worker = await lab.worker()
            given = await worker.claim(len(made))
            spoil_all(lab, bad, hows)
            answer = await worker.exchange(settle=[Settle(job.id, job.token, end) for job in given])
            assert set(answer.settled[::2]) == {Settled.APPLIED}
            assert set(await lab.statuses(good)) == {end.status}

        with_spoils(body)(self, backend)

    @with_spoils
    async def test_a_dead_worker_s_jobs_come_back(self, lab: Lab, hows: Sequence[str]) -> None:
        made, good, bad = await put_among(lab, hows)
        worker = await lab.worker()
        await worker.exchange(slots=len(made) - 1, extra=1)
        spoil_all(lab, bad, hows)
        await worker.beat()
        await lab.storage.declare_dead(worker.ref, "killed")
        await lab.reap_all()
        assert set(await lab.statuses(good)) == {Status.PENDING}

    @with_spoils
    async def test_held_jobs_are_taken_and_released(self, lab: Lab, hows: Sequence[str]) -> None:
        made, good, bad = await put_among(lab, hows)
        worker, other = await lab.worker(), await lab.worker("w2")
        held = {job.id: job for job in await worker.hold(len(made))}
        spoil_all(lab, bad, hows)
        released = await worker.release(*(held[job_id] for job_id in [good[0], *bad]))
        assert released[0]
        lab.clock.advance(1)
        taken = ids((await other.take_held(len(made))).running) + ids(await other.claim(len(made)))
        assert set(taken) >= set(good)


PLAIN = {
    *("place", "task", "payload", "queue", "tier", "seq", "created_us", "options", "due_us", "token", "lane"),
    *("worker_id", "request", "started_us", "more", "idempotency_key", "tags", "waiting_for", "cancel"),
}


class TestLostRegistrations:
    """A failover may lose a registration; then its epoch is given a second time, to another worker."""

    @scenario
    async def test_the_first_holder_of_an_epoch_is_fenced_and_does_no_harm_to_the_second(
        self, lab: Lab
    ) -> None:
        assert isinstance(lab.backend, RedisBackend)
        first = await lab.worker("first")
        lab.backend.forget_worker(first.ref)
        lab.backend.client.hincrby("fluxmesh:counters", "epoch", -1)
        second = await lab.worker("second")
        assert second.ref.epoch == first.ref.epoch
        await lab.put_many(2)
        job = await second.claim_one()
        for _ in range(3):
            lab.clock.advance(BEAT_S + 1)
            await second.beat()
            assert (await first.beat()).standing is Standing.FENCED
        assert await lab.status(job.id) is Status.RUNNING
        answer = await first.exchange(slots=1)
        assert (answer.standing, answer.running) == (Standing.FENCED, ())
        assert not await lab.storage.declare_dead(first.ref, "killed")
        held = await second.hold_one()
        lab.clock.advance(1)
        await second.beat()
        assert (await lab.storage.take_held(first.ref, 1)).running == ()
        assert await lab.storage.transfer(first.ref, [own(held)]) == []
        assert await second.settle(job) is Settled.APPLIED

    @scenario
    async def test_an_epoch_that_a_beat_puts_back_is_given_to_nobody_else(self, lab: Lab) -> None:
        """Else the jobs of its first holder are on nobody's list, and stay running for ever."""
        assert isinstance(lab.backend, RedisBackend)
        first = await lab.worker("first")
        lab.backend.forget_worker(first.ref)
        lab.backend.client.hincrby("fluxmesh:counters", "epoch", -1)
        assert (await first.beat()).standing is Standing.GOOD
        await lab.put_many(2)
        job = await first.claim_one()
        second = await lab.worker("second")
        assert second.ref.epoch > first.ref.epoch
        assert await second.claim_one()
        await lab.storage.declare_dead(first.ref, "killed")
        orphans = (await lab.storage.orphans(10)).jobs
        assert [(orphan.id, orphan.worker) for orphan in orphans] == [(job.id, first.ref)]


class TestDeadEars:
    @scenario
    async def test_a_wake_up_that_nobody_hears_is_given_to_the_next(self, lab: Lab) -> None:
        """The first that waits was killed, and storage does not know yet."""
        gone = await lab.open()
        first = await lab.worker("first", storage=gone)
        assert await first.claim(1) == []
        await gone.close()
        second = await lab.worker("second")
        assert await second.claim(1) == []
        waiting = asyncio.ensure_future(second.storage.wait_for_work(second.ref, 30))
        await asyncio.sleep(0)
        await lab.put()
        assert await waiting
        assert len(await second.claim(1)) == 1


class TestBytes:
    @scenario
    async def test_a_call_carries_so_many_bytes_and_the_rest_comes_with_the_next(self, lab: Lab) -> None:
        large = [new_job("work", "x" * 1_000_000) for _ in range(20)]
        assert {put.verdict for put in await lab.enqueue(*large)} == {Verdict.CREATED}
        worker = await lab.worker()
        answers = [await worker.exchange(slots=20), await worker.exchange(slots=20)]
        assert [len(answer.running) for answer in answers] == [16, 4]
        assert [answer.more for answer in answers] == [True, False]
        assert [job.id for answer in answers for job in answer.running] == [job.id for job in large]


class TestMore:
    """The hot path reads only the plain fields of a record that does not say that it has more."""

    @scenario
    async def test_a_job_that_has_not_ended_says_so_if_it_has_more_than_a_plain_one(self, lab: Lab) -> None:
        assert isinstance(lab.backend, RedisBackend)
        client, seen = lab.backend.client, set()

        def look() -> None:
            for name in client.scan_iter("fluxmesh:jobs:*"):
                record = {field.decode(): value for field, value in client.hgetall(name).items()}
                if int(record["place"]) < 5:
                    beyond = set(record) - PLAIN
                    seen.update(beyond)
                    only_slot = beyond == {"slot"} and record.get("more") == b"s" + record["slot"]
                    assert only_slot or not beyond or record.get("more") == b"1", (name, beyond)

        await lab.put_many(3, tags=["x"])
        for fields in (
            {"affinity_key": "k"},
            {"affinity_key": "k", "expires_in": 60},
            {"affinity_key": "k", "delay": 1},
            {"affinity_key": "k", "delay": 1, "unique_key": "v"},
            {"expires_in": 50},
            {"unique_key": "u"},
            {"concurrency_key": "k"},
            {"delay": 1},
        ):
            await lab.put(**fields)
        worker, thief = await lab.worker(), await lab.worker("w2")
        look()
        retried, noted, *rest = await worker.claim(4)
        await worker.settle(retried, retry(0))
        note = ProgressNote(noted.id, noted.token, 50, "half", OnDeath.TIMEOUT)
        assert await lab.storage.progress(worker.ref, [note]) == [True]
        look()
        held = await worker.hold(2)
        lab.clock.advance(1)
        look()
        assert (await thief.take_held(2)).running
        look()
        await lab.pass_time(2 * BEAT_S + 1)
        await lab.storage.beat(worker.ref, [], WorkerView(worker.registration))
        look()
        await lab.storage.reprioritise([job.id for job in [*held, *rest]], 1)
        await lab.storage.declare_dead(thief.ref, "killed")
        await lab.reap_all(CRASHED)
        look()
        assert seen >= {"expires_us", "unique_key", "concurrency_key", "attempts", "crashes", "history"}
        assert seen >= {"percent", "on_death", "hops", "missed"}
