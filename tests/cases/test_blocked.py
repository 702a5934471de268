"""One job that holds up its whole process: C03, and what becomes of it, of its neighbours and of the
capacity."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import datetime
from typing import Any, Final

import pytest

from fluxmesh.job import Outcome, Status
from tests.cases.harness import START_S, Lab, Site, together, wait_until
from tests.cases.marks import lives
from tests.cases.report import scaled
from tests.cases.workers import DirectWorker, WorkerGroup

HOLD_S: Final = max(4, round(scaled(8)))  # longer than the innocent may take
GRIP_S: Final = max(6, round(scaled(10)))  # longer than the shortest lease
TIMEOUT_S: Final = 2.0
HARD_GRACE_S: Final = 1.0
RETIRE_AFTER_S: Final = scaled(16)
RETRIES: Final = 2
CULPRIT: Final = {
    "timeout": TIMEOUT_S,
    "max_retries": RETRIES,
    "backoff_base_seconds": 0.05,
    "jitter": "none",
}
INNOCENT: Final = 3
RELEASED_S: Final = 3.0
SILENCE: Final = re.compile(r"process beats again itself.*?silent_s=([\d.]+)")


def shortest_lease_s(lab: Lab) -> float:
    """Without a proof of death by a lock the shortest that is recommended is a second less."""
    return 2.0 if lab.storage == "redis" else 3.0


def silence_told(group: WorkerGroup | DirectWorker) -> float:
    """For how long the process sent no good beat itself, as its supervisor or its keeper says."""
    found = wait_until(lambda: SILENCE.search(group.log.read_text("utf-8")), 10, "the silence is over")
    return float(found[1])


# -- C03 -------------------------------------------------------------------------------------------------
def blocking_beside_innocent(site: Site, task: str, *, named: bool, mesh: bool) -> None:
    with site.lab(task) as lab:
        case = lab.case(
            "C03", body=task, hold_s=HOLD_S, concurrency=5, innocent=INNOCENT, mesh="yes" if mesh else "no"
        )
        lab.worker("w2", *(lab.in_mesh() if mesh else ()), concurrency=4)
        filling, door = lab.submit_held(4, "filling")  # so that all that comes now is w1's
        lab.await_starts(4, 20)
        first = lab.worker("w1", *(lab.in_mesh() if mesh else ()), concurrency=5)
        [row] = lab.members(first)
        lab.queue.pause("default")  # until all are there, so that w1 is given all of them at once
        template = lab.queue.task_named(task).options(priority="critical")
        blocking = template.map([(HOLD_S, "blocking")])[0]
        lab.ids.append(blocking.id)
        innocent = lab.submit_many("anap", [(0.2, "innocent")] * INNOCENT)
        lab.queue.resume("default")
        [began] = lab.await_starts(1, 10, note="blocking")
        door.touch()  # w2 is idle from now on
        lab.await_ended([*filling, blocking, *innocent], 60)
        last = max(mark.at for mark in lab.marks.ends(note="innocent"))
        case.at_most("innocent_done_after_s", last - began.at, RELEASED_S)
        released = re.findall(r"jobs released .*count=(\d+)", first.log.read_text("utf-8"))
        case.equal("given_back", sum(map(int, released)), INNOCENT)
        where = {mark.pid for mark in lab.marks.starts(note="innocent")}
        case.equal("innocent_ran_elsewhere", began.pid in where, False)
        case.equal(
            "starts_of_each", [len(lab.marks.starts(job=h.id)) for h in (blocking, *innocent)], [1] * 4
        )
        case.equal("crashes", sum(record.crashes for record in lab.records()), 0)
        case.equal("w1_is_the_same_process", [other.pid for other in lab.members(first)], [row.pid])
        log = first.log.read_text("utf-8")
        if named:
            case.equal("warning_names_the_job", f"job_id={blocking.id}" in log, True)
        else:
            case.at_least("own_beats_silent_s", silence_told(first), HOLD_S)
        lab.close(case)


@pytest.mark.parametrize("mesh", [False, True], ids=["plain", "mesh"])
def test_c03_what_one_job_blocks_holds_up_no_other(site: Site, mesh: bool) -> None:
    """A blocking call on the loop, and one that holds the interpreter, so that not even a thread goes on."""
    together(
        lambda: blocking_beside_innocent(site, "ablock", named=True, mesh=mesh),
        lambda: blocking_beside_innocent(site, "agrip", named=False, mesh=mesh),
    )


# -- a process that cannot say that it lives -------------------------------------------------------------
def idle_beside(lab: Lab, **beats: float) -> WorkerGroup:
    """A worker that will take what is free, ready to be let in; and one of another queue, that looks after
    the storage meanwhile: a lease does not lapse where nobody looks."""
    lab.worker("looks-on", "--queues", "other", concurrency=1, **beats)
    return lab.standby("idle", concurrency=4, **beats)


def holds_the_interpreter(site: Site, kind: str) -> None:
    """On the shortest lease, beside an idle worker that would take the job at once."""
    with site.lab(kind.strip("()").replace(" ", "-")) as lab:
        lease_s = shortest_lease_s(lab)
        beats = {"lease_s": lease_s, "beat_s": lease_s / 3}
        case = lab.case("held", w1=kind, hold_s=GRIP_S, lease_s=lease_s)
        idle = idle_beside(lab, **beats)
        start = lab.worker if kind == "worker command" else lab.direct_worker
        first = start("w1", concurrency=4, **beats)
        if kind != "worker command":
            wait_until(lambda: "keeper ready" in first.log.read_text("utf-8"), START_S, "its keeper is ready")
        handle = lab.submit("grip", GRIP_S, "held")
        lab.await_starts(1, 10)
        lab.let_in(idle)
        lab.await_ended([handle], GRIP_S + 20)
        case.at_least("own_beats_silent_s", silence_told(first), GRIP_S)
        case.equal("starts", len(lab.marks.starts()), 1)
        case.equal("outcomes", lab.outcomes(handle), [Outcome.COMPLETED])
        case.equal("crashes", lab.now(handle).crashes, 0)
        case.equal("both_live", (first.running, idle.running), (True, True))
        lab.close(case)


def test_a_call_that_holds_the_interpreter_for_longer_than_the_shortest_lease_runs_once(site: Site) -> None:
    together(
        lambda: holds_the_interpreter(site, "worker command"),
        lambda: holds_the_interpreter(site, "run_worker()"),
    )


@pytest.mark.slow
def test_without_anybody_who_keeps_the_lease_it_would_run_twice(site: Site) -> None:
    """What the two above are worth: the same without a keeper."""
    with site.lab() as lab:
        lease_s = shortest_lease_s(lab)
        beats = {"lease_s": lease_s, "beat_s": lease_s / 3}
        case = lab.case("held", w1="run_worker() without a keeper", hold_s=GRIP_S, lease_s=lease_s)
        idle = idle_beside(lab, **beats)
        lab.direct_worker("w1", concurrency=4, keeper=False, **beats)
        handle = lab.submit("grip", GRIP_S, "held")
        lab.await_starts(1, 10)
        lab.let_in(idle)
        starts = lab.await_starts(2, GRIP_S)
        case.at_most("second_start_after_s", starts[1].at - starts[0].at, GRIP_S)
        lab.await_ended([handle], GRIP_S + 20)
        case.close([])  # it broke its promise on purpose


# -- a process that is stopped, or loses its supervisor
# ---------------------------------------------------------
@pytest.mark.slow
def test_the_jobs_of_a_stopped_process_run_elsewhere_and_it_is_refused_when_it_wakes(site: Site) -> None:
    """Its supervisor lives and sees that it is stopped: it does not keep its lease, and does not kill it."""
    with site.lab(hard_grace_s=0.5) as lab:
        lease_s = shortest_lease_s(lab)
        beats = {"lease_s": lease_s, "beat_s": lease_s / 3}
        case = lab.case("held", w1="worker command", stopped="its child alone", lease_s=lease_s)
        idle = idle_beside(lab, **beats)
        first = lab.worker("w1", concurrency=4, **beats)
        [row] = lab.members(first)
        handle = lab.submit("doze", 6.0, "stopped")
        lab.await_starts(1, 10)
        os.kill(row.pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        lab.let_in(idle)
        again = lab.await_starts(2, 30)
        case.at_most("restart_elsewhere_s", again[1].at - stopped_at, 2 * lease_s + START_S)
        case.equal("elsewhere", again[1].pid == row.pid, False)
        os.kill(row.pid, signal.SIGCONT)
        lab.await_ended([handle], 30)
        refused = re.compile("job lost|end refused")  # by a beat, or as it ends before one
        wait_until(lambda: refused.search(first.log.read_text("utf-8")), 10, "the first one is told")
        case.equal("outcomes", lab.outcomes(handle), [Outcome.CRASHED, Outcome.COMPLETED])
        case.equal("w1_is_the_same_process", [other.pid for other in lab.members(first)], [row.pid])
        case.equal("killed", "worker killed" in first.log.read_text("utf-8"), False)
        case.close([])  # the first body went on when it woke up: nothing but the token fences that


@pytest.mark.slow
def test_a_process_whose_loop_stands_still_ends_without_its_supervisor(site: Site) -> None:
    """It cannot drain, so it says what its end means, and ends: its jobs go elsewhere, and nothing is
    charged."""
    with site.lab(grace_s=1.0, hard_grace_s=0.5) as lab:
        case = lab.case("held", killed="the supervisor alone", body="ablock", grace_s=1.0, hard_grace_s=0.5)
        first = lab.worker("w1", concurrency=4)
        [row] = lab.members(first)
        handle = lab.submit("ablock", 40.0, "blocks", timeout=300)
        lab.await_starts(1, 10)
        first.tell(signal.SIGKILL)
        killed_at = time.monotonic()
        wait_until(lambda: not lives(row.pid), 20, "its child has ended")
        case.at_most("child_gone_s", time.monotonic() - killed_at, 1.0 + 0.5 + 2.0 + 3.0)
        second = lab.worker("w2", concurrency=4)
        again = lab.await_starts(2, 30)
        case.equal("outcomes", lab.outcomes(handle), [Outcome.INTERRUPTED])
        case.equal("beside", list(again[1].beside), [])
        second.kill()
        case.close([])


@pytest.mark.only("redis")
def test_jobs_of_a_program_that_is_killed_beside_its_keeper_start_elsewhere_at_once(site: Site) -> None:
    """A server of another machine sees no lock that the kernel frees, so it is the keeper that proves the
    death."""
    with site.lab(lease_s=30.0, beat_s=10.0) as lab:
        case = lab.case("death", killed="a program that calls run_worker()", lease_s=30.0, running=4)
        program = lab.direct_worker("busy", concurrency=4)
        wait_until(lambda: "keeper ready" in program.log.read_text("utf-8"), START_S, "its keeper is ready")
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
        case.equal("idle_one_lives", idle.running, True)
        lab.close(case)


# -- bodies that do not want to end, and what they take with them
# ----------------------------------------------
def overlapping(lab: Lab, job_id: str) -> list[tuple[int, ...]]:
    return [start.beside for start in lab.marks.starts(job=job_id) if start.beside]


def start_up_s(log: str, number: int) -> float:
    """How long the n-th child of a supervisor took from its start until it took jobs."""
    told = {
        what: [
            datetime.fromisoformat(at)
            for at in re.findall(rf"^(\S+) .*worker {what} +\[supervisor\]", log, re.MULTILINE)
        ]
        for what in ("started", "ready")
    }
    return (told["ready"][number] - told["started"][number]).total_seconds()


def capacity(site: Site, task: str, arguments: tuple[Any, ...], *, stalls: bool) -> None:
    """One slot, a body that does not end in its time, an urgent job that waits for the slot."""
    with site.lab(task, hard_grace_s=HARD_GRACE_S, grace_s=0.5, retire_after_s=RETIRE_AFTER_S) as lab:
        limit_s = TIMEOUT_S + HARD_GRACE_S
        case = lab.case("stall", body=task, hard_limit_s=limit_s, max_retries=RETRIES, concurrency=1)
        group = lab.worker("w1", concurrency=1)
        culprit = lab.submit(task, *arguments, "culprit", **CULPRIT)
        [began] = lab.await_starts(1, 10)
        urgent = lab.submit("tick", "urgent", priority="critical")
        lab.await_ended([culprit, urgent], (RETRIES + 1) * (limit_s + RETIRE_AFTER_S + 10))
        [ran] = lab.marks.starts(job=urgent.id)
        child_s = start_up_s(group.log.read_text("utf-8"), 1) if stalls else 0.0
        case.at_most("slot_back_after_the_hard_limit_s", ran.at - began.at - limit_s, 1.0 + child_s)
        if stalls:
            case.at_most("start_up_of_that_child_s", child_s, START_S)
        case.equal("outcomes", lab.outcomes(culprit), [Outcome.TIMEOUT] * (RETRIES + 1))
        case.equal("status", (culprit.status, lab.now(culprit).reason), (Status.DEAD_LETTER, "timeout"))
        case.equal("crashes", lab.now(culprit).crashes, 0)
        case.equal("overlapping", overlapping(lab, culprit.id), [])
        lab.close(case)


def innocent(site: Site, task: str, arguments: tuple[Any, ...]) -> None:
    """What runs beside a body that stands in its process's way, on the loop and on a thread."""
    with site.lab(f"{task}-beside", hard_grace_s=HARD_GRACE_S) as lab:
        case = lab.case(
            "stall", body=task, beside="until on the loop, watch on a thread", max_retries=RETRIES
        )
        lab.worker("w1", concurrency=4)
        [waits], door = lab.submit_held(1, "waits", timeout=600)
        watches = lab.submit("watch", 12.0, "watches", timeout=600)
        lab.await_starts(2, 10)
        culprit = lab.submit(task, *arguments, "culprit", **CULPRIT)
        lab.await_ended([culprit], 60)
        door.touch()
        lab.await_ended([waits, watches], 60)
        case.equal("outcomes", lab.outcomes(culprit), [Outcome.TIMEOUT] * (RETRIES + 1))
        for name, one in (("waits", waits), ("watches", watches)):
            record = lab.now(one)
            ended = [Outcome.INTERRUPTED] * record.interruptions + [Outcome.COMPLETED]
            case.equal(f"outcomes_of_{name}", lab.outcomes(one), ended)
            case.equal(f"interrupted_{name}", 1 <= record.interruptions <= RETRIES + 1, True)
            case.equal(f"charged_{name}", (record.attempts, record.crashes), (1, 0))
            case.equal(f"overlapping_{name}", overlapping(lab, one.id), [])
        lab.close(case)


