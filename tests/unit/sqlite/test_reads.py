"""Reads for doors: what a record shows, what a list finds, and that nothing walks the whole table."""

from __future__ import annotations

import pytest

from fluxmesh.errors import InvalidOption
from fluxmesh.job import Outcome, Status
from fluxmesh.query import Query, encode_cursor, parse_query
from fluxmesh.storage.sqlite import liveness, operate, ownership, reads
from fluxmesh.storage.values import (
    OnDeath,
    Owned,
    ProgressNote,
    Registration,
    TaskSpec,
    WorkerRef,
    WorkerView,
)
from fluxmesh.testing.contract.lab import COMPLETED, dead, retry
from tests.unit.sqlite.bench import BEAT_S, LEASE_S, Bench

JUNK = b"\xff\x00\x13\x37"


class TestRecord:
    def test_a_job_is_shown_with_everything_it_was_submitted_with(self, bench: Bench) -> None:
        job_id = bench.put(
            "mail.send", 7, {"to": ["a", "b"]},
            queue="mail", priority="high", max_retries=5, backoff_strategy="linear", jitter="none",
            timeout_seconds=9, delay_seconds=30, expires_in_seconds=60, idempotency_key="i", unique_key="u",
            affinity_key="a", concurrency_key="c", concurrency_limit=2, tags=["x", "y"], headers={"h": "v"},
        )  # fmt: skip
        job = bench.job(job_id)
        now = bench.clock.wall_us() / 1e6
        assert (job.task, job.queue, job.priority, job.status) == ("mail.send", "mail", 1, Status.SCHEDULED)
        assert (job.args, job.kwargs, job.raw_payload) == ([7, {"to": ["a", "b"]}], {}, None)
        assert (job.max_retries, job.backoff_strategy, job.jitter, job.timeout_seconds) == (
            5,
            "linear",
            "none",
            9,
        )
        assert (job.idempotency_key, job.unique_key, job.affinity_key) == ("i", "u", "a")
        assert (job.concurrency_key, job.concurrency_limit) == ("c", 2)
        assert (job.tags, job.headers) == (("x", "y"), {"h": "v"})
        assert (job.created_at, job.scheduled_at, job.expires_at) == (now, now + 30, now + 60)
        assert (job.life, job.progress, job.ended) == (1, 0.0, False)

    def test_a_completed_job_shows_its_result_and_full_progress(self, bench: Bench) -> None:
        job_id = bench.put()
        worker = bench.worker()
        (claimed,) = bench.claim(worker)
        bench.settle(worker, claimed, COMPLETED)
        job = bench.job(job_id)
        assert (job.status, job.result, job.progress, job.attempts) == (Status.COMPLETED, 7, 100.0, 1)
        assert (job.worker_id, job.token) == ("w1", claimed.token)
        assert job.started_at == job.completed_at == bench.clock.wall_us() / 1e6

    def test_progress_and_a_timeout_of_a_running_job_are_shown(self, bench: Bench) -> None:
        job_id = bench.put()
        worker = bench.worker()
        (claimed,) = bench.claim(worker)
        note = ProgressNote(claimed.id, claimed.token, 40.0, "half-way", OnDeath.TIMEOUT)
        bench.run(ownership.progress, worker, [note])
        job = bench.job(job_id)
        assert (job.progress, job.progress_message, job.timed_out) == (40.0, "half-way", True)

    def test_history_tells_how_every_start_ended(self, bench: Bench) -> None:
        job_id = bench.put()
        worker = bench.worker()
        bench.settle(worker, bench.claim(worker)[0], retry(0.0))
        bench.clock.advance(1)
        bench.settle(worker, bench.claim(worker)[0], COMPLETED)
        told = bench.read(reads.history, job_id)
        assert told is not None
        assert [(entry.attempt, entry.outcome) for entry in told] == [
            (1, Outcome.FAILED),
            (2, Outcome.COMPLETED),
        ]
        assert told[0].error is not None

    def test_an_unknown_id_has_no_record_and_no_history(self, bench: Bench) -> None:
        assert bench.read(reads.get, "nobody") is None
        assert bench.read(reads.history, "nobody") is None

    def test_a_pending_job_says_what_it_waits_for(self, bench: Bench) -> None:
        job_id = bench.put("unknown")
        assert bench.job(job_id).waiting_for is None
        bench.claim(bench.worker())
        assert bench.job(job_id).waiting_for == "a worker for its task"
        bench.run(operate.pause, "default")
        assert bench.job(job_id).waiting_for == "queue paused"

    def test_a_running_job_of_a_paused_queue_waits_for_nothing(self, bench: Bench) -> None:
        job_id = bench.put()
        bench.claim(bench.worker())
        bench.run(operate.pause, "default")
        assert bench.job(job_id).waiting_for is None

    @pytest.mark.parametrize("column", ["payload", "options"])
    def test_undecodable_arguments_are_shown_raw(self, bench: Bench, column: str) -> None:
        job_id = bench.put("work", 1, tags=["x"])
        bench.set(job_id, **{column: JUNK})
        job = bench.job(job_id)
        assert (job.args, job.kwargs) == (None, None)
        assert job.raw_payload == (JUNK.hex() if column == "payload" else "929101" + "80")
        assert job.tags == (("x",) if column == "payload" else ())

    @pytest.mark.parametrize(
        "junk",
        [
            pytest.param(JUNK, id="junk"),
            pytest.param(b"", id="empty"),
            pytest.param(b"\x91" * 50_000, id="deep"),
            pytest.param(b"\xdd\xff\xff\xff\xff", id="long-array"),
            pytest.param(b"\xa2\xff\xff", id="bad-text"),
            pytest.param(b"\xd4\x05\x00", id="extension"),
        ],
    )
    def test_no_stored_junk_breaks_a_read(self, bench: Bench, junk: bytes) -> None:
        job_id = bench.put()
        worker = bench.worker()
        bench.settle(worker, bench.claim(worker)[0], dead())
        bench.set(job_id, payload=junk, options=junk, result=junk, history=junk, error=junk)
        job = bench.job(job_id)
        assert (job.result, job.error, job.raw_payload) == (None, None, junk.hex())
        assert bench.read(reads.history, job_id) == []
        assert bench.read(reads.dlq_groups, 10)[0].error is None
        assert bench.found("state:dead_letter") == [job_id]


