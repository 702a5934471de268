"""A stored job as a record for doors, whatever storage it comes from.

What cannot be decoded is left out, and never an error: one bad row must not hide the good ones around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from fluxmesh import codec
from fluxmesh.job import Attempt, Job, JobError, JobOptions, Status
from fluxmesh.storage.values import OnDeath

QUEUE_PAUSED: Final = "queue paused"
NO_WORKER: Final = "a worker for its task"
_JUNK: Final = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
T = TypeVar("T")


class Full(Struct, frozen=True, gc=False):
    """Everything that is stored of a job. `place` is the backend's own number of where it stands; `paused`:
    whether its queue is."""

    id: str
    task: str
    queue: str
    tier: int
    place: int
    payload: bytes
    options: bytes | None
    attempts: int
    crashes: int
    snoozes: int
    interruptions: int
    life: int
    token: int
    percent: float | None
    message: str | None
    cancel: int | None
    on_death: int | None
    created_us: int
    due_us: int | None
    expires_us: int | None
    started_us: int | None
    ended_us: int | None
    worker_id: str | None
    waiting_for: str | None
    result: bytes | None
    error: bytes | None
    reason: str | None
    fingerprint: str | None
    unique_key: str | None
    idempotency_key: str | None
    concurrency_key: str | None
    concurrency_limit: int | None
    paused: int | None


def read_or(decode: Callable[[bytes | None], T], blob: bytes | None, otherwise: T) -> T:
    """What `decode` makes of a stored value; `otherwise` for junk."""
    try:
        return decode(blob)
    except _JUNK:
        return otherwise


def seconds(at_us: int | None) -> float | None:
    return None if at_us is None else at_us / 1e6


def error_of(blob: bytes | None) -> JobError | None:
    return read_or(codec.decode_error, blob, None)


def history_of(blob: bytes | None) -> list[Attempt]:
    return read_or(codec.decode_history, blob, [])


def tags_of(options: bytes | None) -> tuple[str, ...] | None:
    """The tags under which a job is listed; None: its options cannot be read."""
    found = read_or(codec.decode_options, options, None)
    return None if found is None else found.tags


def _arguments(full: Full) -> tuple[list[Any] | None, dict[str, Any] | None, JobOptions]:
    """Both None if the payload or the options are junk: such a job can never be run as it was meant."""
    try:
        options = codec.decode_options(full.options)
    except _JUNK:
        return None, None, JobOptions()
    try:
        return *codec.decode_payload(full.payload), options
    except _JUNK:
        return None, None, options


def _waiting_for(full: Full, status: Status) -> str | None:
    if status is not Status.PENDING:
        return None
    return QUEUE_PAUSED if full.paused else full.waiting_for


def record_of(full: Full, status: Status) -> Job:
    """Total: junk in any blob gives a record without what it held."""
    args, kwargs, options = _arguments(full)
    return Job(
        id=full.id,
        task=full.task,
        queue=full.queue,
        priority=full.tier,
        status=status,
        args=args,
        kwargs=kwargs,
        raw_payload=full.payload.hex() if args is None else None,
        max_retries=options.max_retries,
        backoff_strategy=options.backoff_strategy,
        backoff_base_seconds=options.backoff_base_seconds,
        max_backoff_seconds=options.max_backoff_seconds,
        jitter=options.jitter,
        timeout_seconds=options.timeout_seconds,
        max_crashes=options.max_crashes,
        idempotency_key=full.idempotency_key,
        unique_key=full.unique_key,
        affinity_key=options.affinity_key,
        concurrency_key=full.concurrency_key,
        concurrency_limit=full.concurrency_limit,
        tags=options.tags,
        headers=options.headers,
        attempts=full.attempts,
        crashes=full.crashes,
        snoozes=full.snoozes,
        interruptions=full.interruptions,
        life=full.life,
        token=full.token,
        progress=100.0 if status is Status.COMPLETED else full.percent or 0.0,
        progress_message=full.message,
        cancel_requested=bool(full.cancel),
        timed_out=full.on_death == OnDeath.TIMEOUT,
        created_at=full.created_us / 1e6,
        scheduled_at=seconds(full.due_us),
        expires_at=seconds(full.expires_us),
        started_at=seconds(full.started_us),
        completed_at=seconds(full.ended_us),
        worker_id=full.worker_id,
        waiting_for=_waiting_for(full, status),
        result=read_or(codec.decode_result, full.result, None),
        error=error_of(full.error),
        reason=full.reason,
        fingerprint=full.fingerprint,
    )
