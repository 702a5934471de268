"""Reads for doors: get, find, counts, queue_stats, dlq_groups, fleet, history, info."""

from __future__ import annotations

from collections import Counter

import pytest

from fluxmesh.clock import US
from fluxmesh.errors import InvalidOption
from fluxmesh.ids import new_job_id
from fluxmesh.job import HISTORY_KEPT, JobError, Outcome, Status
from fluxmesh.query import SCAN_CAP, Query
from fluxmesh.testing.contract.lab import (
    BEAT_S,
    COMPLETED,
    CRASHED,
    INTERRUPTED,
    LEASE_S,
    Lab,
    dead,
    ids,
    retry,
    scenario,
)
from fluxmesh.testing.contract.walk import walked_counts, walked_queues


class TestGet:
    @scenario
    async def test_an_unknown_job_is_none_in_every_read(self, lab: Lab) -> None:
        nobody = new_job_id()
        assert await lab.storage.get(nobody) is None
        assert await lab.storage.history(nobody) is None
        assert await lab.storage.wait_for(nobody, 0.01) is None

    @scenario
    async def test_other_processes_and_only_this_namespace_see_a_job(self, lab: Lab) -> None:
        job_id = await lab.put()
        other, foreign = await lab.open(), await lab.open(namespace="foreign")
        assert await other.get(job_id) == await lab.job(job_id)
        assert await foreign.get(job_id) is None
        assert (await foreign.counts()).total == 0


class TestFind:
    async def _zoo(self, lab: Lab) -> dict[str, list[str]]:
        """Thirty jobs in many states, by what they have in common."""
        zoo = {
            "ready": await lab.put_many(10, queue="a", tags=["x"]),
            "delayed": await lab.put_many(5, queue="b", delay=60, tags=["x", "y"]),
            "alien": await lab.put_many(5, "alien", queue="b"),
        }
        lab.clock.advance(1)
        zoo["done"] = await lab.put_many(5, "done", queue="c")
        zoo["running"] = await lab.put_many(5, "long", queue="c")
        worker = await lab.worker("busy", tasks=("done", "long"), queues=("c",))
        given = await worker.claim(10)
        await worker.complete(*given[:5])
        return zoo

    @pytest.mark.parametrize(
        ("query", "names"),
        [
            (Query(), ["ready", "delayed", "alien", "done", "running"]),
            (Query(state=Status.PENDING), ["ready", "alien"]),
            (Query(state=Status.SCHEDULED), ["delayed"]),
            (Query(state=Status.RUNNING), ["running"]),
            (Query(state=Status.COMPLETED), ["done"]),
            (Query(state=Status.CANCELLED), []),
            (Query(queue="b"), ["delayed", "alien"]),
            (Query(task="alien"), ["alien"]),
            (Query(task="nobody"), []),
            (Query(tag="x"), ["ready", "delayed"]),
            (Query(tag="y"), ["delayed"]),
            (Query(worker="busy"), ["running", "done"]),
            (Query(queue="b", state=Status.PENDING), ["alien"]),
            (Query(queue="c", task="done", state=Status.COMPLETED), ["done"]),
            (Query(tag="x", queue="b"), ["delayed"]),
            (Query(tag="x", state=Status.RUNNING), []),
        ],
        ids=lambda value: value.digest if isinstance(value, Query) else "",
    )
    @scenario
    async def test_a_query_finds_exactly_what_matches_it_page_by_page(
        self, lab: Lab, query: Query, names: list[str]
    ) -> None:
        zoo = await self._zoo(lab)
        wanted = sorted(job_id for name in names for job_id in zoo[name])
        found: list[str] = []
        cursor: str | None = None
        for _ in range(40):
            page = await lab.storage.find(query, cursor=cursor, limit=3)
            assert len(page.items) <= 3
            assert not page.partial
            found += ids(page.items)
            cursor = page.next_cursor
            if cursor is None:
                break
        assert sorted(found) == wanted
        assert cursor is None

    @scenario
    async def test_jobs_are_the_same_in_a_list_and_alone(self, lab: Lab) -> None:
        await self._zoo(lab)
        for job in await lab.everything():
            assert await lab.storage.get(job.id) == job

    @scenario
    async def test_a_list_is_newest_first(self, lab: Lab) -> None:
        made = await lab.put_many(7, tags=["x"])
        for query in (Query(), Query(queue="default"), Query(task="work"), Query(tag="x")):
            assert ids((await lab.storage.find(query)).items) == made[::-1]

    @scenario
    async def test_ended_jobs_by_state_come_in_the_order_of_their_ends(self, lab: Lab) -> None:
        made = await lab.put_many(3)
        worker = await lab.worker()
        jobs = await worker.claim(3)
        for index in (1, 2, 0):
            lab.clock.advance(1)
            await worker.settle(jobs[index], dead())
        found = ids((await lab.storage.find(Query(state=Status.DEAD_LETTER))).items)
        assert found == [made[0], made[2], made[1]]

    @scenario
    async def test_the_bounds_of_creation_are_exclusive(self, lab: Lab) -> None:
        made, stamps = [], []
        for _ in range(3):
            lab.clock.advance(1)
            made.append(await lab.put())
            stamps.append(lab.clock.wall_us())
        after = Query(created_after_us=stamps[0])
        between = Query(created_after_us=stamps[0], created_before_us=stamps[2])
        assert sorted(ids(await lab.everything(after))) == sorted(made[1:])
        assert ids(await lab.everything(between)) == [made[1]]
        assert await lab.everything(Query(created_before_us=stamps[0] - US)) == []

    @scenario
    async def test_a_list_that_changes_while_it_is_read_repeats_and_skips_no_old_job(self, lab: Lab) -> None:
        made = await lab.put_many(10)
        first = await lab.storage.find(Query(), limit=4)
        await lab.put_many(3)
        await lab.storage.cancel([made[7]])
        second = await lab.storage.find(Query(), cursor=first.next_cursor, limit=10)
        assert ids(first.items) + ids(second.items) == made[::-1]

    @scenario
    async def test_junk_and_foreign_cursors_and_bad_limits_are_refused(self, lab: Lab) -> None:
        await lab.put_many(3)
        cursor = (await lab.storage.find(Query(), limit=1)).next_cursor
        for wrong in ("junk", "", "AAAA", "%%%"):
            with pytest.raises(InvalidOption):
                await lab.storage.find(Query(), cursor=wrong)
        with pytest.raises(InvalidOption):
            await lab.storage.find(Query(queue="default"), cursor=cursor)
        for limit in (0, -1, 1_001):
            with pytest.raises(InvalidOption):
                await lab.storage.find(Query(), limit=limit)

    @scenario
    async def test_a_scan_that_was_cut_short_says_partial_and_goes_on(self, lab: Lab) -> None:
        (needle,) = await lab.put_many(1, queue="hay")
        worker = await lab.worker("seamstress", queues=("hay",))
        await worker.complete(await worker.claim_one())
        await lab.put_many(SCAN_CAP + 10, queue="hay")
        query = Query(worker="seamstress", queue="hay")
        page = await lab.storage.find(query)
        if not page.items:
            assert page.partial
            page = await lab.storage.find(query, cursor=page.next_cursor)
        assert ids(page.items) == [needle]


