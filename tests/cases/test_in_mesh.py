"""Cases of the mesh with real workers: D31, D32, D33, D35, D36. The rest of them are the simulator's."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import pytest

from fluxmesh.job import Outcome, Status
from tests.cases.audit import HELD as HELD_PLACE
from tests.cases.audit import READY, RUNNING, Move
from tests.cases.beside import beside
from tests.cases.harness import BEAT_S, LEASE_S, REAP_S, Lab, Site, wait_until
from tests.cases.report import FULL
from tests.cases.test_outages import let_pass
from tests.cases.workers import WorkerGroup
from tests.stealing.figures import Figures
from tests.stealing.stock import fill, held_by, is_empty, warm

LEASES: Final = 10
HELD: Final = 20
PAUSE_S: Final = 0.5
SPREAD_S: Final = 2.0
JOBS: Final = 64
JOB_S: Final = 0.2
SPREAD_MOST: Final = 1.5
FLEET: Final = 4
QUIET_S: Final = 3.0 if FULL else 1.5


# -- D35 -------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_d35_a_job_of_ten_leases_runs_once(lab: Lab) -> None:
    case = lab.case("D35", job_s=LEASES * LEASE_S, lease_s=LEASE_S, workers=2)
    for name in ("w1", "w2"):
        lab.worker(name, *lab.in_mesh(), concurrency=2)
    with lab.audited() as audit:
        long = lab.submit("nap", LEASES * LEASE_S, "long")
        lab.await_ended([long], LEASES * LEASE_S + 20)
        owners = {move.epoch for move in audit.moves() if move.place == RUNNING}
    case.equal("starts", len(lab.marks.starts(job=long.id)), 1)
    case.equal("owners", len(owners), 1)
    case.equal("outcomes", lab.outcomes(long), [Outcome.COMPLETED])
    lab.close(case)


# -- D36 -------------------------------------------------------------------------------------------------
def host_is_gone(site: Site, how: str) -> None:
    """Its processes are killed; or they say nothing any more, as those of a host that lost its power, and
    nothing proves it: only the lease tells."""
    with site.lab(how.replace(" ", "-")) as lab:
        case = lab.case("D36", host=how, lease_s=LEASE_S, reap_s=REAP_S, running=2, held=HELD)
        lab.worker("looks-on", "--queues", "other", *lab.in_mesh("--no-mesh-steal"), concurrency=1)
        host = lab.worker("host", *lab.in_mesh("--no-mesh-steal"), concurrency=2)
        warm(lab, 100)
        lab.queue.pause("default")  # what is claimed together is held beside what is started
        running, door = lab.submit_held(2, "running")
        held = lab.submit_many("brief", [(0.01, "work")] * HELD)
        lab.queue.resume("default")
        lab.await_starts(2, 10, note="running")
        wait_until(lambda: is_empty(lab), 10, "all are held")
        assert held_by(lab, host) == HELD
        with lab.audited() as audit:
            gone_at = time.time()
            os.killpg(host.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            ids = {job.id for job in (*running, *held)}

            def back() -> dict[str, float]:
                return {
                    move.id: move.at_us / 1e6 - gone_at
                    for move in reversed(audit.moves())
                    if move.id in ids and move.place == READY
                }

            wait_until(lambda: len(back()) == len(ids), LEASE_S + REAP_S + 10, "all are ready again")
            ready_after_s = back()
        case.at_most("running_ready_again_s", max(ready_after_s[job.id] for job in running), LEASE_S + REAP_S)
        case.at_most("held_ready_again_s", max(ready_after_s[job.id] for job in held), LEASE_S + REAP_S)
        host.kill()
        lab.worker("next", *lab.in_mesh(), concurrency=8)
        door.touch()
        lab.await_ended([*running, *held], 30)
        case.equal("crashes_of_running", [lab.now(job).crashes for job in running], [1, 1])
        case.equal("charged_to_held", sum(lab.now(job).crashes for job in held), 0)
        case.equal("starts_of_held", {len(lab.marks.starts(job=job.id)) for job in held}, {1})
        lab.close(case)


@beside
def test_d36_what_a_killed_host_ran_and_held_is_ready_again(site: Site) -> None:
    host_is_gone(site, "killed")


@beside
def test_d36_what_a_silent_host_ran_and_held_is_ready_again_when_its_lease_has_lapsed(site: Site) -> None:
    host_is_gone(site, "silent")


# -- D31, D33 --------------------------------------------------------------------------------------------
def hopped(moves: Sequence[Move]) -> Iterator[tuple[Move, Move]]:
    """Every change from one owner straight to another: the move, and the one before it."""
    last: dict[str, Move] = {}
    for move in moves:
        before = last.get(move.id)
        last[move.id] = move
        if before is not None and before.epoch and move.epoch and move.epoch != before.epoch:
            yield move, before


def owned(lab: Lab) -> dict[str, int]:
    """Jobs that each worker holds and runs."""
    return {row.worker_id: row.held + row.running for row in lab.queue.list_workers()}


def child_of(lab: Lab, group: WorkerGroup) -> int:
    [row] = lab.members(group)
    return row.pid


@beside
def test_d31_d33_a_pause_makes_nobody_idle_for_long_and_nobody_takes_nearly_all(site: Site) -> None:
    """All but one stand still for half a second, in which that one takes all there is; then they go on."""
    with site.lab() as lab:
        spread = lab.case("D31", workers=FLEET, jobs=JOBS, job_s=JOB_S, within_s=SPREAD_S)
        paused = lab.case("D33", workers=FLEET, pause_s=PAUSE_S)
        figures = Figures(lab)
        groups = [lab.worker(f"w{n}", *lab.in_mesh(), concurrency=1) for n in range(FLEET)]
        names = {group.worker_id for group in groups}
        wait_until(lambda: all(figures.sees(name) == names for name in names), 20, "all see all")
        warm(lab, 500 * FLEET)
        others = [child_of(lab, group) for group in groups[1:]]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        with lab.audited() as audit:
            try:
                jobs = lab.submit_many("brief", [(JOB_S, "work")] * JOBS)
                wait_until(lambda: is_empty(lab), 5, "one has all")
                let_pass(max(0.0, stopped_at + PAUSE_S - time.monotonic()))
            finally:
                for pid in others:
                    os.kill(pid, signal.SIGCONT)
            going_on_at = time.monotonic()
            had_all = held_by(lab, groups[0])
            lab.await_ended(jobs, 30)
            moves = audit.moves()
        marks = [mark for mark in lab.marks.starts(note="work") if mark.at >= going_on_at]
        first = {pid: min((m.at for m in marks if m.pid == pid), default=math.inf) for pid in others}
        paused.at_most("work_taken_after_s", max(first.values()) - going_on_at, 2.0)
        paused.close([])
        started = Counter(mark.pid for mark in marks if mark.at <= going_on_at + SPREAD_S)
        spread.at_least("held_by_one_before", had_all, JOBS // 2)
        spread.tell("started_by_each", sorted(started.values()))
        spread.at_most("spread", max(started.values()) / (started.total() / FLEET), SPREAD_MOST)
        hops = Counter(move.id for move, before in hopped(moves) if before.place == HELD_PLACE)
        spread.at_most("hops", max(hops.values(), default=0), 2)
        spread.equal("starts", {len(lab.marks.starts(job=job.id)) for job in jobs}, {1})
        spread.tell("jobs_stolen", figures.await_even(10)["jobs_stolen_in"])
        lab.close(spread)


# -- D32 -------------------------------------------------------------------------------------------------
@beside
def test_d32_a_worker_that_was_told_to_be_quiet_does_not_steal_until_it_may(site: Site) -> None:
    with site.lab() as lab:
        case = lab.case("D32", workers=2, quiet_s=QUIET_S)
        quiet = lab.worker("quiet", *lab.in_mesh(), concurrency=2)
        lab.command("quiet", "quiet")
        let_pass(2 * BEAT_S)  # its next beat tells it
        busy = lab.worker("busy", *lab.in_mesh(), concurrency=1)
        warm(lab)
        pids = {row.pid for row in lab.members(quiet)}
        jobs = fill(lab, 40, 0.1)
        assert held_by(lab, busy) > 20
        with lab.audited() as audit:
            let_pass(QUIET_S)
            taken = [move for move in audit.moves() if move.worker == "quiet"]
        case.equal("taken_while_quiet", len(taken), 0)
        case.equal("started_while_quiet", sum(mark.pid in pids for mark in lab.marks.starts()), 0)
        case.equal("owned_while_quiet", owned(lab)["quiet"], 0)
        lab.command("quiet", None)
        wait_until(
            lambda: any(mark.pid in pids for mark in lab.marks.starts(note="work")) or not owned(lab)["busy"],
            10,
            "it steals again",
        )
        case.equal("steals_again", any(mark.pid in pids for mark in lab.marks.starts(note="work")), True)
        lab.await_ended(jobs, 30)
        case.equal("statuses", {job.status for job in jobs}, {Status.COMPLETED})
        lab.close(case)
