"""Answers of the API as values: the same structs that the SDK gives, and the few that only HTTP has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from fluxmesh.job import TIER_NAMES, Attempt, Job, JobError, Status
from fluxmesh.query import Page
from fluxmesh.storage.values import DeadGroup, QueueStats

T = TypeVar("T")
_decode = msgspec.json.Decoder().decode


class Submitted(Struct, frozen=True):
    """A stored submission. `deduplicated`: an idempotency key, a unique key or the given id was known, and
    this is the job of before. `job` is None if its record is gone already."""

    id: str
    status: Status
    deduplicated: bool
    job: Job | None


class Replayed(Struct, frozen=True):
    """Dead letters that were replayed, or would be (`dry_run`). `more`: some are left, ask again."""

    ids: tuple[str, ...]
    dry_run: bool
    more: bool


class QueueNumbers(Struct, frozen=True):
    """A queue in the metrics. `pending` is the sum of the four tiers."""

    pending: int
    critical: int
    high: int
    default: int
    low: int
    scheduled: int
    running: int
    parked: int
    paused: bool
    oldest_wait_s: float | None


class Metrics(Struct, frozen=True):
    """True numbers of stored jobs; every job is counted once. `timestamp`: epoch seconds of the server."""

    active_workers: int
    total_jobs: int
    pending_jobs: int
    scheduled_jobs: int
    running_jobs: int
    completed_jobs: int
    failed_jobs: int
    cancelled_jobs: int
    expired_jobs: int
    dead_letter_jobs: int
    queue_depths: dict[str, int]
    queues: dict[str, QueueNumbers]
    timestamp: float


_ERROR_FIELDS: Final = JobError.__struct_fields__


def as_struct(kind: type[T]) -> Callable[[Any], T]:
    """A reader of one object. An error is an object over HTTP, and an array in our structs."""

    def read(document: Any) -> T:
        error = document.get("error") if isinstance(document, dict) else None
        if isinstance(error, dict):
            document = document | {"error": [error[name] for name in _ERROR_FIELDS if name in error]}
        return msgspec.convert(document, kind)

    return read


job: Final = as_struct(Job)
attempt: Final = as_struct(Attempt)
dead_group: Final = as_struct(DeadGroup)


def queue_stats(document: Any) -> QueueStats:
    queued = [document["queued"][name] for name in TIER_NAMES]
    return msgspec.convert(document | {"queued": queued}, QueueStats)


def parsed(body: bytes, read: Callable[[Any], T]) -> T:
    """Raises msgspec.MsgspecError for anything that is not what `read` expects."""
    try:
        return read(_decode(body))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, msgspec.MsgspecError):
            raise
        raise msgspec.ValidationError(f"{type(error).__name__}: {error}") from error


def page_of(read: Callable[[Any], T]) -> Callable[[Any], Page[T]]:
    def page(document: Any) -> Page[T]:
        items = tuple(read(item) for item in document["items"])
        return Page(items, document["next_cursor"], document.get("partial", False))

    return page


def list_of(read: Callable[[Any], T]) -> Callable[[Any], list[T]]:
    return lambda document: [read(item) for item in document["items"]]


def submitted(document: Any, own_id: str | None) -> Submitted:
    """`own_id`: the id that this submission brought and that nobody else can have given. A job found by it
    is this very submission, stored by a try whose answer was lost."""
    job_id = document["id"]
    deduplicated = bool(document.get("deduplicated", False)) and job_id != own_id
    record = None if document.get("pruned") else job(document)
    return Submitted(job_id, Status(document["status"]), deduplicated, record)


def replayed(document: Any) -> Replayed:
    ids = tuple(str(item["job_id"]) for item in document["items"])
    return Replayed(ids, bool(document["dry_run"]), bool(document["more"]))
