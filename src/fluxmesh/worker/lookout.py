"""When an idle worker looks for work again: at an instant that is known, or when storage says so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import Logger
from fluxmesh.storage.base import WORK_POLL_S, Storage
from fluxmesh.storage.values import WorkerRef
from fluxmesh.worker.flights import LONGEST_PAUSE_S
from fluxmesh.worker.runs import NEVER


class Lookout:
    """`look` is called on the loop. `poll_s`: at the latest after so long a wait for storage's word ends."""

    def __init__(
        self,
        storage: Storage,
        worker: WorkerRef,
        *,
        look: Callable[[], None],
        rng: random.Random,
        log: Logger,
        poll_s: float = WORK_POLL_S,
    ) -> None:
        self._storage = storage
        self._worker = worker
        self._look = look
        self._rng = rng
        self._log = log
        self._poll_s = poll_s
        self._wake_at = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[None] | None = None

    def look_at(self, at: float) -> None:
        """Look again at this time of the loop's clock, or earlier."""
        if at >= self._wake_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wake_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._look_now)

    def _look_now(self) -> None:
        self._timer = None
        self._wake_at = NEVER
        self._look()

    def wait(self) -> None:
        """Look again as soon as storage says that there may be work."""
        if self._waiting is None:
            name = "fluxmesh-wait-for-work"
            self._waiting = asyncio.get_running_loop().create_task(self._wait_for_work(), name=name)

    async def _wait_for_work(self) -> None:
        try:
            await self._storage.wait_for_work(self._worker, self._poll_s)
        except FluxMeshError as error:
            self._log.warning("storage does not answer", verb="wait_for_work", error=str(error))
            await asyncio.sleep(LONGEST_PAUSE_S * self._rng.uniform(0.5, 1.0))
        finally:
            self._waiting = None
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting is not None:
            self._waiting.cancel()
