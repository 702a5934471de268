"""From the fields of a body to a stored job, or to the reason why there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from fluxmesh.api.bodies import check_known
from fluxmesh.api.problems import problem_of
from fluxmesh.api.store import Store
from fluxmesh.codec import decode_options, encode_options
from fluxmesh.config import Settings
from fluxmesh.documents import job_document
from fluxmesh.errors import (
    FluxMeshError,
    IdempotencyConflict,
    InvalidOption,
    OutcomeUnknown,
    QueueFull,
    StorageError,
    shown,
)
from fluxmesh.job import Job
from fluxmesh.storage.base import asked_again
from fluxmesh.storage.values import Enqueued, Verdict
from fluxmesh.submission import FIELDS, OPTION_FIELDS, TASK_ONLY, NewJob, checked_arguments, prepare

READ_AT_ONCE: Final = 50


def new_job(fields: object, settings: Settings) -> NewJob:
    """The checked job of a submission's fields. Raises UsageError that names the field."""
    if not isinstance(fields, dict):
        raise InvalidOption("jobs", f"{shown(fields)} is not an object", hint="one object a job")
    known = OPTION_FIELDS.union(FIELDS, TASK_ONLY)  # of the last, `prepare` knows more to say
    check_known([name for name in fields if name not in known], FIELDS)
    template = prepare(fields)
    args, kwargs = fields.get("args"), fields.get("kwargs")
    positional, named = checked_arguments([] if args is None else args, {} if kwargs is None else kwargs)
    options = decode_options(template.options)
    if options.timeout_seconds is None:
        options = msgspec.structs.replace(options, fallback_timeout_seconds=settings.rest_timeout_s)
        template = msgspec.structs.replace(template, options=encode_options(options))
    return template.job(positional, named, limit=settings.payload_limit_bytes)


class Stored(Struct, frozen=True):
    """The answer to one submission. `replayed`: an idempotency key (or the id) was known."""

    status: int
    document: dict[str, Any]
    replayed: bool = False


def _has_id(fields: object) -> bool:
    return isinstance(fields, dict) and fields.get("id") is not None


async def submit_one(store: Store, fields: object) -> Stored:
    """Raises UsageError that names the field, IdempotencyConflict or QueueFull."""
    job = new_job(fields, store.settings)
    fresh = () if _has_id(fields) else (job.id,)

    async def submitted() -> Stored:
        [enqueued] = await _store_jobs(store, [job], made_here=fresh)
        return await _answer_of(store, job, enqueued)

    try:
        return await store.write(submitted())  # one bound for all tries and for the look at what was stored
    except OutcomeUnknown as error:
        if job.id in error.message:
            raise
        raise error.about([job.id]) from error


async def _store_jobs(store: Store, jobs: Sequence[NewJob], *, made_here: Collection[str]) -> list[Enqueued]:
    """Store at most 1,000 jobs. `made_here` are the ids that no producer chose: one that a repetition
    meets was stored by the try whose reply was lost, and is new all the same."""
    cap = store.settings.queue_cap
    answers = await asked_again(lambda: store.storage.enqueue(jobs, queue_cap=cap))
    return [_as_new(answer) if answer.id in made_here else answer for answer in answers]


def _as_new(answer: Enqueued) -> Enqueued:
    return Enqueued(answer.id, Verdict.CREATED) if answer.by == "id" else answer


async def _answer_of(store: Store, job: NewJob, enqueued: Enqueued) -> Stored:
    """201 or 200 with the job. Raises IdempotencyConflict or QueueFull."""
    match enqueued.verdict:
        case Verdict.CONFLICT:
            raise IdempotencyConflict(
                f"idempotency key {job.idempotency_key!r} belongs to job {enqueued.id},"
                " which has another task or other arguments",
                hint="use a key of its own for other work",
            )
        case Verdict.FULL:
            raise QueueFull(
                f"queue {job.queue or 'default'!r} holds {store.settings.queue_cap:,} jobs"
                " that have not started",
                hint="start workers, submit more slowly, or raise queue_cap",
            )
    new = enqueued.verdict is Verdict.CREATED
    more = {} if new else {"deduplicated": True}
    replayed = not new and enqueued.by != "unique"
    record = None if enqueued.pruned else await _record_of(store, enqueued.id)
    if record is not None:
        return Stored(201 if new else 200, job_document(record) | more, replayed)
    # Its record is gone already: pruned, or discarded just now.
    gone = {"id": enqueued.id, "status": enqueued.status or "PENDING", "pruned": True}
    return Stored(201 if new else 200, gone | more, replayed)


async def _record_of(store: Store, job_id: str) -> Job | None:
    """Raises OutcomeUnknown: who hears that the storage is unreachable believes that nothing is stored."""
    try:
        return await store.storage.get(job_id)
    except StorageError as error:
        raise OutcomeUnknown(
            f"job {job_id} is stored, but could not be read: {error.message}",
            hint=f"GET /api/v1/jobs/{job_id}",
        ) from error


async def submit_many(store: Store, items: Sequence[object]) -> list[dict[str, Any]]:
    """Every item is judged for itself: a job, or the problem that it has."""
    told: list[dict[str, Any] | None] = [None] * len(items)
    jobs: dict[int, NewJob] = {}
    for index, fields in enumerate(items):
        try:
            jobs[index] = new_job(fields, store.settings)
        except FluxMeshError as error:
            told[index] = _refused(error)
    if jobs:
        fresh = {job.id for index, job in jobs.items() if not _has_id(items[index])}
        try:
            documents = await store.write(_submitted(store, list(jobs.values()), fresh))
        except OutcomeUnknown as error:
            raise error.about([job.id for job in jobs.values()]) from error
        for index, document in zip(jobs, documents, strict=True):
            told[index] = document
    return [item for item in told if item is not None]


async def _submitted(store: Store, jobs: Sequence[NewJob], fresh: Collection[str]) -> list[dict[str, Any]]:
    answers = await _store_jobs(store, jobs, made_here=fresh)
    stored = list(zip(jobs, answers, strict=True))
    documents: list[dict[str, Any]] = []
    for start in range(0, len(stored), READ_AT_ONCE):
        some = stored[start : start + READ_AT_ONCE]
        documents += await asyncio.gather(*(_told(store, job, answer) for job, answer in some))
    return documents


async def _told(store: Store, job: NewJob, enqueued: Enqueued) -> dict[str, Any]:
    try:
        stored = await _answer_of(store, job, enqueued)
    except (IdempotencyConflict, QueueFull) as error:
        return _refused(error)
    item: dict[str, Any] = {"status": stored.status, "job": stored.document}
    return item | {"idempotent_replayed": True} if stored.replayed else item


def _refused(error: FluxMeshError) -> dict[str, Any]:
    return {"status": error.http_status, "problem": problem_of(error)}
