"""The history checker finds every kind of lie, and only lies; else the verdict of a chaos run means nothing.

Each test has a history with the lie and the same history without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import pytest

from fluxmesh.job import Attempt, Job, Outcome, Status
from fluxmesh.storage.values import Cancelled
from fluxmesh.testing.history import (
    DIES,
    RETURNED,
    Answer,
    CancelTold,
    Effect,
    Happening,
    History,
    ProcessEvent,
    Sighting,
    Story,
    Told,
    Violation,
    What,
    judge,
)
from fluxmesh.testing.history_marks import MARK_RULES
from fluxmesh.testing.history_rules import RULES
from fluxmesh.testing.history_runs import Index

A, B = "0190a3e4-5b6c-7d8e-9f01-23456789abcd", "0190a3e4-5b6c-7d8e-9f01-23456789abce"
EPOCH_US: Final = 1_700_000_000_000_000  # the storage's time at 0 of the machine's clock
LEASE_S, BEAT_S = 3.0, 1.0
replace = msgspec.structs.replace


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def stamp(seconds: float) -> float:
    return EPOCH_US / 1e6 + seconds


def start(job: str, at: float, token: int, pid: int = 1, **more: Any) -> Effect:
    return Effect(What.START, ns(at), job, "nap", token, 1, more.pop("life", 1), pid, f"w{pid}", **more)


def end(job: str, at: float, token: int, pid: int = 1, how: str = RETURNED, life: int = 1) -> Effect:
    return Effect(What.END, ns(at), job, "nap", token, 1, life, pid, f"w{pid}", how)


def happened(what: Happening, at: float, pid: int = 1) -> ProcessEvent:
    return ProcessEvent(ns(at), what, pid, f"w{pid}")


def attempt(outcome: Outcome, began: float, over: float, worker: str = "w1", life: int = 1) -> Attempt:
    return Attempt(life, 1, stamp(began), stamp(over), worker, outcome)


def job(job_id: str = A, status: Status = Status.COMPLETED, **fields: Any) -> Job:
    return Job(id=job_id, task="nap", queue="default", priority=2, status=status, **fields)


def history(**fields: Any) -> History:
    """A job whose first worker was killed, and that its second one completed."""
    record = job(attempts=1, crashes=1, token=20, completed_at=stamp(3.1))
    given = {
        "effects": [start(A, 1.0, 10), start(A, 2.0, 20, pid=2), end(A, 3.0, 20, pid=2)],
        "stories": [
            Story(record, [attempt(Outcome.CRASHED, 0.9, 1.8), attempt(Outcome.COMPLETED, 1.9, 3.1, "w2")])
        ],
        "told": [Told(A, Answer.ACCEPTED, ns(0.5))],
        "sightings": [Sighting(A, 1, Status.COMPLETED, 20, ns(3.5))],
        "processes": [happened(Happening.KILLED, 1.5), happened(Happening.GONE, 1.55)],
        "lease_s": LEASE_S,
        "beat_s": BEAT_S,
        "storage_us": EPOCH_US,
        "told_counts": {Status.COMPLETED: 1, Status.PENDING: 0},
        "walked_counts": {Status.COMPLETED: 1},
    }
    return History(**{**given, **fields})


def with_record(base: History, **fields: Any) -> History:
    first, *rest = base.stories
    return replace(base, stories=[replace(first, record=replace(first.record, **fields)), *rest])


def with_history(base: History, *attempts: Attempt) -> History:
    first, *rest = base.stories
    return replace(base, stories=[replace(first, history=attempts), *rest])


def rules(base: History) -> set[str]:
    return {violation.rule for violation in judge(base).violations}


def frozen(stopped: float, until: float, *, resumed_end: float = 7.0) -> History:
    """The job's first owner is stopped in the middle of its body; meanwhile the job runs elsewhere."""
    record = job(attempts=1, crashes=1, token=20, completed_at=stamp(9.1))
    return history(
        effects=[
            start(A, 1.0, 10),
            start(A, 5.5, 20, pid=2),
            end(A, resumed_end, 10, how="JobInterrupted"),
            end(A, 9.0, 20, pid=2),
        ],
        stories=[
            Story(record, [attempt(Outcome.CRASHED, 0.9, 5.4), attempt(Outcome.COMPLETED, 5.45, 9.1, "w2")])
        ],
        processes=[happened(Happening.STOPPED, stopped), happened(Happening.CONTINUED, until)],
        sightings=[],
    )


