"""`fluxmesh scheduler`: a process that does the housekeeping and nothing else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.errors import StorageDamaged
from fluxmesh.obs.log import get_logger
from fluxmesh.scheduler.housekeeping import Housekeeper
from fluxmesh.storage.base import Storage
from fluxmesh.task import TaskRegistry
from fluxmesh.worker.signals import StopSignals

DEFAULT_INTERVAL_S: Final = 0.2
FINISH_S: Final = 5.0  # time for the round at hand after the first signal
CLOSE_S: Final = 10.0
HURRIED_CLOSE_S: Final = 0.5  # housekeeping that is cut short is done by the next who comes

_log = get_logger("scheduler")


async def run_scheduler(
    *,
    open_storage: Callable[[bool], Awaitable[Storage]],
    settings: Settings,
    clock: Clock,
    interval_s: float = DEFAULT_INTERVAL_S,
    registry: TaskRegistry | None = None,
) -> int:
    """Housekeep until SIGTERM or SIGINT. Answers the exit code: 0, or 1 after a second signal.

    `interval_s` is the longest rest while no due instant is known. Raises what opening the storage raises;
    an outage later is waited out, a damaged storage raised as well. Runs on the main thread: it takes over
    the two signals meanwhile.
    """
    storage = await open_storage(False)
    told, hurried = asyncio.Event(), asyncio.Event()
    damage: list[StorageDamaged] = []

    def end(error: StorageDamaged) -> None:
        damage.append(error)
        told.set()

    housekeeper = Housekeeper(
        storage, settings, clock, random.Random(), registry, on_time_s=interval_s, on_damage=end
    )
    signals = StopSignals(told.set, hurried.set, gap_s=0.0)
    signals.install()
    try:
        await housekeeper.start()
        _log.info("scheduler started", interval_s=interval_s)
        await told.wait()
        await _finish(housekeeper, hurried)
        signals.end_with(int(hurried.is_set()))
    finally:
        await _close(storage, HURRIED_CLOSE_S if hurried.is_set() else CLOSE_S)
    _log.info("scheduler stopped")
    if damage:
        raise damage[0]
    return 1 if hurried.is_set() else 0


async def _finish(housekeeper: Housekeeper, hurried: asyncio.Event) -> None:
    """Let the round at hand end, or cut it short at the second signal."""
    finishing = asyncio.ensure_future(housekeeper.stop(FINISH_S))
    hurrying = asyncio.ensure_future(hurried.wait())
    await asyncio.wait((finishing, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not finishing.done():
        await housekeeper.stop(0.0)
    await finishing


async def _close(storage: Storage, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await storage.close()
    except TimeoutError:
        _log.warning("storage does not close", after_s=timeout_s)
