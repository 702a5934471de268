"""/api/v1/workers, /queues and /metrics."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request

from fluxmesh.api.jobs import no_fields
from fluxmesh.api.parameters import QueueName
from fluxmesh.api.responses import BODY, Json, answers, listed, page, ref
from fluxmesh.api.store import store_of
from fluxmesh.documents import queue_document
from fluxmesh.job import TIER_NAMES, TIERS, Status
from fluxmesh.storage.values import Counts, QueueStats, WorkerInfo
from fluxmesh.submission import checked_queue

router = APIRouter()
ACTIVE: Final = frozenset({"ready", "draining", "retiring", "silent"})  # its lease has not lapsed


@router.get(
    "/workers",
    response_class=Json,
    tags=["workers and queues"],
    summary="Who runs jobs here",
    responses=answers({200: ("every run of a worker that storage knows", listed("WorkerInfo"))}),
)
async def workers(request: Request) -> Json:
    store = store_of(request)
    return page(await store.read(store.storage.fleet()))


@router.get(
    "/queues",
    response_class=Json,
    tags=["workers and queues"],
    summary="Queues that hold jobs or are paused",
    responses=answers({200: ("the queues, by name", listed("QueueStats"))}),
)
async def queues(request: Request) -> Json:
    store = store_of(request)
    return page(queue_document(queue) for queue in await store.read(store.storage.queue_stats()))


@router.post(
    "/queues/{queue:path}/pause",
    response_class=Json,
    tags=["workers and queues"],
    summary="Start no more jobs of a queue; held ones are released, running ones go on",
    responses=answers({200: ("it is paused", ref("QueueState"))}, *BODY, 404),
)
async def pause(request: Request, queue: QueueName) -> Json:
    await no_fields(request)
    store = store_of(request)
    name = checked_queue(queue)
    changed = await store.write(store.storage.pause(name))
    return Json({"queue": name, "paused": True, "changed": changed})


@router.post(
    "/queues/{queue:path}/resume",
    response_class=Json,
    tags=["workers and queues"],
    summary="Start jobs of a queue again",
    responses=answers({200: ("it is open", ref("QueueState"))}, *BODY, 404),
)
async def resume(request: Request, queue: QueueName) -> Json:
    await no_fields(request)
    store = store_of(request)
    name = checked_queue(queue)
    changed = await store.write(store.storage.resume(name))
    return Json({"queue": name, "paused": False, "changed": changed})


@router.get(
    "/metrics",
    response_class=Json,
    tags=["workers and queues"],
    summary="True numbers of stored jobs",
    responses=answers({200: ("the numbers", ref("Metrics"))}),
)
async def metrics(request: Request) -> Json:
    store = store_of(request)
    counts = await store.read(store.storage.counts())
    stats = await store.read(store.storage.queue_stats())
    fleet = await store.read(store.storage.fleet())
    return Json(metrics_document(counts, stats, fleet, store.clock.wall_us() / 1e6))


def metrics_document(
    counts: Counts, stats: list[QueueStats], fleet: list[WorkerInfo], now_s: float
) -> dict[str, Any]:
    """The contract's fields. A job is counted once: pending (parked and held too), scheduled, running or
    ended; `failed_jobs` are those of the dead letters that an error or a timeout ended."""
    of = counts.by_status.get
    return {
        "active_workers": sum(worker.status in ACTIVE for worker in fleet),
        "total_jobs": counts.total,
        "pending_jobs": of(Status.PENDING, 0) + of(Status.CLAIMED, 0),
        "scheduled_jobs": of(Status.SCHEDULED, 0),
        "running_jobs": of(Status.RUNNING, 0),
        "completed_jobs": of(Status.COMPLETED, 0),
        "failed_jobs": counts.failed,
        "cancelled_jobs": of(Status.CANCELLED, 0),
        "expired_jobs": of(Status.EXPIRED, 0),
        "dead_letter_jobs": of(Status.DEAD_LETTER, 0),
        "queue_depths": {
            TIER_NAMES[tier]: sum(n for (_, at), n in counts.queued.items() if at == tier) for tier in TIERS
        },
        "queues": {stat.queue: _queue_numbers(stat) for stat in stats},
        "timestamp": now_s,
    }


def _queue_numbers(stat: QueueStats) -> dict[str, Any]:
    numbers = msgspec.structs.asdict(stat)
    del numbers["queue"], numbers["queued"]
    return {"pending": sum(stat.queued), **dict(zip(TIER_NAMES, stat.queued, strict=True)), **numbers}
