"""What a body may know of the run it is in, and tell of its progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Final

from fluxmesh.errors import InvalidOption
from fluxmesh.job import JobOptions
from fluxmesh.obs.log import Logger, get_logger
from fluxmesh.storage.values import ClaimedJob

MAX_PROGRESS_CHARS: Final = 1_000
Progress = tuple[float, str | None]

_log = get_logger("job")


class Context:
    """One run of one job, as its body sees it. Usable in `async def` and `def` bodies alike.

    The worker makes it, sets its cancelled flag and collects its progress; a body only reads and reports.
    """

    __slots__ = ("_cancelled", "_job", "_logger", "_notify", "_options", "_progress", "_unsent")

    def __init__(self, job: ClaimedJob, options: JobOptions, notify: Callable[[Context], None]) -> None:
        self._job = job
        self._options = options
        self._notify = notify
        self._cancelled = False
        self._progress: Progress | None = None
        self._unsent = False
        self._logger: Logger | None = None

    @property
    def job_id(self) -> str:
        return self._job.id

    @property
    def task(self) -> str:
        """The name of the task."""
        return self._job.task

    @property
    def queue(self) -> str:
        return self._job.queue

    @property
    def attempt(self) -> int:
        """1 for the first attempt; starts that were snoozed, interrupted or crashed do not count."""
        return self._job.attempts + 1

    @property
    def token(self) -> int:
        """The fencing token of this run: a later owner of the job has a greater one."""
        return self._job.token

    @property
    def tags(self) -> tuple[str, ...]:
        return self._options.tags

    @property
    def headers(self) -> Mapping[str, str]:
        return self._options.headers

    @property
    def cancelled(self) -> bool:
        """True once somebody asked to cancel this job, or it is no longer this worker's."""
        return self._cancelled

    @property
    def log(self) -> Logger:
        """A logger whose events carry the job's id, task and attempt."""
        if self._logger is None:
            self._logger = _log.bind(job_id=self.job_id, task=self.task, attempt=self.attempt)
        return self._logger

    def progress(self, pct: float, message: str | None = None) -> None:
        """Report progress in percent, with an optional text. Never blocks; the last value wins.

        It reaches storage within half a second, and at the latest together with the end of the run. What
        lies outside 0..100 counts as the nearer of the two; a text is cut at 1,000 characters. Raises
        InvalidOption for what is not a number.
        """
        if isinstance(pct, bool) or not isinstance(pct, int | float) or not math.isfinite(pct):
            raise InvalidOption("pct", f"{pct!r} is not a number", hint="0 to 100")
        text = None if message is None else carried(str(message)[:MAX_PROGRESS_CHARS])
        # One assignment: whoever collects it in another thread never sees halves of two reports.
        self._progress = (min(100.0, max(0.0, float(pct))), text)
        if not self._unsent:
            self._unsent = True
            self._notify(self)

    # -- the worker's side ---------------------------------------------------------------------------
    def mark_cancelled(self) -> None:
        self._cancelled = True

    @property
    def reported(self) -> Progress | None:
        """The last progress of this run, sent or not."""
        return self._progress

    def collect(self) -> Progress | None:
        """The last progress, now counted as sent. A report that comes meanwhile notifies again."""
        self._unsent = False
        return self._progress

    def put_back(self) -> bool:
        """What was collected did not arrive. False: the body has reported anew meanwhile."""
        anew, self._unsent = self._unsent, True
        return not anew


def carried(text: str) -> str:
    """The text as storage can take it: a lone surrogate becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


current_run: ContextVar[Context | None] = ContextVar("fluxmesh_current_run", default=None)
