"""Redis: what another hand did to a record breaks no list, no batch and no housekeeping; and what only this
backend's sets can get wrong."""

from __future__ import annotations

import pytest

from fluxmesh.job import Job, Status
from fluxmesh.outcome import Transition
from fluxmesh.query import Query, encode_cursor
from fluxmesh.storage.redis import find as find_verb
from fluxmesh.storage.values import Cancelled, Done, Settle, Settled, Verdict
from fluxmesh.testing.contract.lab import COMPLETED, Lab, dead, ids, new_job, retention, scenario
from fluxmesh.testing.contract.liveness import LEASE_S, victim_with
from tests.contract.test_redis import RedisBackend, backend, redis_server  # noqa: F401

FIELDS = (
    "place", "queue", "tier", "task", "token", "seq", "life", "attempts", "crashes", "created_us", "payload",
    "percent", "worker_id", "lane", "due_us", "options", "rid", "history", "error", "result", "reason",
)  # fmt: skip
JUNK = b"\xff\x00\xc1"
SPOILS = ["another type", "gone", *(f"no {name}" for name in FIELDS), *(f"junk in {name}" for name in FIELDS)]


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
        client.hset(name, how.removeprefix("junk in "), JUNK)


async def read_everything(lab: Lab, bad: str) -> list[Job]:
    """Every read there is; the jobs that a list of all shows."""
    for state in Status:
        await lab.everything(Query(state=state))
        await lab.everything(Query(state=state, queue="default"))
    for query in (Query(queue="default"), Query(task="work"), Query(tag="x"), Query(worker="w1")):
        await lab.everything(query)
    await lab.storage.get(bad)
    await lab.storage.history(bad)
    await lab.storage.counts()
    await lab.storage.queue_stats()
    await lab.storage.dlq_groups(10)
    await lab.storage.fleet()
    return await lab.everything()


class TestBadRecords:
    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_a_bad_record_hides_no_other_job(self, lab: Lab, how: str) -> None:
        before, bad, after = await lab.put_many(3, tags=["x"])
        spoil(lab, bad, how)
        assert [job_id for job_id in ids(await read_everything(lab, bad)) if job_id != bad] == [after, before]

    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_a_bad_dead_letter_hides_no_other(self, lab: Lab, how: str) -> None:
        before, bad, after = [await lab.end(dead("ended")) for _ in range(3)]
        spoil(lab, bad, how)
        await read_everything(lab, bad)
        found = ids(await lab.everything(Query(state=Status.DEAD_LETTER)))
        assert set(found) - {bad} == {after, before}
        assert sum(group.count for group in await lab.storage.dlq_groups(10)) == 3

    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_an_operator_s_batch_is_done_for_all_the_others(self, lab: Lab, how: str) -> None:
        before, bad, after = await lab.put_many(3)
        spoil(lab, bad, how)
        batch = [before, bad, after]
        assert (await lab.storage.reprioritise(batch, 1))[::2] == [Done.DONE] * 2
        assert (await lab.storage.cancel(batch))[::2] == [Cancelled.CANCELLED] * 2
        assert (await lab.storage.replay(batch))[::2] == [Done.DONE] * 2
        assert await lab.statuses([before, after]) == [Status.PENDING] * 2
        await lab.storage.cancel([before, after])
        assert (await lab.storage.discard(batch))[::2] == [Done.DONE] * 2

    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_pause_gives_back_what_it_can_read(self, lab: Lab, how: str) -> None:
        made = await lab.put_many(3)
        worker = await lab.worker()
        assert len(await worker.hold(3)) == 3
        spoil(lab, made[1], how)
        assert await lab.storage.pause("default")
        assert await lab.statuses([made[0], made[2]]) == [Status.PENDING] * 2

    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_retention_comes_to_an_end_and_leaves_no_bad_record(self, lab: Lab, how: str) -> None:
        ended = [await lab.end(COMPLETED, tags=["x"]) for _ in range(3)]
        spoil(lab, ended[1], how)
        lab.clock.advance(101)
        assert (await lab.storage.prune(retention(), 100)).jobs == 3
        assert not await lab.everything()
        assert isinstance(lab.backend, RedisBackend)
        assert lab.backend.rows().get("jobs", 0) == 0
        assert not (await lab.storage.prune(retention(), 100)).more


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


