"""Carries proofs of death into storage, and frees the dead one's jobs at once."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.scheduler.housekeeping import Housekeeper
from fluxmesh.service import Service
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import ProgressNote, WorkerRef
from fluxmesh.worker.guard import store_notes

PENDING_MAX: Final = 1_000  # deaths that storage has not heard of; the oldest give way: leases end them
IDLE_S: Final = 3_600.0  # rounds come from wake()
CLOSE_S: Final = 2.0


class Death(Struct, frozen=True):
    """The end of a worker's process. `how` None: it is not to be declared. `notes`: what it means for some
    of its jobs, which has to be stored before anybody may take them back."""

    worker: WorkerRef
    how: str | None
    notes: tuple[ProgressNote, ...] = ()


class DeathReporter(Service):
    """Declares deaths in the order they came, each until storage has taken it, then reaps.

    Storage is opened at the first death, so that an idle supervisor costs nothing.
    """

    def __init__(
        self,
        *,
        open_storage: Callable[[bool], Awaitable[Storage]],
        settings: Settings,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        super().__init__("death reporter", interval_s=IDLE_S, rng=rng)
        self._open_storage = open_storage
        self._settings = settings
        self._clock = clock
        self._storage: Storage | None = None
        self._housekeeper: Housekeeper | None = None
        self._pending: deque[Death] = deque(maxlen=PENDING_MAX)

    @property
    def pending(self) -> int:
        """How many deaths storage has not heard of."""
        return len(self._pending)

    def report(self, death: Death) -> None:
        """The process of this epoch is gone: tell storage as soon as it can be reached."""
        self._pending.append(death)
        self.wake()

    async def run_once(self) -> float | None:
        """Declare what is pending and take the jobs back. Raises if storage cannot be reached."""
        if not self._pending:
            return None
        if self._storage is None or self._housekeeper is None:
            self._storage = await self._open_storage(False)
            self._housekeeper = Housekeeper(self._storage, self._settings, self._clock, self._rng)
        for _ in range(len(self._pending)):
            death = self._pending[0]
            await store_notes(self._storage, death.worker, death.notes)
            if death.how is not None:
                known = await self._storage.declare_dead(death.worker, death.how)
                self._log.info(
                    "death declared",
                    worker=death.worker.worker_id,
                    epoch=death.worker.epoch,
                    how=death.how,
                    known=known,
                )
            self._pending.popleft()
        await self._housekeeper.reap_orphans()
        return 0.0 if self._pending else None

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Try to declare what is still pending and let go of storage, within `timeout_s` in all."""
        loop = asyncio.get_running_loop()
        over_at = loop.time() + timeout_s
        self.request_stop()
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=timeout_s)
            self._task.cancel()
        if self._pending:
            try:
                async with asyncio.timeout_at(over_at):
                    await self.run_once()
            except Exception as error:
                # A freed lock or the end of the lease tells of these deaths too, only later.
                self._log.warning("deaths not declared", count=len(self._pending), error=str(error))
        storage, self._storage = self._storage, None
        if storage is not None:
            try:
                async with asyncio.timeout_at(over_at):
                    await storage.close()
            except TimeoutError:
                self._log.warning("storage does not close", after_s=timeout_s)
