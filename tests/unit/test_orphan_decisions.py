"""What becomes of the jobs of a dead owner."""

from __future__ import annotations

import random

import msgspec
import pytest

from fluxmesh.codec import encode_options
from fluxmesh.config import Settings
from fluxmesh.job import JobOptions, Outcome, Status
from fluxmesh.outcome import Charge, Counters, Transition
from fluxmesh.scheduler.housekeeping import LEFT, STOPPED, decide_orphan
from fluxmesh.storage.values import Ground, OnDeath, Orphan, TaskSpec, WorkerRef
from fluxmesh.task import TaskRegistry, define

BASE = Orphan(
    id="job-1",
    token=7,
    worker=WorkerRef("w1", 3),
    ground=Ground.PROVEN,
    how="killed by SIGKILL",
    started=True,
    on_death=OnDeath.CRASH,
    task="t",
    options=None,
    spec=None,
    counters=Counters(),
)


def decided(registry: TaskRegistry | None = None, **changes: object) -> Transition | None:
    orphan = msgspec.structs.replace(BASE, **changes)
    reap = decide_orphan(orphan, Settings(), random.Random(1), registry)
    assert (reap.id, reap.token) == (orphan.id, orphan.token)
    return reap.transition


def charged(transition: Transition | None) -> tuple[Status, Outcome, Charge]:
    assert transition is not None
    return transition.status, transition.outcome, transition.charge


def test_a_held_job_goes_back_uncharged() -> None:
    assert decided(started=False) is None


def test_the_first_crash_is_charged_and_the_job_is_ready_at_once() -> None:
    transition = decided()
    assert charged(transition) == (Status.PENDING, Outcome.CRASHED, Charge.CRASH)
    assert transition is not None
    assert transition.error is not None
    assert transition.error.type == "WorkerLost"
    assert transition.error.message == "w1 (epoch 3): killed by SIGKILL"


def test_what_a_worker_still_owned_when_it_left_is_no_crash() -> None:
    """No body of it was running then: a claim whose answer came too late, or an end that nobody took."""
    assert charged(decided(how=LEFT)) == (Status.PENDING, Outcome.INTERRUPTED, Charge.INTERRUPTION)


def test_the_second_crash_waits() -> None:
    transition = decided(counters=Counters(crashes=1))
    assert charged(transition) == (Status.SCHEDULED, Outcome.CRASHED, Charge.CRASH)
    assert transition is not None
    assert transition.delay_s > 0


def test_the_third_crash_is_a_dead_letter_that_says_how() -> None:
    transition = decided(counters=Counters(crashes=2))
    assert charged(transition) == (Status.DEAD_LETTER, Outcome.CRASHED, Charge.CRASH)
    assert transition is not None
    assert transition.reason == "worker lost x3: killed by SIGKILL"


def test_without_words_the_ground_is_the_reason() -> None:
    transition = decided(how="", ground=Ground.LAPSED, counters=Counters(crashes=2))
    assert transition is not None
    assert transition.reason == "worker lost x3: lease lapsed"


def test_an_overdue_body_is_charged_a_timeout_and_no_crash() -> None:
    transition = decided(on_death=OnDeath.TIMEOUT)
    assert charged(transition) == (Status.SCHEDULED, Outcome.TIMEOUT, Charge.ATTEMPT)
    last = decided(on_death=OnDeath.TIMEOUT, counters=Counters(attempts=3))
    assert last is not None
    assert (last.status, last.reason) == (Status.DEAD_LETTER, "timeout")


@pytest.mark.parametrize("changes", [{"on_death": OnDeath.INTERRUPTED}, {"how": STOPPED}])
def test_marked_jobs_and_those_of_an_operators_stop_are_only_interrupted(changes: dict[str, object]) -> None:
    assert charged(decided(**changes)) == (Status.PENDING, Outcome.INTERRUPTED, Charge.INTERRUPTION)


def test_a_timeout_stands_even_when_the_operator_stopped_the_process() -> None:
    assert charged(decided(on_death=OnDeath.TIMEOUT, how=STOPPED))[1] is Outcome.TIMEOUT


def test_limits_come_from_the_job_then_its_registered_task_then_the_code_at_hand() -> None:
    spec = TaskSpec("t", options=JobOptions(max_crashes=1))
    assert charged(decided(spec=spec))[0] is Status.DEAD_LETTER
    own = encode_options(JobOptions(max_crashes=2))
    assert charged(decided(spec=spec, options=own))[0] is Status.PENDING

    registry = TaskRegistry()
    registry.add(define(len, "t", {"max_crashes": 1}))
    assert charged(decided(registry))[0] is Status.DEAD_LETTER
    assert charged(decided(registry, task="another"))[0] is Status.PENDING


@pytest.mark.parametrize(
    "blob",
    [
        b"\xff\x00\x13\x37",
        b"",
        b"\x91" * 2_000,
        msgspec.msgpack.encode([None, "fixed", float("nan")]),
        msgspec.msgpack.encode([None, "fixed", -5.0, 60.0]),
        msgspec.msgpack.encode([None, "fixed", float("inf"), 60.0]),
    ],
    ids=["bytes", "empty", "deep", "nan", "negative", "infinite"],
)
def test_odd_stored_options_never_keep_a_job_from_being_taken_back(blob: bytes) -> None:
    transition = decided(options=blob, counters=Counters(crashes=1))
    assert charged(transition) == (Status.SCHEDULED, Outcome.CRASHED, Charge.CRASH)
    assert transition is not None
    assert 0 < transition.delay_s <= 60
