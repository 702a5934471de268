"""/api/v1/jobs: submit, look, wait, cancel, retry, reprioritise."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request

from fluxmesh.api.bodies import BULK_BYTES, SMALL_BYTES, check_known, read_object, submission_bytes
from fluxmesh.api.parameters import LIMIT_DEFAULT, WAIT_DEFAULT_S, Cursor, JobId, Limit, Q, Timeout
from fluxmesh.api.responses import BODY, JOB, Json, answers, listed, page, ref, takes
from fluxmesh.api.store import Store, store_of
from fluxmesh.api.submitting import submit_many, submit_one
from fluxmesh.config import BATCH_MAX
from fluxmesh.documents import attempt_document, job_document
from fluxmesh.errors import InvalidOption, JobConflict, shown
from fluxmesh.job import Job
from fluxmesh.query import parse_query
from fluxmesh.storage.values import Cancelled, Done
from fluxmesh.submission import checked_tier

router = APIRouter(tags=["jobs"])
REPLAYED_HEADER: Final = "Idempotent-Replayed"
EXAMPLE: Final = {
    "task": "batch_process",
    "kwargs": {"items": ["a", "b"]},
    "priority": "high",
    "idempotency_key": "order-7",
}


@router.post(
    "/jobs",
    status_code=201,
    response_class=Json,
    summary="Submit a job",
    responses=answers(
        {
            201: ("the job, stored", ref("Submitted")),
            200: ("the job of before: its idempotency key, unique key or id is known", ref("Submitted")),
        },
        *BODY,
        409,
        429,
    ),
    openapi_extra=takes(
        "Submission", ("high priority", EXAMPLE), ("in 5 s", {"task": "t", "delay_seconds": 5})
    ),
)
async def submit(request: Request) -> Json:
    store = store_of(request)
    fields = await read_object(request, submission_bytes(store.settings.payload_limit_bytes))
    stored = await submit_one(store, fields)
    headers = {"Location": f"/api/v1/jobs/{stored.document['id']}"} if stored.status == 201 else {}
    if stored.replayed:
        headers[REPLAYED_HEADER] = "true"
    return Json(stored.document, status_code=stored.status, headers=headers)


@router.post(
    "/jobs/bulk",
    response_class=Json,
    summary="Submit up to 1,000 jobs",
    responses=answers({200: ("what became of each, in order", ref("BulkAnswer"))}, *BODY),
    openapi_extra=takes("Bulk", ("two jobs", {"jobs": [EXAMPLE, {"task": "slow_task", "args": [1]}]})),
)
async def submit_bulk(request: Request) -> Json:
    store = store_of(request)
    fields = await read_object(request, BULK_BYTES)
    check_known(fields, ("jobs",))
    items = fields.get("jobs")
    if not isinstance(items, list):
        raise InvalidOption("jobs", f"{shown(items)} is not a list", hint='{"jobs": [{"task": …}, …]}')
    if len(items) > BATCH_MAX:
        raise InvalidOption("jobs", f"{len(items):,} jobs", hint=f"at most {BATCH_MAX:,} in one request")
    return Json({"items": await submit_many(store, items)})


@router.get(
    "/jobs",
    response_class=Json,
    summary="List jobs, newest first",
    responses=answers({200: ("a page; `partial`: the search stopped at its bound", listed("Job"))}),
)
async def list_jobs(request: Request, q: Q = "", cursor: Cursor = None, limit: Limit = LIMIT_DEFAULT) -> Json:
    store = store_of(request)
    query = parse_query(q)
    items, next_cursor, partial = await store.find(query, cursor, limit)
    return page(items, next_cursor, partial=partial)


@router.get(
    "/jobs/{job_id}",
    response_class=Json,
    summary="One job",
    responses=answers({200: ("the job", ref("Job"))}, *JOB),
)
async def show(request: Request, job_id: JobId) -> Json:
    return Json(job_document(await job_of(store_of(request), job_id)))


async def job_of(store: Store, job_id: str) -> Job:
    """Raises JobNotFound or JobGone."""
    job = await store.read(store.storage.get(job_id))
    if job is None:
        raise store.missing(job_id)
    return job


@router.get(
    "/jobs/{job_id}/history",
    response_class=Json,
    summary="How each start of a job ended, oldest first",
    responses=answers({200: ("the last 50 starts of all lives", listed("Attempt"))}, *JOB),
)
async def history(request: Request, job_id: JobId) -> Json:
    store = store_of(request)
    attempts = await store.read(store.storage.history(job_id))
    if attempts is None:
        raise store.missing(job_id)
    return page(attempt_document(attempt) for attempt in attempts)


@router.get(
    "/jobs/{job_id}/wait",
    response_class=Json,
    summary="Wait for the end of a job",
    responses=answers(
        {200: ("the job, ended", ref("Job")), 202: ("the job as it is: the time is up", ref("Job"))}, *JOB
    ),
)
async def wait(request: Request, job_id: JobId, timeout: Timeout = WAIT_DEFAULT_S) -> Json:
    store = store_of(request)
    job = await store.wait_for(job_id, timeout, lambda: _gone(request))
    if job is None:
        raise store.missing(job_id)
    return Json(job_document(job), status_code=200 if job.ended else 202)


async def _gone(request: Request) -> None:
    """Returns when whoever asked has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.post(
    "/jobs/{job_id}/cancel",
    response_class=Json,
    summary="Cancel a job; a running one is told to stop",
    responses=answers(
        {
            200: ("cancelled", ref("Verdict")),
            202: ("it runs: its worker is told", ref("Verdict")),
        },
        *BODY,
        *JOB,
        409,
    ),
)
async def cancel(request: Request, job_id: JobId) -> Json:
    await no_fields(request)
    store = store_of(request)
    [answer] = await store.write(store.storage.cancel([job_id]))
    match answer:
        case Cancelled.CANCELLED:
            return Json({"job_id": job_id, "status": "CANCELLED"})
        case Cancelled.REQUESTED:
            told = {"job_id": job_id, "status": "RUNNING", "cancel_requested": True}
            return Json(told, status_code=202)
        case Cancelled.UNKNOWN:
            raise store.missing(job_id)
        case Cancelled.ENDED:
            raise JobConflict(f"job {job_id} has ended already", hint=f"GET /api/v1/jobs/{job_id} tells how")


