"""`decide`: every way in which a start can end, and every cap."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxmesh.backoff import Backoff
from fluxmesh.errors import InvalidOption
from fluxmesh.job import TERMINAL, TRANSITIONS, JobError, Outcome, Status, fingerprint, is_legal
from fluxmesh.outcome import (
    MAX_DELAY_S,
    Charge,
    Counters,
    DeadLetter,
    End,
    JobInterrupted,
    JobTimeout,
    Policy,
    RetryAfter,
    Snooze,
    Transition,
    checked_delay_s,
    decide,
)

ERROR = JobError("ValueError", "no", ("app.py:1 run",))
NOTHING_YET = Counters()
PLAIN = Policy(backoff=Backoff("fixed", 5.0, 60.0, "none"))
counters = st.builds(Counters, *[st.integers(0, 10)] * 4)
caps = st.one_of(st.none(), st.integers(0, 5))
policies = st.builds(
    Policy,
    max_retries=st.integers(0, 5),
    max_crashes=st.integers(1, 5),
    max_snoozes=caps,
    max_interruptions=caps,
)


def decided(
    outcome: Outcome, counted: Counters = NOTHING_YET, policy: Policy = PLAIN, **end: object
) -> Transition:
    return decide("work", End(outcome, **end), counted, policy, random.Random(1))  # type: ignore[arg-type]


@given(
    outcome=st.sampled_from(Outcome), counted=counters, policy=policies, delay=st.none() | st.floats(0, 100)
)
def test_every_end_has_a_legal_transition(
    outcome: Outcome, counted: Counters, policy: Policy, delay: float | None
) -> None:
    made = decided(outcome, counted, policy, error=ERROR, delay_s=delay)
    assert is_legal(Status.RUNNING, made.status)
    assert made.outcome is outcome
    assert made.delay_s >= 0
    assert (made.status is Status.DEAD_LETTER) == (made.reason is not None) == (made.fingerprint is not None)


def test_between_them_the_ends_reach_every_state_the_table_allows() -> None:
    spent = Counters(99, 99, 99, 99)
    reached = {decided(outcome, counted).status for outcome in Outcome for counted in (Counters(), spent)}
    assert reached == set(TRANSITIONS[Status.RUNNING])


def test_a_return_completes_and_charges_an_attempt() -> None:
    made = decided(Outcome.COMPLETED, result=b"\x01")
    assert made == Transition(Status.COMPLETED, Outcome.COMPLETED, Charge.ATTEMPT, result=b"\x01")


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.TIMEOUT])
class TestFailure:
    def test_a_failure_is_tried_again_after_the_delay_of_its_attempt(self, outcome: Outcome) -> None:
        policy = Policy(backoff=Backoff("exponential", 1.0, 60.0, "none"))
        delays = [decided(outcome, Counters(attempts=k), policy, error=ERROR).delay_s for k in range(3)]
        assert delays == [1.0, 2.0, 4.0]
        made = decided(outcome, error=ERROR)
        assert (made.status, made.charge, made.error) == (Status.SCHEDULED, Charge.ATTEMPT, ERROR)

    @pytest.mark.parametrize("retries", [0, 1, 3])
    def test_max_retries_n_allows_n_plus_one_attempts(self, outcome: Outcome, retries: int) -> None:
        policy = Policy(max_retries=retries)
        statuses = [
            decided(outcome, Counters(attempts=k), policy, error=ERROR).status for k in range(retries + 1)
        ]
        assert statuses == [Status.SCHEDULED] * retries + [Status.DEAD_LETTER]

    def test_the_dead_letter_tells_an_error_from_a_timeout(self, outcome: Outcome) -> None:
        made = decided(outcome, Counters(attempts=3), error=ERROR)
        assert made.reason == ("timeout" if outcome is Outcome.TIMEOUT else "error")
        assert (made.error, made.fingerprint) == (ERROR, fingerprint("work", ERROR))

    def test_retry_after_sets_the_delay_and_nothing_else(self, outcome: Outcome) -> None:
        assert decided(outcome, error=ERROR, delay_s=77.0).delay_s == 77.0
        assert decided(outcome, error=ERROR, delay_s=0.0).delay_s == 0.0
        assert decided(outcome, Counters(attempts=3), error=ERROR, delay_s=77.0).status is Status.DEAD_LETTER

    def test_crashes_snoozes_and_interruptions_are_no_attempts(self, outcome: Outcome) -> None:
        counted = Counters(attempts=0, crashes=2, snoozes=99, interruptions=99)
        assert decided(outcome, counted, error=ERROR).status is Status.SCHEDULED


class TestCrash:
    def test_the_first_crash_is_ready_at_once_and_later_ones_wait(self) -> None:
        policy = Policy(max_crashes=4, backoff=Backoff("exponential", 1.0, 60.0, "none"))
        made = [decided(Outcome.CRASHED, Counters(crashes=n), policy) for n in range(4)]
        assert [one.status for one in made] == [
            Status.PENDING,
            Status.SCHEDULED,
            Status.SCHEDULED,
            Status.DEAD_LETTER,
        ]
        assert [one.delay_s for one in made[1:3]] == [1.0, 2.0]
        assert {one.charge for one in made} == {Charge.CRASH}

    def test_the_third_crash_is_a_dead_letter_with_its_reason(self) -> None:
        made = decided(Outcome.CRASHED, Counters(crashes=2), reason="killed by signal 9")
        assert made.reason == "worker lost x3: killed by signal 9"
        assert made.error is not None

    def test_max_crashes_1_is_never_started_again(self) -> None:
        assert decided(Outcome.CRASHED, policy=Policy(max_crashes=1)).status is Status.DEAD_LETTER

    def test_attempts_do_not_count_as_crashes(self) -> None:
        assert decided(Outcome.CRASHED, Counters(attempts=99)).status is Status.PENDING


class TestSnooze:
    def test_a_snooze_comes_back_later_and_charges_no_attempt(self) -> None:
        made = decided(Outcome.SNOOZED, delay_s=9.0)
        assert made == Transition(Status.SCHEDULED, Outcome.SNOOZED, Charge.SNOOZE, delay_s=9.0)

    def test_without_a_cap_a_job_may_snooze_for_ever(self) -> None:
        assert decided(Outcome.SNOOZED, Counters(snoozes=10**9), delay_s=1.0).status is Status.SCHEDULED

    def test_a_cap_of_n_allows_n_snoozes(self) -> None:
        policy = Policy(max_snoozes=2)
        made = [decided(Outcome.SNOOZED, Counters(snoozes=n), policy, delay_s=1.0) for n in range(3)]
        assert [one.status for one in made] == [Status.SCHEDULED, Status.SCHEDULED, Status.DEAD_LETTER]
        assert made[2].reason == "snoozed more than 2 times"


class TestInterruption:
    def test_an_interrupted_job_goes_back_to_its_place_uncharged(self) -> None:
        made = decided(Outcome.INTERRUPTED, Counters(attempts=99, interruptions=10**9))
        assert made == Transition(Status.PENDING, Outcome.INTERRUPTED, Charge.INTERRUPTION)

    def test_one_that_cannot_start_before_a_delay_comes_back_after_it(self) -> None:
        made = decided(Outcome.INTERRUPTED, Counters(attempts=99), delay_s=4.0)
        assert made == Transition(Status.SCHEDULED, Outcome.INTERRUPTED, Charge.INTERRUPTION, delay_s=4.0)

    def test_a_cap_of_n_allows_n_interruptions(self) -> None:
        policy = Policy(max_interruptions=1)
        made = [decided(Outcome.INTERRUPTED, Counters(interruptions=n), policy) for n in range(2)]
        assert [one.status for one in made] == [Status.PENDING, Status.DEAD_LETTER]


def test_a_cancelled_job_is_charged_nothing() -> None:
    assert decided(Outcome.CANCELLED) == Transition(Status.CANCELLED, Outcome.CANCELLED)


def test_a_job_given_up_says_why() -> None:
    made = decided(Outcome.GIVEN_UP, reason="no such customer")
    assert (made.status, made.charge, made.reason) == (Status.DEAD_LETTER, Charge.ATTEMPT, "no such customer")
    assert decided(Outcome.GIVEN_UP).reason == "given up"


def test_an_undecodable_job_is_a_dead_letter_at_once() -> None:
    made = decided(Outcome.UNDECODABLE, error=ERROR)
    assert (made.status, made.charge, made.reason) == (Status.DEAD_LETTER, Charge.NOTHING, "undecodable")


@given(counted=counters, policy=policies, seed=st.integers(0, 100))
def test_any_sequence_of_failures_comes_to_an_end(counted: Counters, policy: Policy, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(policy.max_retries + policy.max_crashes + 1):
        outcome = rng.choice([Outcome.FAILED, Outcome.TIMEOUT, Outcome.CRASHED])
        made = decide("work", End(outcome, error=ERROR), counted, policy, rng)
        if made.status in TERMINAL:
            return
        counted = Counters(
            counted.attempts + (made.charge is Charge.ATTEMPT),
            counted.crashes + (made.charge is Charge.CRASH),
        )
    pytest.fail("it is tried for ever")


class TestDelays:
    @pytest.mark.parametrize("seconds", [0, 0.5, 3, MAX_DELAY_S])
    def test_a_delay_is_seconds_up_to_ten_years(self, seconds: float) -> None:
        assert checked_delay_s("delay", seconds) == seconds

    @pytest.mark.parametrize(
        "seconds",
        [
            -1,
            -0.001,
            math.nan,
            math.inf,
            -math.inf,
            MAX_DELAY_S + 1,
            True,
            "5",
            None,
            10**400,
            pytest.param(10**5_000, id="5,000 digits"),
            [1],
        ],
    )
    def test_anything_else_is_refused_by_name_in_a_short_message(self, seconds: object) -> None:
        with pytest.raises(InvalidOption) as caught:
            checked_delay_s("delay", seconds)  # type: ignore[arg-type]
        assert caught.value.field == "delay"
        assert len(str(caught.value)) < 300

    @pytest.mark.parametrize("raised", [Snooze, RetryAfter])
    def test_a_body_cannot_ask_for_an_impossible_delay(self, raised: type[Snooze] | type[RetryAfter]) -> None:
        assert raised(2.5).seconds == 2.5
        with pytest.raises(InvalidOption):
            raised(math.nan)


def test_what_stops_a_body_is_not_caught_by_its_own_except_exception() -> None:
    for raised in (JobTimeout, JobInterrupted):
        assert not issubclass(raised, Exception)
    assert DeadLetter("gone").reason == "gone"
    assert str(RetryAfter(1, "later")) == "later"
