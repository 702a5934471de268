"""/api/v1/dlq: dead letters, in lists, in groups, given a new life or deleted."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter, Request

from fluxmesh.api.bodies import SMALL_BYTES, check_known, read_object
from fluxmesh.api.jobs import check_done, job_of, no_fields
from fluxmesh.api.parameters import LIMIT_DEFAULT, Cursor, JobId, Limit, Offset, Q
from fluxmesh.api.responses import BODY, JOB, Json, answers, listed, page, ref, takes
from fluxmesh.api.store import Store, store_of
from fluxmesh.config import BATCH_MAX
from fluxmesh.documents import group_document
from fluxmesh.errors import InvalidOption, JobConflict, shown
from fluxmesh.job import Job, Status
from fluxmesh.query import Page, Query, parse_query
from fluxmesh.storage.values import Done

router = APIRouter(tags=["dead letters"])
REPLAY_MOST: Final = 10_000
_PAGE: Final = 200  # whole jobs in memory while others are looked for


def dead_query(text: str) -> Query:
    """The query, of dead letters only."""
    query = parse_query(text)
    if query.state not in (None, Status.DEAD_LETTER):
        raise InvalidOption("q", f"state:{query.state} is no dead letter", hint="see /api/v1/jobs")
    return msgspec.structs.replace(query, state=Status.DEAD_LETTER)


@router.get(
    "/dlq",
    response_class=Json,
    summary="List dead letters, newest first",
    responses=answers({200: ("a page", listed("Job"))}),
)
async def list_dead(
    request: Request,
    q: Q = "",
    limit: Limit = LIMIT_DEFAULT,
    offset: Offset = 0,
    cursor: Cursor = None,
) -> Json:
    store = store_of(request)
    query = dead_query(q)
    start = await _passed_over(store, query, cursor, offset) if offset else Page((), cursor)
    if offset and start.next_cursor is None:
        return page((), partial=False)
    items, next_cursor, partial = await store.find(query, start.next_cursor, limit)
    return page(items, next_cursor, partial=partial)


async def _passed_over(store: Store, query: Query, cursor: str | None, offset: int) -> Page[Job]:
    """The page that ends after `offset` items: its cursor is where the wanted one begins."""
    left = offset
    while True:
        found = await store.read(store.storage.find(query, cursor=cursor, limit=min(left, _PAGE)))
        left -= len(found.items)
        cursor = found.next_cursor
        if cursor is None or left <= 0:
            return found


@router.get(
    "/dlq/groups",
    response_class=Json,
    summary="Count dead letters by what went wrong, largest group first",
    responses=answers({200: ("the groups", listed("DeadGroup"))}),
)
async def groups(request: Request, limit: Limit = LIMIT_DEFAULT) -> Json:
    store = store_of(request)
    return page(group_document(group) for group in await store.read(store.storage.dlq_groups(limit)))


@router.post(
    "/dlq/replay",
    response_class=Json,
    summary="Give all dead letters of a query a new life",
    description=f"At most {REPLAY_MOST:,} a request, newest first; `more` says that some are left.",
    responses=answers({200: ("those that were replayed, or would be", ref("Replayed"))}, *BODY),
    openapi_extra=takes(
        "BulkReplay", ("look first", {"q": "task:failing_task", "dry_run": True}), required=False
    ),
)
async def replay_many(request: Request) -> Json:
    fields = await read_object(request, SMALL_BYTES, optional=True)
    check_known(fields, ("q", "dry_run"))
    q, dry_run = fields.get("q", ""), fields.get("dry_run", False)
    if not isinstance(q, str):
        raise InvalidOption("q", f"{shown(q)} is not text")
    if not isinstance(dry_run, bool):
        raise InvalidOption("dry_run", f"{shown(dry_run)} is not true or false")
    store = store_of(request)
    ids, more = await _matching(store, dead_query(q))
    status = "DEAD_LETTER" if dry_run else "REPLAYED"
    done = ids if dry_run else await _replayed(store, ids)
    items = [{"job_id": job_id, "status": status} for job_id in done]
    return Json({"items": items, "next_cursor": None, "count": len(items), "dry_run": dry_run, "more": more})


async def _matching(store: Store, query: Query) -> tuple[list[str], bool]:
    """Gathered before the first is replayed, because a replay moves what a cursor walks over."""
    ids: list[str] = []
    cursor: str | None = None
    while len(ids) < REPLAY_MOST:
        found = await store.read(store.storage.find(query, cursor=cursor, limit=_PAGE))
        ids += [job.id for job in found.items]
        cursor = found.next_cursor
        if cursor is None:
            return ids, False
    return ids, True


async def _replayed(store: Store, ids: list[str]) -> list[str]:
    """Those that this request replayed; a letter that left meanwhile is none of them."""
    done: list[str] = []
    for start in range(0, len(ids), BATCH_MAX):
        batch = ids[start : start + BATCH_MAX]
        verdicts = await store.write(store.storage.replay(batch))
        done += [job_id for job_id, answer in zip(batch, verdicts, strict=True) if answer is Done.DONE]
    return done


@router.post(
    "/dlq/{job_id}/replay",
    response_class=Json,
    summary="Give a dead letter a new life",
    responses=answers({200: ("it is ready again", ref("Verdict"))}, *BODY, *JOB, 409),
)
async def replay(request: Request, job_id: JobId) -> Json:
    store = await _dead(request, job_id)
    [answer] = await store.write(store.storage.replay([job_id]))
    await check_done(store, job_id, answer, "replayed: another was first, or its unique key is held")
    return Json({"job_id": job_id, "status": "REPLAYED"})


@router.post(
    "/dlq/{job_id}/discard",
    response_class=Json,
    summary="Delete a dead letter with its history",
    responses=answers({200: ("it is gone", ref("Verdict"))}, *BODY, *JOB, 409),
)
async def discard(request: Request, job_id: JobId) -> Json:
    store = await _dead(request, job_id)
    [answer] = await store.write(store.storage.discard([job_id]))
    await check_done(store, job_id, answer, "discarded now")
    return Json({"job_id": job_id, "status": "DISCARDED"})


async def _dead(request: Request, job_id: str) -> Store:
    """The store, once it is sure that this is a dead letter. /jobs/{id}/retry serves what ended otherwise."""
    await no_fields(request)
    store = store_of(request)
    job = await job_of(store, job_id)
    if job.status is not Status.DEAD_LETTER:
        raise JobConflict(f"job {job_id} is no dead letter, it is {job.status}")
    return store
