"""Jobs that kill the process they run in: C15, and an innocent job beside two of them (P5)."""

from __future__ import annotations

import itertools
import time

import pytest

from fluxmesh.job import Outcome, Status
from tests.cases.harness import Lab, wait_until
from tests.cases.report import scaled
from tests.cases.workers import APART

SLOTS = 2
NORMAL = 40
NORMAL_S = 0.3
BASE_S = scaled(4)
REASONS = {
    "poison": "worker lost x3: killed by SIGKILL",
    "glutton": "worker lost x3: killed: over its memory limit of 200 MB",
}


@pytest.mark.parametrize("task", REASONS)
def test_c15_a_poison_pill_is_given_up_and_takes_nobody_along(lab: Lab, task: str) -> None:
    case = lab.case("C15", body=task, slots=SLOTS, normal=NORMAL, max_crashes=3, max_retries=10)
    groups = [lab.launch(name, *APART, concurrency=SLOTS) for name in ("w1", "w2")]
    lab.await_workers(*groups)
    before = {row.worker_id: row.pid for group in groups for row in lab.members(group)}
    normal = lab.submit_many("nap_apart", [(NORMAL_S, "normal")] * (NORMAL // 2))
    options = {"backoff_base_seconds": BASE_S, "jitter": "none", "max_retries": 10, "max_crashes": 3}
    pill = lab.submit(task, "pill", **options)
    normal += lab.submit_many("nap_apart", [(NORMAL_S, "normal")] * (NORMAL // 2))
    lab.await_ended([pill, *normal], 90)

    record = lab.now(pill)
    case.equal("status", record.status, Status.DEAD_LETTER)
    case.equal("reason", record.reason, REASONS[task])
    case.equal("charged", (record.attempts, record.crashes), (0, 3))
    case.equal("outcomes", lab.outcomes(pill), [Outcome.CRASHED] * 3)
    starts = lab.marks.starts(job=pill.id)
    case.equal("starts", len(starts), 3)
    first_s, second_s = [after.at - one.at for one, after in itertools.pairwise(starts)]
    case.equal("delay_grows", first_s < second_s, True)
    case.equal("second_delay_is_its_backoff", second_s >= BASE_S, True)
    case.equal("each_start_in_a_process_of_its_own", len({mark.pid for mark in starts}), 3)
    case.equal("processes_beside", [list(mark.beside) for mark in starts], [[]] * 3)
    records = [lab.now(job) for job in normal]
    case.equal("normal_ones", {(one.status, one.attempts, one.crashes) for one in records}, {_COMPLETED})
    case.equal("starts_of_each_normal_one", {len(lab.marks.starts(job=job.id)) for job in normal}, {1})

    members = [row for group in groups for row in lab.members(group)]
    case.equal("workers_are_the_same", {row.worker_id: row.pid for row in members}, before)
    case.equal("capacity", [row.capacity for row in members], [SLOTS] * 2)
    door = lab.folder / "slots"
    last = lab.submit_many("hold_apart", [(str(door), "full")] * (2 * SLOTS))
    lab.await_starts(2 * SLOTS, 20, note="full")
    case.equal("all_slots_work_at_once", len(lab.marks.ends(note="full")), 0)
    door.touch()
    lab.await_ended(last, 20)
    lab.close(case)


_COMPLETED = (Status.COMPLETED, 1, 0)


def test_p5_an_innocent_job_beside_two_killers_completes(lab: Lab) -> None:
    """None of the three is isolated: they share the worker's process, until each has been in two crashes."""
    case = lab.case("P5", killers=2, max_crashes=3)
    door = lab.folder / "innocent-may-end"
    options = {"backoff_base_seconds": 0.2, "jitter": "none", "max_retries": 0}
    innocent = lab.submit("until", str(door), "innocent", **options)
    killers = lab.submit_many("killer", [(scaled(8), 3, "killer")] * 2, **options)
    lab.worker("w1", *APART, concurrency=3)
    lab.await_ended(killers, 90)
    starts = lab.await_starts(3, 30, note="innocent")
    begun_at = time.monotonic()
    door.touch()
    lab.await_ended([innocent], 20)
    case.at_most("innocent_done_after_s", time.monotonic() - begun_at, 3.0)
    record = lab.now(innocent)
    case.equal("innocent", (record.status, record.attempts, record.crashes), (Status.COMPLETED, 1, 2))
    case.equal("outcomes", lab.outcomes(innocent), [Outcome.CRASHED] * 2 + [Outcome.COMPLETED])
    for killer in killers:
        record = lab.now(killer)
        told = (record.status, record.crashes, record.reason)
        case.equal(f"killer_{killers.index(killer)}", told, (Status.DEAD_LETTER, 3, REASONS["poison"]))
    last = [lab.marks.starts(job=job.id)[-1].pid for job in (innocent, *killers)]
    shared = {mark.pid for mark in lab.marks.starts() if mark.job != innocent.id}
    case.equal("the_last_starts_are_alone", (len(set(last)), starts[-1].pid in shared), (3, False))
    wait_until(lambda: lab.queue.counts().by_status[Status.COMPLETED] == 1, 10, "the counters know")
    lab.close(case)
