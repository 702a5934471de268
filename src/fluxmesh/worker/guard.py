"""Watches over one child of a supervisor: keeps its lease while it is silent, ends it when it stands
still."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from fluxmesh.clock import Clock
from fluxmesh.config import BATCH_MAX
from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import Logger
from fluxmesh.service import Service
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import ProgressNote, WorkerRef
from fluxmesh.worker.child_process import ChildProcess
from fluxmesh.worker.lease_keeper import LeaseKeeper
from fluxmesh.worker.ledger import Entry
from fluxmesh.worker.proc import process_state
from fluxmesh.worker.stall import LOOK_S, Stall, StallJudge, corrections, is_mute

NOTE_S: Final = 1.0  # to tell storage what the end of a child shall mean, before it comes


class ChildGuard(Service):
    """`stall`: why it ended the child, if it did. `untold`: what storage could not be told before."""

    def __init__(
        self,
        child: ChildProcess,
        *,
        open_storage: Callable[[bool], Awaitable[Storage]],
        stall_limit_s: float,
        clock: Clock,
        log: Logger,
        rng: random.Random,
    ) -> None:
        super().__init__("guard", interval_s=LOOK_S, rng=rng)
        self.stall: Stall | None = None
        self.untold: tuple[ProgressNote, ...] = ()
        self._child = child
        self._clock = clock
        self._log = log
        self._judge = StallJudge(stall_limit_s)
        self._keeper = LeaseKeeper(
            child.ledger, open_storage=open_storage, stall_limit_s=stall_limit_s, clock=clock, log=log
        )

    async def run_once(self) -> float | None:
        """One look. The last one, once the child is to be ended."""
        vitals = self._child.ledger.vitals()
        if vitals is None or self._child.ended or self.stall is not None:
            return None
        now_s = self._clock.mono_s()
        state = process_state(self._child.pid)
        rest_s = self._keeper.look(vitals, state, now_s)
        self._child.die_with_us(yes=is_mute(vitals, now_s))
        entries: Sequence[Entry] = ()
        if self._judge.suspects:
            entries = self._child.ledger.entries()
            self._keeper.warm_up()
        stall = self._judge.look(
            vitals, entries, state=state, kept_since_s=self._keeper.kept_since_s, now_s=now_s
        )
        if stall is not None:
            await self._end(stall, vitals.epoch)
        return None if self._judge.suspects else rest_s

    async def close(self, timeout_s: float = NOTE_S) -> None:
        """The child has ended: let go of storage. Bounded by a few times `timeout_s`."""
        await self.stop(timeout_s)
        await self._keeper.close(timeout_s)

    async def _end(self, stall: Stall, epoch: int) -> None:
        """End it, unless it has recovered while storage was told what that shall mean."""
        worker = self._child.ledger.worker(epoch)
        self.untold = await self._tell(worker, stall.notes)
        vitals = self._child.ledger.vitals()
        if vitals is None or vitals.epoch != epoch or self._child.ended:
            return  # it has come to its end by itself
        now_s, entries = self._clock.mono_s(), self._child.ledger.entries()
        again = self._judge.look_again(
            vitals,
            entries,
            state=process_state(self._child.pid),
            kept_since_s=self._keeper.kept_since_s,
            now_s=now_s,
        )
        amended = corrections(stall.notes, again, entries, now_s)
        if again is None:
            self._log.warning("worker goes on", pid=self._child.pid, no_more=stall.what)
            self.untold = await self._tell(worker, amended)
            return
        told = {note.id for note in amended}
        self.untold = (*(note for note in self.untold if note.id not in told), *amended)
        self.stall = again
        self._log.error("worker killed", why=again.what, pid=self._child.pid, jobs=len(again.notes))
        self._child.send(signal.SIGKILL)

    async def _tell(self, worker: WorkerRef, notes: tuple[ProgressNote, ...]) -> tuple[ProgressNote, ...]:
        """Store what the child's end shall mean for its jobs. What is left to be told by others."""
        if not notes:
            return ()
        try:
            async with asyncio.timeout(NOTE_S):
                await store_notes(await self._keeper.opened(), worker, notes)
        except (FluxMeshError, TimeoutError) as error:
            self._log.warning("storage does not answer", verb="progress", error=str(error) or "no answer")
            return notes
        return ()


async def store_notes(storage: Storage, worker: WorkerRef, notes: Sequence[ProgressNote]) -> None:
    for start in range(0, len(notes), BATCH_MAX):
        await storage.progress(worker, notes[start : start + BATCH_MAX])
