"""Hears at once what a beat would tell: that a running job shall be cancelled, or a command.

A notice says nothing itself. It makes the next beat come now, and the beat's answer tells all that stands; so
a notice that is lost costs one beat and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from fluxmesh.service import Service
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import WorkerRef

WAIT_S: Final = 60.0
REST_S: Final = 0.05  # between two beats that notices ask for: many cancels shall not make many beats
ECHO_S: Final = 0.25


class NoticeListener(Service):
    """`nudge_beat` asks for a beat at once. A job whose claim is still on its way is on no beat's list; so
    another beat follows each notice after ECHO_S."""

    def __init__(self, storage: Storage, worker: WorkerRef, *, nudge_beat: Callable[[], None]) -> None:
        super().__init__("notices", interval_s=REST_S, jitter=0.0, round_limit_s=None)
        self._storage = storage
        self._worker = worker
        self._nudge_beat = nudge_beat
        self._echo_is_due = False
        self._waiting: asyncio.Task[bool] | None = None

    async def run_once(self) -> float | None:
        """One wait, and the beat that it brings about."""
        longest_s = ECHO_S if self._echo_is_due else WAIT_S
        waiting = self._storage.wait_for_notice(self._worker, longest_s)
        self._waiting = asyncio.get_running_loop().create_task(waiting, name="fluxmesh-wait-for-notice")
        await asyncio.wait((self._waiting,))
        if self._waiting.cancelled():
            return None
        noticed = self._waiting.result()
        if noticed or self._echo_is_due:
            self._nudge_beat()
        self._echo_is_due = noticed
        return None

    def request_stop(self) -> None:
        super().request_stop()
        if self._waiting is not None:
            self._waiting.cancel()
