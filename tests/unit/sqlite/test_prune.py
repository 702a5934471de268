"""Retention: what is kept, for how long, and that nothing is left in the end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from fluxmesh.clock import SystemClock
from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import Transition
from fluxmesh.storage.sqlite import liveness, operate, prune, push, reads
from fluxmesh.storage.sqlite.enqueue import enqueue
from fluxmesh.storage.sqlite.locks import DeathLock
from fluxmesh.storage.values import (
    Enqueued,
    Pruned,
    Registration,
    Retention,
    Standing,
    TaskSpec,
    Verdict,
    WorkerView,
)
from fluxmesh.submission import prepare
from fluxmesh.testing.contract.lab import COMPLETED, dead
from tests.unit.sqlite.bench import BEAT_S, LEASE_S, Bench

KEPT = Retention(result_ttl_s=100, dead_letter_ttl_s=1_000, idempotency_ttl_s=500, worker_ttl_s=3_600)


def end(bench: Bench, transition: Transition = COMPLETED, count: int = 1, **fields: object) -> list[str]:
    made = bench.put_many(count, **fields)
    worker = bench.worker("ender")
    for job in bench.claim(worker, count):
        bench.settle(worker, job, transition)
    bench.run(liveness.declare_dead, worker, "left")
    return made


def pruned(bench: Bench, limit: int = 500, kept: Retention = KEPT) -> Pruned:
    return bench.run(prune.prune, kept, limit)


class TestJobs:
    @pytest.mark.parametrize(
        ("transition", "ttl_s"),
        [
            (COMPLETED, 100),
            (Transition(Status.CANCELLED, Outcome.CANCELLED), 100),
            (Transition(Status.EXPIRED, Outcome.INTERRUPTED), 100),
            (dead(), 1_000),
        ],
    )
    def test_an_ended_job_is_kept_for_its_time_and_not_longer(
        self, bench: Bench, transition: Transition, ttl_s: float
    ) -> None:
        (job_id,) = end(bench, transition)
        bench.clock.advance(ttl_s)
        assert pruned(bench).jobs == 0
        bench.clock.advance(0.001)
        assert pruned(bench).jobs == 1
        assert bench.read(reads.get, job_id) is None

    def test_jobs_that_have_not_ended_are_kept_for_ever(self, bench: Bench) -> None:
        bench.put_many(2)
        bench.put(delay=10_000_000)
        bench.exchange(bench.worker(), slots=1, extra=1)
        bench.clock.advance(9_000_000)
        assert pruned(bench).jobs == 0
        assert bench.read(reads.counts).total == 3

    def test_a_replayed_job_is_not_pruned_by_its_former_end(self, bench: Bench) -> None:
        (job_id,) = end(bench, dead())
        bench.run(operate.replay, [job_id])
        bench.clock.advance(2_000)
        assert pruned(bench).jobs == 0
        assert bench.status(job_id) is Status.PENDING

    def test_a_call_takes_at_most_its_limit_and_the_oldest_first(self, bench: Bench) -> None:
        made = []
        for _ in range(5):
            made += end(bench)
            bench.clock.advance(1)
        bench.clock.advance(200)
        assert pruned(bench, limit=2) == Pruned(2, pruned_others(bench), more=True)
        assert bench.found() == made[:1:-1]
        assert (pruned(bench, limit=2).more, pruned(bench, limit=2).more) == (True, False)
        assert bench.found() == []

    def test_a_call_is_short_whatever_its_limit(self, bench: Bench) -> None:
        end(bench, count=prune.JOBS_MOST + 10)
        bench.clock.advance(200)
        first, second = pruned(bench, limit=1_000), pruned(bench, limit=1_000)
        assert (first.jobs, first.more) == (prune.JOBS_MOST, True)
        assert (second.jobs, second.more) == (10, False)

    def test_tags_go_with_their_job(self, bench: Bench) -> None:
        end(bench, tags=["x", "y"])
        (junk,) = end(bench, tags=["x"])
        bench.set(junk, options=b"\xff")
        bench.put(tags=["x"])
        bench.clock.advance(200)
        assert pruned(bench).jobs == 2
        assert bench.rows()["tag"] == 1

    def test_counters_equal_a_walk_afterwards_and_empty_ones_are_gone(self, bench: Bench) -> None:
        end(bench, count=3)
        end(bench, dead(), count=2)
        bench.clock.advance(200)
        pruned(bench)
        counts = bench.read(reads.counts)
        assert {status: n for status, n in counts.by_status.items() if n} == {Status.DEAD_LETTER: 2}
        assert bench.rows()["tally"] == 1


def pruned_others(bench: Bench) -> int:
    """Counters that came to nothing on the way: ready and running of one queue and tier."""
    return 2


class TestKeys:
    def again(self, bench: Bench, *args: object) -> Enqueued:
        job = prepare({"task": "work", "idempotency_key": "i"}).job(args, {})
        return bench.run(enqueue, [job], 1_000)[0]

    def test_a_key_outlives_its_job_and_answers_with_what_became_of_it(self, bench: Bench) -> None:
        (job_id,) = end(bench, idempotency_key="i")
        bench.clock.advance(200)
        assert pruned(bench).jobs == 1
        again = self.again(bench, 0)
        assert again == Enqueued(job_id, Verdict.EXISTING, "idempotency", Status.COMPLETED, pruned=True)
        assert self.again(bench, 1).verdict is Verdict.CONFLICT

    def test_a_key_is_forgotten_when_its_time_is_over(self, bench: Bench) -> None:
        end(bench, idempotency_key="i")
        bench.clock.advance(200)
        pruned(bench)
        bench.clock.advance(299)
        pruned(bench)
        assert bench.rows()["idempotency"] == 1
        bench.clock.advance(1)
        pruned(bench)
        assert bench.rows()["idempotency"] == 0
        assert self.again(bench, 1).verdict is Verdict.CREATED

    def test_a_key_lives_as_long_as_its_job_even_if_its_own_time_is_shorter(self, bench: Bench) -> None:
        end(bench, dead(), idempotency_key="i")
        bench.clock.advance(900)
        pruned(bench)
        assert self.again(bench, 0).verdict is Verdict.EXISTING
        bench.clock.advance(101)
        assert pruned(bench).jobs == 1
        assert bench.rows()["idempotency"] == 0

    def test_a_key_that_has_passed_to_a_new_job_stays_when_the_old_one_goes(self, bench: Bench) -> None:
        (old,) = end(bench, dead(), idempotency_key="i")
        bench.db.execute('update "fluxmesh:idempotency" set forget_us = 1')
        new = self.again(bench, 1)
        assert new.verdict is Verdict.CREATED
        bench.clock.advance(1_001)
        assert pruned(bench).jobs == 1
        assert bench.read(reads.get, old) is None
        assert self.again(bench, 1) == Enqueued(new.id, Verdict.EXISTING, "idempotency", Status.PENDING)


class TestWorkers:
    def epochs(self, bench: Bench) -> list[int]:
        return [row.epoch for row in bench.read(reads.fleet, bench.clock.wall_us(), bench.clock.boot_us())]

    def test_a_dead_worker_is_shown_for_a_lease_and_then_forgotten(self, bench: Bench) -> None:
        worker = bench.worker()
        bench.run(liveness.declare_dead, worker, "killed")
        bench.clock.advance(LEASE_S - 1)
        pruned(bench)
        assert self.epochs(bench) == [worker.epoch]
        bench.clock.advance(1)
        pruned(bench)
        assert self.epochs(bench) == []

    def test_a_fenced_epoch_goes_and_the_newer_one_stays(self, bench: Bench) -> None:
        bench.worker("w1")
        newer = bench.worker("w1")
        bench.clock.advance(LEASE_S)
        pruned(bench)
        assert self.epochs(bench) == [newer.epoch]

    def test_a_silent_worker_is_kept_for_the_time_of_workers(self, bench: Bench) -> None:
        worker = bench.worker()
        bench.clock.advance(3_600)
        pruned(bench)
        assert self.epochs(bench) == [worker.epoch]
        bench.clock.advance(1)
        pruned(bench)
        assert self.epochs(bench) == []

    @pytest.mark.parametrize("parts", [{"slots": 1}, {"extra": 1}])
    def test_a_dead_worker_stays_as_long_as_it_owns_a_job(self, bench: Bench, parts: dict[str, int]) -> None:
        bench.put()
        worker = bench.worker()
        bench.exchange(worker, **parts)
        bench.run(liveness.declare_dead, worker, "killed")
        bench.clock.advance(10_000)
        pruned(bench)
        assert self.epochs(bench) == [worker.epoch]

    def test_after_a_reboot_rows_of_the_former_boot_go_by_wall_time(self, bench: Bench) -> None:
        bench.worker()
        bench.clock.reboot("boot-2")
        pruned(bench)
        assert len(self.epochs(bench)) == 1
        bench.clock.advance(3_601)
        pruned(bench)
        assert self.epochs(bench) == []

    def test_a_worker_that_slept_so_long_that_it_was_forgotten_comes_back_with_its_limits(
        self, bench: Bench
    ) -> None:
        limited = TaskSpec("work", rate_limit="1/h")
        worker = bench.worker("w1", tasks=(limited,))
        bench.clock.advance(3_601)
        pruned(bench)
        assert (bench.rows()["worker"], bench.rows()["task"]) == (0, 0)
        told = Registration("w1", ("default",), (0, 1, 2, 3), (limited,), 8, LEASE_S, BEAT_S)
        answer = bench.run(liveness.beat, worker, [], WorkerView(told), None, None)
        assert answer.standing is Standing.GOOD
        bench.put_many(2)
        assert len(bench.claim(worker, 2)) == 1

    def test_a_worker_that_comes_back_does_not_undo_newer_limits(self, bench: Bench) -> None:
        old = bench.worker("w1", tasks=(TaskSpec("work", rate_limit="1/h"),))
        bench.db.execute('delete from "fluxmesh:worker"')
        bench.worker("w2", tasks=(TaskSpec("work"),))
        specs = (TaskSpec("work", rate_limit="1/h"),)
        told = Registration("w1", ("default",), (0, 1, 2, 3), specs, 8, LEASE_S, BEAT_S)
        bench.run(liveness.beat, old, [], WorkerView(told), None, None)
        bench.put_many(2)
        assert len(bench.claim(old, 2)) == 2


class TestFiles:
    """Bells and locks beside the database. Old and new are told by the files' own times, which are real."""

    def lock_of_a_dead_process(self, bench: Bench) -> str:
        bench.belfry.folder.mkdir(exist_ok=True)
        (bench.belfry.folder / "dead-lock").touch()
        return "dead-lock"

    def bell_of_a_dead_process(self, bench: Bench) -> str:
        bound = bench.belfry.bind()
        assert bound is not None
        bound[0].close()
        return bound[1]

    def test_files_of_a_forgotten_worker_go_with_its_row(self, bench: Bench) -> None:
        bell, lock = self.bell_of_a_dead_process(bench), self.lock_of_a_dead_process(bench)
        bench.run(liveness.declare_dead, bench.worker(bell=bell, lock=lock), "killed")
        bench.clock.advance(LEASE_S)
        pruned(bench)
        assert os.listdir(bench.belfry.folder) == []

    def test_files_that_a_process_still_has_are_never_touched(self, bench: Bench) -> None:
        bound = bench.belfry.bind()
        assert bound is not None
        held = DeathLock(bench.belfry.folder)
        bench.run(liveness.declare_dead, bench.worker(bell=bound[1], lock=held.name), "a mistake")
        bench.clock.advance(LEASE_S)
        pruned(bench)
        assert bench.rows()["worker"] == 0
        assert sorted(os.listdir(bench.belfry.folder)) == sorted([bound[1], held.name])
        held.release()
        bound[0].close()

    def test_a_file_that_another_row_names_stays(self, bench: Bench) -> None:
        lock = self.lock_of_a_dead_process(bench)
        bench.run(liveness.declare_dead, bench.worker("w1", lock=lock), "killed")
        bench.worker("w2", lock=lock)
        bench.clock.advance(LEASE_S)
        pruned(bench)
        assert os.listdir(bench.belfry.folder) == [lock]

    def test_old_files_of_processes_that_never_were_workers_are_swept_away(self, bench: Bench) -> None:
        names = [self.bell_of_a_dead_process(bench), self.lock_of_a_dead_process(bench)]
        live = bench.belfry.bind()
        assert live is not None
        bench.clock.step_wall((SystemClock().wall_us() - bench.clock.wall_us()) / 1e6)
        for name in (*names, live[1]):
            set_age(bench.belfry.folder / name, bench, 3_500)
        pruned(bench)
        assert len(os.listdir(bench.belfry.folder)) == 3
        for name in (*names, live[1]):
            set_age(bench.belfry.folder / name, bench, 3_700)
        pruned(bench)
        assert os.listdir(bench.belfry.folder) == [live[1]]
        live[0].close()

    def test_a_missing_folder_is_no_error(self, bench: Bench) -> None:
        assert not bench.belfry.folder.exists()
        assert pruned(bench) == Pruned()


