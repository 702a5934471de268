"""Lies about marks of bodies, about times and about keys, each beside the same history without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from fluxmesh.job import Attempt, Outcome, Status
from fluxmesh.storage.values import Cancelled
from fluxmesh.testing.history import (
    Answer,
    CancelTold,
    Effect,
    Happening,
    History,
    Ownership,
    ProcessEvent,
    Story,
    Told,
    Violation,
    judge,
)
from fluxmesh.testing.history_marks import MARK_RULES
from fluxmesh.testing.history_runs import Index
from tests.chaos.test_checker import (
    A,
    B,
    attempt,
    end,
    happened,
    history,
    job,
    ns,
    replace,
    stamp,
    start,
    with_record,
)

CHARGED: Final = {
    Outcome.FAILED: {"attempts": 2},
    Outcome.TIMEOUT: {"attempts": 2},
    Outcome.INTERRUPTED: {"interruptions": 1},
    Outcome.SNOOZED: {"snoozes": 1},
    Outcome.CRASHED: {"crashes": 1},
}


def one(*effects: Effect, entries: tuple[Attempt, ...] = (), **fields: Any) -> History:
    """A completed job; as a rule its only body ran from 1 to 3."""
    record = job(**{"attempts": 1, "token": 20, "completed_at": stamp(3.1), **fields})
    return history(
        effects=effects or [start(A, 1.0, 20), end(A, 3.0, 20)],
        stories=[Story(record, entries or (attempt(Outcome.COMPLETED, 0.9, 3.1),))],
        processes=[],
        sightings=[],
    )


def again(outcome: Outcome, how: str, *events: ProcessEvent, **fields: Any) -> History:
    """Its first body ended so, the storage tells that otherwise, and a second one completed."""
    made = one(
        start(A, 1.0, 10),
        end(A, 1.5, 10, how=how),
        start(A, 2.0, 20, pid=2),
        end(A, 3.0, 20, pid=2),
        entries=(attempt(outcome, 0.9, 1.6), attempt(Outcome.COMPLETED, 1.9, 3.1, "w2")),
        **{**CHARGED.get(outcome, {}), **fields},
    )
    return replace(made, processes=events)


def unknown_clock(base: History) -> History:
    return replace(base, storage_us=None)


def asked(base: History, at: float) -> History:
    return replace(base, cancels=[CancelTold(A, Cancelled.REQUESTED, ns(at))])


def crashed_and_asked(claimed: float, began: float) -> History:
    """Its first process dies; a cancel is taken at 2; another body begins after that."""
    made = one(
        start(A, 1.0, 10),
        start(A, began, 20, pid=2),
        end(A, 9.0, 20, pid=2),
        entries=(attempt(Outcome.CRASHED, 0.9, 1.6), attempt(Outcome.COMPLETED, claimed, 9.1, "w2")),
        crashes=1,
        completed_at=stamp(9.1),
    )
    return asked(replace(made, processes=[happened(Happening.GONE, 1.5)]), 2.0)


def went_on(until: float, *stops: tuple[float, float], second: float = 5.5, pid: int = 1) -> History:
    """The first body, stopped so, goes on until then; the second ends at 99."""
    events = []
    for stopped, continued in stops:
        events += [
            ProcessEvent(ns(stopped), Happening.STOPPED, pid, "w1"),
            ProcessEvent(ns(continued), Happening.CONTINUED, pid, "w1"),
        ]
    made = one(
        start(A, 1.0, 10),
        start(A, second, 20, pid=2),
        end(A, until, 10, how="JobInterrupted"),
        end(A, 99.0, 20, pid=2),
        entries=(
            attempt(Outcome.CRASHED, 0.9, second - 0.2),
            attempt(Outcome.COMPLETED, second - 0.1, 99.1, "w2"),
        ),
        crashes=1,
        completed_at=stamp(99.1),
    )
    return replace(made, processes=events)


def in_its_own_process(*, owner_stopped: bool) -> History:
    """A body in a process of its own: the lease that lapses is its worker's."""
    made = went_on(7.0, (2.0, 6.0) if owner_stopped else (2.0, 2.1), pid=50)
    return replace(made, processes=[*made.processes, ProcessEvent(ns(7.1), Happening.GONE, 1, "")])


