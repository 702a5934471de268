"""Beats on a thread of their own: no body, however busy, keeps the lease of its job from being renewed.

The thread has a small loop and an own connection to storage. When the worker's loop stands still (watch.py
sees that), it gives back the jobs that wait behind it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from fluxmesh.clock import Clock
from fluxmesh.config import BATCH_MAX
from fluxmesh.errors import FluxMeshError, StorageDamaged
from fluxmesh.obs.log import get_logger
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import (
    BeatAnswer,
    OnDeath,
    Owned,
    ProgressNote,
    Standing,
    WorkerRef,
    WorkerView,
)
from fluxmesh.worker.lease import Lease
from fluxmesh.worker.ledger import Ledger
from fluxmesh.worker.runs import Run, RunTable
from fluxmesh.worker.skew import SkewWatch
from fluxmesh.worker.threads import Phase, ThreadCall

FIRST_PAUSE_S: Final = 0.05
_log = get_logger("worker")


class BeatReport(Struct, frozen=True):
    """What a beat answered, with jobs under the tokens that were presented."""

    standing: Standing
    lost: tuple[Owned, ...]
    cancelled: tuple[Owned, ...]
    command: str | None


def meaning_of_death(run: Run, now: float) -> OnDeath:
    """What the death of this process, whose loop stands still, shall mean for a job at hand. A body that has
    ended on its thread was late for nothing: only the loop has not heard of it. One in a process of its own
    may have ended, too."""
    handle = run.handle
    if isinstance(handle, ThreadCall) and handle.phase is Phase.LEFT and not run.overdue:
        return OnDeath.INTERRUPTED
    late = run.timed_out or (run.deadline <= now and not run.plan.isolated)
    return OnDeath.TIMEOUT if late else OnDeath.INTERRUPTED


class Beater:
    """`on_report` is called on the worker's loop, and only when there is something new to tell; `on_failure`
    if the beats end by an error; on the thread `view` before each beat, `on_told` after one that storage has
    answered, and `on_end` when no beat will be sent any more."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        open_storage: Callable[[bool], Awaitable[Storage]],
        worker: WorkerRef,
        view: Callable[[], WorkerView],
        on_told: Callable[[WorkerView, BeatAnswer], None],
        table: RunTable,
        lease: Lease,
        clock: Clock,
        beat_s: float,
        on_report: Callable[[BeatReport], None],
        on_failure: Callable[[BaseException], None],
        on_end: Callable[[], None],
        ledger: Ledger | None,
    ) -> None:
        self._loop = loop
        self._open_storage = open_storage
        self._worker = worker
        self._view = view
        self._on_told = on_told
        self._table = table
        self._lease = lease
        self._clock = clock
        self._beat_s = beat_s
        self._on_report = on_report
        self._on_failure = on_failure
        self._on_end = on_end
        self._ledger = ledger
        self.outlives = False  # the worker has ended, with bodies left that cannot be stopped
        self._opened: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._rouse: asyncio.Event | None = None
        self._stopping = False
        self._beat_now = False
        self._last: BeatReport | None = None
        self._failures = 0
        self._loop_is_blocked = False
        self._last_words: threading.Event | None = None
        self._skew = SkewWatch(worker.worker_id)

    async def start(self, timeout_s: float) -> None:
        """Begin with a beat at once. Raises what opening the connection raises."""
        name = f"{self._worker.worker_id}-beat"
        threading.Thread(target=self._thread, name=name, daemon=True).start()
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._opened)

    def nudge(self) -> None:
        """Beat now. Any thread."""
        self._beat_now = True
        self.wake()

    def give_back_waiting(self) -> None:
        """The loop stands still: release what has not been entered. Any thread."""
        self._loop_is_blocked = True
        self.wake()

    def say_last_words(self, timeout_s: float) -> None:
        """The process is about to end itself: store what that shall mean for its jobs. Any other thread;
        waits."""
        self._last_words = threading.Event()
        self.wake()
        self._last_words.wait(timeout_s)

    async def stop(self, timeout_s: float) -> bool:
        """Send no more beats; False: the thread does not answer."""
        self._stopping = True
        self.wake()
        await asyncio.wait((self._over,), timeout=timeout_s)
        return self._over.done()

    def wake(self) -> None:
        """Look whether there is something to be done. Any thread."""
        if self._own_loop is not None and self._rouse is not None:
            try:
                self._own_loop.call_soon_threadsafe(self._rouse.set)
            except RuntimeError:
                pass  # that loop has ended

    # -- the thread ------------------------------------------------------------------------------------
    def _thread(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._main())
        except BaseException as caught:  # the end of this thread must not go unnoticed
            error = caught
            if self._opened.done():
                _log.exception("beats have ended")
        self._on_end()
        self._tell(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if not self._opened.done():
            if error is None:
                self._opened.set_result(None)
            else:
                self._opened.set_exception(error)
        elif error is not None:
            self._on_failure(error)
        if not self._over.done():
            self._over.set_result(None)

    def _tell(self, call: Callable[..., None], *args: object) -> bool:
        """Have the worker's loop call this; False: it is closed."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            return False
        return True

    async def _main(self) -> None:
        self._own_loop = asyncio.get_running_loop()
        self._rouse = asyncio.Event()
        storage = await self._open_storage(True)
        try:
            self._tell(self._mark_open)
            next_s = float(self._clock.mono_s())
            while not self._stopping:
                next_s = await self._tick(storage, next_s)
        finally:
            await storage.close()

    def _mark_open(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    async def _tick(self, storage: Storage, next_s: float) -> float:
        """What there is to be done now. Answers when the next beat is due."""
        assert self._rouse is not None
        if self.is_alone() and not self._table.on_threads():
            # Bodies on threads may outlive their loop and are covered as long as they run; now none is left.
            self._stopping = True
            await storage.declare_dead(self._worker, "left")
            return next_s
        if self._beat_now or self._clock.mono_s() >= next_s:
            self._beat_now = False
            next_s = await self._beat(storage)
        if self._loop_is_blocked:
            self._loop_is_blocked = False
            await self._give_back(storage)
        if self._last_words is not None:
            await self._store_last_words(storage, self._last_words)
        rest_s = max(0.0, next_s - self._clock.mono_s())
        try:
            async with asyncio.timeout(rest_s):
                await self._rouse.wait()
        except TimeoutError:
            pass
        self._rouse.clear()
        return next_s

    def is_alone(self) -> bool:
        """True: the worker's loop will never hear of anything again."""
        return self._loop.is_closed() or (self.outlives and not self._loop.is_running())

    async def _beat(self, storage: Storage) -> float:
        sent_s = self._clock.mono_s()
        sent_at_us = self._clock.wall_us()
        owned = self._table.owned()
        view = self._view()
        try:
            answer = await storage.beat(self._worker, owned, view)
        except FluxMeshError as error:
            if isinstance(error, StorageDamaged):
                self._tell(self._on_failure, error)  # once is enough: the first failure is kept
            self._failures += 1
            if self._failures == 1:
                _log.warning("storage does not answer", verb="beat", error=str(error))
            pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 16), self._beat_s / 4)
            return self._clock.mono_s() + pause_s
        if self._failures:
            _log.warning("storage answers again", verb="beat", failures=self._failures)
            self._failures = 0
        self._on_told(view, answer)
        self._skew.look(sent_at_us, self._clock.wall_us(), answer.now_us)
        report = _reported(answer, owned)
        # First: the lease that is renewed is no longer theirs, and the loop may enter a body before it hears
        # of the report.
        self._table.withdraw(report.lost)
        if answer.standing is Standing.GOOD:
            self._lease.renewed(sent_s)
            if self._ledger is not None:
                self._ledger.beat(sent_s)
        self._pass_on(report)
        return sent_s + self._beat_s

    def _pass_on(self, report: BeatReport) -> None:
        last, self._last = self._last, report
        if report.lost or report != (last or BeatReport(Standing.GOOD, (), (), None)):
            self._tell(self._on_report, report)

    # -- what cannot wait for the worker's loop ----------------------------------------------------------
    async def _give_back(self, storage: Storage) -> None:
        waiting = self._table.withdraw_waiting()
        if not waiting:
            return
        try:
            for start in range(0, len(waiting), BATCH_MAX):
                await storage.release(self._worker, waiting[start : start + BATCH_MAX])
        except FluxMeshError as error:
            # They are on no list of a beat any more, so storage releases them itself.
            _log.warning("storage does not answer", verb="release", error=str(error))
        else:
            _log.warning("jobs released", count=len(waiting), why="loop blocked")

    async def _store_last_words(self, storage: Storage, stored: threading.Event) -> None:
        self._last_words = None
        now = self._loop.time()
        notes = [
            ProgressNote(run.job.id, run.job.token, on_death=meaning_of_death(run, now))
            for run in list(self._table.runs.values())
            if not run.ended
        ]
        try:
            for start in range(0, len(notes), BATCH_MAX):
                await storage.progress(self._worker, notes[start : start + BATCH_MAX])
        except FluxMeshError as error:
            _log.warning("storage does not answer", verb="progress", error=str(error))
        stored.set()


def _reported(answer: BeatAnswer, owned: list[Owned]) -> BeatReport:
    tokens = {item.id: item for item in owned} if answer.lost or answer.cancelled else {}
    return BeatReport(
        answer.standing,
        tuple(tokens[job_id] for job_id in answer.lost if job_id in tokens),
        tuple(tokens[job_id] for job_id in answer.cancelled if job_id in tokens),
        answer.command,
    )
