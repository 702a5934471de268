"""Keeps the lease of a process that is alive and cannot say so itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from fluxmesh.clock import Clock
from fluxmesh.config import BATCH_MAX
from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import Logger
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Owned, Registration, Standing, WorkerView
from fluxmesh.worker.ledger import Entry, LedgerReader, Vitals
from fluxmesh.worker.proc import ProcessState
from fluxmesh.worker.stall import TURN_LIMIT_S, is_silent, last_sign_s, rest_s

VERB_S: Final = 5.0  # for one beat, its connection included
CLOSE_S: Final = 1.0
IDLE_CLOSE_S: Final = 30.0  # the connection is kept for the next silence


class LeaseKeeper:
    """Beats in the name of one worker while it is silent, with no list of jobs: that renews and does nothing
    else. Bounded: for no longer than `stall_limit_s` after its last sign of life, and never for a process
    that is stopped or dead. Storage is opened at the first silence.

    `look` is called often, on one loop, and never waits.
    """

    def __init__(
        self,
        ledger: LedgerReader,
        *,
        open_storage: Callable[[bool], Awaitable[Storage]],
        stall_limit_s: float,
        clock: Clock,
        log: Logger,
    ) -> None:
        self._ledger = ledger
        self._open_storage = open_storage
        self._stall_limit_s = stall_limit_s
        self._clock = clock
        self._log = log
        self._storage: Storage | None = None
        self._opening = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._warm_again_s = 0.0
        self._given_back: set[Entry] = set()  # in this silence
        self._next_s = 0.0
        self._used_s = 0.0
        self._failed = False
        self._fenced = 0  # an epoch that storage has given up
        self.kept_since_s: float | None = None  # our beats were good since, and its own did not come
        self._beats = 0  # good ones of this silence
        self._own_beat_s = 0.0  # when its own last one before it was sent

    def look(self, vitals: Vitals, state: ProcessState, now_s: float) -> float:
        """Send a beat in its name if one is due. Seconds until the next look."""
        registration = self._ledger.registration()
        assert registration is not None
        self._keep(vitals, registration, state, now_s)
        return rest_s(vitals, registration.beat_s, now_s)

    def _keep(self, vitals: Vitals, registration: Registration, state: ProcessState, now_s: float) -> None:
        if now_s - vitals.turn_s <= TURN_LIMIT_S:
            self._given_back.clear()
        elif state is ProcessState.RUNS:
            self._give_back_waiting(vitals)
        if not is_silent(vitals, registration.beat_s, now_s):
            self._note_own_beats(vitals, now_s)
            return
        if self._beating is not None or now_s < self._next_s or self._fenced == vitals.epoch:
            return
        if state is not ProcessState.RUNS or now_s - last_sign_s(vitals) > self._stall_limit_s:
            self.kept_since_s = None
            return
        self._next_s = now_s + registration.beat_s
        self._beating = asyncio.get_running_loop().create_task(
            self._beat(vitals, WorkerView(registration), now_s), name="fluxmesh-keep-lease"
        )

    def warm_up(self) -> None:
        """Open storage in the background: there will be no time for it when it is needed."""
        now_s = self._clock.mono_s()
        if self._storage is None and self._warming is None and now_s >= self._warm_again_s:
            self._warm_again_s = now_s + VERB_S
            self._warming = asyncio.get_running_loop().create_task(self.open_early(), name="fluxmesh-open")

    async def open_early(self) -> None:
        """Open storage, bounded; a failure is only logged."""
        try:
            async with asyncio.timeout(VERB_S):
                await self.opened()
        except (FluxMeshError, TimeoutError) as error:
            self._log.warning("storage does not answer", verb="open", error=str(error) or "no answer")
        finally:
            self._warming = None

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send no more, and let go of storage, each within `timeout_s`."""
        tasks = [task for task in (self._beating, self._releasing, self._warming) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        await self._close_storage(timeout_s)

    async def opened(self) -> Storage:
        """The connection, which may serve whoever watches as well. Raises FluxMeshError."""
        async with self._opening:
            if self._storage is None:
                self._storage = await self._open_storage(False)
        self._used_s = self._clock.mono_s()
        return self._storage

    def _note_own_beats(self, vitals: Vitals, now_s: float) -> None:
        if self._beats:
            silent_s = round(vitals.beat_s - self._own_beat_s, 2)
            self._log.warning("process beats again itself", silent_s=silent_s, kept_by_beats=self._beats)
            self._beats = 0
        self.kept_since_s = None
        self._failed = False
        if self._storage is not None and self._beating is None and now_s - self._used_s > IDLE_CLOSE_S:
            self._beating = asyncio.get_running_loop().create_task(self._let_go(), name="fluxmesh-let-go")

    async def _beat(self, vitals: Vitals, view: WorkerView, sent_s: float) -> None:
        try:
            async with asyncio.timeout(VERB_S):
                storage = await self.opened()
                answer = await storage.beat(self._ledger.worker(vitals.epoch), None, view)
        except (FluxMeshError, TimeoutError) as error:
            if not self._failed:
                self._failed = True
                self._log.warning("storage does not answer", verb="beat", error=str(error) or "no answer")
            self.kept_since_s = None
            self._next_s = self._clock.mono_s() + view.registration.beat_s / 4
        else:
            self._failed = False
            if answer.standing is Standing.FENCED:
                self._fenced = vitals.epoch
                return
            if self.kept_since_s is None:
                self.kept_since_s = sent_s
            if not self._beats:
                self._own_beat_s = vitals.beat_s
                silent_s = round(sent_s - vitals.beat_s, 2)
                self._log.warning("lease kept for a silent process", epoch=vitals.epoch, silent_s=silent_s)
            self._beats += 1
        finally:
            self._beating = None

    def _give_back_waiting(self, vitals: Vitals) -> None:
        if self._releasing is not None or self._fenced == vitals.epoch:
            return
        new = [entry for entry in self._ledger.entries() if entry not in self._given_back]
        taken = self._ledger.revoke(new)
        if taken:
            self._given_back.update(taken)
            self._releasing = asyncio.get_running_loop().create_task(
                self._release(vitals, taken), name="fluxmesh-release"
            )

    async def _release(self, vitals: Vitals, taken: list[Entry]) -> None:
        owned = [Owned(entry.id, entry.token) for entry in taken]
        try:
            async with asyncio.timeout(VERB_S):
                storage = await self.opened()
                for start in range(0, len(owned), BATCH_MAX):
                    await storage.release(self._ledger.worker(vitals.epoch), owned[start : start + BATCH_MAX])
        except (FluxMeshError, TimeoutError) as error:
            # They are on no list of a beat any more once the process beats again: storage releases them then.
            self._log.warning("storage does not answer", verb="release", error=str(error) or "no answer")
        else:
            self._log.warning("jobs released", count=len(owned), why="process holds its interpreter")
        finally:
            self._releasing = None

    async def _let_go(self) -> None:
        try:
            await self._close_storage(CLOSE_S)
        finally:
            self._beating = None

    async def _close_storage(self, timeout_s: float) -> None:
        storage, self._storage = self._storage, None
        if storage is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await storage.close()
