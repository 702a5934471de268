"""One worker has all the work in its buffer when two others start: with stealing they share it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tests.cases.beside import beside
from tests.cases.harness import START_S, Lab, Site, wait_until
from tests.cases.report import FULL, Case
from tests.cases.workers import WorkerGroup
from tests.stealing.figures import Figures
from tests.stealing.stock import WARM, held_by, is_empty, warm

WARM_S: Final = 0.001 if FULL else 0.0  # beside other tests a millisecond is two, and less is held then
JOBS: Final = 64
JOB_S: Final = 0.25
DEFAULTS: Final = {"lease_s": 6.0, "beat_s": 2.0, "reap_s": 1.0, "grace_s": 8.0}
SHARED_S: Final = 6.0
ALONE_LEAST_S: Final = 8.0
FILLED_S: Final = 1.0
ATTEMPTS: Final = 4
TOLD_S: Final = 10.0  # figures come with beats


def started_s(group: WorkerGroup, launched_at: float) -> float:
    """How long a worker took until it was ready."""
    wait_until(lambda: "worker ready" in group.log.read_text("utf-8"), START_S, f"{group.worker_id} is ready")
    return time.monotonic() - launched_at


class NotFull(Exception):
    """The first worker did not take all of the work: what short jobs last on a busy machine is not short."""


def three(lab: Lab, *flags: str) -> tuple[Figures, float, float]:
    """Figures of the mesh, the instant of the submission, and how long the later of the two took to start."""
    figures = Figures(lab)
    first = lab.worker("one", *lab.in_mesh(*flags), concurrency=1)
    warm(lab, WARM, WARM_S)
    submitted_at = time.monotonic()
    lab.submit_many("brief", [(JOB_S, "work")] * JOBS)
    while not is_empty(lab):
        if time.monotonic() - submitted_at > FILLED_S:
            raise NotFull(f"{held_by(lab, first)} of {JOBS} jobs are held")
    launched_at = time.monotonic()
    others = [lab.launch(name, *lab.in_mesh(*flags), concurrency=1) for name in ("two", "three")]
    return figures, submitted_at, max(started_s(group, launched_at) for group in others)


def tried(site: Site, name: str, part: Callable[[Lab, int], None]) -> None:
    """The same from the start, on a storage of its own, if the first worker had not all of the work."""
    for attempt in range(1, ATTEMPTS + 1):
        with site.lab(f"{name}-{attempt}", **DEFAULTS) as lab:
            try:
                part(lab, attempt)
            except NotFull:
                if attempt == ATTEMPTS:
                    raise
            else:
                return


def all_done(lab: Lab) -> bool:
    return len(lab.marks.ends(note="work")) == JOBS


def case_of(lab: Lab, steal: str, attempt: int) -> Case:
    warmed = f"{WARM} of {WARM_S:g} s"
    return lab.case("three", jobs=JOBS, job_s=JOB_S, warm=warmed, steal=steal, attempt=attempt)


def shared(lab: Lab, attempt: int) -> None:
    case = case_of(lab, "yes", attempt)
    figures, submitted_at, start_s = three(lab)
    wait_until(lambda: all_done(lab), JOBS * JOB_S + START_S, "all are done")
    ended_at = max(mark.at for mark in lab.marks.ends(note="work"))
    case.tell("start_up", round(start_s, 3))
    case.at_most("all_done_after_s", ended_at - submitted_at, SHARED_S + 2 * start_s / 3)
    totals = figures.await_even(TOLD_S)
    case.at_least("steals_succeeded", totals["steals_succeeded"], 1)
    case.at_least("jobs_stolen_in", totals["jobs_stolen_in"], 1)
    case.equal("jobs_stolen_out", totals["jobs_stolen_out"], totals["jobs_stolen_in"])
    case.tell("jobs_taken_held", totals["jobs_taken_held"])
    by_process = {mark.pid for mark in lab.marks.starts(note="work")}
    case.equal("workers_that_took_part", len(by_process), 3)
    lab.close(case)


def alone(lab: Lab, attempt: int) -> None:
    case = case_of(lab, "no", attempt)
    figures, submitted_at, _ = three(lab, "--no-mesh-steal")
    until = submitted_at + ALONE_LEAST_S
    wait_until(lambda: time.monotonic() >= until or all_done(lab), 2 * ALONE_LEAST_S, "time passes")
    case.equal("all_done_before_8_s", all_done(lab), False)
    if FULL:
        wait_until(lambda: all_done(lab), JOBS * JOB_S + START_S, "all are done")
        ended_at = max(mark.at for mark in lab.marks.ends(note="work"))
        case.at_least("all_done_after", ended_at - submitted_at, ALONE_LEAST_S)
    wait_until(lambda: figures.of("two") and figures.of("three"), TOLD_S, "all have told")
    totals = figures.read()["totals"]
    stolen = {name: totals[name] for name in ("jobs_stolen_in", "jobs_stolen_out", "jobs_taken_held")}
    case.equal("stolen", stolen, dict.fromkeys(stolen, 0))
    case.close(lab.judged() if FULL else [])


@beside
def test_two_that_start_beside_one_with_all_the_work_share_it(site: Site) -> None:
    tried(site, "shared", shared)


@beside
def test_without_stealing_the_one_does_it_all_alone(site: Site) -> None:
    tried(site, "alone", alone)
