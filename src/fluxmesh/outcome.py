"""What becomes of a job when a start of it has ended. Pure: values and a random source in, a value out.

A body says how it wants to end by returning, raising, or raising one of `Snooze`, `RetryAfter`,
`DeadLetter`. The worker turns what happened into an `End`; `decide` turns that into a `Transition`;
storage applies the transition and decides nothing but the cancel flag (any end other than a normal
return of a job whose flag stands becomes CANCELLED).
"""

from __future__ import annotations

import math
import random
from enum import IntEnum
from typing import Final, TypeGuard

from msgspec import Struct

from fluxmesh.backoff import Backoff, retry_delay_s
from fluxmesh.errors import InvalidOption, shown
from fluxmesh.job import JobError, Outcome, Status, fingerprint

MAX_DELAY_S: Final = 10 * 366 * 86_400.0  # ten years


def is_number(value: object) -> TypeGuard[int | float]:
    """True for a finite int or float. (`math.isfinite` fails for an int that no float can hold.)"""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def checked_delay_s(field: str, seconds: float) -> float:
    """A delay that is a finite number of seconds in 0..MAX_DELAY_S, else InvalidOption."""
    if not is_number(seconds):
        hint = "seconds as a number, such as 0.5 or 90"
        raise InvalidOption(field, f"{shown(seconds)} is not a number of seconds", hint=hint)
    if not 0 <= seconds <= MAX_DELAY_S:
        raise InvalidOption(field, f"{shown(seconds)} seconds is out of range", hint="0 s to 10 years")
    return float(seconds)


class Snooze(Exception):
    """Raised by a body: run me again in `seconds`; charges nothing."""

    def __init__(self, seconds: float) -> None:
        self.seconds = checked_delay_s("Snooze", seconds)
        super().__init__(f"snooze {seconds} s")


class RetryAfter(Exception):
    """Raised by a body: this attempt failed, try again in `seconds`. Charged as an attempt."""

    def __init__(self, seconds: float, message: str = "") -> None:
        self.seconds = checked_delay_s("RetryAfter", seconds)
        super().__init__(message or f"retry after {seconds} s")


class DeadLetter(Exception):
    """Raised by a body: give this job up now, with a reason."""

    def __init__(self, reason: str) -> None:
        self.reason = str(reason)
        super().__init__(self.reason)


class JobTimeout(BaseException):
    """Raised inside a body whose soft timeout has passed.

    Not an `Exception`: code that swallows every error of its own must not swallow this one.
    """


class JobInterrupted(BaseException):
    """Raised inside a body on a thread whose worker must stop now, or whose job was cancelled or lost."""


class Charge(IntEnum):
    """Which counter an end is charged to."""

    NOTHING = 0
    ATTEMPT = 1
    SNOOZE = 2
    INTERRUPTION = 3
    CRASH = 4


class End(Struct, frozen=True):
    """How a start ended, as the worker or the reaper saw it. Exactly one of the outcomes.

    `result` goes with COMPLETED, `delay_s` with SNOOZED, FAILED (for RetryAfter) and INTERRUPTED (of no
    use to start it again before), `error` with the rest.
    """

    outcome: Outcome
    result: bytes | None = None
    error: JobError | None = None
    delay_s: float | None = None
    reason: str | None = None


class Counters(Struct, frozen=True):
    """What was charged to this life before the end at hand."""

    attempts: int = 0
    crashes: int = 0
    snoozes: int = 0
    interruptions: int = 0


class Policy(Struct, frozen=True):
    """The limits that apply to one job: submission, else task, else defaults. None = no cap."""

    max_retries: int = 3
    max_crashes: int = 3
    max_snoozes: int | None = None
    max_interruptions: int | None = None
    backoff: Backoff = Backoff()


class Transition(Struct, frozen=True):
    """What storage shall do with a running job.

    `status` PENDING means back to its old place; SCHEDULED needs `delay_s`. `reason` says why a dead
    letter was given up.
    """

    status: Status
    outcome: Outcome
    charge: Charge = Charge.NOTHING
    result: bytes | None = None
    error: JobError | None = None
    delay_s: float = 0.0
    reason: str | None = None
    fingerprint: str | None = None


def _dead(task: str, end: End, charge: Charge, reason: str) -> Transition:
    error = end.error or JobError(end.outcome.value, reason)
    return Transition(
        status=Status.DEAD_LETTER,
        outcome=end.outcome,
        charge=charge,
        error=error,
        reason=reason,
        fingerprint=fingerprint(task, error),
    )


def _failed(task: str, end: End, counters: Counters, policy: Policy, rng: random.Random) -> Transition:
    made = counters.attempts + 1
    if made > policy.max_retries:
        reason = "timeout" if end.outcome is Outcome.TIMEOUT else "error"
        return _dead(task, end, Charge.ATTEMPT, reason)
    delay_s = retry_delay_s(policy.backoff, made, rng) if end.delay_s is None else end.delay_s
    return Transition(Status.SCHEDULED, end.outcome, Charge.ATTEMPT, error=end.error, delay_s=delay_s)


def _crashed(task: str, end: End, counters: Counters, policy: Policy, rng: random.Random) -> Transition:
    crashes = counters.crashes + 1
    if crashes >= policy.max_crashes:
        how = f": {end.reason}" if end.reason else ""
        return _dead(task, end, Charge.CRASH, f"worker lost x{crashes}{how}")
    if crashes == 1:
        return Transition(Status.PENDING, end.outcome, Charge.CRASH, error=end.error)
    delay_s = retry_delay_s(policy.backoff, crashes - 1, rng)
    return Transition(Status.SCHEDULED, end.outcome, Charge.CRASH, error=end.error, delay_s=delay_s)


def decide(task: str, end: End, counters: Counters, policy: Policy, rng: random.Random) -> Transition:
    """The transition that an end calls for. Total: every outcome has one."""
    match end.outcome:
        case Outcome.COMPLETED:
            return Transition(Status.COMPLETED, end.outcome, Charge.ATTEMPT, result=end.result)
        case Outcome.FAILED | Outcome.TIMEOUT:
            return _failed(task, end, counters, policy, rng)
        case Outcome.SNOOZED:
            if policy.max_snoozes is not None and counters.snoozes >= policy.max_snoozes:
                return _dead(task, end, Charge.SNOOZE, f"snoozed more than {policy.max_snoozes} times")
            return Transition(Status.SCHEDULED, end.outcome, Charge.SNOOZE, delay_s=end.delay_s or 0.0)
        case Outcome.INTERRUPTED:
            cap = policy.max_interruptions
            if cap is not None and counters.interruptions >= cap:
                return _dead(task, end, Charge.INTERRUPTION, f"interrupted more than {cap} times")
            if end.delay_s is not None:
                return Transition(Status.SCHEDULED, end.outcome, Charge.INTERRUPTION, delay_s=end.delay_s)
            return Transition(Status.PENDING, end.outcome, Charge.INTERRUPTION)
        case Outcome.CRASHED:
            return _crashed(task, end, counters, policy, rng)
        case Outcome.CANCELLED:
            return Transition(Status.CANCELLED, end.outcome, Charge.NOTHING, error=end.error)
        case Outcome.GIVEN_UP:
            return _dead(task, end, Charge.ATTEMPT, end.reason or "given up")
        case Outcome.UNDECODABLE:
            return _dead(task, end, Charge.NOTHING, "undecodable")