class TestCounts:
    @scenario
    async def test_an_empty_storage_counts_nothing(self, lab: Lab) -> None:
        counts = await lab.storage.counts()
        assert (counts.total, counts.failed, counts.stale_settles) == (0, 0, 0)
        assert not any(counts.queued.values())
        assert await lab.storage.queue_stats() == []

    @scenario
    async def test_counts_and_queues_are_those_of_a_brute_force_walk(self, lab: Lab) -> None:
        await lab.put_many(6, priority=1)
        await lab.put_many(4, "alien", queue="other")
        await lab.put_many(3, delay=60, queue="other")
        worker = await lab.worker(queues=("default", "other"))
        answer = await worker.exchange(slots=3, extra=2)
        one, two, _ = answer.running
        await worker.settle(one, dead())
        await worker.settle(two, COMPLETED)
        await lab.storage.cancel([(await lab.everything(Query(state=Status.SCHEDULED)))[0].id])
        everything = await lab.everything()
        counts = await lab.storage.counts()
        assert walked_counts(everything) == (
            {status: n for status, n in counts.by_status.items() if n},
            {place: n for place, n in counts.queued.items() if n},
            counts.failed,
        )
        walked = walked_queues(everything)
        for stats in await lab.storage.queue_stats():
            assert walked.pop(stats.queue) == (stats.queued, stats.scheduled, stats.running, stats.parked)
        assert walked == {}

    @scenario
    async def test_failed_are_dead_letters_by_error_or_timeout_only(self, lab: Lab) -> None:
        for reason in ("error", "timeout", "given up: no such order", "undecodable", "worker lost x3"):
            await lab.end(dead("ended", reason=reason))
        counts = await lab.storage.counts()
        assert (counts.failed, counts.by_status[Status.DEAD_LETTER]) == (2, 5)

    @scenario
    async def test_the_oldest_wait_of_a_queue_is_an_age(self, lab: Lab) -> None:
        await lab.put()
        lab.clock.advance(5)
        await lab.put()
        lab.clock.advance(2)
        (stats,) = await lab.storage.queue_stats()
        assert stats.oldest_wait_s == pytest.approx(7, abs=0.01)
        await (await lab.worker()).claim(2)
        (stats,) = await lab.storage.queue_stats()
        assert (stats.oldest_wait_s, stats.running) == (None, 2)

    @scenario
    async def test_a_paused_queue_is_listed_without_any_job(self, lab: Lab) -> None:
        await lab.storage.pause("shut")
        (stats,) = await lab.storage.queue_stats()
        assert (stats.queue, stats.paused, stats.queued) == ("shut", True, (0, 0, 0, 0))