class TestFind:
    def test_everything_is_listed_newest_first(self, bench: Bench) -> None:
        made = bench.put_many(25)
        assert bench.found(limit=10) == made[::-1]

    @pytest.mark.parametrize("q", ["queue:mail", "task:send", "tag:x"])
    def test_one_index_is_enough_for_each_of_queue_task_and_tag(self, bench: Bench, q: str) -> None:
        bench.put_many(7)
        made = bench.put_many(7, "send", queue="mail", tags=["x"])
        bench.put_many(7, tags=["xx"])
        assert bench.found(q, limit=3) == made[::-1]

    def test_every_part_of_a_query_must_hold(self, bench: Bench) -> None:
        bench.put("send", queue="mail")
        bench.put("send", queue="sms", tags=["x"])
        both = bench.put("send", queue="mail", tags=["x"])
        assert bench.found("queue:mail tag:x") == [both]
        assert bench.found("queue:mail tag:x task:other") == []
        assert bench.found("queue:mail tag:x state:PENDING") == [both]
        assert bench.found("queue:mail tag:x state:RUNNING") == []

    def test_a_rare_state_is_found_among_very_many_of_a_queue(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reads, "SCAN_CAP", 20)
        worker = bench.worker()
        rare = bench.put_many(3)
        for claimed in bench.claim(worker, 3):
            bench.settle(worker, claimed, dead())
        bench.put_many(60)
        page = bench.find("state:dead_letter queue:default", limit=2)
        assert [job.id for job in page.items] == [rare[2], rare[1]]
        assert not page.partial
        assert bench.found("state:dead_letter task:work", limit=2) == rare[::-1]

    def test_dead_letters_come_in_the_order_of_their_ends_newest_first(self, bench: Bench) -> None:
        made = bench.put_many(6)
        worker = bench.worker()
        claimed = {job.id: job for job in bench.claim(worker, 6)}
        ended = [made[index] for index in (3, 0, 5, 1, 4, 2)]
        for job_id in ended:
            bench.clock.advance(1)
            bench.settle(worker, claimed[job_id], dead())
        assert bench.found("state:dead_letter", limit=2) == ended[::-1]

    def test_ends_at_one_instant_are_paged_without_loss(self, bench: Bench) -> None:
        made = bench.put_many(9)
        worker = bench.worker()
        for claimed in bench.claim(worker, 9):
            bench.settle(worker, claimed, COMPLETED)
        assert bench.found("state:completed", limit=2) == made[::-1]

    def test_scheduled_jobs_of_all_tiers_come_by_their_due_times(self, bench: Bench) -> None:
        delays = [(30, 0), (10, 3), (20, 1), (40, 2), (25, 3), (5, 0)]
        made = {bench.put(delay=delay, priority=tier): delay for delay, tier in delays}
        found = bench.found("state:scheduled", limit=2)
        assert [made[job_id] for job_id in found] == [40, 30, 25, 20, 10, 5]

    def test_pending_jobs_are_found_whether_ready_or_parked_and_in_whatever_queue(self, bench: Bench) -> None:
        made = {
            bench.put(priority=tier, queue=queue) for tier in (3, 0, 2, 1) for queue in ("z", "default", "a")
        }
        parked = bench.put_many(5, "unknown", priority="critical")
        bench.claim(bench.worker(), 1)
        running = bench.found("state:running")
        assert len(running) == 1
        assert set(bench.found("state:pending", limit=4)) == (made | set(parked)) - set(running)

    def test_worker_and_created_are_judged_row_by_row(self, bench: Bench) -> None:
        bench.put_many(3)
        middle_us = bench.clock.wall_us()
        bench.clock.advance(10)
        late = bench.put_many(3)
        (first,) = bench.claim(bench.worker("w9"), 1)
        assert bench.found("worker:w9") == [first.id]
        assert bench.found(Query(created_after_us=middle_us)) == late[::-1]
        assert len(bench.found(Query(created_before_us=middle_us + 1))) == 3
        assert bench.found(Query(created_before_us=middle_us)) == []

    def test_a_long_walk_stops_says_so_and_goes_on_from_there(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reads, "SCAN_CAP", 10)
        (first,) = bench.put_many(1)
        bench.claim(bench.worker("w9"), 1)
        bench.put_many(35)
        page = bench.find("worker:w9")
        assert (page.items, page.partial) == ((), True)
        assert page.next_cursor is not None
        assert bench.found("worker:w9") == [first]

    def test_a_full_page_is_not_partial_and_the_last_has_no_cursor(self, bench: Bench) -> None:
        bench.put_many(4)
        page = bench.find(limit=2)
        assert not page.partial
        last = bench.find(cursor=page.next_cursor, limit=2)
        assert (len(last.items), last.next_cursor) == (2, None)

    def test_a_list_that_grows_between_two_pages_repeats_and_loses_nothing(self, bench: Bench) -> None:
        made = bench.put_many(6)
        page = bench.find(limit=3)
        bench.put_many(3)
        rest = bench.find(cursor=page.next_cursor, limit=10)
        assert [job.id for job in (*page.items, *rest.items)] == made[::-1]

    @pytest.mark.parametrize("q", ["", "state:completed", "state:pending"])
    @pytest.mark.parametrize(
        "place",
        [
            (),
            ("x",),
            (1, 2, 3),
            (1 << 70,),
            (1 << 70, 1),
            (1, 2, 3, 4, 5),
            ("a", "b", "c", "d"),
            (1, "0:default", 1 << 64, 3),
        ],
    )
    def test_a_forged_cursor_is_refused(self, bench: Bench, q: str, place: tuple[int | str, ...]) -> None:
        bench.put_many(3)
        with pytest.raises(InvalidOption, match="cursor"):
            bench.find(q, encode_cursor(parse_query(q), place))

    def test_a_cursor_of_another_query_is_refused(self, bench: Bench) -> None:
        bench.put_many(3)
        cursor = bench.find(limit=1).next_cursor
        with pytest.raises(InvalidOption, match="another query"):
            bench.find("queue:default", cursor)


