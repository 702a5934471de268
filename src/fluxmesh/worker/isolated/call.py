"""One body in a process of its own, as its run's handle: asked to stop, killed if it does not, judged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from fluxmesh.codec import WARN_PAYLOAD_BYTES
from fluxmesh.errors import FluxMeshError
from fluxmesh.job import Outcome
from fluxmesh.obs.log import get_logger
from fluxmesh.outcome import End, JobTimeout
from fluxmesh.storage.values import ClaimedJob
from fluxmesh.worker import ending
from fluxmesh.worker.isolated.frames import Ended, Start, Stop
from fluxmesh.worker.isolated.process import KILL_S, MB, BodyProcess
from fluxmesh.worker.threads import Interruption

if TYPE_CHECKING:
    from fluxmesh.worker.runs import Run

WEIGH_S: Final = 0.05
DOUBT_S: Final = 0.25  # a body that has not stopped by then will perhaps be killed
_log = get_logger("worker")


class IsolatedCall:
    """`ended` becomes the end of the body; from `begin` on no earlier than the process is done with it, or
    gone. Everything is called on the loop."""

    __slots__ = (
        "_doubter",
        "_grace_s",
        "_killed",
        "_killer",
        "_loop",
        "_on_doubt",
        "_process",
        "_scales",
        "_sent",
        "begin_by_s",
        "ended",
        "gone_by",
        "job",
        "run",
        "started",
        "token",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, run: Run, job: ClaimedJob, *, hard_grace_s: float
    ) -> None:
        self.ended: asyncio.Future[End] = loop.create_future()
        self.run = run
        self.job = job
        self.token = job.token
        self.begin_by_s: float | None = None  # of the monotonic clock: later it may be another's
        self.gone_by = float("inf")  # of the loop's clock: by when a killed process must be gone
        self._loop = loop
        self._grace_s = hard_grace_s
        self._process: BodyProcess | None = None
        self.started = False
        self._killed = False
        self._sent: set[Interruption] = set()
        self._killer: asyncio.TimerHandle | None = None
        self._doubter: asyncio.TimerHandle | None = None
        self._on_doubt: Callable[[IsolatedCall], None] | None = None
        self._scales: asyncio.TimerHandle | None = None

    # -- its life ----------------------------------------------------------------------------------------
    def begin(self, process: BodyProcess, on_doubt: Callable[[IsolatedCall], None]) -> None:
        """Send it to this process, which is free. `on_doubt`: told that the process may have to be killed."""
        self._process = process
        self._on_doubt = on_doubt
        limit_mb = self.run.plan.memory_limit_mb
        watched = limit_mb is None or process.rss_bytes() is not None
        bound = None if watched else (limit_mb or 0) * MB
        process.run(self, Start(self.job, bound, self.begin_by_s))
        if limit_mb is not None and watched:
            self._scales = self._loop.call_later(WEIGH_S, self._weigh, limit_mb)

    def forgo(self, delay_s: float | None = None) -> None:
        """There is no process for it, or it must not begin any more: nothing is charged. `delay_s`: it is
        of no use to try again before that."""
        self._finish(End(Outcome.INTERRUPTED, delay_s=delay_s or None))

    def on_started(self) -> None:
        self.started = True

    def on_told(self, pct: float, message: str | None) -> None:
        try:
            self.run.context.progress(pct, message)
        except FluxMeshError:
            pass  # only what the body's own context has let through comes here

    def on_ended(self, ended: Ended) -> None:
        if ended.told is not None:
            self.on_told(*ended.told)
        if ended.end is not None:
            self._finish(self._returned(ended.end))
        else:
            self._finish(ending.judged(self.run, ended.raised or ending.NEVER_BEGUN))

    def _returned(self, end: End) -> End:
        if self.run.overdue:
            return ending.timed_out(self.run, None)
        if end.result is not None and len(end.result) > WARN_PAYLOAD_BYTES:
            job = self.run.job
            _log.warning("large result", job_id=job.id, task=job.task, bytes=len(end.result))
        return end

    def on_death(self, how: str) -> None:
        """The process is gone with the body in it."""
        if self._killed:
            self._finish(ending.killed(self.run))
        elif self.started:
            self._finish(ending.crashed("the process of its body", how))
        else:
            _log.error("body process died before its job began", job_id=self.run.job.id, how=how)
            self.forgo()

    def _finish(self, end: End) -> None:
        for timer in (self._killer, self._doubter, self._scales):
            if timer is not None:
                timer.cancel()
        if not self.ended.done():
            self.ended.set_result(end)

    # -- stopping it -------------------------------------------------------------------------------------
    def interrupt(self, kind: Interruption) -> bool:
        """Raise this in the body; a body that has not been sent yet never is. After the hard grace its
        process is killed. False: too late, or this kind was sent before."""
        if self.ended.done() or kind in self._sent:
            return False
        self._sent.add(kind)
        if self._process is None:
            self._finish(ending.judged(self.run, ending.NEVER_BEGUN))
            return True
        self._process.send(Stop(self.token, timeout=kind is JobTimeout))
        if self._killer is None:
            self._killer = self._loop.call_later(self._grace_s, self.kill)
            if self._on_doubt is not None:
                doubt_s = min(DOUBT_S, self._grace_s / 4)
                self._doubter = self._loop.call_later(doubt_s, self._on_doubt, self)
        return True

    def kill(self) -> bool:
        """End its process. False: that was done before."""
        if self._killed or self.ended.done():
            return False
        if self._process is None:
            self._finish(ending.judged(self.run, ending.NEVER_BEGUN))
            return True
        self._killed = True
        self.gone_by = self._loop.time() + KILL_S
        _log.warning(
            "body process killed",
            job_id=self.run.job.id,
            task=self.run.job.task,
            pid=self._process.pid,
            why="its body did not stop when told to",
        )
        self._process.kill()
        return True

    def _weigh(self, limit_mb: int) -> None:
        process = self._process
        if process is None or self.ended.done():
            return
        weight = process.rss_bytes()
        if weight is not None and weight > limit_mb * MB and not self._killed:
            process.kill(f"killed: over its memory limit of {limit_mb} MB")
            return
        self._scales = self._loop.call_later(WEIGH_S, self._weigh, limit_mb)