def limited(*spans: tuple[float, float], limit: int = 1) -> History:
    """Jobs of one key that ran so long."""
    ids = [f"{A[:-2]}{number:02}" for number in range(len(spans))]
    effects, stories = [], []
    for number, (job_id, (began, over)) in enumerate(zip(ids, spans, strict=True)):
        effects += [start(job_id, began, 10 + number), end(job_id, over, 10 + number)]
        record = job(
            job_id,
            attempts=1,
            token=10 + number,
            completed_at=stamp(over + 0.1),
            concurrency_key="k",
            concurrency_limit=limit,
        )
        stories.append(Story(record, [attempt(Outcome.COMPLETED, began, over + 0.1)]))
    counts = {Status.COMPLETED: len(spans)}
    return history(
        effects=effects, stories=stories, told=[], sightings=[], told_counts=counts, walked_counts=counts
    )


def cancelled(
    *effects: Effect, status: Status = Status.CANCELLED, answer: Cancelled = Cancelled.CANCELLED
) -> History:
    counts = {status: 1}
    record = job(status=status, token=10, completed_at=stamp(2.0), max_retries=0)
    return history(
        effects=effects,
        stories=[Story(record, [])],
        told=[Told(A, Answer.ACCEPTED, ns(0.5), (Status.CANCELLED, Status.COMPLETED, Status.EXPIRED))],
        cancels=[CancelTold(A, answer, ns(2.0))],
        sightings=[],
        told_counts=counts,
        walked_counts=counts,
    )


def dead(
    reason: str, outcome: Outcome, *, times: int, expected: Status = Status.DEAD_LETTER, **fields: Any
) -> History:
    """A job that was given up after so many starts that all ended alike."""
    effects, attempts, events = [], [], []
    for number in range(times):
        at, pid = 1.0 + number, 1 + number
        effects.append(start(A, at, 10 + number, pid=pid))
        how = DIES if outcome is Outcome.CRASHED else "ValueError"
        effects.append(end(A, at + 0.5, 10 + number, pid=pid, how=how))
        attempts.append(attempt(outcome, at - 0.1, at + 0.6, f"w{pid}"))
        events.append(happened(Happening.GONE, at + 0.55, pid=pid))
    name = "crashes" if outcome is Outcome.CRASHED else "attempts"
    token = 10 + times - (outcome is not Outcome.CRASHED)
    record = job(
        status=Status.DEAD_LETTER, reason=reason, token=token, completed_at=stamp(0.6 + times),
        **{name: times, **fields},
    )  # fmt: skip
    counts = {Status.DEAD_LETTER: 1}
    return history(
        effects=effects,
        stories=[Story(record, attempts)],
        told=[Told(A, Answer.ACCEPTED, ns(0.5), (expected,))],
        processes=events,
        sightings=[],
        told_counts=counts,
        walked_counts=counts,
    )


def twice_alive() -> History:
    """Completed; then replayed cannot be: but cancelled, and replayed."""
    record = job(attempts=1, token=20, life=2, completed_at=stamp(5.1))
    return history(
        effects=[
            start(A, 1.0, 10),
            end(A, 2.0, 10, how="CancelledError"),
            start(A, 4.0, 20, life=2),
            end(A, 5.0, 20, life=2),
        ],
        stories=[
            Story(
                record, [attempt(Outcome.CANCELLED, 0.9, 2.1), attempt(Outcome.COMPLETED, 3.9, 5.1, life=2)]
            )
        ],
        sightings=[
            Sighting(A, 1, Status.CANCELLED, 10, ns(2.5)),
            Sighting(A, 2, Status.COMPLETED, 20, ns(5.5)),
        ],
        processes=[],
    )


