"""Jobs that wait: behind long ones, behind urgent ones, for their time. C02, C12, C13, C14."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest

from fluxmesh.handle import JobHandle
from fluxmesh.job import Outcome, Status
from tests.cases.harness import LEASE_S, Lab, Site, together, wait_until
from tests.cases.report import FULL, scaled
from tests.cases.starts import stays
from tests.cases.workers import WorkerGroup


@pytest.mark.slow
def test_c02_a_healthy_job_far_longer_than_the_lease_runs_once(lab: Lab) -> None:
    case = lab.case("C02", job_s=5 * LEASE_S, lease_s=LEASE_S)
    first, second = lab.launch("w1"), lab.launch("w2")
    lab.await_workers(first, second)
    options = {"concurrency_key": "acct-7", "concurrency_limit": 1}
    long = lab.submit("nap", 5 * LEASE_S, "long", **options)
    lab.await_starts(1, 10, note="long")
    behind = lab.submit("nap", 0.1, "behind", **options)
    submitted_at = time.monotonic()
    lab.await_ended([long, behind], 60)
    case.equal("starts", [len(lab.marks.starts(job=job.id)) for job in (long, behind)], [1, 1])
    waited_s = lab.marks.starts(note="behind")[0].at - submitted_at
    case.equal("waited_for_the_key", waited_s > 4 * LEASE_S, True)
    case.at_most("start_after_the_key_was_free_s", _gap(lab, "long", "behind"), 1.0)
    case.equal("recoveries_logged", _logged(first, "jobs reaped") + _logged(second, "jobs reaped"), 0)
    lab.close(case)


def _gap(lab: Lab, before: str, after: str) -> float:
    return lab.marks.starts(note=after)[0].at - lab.marks.ends(note=before)[0].at


def _logged(group: WorkerGroup, event: str) -> int:
    return group.log.read_text("utf-8").count(event)


# -- C12 -------------------------------------------------------------------------------------------------
DELAYED = 50_000 if FULL else 5_000
DELAYED_S = 3_600.0
CANCELLED = 10
JUMPED = 50
IMMEDIATE = 100
ARGUMENT = "x" * 200


def worker_rss(lab: Lab, group: WorkerGroup) -> int:
    """Bytes that the process of the worker's bodies has in memory."""
    [member] = lab.members(group)
    fields = Path(f"/proc/{member.pid}/status").read_text().splitlines()
    [line] = [field for field in fields if field.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def test_c12_many_delayed_jobs_cost_a_worker_nothing(lab: Lab) -> None:
    delayed = DELAYED
    case = lab.case("C12", delayed=delayed, immediate=IMMEDIATE)
    group = lab.worker("w1", concurrency=8)
    warm = lab.submit_many("tick", [("warm",)] * 20)
    lab.await_ended(warm, 20)
    rss_without = worker_rss(lab, group)
    waiting = lab.submit_many("tick", [(ARGUMENT,)] * delayed, delay=DELAYED_S)
    case.equal("scheduled", lab.queue.counts().by_status[Status.SCHEDULED], delayed)

    delays = sorted(start_delay(lab, number) for number in range(IMMEDIATE))
    case.at_most("immediate_p95_start_delay_ms", delays[round(0.95 * IMMEDIATE) - 1] * 1_000, 200)
    case.equal("scheduled_still", lab.queue.counts().by_status[Status.SCHEDULED], delayed)
    case.at_most("rss_grown_mb", (worker_rss(lab, group) - rss_without) / 1e6, 30)

    group.kill()
    second = lab.worker("w2", concurrency=8)
    lab.await_ended([lab.submit("tick", "warm")], 10)
    case.at_most("rss_grown_of_a_new_one_mb", (worker_rss(lab, second) - rss_without) / 1e6, 30)
    cancelled = [handle.id for handle in waiting[:CANCELLED]]
    lab.queue.cancel(cancelled)
    case.equal("scheduled_after_cancel", lab.queue.counts().by_status[Status.SCHEDULED], delayed - CANCELLED)
    jumped = waiting[-JUMPED:]
    due_at = schedule_in(lab, jumped, 2.0)
    # The rows were changed behind the storage's back, so nobody was rung: the next exchange finds out.
    lab.await_ended([lab.submit("tick", "look")], 10)
    lab.await_ended(jumped, 20)
    starts = [lab.marks.starts(job=job.id)[0].at for job in jumped]
    case.equal("none_early", min(starts) >= due_at, True)
    case.at_most("all_late_by_s", max(starts) - due_at, 1.0)
    case.equal("cancelled_starts", sum(len(lab.marks.starts(job=job_id)) for job_id in cancelled), 0)
    left = delayed - CANCELLED - JUMPED
    case.equal("scheduled_at_the_end", lab.queue.counts().by_status[Status.SCHEDULED], left)
    case.equal("worker_lives", second.running, True)
    done = lab.queue.counts().by_status[Status.COMPLETED]
    case.equal("completed", done, JUMPED + IMMEDIATE + len(warm) + 2)
    case.equal("stored", sum(lab.door.places().values()), len(lab.ids))
    # Every story of the small run; of the large one the counters against the storage.
    case.close(lab.miscounted() if FULL else lab.disagreements())


def start_delay(lab: Lab, number: int) -> float:
    note = f"now {number}"
    submitted_at = time.monotonic()
    lab.submit("tick", note)
    return lab.await_starts(1, 10, note=note)[0].at - submitted_at


def schedule_in(lab: Lab, jobs: list[JobHandle[str]], seconds: float) -> float:
    """Make delayed jobs due in so many seconds; the instant, by the marks' clock."""
    at = time.monotonic() + seconds
    lab.door.make_due([job.id for job in jobs], seconds)
    return at


# -- C13 -------------------------------------------------------------------------------------------------
HELD_MOST_S: Final = 0.1
HELD_IN_MESH_S: Final = 0.5


def short_beside_long(site: Site, fleet: str) -> None:
    with site.lab(fleet.replace(" ", "-")) as lab:
        case = lab.case("C13", fleet=fleet, concurrency=1, workers=2, long_s=scaled(20), short=6)
        lab.worker("busy", *(lab.in_mesh() if fleet in ("mesh", "busy in mesh") else ()), concurrency=1)
        meshed = lab.in_mesh() if fleet in ("mesh", "free in mesh") else ()
        free = lab.standby("free", *meshed, concurrency=1)
        long = lab.submit("nap", scaled(20), "long")
        lab.await_starts(1, 10, note="long")
        lab.let_in(free)
        with lab.audited() as audit:
            submitted_at = time.monotonic()
            shorts = lab.submit_many("nap", [(0.1, "short")] * 6)
            wait_until(lambda: len(lab.marks.ends(note="short")) == 6, 20, "the short ones are done")
            moves = audit.moves()
        done_at = max(mark.at for mark in lab.marks.ends(note="short"))
        case.at_most("shorts_done_after_s", done_at - submitted_at, 3.0)
        short_ids = {job.id for job in shorts}
        held_s = [
            stay.length_s(moves[-1].at_us)
            for stay in stays(moves)
            if stay.worker == "busy" and stay.id in short_ids
        ]
        most_s = HELD_MOST_S if fleet in ("plain", "free in mesh") else HELD_IN_MESH_S
        case.at_most("held_by_the_busy_one_s", max(held_s, default=0.0), most_s)
        case.equal("the_long_one_runs", long.status, Status.RUNNING)
        lab.await_ended([long, *shorts], 60)
        case.equal("starts", {len(lab.marks.starts(job=job.id)) for job in (long, *shorts)}, {1})
        lab.close(case)


def test_c13_a_long_job_does_not_sit_on_short_ones(site: Site) -> None:
    """Of workers without a mesh, with both in one, and with only one of them in a mesh."""
    together(
        *(
            lambda fleet=fleet: short_beside_long(site, fleet)
            for fleet in ("plain", "mesh", "busy in mesh", "free in mesh")
        )
    )


# -- C14 -------------------------------------------------------------------------------------------------
def test_c14_an_urgent_job_overtakes_the_backlog(lab: Lab) -> None:
    case = lab.case("C14", concurrency=1, low=10, default=5)
    lab.worker("w1", concurrency=1)
    retried = lab.submit(
        "fail", 1, 0.0, "high, retried", priority="high", backoff_base_seconds=0.5, jitter="none"
    )
    lab.await_starts(1, 10, note="high, retried")
    blocker = lab.submit("anap", 2.0, "blocker", priority="critical")
    lab.await_starts(1, 10, note="blocker")
    low = [lab.submit("tick", f"low {number}", priority="low") for number in range(1, 11)]
    unset = [lab.submit("tick", f"default {number}") for number in range(1, 6)]
    critical = lab.submit("tick", "critical", priority="critical")
    wait_until(lambda: retried.status is Status.PENDING, 1.5, "the retry is ready while the blocker runs")
    low[6].reprioritise("high")
    lab.await_ended([retried, blocker, critical, *low, *unset], 30)

    order = [mark.note for mark in lab.marks.starts()]
    expected = [
        "high, retried",
        "blocker",
        "critical",
        "high, retried",
        "low 7",
        *(f"default {number}" for number in range(1, 6)),
        *(f"low {number}" for number in range(1, 11) if number != 7),
    ]
    case.equal("order", order, expected)
    case.equal("outcomes_of_the_retried", lab.outcomes(retried), [Outcome.FAILED, Outcome.COMPLETED])
    case.equal("priority_of_one_that_set_none", {lab.now(job).priority for job in unset}, {2})
    lab.close(case)
