"""One timer for the timeouts of all runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fluxmesh.worker.runs import NEVER, Run, RunTable


class Deadlines:
    """Calls `on_due(run, now)` for each run whose deadline has passed.

    The timer stands at the earliest deadline it was told of; jobs that end early leave it alone. When it
    goes off, all runs are looked at and it is set to the earliest that is left. So a job costs one
    comparison, and the timer goes off at most about once per shortest timeout.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, table: RunTable, on_due: Callable[[Run, float], None]
    ) -> None:
        self._loop = loop
        self._table = table
        self._on_due = on_due
        self._at = NEVER
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, deadline: float) -> None:
        if deadline < self._at:
            if self._timer is not None:
                self._timer.cancel()
            self._at = deadline
            self._timer = self._loop.call_at(deadline, self._check)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._at = -NEVER  # no later deadline is earlier

    def _check(self) -> None:
        self._at = NEVER
        now = self._loop.time()
        for run in list(self._table.runs.values()):
            if not run.ended and run.deadline <= now:
                self._on_due(run, now)
        earliest = min((run.deadline for run in self._table.runs.values() if not run.ended), default=NEVER)
        self.watch(earliest)