def of_one_key(second_made: float, queue: str = "default") -> History:
    """Two jobs of a unique key; the first is there from 0.5 to 3.1."""
    first = job(A, attempts=1, token=20, completed_at=stamp(3.1), unique_key="u", created_at=stamp(0.5))
    other = replace(
        first, id=B, token=21, completed_at=stamp(8.1), created_at=stamp(second_made), queue=queue
    )
    counts = {Status.COMPLETED: 2}
    return history(
        effects=[start(A, 1, 20), end(A, 3, 20), start(B, 4, 21), end(B, 8, 21)],
        stories=[
            Story(first, [attempt(Outcome.COMPLETED, 0.9, 3.1)]),
            Story(other, [attempt(Outcome.COMPLETED, 3.9, 8.1)]),
        ],
        told=[Told(A, Answer.ACCEPTED, 0), Told(B, Answer.ACCEPTED, 0)],
        processes=[],
        sightings=[],
        told_counts=counts,
        walked_counts=counts,
    )


def bodies_of_one_key() -> History:
    """The same, told by the bodies alone."""
    made = unknown_clock(of_one_key(3.2))
    return replace(made, effects=[start(A, 1, 20), end(A, 3, 20), start(B, 2, 21), end(B, 8, 21)])


def stop(stopped: float, continued: float) -> tuple[ProcessEvent, ProcessEvent]:
    return happened(Happening.STOPPED, stopped), happened(Happening.CONTINUED, continued)


def claimed_for_the_dead(died: float) -> History:
    """The first process was gone before the storage gave it the job, at 0.9; no body of its began."""
    made = history(effects=[start(A, 2.0, 20, pid=2), end(A, 3.0, 20, pid=2)])
    return replace(made, processes=[happened(Happening.GONE, died)])


def with_entries_of(base: History, worker: str) -> History:
    entries = [replace(entry, worker_id=worker) for entry in base.stories[0].history]
    return replace(base, stories=[replace(base.stories[0], history=entries)])


def owned_by(base: History, *owners: tuple[int, str]) -> History:
    return replace(base, owners=[Ownership(A, token, worker) for token, worker in owners])


KILLED: Final = happened(Happening.KILLED, 1.55)