class TestNumbers:
    def test_counts_equal_a_walk_over_all_jobs(self, bench: Bench) -> None:
        bench.put_many(4, priority="high")
        bench.put_many(3, "unknown", queue="mail")
        bench.put_many(2, delay=60)
        worker = bench.worker(queues=("default", "mail"))
        one, two, three = bench.claim(worker, 3)
        bench.settle(worker, one, COMPLETED)
        bench.settle(worker, two, dead(reason="timeout"))
        bench.hold(worker, 1)
        bench.claim(worker, 5)
        counts = bench.read(reads.counts)
        walked = [bench.job(job_id) for job_id in bench.found()]
        assert counts.total == len(walked) == 9
        assert counts.by_status == {status: sum(j.status is status for j in walked) for status in Status}
        assert counts.queued == {("mail", 2): 3} | {("default", 1): 1}
        assert counts.failed == 1
        assert three.id in bench.found("state:running")

    def test_only_dead_letters_by_error_and_timeout_have_failed(self, bench: Bench) -> None:
        bench.put_many(4)
        worker = bench.worker()
        for claimed, reason in zip(
            bench.claim(worker, 4), ("error", "timeout", "given up", "undecodable"), strict=True
        ):
            bench.settle(worker, claimed, dead(reason=reason))
        counts = bench.read(reads.counts)
        assert (counts.failed, counts.by_status[Status.DEAD_LETTER]) == (2, 4)

    def test_refused_settles_are_counted(self, bench: Bench) -> None:
        bench.put()
        worker = bench.worker()
        (claimed,) = bench.claim(worker)
        bench.run(ownership.release, worker, [Owned(claimed.id, claimed.token)])
        bench.settle(worker, claimed, COMPLETED)
        assert bench.read(reads.counts).stale_settles == 1

    def test_queue_stats_tell_every_queue_apart(self, bench: Bench) -> None:
        bench.put_many(2, queue="mail", priority="critical")
        bench.put(queue="mail", delay=60)
        bench.put("unknown", queue="mail", priority="low")
        bench.clock.advance(5)
        bench.put(queue="sms")
        bench.claim(bench.worker(queues=("mail",)), 3)
        bench.put(queue="mail", priority="low")
        bench.run(operate.pause, "empty")
        bench.clock.advance(2)
        mail, sms = (
            stats for stats in bench.read(reads.queue_stats, bench.clock.wall_us()) if not stats.paused
        )
        assert (mail.queue, mail.queued, mail.scheduled, mail.running, mail.parked) == (
            "mail",
            (0, 0, 0, 2),
            1,
            2,
            1,
        )
        assert (mail.oldest_wait_s, sms.oldest_wait_s) == (2.0, 2.0)
        (empty,) = (stats for stats in bench.read(reads.queue_stats, bench.clock.wall_us()) if stats.paused)
        assert (empty.queue, empty.queued, empty.oldest_wait_s) == ("empty", (0, 0, 0, 0), None)

    def test_a_delayed_job_waits_from_its_due_time_on(self, bench: Bench) -> None:
        bench.put("other", delay=10)
        bench.clock.advance(14)
        bench.exchange(bench.worker(), slots=0, extra=0)
        (stats,) = bench.read(reads.queue_stats, bench.clock.wall_us())
        assert stats.oldest_wait_s == pytest.approx(4)

    def test_a_replayed_job_waits_from_its_replay_on(self, bench: Bench) -> None:
        job_id = bench.put()
        worker = bench.worker()
        bench.settle(worker, bench.claim(worker)[0], dead())
        bench.clock.advance(86_400)
        bench.run(operate.replay, [job_id])
        bench.clock.advance(3)
        (stats,) = bench.read(reads.queue_stats, bench.clock.wall_us())
        assert stats.oldest_wait_s == pytest.approx(3)

    def test_dead_letters_are_grouped_by_what_went_wrong_the_largest_group_first(self, bench: Bench) -> None:
        bench.put_many(5)
        worker = bench.worker()
        claimed = bench.claim(worker, 5)
        for job, task in zip(claimed, ("a", "b", "b", "a", "b"), strict=True):
            bench.clock.advance(1)
            bench.settle(worker, job, dead(task))
        groups = bench.read(reads.dlq_groups, 10)
        assert [group.count for group in groups] == [3, 2]
        assert (groups[0].example, groups[1].example) == (claimed[4].id, claimed[3].id)
        assert groups[0].newest_at == bench.clock.wall_us() / 1e6
        assert (groups[0].task, groups[0].reason) == ("work", "error")
        assert groups[0].error is not None
        assert len(bench.read(reads.dlq_groups, 1)) == 1