def set_age(path: Path, bench: Bench, seconds: float) -> None:
    at = bench.clock.wall_us() / 1e6 - seconds
    os.utime(path, (at, at), follow_symlinks=False)


class TestLeftovers:
    def test_waits_that_are_over_are_forgotten(self, bench: Bench) -> None:
        job_id = bench.put()
        bench.run(push.watch, job_id, "bell", 30.0)
        bench.run(push.listen, ["jobs"], "bell", 30.0)
        bench.clock.advance(29)
        pruned(bench)
        assert (bench.rows()["waiter"], bench.rows()["listener"]) == (1, 1)
        bench.clock.advance(3)
        pruned(bench)
        assert (bench.rows()["waiter"], bench.rows()["listener"]) == (0, 0)

    def test_an_empty_parking_set_goes_and_one_with_jobs_stays(self, bench: Bench) -> None:
        parked = [bench.put("one"), bench.put("two")]
        bench.claim(bench.worker())
        assert bench.rows()["lane"] == 2
        bench.run(operate.cancel, parked[:1])
        pruned(bench)
        assert bench.rows()["lane"] == 1
        assert [job.id for job in bench.claim(bench.worker("w2", tasks=("two",)))] == parked[1:]

    def test_a_task_is_kept_while_a_worker_or_a_job_names_it(self, bench: Bench) -> None:
        worker = bench.worker(tasks=("work", "other"))
        job_id = bench.put()
        pruned(bench)
        assert bench.rows()["task"] == 2
        bench.run(liveness.declare_dead, worker, "left")
        pruned(bench)
        assert bench.rows()["task"] == 1
        bench.run(operate.cancel, [job_id])
        bench.run(operate.discard, [job_id])
        pruned(bench)
        assert bench.rows()["task"] == 0

    def test_a_rate_limit_is_not_forgotten_while_it_still_holds(self, bench: Bench) -> None:
        worker = bench.worker(tasks=(TaskSpec("work", rate_limit="1/m"),))
        (job_id,) = bench.put_many(1)
        (job,) = bench.claim(worker)
        bench.settle(worker, job, COMPLETED)
        bench.run(operate.discard, [job_id])
        bench.run(liveness.declare_dead, worker, "left")
        pruned(bench)
        assert bench.rows()["task"] == 1
        bench.clock.advance(60)
        pruned(bench)
        assert bench.rows()["task"] == 0

    def test_nothing_is_left_of_anything_in_the_end(self, bench: Bench) -> None:
        baseline = bench.rows()
        end(bench, count=3, tags=["x"], idempotency_key=None)
        end(bench, dead(), tags=["y"], idempotency_key="i", concurrency_key="c")
        bench.put("parked", unique_key="u", expires_in=50)
        bench.put(delay=60, priority="high")
        killed = bench.worker("killed", tasks=(TaskSpec("work", rate_limit="5/m"),))
        bench.exchange(killed, slots=1, extra=1)
        bench.run(operate.cancel, bench.found("state:pending") + bench.found("state:scheduled"))
        bench.run(operate.pause, "mail")
        bench.run(operate.resume, "mail")
        bench.run(liveness.declare_dead, killed, "killed")
        assert sum(bench.rows().values()) > sum(baseline.values())
        bench.clock.advance(2_000)
        for _ in range(10):
            if not pruned(bench, limit=3).more:
                break
        assert bench.rows() == baseline


def test_a_socket_file_is_told_from_a_lock(bench: Bench) -> None:
    bench.belfry.folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.bind(str(bench.belfry.folder / "b"))
        assert not bench.belfry.is_abandoned("b")
    assert bench.belfry.is_abandoned("b")
    assert not bench.belfry.is_abandoned("missing")