SOUND: dict[str, Callable[[], History]] = {
    "failed, and ran again": lambda: again(Outcome.FAILED, "ValueError"),
    "snoozed, and ran again": lambda: again(Outcome.SNOOZED, "Snooze"),
    "interrupted, and ran again": lambda: again(Outcome.INTERRUPTED, "JobInterrupted"),
    "returned, and its process was killed before that was stored": lambda: again(
        Outcome.CRASHED, "returned", KILLED
    ),
    "returned while its worker was told to end, and was killed": lambda: again(
        Outcome.INTERRUPTED, "returned", KILLED
    ),
    "returned while its worker ended": lambda: again(
        Outcome.INTERRUPTED, "returned", happened(Happening.GONE, 4.0)
    ),
    "returned, and its process was frozen": lambda: again(Outcome.INTERRUPTED, "returned", *stop(1.51, 5)),
    "returned when its time was over": lambda: again(Outcome.TIMEOUT, "returned", timeout_seconds=0.5),
    "an end that was written again": lambda: one(
        start(A, 1.0, 20), end(A, 3.0, 20), end(A, 3.001, 20)
    ),
    "an end that was written again after a freeze": lambda: with_record(
        replace(
            one(start(A, 1.0, 20), end(A, 3.0, 20), end(A, 5.1, 20), entries=(
                attempt(Outcome.COMPLETED, 0.9, 5.2),
            )),
            processes=stop(3.0, 5.0),
        ),
        completed_at=stamp(5.2),
    ),
    "cancel requested, and its run completed": lambda: asked(one(), 2.0),
    "cancel requested on the way from the claim to the body": lambda: crashed_and_asked(1.9, 2.2),
    "the same with a clock that says nothing": lambda: unknown_clock(crashed_and_asked(1.9, 2.2)),
    "frozen, and told so by the next beat": lambda: went_on(7.0, (2.0, 6.0)),
    "frozen, and another begins just after": lambda: went_on(8.0, (2.0, 6.0), second=7.5),
    "frozen, and again before it was told": lambda: went_on(36.0, (2.0, 6.0), (7.0, 30.0)),
    "in its own process, and its worker's was frozen": lambda: in_its_own_process(owner_stopped=True),
    "claimed by what its process had asked before it died": lambda: claimed_for_the_dead(-3.0),
    "the same, and the process after it took the job at once": lambda: with_entries_of(
        replace(claimed_for_the_dead(-3.0), effects=[start(A, 2.0, 20), end(A, 3.0, 20)]), "w1"
    ),
    "started when it was due": lambda: one(scheduled_at=stamp(0.9)),
    "started before it expired": lambda: one(expires_at=stamp(0.9)),
    "due, and its last process died before its body began": lambda: replace(
        one(
            start(A, 1.0, 10),
            entries=(attempt(Outcome.CRASHED, 0.9, 1.6), attempt(Outcome.CRASHED, 4.0, 4.5)),
            status=Status.DEAD_LETTER, reason="worker lost x2", crashes=2, attempts=0, max_crashes=2,
            scheduled_at=stamp(3.9), completed_at=stamp(4.5),
        ),
        processes=[happened(Happening.GONE, 1.5), happened(Happening.GONE, 4.4)],
        told_counts={Status.DEAD_LETTER: 1},
        walked_counts={Status.DEAD_LETTER: 1},
    ),
    "cancelled while it waited for its next attempt": lambda: replace(
        one(
            start(A, 1.0, 10),
            end(A, 1.5, 10, how="ValueError"),
            entries=(attempt(Outcome.FAILED, 0.9, 1.6),),
            status=Status.CANCELLED, token=10, scheduled_at=stamp(5.0), completed_at=stamp(2.0),
        ),
        told=[Told(A, Answer.ACCEPTED, 0, (Status.CANCELLED,))],
        told_counts={Status.CANCELLED: 1},
        walked_counts={Status.CANCELLED: 1},
    ),
    "stolen, and started by the thief": lambda: owned_by(one(), (19, "w2"), (20, "w1")),
    "of an owner of whom nothing is known": lambda: owned_by(one(), (19, "w2")),
    "one unique key after the other": lambda: of_one_key(3.2),
    "one unique key in two queues": lambda: of_one_key(0.6, queue="other"),
    "one unique key after the other, by their bodies": lambda: unknown_clock(of_one_key(3.2)),
    "a batch whose outcome is unknown": lambda: replace(one(), told=[], untold_most=1),
    "nobody knows what was submitted": lambda: replace(one(), told=[]),
}  # fmt: skip