def lost_primary(*, at: float) -> History:
    """What was written just before the loss is not known to the next primary: the body runs twice."""
    record = job(attempts=1, token=20, completed_at=stamp(9.1))
    return history(
        effects=[start(A, 3.0, 10), start(A, 5.0, 20, pid=2), end(A, 6.0, 10), end(A, 9.0, 20, pid=2)],
        stories=[Story(record, [attempt(Outcome.COMPLETED, 4.9, 9.1, "w2")])],
        sightings=[],
        processes=[],
        losses=[ns(at)],
    )


SOUND: dict[str, Callable[[], History]] = {
    "killed, then completed": history,
    "frozen past its lease, and elsewhere meanwhile": lambda: frozen(2.0, 6.0),
    "stopped twice with hardly a pause between": lambda: replace(
        frozen(2.0, 6.0),
        processes=[
            happened(Happening.STOPPED, 2.0),
            happened(Happening.CONTINUED, 3.2),
            happened(Happening.STOPPED, 3.4),
            happened(Happening.CONTINUED, 6.0),
        ],
    ),
    "one after the other under a limit": lambda: limited((1, 2), (2.1, 3), (3, 4)),
    "two at once under a limit of two": lambda: limited((1, 3), (2, 4), (3.1, 5), limit=2),
    "cancelled before it began": cancelled,
    "cancelled while it ran": lambda: replace(
        cancelled(start(A, 1.0, 10), end(A, 1.9, 10, how="CancelledError"), answer=Cancelled.REQUESTED),
        stories=[
            Story(
                job(status=Status.CANCELLED, token=10, completed_at=stamp(2.0)),
                [attempt(Outcome.CANCELLED, 0.9, 2.0)],
            )
        ],
    ),
    "three crashes": lambda: dead("worker lost x3: killed by SIGKILL", Outcome.CRASHED, times=3),
    "three crashes of one that should have completed": lambda: dead(
        "worker lost x3", Outcome.CRASHED, times=3, expected=Status.COMPLETED
    ),
    "retries used up": lambda: dead("error", Outcome.FAILED, times=2, max_retries=1),
    "two lives": twice_alive,
    "rolled back with its primary": lambda: lost_primary(at=5.2),
    "not known whether it was stored": lambda: history(told=[Told(B, Answer.UNKNOWN, 0)]),
    "deduplicated": lambda: history(told=[Told(A, Answer.ACCEPTED, 0), Told(B, Answer.REFUSED, 0)]),
    "removed on purpose": lambda: history(
        told=[Told(A, Answer.ACCEPTED, 0), Told(B, Answer.ACCEPTED, 0)], pruned=frozenset({B})
    ),
}


@pytest.mark.parametrize("made", SOUND.values(), ids=SOUND.keys())
def test_a_sound_history_has_no_violation(made: Callable[[], History]) -> None:
    assert [str(violation) for violation in judge(made()).violations] == []


