"""What operators do to jobs in every place where a job can be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fluxmesh.job import TIERS, Outcome, Status
from fluxmesh.outcome import Charge, Transition
from fluxmesh.storage.sqlite import operate, reads
from fluxmesh.storage.sqlite.enqueue import enqueue
from fluxmesh.storage.values import Cancelled, Done, Owned, Settled, Verdict
from fluxmesh.submission import prepare
from fluxmesh.testing.contract.lab import COMPLETED, dead, retry
from tests.unit.sqlite.bench import Bench


def scheduled(bench: Bench) -> str:
    return bench.put(delay=60)


def ready(bench: Bench) -> str:
    return bench.put()


def parked(bench: Bench) -> str:
    job_id = bench.put("unknown")
    bench.claim(bench.worker("parker"))
    return job_id


def held(bench: Bench) -> str:
    job_id = bench.put()
    bench.hold(bench.worker("holder"))
    return job_id


def running(bench: Bench) -> str:
    job_id = bench.put()
    bench.claim(bench.worker("runner"))
    return job_id


def ended(transition: Transition) -> Callable[[Bench], str]:
    def make(bench: Bench) -> str:
        job_id = bench.put()
        worker = bench.worker("ender")
        assert bench.settle(worker, bench.claim(worker)[0], transition) is Settled.APPLIED
        return job_id

    return make


completed = ended(COMPLETED)
dead_letter = ended(dead())
cancelled = ended(Transition(Status.CANCELLED, Outcome.CANCELLED))
LIVE = [scheduled, ready, parked, held]
GIVEN_UP = [dead_letter, cancelled]


def counters(bench: Bench) -> tuple[dict[Status, int], dict[tuple[str, int], int]]:
    """What the counters say, once it is shown that a walk says the same."""
    counts = bench.read(reads.counts)
    jobs = [bench.job(job_id) for job_id in bench.found()]
    by_status = {status: sum(job.status is status for job in jobs) for status in Status}
    assert counts.by_status == by_status
    lanes = bench.db.execute(f'select lane, n from "{bench.sql.namespace}:lane"')
    for lane, n in lanes:
        walk = f'select count(*) from "{bench.sql.namespace}:job" where place = 2 and lane = ?'
        assert next(bench.db.execute(walk, (lane,)))[0] == n
    return {status: n for status, n in by_status.items() if n}, counts.queued


class TestCancel:
    @pytest.mark.parametrize("make", LIVE)
    def test_a_job_that_does_not_run_is_cancelled_at_once(
        self, bench: Bench, make: Callable[[Bench], str]
    ) -> None:
        job_id = make(bench)
        assert bench.run(operate.cancel, [job_id]) == [Cancelled.CANCELLED]
        job = bench.job(job_id)
        assert (job.status, job.completed_at) == (Status.CANCELLED, bench.clock.wall_us() / 1e6)
        assert counters(bench) == ({Status.CANCELLED: 1}, {})

    def test_a_held_job_cannot_be_begun_any_more_once_it_is_cancelled(self, bench: Bench) -> None:
        bench.put()
        worker = bench.worker()
        (job,) = bench.hold(worker)
        bench.run(operate.cancel, [job.id])
        assert bench.job(job.id).token > job.token
        assert bench.exchange(worker, begin=(Owned(job.id, job.token),)).begun == ("lost",)

    @pytest.mark.parametrize(
        "transition", [retry(), dead(), Transition(Status.PENDING, Outcome.CRASHED, Charge.CRASH)]
    )
    def test_a_running_job_is_flagged_and_ends_cancelled_however_it_fails(
        self, bench: Bench, transition: Transition
    ) -> None:
        bench.put()
        worker = bench.worker()
        (job,) = bench.claim(worker)
        assert bench.run(operate.cancel, [job.id]) == [Cancelled.REQUESTED]
        assert bench.job(job.id).cancel_requested
        assert bench.status(job.id) is Status.RUNNING
        bench.settle(worker, job, transition)
        assert bench.status(job.id) is Status.CANCELLED

    def test_a_running_job_that_returns_all_the_same_is_completed(self, bench: Bench) -> None:
        bench.put()
        worker = bench.worker()
        (job,) = bench.claim(worker)
        assert bench.run(operate.cancel, [job.id, job.id]) == [Cancelled.REQUESTED] * 2
        bench.settle(worker, job, COMPLETED)
        assert bench.status(job.id) is Status.COMPLETED

    def test_what_has_ended_or_is_unknown_stays_so(self, bench: Bench) -> None:
        ids = [completed(bench), dead_letter(bench), cancelled(bench), "nobody"]
        before = [bench.job(job_id) for job_id in ids[:3]]
        assert bench.run(operate.cancel, ids) == [Cancelled.ENDED] * 3 + [Cancelled.UNKNOWN]
        assert [bench.job(job_id) for job_id in ids[:3]] == before

    def test_a_cancelled_job_frees_its_unique_key_and_keeps_its_progress(self, bench: Bench) -> None:
        job_id = bench.put(unique_key="u")
        bench.set(job_id, percent=40.0, message="half")
        bench.run(operate.cancel, [job_id])
        bench.put(unique_key="u")
        job = bench.job(job_id)
        assert (job.progress, job.progress_message) == (40.0, "half")


class TestReplay:
    @pytest.mark.parametrize("make", GIVEN_UP)
    def test_a_given_up_job_gets_a_new_life_with_its_history(
        self, bench: Bench, make: Callable[[Bench], str]
    ) -> None:
        job_id = make(bench)
        before = bench.job(job_id)
        assert bench.run(operate.replay, [job_id]) == [Done.DONE]
        job = bench.job(job_id)
        assert (job.status, job.life, job.attempts, job.token) == (Status.PENDING, 2, 0, before.token)
        assert (job.error, job.reason, job.fingerprint, job.completed_at, job.worker_id) == (None,) * 5
        assert len(bench.read(reads.history, job_id) or []) == 1
        assert counters(bench) == ({Status.PENDING: 1}, {("default", 2): 1})

    def test_an_expired_job_lives_on_without_its_expiry_and_delay(self, bench: Bench) -> None:
        job_id = bench.put(expires_in=5)
        bench.clock.advance(6)
        bench.claim(bench.worker())
        assert bench.status(job_id) is Status.EXPIRED
        assert bench.run(operate.replay, [job_id]) == [Done.DONE]
        job = bench.job(job_id)
        assert (job.status, job.expires_at) == (Status.PENDING, None)
        assert job.scheduled_at == bench.clock.wall_us() / 1e6

    def test_a_replayed_job_stands_behind_those_that_wait(self, bench: Bench) -> None:
        again = dead_letter(bench)
        waiting = bench.put()
        bench.run(operate.replay, [again])
        assert [job.id for job in bench.claim(bench.worker(), 2)] == [waiting, again]

    @pytest.mark.parametrize("make", [*LIVE, running, completed])
    def test_nothing_else_can_be_replayed(self, bench: Bench, make: Callable[[Bench], str]) -> None:
        job_id = make(bench)
        before = bench.job(job_id)
        assert bench.run(operate.replay, [job_id, "nobody"]) == [Done.CONFLICT, Done.UNKNOWN]
        assert bench.job(job_id) == before

    def test_of_racing_replays_the_first_makes_the_only_life(self, bench: Bench) -> None:
        job_id = dead_letter(bench)
        answers = [bench.run(operate.replay, [job_id])[0] for _ in range(5)]
        assert answers == [Done.DONE] + [Done.CONFLICT] * 4
        assert bench.job(job_id).life == 2

    def test_a_unique_key_held_by_another_job_stands_in_the_way(self, bench: Bench) -> None:
        one, two = bench.put(unique_key="u"), ""
        bench.run(operate.cancel, [one])
        two = bench.put(unique_key="u")
        assert bench.run(operate.replay, [one]) == [Done.CONFLICT]
        bench.run(operate.cancel, [two])
        assert bench.run(operate.replay, [one, two]) == [Done.DONE, Done.CONFLICT]
        assert [bench.status(one), bench.status(two)] == [Status.PENDING, Status.CANCELLED]

    def test_the_cancel_flag_ends_with_the_life_it_was_meant_for(self, bench: Bench) -> None:
        bench.put()
        worker = bench.worker()
        (job,) = bench.claim(worker)
        bench.run(operate.cancel, [job.id])
        bench.settle(worker, job, retry())
        bench.run(operate.replay, [job.id])
        assert not bench.job(job.id).cancel_requested
        bench.settle(worker, bench.claim(worker)[0], retry())
        assert bench.status(job.id) is Status.SCHEDULED


class TestDiscard:
    @pytest.mark.parametrize("make", [*GIVEN_UP, completed])
    def test_an_ended_job_goes_without_a_trace(self, bench: Bench, make: Callable[[Bench], str]) -> None:
        job_id = make(bench)
        assert bench.run(operate.discard, [job_id, job_id]) == [Done.DONE, Done.UNKNOWN]
        assert bench.read(reads.get, job_id) is None
        assert counters(bench) == ({}, {})

    def test_tags_and_the_idempotency_key_go_with_it(self, bench: Bench) -> None:
        job_id = bench.put(tags=["x", "y"], idempotency_key="i")
        other = bench.put(tags=["x"])
        bench.run(operate.cancel, [job_id])
        bench.run(operate.discard, [job_id])
        assert (bench.rows()["tag"], bench.rows()["idempotency"]) == (1, 0)
        assert bench.found("tag:x") == [other]
        assert bench.job(bench.put(idempotency_key="i")).status is Status.PENDING

    def test_tags_go_even_if_the_options_cannot_be_read(self, bench: Bench) -> None:
        job_id = bench.put(tags=["x", "y"])
        bench.put(tags=["x"])
        bench.run(operate.cancel, [job_id])
        bench.set(job_id, options=b"\xff")
        bench.run(operate.discard, [job_id])
        assert bench.rows()["tag"] == 1

    @pytest.mark.parametrize("make", [*LIVE, running])
    def test_a_job_that_has_not_ended_stays(self, bench: Bench, make: Callable[[Bench], str]) -> None:
        job_id = make(bench)
        before = bench.job(job_id)
        assert bench.run(operate.discard, [job_id]) == [Done.CONFLICT]
        assert bench.job(job_id) == before


class TestReprioritise:
    @pytest.mark.parametrize("make", [ready, parked, held])
    def test_a_waiting_job_moves_behind_those_of_its_new_tier(
        self, bench: Bench, make: Callable[[Bench], str]
    ) -> None:
        job_id = make(bench)
        others = bench.put_many(2, priority="critical")
        assert bench.run(operate.reprioritise, [job_id], 0) == [Done.DONE]
        job = bench.job(job_id)
        assert (job.status, job.priority) == (Status.PENDING, 0)
        assert counters(bench) == ({Status.PENDING: 3}, {("default", 0): 3})
        anybody = bench.worker("any", tasks=("work", "unknown"))
        assert [claimed.id for claimed in bench.claim(anybody, 3)] == [*others, job_id]

    def test_a_held_job_is_taken_from_its_owner(self, bench: Bench) -> None:
        bench.put()
        worker = bench.worker()
        (job,) = bench.hold(worker)
        bench.run(operate.reprioritise, [job.id], 3)
        assert bench.job(job.id).token > job.token
        assert bench.exchange(worker, begin=(Owned(job.id, job.token),)).begun == ("lost",)

    def test_a_delayed_job_keeps_its_due_time(self, bench: Bench) -> None:
        job_id = scheduled(bench)
        due = bench.job(job_id).scheduled_at
        assert bench.run(operate.reprioritise, [job_id], 1) == [Done.DONE]
        job = bench.job(job_id)
        assert (job.status, job.priority, job.scheduled_at) == (Status.SCHEDULED, 1, due)
        bench.clock.advance(61)
        assert [claimed.tier for claimed in bench.claim(bench.worker())] == [1]

    def test_a_running_job_runs_on_and_comes_back_in_its_new_tier(self, bench: Bench) -> None:
        bench.put()
        worker = bench.worker()
        (job,) = bench.claim(worker)
        assert bench.run(operate.reprioritise, [job.id], 0) == [Done.DONE]
        assert (bench.status(job.id), bench.job(job.id).token) == (Status.RUNNING, job.token)
        assert counters(bench)[0] == {Status.RUNNING: 1}
        bench.settle(worker, job, Transition(Status.PENDING, Outcome.INTERRUPTED, Charge.INTERRUPTION))
        assert counters(bench) == ({Status.PENDING: 1}, {("default", 0): 1})
        assert bench.claim(worker)[0].tier == 0

    @pytest.mark.parametrize("tier", TIERS)
    def test_a_repeated_call_changes_nothing(self, bench: Bench, tier: int) -> None:
        job_id, later = ready(bench), ready(bench)
        bench.run(operate.reprioritise, [job_id, later], tier)
        assert bench.run(operate.reprioritise, [job_id], tier) == [Done.DONE]
        assert [claimed.id for claimed in bench.claim(bench.worker(), 2)] == [job_id, later]

    def test_what_has_ended_or_is_unknown_cannot_be_moved(self, bench: Bench) -> None:
        assert bench.run(operate.reprioritise, [completed(bench), dead_letter(bench), "nobody"], 0) == [
            Done.CONFLICT,
            Done.CONFLICT,
            Done.UNKNOWN,
        ]


class TestPause:
    def test_a_paused_queue_gives_nothing_until_it_is_resumed(self, bench: Bench) -> None:
        bench.put_many(3)
        worker = bench.worker()
        assert [bench.run(operate.pause, "default") for _ in range(2)] == [True, False]
        assert bench.claim(worker, 3) == []
        assert counters(bench)[0] == {Status.PENDING: 3}
        assert [bench.run(operate.resume, "default") for _ in range(2)] == [True, False]
        assert len(bench.claim(worker, 3)) == 3
        assert bench.rows()["queue"] == 0

    def test_held_jobs_go_back_and_running_ones_run_on(self, bench: Bench) -> None:
        bench.put_many(3)
        bench.put(queue="other")
        worker = bench.worker(queues=("default",))
        other = bench.worker("o", queues=("other",))
        answer = bench.exchange(worker, slots=1, extra=2)
        (kept,) = bench.hold(other)
        bench.run(operate.pause, "default")
        assert counters(bench)[0] == {Status.RUNNING: 1, Status.PENDING: 2, Status.CLAIMED: 1}
        assert bench.status(kept.id) is Status.CLAIMED
        begun = bench.exchange(worker, begin=tuple(Owned(job.id, job.token) for job in answer.held)).begun
        assert begun == ("lost", "lost")
        assert bench.settle(worker, answer.running[0], COMPLETED) is Settled.APPLIED

    def test_resuming_wakes_workers_that_wait(self, bench: Bench) -> None:
        worker = bench.worker(bell="bell-1")
        bench.run(operate.pause, "default")
        bench.put_many(3)
        bench.claim(worker)
        bench.rung.clear()
        bench.run(operate.resume, "default")
        assert bench.rung == [("bell-1", b"w")]

    def test_resuming_an_empty_queue_wakes_nobody(self, bench: Bench) -> None:
        bench.run(operate.pause, "default")
        bench.claim(bench.worker(bell="bell-1"))
        bench.rung.clear()
        bench.run(operate.resume, "default")
        assert bench.rung == []

    def test_a_paused_queue_still_takes_new_jobs(self, bench: Bench) -> None:
        bench.run(operate.pause, "default")
        job = prepare({"task": "work"}).job((), {})
        assert bench.run(enqueue, [job], 10)[0].verdict is Verdict.CREATED
