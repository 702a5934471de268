"""A worker that is frozen for longer than its lease, and wakes up beside the one that has its job: C04."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Final

from fluxmesh.job import Status
from tests.cases.harness import LEASE_S, Lab, wait_until
from tests.cases.marks import Mark
from tests.cases.report import scaled
from tests.cases.test_outages import let_pass
from tests.cases.workers import WorkerGroup

FROZEN_S: Final = scaled(8)
JOB_S: Final = scaled(4)
KEY: Final = {"concurrency_key": "acct-7", "concurrency_limit": 1}
FOLLOWING: Final = 6


def freeze(group: WorkerGroup, number: signal.Signals) -> None:
    """The whole group, its supervisor included."""
    os.killpg(group.pid, number)


def overlaps(lab: Lab, jobs: list[str]) -> list[tuple[Mark, Mark]]:
    """Bodies of these jobs that ran at the same time."""
    ends = {(mark.job, mark.token): mark.at for job in jobs for mark in lab.marks.ends(job=job)}
    starts = sorted((mark for job in jobs for mark in lab.marks.starts(job=job)), key=lambda mark: mark.at)
    return [
        (before, after)
        for before, after in itertools.pairwise(starts)
        if ends[before.job, before.token] > after.at
    ]


def test_c04_a_frozen_worker_that_wakes_up_ends_nothing_that_is_anothers(lab: Lab) -> None:
    case = lab.case("C04", frozen_s=FROZEN_S, job_s=JOB_S, lease_s=LEASE_S, following=FOLLOWING)
    first, second = lab.launch("w1", concurrency=4), lab.launch("w2", concurrency=4)
    lab.await_workers(first, second)
    frozen_job = lab.submit("nap", JOB_S, "A", **KEY)
    [mark] = lab.await_starts(1, 10, note="A")
    if os.getpgid(mark.pid) == second.pid:
        first, second = second, first
    frozen_at = time.monotonic()
    freeze(first, signal.SIGSTOP)
    try:
        lab.await_starts(2, 20, note="A")
        again = lab.marks.starts(note="A")[1].at - frozen_at
        case.tell("started_elsewhere_after_s", round(again, 3))
        lab.await_ended([frozen_job], JOB_S + 20)
        ended = lab.now(frozen_job)
        let_pass(max(0.0, frozen_at + FROZEN_S - time.monotonic()))
        following = lab.submit_many("nap", [(JOB_S, f"follows {n}") for n in range(FOLLOWING)], **KEY)
        lab.await_starts(1, 10, note="follows 0")
    finally:
        freeze(first, signal.SIGCONT)
    wait_until(lambda: len(lab.marks.ends(note="A")) == 2, 10, "the old run returns")
    wait_until(lambda: lab.queue.counts().stale_settles, 10, "its end was refused")
    lab.await_ended(following, FOLLOWING * JOB_S + 30)
    case.equal("stale_ends", lab.queue.counts().stale_settles, 1)
    case.equal("statuses", {job.status for job in (frozen_job, *following)}, {Status.COMPLETED})
    case.equal("the_record_of_A_is_unchanged", lab.now(frozen_job) == ended, True)
    case.equal("crashes_of_A", ended.crashes, 1)
    case.equal("starts_of_the_following", {len(lab.marks.starts(job=job.id)) for job in following}, {1})
    case.equal("overlapping", overlaps(lab, [job.id for job in following]), [])
    case.equal("both_live", (first.running, second.running), (True, True))
    # A's own two bodies overlap: that of a frozen process cannot know that it is another's by now.
    found = [what for what in lab.disagreements() if frozen_job.id[-6:] not in what]
    case.close(found or lab.left_over())
