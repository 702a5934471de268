"""How a body ended, as a value: what it raised, seen together with what had been asked of it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from msgspec import Struct

from fluxmesh.codec import encode_result
from fluxmesh.context import carried
from fluxmesh.job import JobError, Outcome
from fluxmesh.outcome import DeadLetter, End, JobInterrupted, RetryAfter, Snooze, checked_delay_s
from fluxmesh.worker.failure import describe
from fluxmesh.worker.runs import Run

NO_RESULT: Final = "result cannot be encoded"
MAX_REASON_CHARS: Final = 500
_STOPPED: Final = (asyncio.CancelledError, JobInterrupted)


class Raised(Struct, frozen=True):
    """What a body raised, as a value. `said`: the end that it asked for by Snooze, RetryAfter or DeadLetter;
    `stopped`: it is what stops bodies."""

    error: JobError | None
    said: End | None = None
    stopped: bool = False


NEVER_BEGUN: Final = Raised(JobError("JobInterrupted", "the body was stopped before it began"), stopped=True)


def raised(run: Run, error: BaseException) -> End:
    """The end of a run whose body raised."""
    if run.overdue:
        return timed_out(run, describe(error))
    return judged(run, seen(error))


def seen(error: BaseException) -> Raised:
    """The exception as a value, wherever it was raised."""
    said = _said(error)
    if said is not None:
        return Raised(said.error, said)
    return Raised(describe(error), stopped=isinstance(error, _STOPPED))


def judged(run: Run, raised: Raised) -> End:
    """What the body raised, seen together with what had been asked of it.

    Past its hard timeout a run is a timeout whatever the body did. Before that, what a body says by
    Snooze, RetryAfter or DeadLetter stands. Else: raised after the soft timeout is a timeout, raised after
    a cancel a cancellation; a body stopped because its worker ends, or lost the job, was interrupted; and
    everything else, an error of its own while it was being stopped included, is a failure.
    """
    if run.overdue:
        return timed_out(run, raised.error)
    if raised.said is not None:
        return raised.said
    if run.timed_out:
        return timed_out(run, raised.error)
    if run.cancelled:
        return End(Outcome.CANCELLED, error=raised.error)
    if (run.interrupted or run.lost) and raised.stopped:
        return End(Outcome.INTERRUPTED)
    return End(Outcome.FAILED, error=raised.error)


def killed(run: Run) -> End:
    """The end of a run whose process was killed, because its body did not stop when it was asked to."""
    if run.timed_out:
        return timed_out(run, None)
    if run.cancelled:
        return End(
            Outcome.CANCELLED, error=JobError("JobInterrupted", "killed: it did not stop when told to")
        )
    return End(Outcome.INTERRUPTED)


def crashed(what: str, how: str) -> End:
    """The end of a run whose process ended by itself, or was killed for what it did: a crash of the job."""
    return End(Outcome.CRASHED, error=JobError("WorkerLost", f"{what}: {how}"), reason=how)


def _said(error: BaseException) -> End | None:
    """What the body asked for by raising one of the three outcomes."""
    try:
        if isinstance(error, Snooze):
            return End(Outcome.SNOOZED, delay_s=checked_delay_s("Snooze", error.seconds))
        if isinstance(error, RetryAfter):
            delay_s = checked_delay_s("RetryAfter", error.seconds)
            return End(Outcome.FAILED, error=describe(error), delay_s=delay_s)
        if isinstance(error, DeadLetter):
            reason = carried(str(error.reason)[:MAX_REASON_CHARS])
            return End(Outcome.GIVEN_UP, error=describe(error), reason=reason)
    except Exception:  # a subclass may have lost its fields: then it is a failure like others
        return None
    return None


def timed_out(run: Run, where: JobError | None) -> End:
    """A timeout, with the place where the body was stopped, if it was."""
    message = f"ran longer than its timeout of {run.plan.timeout_s:g} s"
    if where is None:
        message += " and could not be stopped in time"
        return End(Outcome.TIMEOUT, error=JobError("JobTimeout", message))
    return End(Outcome.TIMEOUT, error=JobError("JobTimeout", message, where.frames, where.text))


def returned(value: Any, limit_bytes: int) -> End:
    """The end of a run whose body returned."""
    try:
        return End(Outcome.COMPLETED, encode_result(value, limit=limit_bytes))
    except Exception as error:  # the value's own methods may raise anything
        return without_result(error)


def without_result(error: Exception) -> End:
    """The body returned something that cannot be carried. Its work is done: no retry."""
    return End(Outcome.GIVEN_UP, error=describe(error), reason=NO_RESULT)


def undecodable(error: Exception) -> End:
    """Stored bytes that are no job: given up at once, the bytes kept."""
    return End(Outcome.UNDECODABLE, error=JobError("Undecodable", carried(str(error)[:2_000])))
