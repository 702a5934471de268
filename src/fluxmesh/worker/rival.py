"""Two workers under one id: whoever registers later takes the id over, and the earlier one must not take it
back, or they would interrupt each other's jobs for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from fluxmesh.errors import FluxMeshError
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import WorkerInfo

LOOK_S: Final = 5.0
_ALIVE: Final = frozenset({"ready", "draining", "retiring"})


async def live_rival(
    open_storage: Callable[[bool], Awaitable[Storage]], worker_id: str, epoch: int
) -> WorkerInfo | None:
    """The live worker that registered under this id after this epoch. None as well if storage does not
    answer: then a restart is no worse than it was."""
    try:
        async with asyncio.timeout(LOOK_S):
            storage = await open_storage(False)
            try:
                fleet = await storage.fleet()
            finally:
                await storage.close()
    except (FluxMeshError, TimeoutError):
        return None
    return newest_rival(fleet, worker_id, epoch)


def newest_rival(fleet: list[WorkerInfo], worker_id: str, epoch: int) -> WorkerInfo | None:
    rivals = [
        info for info in fleet if info.worker_id == worker_id and info.epoch > epoch and info.status in _ALIVE
    ]
    return max(rivals, key=lambda info: info.epoch, default=None)
