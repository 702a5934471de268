"""SIGTERM during a deploy: C17. Only a worker in a mesh holds jobs that it has not started."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest

from fluxmesh.handle import JobHandle
from fluxmesh.job import Outcome, Status
from fluxmesh.storage.values import Cancelled
from fluxmesh.worker.signals import TELLING_GAP_S
from tests.cases.beside import beside
from tests.cases.harness import GRACE_S, Lab, Site, wait_until
from tests.cases.marks import lives
from tests.cases.report import Case
from tests.cases.workers import APART, WorkerGroup

BUFFERED = 2
STOPPABLE, UNSTOPPABLE = "until", "stick"  # an async body, and one blocking call on a thread


class Deploy:
    """W1 runs a long job and a short one that just started; then W2 is up, idle. In a mesh W1 has no slot
    besides, and holds two more; W2 is busy until `free_the_second`, or it would have taken them by then."""

    def __init__(self, lab: Lab, long_task: str, *, mesh: bool = False) -> None:
        self.lab = lab
        self.door = lab.folder / "short-may-end"
        self.long_door = lab.folder / "long-may-end"
        if long_task == UNSTOPPABLE:
            os.mkfifo(self.long_door)
        self.first = lab.worker("w1", *(lab.in_mesh() if mesh else ()), concurrency=2 if mesh else 3)
        # What is claimed together is held beside what is started.
        lab.queue.pause("default")
        self.long = lab.submit(long_task, str(self.long_door), "long", max_retries=0)
        self.short = lab.submit("until", str(self.door), "short", max_retries=0)
        self.buffered: Sequence[JobHandle[str]] = ()
        self.filling: Sequence[JobHandle[str]] = ()
        if mesh:
            self.buffered = lab.submit_many("tick", [("buffered",)] * BUFFERED, max_retries=0)
        lab.queue.resume("default")
        lab.await_starts(1, 10, note="long")
        lab.await_starts(1, 10, note="short")
        if mesh:
            wait_until(lambda: held_by(lab, "w1") == BUFFERED, 5, "w1 holds two")
            self.filling, self.filling_door = lab.submit_held(4, "filling", queue="filling")
        queues = ("--queues", "default,filling") if mesh else ()
        self.second = lab.worker("w2", *queues, *(lab.in_mesh() if mesh else ()), concurrency=4)
        if mesh:
            lab.await_starts(4, 10, note="filling")

    def free_the_second(self) -> None:
        if self.filling:
            self.filling_door.touch()

    def check_the_buffered(self, case: Case, told_at: float) -> None:
        """They start elsewhere, soon and once."""
        self.lab.await_ended([*self.buffered, *self.filling], 20)
        starts = self.lab.marks.starts(note="buffered")
        case.at_most("buffered_start_after_signal_s", max(mark.at for mark in starts) - told_at, 1.0)
        case.equal("buffered_started_elsewhere", self.started_here("buffered", self.second), BUFFERED)
        case.equal("starts_of_the_buffered", len(starts), BUFFERED)

    def end_the_long_one(self) -> None:
        if self.long_door.is_fifo():
            os.close(os.open(self.long_door, os.O_WRONLY | os.O_NONBLOCK))
        else:
            self.long_door.touch()

    def submit_more(self) -> list[JobHandle[str]]:
        return self.lab.submit_many("tick", [("after the signal",)] * 8, max_retries=0)

    def started_here(self, note: str, group: WorkerGroup) -> int:
        pids = {row.pid for row in self.lab.queue.list_workers() if row.worker_id == group.worker_id}
        return sum(mark.pid in pids for mark in self.lab.marks.starts(note=note))

    def check_the_long_one(self, case: Case, exited_at: float) -> None:
        """Started anew elsewhere, with nothing charged but an interruption."""
        starts = self.lab.await_starts(2, 10, note="long")
        case.at_most("long_restart_after_exit_s", starts[1].at - exited_at, 2.0)
        case.equal("attempt_numbers_of_the_long_one", [mark.attempt for mark in starts], [1, 1])
        self.end_the_long_one()
        self.lab.await_ended([self.long], 20)
        case.equal(
            "outcomes_of_the_long_one",
            self.lab.outcomes(self.long),
            [Outcome.INTERRUPTED, Outcome.COMPLETED],
        )
        record = self.lab.now(self.long)
        case.equal("charged", (record.attempts, record.interruptions, record.crashes), (1, 1, 0))


def drained(site: Site, long_task: str, *, mesh: bool = False) -> None:
    with site.lab() as lab:
        case = lab.case("C17", grace_s=GRACE_S, long=long_task, signals=1, mesh="yes" if mesh else "no")
        deploy = Deploy(lab, long_task, mesh=mesh)
        told_at = time.monotonic()
        deploy.first.tell()
        deploy.free_the_second()
        wait_until(lambda: status_of(lab, "w1") == "draining", 5, "w1 drains")
        after = deploy.submit_more()
        submitted_at = time.monotonic()
        deploy.door.touch()
        code = deploy.first.wait(30)
        exited_at = time.monotonic()
        case.at_most("exit_after_signal_s", exited_at - told_at, GRACE_S + 2)
        case.equal("exit_code", code, 0)
        lab.await_ended([deploy.short, *after], 20)
        case.equal("outcomes_of_the_short_one", lab.outcomes(deploy.short), [Outcome.COMPLETED])
        if mesh:
            deploy.check_the_buffered(case, told_at)
        else:
            case.equal("claims_given_back", deploy.first.log.read_text("utf-8").count("jobs released"), 0)
        case.equal("claims_after_the_signal", deploy.started_here("after the signal", deploy.first), 0)
        last = max(mark.at for mark in lab.marks.starts(note="after the signal"))
        case.at_most("others_start_elsewhere_within_s", last - submitted_at, 1.0)
        deploy.check_the_long_one(case, exited_at)
        case.equal("processes_left", deploy.first.kill(), {})
        lab.close(case)


def hurried(site: Site, long_task: str, *, mesh: bool = False) -> None:
    with site.lab() as lab:
        case = lab.case("C17", grace_s=GRACE_S, long=long_task, signals=2, mesh="yes" if mesh else "no")
        deploy = Deploy(lab, long_task, mesh=mesh)
        deploy.first.tell()
        deploy.free_the_second()
        first_told_at = time.monotonic()
        wait_until(lambda: status_of(lab, "w1") == "draining", 5, "w1 drains")
        # Signals of one moment are one telling.
        another_moment = first_told_at + 2 * TELLING_GAP_S
        wait_until(lambda: time.monotonic() >= another_moment, 2, "another moment")
        told_at = time.monotonic()
        deploy.first.tell()
        code = deploy.first.wait(30)
        exited_at = time.monotonic()
        case.at_most("exit_after_second_signal_s", exited_at - told_at, 1.0)
        case.equal("exit_code", code, 1)
        deploy.door.touch()
        deploy.check_the_long_one(case, exited_at)
        lab.await_ended([deploy.short], 20)
        case.equal(
            "outcomes_of_the_short_one",
            lab.outcomes(deploy.short),
            [Outcome.INTERRUPTED, Outcome.COMPLETED],
        )
        if mesh:
            deploy.check_the_buffered(case, first_told_at)
        case.equal("processes_left", deploy.first.kill(), {})
        lab.close(case)


def held_by(lab: Lab, worker_id: str) -> int:
    return sum(row.held for row in lab.queue.list_workers() if row.worker_id == worker_id)


def status_of(lab: Lab, worker_id: str) -> str | None:
    return next((row.status for row in lab.queue.list_workers() if row.worker_id == worker_id), None)


@beside
def test_c17_a_worker_that_is_told_to_stop_drains(site: Site) -> None:
    drained(site, STOPPABLE)


@beside
def test_c17_a_body_that_cannot_be_stopped_is_handed_back_by_the_end_of_its_process(site: Site) -> None:
    drained(site, UNSTOPPABLE)


@beside
def test_c17_what_a_worker_holds_starts_elsewhere_as_it_drains(site: Site) -> None:
    drained(site, STOPPABLE, mesh=True)


@beside
def test_c17_what_a_worker_holds_starts_elsewhere_though_it_cannot_stop_its_body(site: Site) -> None:
    drained(site, UNSTOPPABLE, mesh=True)


# -- C18 -------------------------------------------------------------------------------------------------
STOPS_WITHIN_S = 2.0
HARD_GRACE_S = 1.0


@beside
def test_c18_a_process_that_ignores_sigterm_is_killed(site: Site) -> None:
    with site.lab(hard_grace_s=HARD_GRACE_S) as lab:
        case = lab.case("C18", variants="e", hard_grace_s=HARD_GRACE_S)
        group = lab.worker("w1", *APART, concurrency=2)
        [before] = lab.members(group)
        running = lab.submit("ignoring_apart", 600.0, "deaf")
        [start] = lab.await_starts(1, 20, note="deaf")
        asked_at = time.monotonic()
        case.equal("answer", running.cancel(), Cancelled.REQUESTED)
        lab.await_ended([running], 20)
        case.at_most("cancelled_after_s", time.monotonic() - asked_at, HARD_GRACE_S + STOPS_WITHIN_S)
        case.equal("status", running.status, Status.CANCELLED)
        case.equal("outcomes", lab.outcomes(running), [Outcome.CANCELLED])
        case.equal("its_process_lives", lives(start.pid), False)
        more = lab.submit_many("tick_apart", [("more",)] * 20)
        lab.await_ended(more, 20)
        case.equal("worker_is_the_same", [row.pid for row in lab.members(group)], [before.pid])
        lab.close(case)


def test_c17_a_second_signal_ends_it_within_a_second(site: Site) -> None:
    hurried(site, STOPPABLE)


@pytest.mark.slow
def test_c17_a_second_signal_strands_nothing_that_a_worker_held(site: Site) -> None:
    hurried(site, STOPPABLE, mesh=True)


def test_c17_a_second_signal_ends_a_body_that_cannot_be_stopped(site: Site) -> None:
    hurried(site, UNSTOPPABLE)
