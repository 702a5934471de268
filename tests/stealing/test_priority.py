"""P7 with buffers and theft: nothing starts below what is ready in a higher tier, whoever holds what.

Every start is held against what was ready at its instant, by what the storage itself wrote down of its own
steps, in their order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import pytest

from fluxmesh.handle import JobHandle
from fluxmesh.job import TERMINAL
from tests.cases.audit import READY, RUNNING, Move
from tests.cases.harness import BEAT_S, Lab, wait_until
from tests.cases.starts import Runs, doubly_owned, starts_of
from tests.cases.test_outages import let_pass
from tests.stealing.figures import Figures
from tests.stealing.stock import fill, held_by, warm

SHORT: Final = 2_000
LONG: Final = 11_000
BATCH: Final = 500
LOW_WATER: Final = 60
FLEET: Final = (("w1", 1), ("w2", 2), ("w3", 3))
ONLY_LOWER: Final = "lower"  # a worker that runs two tiers only: what it cannot run outranks nothing there
URGENT_SHORT: Final = 8
URGENT_LONG: Final = 100


def runs_of(lab: Lab) -> dict[str, Runs]:
    return {
        str(row.epoch): Runs(frozenset(row.queues), frozenset(row.tiers)) for row in lab.queue.list_workers()
    }


def submitted(lab: Lab, jobs: int, rng: random.Random) -> None:
    """Bursts of mixed tiers, and floods of low ones with a few urgent ones a moment after."""
    made = 0
    while made < jobs:
        if rng.random() < 0.4:
            lengths = [(rng.choice((0.0, 0.001, 0.02)), "low") for _ in range(BATCH)]
            lab.submit_many("brief", lengths, priority="low")
            let_pass(rng.uniform(0.0, 0.04))
            lab.submit_many("brief", [(0.001, "urgent")] * 4, priority=rng.choice(("critical", "high")))
            made += BATCH + 4
        else:
            for tier in ("low", "default", "high", "critical"):
                share = rng.randint(5, BATCH // 2)
                lengths = [(rng.choice((0.0, 0.001, 0.004)), tier) for _ in range(share)]
                lab.submit_many("brief", lengths, priority=tier)
                made += share
        low = rng.choice((0, LOW_WATER, 2 * LOW_WATER))
        wait_until(lambda low=low: sum(lab.queue.counts().queued.values()) <= low, 60, "there is room")


def everything_ended(lab: Lab) -> bool:
    counts = lab.queue.counts().by_status
    return not sum(n for status, n in counts.items() if status not in TERMINAL)


def nothing_starts_below(lab: Lab, jobs: int, seed: int) -> None:
    case = lab.case("P7", jobs=jobs, workers=len(FLEET) + 1, seed=seed)
    figures = Figures(lab)
    for name, concurrency in FLEET:
        lab.worker(name, *lab.in_mesh(), concurrency=concurrency)
    lab.worker(ONLY_LOWER, "--tiers", "default,low", *lab.in_mesh(), concurrency=1)
    with lab.audited() as audit:
        submitted(lab, jobs, random.Random(seed))
        wait_until(lambda: everything_ended(lab), 120, "all have ended")
        runs = runs_of(lab)
        moves = audit.moves()
    found = starts_of(moves, runs)
    case.at_least("starts", found.starts, jobs)
    case.at_least("with_two_tiers_ready", found.two_tiers, jobs // 10 if jobs == SHORT else 2_000)
    case.equal("below_a_ready_higher_tier", len(found.below_ready), 0)
    # What it is giving back, as that of an answer which came too late; and what a theft brought meanwhile.
    case.at_most("below_a_held_one_of_its_own", len(found.below_own), jobs // 100)
    case.at_most("below_one_that_was_stolen_meanwhile", len(found.below_stolen), jobs // 100)
    case.tell("started_by_another_than_first_held_it", found.stolen)
    let_pass(2 * BEAT_S)  # figures come with beats
    totals = figures.read()["totals"]
    case.tell("steals_succeeded", totals["steals_succeeded"])
    case.tell("jobs_stolen_in", totals["jobs_stolen_in"])
    case.tell("jobs_taken_held", totals["jobs_taken_held"])
    shown = [f"{one}" for one in found.below_ready[:5]]
    case.close([*shown, *doubly_owned(moves), *lab.miscounted()])


def test_p7_no_start_is_below_a_ready_job_of_a_higher_tier(lab: Lab) -> None:
    nothing_starts_below(lab, SHORT, 1)


@pytest.mark.slow
def test_p7_no_start_of_ten_thousand_is_below_a_ready_job_of_a_higher_tier(lab: Lab) -> None:
    nothing_starts_below(lab, LONG, 2)


# -- urgent beside full buffers --------------------------------------------------------------------------
def next_start_after(moves: Sequence[Move], job: str) -> str:
    """The job that was started next, anywhere, once this one was ready."""
    ready = next(at for at, move in enumerate(moves) if move.id == job and move.place == READY)
    return next(move.id for move in moves[ready:] if move.place == RUNNING)


def urgent_beside_low(lab: Lab, times: int) -> None:
    case = lab.case("P7", urgent=times, workers=3, buffers="full of low ones")
    groups = [lab.worker(f"w{n}", *lab.in_mesh(), concurrency=1) for n in range(3)]
    rng = random.Random(3)
    urgent: list[JobHandle[Any]] = []
    held: list[int] = []
    with lab.audited() as audit:
        while len(urgent) < times:
            warm(lab, 1_500)  # who has run jobs that last holds few of them
            low = fill(lab, 90, 0.08, "low", priority="low")
            for number in range(len(urgent), min(times, len(urgent) + URGENT_SHORT)):
                let_pass(rng.uniform(0.0, 0.1))
                held.append(sum(held_by(lab, group) for group in groups))
                urgent.append(lab.submit("brief", 0.001, f"urgent {number}", priority="critical"))
                lab.await_starts(1, 10, note=f"urgent {number}")
            lab.await_ended(low, 60)
        lab.await_ended(urgent, 60)
        moves = audit.moves()
    case.equal("started_next", sum(next_start_after(moves, job.id) == job.id for job in urgent), times)
    case.at_least("held_low_ones_at_the_least", min(held), 10)
    case.equal("below_a_ready_higher_tier", len(starts_of(moves, runs_of(lab)).below_ready), 0)
    lab.close(case)


def test_p7_an_urgent_job_starts_next_on_the_first_free_slot_though_all_buffers_hold_low_ones(
    lab: Lab,
) -> None:
    urgent_beside_low(lab, URGENT_SHORT)


@pytest.mark.slow
def test_p7_so_do_a_hundred_of_them(lab: Lab) -> None:
    urgent_beside_low(lab, URGENT_LONG)
