"""Many worker processes on one file share its jobs, and never one job."""

from __future__ import annotations

from collections import Counter

from fluxmesh.job import Status
from tests.cases.harness import START_S, Lab, wait_until

PROCESSES = 8
JOBS = 2_000


def test_eight_processes_never_share_a_job(lab: Lab) -> None:
    case = lab.case("crowd", processes=PROCESSES, jobs=JOBS, concurrency=4)
    group = lab.launch("w", "--processes", str(PROCESSES), concurrency=4)
    lab.await_workers(group, processes=PROCESSES)
    lab.submit_many("tick", [(f"{number}",) for number in range(JOBS)])
    wait_until(
        lambda: lab.queue.counts().by_status.get(Status.COMPLETED) == JOBS, START_S, "all have completed"
    )
    starts = Counter(mark.job for mark in lab.marks.starts())
    case.equal("jobs_started", len(starts), JOBS)
    case.equal("starts_of_each", set(starts.values()), {1})
    case.equal("processes_that_took_part", len({mark.pid for mark in lab.marks.starts()}), PROCESSES)
    lab.close(case)
