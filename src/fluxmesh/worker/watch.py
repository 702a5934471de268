"""A thread that does nothing but look: whether the worker's loop turns, and whether its supervisor lives.

It never waits for storage, so what it says of the process is true of the process alone.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable
from typing import Final

from fluxmesh.clock import Clock
from fluxmesh.obs.log import get_logger
from fluxmesh.worker.ledger import Ledger
from fluxmesh.worker.observe import LoopBlocked, Observer
from fluxmesh.worker.runs import RunTable
from fluxmesh.worker.stall import LAG_LIMIT_S, TICK_S

_log = get_logger("worker")


class Orphanage:
    """What becomes of a worker whose supervisor is gone. Its loop drains it; `end` is called on the watching
    thread if the loop has stood still for `patience_s` since, and does not return."""

    def __init__(self, supervisor_fd: int, patience_s: float, end: Callable[[], None]) -> None:
        self.patience_s: Final = patience_s
        self.end: Final = end
        self._poll = select.poll()
        self._poll.register(supervisor_fd, 0)  # a hang-up is always told

    def supervisor_is_gone(self) -> bool:
        return any(what & (select.POLLHUP | select.POLLERR) for _, what in self._poll.poll(0))


class LoopWatch:
    """`on_blocked` is called on the watching thread, at each look while the loop stands still, `on_turn` at
    every look with whether it does; `is_alone` says whether it will never turn again and nobody minds."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        name: str,
        table: RunTable,
        clock: Clock,
        ledger: Ledger | None,
        orphanage: Orphanage | None,
        on_blocked: Callable[[], None],
        is_alone: Callable[[], bool],
        on_alone: Callable[[], None],
        observer: Observer | None,
        on_turn: Callable[[bool], None],
    ) -> None:
        self._loop = loop
        self._name = name
        self._table = table
        self._clock = clock
        self._ledger = ledger
        self._orphanage = orphanage
        self._on_blocked = on_blocked
        self._is_alone = is_alone
        self._on_alone = on_alone
        self._observer = observer
        self._on_turn = on_turn
        self._over = threading.Event()
        self._probed_s = 0.0
        self._answered = True
        self._blocked = False
        self._orphan_since_s: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more: nothing is left that a lease would be kept for. Any thread."""
        if self._ledger is not None:
            self._ledger.over()
        self._over.set()

    def _watch(self) -> None:
        try:
            while not self._over.is_set():
                self._turn()
                self._over.wait(TICK_S)
        except Exception:
            _log.exception("nobody watches the loop any more")
            self.stop()

    def _turn(self) -> None:
        now_s = self._clock.mono_s()
        if self._ledger is not None:
            self._ledger.turned()
        if self._is_alone():
            self._on_alone()
        elif self._answered:
            self._probe(now_s)
        elif now_s - self._probed_s > LAG_LIMIT_S:
            if not self._blocked:
                self._blocked = True
                self._blame()
            self._on_blocked()
        self._on_turn(self._blocked)
        if self._orphanage is not None:
            self._look_after_supervisor(self._orphanage, now_s)

    def _probe(self, now_s: float) -> None:
        if self._blocked:
            self._blocked = False
            _log.warning("loop turns again", blocked_s=round(now_s - self._probed_s, 3))
            if self._ledger is not None:
                self._ledger.blocked("")
        self._answered = False
        self._probed_s = now_s
        if self._ledger is not None:
            self._ledger.probed()
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            pass  # it is closed

    def _answer(self) -> None:
        if self._ledger is not None:
            self._ledger.answered()
        self._answered = True

    def _blame(self) -> None:
        task = asyncio.current_task(self._loop)
        job_id = task.get_name() if task is not None else ""
        name = self._table.name_of(job_id)
        if not name:
            job_id = ""
        _log.error(
            "loop blocked",
            task=name or "(none of the jobs)",
            job_id=job_id,
            hint="an `async def` task must not call blocking code: make it a `def` task, or use a thread",
        )
        if self._ledger is not None:
            self._ledger.blocked(job_id)
        if self._observer is not None:
            self._observer(LoopBlocked(job_id))

    def _look_after_supervisor(self, orphanage: Orphanage, now_s: float) -> None:
        if self._orphan_since_s is None:
            if orphanage.supervisor_is_gone():
                self._orphan_since_s = now_s
        elif now_s - max(self._orphan_since_s, self._probed_s) > orphanage.patience_s:
            # A loop that turns drains by itself and is probed again and again.
            _log.error("worker ends: its supervisor is gone and its loop does not turn", pid=os.getpid())
            orphanage.end()
