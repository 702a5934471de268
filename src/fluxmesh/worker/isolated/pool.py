"""The body processes of one worker: started when there is work, used again, replaced now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Final

from msgspec import Struct

from fluxmesh.obs.log import get_logger
from fluxmesh.worker.deaths import restart_delay_s
from fluxmesh.worker.isolated.call import IsolatedCall
from fluxmesh.worker.isolated.frames import Hello
from fluxmesh.worker.isolated.process import CLOSE_S, KILL_S, MB, START_S, BodyProcess
from fluxmesh.worker.isolated.source import BodySource

_log = get_logger("worker")


class Recycling(Struct, frozen=True):
    """When a process is replaced, at the end of a job: after so many, or when it weighs more. 0 = never."""

    after_jobs: int
    above_mb: int


class BodyPool:
    """At most `most` processes, each with one body at a time. `may_begin` is asked before a body is sent.

    A process that does not start costs its job nothing: the job goes back, and the next start waits, longer
    each time. `close` ends all of them. Everything is called on the loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: BodySource,
        hello: Hello,
        *,
        most: int,
        warm: bool,
        recycling: Recycling,
        may_begin: Callable[[IsolatedCall], bool],
    ) -> None:
        self._loop = loop
        self._source = source
        self._hello = hello
        self._most = most
        self._warm: Final = warm  # one is kept ready
        self._recycling = recycling
        self._may_begin = may_begin
        self._idle: list[BodyProcess] = []
        self._members: set[BodyProcess] = set()  # that run, are idle or start
        self._leaving: set[BodyProcess] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._closed = False
        self._failures = 0
        self._failed_at = float("-inf")

    @property
    def empty(self) -> bool:
        """No process of it is left."""
        return not (self._members or self._leaving or self._tasks)

    def keep_warm(self) -> None:
        """Have one process ready before there is work for it."""
        if self._warm and not (self._closed or self._idle) and len(self._members) < self._most:
            self._spawn(self._warm_up())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work, name="fluxmesh-body-pool")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- work --------------------------------------------------------------------------------------------
    def submit(self, call: IsolatedCall) -> None:
        """Run it in a free process, or a new one."""
        process = self._take_idle(fresh=call.run.plan.alone)
        if process is not None:
            self._begin(call, process)
        else:
            self._spawn(self._fetch(call))

    async def _fetch(self, call: IsolatedCall) -> None:
        try:
            process = await self._obtain(fresh=call.run.plan.alone)
        except BaseException:
            call.forgo()
            raise
        if process is None:
            call.forgo()
        else:
            self._begin(call, process)

    def _begin(self, call: IsolatedCall, process: BodyProcess) -> None:
        if call.ended.done():
            self._release(process)
        elif not self._may_begin(call):
            call.forgo()
            self._release(process)
        else:
            call.ended.add_done_callback(lambda _: self._after(call, process))
            call.begin(process)

    def _after(self, call: IsolatedCall, process: BodyProcess) -> None:
        if call.run.plan.alone:
            self._retire(process)
        else:
            self._release(process)

    def _release(self, process: BodyProcess) -> None:
        """It is free again."""
        if process not in self._members or not process.lives:
            return
        if self._closed or self._is_due(process):
            self._retire(process)
            return
        self._idle.append(process)
        self._wake()

    def _is_due(self, process: BodyProcess) -> bool:
        after, above = self._recycling.after_jobs, self._recycling.above_mb
        if after and process.jobs >= after:
            return True
        return bool(above) and (process.rss_bytes() or 0) > above * MB

    def _retire(self, process: BodyProcess) -> None:
        """Let it close what it has, and end."""
        if process in self._members:
            self._members.discard(process)
            if process in self._idle:
                self._idle.remove(process)
            if process.lives:
                self._leaving.add(process)
                self._spawn(process.close())
            self._wake()
            self.keep_warm()

    def _on_gone(self, process: BodyProcess) -> None:
        self._leaving.discard(process)
        if process in self._members:
            self._members.discard(process)
            if process in self._idle:
                self._idle.remove(process)
                _log.warning(
                    "body process gone while it was idle", pid=process.pid, how=process.gone.result()
                )
            self._wake()
            if process.ready.result() is None:
                self.keep_warm()

    # -- processes ---------------------------------------------------------------------------------------
    def _take_idle(self, *, fresh: bool) -> BodyProcess | None:
        for at in range(len(self._idle) - 1, -1, -1):  # the last one used: its memory is warm
            if not fresh or self._idle[at].jobs == 0:
                return self._idle.pop(at)
        return None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _obtain(self, *, fresh: bool) -> BodyProcess | None:
        """A free process, or a new one. None: it could not be started. As many wait here as there are slots,
        for no longer than another body runs."""
        while True:
            process = self._take_idle(fresh=fresh)
            if process is not None:
                return process
            if self._idle and len(self._members) >= self._most:  # none of them is fresh
                self._retire(self._idle[0])
            if len(self._members) < self._most:
                return await self._start()
            await self._changed.wait()

    async def _warm_up(self) -> None:
        if len(self._members) < self._most:
            process = await self._start()
            if process is not None:
                self._release(process)

    async def _start(self) -> BodyProcess | None:
        rest_s = self._failed_at + restart_delay_s(self._failures) - self._loop.time()
        if self._failures and rest_s > 0:
            await asyncio.sleep(rest_s)
        began = self._loop.time()
        try:
            process = BodyProcess(self._loop, self._source, self._hello, self._on_gone)
        except OSError as error:
            self._failed(began, f"{type(error).__name__}: {error}")
            return None
        self._members.add(process)
        try:
            async with asyncio.timeout(START_S):
                hindrance = await asyncio.shield(process.ready)
        except TimeoutError:
            hindrance = f"not ready in {START_S:g} s"
        if hindrance is None:
            self._failures = 0
            _log.debug("body process started", pid=process.pid, seconds=self._loop.time() - began)
            return process
        self._failed(began, hindrance)
        self._members.discard(process)
        if process.lives:
            self._leaving.add(process)
            process.kill()
        self._wake()
        return None

    def _failed(self, began: float, hindrance: str) -> None:
        """Starts that fail beside each other count as one failure."""
        if not self._closed:
            if began >= self._failed_at:
                self._failures += 1
                self._failed_at = self._loop.time()
            next_s = restart_delay_s(self._failures)
            _log.error("body process cannot start", error=hindrance, next_try_s=next_s)

    # -- the end -----------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Have every process close its resources and end; those with a body are ended first by others."""
        self._closed = True
        for process in list(self._members):
            self._retire(process)
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=CLOSE_S + KILL_S)

    async def kill(self) -> None:
        """End whatever is left, now. Bounded by what the kernel takes to end a process."""
        self._closed = True
        left = [*self._members, *self._leaving]
        for process in left:
            process.kill()
        waiting = {process.gone for process in left}
        if waiting:
            await asyncio.wait(waiting, timeout=KILL_S)
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=KILL_S)
