"""Moves of a job that somebody owns, or that an operator touches: to its old place, to a later time, to an
end. Each changes the row, the counters and whatever hangs on the old place, in one step."""

from __future__ import annotations

from typing import Final

from fluxmesh.codec import append_history, encode_error
from fluxmesh.job import JobError, Outcome, Status
from fluxmesh.outcome import Charge, Transition
from fluxmesh.storage.sqlite import place
from fluxmesh.storage.sqlite.step import Row, Step

KEEP: Final = -1


def leave(step: Step, row: Row) -> None:
    """What follows from a job leaving the place where it is."""
    step.count(row.queue, row.tier, row.place, -1)
    if row.place == place.RUNNING:
        step.freed(row.task, row.concurrency_key)
    elif row.place == place.PARKED:
        step.lane_change(row.lane, row.queue, row.tier, -1)


def _write(
    step: Step,
    row: Row,
    *,
    to: int,
    lane: str,
    pos: int,
    token: int,
    seq: int = KEEP,
    tier: int = KEEP,
    life: int = KEEP,
    charge: Charge = Charge.NOTHING,
    fresh: bool = False,
    due_us: int | None = None,
    ended_us: int | None = None,
    result: bytes | None = None,
    history: bytes | None = None,
    error: JobError | None = None,
    reason: str | None = None,
    fingerprint: str | None = None,
    percent: float | None = None,
    message: str | None = None,
    cancel: int | None = None,
) -> None:
    """`fresh` starts the counters anew (a new life)."""
    leave(step, row)
    new_tier = row.tier if tier == KEEP else tier
    keep_run = to in (place.COMPLETED, place.DEAD_LETTER, place.CANCELLED, place.EXPIRED)
    step.db.execute(
        step.sql["step.move"],
        (
            to,
            lane,
            pos,
            row.seq if seq == KEEP else seq,
            new_tier,
            token,
            row.life if life == KEEP else life,
            0 if fresh else row.attempts + (charge is Charge.ATTEMPT),
            0 if fresh else row.crashes + (charge is Charge.CRASH),
            0 if fresh else row.snoozes + (charge is Charge.SNOOZE),
            0 if fresh else row.interruptions + (charge is Charge.INTERRUPTION),
            due_us,
            row.started_us if keep_run else None,
            ended_us,
            row.worker_id if keep_run else None,
            result,
            row.history if history is None else history,
            None if error is None else encode_error(error),
            reason,
            fingerprint,
            percent,
            message,
            cancel,
            # A job expires only before its first start.
            None if fresh or (history is not None and not keep_run) else row.expires_us,
            row.hops,
            row.rid,
        ),
    )
    step.count(row.queue, new_tier, to, 1)


def to_ready(
    step: Step,
    row: Row,
    *,
    token: int,
    history: bytes | None = None,
    charge: Charge = Charge.NOTHING,
    error: JobError | None = None,
    percent: float | None = None,
    message: str | None = None,
) -> None:
    """Back to its old place among the ready."""
    _write(
        step,
        row,
        to=place.READY,
        lane=place.ready_lane(row.tier, row.queue),
        pos=row.seq,
        token=token,
        charge=charge,
        due_us=row.due_us,
        history=history,
        error=error,
        percent=percent,
        message=message,
    )
    step.ready_again(row.queue, row.tier, row.task, row.slot, row.since_us)


def to_new_tier(step: Step, row: Row, tier: int) -> None:
    """Another tier with a new arrival number: ready if it waits or is held, still scheduled if it is that."""
    if row.place == place.SCHEDULED:
        assert row.due_us is not None
        _write(
            step,
            row,
            to=place.SCHEDULED,
            lane=str(tier),
            pos=row.pos,
            tier=tier,
            token=row.token,
            due_us=row.due_us,
        )
        step.scheduled(row.pos, row.queue, tier, row.task)
        return
    token = step.token_after(row.token) if row.place == place.HELD else row.token
    seq = step.next_seq()
    lane = place.ready_lane(tier, row.queue)
    _write(step, row, to=place.READY, lane=lane, pos=seq, seq=seq, tier=tier, token=token, due_us=row.due_us)
    step.ready_again(row.queue, tier, row.task, row.slot, row.since_us)


