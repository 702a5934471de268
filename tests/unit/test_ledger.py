"""The ledger of a worker's process, as it is written and as others read it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from fluxmesh.clock import ManualClock
from fluxmesh.storage.values import Registration, TaskSpec, WorkerRef
from fluxmesh.worker.ledger import (
    RECORDS_MORE,
    RECORDS_PER_SLOT,
    Ledger,
    LedgerReader,
    make_ledger_file,
)

WHO = Registration("w", ("default",), (0, 1), (TaskSpec("t"),), 2, 6.0, 2.0, "box", 7)
SLOTS = 2
MOST = RECORDS_PER_SLOT * SLOTS + RECORDS_MORE


def job(number: int) -> str:
    return f"00000000-0000-7000-8000-{number:012}"


class Pair:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.reader = LedgerReader(make_ledger_file())

    def write(self, *, registered: bool = True) -> Ledger:
        ledger = Ledger(self.reader.fd, WHO, concurrency=SLOTS, hard_grace_s=1.0, clock=self.clock)
        if registered:
            ledger.registered(3, 5.0)
        return ledger


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.reader.close()


def test_nothing_is_read_before_the_worker_has_registered(pair: Pair) -> None:
    assert (pair.reader.vitals(), pair.reader.registration(), pair.reader.entries()) == (None, None, [])
    ledger = pair.write(registered=False)
    assert pair.reader.vitals() is None
    ledger.registered(3, 5.0)
    vitals = pair.reader.vitals()
    assert vitals is not None
    assert (vitals.epoch, vitals.beat_s) == (3, 5.0)
    assert pair.reader.registration() == WHO
    assert pair.reader.worker(3) == WorkerRef("w", 3)


def test_signs_of_life_are_read_as_they_were_written(pair: Pair) -> None:
    ledger = pair.write()
    for step in (ledger.turned, ledger.probed, ledger.answered):
        pair.clock.advance(1)
        step()
    ledger.beat(2.5)
    ledger.blocked(job(1))
    vitals = pair.reader.vitals()
    assert vitals is not None
    assert (vitals.turn_s, vitals.probed_s, vitals.answered_s, vitals.beat_s) == (1, 2, 3, 2.5)
    assert vitals.blocked_by == job(1)
    ledger.blocked("")
    assert pair.reader.vitals().blocked_by == ""  # type: ignore[union-attr]


def test_a_worker_that_is_over_is_kept_no_more(pair: Pair) -> None:
    ledger = pair.write()
    place = ledger.enter(job(1), 1, 1.0, 1)
    ledger.over()
    assert pair.reader.vitals() is None
    ledger.turned()  # whoever comes late harms nobody
    assert ledger.begin(place)
    ledger.strike(place)
    ledger.over()


def test_running_jobs_stand_there_with_their_hard_deadline_until_they_end(pair: Pair) -> None:
    ledger = pair.write()
    first = ledger.enter(job(1), 11, 20.0, 0)
    ledger.enter(job(2), 12, 30.0, 0)
    assert {(entry.id, entry.token, entry.hard_s) for entry in pair.reader.entries()} == {
        (job(1), 11, 21.0),
        (job(2), 12, 31.0),
    }
    ledger.strike(first)
    assert [entry.id for entry in pair.reader.entries()] == [job(2)]


def test_records_are_used_again_and_again_and_one_job_too_many_is_left_out(pair: Pair) -> None:
    ledger = pair.write()
    for _ in range(3):
        places = [ledger.enter(job(number), number, 1.0, 0) for number in range(MOST)]
        assert sorted(set(places)) == sorted(places)
        beyond = [ledger.enter(job(MOST + more), 1, 1.0, 1) for more in range(2)]
        assert {entry.id for entry in pair.reader.entries()} == {job(number) for number in range(MOST)}
        assert all(ledger.begin(place) for place in beyond)
        for place in (*places, *beyond):
            ledger.strike(place)
        assert pair.reader.entries() == []


def test_a_body_that_waits_is_taken_back_and_then_not_entered(pair: Pair) -> None:
    ledger = pair.write()
    waits, runs = ledger.enter(job(0), 0, 1.0, 1), ledger.enter(job(1), 1, 1.0, 1)
    ledger.enter(job(2), 2, 1.0, 0)  # on a thread
    assert ledger.begin(runs)
    taken = pair.reader.revoke(pair.reader.entries())
    assert [entry.id for entry in taken] == [job(0)]
    assert not ledger.begin(waits)


def test_a_body_entered_between_the_look_and_the_mark_is_not_taken_back(pair: Pair) -> None:
    ledger = pair.write()
    place = ledger.enter(job(1), 1, 1.0, 1)
    seen = pair.reader.entries()
    assert ledger.begin(place)
    assert pair.reader.revoke(seen) == []


def test_a_record_given_to_another_job_meanwhile_is_not_taken_for_the_first(pair: Pair) -> None:
    ledger = pair.write()
    place = ledger.enter(job(1), 1, 1.0, 1)
    seen = pair.reader.entries()
    ledger.strike(place)
    ledger.enter(job(2), 2, 1.0, 1)
    assert pair.reader.revoke(seen) == []


def test_a_mark_of_an_earlier_job_does_not_stick_to_its_record(pair: Pair) -> None:
    ledger = pair.write()
    place = ledger.enter(job(1), 1, 1.0, 1)
    pair.reader.revoke(pair.reader.entries())
    ledger.strike(place)
    again = ledger.enter(job(2), 2, 1.0, 1)
    assert again == place
    assert ledger.begin(again)


def test_a_body_that_has_ended_says_so_itself_until_the_loop_goes_on_with_its_job(pair: Pair) -> None:
    ledger = pair.write()
    place = ledger.enter(job(1), 1, 1.0, 0)
    assert [entry.left for entry in pair.reader.entries()] == [False]
    ledger.left(place)
    assert [(entry.left, entry.hard_s) for entry in pair.reader.entries()] == [(True, 2.0)]
    ledger.resumed(place)  # what follows the body is held to the same time
    assert [(entry.left, entry.hard_s) for entry in pair.reader.entries()] == [(False, 2.0)]
    ledger.left(place)
    ledger.strike(place)
    assert ledger.enter(job(2), 2, 1.0, 0) == place
    assert [entry.left for entry in pair.reader.entries()] == [False]


def test_a_file_that_is_no_ledger_is_not_read(pair: Pair) -> None:
    os.ftruncate(pair.reader.fd, 4_096)
    assert pair.reader.vitals() is None
    assert pair.reader.entries() == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can seal a file")
def test_a_worker_cannot_make_it_smaller_under_its_reader(pair: Pair) -> None:
    pair.write()
    with pytest.raises(PermissionError):
        os.ftruncate(pair.reader.fd, 0)
