"""The last steps of a worker: it says good-bye to storage and closes it. Bounded, whatever storage does."""

from __future__ import annotations

import asyncio
from typing import Final

from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import get_logger
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import WorkerRef
from fluxmesh.worker.beater import Beater

LEAVE_S: Final = 0.2  # for each part of a worker to end
# In all, with the flush before, a worker takes less than 2 s beyond its grace periods.
CLOSE_S: Final = 0.3
_log = get_logger("worker")
_closing: set[asyncio.Task[None]] = set()


async def leave_storage(storage: Storage, worker: WorkerRef, beater: Beater) -> None:
    """End the beats, then declare that this epoch has left, and close storage. One that does not answer may
    take long to close, and is not waited for."""
    try:
        if await beater.stop(2 * LEAVE_S):
            # After the last beat: a later one would put the row back.
            async with asyncio.timeout(2 * LEAVE_S):
                await storage.declare_dead(worker, "left")
    except (FluxMeshError, TimeoutError) as error:
        _log.warning("storage does not answer", verb="declare_dead", error=str(error))
    closing = asyncio.create_task(storage.close(), name="fluxmesh-close-storage")
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
    await asyncio.wait((closing,), timeout=CLOSE_S)
    if closing.done():
        closing.result()