def test_a_body_that_stops_the_loop_costs_its_slot_a_second_and_a_start(site: Site) -> None:
    capacity(site, "aspin", (), stalls=True)


@pytest.mark.slow
def test_a_blocking_call_on_the_loop_costs_its_slot_a_second_and_a_start(site: Site) -> None:
    capacity(site, "ablock", (600.0,), stalls=True)


@pytest.mark.slow
def test_a_body_that_holds_the_interpreter_costs_its_slot_a_second_and_a_start(site: Site) -> None:
    capacity(site, "grip", (600,), stalls=True)


@pytest.mark.slow
def test_so_does_one_that_holds_it_on_the_loop(site: Site) -> None:
    capacity(site, "agrip", (600,), stalls=True)


@pytest.mark.slow
def test_a_body_that_stops_nothing_else_costs_its_slot_a_second(site: Site) -> None:
    together(
        lambda: capacity(site, "nap", (600.0,), stalls=False),
        lambda: capacity(site, "deaf", (600.0,), stalls=False),
        lambda: capacity(site, "adeaf", (600.0,), stalls=False),
        lambda: capacity(site, "spin", (), stalls=False),
    )


@pytest.mark.slow
def test_what_runs_beside_a_body_that_stops_the_loop_is_only_interrupted(site: Site) -> None:
    innocent(site, "aspin", ())


@pytest.mark.slow
def test_what_runs_beside_a_body_that_holds_the_interpreter_is_only_interrupted(site: Site) -> None:
    innocent(site, "grip", (600,))