NOT_RUN = [
    how for how in SPOILS if how.partition(" ")[2].removeprefix("in ") in ("token", "life", "attempts")
]


class TestWorkersAmongBadRecords:
    """A spoilt record neither stops a batch nor is half of one ever applied."""

    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_a_claim_gives_all_the_others(self, lab: Lab, how: str) -> None:
        made = await lab.put_many(3)
        spoil(lab, made[1], how)
        assert set(ids(await (await lab.worker()).claim(3))) >= {made[0], made[2]}

    @pytest.mark.parametrize("how", NOT_RUN)
    @scenario
    async def test_a_job_of_which_too_little_is_left_is_a_dead_letter(self, lab: Lab, how: str) -> None:
        made = await lab.put_many(3)
        spoil(lab, made[1], how)
        await (await lab.worker()).claim(3)
        job = await lab.job(made[1])
        assert (job.status, job.reason) == (Status.DEAD_LETTER, "undecodable")
        counts = await lab.storage.counts()
        assert (counts.by_status[Status.DEAD_LETTER], counts.by_status[Status.PENDING]) == (1, 0)
        assert await lab.storage.replay([made[1]]) == [Done.DONE]

    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_due_jobs_are_promoted(self, lab: Lab, how: str) -> None:
        made = await lab.put_many(3, delay=5, expires_in=60)
        spoil(lab, made[1], how)
        worker = await lab.worker()
        lab.clock.advance(6)
        assert set(ids(await worker.claim(3))) >= {made[0], made[2]}

    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_late_jobs_expire(self, lab: Lab, how: str) -> None:
        made = await lab.put_many(3, expires_in=1)
        spoil(lab, made[1], how)
        lab.clock.advance(6)
        await lab.storage.promote(10)
        assert await lab.statuses([made[0], made[2]]) == [Status.EXPIRED] * 2

    @pytest.mark.parametrize("end", [COMPLETED, dead()], ids=lambda end: end.status)
    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_a_batch_of_ends_is_settled(self, lab: Lab, how: str, end: Transition) -> None:
        made = await lab.put_many(3)
        worker = await lab.worker()
        given = await worker.claim(3)
        spoil(lab, made[1], how)
        answer = await worker.exchange(settle=[Settle(job.id, job.token, end) for job in given])
        assert answer.settled[::2] == (Settled.APPLIED,) * 2
        assert await lab.statuses([made[0], made[2]]) == [end.status] * 2

    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_a_dead_worker_s_jobs_come_back(self, lab: Lab, how: str) -> None:
        made = await lab.put_many(4)
        worker = await lab.worker()
        await worker.exchange(slots=3, extra=1)
        spoil(lab, made[1], how)
        await worker.beat()
        await lab.storage.declare_dead(worker.ref, "killed")
        await lab.reap_all()
        assert await lab.statuses([made[0], made[2], made[3]]) == [Status.PENDING] * 3

    @pytest.mark.parametrize("how", SPOILS)
    @scenario
    async def test_held_jobs_are_taken_and_released(self, lab: Lab, how: str) -> None:
        made = await lab.put_many(4)
        worker, other = await lab.worker(), await lab.worker("w2")
        held = await worker.hold(4)
        spoil(lab, made[1], how)
        assert (await worker.release(held[0], held[1]))[0]
        lab.clock.advance(1)
        taken = ids((await other.take_held(4)).running) + ids(await other.claim(4))
        assert set(taken) >= {made[0], made[2], made[3]}
