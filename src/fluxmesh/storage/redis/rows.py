"""A job's hash as a record for doors.

Every value of a hash is bytes, and may have been written by another hand: what cannot be read is left out,
and is never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from fluxmesh.job import Job, Status
from fluxmesh.storage.records import Full, record_of

STATUS: Final = (
    Status.SCHEDULED,
    Status.PENDING,
    Status.PENDING,
    Status.CLAIMED,
    Status.RUNNING,
    Status.COMPLETED,
    Status.DEAD_LETTER,
    Status.CANCELLED,
    Status.EXPIRED,
)
_MOST: Final = 1 << 63
Values = Sequence[bytes | None]


def number(value: bytes | None) -> int | None:
    """A whole number as stored: decimal digits. None for anything else."""
    try:
        found = None if value is None else int(value)
    except ValueError:
        return None
    return found if found is not None and abs(found) < _MOST else None


def text(value: bytes | None) -> str | None:
    return None if value is None else bytes(value).decode("utf-8", "replace")


def status_of(place: bytes | None) -> Status | None:
    at = number(place)
    return STATUS[at] if at is not None and 0 <= at < len(STATUS) else None


def _share(value: bytes | None) -> float | None:
    try:
        share = None if value is None else float(value)
    except ValueError:
        return None
    return share if share is not None and 0 <= share <= 100 else None


def _blob(value: bytes | None) -> bytes | None:
    return None if value is None else bytes(value)


def _or(read: Callable[[bytes | None], Any], otherwise: Any) -> Callable[[bytes | None], Any]:
    """`otherwise` where the record has no use for None."""

    def call(value: bytes | None) -> Any:
        found = read(value)
        return otherwise if found is None else found

    return call


_READ: Final[dict[str, Callable[[bytes | None], Any]]] = {
    "task": _or(text, ""),
    "queue": _or(text, ""),
    "tier": _or(number, 0),
    "place": number,
    "payload": _or(_blob, b""),
    "options": _blob,
    "attempts": _or(number, 0),
    "crashes": _or(number, 0),
    "snoozes": _or(number, 0),
    "interruptions": _or(number, 0),
    "life": _or(number, 1),
    "token": _or(number, 0),
    "percent": _share,
    "message": text,
    "cancel": number,
    "on_death": number,
    "created_us": _or(number, 0),
    "due_us": number,
    "expires_us": number,
    "started_us": number,
    "ended_us": number,
    "worker_id": text,
    "waiting_for": text,
    "result": _blob,
    "error": _blob,
    "reason": text,
    "fingerprint": text,
    "unique_key": text,
    "idempotency_key": text,
    "concurrency_key": text,
    "concurrency_limit": number,
}
FIELDS: Final = tuple(_READ)
_PLACE: Final = FIELDS.index("place")
_QUEUE: Final = FIELDS.index("queue")


def job_of(job_id: str, values: Values, paused: frozenset[str]) -> Job | None:
    """The record of the values of FIELDS. None if they do not say where the job is: then there is none."""
    status = status_of(values[_PLACE])
    if status is None:
        return None
    told = {name: read(value) for (name, read), value in zip(_READ.items(), values, strict=True)}
    return record_of(Full(id=job_id, paused=int(told["queue"] in paused), **told), status)
