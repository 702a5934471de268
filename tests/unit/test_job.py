"""The table of transitions, and the fingerprint of failures."""

from __future__ import annotations

import pytest

from fluxmesh.job import (
    REPLAYABLE,
    TERMINAL,
    TIER_NAMES,
    TRANSITIONS,
    Job,
    JobError,
    Priority,
    Status,
    fingerprint,
    is_legal,
)
from tests.unit.job_states import DOCUMENT, render


def test_the_table_has_a_row_for_every_state_and_a_reason_for_every_move() -> None:
    assert set(TRANSITIONS) == set(Status)
    assert all(reason for moves in TRANSITIONS.values() for reason in moves.values())


def test_only_a_replay_leaves_a_terminal_state_and_never_a_completed_one() -> None:
    for status in TERMINAL:
        assert set(TRANSITIONS[status]) <= {Status.PENDING}
    assert {status for status in TERMINAL if TRANSITIONS[status]} == REPLAYABLE
    assert TRANSITIONS[Status.COMPLETED] == {}


def test_every_state_can_be_reached_and_every_live_one_can_come_to_an_end() -> None:
    reached = {Status.SCHEDULED, Status.PENDING}
    for _ in Status:
        reached |= {after for before in reached for after in TRANSITIONS[before]}
    assert reached == set(Status)
    ending = set(TERMINAL)
    for _ in Status:
        ending |= {before for before, moves in TRANSITIONS.items() if ending & set(moves)}
    assert ending == set(Status)


def test_only_an_owned_job_can_end_by_its_body() -> None:
    before = {status for status, moves in TRANSITIONS.items() if Status.COMPLETED in moves}
    assert before == {Status.RUNNING}


@pytest.mark.parametrize(
    ("before", "after", "legal"),
    [
        (Status.PENDING, Status.RUNNING, True),
        (Status.RUNNING, Status.PENDING, True),
        (Status.RUNNING, Status.EXPIRED, False),
        (Status.COMPLETED, Status.PENDING, False),
        (Status.PENDING, Status.COMPLETED, False),
        (Status.EXPIRED, Status.PENDING, True),
    ],
)
def test_legality_is_what_the_table_says(before: Status, after: Status, legal: bool) -> None:
    assert is_legal(before, after) is legal


def test_the_document_shows_the_table_as_it_is() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "run: python -m tests.unit.job_states"


def test_tiers_have_names_in_the_order_of_their_urgency() -> None:
    assert [tier.name.lower() for tier in Priority] == list(TIER_NAMES)
    assert list(Priority) == [0, 1, 2, 3]


@pytest.mark.parametrize("status", Status)
def test_a_job_has_ended_in_a_terminal_state_only(status: Status) -> None:
    job = Job(id="x", task="t", queue="q", priority=2, status=status)
    assert job.ended is (status in TERMINAL)


class TestFingerprint:
    BASE = JobError("ValueError", "no order 17", ("app.py:10 run", "shop/orders.py:7 load"))

    @pytest.mark.parametrize(
        "other",
        [
            JobError("ValueError", "no order 99182", BASE.frames),
            JobError("ValueError", "no order 1.5", BASE.frames),
            JobError("ValueError", "no order 17", ("other.py:3 main", "shop/orders.py:8 load")),
            JobError("ValueError", "no order 17", BASE.frames, "another text"),
        ],
    )
    def test_failures_of_one_kind_have_one_fingerprint(self, other: JobError) -> None:
        assert fingerprint("t", other) == fingerprint("t", self.BASE)

    @pytest.mark.parametrize(
        ("one", "two"),
        [
            ("user 'ann' is unknown", "user 'bob' is unknown"),
            ("at 0x7f00dead", "at 0x1"),
            ("job 018bcfe5-6800-7000-8000-000000000001", "job 018bcfe5-6800-7abc-9def-0123456789ab"),
            ("sha deadbeefdeadbeef00", "sha 0123456789abcdef0123456789abcdef"),
        ],
    )
    def test_what_changes_from_job_to_job_does_not_count(self, one: str, two: str) -> None:
        assert fingerprint("t", JobError("E", one)) == fingerprint("t", JobError("E", two))

    @pytest.mark.parametrize(
        "other",
        [
            JobError("KeyError", "no order 17", BASE.frames),
            JobError("ValueError", "no customer 17", BASE.frames),
            JobError("ValueError", "no order 17", ("app.py:10 run", "shop/orders.py:7 save")),
            JobError("ValueError", "no order 17"),
        ],
    )
    def test_failures_of_another_kind_have_another(self, other: JobError) -> None:
        assert fingerprint("t", other) != fingerprint("t", self.BASE)

    def test_the_task_counts(self) -> None:
        assert fingerprint("a", self.BASE) != fingerprint("b", self.BASE)

    @pytest.mark.parametrize("message", ["", "\ud800", "x" * 1_000_000, "1" * 1_000_000, "'" * 100_000])
    def test_any_message_has_one_of_16_digits(self, message: str) -> None:
        made = fingerprint("t", JobError("E", message))
        assert len(made) == 16
        int(made, 16)
