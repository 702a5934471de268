"""Owned jobs on their way back to storage, not started."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

from fluxmesh.config import BATCH_MAX
from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import Logger
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import ClaimedJob, Owned, WorkerRef
from fluxmesh.worker.flights import FIRST_PAUSE_S, LONGEST_PAUSE_S
from fluxmesh.worker.observe import JobsReleased, Observer

RELEASE_TRIES: Final = 4


class Releases:
    """`on_released` is called after each, on the loop. Truthy while one is under way."""

    def __init__(
        self,
        storage: Storage,
        worker: WorkerRef,
        *,
        rng: random.Random,
        log: Logger,
        observer: Observer | None,
        on_released: Callable[[], None],
    ) -> None:
        self._storage = storage
        self._worker = worker
        self._rng = rng
        self._log = log
        self._observer = observer
        self._on_released = on_released
        self._tasks: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def release(self, jobs: Sequence[ClaimedJob], why: str) -> None:
        if not jobs:
            return
        self._log.info("jobs released", count=len(jobs), why=why)
        owned = [Owned(job.id, job.token) for job in jobs]
        task = asyncio.get_running_loop().create_task(self._send(owned, why), name="fluxmesh-release")
        self._tasks.add(task)
        task.add_done_callback(self._sent)

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _send(self, owned: list[Owned], why: str) -> None:
        pause_s = FIRST_PAUSE_S
        for _ in range(RELEASE_TRIES):
            try:
                for start in range(0, len(owned), BATCH_MAX):
                    await self._storage.release(self._worker, owned[start : start + BATCH_MAX])
            except FluxMeshError as error:
                # In the end storage does it: they are on no list of a beat any more.
                self._log.warning("storage does not answer", verb="release", error=str(error))
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
            else:
                break
        if self._observer is not None:
            self._observer(JobsReleased(tuple(item.id for item in owned), why))

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("jobs could not be released", error=str(task.exception()))
        self._on_released()
