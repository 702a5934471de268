"""How a body ended, as a value: what it raised, seen together with what had been asked of it."""

from __future__ import annotations

import asyncio
from typing import Final

from fluxmesh.context import carried
from fluxmesh.job import JobError, Outcome
from fluxmesh.outcome import DeadLetter, End, JobInterrupted, RetryAfter, Snooze, checked_delay_s
from fluxmesh.worker.failure import describe
from fluxmesh.worker.runs import Run

NO_RESULT: Final = "result cannot be encoded"
MAX_REASON_CHARS: Final = 500
_STOPPED: Final = (asyncio.CancelledError, JobInterrupted)


def raised(run: Run, error: BaseException) -> End:
    """The end of a run whose body raised.

    Past its hard timeout a run is a timeout whatever the body did. Before that, what a body says by
    Snooze, RetryAfter or DeadLetter stands. Else: raised after the soft timeout is a timeout, raised after
    a cancel a cancellation; a body stopped because its worker ends, or lost the job, was interrupted; and
    everything else, an error of its own while it was being stopped included, is a failure.
    """
    if run.overdue:
        return timed_out(run, error)
    said = _said(error)
    if said is not None:
        return said
    if run.timed_out:
        return timed_out(run, error)
    if run.cancelled:
        return End(Outcome.CANCELLED, error=describe(error))
    if (run.interrupted or run.lost) and isinstance(error, _STOPPED):
        return End(Outcome.INTERRUPTED)
    return End(Outcome.FAILED, error=describe(error))


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


def timed_out(run: Run, error: BaseException | None) -> End:
    """A timeout, with the place where the body was stopped, if it was."""
    message = f"ran longer than its timeout of {run.plan.timeout_s:g} s"
    if error is None:
        message += " and could not be stopped in time"
        return End(Outcome.TIMEOUT, error=JobError("JobTimeout", message))
    where = describe(error)
    return End(Outcome.TIMEOUT, error=JobError("JobTimeout", message, where.frames, where.text))


def without_result(error: Exception) -> End:
    """The body returned something that cannot be carried. Its work is done: no retry."""
    return End(Outcome.GIVEN_UP, error=describe(error), reason=NO_RESULT)


def undecodable(error: Exception) -> End:
    """Stored bytes that are no job: given up at once, the bytes kept."""
    return End(Outcome.UNDECODABLE, error=JobError("Undecodable", carried(str(error)[:2_000])))
