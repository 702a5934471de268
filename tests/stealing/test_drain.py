"""SIGTERM to a worker whose buffer is full: everything is handed back or stolen, nothing is lost."""

from __future__ import annotations

import random
import time
from typing import Final

import pytest

from tests.cases.audit import HELD, Move
from tests.cases.harness import GRACE_S, Lab, Site, wait_until
from tests.cases.report import Case
from tests.cases.starts import doubly_owned, stays
from tests.cases.test_outages import let_pass
from tests.stealing.stock import fill, held_by, warm

JOBS: Final = 64
JOB_S: Final = 0.05
SHORT: Final = 5
LONG: Final = 100
ROUNDS_OF_A_LAB: Final = 10
FULL_BUFFER: Final = 40
ELSEWHERE_S: Final = 5.0


class Drains:
    """What became of each buffer."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.exits_s: list[float] = []
        self.codes: list[int] = []
        self.handed_back = 0
        self.stolen = 0
        self.begun = 0

    def note(self, moves: list[Move], worker: str, told_us: int) -> None:
        """Where the jobs went that it held when it was told to end."""
        last = {stay.id: stay for stay in stays(moves) if stay.worker == worker and stay.place == HELD}
        held = [stay for stay in last.values() if stay.until_us is None or stay.until_us > told_us]
        after = {(move.id, move.at_us): move for move in moves}
        for stay in held:
            follows = None if stay.until_us is None else after[stay.id, stay.until_us]
            if follows is None:
                raise AssertionError(f"job {stay.id} is still held by {worker}, which has ended")
            if follows.epoch == stay.epoch:
                self.begun += 1
            elif follows.epoch:
                self.stolen += 1
            else:
                self.handed_back += 1


def one_drain(lab: Lab, number: int, rng: random.Random, drains: Drains) -> None:
    """A worker fills its buffer alone; another comes a moment before it is told to end, or then."""
    group = lab.worker(f"full-{number}", *lab.in_mesh(), concurrency=1)
    other = lab.standby(f"other-{number}", *lab.in_mesh(), concurrency=8)
    warm(lab, 300)
    with lab.audited() as audit:
        note = f"work {number}"
        jobs = fill(lab, JOBS, JOB_S, note)
        if number % 2:
            lab.let_in(other)
            let_pass(rng.uniform(0.0, 0.3))
        drains.held.append(held_by(lab, group))
        told_at, told_us = time.monotonic(), time.time_ns() // 1_000
        group.tell()
        if not number % 2:
            lab.let_in(other)
        drains.codes.append(group.wait(30))
        drains.exits_s.append(time.monotonic() - told_at)
        wait_until(lambda: len(lab.marks.ends(note=note)) == len(jobs), ELSEWHERE_S + 20, "all have run")
        lab.await_ended(jobs, ELSEWHERE_S)  # else the other one is killed before storage knows of the last
        moves = audit.moves()
        drains.note(moves, group.worker_id, told_us)
        assert doubly_owned(moves) == []
    assert not group.kill(), "a process of the worker is left"
    other.kill()


def drained(site: Site, case: Case, rounds: int) -> None:
    drains, found = Drains(), []
    for first in range(0, rounds, ROUNDS_OF_A_LAB):
        with site.lab(f"drain-{first}", lease_s=3.0) as lab:
            rng = random.Random(first)
            for number in range(first, min(rounds, first + ROUNDS_OF_A_LAB)):
                one_drain(lab, number, rng, drains)
            found += lab.judged()
    case.equal("rounds", len(drains.codes), rounds)
    case.equal("exit_codes", set(drains.codes), {0})
    case.at_most("exit_worst_s", max(drains.exits_s), GRACE_S + 2)
    full = sum(held >= FULL_BUFFER for held in drains.held)
    case.at_least("buffers_full_at_the_signal", full, (rounds + 1) // 2)
    case.tell("held_at_the_signal", sum(drains.held))
    case.tell("handed_back", drains.handed_back)
    case.tell("stolen", drains.stolen)
    case.tell("begun_after_the_signal", drains.begun)
    case.close(found)


def test_a_full_buffer_is_handed_back_or_stolen_when_its_worker_is_told_to_end(
    site: Site, storage: str
) -> None:
    drained(site, Case("drain", storage, rounds=SHORT, jobs=JOBS), SHORT)


@pytest.mark.slow
def test_a_hundred_full_buffers_are_handed_back_or_stolen(site: Site, storage: str) -> None:
    drained(site, Case("drain", storage, rounds=LONG, jobs=JOBS), LONG)
