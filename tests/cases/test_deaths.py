"""Workers that are killed, and bookkeeping that is lost: C01, C05, and how soon a death is noticed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from fluxmesh.job import Outcome, Status
from tests.cases.backdoor import RedisDoor
from tests.cases.beside import beside
from tests.cases.harness import LEASE_S, REAP_S, Lab, Site, crashed, together, wait_until
from tests.cases.marks import lives
from tests.cases.report import scaled


def killed(pid: int, ended: dict[int, int]) -> bool:
    """Gone by SIGKILL. Its status may be missing: a supervisor that waits for it and dies in the same
    moment may still have taken it."""
    return ended.get(pid, signal.SIGKILL) == signal.SIGKILL and not lives(pid)


@pytest.mark.parametrize("kind", ["worker command", "run_worker()"])
def test_c01_jobs_of_a_worker_killed_in_the_middle_run_elsewhere(lab: Lab, kind: str) -> None:
    # Without a lock that tells of deaths, a lease is given anew to everybody where nobody looked on for two
    # beats. So there once with another worker, which serves another queue, and once with nobody.
    looked_on = lab.storage == "redis" and kind == "worker command"
    case = lab.case(
        "C01",
        w1=kind,
        looked_on=looked_on,
        concurrency=4,
        running=4,
        queued=20,
        delayed=5,
        lease_s=LEASE_S,
    )
    second = lab.standby("w2", concurrency=4)
    if looked_on:
        lab.worker("keeper", "--queues", "other")
    start = lab.worker if kind == "worker command" else lab.direct_worker
    first = start("w1", concurrency=4)
    running = lab.submit_many("nap", [(scaled(5), "running")] * 4)
    lab.await_starts(4, 10, note="running")
    queued = lab.submit_many("nap", [(scaled(0.4), "queued")] * 20)
    delayed = lab.submit_many("nap", [(0.0, "delayed")] * 5, delay=scaled(6))
    [body_pid] = {mark.pid for mark in lab.marks.starts(note="running")}
    killed_at = time.monotonic()
    ended = first.kill()
    case.equal("wtermsig_of_w1", ended[first.pid], signal.SIGKILL)
    case.equal("bodies_process_was_killed", killed(body_pid, ended), True)
    case.equal("bodies_ran_in_the_tests_child", body_pid == first.pid, kind == "run_worker()")
    lab.let_in(second)
    up_at = time.monotonic()

    lab.await_ended([*running, *queued, *delayed], 60)
    again = [lab.marks.starts(job=handle.id)[1:] for handle in running]
    bound = LEASE_S + REAP_S + 1
    case.equal("interrupted_bodies_started_again", [len(starts) for starts in again], [1] * 4)
    first_again = min(starts[0].at for starts in again) - killed_at
    last_again = max(starts[0].at for starts in again) - killed_at
    if lab.storage == "redis" and not looked_on:
        case.at_most("last_restart_after_w2_was_up_s", last_again - (up_at - killed_at), bound)
    else:
        case.at_most("first_restart_after_kill_s", first_again, bound)
        case.at_most("last_restart_after_kill_s", last_again, bound)
        case.at_most("w2_up_after_kill_s", up_at - killed_at, bound - 1)  # else these say little
    case.equal("crashes_of_the_killed", [lab.now(h).crashes for h in running], [1] * 4)
    case.equal("crashes_of_the_others", sum(lab.now(h).crashes for h in [*queued, *delayed]), 0)
    starts = {len(lab.marks.starts(job=handle.id)) for handle in [*queued, *delayed]}
    case.equal("starts_of_each_other", starts, {1})
    case.equal("completed", lab.queue.counts().by_status[Status.COMPLETED], 29)
    case.equal("attempts_charged", sum(record.attempts for record in lab.records()), 29)
    lab.close(case)


def drop_worker(lab: Lab, epoch: int) -> None:
    lab.door.drop_worker(epoch)


def drop_lease(lab: Lab, epoch: int) -> None:
    lab.door.drop_lease(epoch)


def drop_both(lab: Lab, epoch: int) -> None:
    drop_lease(lab, epoch)
    drop_worker(lab, epoch)


VARIANTS: dict[str, Callable[[Lab, int], None]] = {
    "worker record": drop_worker,
    "lease record of one job": drop_lease,
    "both": drop_both,
}


def recovered_without(site: Site, name: str, lose: Callable[[Lab, int], None]) -> None:
    with site.lab(name.replace(" ", "-"), proof_of_death=False) as lab:
        case = lab.case("C05", lost=name, running=3, proof_of_death=False, lease_s=LEASE_S)
        first = lab.worker("w1")
        [member] = lab.members(first)
        handles, door = lab.submit_held(3, "running")
        lab.await_starts(3, 10)
        second = lab.worker("w2")
        first.kill()
        killed_at = time.monotonic()
        lose(lab, member.epoch)
        lab.await_starts(6, 30)
        again = [lab.marks.starts(job=handle.id)[1].at - killed_at for handle in handles]
        case.at_most("last_restart_after_kill_s", max(again), 2 * (LEASE_S + REAP_S) + 2)
        door.touch()
        lab.await_ended(handles, 20)
        case.equal("crashes", [lab.now(handle).crashes for handle in handles], [1] * 3)
        case.equal("survivor_lives", second.running, True)
        lab.close(case)


@beside
def test_c05_jobs_are_recovered_though_the_bookkeeping_is_lost(site: Site) -> None:
    together(
        *(lambda name=name, lose=lose: recovered_without(site, name, lose) for name, lose in VARIANTS.items())
    )


@pytest.mark.slow
@pytest.mark.only("redis")
@beside
def test_c05_jobs_are_recovered_though_their_owner_is_not_listed(site: Site) -> None:
    """Redis keeps a list of those who may own jobs, so that nobody has to look for them among all keys."""

    def lose(lab: Lab, epoch: int) -> None:
        assert isinstance(lab.door, RedisDoor)
        assert lab.door.ask("HDEL", lab.door.key("owners"), epoch) == 1

    recovered_without(site, "entry among the owners", lose)


@beside
def test_c05_a_live_worker_whose_record_is_deleted_registers_again(site: Site) -> None:
    with site.lab() as lab:
        deleted_while_it_lives(lab)


def deleted_while_it_lives(lab: Lab) -> None:
    case = lab.case("C05", lost="record of a live worker", lease_s=LEASE_S)
    first, second = lab.launch("w1"), lab.launch("w2")
    lab.await_workers(first, second)
    handle = lab.submit("nap", 2.5 * LEASE_S, "long")
    [mark] = lab.await_starts(1, 10)
    owner = next(row for row in lab.queue.list_workers() if row.pid == mark.pid)
    drop_worker(lab, owner.epoch)
    dropped_at = time.monotonic()
    back = wait_until(
        lambda: [row for row in lab.queue.list_workers() if row.worker_id == owner.worker_id],
        10,
        "its row is back",
    )
    case.at_most("row_back_after_s", time.monotonic() - dropped_at, 1.0 + 0.5)  # a beat, and the look for it
    case.equal("epoch", back[0].epoch, owner.epoch)
    lab.await_ended([handle], 30)
    case.equal("starts", len(lab.marks.starts()), 1)
    case.equal("crashes", lab.now(handle).crashes, 0)
    lab.close(case)


def killed_beside_an_idle_one(site: Site, *, proof: bool, lease_s: float, bound_s: float) -> None:
    with site.lab(lease_s=lease_s, beat_s=lease_s / 3, proof_of_death=proof) as lab:
        case = lab.case("death", proof_of_death=proof, lease_s=lease_s, running=4)
        busy = lab.worker("busy", concurrency=4)
        handles, door = lab.submit_held(4, "running")
        lab.await_starts(4, 10)
        idle = lab.worker("idle", concurrency=4)
        marks = lab.await_starts(4, 10)
        case.equal("processes_of_the_bodies", len({mark.pid for mark in marks}), 1)
        killed_at = time.monotonic()
        ended = busy.kill()
        case.equal("bodies_process_was_killed", killed(marks[0].pid, ended), True)
        lab.await_starts(8, 30)
        again = [lab.marks.starts(job=handle.id)[1].at - killed_at for handle in handles]
        case.at_most("last_restart_after_kill_s", max(again), bound_s)
        door.touch()
        lab.await_ended(handles, 20)
        case.equal("crashes", [lab.now(handle).crashes for handle in handles], [1] * 4)
        case.equal("idle_one_lives", idle.running, True)
        lab.close(case)


@pytest.mark.only("sqlite")
def test_jobs_of_a_killed_worker_start_beside_within_a_second(site: Site) -> None:
    """A lock on a file proves a death; a server of another machine has nothing like it."""
    killed_beside_an_idle_one(site, proof=True, lease_s=6.0, bound_s=1.0)


@beside
def test_without_a_proof_they_start_when_the_default_lease_has_lapsed(site: Site) -> None:
    killed_beside_an_idle_one(site, proof=False, lease_s=6.0, bound_s=8.0)


@beside
def test_without_a_proof_they_start_when_the_shortest_lease_has_lapsed(site: Site) -> None:
    killed_beside_an_idle_one(site, proof=False, lease_s=2.0, bound_s=3.5)


@beside
def test_jobs_of_a_process_whose_supervisor_lives_start_beside_within_a_second(site: Site) -> None:
    """The parent sees the end of its child, and says so; the bodies need not wait for the lease, nor for the
    child that takes its place."""
    with site.lab(lease_s=30.0, beat_s=10.0) as lab:
        case = lab.case("death", killed="the child of a supervisor", lease_s=30.0, running=4)
        busy = lab.worker("busy", concurrency=4)
        handles, door = lab.submit_held(4, "running")
        [pid] = {mark.pid for mark in lab.await_starts(4, 10)}
        idle = lab.worker("idle", concurrency=4)
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        lab.await_starts(8, 30)
        again = [lab.marks.starts(job=handle.id)[1].at - killed_at for handle in handles]
        case.at_most("last_restart_after_kill_s", max(again), 1.0)
        door.touch()
        lab.await_ended(handles, 20)
        case.equal("crashes", [lab.now(handle).crashes for handle in handles], [1] * 4)
        case.equal("both_live", (busy.running, idle.running), (True, True))
        lab.close(case)


def test_the_parent_of_a_killed_process_sees_signal_9_and_says_so(lab: Lab) -> None:
    """The process that the body names is the one that is killed: once below a supervisor, whose words reach
    the history, and once as a child of this test."""
    case = lab.case("death", killed="the process of the body alone")
    group = lab.worker("w1")
    handle = lab.submit("nap", 1.0, "supervised")
    [mark] = lab.await_starts(1, 10, note="supervised")
    os.kill(mark.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    again = lab.await_starts(2, 10, note="supervised")
    case.at_most("restart_by_the_same_supervisor_s", again[1].at - killed_at, 3.0)
    lab.await_ended([handle], 20)
    [attempt] = crashed(handle.history())
    case.equal("the_history_says", "killed by SIGKILL" in str(attempt.error), True)
    case.equal("the_supervisor_lives", group.running, True)
    group.kill()

    direct = lab.direct_worker("w2")
    other = lab.submit("nap", 1.0, "direct")
    [mark] = lab.await_starts(1, 10, note="direct")
    case.equal("body_runs_in_the_tests_child", mark.pid, direct.pid)
    case.equal("wtermsig", direct.kill(), {mark.pid: int(signal.SIGKILL)})
    lab.worker("w3")
    lab.await_ended([other], 20)
    case.equal("outcomes", lab.outcomes(other), [Outcome.CRASHED, Outcome.COMPLETED])
    lab.close(case)