class TestDeadLetterGroups:
    @scenario
    async def test_dead_letters_of_one_fingerprint_are_one_group(self, lab: Lab) -> None:
        many = JobError("ValueError", "no such order 17", ("shop/orders.py:7 load",))
        same = JobError("ValueError", "no such order 18", ("shop/orders.py:9 load",))
        few = JobError("KeyError", "'customer'", ("shop/orders.py:20 save",))
        await lab.end(dead("ended", many))
        lab.clock.advance(1)
        newest = await lab.end(dead("ended", same))
        await lab.end(dead("ended", few))
        groups = await lab.storage.dlq_groups(10)
        assert Counter({group.example: group.count for group in groups})[newest] == 2
        (group,) = [group for group in groups if group.count == 2]
        assert (group.task, group.reason, group.error) == ("ended", "error", same)
        assert group.newest_at == pytest.approx(lab.clock.wall_us() / 1e6, abs=1e-3)
        assert len(groups) == 2
        assert len(await lab.storage.dlq_groups(1)) == 1

    @scenario
    async def test_a_replayed_or_discarded_dead_letter_leaves_its_group(self, lab: Lab) -> None:
        one, two = await lab.end(dead("ended")), await lab.end(dead("ended"))
        await lab.storage.replay([one])
        (group,) = await lab.storage.dlq_groups(10)
        assert (group.count, group.example) == (1, two)
        await lab.storage.discard([two])
        assert await lab.storage.dlq_groups(10) == []


class TestHistory:
    @scenario
    async def test_every_ended_start_is_kept_oldest_first_over_all_lives(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker("w1")
        ends = [retry(1), INTERRUPTED, retry(1), dead(), COMPLETED]
        for end in ends:
            lab.clock.advance(1)
            job = await worker.claim_one()
            lab.clock.advance(2)
            await worker.settle(job, end)
            if end.status is Status.DEAD_LETTER:
                await lab.storage.replay([job_id])
        history = await lab.storage.history(job_id)
        assert history is not None
        assert [entry.outcome for entry in history] == [end.outcome for end in ends]
        assert [entry.life for entry in history] == [1, 1, 1, 1, 2]
        assert {entry.worker_id for entry in history} == {"w1"}
        assert [entry.error for entry in history] == [end.error for end in ends]
        for entry in history:
            assert entry.started_at is not None
            assert entry.ended_at - entry.started_at == pytest.approx(2, abs=0.001)

    @scenario
    async def test_fifty_starts_are_kept(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        for _ in range(HISTORY_KEPT + 3):
            await worker.settle(await worker.claim_one(), INTERRUPTED)
        await worker.settle(await worker.claim_one(), COMPLETED)
        history = await lab.storage.history(job_id)
        assert history is not None
        assert (len(history), history[-1].outcome) == (HISTORY_KEPT, Outcome.COMPLETED)

    @scenario
    async def test_a_job_that_was_only_held_or_released_has_no_history(self, lab: Lab) -> None:
        job_id = await lab.put()
        worker = await lab.worker()
        await worker.release(await worker.hold_one())
        assert await lab.storage.history(job_id) == []


class TestFleet:
    @scenario
    async def test_a_worker_shows_what_it_registered_and_what_it_owns(self, lab: Lab) -> None:
        await lab.put_many(5, queue="a")
        worker = await lab.worker("w1", queues=("a", "b"), tiers=(0, 2))
        await worker.exchange(slots=2, extra=1)
        (info,) = await lab.storage.fleet()
        assert (info.worker_id, info.epoch, info.queues) == ("w1", worker.ref.epoch, ("a", "b"))
        assert (info.tiers, info.capacity, info.running, info.held) == ((0, 2), 8, 2, 1)
        assert info.started_at == info.last_heartbeat == pytest.approx(lab.clock.wall_us() / 1e6, abs=1e-3)

    @scenario
    async def test_a_worker_is_ready_then_silent_then_lapsed(self, lab: Lab) -> None:
        keeper = await lab.worker("keeper")
        await lab.arm(keeper)
        await lab.worker("w1")

        async def status() -> str:
            (info,) = [info for info in await lab.storage.fleet() if info.worker_id == "w1"]
            return info.status

        seen = [await status()]
        await lab.pass_time(2.5 * BEAT_S, keeper)
        seen.append(await status())
        await lab.pass_time(LEASE_S, keeper)
        seen.append(await status())
        assert seen == ["ready", "silent", "lapsed"]

    @scenario
    async def test_a_worker_whose_death_is_proven_is_dead(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        await worker.claim_one()
        await lab.storage.declare_dead(worker.ref, "killed")
        (info,) = await lab.storage.fleet()
        assert info.status == "dead"
        await lab.reap_all(CRASHED)
        assert [(info.status, info.running) for info in await lab.storage.fleet()] in ([], [("dead", 0)])


class TestInfo:
    @scenario
    async def test_a_storage_can_say_what_it_is(self, lab: Lab) -> None:
        info = await lab.storage.info()
        assert info.kind
        assert info.where
        assert info.version
        assert info.now_us == lab.clock.wall_us()
        assert info.namespace == "fluxmesh"
