"""A timeout must give the slot back, whatever the body does about it: C16."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from fluxmesh.job import Job, Outcome, Status
from tests.cases.beside import beside
from tests.cases.harness import Lab, Site, together, wait_until
from tests.cases.report import scaled
from tests.cases.workers import APART

CONCURRENCY: Final = 2
TIMEOUT_S: Final = scaled(2)
HARD_GRACE_S: Final = scaled(2)
RETIRE_AFTER_S: Final = scaled(30)
FOR_EVER_S: Final = 600.0
NOTICED_S: Final = 1.0  # for storage to hear of it, on a busy machine
REPLACED_S: Final = scaled(40)
QUICK_DONE_S: Final = 12.0
RETRIES: Final = 2

STOPPABLE: Final[dict[str, tuple[Any, ...]]] = {"anap": (FOR_EVER_S,), "doze": (FOR_EVER_S,), "spin": ()}
STOPPED_APART: Final[dict[str, tuple[Any, ...]]] = {
    "nap_apart": (FOR_EVER_S,),
    "anap_apart": (FOR_EVER_S,),
    "spin_apart": (),
}
KILLED_APART: Final[dict[str, tuple[Any, ...]]] = {
    "deaf_apart": (FOR_EVER_S,),
    "blocking_apart": (FOR_EVER_S,),
}
UNSTOPPABLE: Final[dict[str, tuple[Any, ...]]] = {
    "nap": (FOR_EVER_S,),
    "deaf": (FOR_EVER_S,),
    "adeaf": (FOR_EVER_S,),
}


def lab_of(site: Site, name: str) -> Lab:
    return site.lab(name, hard_grace_s=HARD_GRACE_S, retire_after_s=RETIRE_AFTER_S, grace_s=scaled(2))


def noted(record: Job) -> bool:
    """Storage knows that a body timed out: the job is marked so while the body goes on, or charged."""
    return record.timed_out or record.attempts > 0


def flags_of(task: str) -> tuple[str, ...]:
    return APART if task in {**STOPPED_APART, **KILLED_APART} else ()


def begun_at(lab: Lab, record: Job, task: str) -> float:
    """The wall time from which its timeout counts. A body may wait for its process to start, and its timeout
    with it, though storage has the job as running."""
    if not flags_of(task):
        return record.started_at
    return lab.marks.starts(job=record.id)[0].at + time.time() - time.monotonic()


def four_and_six(site: Site, task: str, arguments: tuple[Any, ...], *, stops: bool) -> None:
    """Four that block, then six quick ones, on two slots."""
    with lab_of(site, task) as lab:
        case = lab.case("C16", body=task, timeout_s=TIMEOUT_S, max_retries=0, concurrency=CONCURRENCY)
        group = lab.worker("w1", *flags_of(task), concurrency=CONCURRENCY)
        options = {"timeout": TIMEOUT_S, "max_retries": 0}
        blocking = lab.submit_many(task, [(*arguments, f"blocking {n}") for n in range(4)], **options)
        quick = lab.submit_many("tick", [("quick",)] * 6)
        lab.await_starts(1, 10)
        wait_until(lambda: len(lab.marks.starts(note="quick")) == 6, 30, "the quick ones have run")
        first_at = min(mark.at for mark in lab.marks.starts())
        last_quick = max(mark.at for mark in lab.marks.ends(note="quick"))
        case.at_most("quick_done_after_s", last_quick - first_at, QUICK_DONE_S)

        lab.await_ended([*blocking, *quick], REPLACED_S + 20)
        ended = [lab.now(job) for job in blocking]
        times = [record.completed_at - begun_at(lab, record, task) for record in ended]
        bound = TIMEOUT_S + HARD_GRACE_S + NOTICED_S if stops else REPLACED_S
        case.at_most("terminal_after_s", max(times), bound)
        case.equal("reasons", {record.reason for record in ended}, {"timeout"})
        case.equal("charged", {(record.attempts, record.crashes) for record in ended}, {(1, 0)})
        case.equal("outcomes", {tuple(lab.outcomes(job)) for job in blocking}, {(Outcome.TIMEOUT,)})
        wait_until(lambda: lab.members(group), 20, "a worker is ready again")
        case.equal("capacity", [row.capacity for row in lab.members(group)], [CONCURRENCY])
        wait_until(lambda: [row.running for row in lab.members(group)] == [0], 10, "no slot is taken")
        after = lab.submit_many("nap", [(1.0, "after")] * CONCURRENCY)
        lab.await_ended(after, 10)
        starts = [mark.at for mark in lab.marks.starts(note="after")]
        case.at_most("both_slots_work_within_s", max(starts) - min(starts), 0.8)
        lab.close(case)


def shown_timed_out(site: Site, task: str, arguments: tuple[Any, ...], *, retries: int) -> None:
    """A body that cannot be stopped is shown as timed out, keeps its job, and is never joined by another."""
    with lab_of(site, task) as lab:
        case = lab.case("C16", body=task, timeout_s=TIMEOUT_S, max_retries=retries, concurrency=CONCURRENCY)
        lab.worker("w1", *flags_of(task), concurrency=CONCURRENCY)
        job = lab.submit(
            task,
            *arguments,
            "retried",
            timeout=TIMEOUT_S,
            max_retries=retries,
            backoff_base_seconds=0.1,
            jitter="none",
        )
        [mark] = lab.await_starts(1, 10)
        shown_at = wait_until(
            lambda: noted(lab.now(job)) and time.monotonic(), 20, "it is shown as timed out"
        )
        case.at_most("shown_after_s", shown_at - mark.at, TIMEOUT_S + HARD_GRACE_S + NOTICED_S)
        lab.await_ended([job], (retries + 1) * REPLACED_S + 20)
        case.equal("outcomes", lab.outcomes(job), [Outcome.TIMEOUT] * (retries + 1))
        case.equal("status", job.status, Status.DEAD_LETTER)
        case.equal("crashes", lab.now(job).crashes, 0)
        starts = lab.marks.starts(job=job.id)
        case.equal("processes_beside", [list(start.beside) for start in starts], [[]] * (retries + 1))
        lab.close(case)


def ends_late(site: Site) -> None:
    """A body that ends past its hard timeout ends nothing but itself: its process and the others go on."""
    with lab_of(site, "late") as lab:
        case = lab.case("C16", body="nap that ends late", timeout_s=TIMEOUT_S, max_retries=1)
        group = lab.worker("w1", concurrency=CONCURRENCY)
        [before] = lab.members(group)
        late_s = TIMEOUT_S + HARD_GRACE_S + 1.5
        options = {"timeout": TIMEOUT_S, "max_retries": 1, "backoff_base_seconds": 0.1, "jitter": "none"}
        late = lab.submit("nap", late_s, "late", **options)
        beside = lab.submit("anap", 2 * late_s, "beside", timeout=FOR_EVER_S)
        lab.await_ended([late, beside], 60)
        case.equal("outcomes", lab.outcomes(late), [Outcome.TIMEOUT] * 2)
        case.equal("outcomes_beside", lab.outcomes(beside), [Outcome.COMPLETED])
        case.equal("process_is_the_same", [row.pid for row in lab.members(group)], [before.pid])
        first, second = lab.marks.ends(note="late")[0], lab.marks.starts(note="late")[1]
        case.equal("second_body_waits_for_the_first", first.at < second.at, True)
        lab.close(case)


def each(bodies: dict[str, tuple[Any, ...]], run: Callable[[str, tuple[Any, ...]], None]) -> None:
    together(*(lambda task=task, args=args: run(task, args) for task, args in bodies.items()))


@beside
def test_c16_bodies_that_cannot_be_stopped_end_with_their_process(site: Site) -> None:
    each(UNSTOPPABLE, lambda task, args: four_and_six(site, task, args, stops=False))


@beside
def test_c16_with_retries_two_bodies_of_one_job_never_overlap(site: Site) -> None:
    bodies = {**UNSTOPPABLE, "doze": (FOR_EVER_S,)}
    each(bodies, lambda task, args: shown_timed_out(site, task, args, retries=RETRIES))


@beside
def test_c16_a_body_that_ends_late_ends_only_itself(site: Site) -> None:
    ends_late(site)


def test_c16_bodies_in_processes_are_timeouts_at_once(site: Site) -> None:
    each(STOPPED_APART, lambda task, args: four_and_six(site, task, args, stops=True))


def test_c16_processes_are_killed_with_bodies_that_do_not_stop(site: Site) -> None:
    each(KILLED_APART, lambda task, args: four_and_six(site, task, args, stops=True))


def test_c16_in_processes_two_bodies_of_one_job_never_overlap(site: Site) -> None:
    bodies = {**STOPPED_APART, **KILLED_APART}
    each(bodies, lambda task, args: shown_timed_out(site, task, args, retries=RETRIES))


def test_c16_bodies_that_can_be_stopped_are_timeouts_at_once(site: Site) -> None:
    each(STOPPABLE, lambda task, args: four_and_six(site, task, args, stops=True))
