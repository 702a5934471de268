"""/api/v1/mesh: what workers tell of the mesh, its rings, and who owns a key."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from fluxmesh import peers
from fluxmesh.api.responses import Json, answers, listed, page, ref
from fluxmesh.api.store import store_of
from fluxmesh.submission import DEFAULT_QUEUE, checked_name, checked_queue

router = APIRouter()
Key = Annotated[
    str,
    Query(
        min_length=1,
        max_length=200,
        description="an affinity key, or the name of a task",
        examples=["tenant-7"],
    ),
]
RingQueue = Annotated[
    str | None, Query(max_length=200, description="only this queue (all)", examples=["default"])
]
OwnerQueue = Annotated[str, Query(max_length=200, description="of which ring", examples=["default"])]


@router.get(
    "/mesh",
    response_class=Json,
    tags=["mesh"],
    summary="The members of the mesh, as each worker sees them",
    description=(
        "Each item has the counters of that worker since its start; `totals` are the sums over all."
        " A worker tells with its beats: within seconds what has changed; numbers of jobs, round trips,"
        " and what has not changed, every 15 s (with more than 50 members in proportion)."
    ),
    responses=answers(
        {200: ("one item for each worker that has told", listed("Observation", totals=ref("Totals")))}
    ),
)
async def mesh(request: Request) -> Json:
    store = store_of(request)
    seen = await store.read(peers.observe(store.storage))
    return page(seen, totals=peers.totals(seen))


@router.get(
    "/mesh/ring",
    response_class=Json,
    tags=["mesh"],
    summary="Who owns which share of the keys, by queue",
    responses=answers({200: ("one item for each ring that somebody sees", listed("RingView"))}),
)
async def ring(request: Request, queue: RingQueue = None) -> Json:
    store = store_of(request)
    name = None if queue is None else checked_queue(queue)
    return page(peers.rings(await store.read(peers.observe(store.storage)), name))


@router.get(
    "/mesh/owner",
    response_class=Json,
    tags=["mesh"],
    summary="The worker to whom a key belongs, as most workers see it",
    responses=answers({200: ("the owner", ref("OwnerView"))}, 404),
)
async def owner(request: Request, key: Key, queue: OwnerQueue = DEFAULT_QUEUE) -> Json:
    store = store_of(request)
    name, of = checked_name("key", key), checked_queue(queue)
    return Json(peers.owner(await store.read(peers.observe(store.storage)), name, of))
