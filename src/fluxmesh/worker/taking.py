"""Jobs that others hold and have not started, as storage gives them to a worker that found nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import Logger
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import ClaimedJob, WorkerRef
from fluxmesh.worker.runs import NEVER

_SHORTEST_REST_S: Final = 0.05


class Taking:
    """Never polls: storage says when there may be something. `look_at` is told that instant."""

    def __init__(
        self, storage: Storage, worker: WorkerRef, *, look_at: Callable[[float], None], log: Logger
    ) -> None:
        self._storage = storage
        self._worker = worker
        self._look_at = look_at
        self._log = log
        self._at = NEVER

    def note(self, next_held_s: float | None) -> None:
        """Storage has said in how many seconds something may be taken; None: nothing is held."""
        if next_held_s is None:
            self._at = NEVER
        else:
            now = asyncio.get_running_loop().time()
            self._at = now + max(next_held_s, 0.0)
            self._look_at(now + max(next_held_s, _SHORTEST_REST_S))

    def is_due(self) -> bool:
        return asyncio.get_running_loop().time() >= self._at

    async def take(self, slots: int) -> Sequence[ClaimedJob]:
        """At most so many, given running."""
        self._at = NEVER
        try:
            answer = await self._storage.take_held(self._worker, slots)
        except FluxMeshError as error:
            # Jobs given in a lost answer are on no beat's list and are released by storage.
            self._log.warning("storage does not answer", verb="take_held", error=str(error))
            return ()
        self.note(answer.next_held_s)
        return answer.running