LIES: dict[str, tuple[str, Callable[[], History]]] = {
    "an accepted job is not there": (
        "accepted job lost",
        lambda: history(told=[Told(A, Answer.ACCEPTED, 0), Told(B, Answer.ACCEPTED, 0)]),
    ),
    "a refused job is there": ("refused job exists", lambda: history(told=[Told(A, Answer.REFUSED, 0)])),
    "a body ran of a job that is not there": (
        "body without a job",
        lambda: replace(history(), effects=[*history().effects, start(B, 1.0, 5), end(B, 2.0, 5)]),
    ),
    "a job has not ended": ("not ended", lambda: with_record(history(), status=Status.RUNNING)),
    "a job ended otherwise than its kind does": (
        "unexpected end",
        lambda: dead("error", Outcome.FAILED, times=2, max_retries=1, expected=Status.COMPLETED),
    ),
    "two bodies at once": (
        "overlap",
        lambda: replace(history(), processes=[happened(Happening.GONE, 2.6)]),
    ),
    "two bodies at once, the first goes on for ever": ("overlap", lambda: replace(history(), processes=[])),
    "two bodies at once, the owner was stopped for less than its lease": (
        "overlap",
        lambda: frozen(4.5, 5.6),
    ),
    "two bodies at once, the owner was stopped later": ("overlap", lambda: frozen(5.6, 6.9)),
    "two bodies at once, another process was stopped": (
        "overlap",
        lambda: replace(
            frozen(2.0, 6.0),
            processes=[happened(Happening.STOPPED, 2.0, pid=9), happened(Happening.CONTINUED, 6.0, pid=9)],
        ),
    ),
    "two bodies at once, long before the primary was lost": ("overlap", lambda: lost_primary(at=20.0)),
    "a token that does not grow": (
        "token does not grow",
        lambda: replace(
            history(), effects=[start(A, 1.0, 30), start(A, 2.0, 20, pid=2), end(A, 3.0, 20, pid=2)]
        ),
    ),
    "a terminal state changed": (
        "end changed",
        lambda: history(sightings=[Sighting(A, 1, Status.CANCELLED, 20, ns(3.5))]),
    ),
    "ended twice under two tokens": (
        "end changed",
        lambda: history(sightings=[Sighting(A, 1, Status.COMPLETED, 15, ns(3.5))]),
    ),
    "a body began after the end, by its token": (
        "start after the end",
        lambda: replace(
            history(), effects=[*history().effects, start(A, 5.0, 30, pid=2), end(A, 6.0, 30, pid=2)]
        ),
    ),
    "a body began after the end was seen": (
        "start after the end",
        lambda: replace(
            with_record(history(), token=40), effects=[*history().effects, start(A, 5.0, 30, pid=2)]
        ),
    ),
    "completed, and no body ran under its token": (
        "completed without a body",
        lambda: with_record(history(sightings=[]), token=25),
    ),
    "completed, and its body raised": (
        "completed without a return",
        lambda: replace(
            history(), effects=[*history().effects[:2], end(A, 3.0, 20, pid=2, how="ValueError")]
        ),
    ),
    "completed, and its body never ended": (
        "completed without a return",
        lambda: replace(history(), effects=history().effects[:2]),
    ),
    "completed before its body ended": (
        "body after its job",
        lambda: with_record(history(), completed_at=stamp(2.5)),
    ),
    "seen completed before its body ended": (
        "body after its job",
        lambda: history(sightings=[Sighting(A, 1, Status.COMPLETED, 20, ns(2.5))], storage_us=None),
    ),
    "an attempt too many": ("counter", lambda: with_record(history(), attempts=2)),
    "a crash that is not in the history": ("counter", lambda: with_record(history(), crashes=2)),
    "completed twice": (
        "counter",
        lambda: with_history(
            with_record(history(), attempts=2),
            *history().stories[0].history,
            attempt(Outcome.COMPLETED, 1.9, 3.1, "w2"),
        ),
    ),
    "more attempts than allowed": (
        "too many attempts",
        lambda: dead("error", Outcome.FAILED, times=3, max_retries=1),
    ),
    "more crashes than allowed": (
        "too many crashes",
        lambda: dead("worker lost x4", Outcome.CRASHED, times=4),
    ),
    "given up after fewer crashes": (
        "given up too soon",
        lambda: dead("worker lost x2", Outcome.CRASHED, times=2),
    ),
    "given up after fewer attempts": (
        "given up too soon",
        lambda: dead("error", Outcome.FAILED, times=2, max_retries=3),
    ),
    "a start that the history does not tell": (
        "start not told",
        lambda: with_record(with_history(history(), history().stories[0].history[1]), crashes=0),
    ),
    "an end that no body said": (
        "end not seen",
        lambda: with_record(
            with_history(
                history(),
                attempt(Outcome.CRASHED, 0.9, 1.8),
                attempt(Outcome.FAILED, 1.85, 1.9, "w2"),
                attempt(Outcome.COMPLETED, 1.9, 3.1, "w2"),
            ),
            attempts=2,
        ),
    ),
    "a crash is charged and nobody died": (
        "crash without ground",
        lambda: replace(
            history(),
            effects=[start(A, 1.0, 10), end(A, 1.5, 10), start(A, 2.0, 20, pid=2), end(A, 3.0, 20, pid=2)],
            processes=[],
        ),
    ),
    "a crash is charged for a death long before": (
        "crash without ground",
        lambda: replace(
            history(),
            effects=[start(A, 1.0, 10), end(A, 1.5, 10), start(A, 2.0, 20, pid=2), end(A, 3.0, 20, pid=2)],
            processes=[happened(Happening.GONE, -1.0)],
        ),
    ),
    "a body began after its cancel was answered": (
        "start after a cancel",
        lambda: cancelled(start(A, 2.5, 10), end(A, 2.6, 10)),
    ),
    "cancelled by the answer, and not in the end": (
        "cancel lost",
        lambda: cancelled(status=Status.EXPIRED),
    ),
    "a cancel that was taken and forgotten": (
        "cancel lost",
        lambda: cancelled(status=Status.EXPIRED, answer=Cancelled.REQUESTED),
    ),
    "more of a key at once than its limit": ("limit exceeded", lambda: limited((1, 3), (2.5, 4))),
    "three at once under a limit of two": (
        "limit exceeded",
        lambda: limited((1, 5), (2, 6), (3, 4), limit=2),
    ),
    "more of a task at once than max_concurrent": (
        "limit exceeded",
        lambda: replace(limited((1, 3), (2.5, 4), limit=9), max_concurrent={"nap": 1}),
    ),
    "counters that are not true": ("counters", lambda: history(told_counts={Status.COMPLETED: 2})),
    "something is left": ("left over", lambda: history(leftovers=["permits in use"])),
}


