"""Progress on its way to storage: gathered from bodies in any thread, sent in one verb twice a second."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from fluxmesh.config import BATCH_MAX
from fluxmesh.context import Context
from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import get_logger
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import OnDeath, ProgressNote, WorkerRef
from fluxmesh.worker.runs import Run, RunTable

SEND_EVERY_S: Final = 0.5
_log = get_logger("worker")


class ProgressSender:
    """Sends the last progress of each run, and what the worker's death shall mean for its stuck ones.

    A note that storage did not take is sent again with the next batch. Bounded by the runs at hand.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, storage: Storage, worker: WorkerRef, table: RunTable
    ) -> None:
        self._loop = loop
        self._storage = storage
        self._worker = worker
        self._table = table
        self._unsent: deque[Context] = deque()
        self._announced = False
        self._deaths: dict[str, ProgressNote] = {}
        self._sent_at = -SEND_EVERY_S
        self._away = False  # storage, at the last try
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def notify(self, context: Context) -> None:
        """A run has progress to send. Any thread; never blocks."""
        self._unsent.append(context)
        if not self._announced:
            self._announced = True
            try:
                self._loop.call_soon_threadsafe(self._arm)
            except RuntimeError:
                pass  # the loop is closed: a body that outlives it reports to nobody

    def on_death(self, run: Run, meaning: OnDeath) -> None:
        """Store what the end of this worker shall mean for a running job."""
        self._deaths[run.job.id] = ProgressNote(run.job.id, run.job.token, on_death=meaning)
        self._arm()

    async def flush_deaths(self, timeout_s: float) -> bool:
        """Wait until storage has every `on_death` note; False: not in time."""
        deadline = self._loop.time() + timeout_s
        while self._deaths and self._loop.time() < deadline:
            await self._send()
            if self._deaths:
                await asyncio.sleep(min(0.05, timeout_s))
        return not self._deaths

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _arm(self) -> None:
        if self._timer is None and (self._task is None or self._task.done()):
            at = max(self._loop.time(), self._sent_at + SEND_EVERY_S)
            self._timer = self._loop.call_at(at, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._task = self._loop.create_task(self._send_and_arm(), name="fluxmesh-progress")

    async def _send_and_arm(self) -> None:
        await self._send()
        if self._unsent or self._deaths:
            self._task = None
            self._arm()

    async def _send(self) -> None:
        self._announced = False  # first: a report that comes from now on announces itself anew
        contexts = self._gather()
        notes = list(self._deaths.values())[:BATCH_MAX]
        for context in contexts:
            latest = context.collect()
            if latest is not None:
                notes.append(ProgressNote(context.job_id, context.token, latest[0], latest[1]))
        self._sent_at = self._loop.time()
        try:
            for start in range(0, len(notes), BATCH_MAX):
                batch = notes[start : start + BATCH_MAX]
                await self._storage.progress(self._worker, batch)
                for note in batch:
                    if self._deaths.get(note.id) is note:
                        del self._deaths[note.id]
        except FluxMeshError as error:
            self._unsent.extend(context for context in contexts if context.put_back())
            # Once an outage: it is sent again twice a second, and others tell of the storage.
            say = _log.debug if self._away else _log.warning
            self._away = True
            say("progress not stored", notes=len(notes), error=str(error))
        else:
            self._away = self._away and not notes

    def _gather(self) -> list[Context]:
        """Contexts with unsent progress whose runs go on; the end of a run carries its own."""
        found: list[Context] = []
        while self._unsent:
            context = self._unsent.popleft()
            run = self._table.find(context.job_id, context.token)
            if run is not None and not run.ended:
                found.append(context)
        return found
