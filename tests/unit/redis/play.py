"""A scene on a storage, bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fluxmesh.clock import SystemClock
from fluxmesh.config import Settings
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import (
    Enqueued,
    ExchangeAnswer,
    ExchangeRequest,
    Registration,
    TaskSpec,
    WorkerRef,
)
from fluxmesh.submission import NewJob, prepare

BOUND_S = 30.0


def play(url: str, scene: Callable[[Storage], Awaitable[object]], settings: Settings | None = None) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            storage = await open_storage(url, settings or Settings(), create=True, clock=SystemClock())
            try:
                await scene(storage)
            finally:
                await storage.close()

    asyncio.run(bounded())


def new_job(payload: str = "", **fields: object) -> NewJob:
    return prepare({"task": "work", **fields}).job((payload,), {})


async def put(storage: Storage, payload: str = "") -> Enqueued:
    (answer,) = await storage.enqueue([new_job(payload)], queue_cap=1_000)
    return answer


async def register(storage: Storage, worker_id: str = "w1") -> WorkerRef:
    seen = Registration(worker_id, ("default",), (0, 1, 2, 3), (TaskSpec("work"),), 8, 6.0, 2.0)
    return WorkerRef(worker_id, await storage.register(seen))


async def claim(storage: Storage, worker: WorkerRef, request_id: int) -> ExchangeAnswer:
    return await storage.exchange(ExchangeRequest(worker, request_id, slots=1))