@pytest.mark.parametrize(("rule", "made"), LIES.values(), ids=LIES.keys())
def test_a_lie_is_found(rule: str, made: Callable[[], History]) -> None:
    found = judge(made()).violations
    assert rule in {violation.rule for violation in found}, [str(violation) for violation in found]


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule not in MARK_RULES], ids=lambda rule: rule.__name__
)
def test_every_rule_can_find_something(rule: Callable[[Index], Iterator[Violation]]) -> None:
    assert any(list(rule(Index(made()))) for _, made in LIES.values())


def test_an_excused_overlap_is_counted() -> None:
    assert judge(frozen(2.0, 6.0)).excused == 1
    assert judge(history()).excused == 0


def test_what_a_lost_primary_took_along_is_counted() -> None:
    assert judge(lost_primary(at=5.2)).rolled_back == 1


def test_starts_and_re_runs_are_counted() -> None:
    verdict = judge(history())
    assert (verdict.starts, verdict.reruns) == (2, 1)


def test_a_body_that_died_with_its_process_ended_when_it_was_killed() -> None:
    """Not when that was seen, which is later."""
    late = replace(history(), processes=[happened(Happening.KILLED, 1.5), happened(Happening.GONE, 2.9)])
    assert rules(late) == set()


def test_a_body_beside_one_that_kills_their_process_ended_with_it() -> None:
    other = replace(history(), processes=[happened(Happening.GONE, 2.6)])
    killer = [start(B, 1.0, 5), end(B, 1.5, 5, how=DIES)]
    assert "overlap" in rules(other)
    assert "overlap" not in rules(replace(other, effects=[*other.effects, *killer]))


def test_a_violation_brings_its_evidence() -> None:
    found = judge(replace(history(), processes=[happened(Happening.GONE, 2.6)])).violations
    [text] = [str(violation) for violation in found if violation.rule == "overlap"]
    assert "two bodies at once for 0.600 s, tokens 10 and 20" in text
    assert "start 1.000 to 2.600 (said no end) in w1[1], token 10" in text
    assert "record: nap COMPLETED life 1 token 20 attempts 1 crashes 1" in text
