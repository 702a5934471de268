"""Cancelling in awkward moments: C18, on the default lease, so that what a beat alone tells shows as late.

Part (e), a body in a process of its own, stands with the isolated executor.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Final

from fluxmesh.handle import JobHandle
from fluxmesh.job import Outcome, Status
from fluxmesh.storage.values import Cancelled
from tests.cases.beside import beside
from tests.cases.harness import Lab, Site, wait_until
from tests.cases.report import Case
from tests.cases.test_shutdown import status_of

LEASE_S: Final = 6.0
STOPS_WITHIN_S: Final = 2.0
HEARD_WITHIN_S: Final = 0.5  # a median: a beat comes every 2 s, so without a push it would be 1 s
ROUNDS: Final = 7
DELAY_S: Final = 1.5
CANCELLED: Final = (Status.CANCELLED, [Outcome.CANCELLED])


def lab_of(site: Site, name: str = "lab") -> Lab:
    return site.lab(name, lease_s=LEASE_S, beat_s=LEASE_S / 3)


def stopped(lab: Lab, case: Case, name: str, task: str, *args: object) -> None:
    """A running job, cancelled; several times, since each one may meet a beat that was due anyway."""
    took = []
    jobs: list[JobHandle[str]] = []
    for number in range(ROUNDS):
        note = f"{name} {number}"
        jobs.append(lab.submit(task, *args, note))
        lab.await_starts(1, 10, note=note)
        asked_at = time.monotonic()
        assert jobs[-1].cancel() is Cancelled.REQUESTED
        lab.await_ended(jobs[-1:], 20)
        took.append(time.monotonic() - asked_at)
    case.at_most(f"{name}_cancelled_after_s", max(took), STOPS_WITHIN_S)
    case.at_most(f"{name}_median_s", statistics.median(took), HEARD_WITHIN_S)
    case.equal(f"{name}_status", {job.status for job in jobs}, {Status.CANCELLED})
    case.equal(f"{name}_outcomes", {tuple(lab.outcomes(job)) for job in jobs}, {(Outcome.CANCELLED,)})


@beside
def test_c18_a_job_may_be_cancelled_in_every_state(site: Site) -> None:
    with lab_of(site) as lab:
        case = lab.case("C18", variants="a b c d g", lease_s=LEASE_S)
        queued = lab.submit("tick", "queued")
        delayed = lab.submit("tick", "delayed", delay=DELAY_S)
        case.equal("queued", (queued.cancel(), queued.status), (Cancelled.CANCELLED, Status.CANCELLED))
        case.equal("delayed", (delayed.cancel(), delayed.status), (Cancelled.CANCELLED, Status.CANCELLED))
        due_at = time.monotonic() + DELAY_S
        lab.worker("w1", concurrency=4)
        for name, task in (("async", "anap"), ("polling thread", "watch"), ("thread", "doze")):
            stopped(lab, case, name, task, 600.0)
        stopped(lab, case, "spinning thread", "spin")

        finished = lab.submit("tick", "finished")
        lab.await_ended([finished], 10)
        before = lab.now(finished)
        answers = [finished.cancel(), finished.cancel()]
        case.equal("finished_answers", answers, [Cancelled.ENDED] * 2)
        case.equal("finished_is_unchanged", lab.now(finished) == before, True)

        # The worker goes on after all of it, past the instant when the delayed one would have been due.
        wait_until(lambda: time.monotonic() > due_at + 0.5, 10, "the delayed one would be due")
        more = lab.submit_many("tick", [("more",)] * 20)
        lab.await_ended(more, 10)
        case.equal("completed", {job.status for job in more}, {Status.COMPLETED})
        case.equal("never_started", [len(lab.marks.starts(job=job.id)) for job in (queued, delayed)], [0, 0])
        lab.close(case)


@beside
def test_c18_a_body_that_returns_all_the_same_has_completed(site: Site) -> None:
    """A body that swallows the interruption, or was about to return, wins; one that waits in a call is
    cancelled when the call is over."""
    with lab_of(site) as lab:
        case = lab.case("C18", variants="bodies that do not stop", lease_s=LEASE_S)
        lab.worker("w1", concurrency=4)
        swallowed = [lab.submit(task, 1.5, task) for task in ("deaf", "adeaf")]
        blocked = lab.submit("nap", 2.5, "blocked")
        lab.await_starts(3, 10)
        for job in (*swallowed, blocked):
            case.equal(f"answer_{lab.now(job).task}", job.cancel(), Cancelled.REQUESTED)
        case.equal("flagged", lab.now(blocked).cancel_requested, True)
        lab.await_ended([*swallowed, blocked], 20)
        case.equal("swallowed", [job.status for job in swallowed], [Status.COMPLETED] * 2)
        case.equal(
            "blocked", (blocked.status, lab.outcomes(blocked)), (Status.CANCELLED, [Outcome.CANCELLED])
        )
        [start], [end] = lab.marks.starts(job=blocked.id), lab.marks.ends(job=blocked.id)
        case.equal("the_call_was_not_cut_short", end.at - start.at >= 2.4, True)
        lab.close(case)


@beside
def test_c18_a_draining_worker_honours_a_cancel(site: Site) -> None:
    """Of a coroutine, and of a body on a thread in a call that ends within the grace."""
    with lab_of(site) as lab:
        case = lab.case("C18", variants="f", lease_s=LEASE_S, grace_s=6.0)
        group = lab.worker("w1", concurrency=4, grace_s=6.0)
        running = lab.submit("anap", 600.0, "async")
        blocked = lab.submit("nap", 3.0, "blocked")
        lab.await_starts(2, 10)
        group.tell()
        wait_until(lambda: status_of(lab, "w1") == "draining", 5, "w1 drains")
        asked_at = time.monotonic()
        case.equal("answers", [running.cancel(), blocked.cancel()], [Cancelled.REQUESTED] * 2)
        lab.await_ended([running], 20)
        case.at_most("async_cancelled_after_s", time.monotonic() - asked_at, STOPS_WITHIN_S)
        case.equal("exit_code", group.wait(20), 0)
        outcomes = [lab.outcomes(job) for job in (running, blocked)]
        case.equal("outcomes", outcomes, [[Outcome.CANCELLED]] * 2)
        case.equal("statuses", [running.status, blocked.status], [Status.CANCELLED] * 2)
        lab.close(case)


@beside
def test_c18_a_worker_that_is_offline_honours_a_cancel_when_it_is_back_or_reaped(site: Site) -> None:
    with lab_of(site) as lab:
        case = lab.case("C18", variants="offline: frozen, killed", lease_s=LEASE_S)
        frozen = lab.worker("frozen", concurrency=1)
        thawed_job = lab.submit("anap", 600.0, "thawed")
        lab.await_starts(1, 10, note="thawed")
        os.killpg(frozen.pid, signal.SIGSTOP)
        try:
            case.equal("answer_of_the_frozen", thawed_job.cancel(), Cancelled.REQUESTED)
            case.equal("still_running", thawed_job.status, Status.RUNNING)
        finally:
            os.killpg(frozen.pid, signal.SIGCONT)
        thawed_at = time.monotonic()
        lab.await_ended([thawed_job], 20)
        case.at_most("cancelled_after_thaw_s", time.monotonic() - thawed_at, STOPS_WITHIN_S)
        case.equal("of_the_thawed", (thawed_job.status, lab.outcomes(thawed_job)), CANCELLED)

        killed = lab.worker("killed", concurrency=2)
        frozen.kill()
        reaped = lab.submit("anap", 600.0, "reaped")
        lab.await_starts(1, 10, note="reaped")
        lab.worker("keeper", "--queues", "other")  # somebody looks on, so that the lease may lapse
        killed.kill()
        killed_at = time.monotonic()
        case.equal("answer_of_the_killed", reaped.cancel(), Cancelled.REQUESTED)
        lab.await_ended([reaped], 30)
        case.at_most("cancelled_after_kill_s", time.monotonic() - killed_at, 8.0)
        case.equal("of_the_reaped", reaped.status, Status.CANCELLED)
        case.equal("starts", [len(lab.marks.starts(job=job.id)) for job in (thawed_job, reaped)], [1, 1])
        lab.close(case)