LIES: dict[str, tuple[str, Callable[[], History]]] = {
    **{
        f"returned, told {outcome.value}{name}": (
            "return not kept",
            lambda outcome=outcome, made=made: made(again(outcome, "returned")),
        )
        for outcome in (Outcome.FAILED, Outcome.SNOOZED, Outcome.TIMEOUT, Outcome.INTERRUPTED)
        for name, made in (("", lambda base: base), (", its clock says nothing", unknown_clock))
    },
    "returned, told failed, and another raised": (
        "return not kept",
        lambda: replace(
            again(Outcome.FAILED, "returned"),
            effects=[*again(Outcome.FAILED, "returned").effects, end(B, 1.0, 5, how="ValueError")],
        ),
    ),
    "returned, told interrupted, and another process died": (
        "return not kept",
        lambda: again(Outcome.INTERRUPTED, "returned", happened(Happening.KILLED, 1.55, pid=9)),
    ),
    "returned, told interrupted, and its process was stopped too briefly": (
        "return not kept",
        lambda: again(Outcome.INTERRUPTED, "returned", *stop(1.51, 1.7)),
    ),
    "returned in its time, told timeout": (
        "return not kept",
        lambda: again(Outcome.TIMEOUT, "returned", timeout_seconds=2.0),
    ),
    "cancelled, and it went on": (
        "went on after its end",
        lambda: again(Outcome.CANCELLED, "JobInterrupted"),
    ),
    "cancelled by its history, completed by its record": (
        "went on after its end",
        lambda: one(entries=(attempt(Outcome.CANCELLED, 0.9, 3.1),)),
    ),
    "cancel requested, interrupted, and started again": (
        "start after a cancel",
        lambda: asked(again(Outcome.INTERRUPTED, "JobInterrupted"), 1.2),
    ),
    "the same with a clock that says nothing": (
        "start after a cancel",
        lambda: unknown_clock(asked(again(Outcome.INTERRUPTED, "JobInterrupted"), 1.2)),
    ),
    "cancel requested, and claimed after that": (
        "start after a cancel",
        lambda: crashed_and_asked(2.5, 2.6),
    ),
    "frozen long ago, and beside another": ("overlap", lambda: went_on(98.0, (2.0, 6.0), second=60.0)),
    "frozen, and goes on for ever": ("overlap", lambda: went_on(30.0, (2.0, 6.0))),
    "another process of its worker was frozen": ("overlap", lambda: went_on(7.0, (2.0, 6.0), pid=77)),
    "in its own process, and its worker's was not frozen": (
        "overlap",
        lambda: in_its_own_process(owner_stopped=False),
    ),
    "claimed long after its process had died": (
        "crash without ground",
        lambda: claimed_for_the_dead(-30.0),
    ),
    "two ends": ("two ends", lambda: one(start(A, 1.0, 20), end(A, 3.0, 20), end(A, 9.0, 20))),
    "two ends that differ": (
        "two ends",
        lambda: one(start(A, 1.0, 20), end(A, 3.0, 20, how="ValueError"), end(A, 3.001, 20)),
    ),
    "the second end is in the next run": (
        "overlap",
        lambda: replace(
            again(Outcome.FAILED, "ValueError"),
            effects=[*again(Outcome.FAILED, "ValueError").effects, end(A, 2.5, 10, how="ValueError")],
        ),
    ),
    "an end by another process": (
        "end in another process",
        lambda: one(start(A, 1.0, 20), end(A, 3.0, 20, pid=9)),
    ),
    "an end without a start": (
        "end without a start",
        lambda: one(start(A, 1.0, 20), end(A, 3.0, 20), end(A, 0.5, 5)),
    ),
    "a job stored twice": ("stored twice", lambda: replace(one(), stories=[*one().stories * 2])),
    "started before it was due": ("started too soon", lambda: one(scheduled_at=stamp(11))),
    "its body began before it was due": (
        "started too soon",
        lambda: one(scheduled_at=stamp(2), entries=(attempt(Outcome.COMPLETED, 2.1, 3.1),)),
    ),
    "started after it had expired": ("started too late", lambda: one(expires_at=stamp(0.5))),
    "one unique key twice": ("unique key held twice", lambda: of_one_key(0.6)),
    "one unique key twice, by their bodies": ("unique key held twice", bodies_of_one_key),
    "nobody submitted it": ("job from nowhere", lambda: replace(one(), told=[], untold_most=0)),
    "started by the victim under the thief's token": (
        "body under another's token",
        lambda: owned_by(one(), (19, "w1"), (20, "w2")),
    ),
    "one token of two owners": (
        "token of two owners",
        lambda: owned_by(one(), (20, "w1"), (20, "w2")),
    ),
    "a body of another task": ("wrong task", lambda: with_record(one(), task="other")),
}


@pytest.mark.parametrize("made", SOUND.values(), ids=SOUND.keys())
def test_a_sound_history_has_no_violation(made: Callable[[], History]) -> None:
    assert [str(violation) for violation in judge(made()).violations] == []


@pytest.mark.parametrize(("rule", "made"), LIES.values(), ids=LIES.keys())
def test_a_lie_is_found(rule: str, made: Callable[[], History]) -> None:
    found = judge(made()).violations
    assert rule in {violation.rule for violation in found}, [str(violation) for violation in found]


@pytest.mark.parametrize("rule", MARK_RULES, ids=lambda rule: rule.__name__)
def test_every_rule_can_find_something(rule: Callable[[Index], Iterator[Violation]]) -> None:
    assert any(list(rule(Index(made()))) for _, made in LIES.values())