class TestFleet:
    def _statuses(self, bench: Bench) -> list[str]:
        workers = bench.read(reads.fleet, bench.clock.wall_us(), bench.clock.boot_us())
        return [worker.status for worker in workers]

    def _beat(self, bench: Bench, worker: WorkerRef, status: str = "ready") -> None:
        told = Registration(
            worker.worker_id, ("default",), (0, 1, 2, 3), (TaskSpec("work"),), 8, LEASE_S, BEAT_S
        )
        view = WorkerView(told, status)
        bench.run(liveness.beat, worker, [], view, None, None)

    def test_a_worker_is_shown_with_what_it_told_and_what_it_owns(self, bench: Bench) -> None:
        bench.put_many(5)
        worker = bench.worker("w1", queues=("default", "mail"))
        bench.exchange(worker, slots=2, extra=2)
        (shown,) = bench.read(reads.fleet, bench.clock.wall_us(), bench.clock.boot_us())
        assert (shown.worker_id, shown.epoch, shown.hostname, shown.pid) == ("w1", worker.epoch, "host", 77)
        assert (shown.queues, shown.tiers, shown.capacity) == (("default", "mail"), (0, 1, 2, 3), 8)
        assert (shown.running, shown.held, shown.status) == (2, 2, "ready")
        assert shown.last_heartbeat == shown.started_at == bench.clock.wall_us() / 1e6

    def test_a_worker_grows_silent_and_then_lapses(self, bench: Bench) -> None:
        bench.worker()
        bench.clock.advance(2 * BEAT_S)
        assert self._statuses(bench) == ["ready"]
        bench.clock.advance(0.1)
        assert self._statuses(bench) == ["silent"]
        bench.clock.advance(LEASE_S - 2 * BEAT_S)
        assert self._statuses(bench) == ["lapsed"]

    def test_a_stepped_wall_clock_changes_nothing(self, bench: Bench) -> None:
        self._beat(bench, bench.worker())
        bench.clock.step_wall(600)
        assert self._statuses(bench) == ["ready"]
        bench.clock.step_wall(-1_200)
        assert self._statuses(bench) == ["ready"]

    def test_a_beat_of_another_boot_is_judged_by_wall_time(self, bench: Bench) -> None:
        self._beat(bench, bench.worker())
        bench.clock.reboot("boot-2")
        assert self._statuses(bench) == ["ready"]
        bench.clock.advance(LEASE_S + 1)
        assert self._statuses(bench) == ["lapsed"]

    def test_what_a_worker_tells_of_itself_is_shown(self, bench: Bench) -> None:
        worker = bench.worker()
        self._beat(bench, worker, "draining")
        assert self._statuses(bench) == ["draining"]

    def test_a_fenced_and_a_declared_worker_are_dead(self, bench: Bench) -> None:
        bench.worker("w1")
        bench.worker("w1")
        killed = bench.worker("w2")
        bench.run(liveness.declare_dead, killed, "killed by signal 9")
        assert self._statuses(bench) == ["dead", "ready", "dead"]