@router.post(
    "/jobs/{job_id}/retry",
    response_class=Json,
    summary="Start a new life of a job that ended without completing",
    responses=answers({200: ("it is ready again", ref("Verdict"))}, *BODY, *JOB, 409),
)
async def retry(request: Request, job_id: JobId) -> Json:
    await no_fields(request)
    store = store_of(request)
    [answer] = await store.write(store.storage.replay([job_id]))
    await check_done(
        store,
        job_id,
        answer,
        "retried: it must have ended, and not COMPLETED, and its unique key must be free",
    )
    return Json({"job_id": job_id, "status": "REPLAYED"})


@router.post(
    "/jobs/{job_id}/reprioritise",
    response_class=Json,
    summary="Move a job that has not ended to another tier",
    responses=answers({200: ("it waits in the other tier", ref("Verdict"))}, *BODY, *JOB, 409),
    openapi_extra=takes("Priority", ("to the front", {"priority": "critical"})),
)
async def reprioritise(request: Request, job_id: JobId) -> Json:
    fields = await read_object(request, SMALL_BYTES)
    check_known(fields, ("priority",))
    tier = checked_tier(fields.get("priority"))
    store = store_of(request)
    [answer] = await store.write(store.storage.reprioritise([job_id], tier))
    await check_done(store, job_id, answer, "moved to another tier: it must not have ended")
    job = await job_of(store, job_id)
    return Json({"job_id": job_id, "status": job.status, "priority": job.priority})


async def no_fields(request: Request) -> None:
    """A body, where none is read, must be empty or {}."""
    check_known(await read_object(request, SMALL_BYTES, optional=True), ())


async def check_done(store: Store, job_id: str, answer: Done, why_not: str) -> None:
    """Raises JobNotFound, JobGone or JobConflict unless it was done."""
    if answer is Done.UNKNOWN:
        raise store.missing(job_id)
    if answer is Done.CONFLICT:
        status = (await job_of(store, job_id)).status
        raise JobConflict(f"job {job_id} is {status} and cannot be {why_not}")