def to_new_life(step: Step, row: Row) -> None:
    """Replay: ready now, everything counted anew; id, token and history stay."""
    seq = step.next_seq()
    _write(
        step,
        row,
        to=place.READY,
        lane=place.ready_lane(row.tier, row.queue),
        pos=seq,
        seq=seq,
        token=row.token,
        life=row.life + 1,
        fresh=True,
        due_us=step.now_us,  # from when on this life waits
    )
    step.ready(row.queue, row.tier, row.task, slot=row.slot)


def to_later(
    step: Step,
    row: Row,
    *,
    token: int,
    due_us: int,
    history: bytes | None,
    charge: Charge,
    error: JobError | None,
    percent: float | None = None,
    message: str | None = None,
) -> None:
    _write(
        step,
        row,
        to=place.SCHEDULED,
        lane=str(row.tier),
        pos=due_us,
        token=token,
        charge=charge,
        due_us=due_us,
        history=history,
        error=error,
        percent=percent,
        message=message,
    )
    step.scheduled(due_us, row.queue, row.tier, row.task)


def to_end(
    step: Step,
    row: Row,
    status: Status,
    *,
    token: int,
    charge: Charge = Charge.NOTHING,
    history: bytes | None = None,
    result: bytes | None = None,
    error: JobError | None = None,
    reason: str | None = None,
    fingerprint: str | None = None,
    percent: float | None = None,
    message: str | None = None,
) -> None:
    _write(
        step,
        row,
        to=place.TERMINAL_PLACE[status],
        lane="",
        pos=step.now_us,
        token=token,
        charge=charge,
        due_us=row.due_us,
        ended_us=step.now_us,
        history=history,
        result=result,
        error=error,
        reason=reason,
        fingerprint=fingerprint,
        percent=100.0 if status is Status.COMPLETED else percent,
        message=message,
        cancel=row.cancel,
    )
    step.ended(row.id)


def apply(
    step: Step,
    row: Row,
    transition: Transition,
    *,
    token: int,
    percent: float | None = None,
    message: str | None = None,
) -> None:
    """Carry out a transition of a running job. While its cancel flag stands every end but COMPLETED is
    CANCELLED, for which nothing is charged."""
    status, outcome, charge = transition.status, transition.outcome, transition.charge
    if row.cancel and status is not Status.COMPLETED:
        status, outcome, charge = Status.CANCELLED, Outcome.CANCELLED, Charge.NOTHING
    history = append_history(
        row.history,
        life=row.life,
        attempt=row.attempts + 1,
        started_us=row.started_us,
        ended_us=step.now_us,
        worker_id=row.worker_id or "",
        outcome=outcome.value,
        error=transition.error,
    )
    percent = row.percent if percent is None else percent
    message = row.message if message is None else message
    if status is Status.PENDING:
        to_ready(
            step, row, token=token, history=history, charge=charge, error=transition.error,
            percent=percent, message=message,
        )  # fmt: skip
    elif status is Status.SCHEDULED:
        due_us = step.now_us + round(transition.delay_s * 1e6)
        to_later(
            step, row, token=token, due_us=due_us, history=history, charge=charge, error=transition.error,
            percent=percent, message=message,
        )  # fmt: skip
    else:
        to_end(
            step, row, status, token=token, charge=charge, history=history,
            result=transition.result if status is Status.COMPLETED else None,
            error=transition.error, reason=transition.reason if status is Status.DEAD_LETTER else None,
            fingerprint=transition.fingerprint if status is Status.DEAD_LETTER else None,
            percent=percent, message=message,
        )  # fmt: skip


def give_back(step: Step, row: Row, *, token: int) -> None:
    """An owned job that was not entered goes back to its place; if it was cancelled, or is past its time,
    that is its end."""
    if row.cancel:
        to_end(step, row, Status.CANCELLED, token=token)
    elif row.expires_us is not None and row.expires_us <= step.now_us:
        to_end(step, row, Status.EXPIRED, token=token)
    else:
        to_ready(step, row, token=token, percent=row.percent, message=row.message)


def row_of(values: tuple[object, ...]) -> Row:
    return Row(*values)  # type: ignore[arg-type]
