"""Storage out of reach for long, and clocks that are stepped: nobody dies of it, no body runs twice."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from fluxmesh.errors import StorageUnreachable
from fluxmesh.handle import JobHandle
from fluxmesh.job import Outcome
from tests.cases.beside import beside
from tests.cases.harness import Lab, Site, wait_until
from tests.cases.report import FULL, Case
from tests.cases.workers import WorkerGroup

LEASE_S = 6.0 if FULL else 3.0  # the default lease; the shortest one in the quick form
BEAT_S = LEASE_S / 3
REAPED_WITHIN_S = 8.0
LONG_JOBS = 20


def let_pass(seconds: float) -> None:
    """Time is what the scenario is about here: nothing can tell when enough of it has passed."""
    threading.Event().wait(seconds)


class Busy(NamedTuple):
    """Jobs that two workers run, and the file that lets them end."""

    jobs: list[JobHandle[str]]
    door: Path


def two_busy_workers(lab: Lab) -> tuple[WorkerGroup, WorkerGroup, Busy]:
    first, second = lab.launch("w1", concurrency=10), lab.launch("w2", concurrency=12)
    lab.await_workers(first, second)
    busy = Busy(*lab.submit_held(LONG_JOBS, "long"))
    lab.await_starts(LONG_JOBS, 20)
    return first, second, busy


def kill_and_await_reaping(
    lab: Lab, case: Case, victim: WorkerGroup, survivor: WorkerGroup, busy: Busy
) -> None:
    """Kill one worker; its jobs start on the other within the bound, and all of them end as they should."""
    jobs = busy.jobs
    case.equal("starts_of_each_body_until_the_kill", _starts(lab, jobs), {1})
    third = lab.standby("w3", concurrency=LONG_JOBS)
    mine = [row.pid for row in lab.members(victim)]
    killed = [job for job in jobs if lab.marks.starts(job=job.id)[0].pid in mine]
    assert killed, "the victim ran some of the jobs"
    killed_at = time.monotonic()
    victim.kill()
    lab.let_in(third)
    wait_until(lambda: _starts(lab, killed) == {2}, 30, "the killed jobs have started again")
    again = [lab.marks.starts(job=job.id)[1].at - killed_at for job in killed]
    case.at_most("last_restart_after_kill_s", max(again), REAPED_WITHIN_S)
    busy.door.touch()
    lab.await_ended(jobs, 30)
    others = [job for job in jobs if job not in killed]
    case.equal("starts_of_the_others", _starts(lab, others), {1})
    case.equal("outcomes_of_the_others", {tuple(lab.outcomes(job)) for job in others}, {(Outcome.COMPLETED,)})
    case.equal("survivor_lives", survivor.running, True)
    lab.close(case)


def _starts(lab: Lab, jobs: list[JobHandle[str]]) -> set[int]:
    return {len(lab.marks.starts(job=job.id)) for job in jobs}


@pytest.mark.only("sqlite")  # a frozen Redis is in test_redis_cases.py: it has to be a server of its own
@beside
def test_a_database_locked_for_three_leases_makes_no_job_run_twice(site: Site) -> None:
    with site.lab(lease_s=LEASE_S, beat_s=BEAT_S, proof_of_death=False) as lab:
        case = lab.case("outage", locked_leases=3, lease_s=LEASE_S, jobs=LONG_JOBS, proof_of_death=False)
        first, second, busy = two_busy_workers(lab)
        refused: list[Exception] = []

        def submit_meanwhile() -> None:
            try:
                lab.submit("tick", "meanwhile")
            except StorageUnreachable as error:
                refused.append(error)

        with lab.door.out_of_reach():
            caller = threading.Thread(target=submit_meanwhile)
            caller.start()
            let_pass(3 * LEASE_S)
            caller.join(30)
        case.equal("a_producer_is_told", ["locked" in str(error) for error in refused], [True])
        case.equal("both_live", (first.running, second.running), (True, True))
        let_pass(LEASE_S)
        kill_and_await_reaping(lab, case, first, second, busy)


def stepped(site: Site, step_s: float) -> None:
    settings = {"lease_s": LEASE_S, "beat_s": BEAT_S, "proof_of_death": False}
    with site.lab(own_clock=True, **settings) as lab:
        case = lab.case("outage", clock_step_s=step_s, lease_s=LEASE_S, jobs=LONG_JOBS, proof_of_death=False)
        first, second, busy = two_busy_workers(lab)
        lab.step_clock(step_s)
        let_pass(LEASE_S)
        case.equal("both_live", (first.running, second.running), (True, True))
        kill_and_await_reaping(lab, case, first, second, busy)


@beside
def test_a_clock_stepped_ahead_by_ten_minutes_makes_no_job_run_twice(site: Site) -> None:
    stepped(site, 600.0)


@beside
def test_a_clock_set_back_by_ten_minutes_makes_no_job_run_twice(site: Site) -> None:
    stepped(site, -600.0)


@beside
def test_a_clock_set_back_just_after_a_death_does_not_hide_it(site: Site) -> None:
    """The dead worker's last beat lies ten minutes ahead then, and is taken for one of now."""
    settings = {"lease_s": LEASE_S, "beat_s": BEAT_S, "proof_of_death": False}
    with site.lab(own_clock=True, **settings) as lab:
        case = lab.case(
            "outage",
            clock_step_s=-600.0,
            when="after a death",
            lease_s=LEASE_S,
            proof_of_death=False,
        )
        first = lab.worker("w1")
        jobs, door = lab.submit_held(3, "held")
        lab.await_starts(3, 10)
        lab.worker("w2")
        first.kill()
        lab.step_clock(-600.0)
        killed_at = time.monotonic()
        lab.await_starts(6, 30)
        again = [lab.marks.starts(job=job.id)[1].at - killed_at for job in jobs]
        case.at_most("last_restart_after_kill_s", max(again), REAPED_WITHIN_S)
        door.touch()
        lab.await_ended(jobs, 20)
        # What stays of a worker whose last beat lies ahead stays until then: no question of this case.
        case.close(lab.disagreements())
