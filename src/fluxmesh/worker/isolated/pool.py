"""The body processes of one worker: started when there is work, used again, replaced now and then."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Final

from msgspec import Struct

from fluxmesh.obs.log import get_logger
from fluxmesh.worker.deaths import restart_delay_s
from fluxmesh.worker.isolated.call import IsolatedCall
from fluxmesh.worker.isolated.frames import Hello
from fluxmesh.worker.isolated.process import CLOSE_S, KILL_S, MB, START_S, BodyProcess
from fluxmesh.worker.isolated.source import BodySource
from fluxmesh.worker.runs import Plan

STARTS_AT_ONCE: Final = os.cpu_count() or 1  # more would only make the first one late
SHORT_REST_S: Final = 0.1  # before a start that a body waits out in its slot
MOMENT_S: Final = 0.2  # for a process with nothing to close to end with its worker
_log = get_logger("worker")


class Recycling(Struct, frozen=True):
    """When a process is replaced, at the end of a job: after so many, or when it weighs more. 0 = never."""

    after_jobs: int
    above_mb: int


def _weighs_on(process: BodyProcess, limit_mb: int | None) -> bool:
    """What earlier bodies have left in it is so much of the job's limit that it would be charged for them."""
    return limit_mb is not None and 2 * (process.rss_bytes() or 0) >= limit_mb * MB


class BodyPool:
    """At most `most` processes, each with one body at a time. `may_begin` is asked before a body is sent.

    Bodies wait in their order for whatever process is free first. For one that does not stop when told to,
    another is started before it is killed: so many more than `most` there may be. A process that does not
    start costs no job anything: the next start rests, longer each time, and whatever waits for a process goes
    back until then, so that its slot is free for other work. `failures`: so many in a row. Everything is
    called on the loop.
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
        has_resources: bool,
        may_begin: Callable[[IsolatedCall], bool],
    ) -> None:
        self._loop = loop
        self._source = source
        self._hello = hello
        self._most = most
        self._warm: Final = warm  # there is always one
        self._recycling = recycling
        self._has_resources = has_resources  # which processes may have to close
        self._may_begin = may_begin
        self._waiting: deque[IsolatedCall] = deque()  # no more than there are slots
        self._idle: list[BodyProcess] = []
        self._members: set[BodyProcess] = set()  # idle ones, and those with a body
        self._others: set[BodyProcess] = set()  # that start, or end
        self._starting = 0
        self._doubted: set[IsolatedCall] = set()  # whose processes will perhaps be killed
        self._tasks: set[asyncio.Task[None]] = set()
        self._cold = False  # one that had nothing to do yet has died: the next one waits for work
        self._draining = False
        self._shut: asyncio.Future[None] = loop.create_future()  # ends the rests
        self.failures = 0
        self._failed_at = float("-inf")

    @property
    def empty(self) -> bool:
        """No process of it is left."""
        return not (self._members or self._others or self._tasks)

    def start(self) -> None:
        """Have a process ready before there is work for it, if that is wanted."""
        self._start_lacking()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work, name="fluxmesh-body-pool")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- work --------------------------------------------------------------------------------------------
    def submit(self, call: IsolatedCall) -> None:
        """Run it in a free process, or a new one. Forgo it if there will be none for a while."""
        if self._draining:
            call.forgo()
            return
        self._waiting.append(call)
        self._match()
        if self._rest_s() > SHORT_REST_S:
            self._forgo_waiting()

    def _rest_s(self) -> float:
        """So long until a process is started again. 0: nothing is in the way of that."""
        if not self.failures:
            return 0.0
        return max(0.0, self._failed_at + restart_delay_s(self.failures) - self._loop.time())

    def _forgo_waiting(self) -> None:
        rest_s = self._rest_s()
        waiting = list(self._waiting)
        self._waiting.clear()
        for call in waiting:
            call.forgo(rest_s)

    def _match(self) -> None:
        """Bring together what waits and what is free, and start what is lacking."""
        for call in list(self._waiting):
            if call.ended.done():
                self._waiting.remove(call)
                continue
            process = self._take_idle(call.run.plan)
            if process is not None:
                self._waiting.remove(call)
                self._begin(call, process)
        self._start_lacking()

    def _take_idle(self, plan: Plan) -> BodyProcess | None:
        for at in range(len(self._idle) - 1, -1, -1):  # the last one used: its memory is warm
            process = self._idle[at]
            if process.jobs == 0 or not (plan.alone or _weighs_on(process, plan.memory_limit_mb)):
                return self._idle.pop(at)
        return None

    def _begin(self, call: IsolatedCall, process: BodyProcess) -> None:
        if self._may_begin(call):
            self._cold = False
            call.ended.add_done_callback(lambda _: self._after(call, process))
            call.begin(process, self._doubt)
        else:
            call.forgo()
            self._idle.append(process)

    def _doubt(self, call: IsolatedCall) -> None:
        self._doubted.add(call)
        self._start_lacking()

    def _after(self, call: IsolatedCall, process: BodyProcess) -> None:
        self._doubted.discard(call)
        if call.started:
            self.failures = 0
        elif not process.lives and process.jobs == 1:
            self._note_failure(process.began)
        if process in self._members and process.lives:
            too_many = len(self._members) + self._starting > self._most
            if self._draining or too_many or call.run.plan.alone or self._is_due(process):
                self._retire(process)
            else:
                self._idle.append(process)
        self._match()

    def _is_due(self, process: BodyProcess) -> bool:
        after, above = self._recycling.after_jobs, self._recycling.above_mb
        if after and process.jobs >= after:
            return True
        return bool(above) and (process.rss_bytes() or 0) > above * MB

    # -- processes ---------------------------------------------------------------------------------------
    def _start_lacking(self) -> None:
        if self._draining:
            return
        wanted = len(self._waiting) + len(self._doubted)
        lacking = wanted - self._starting - len(self._idle if self._doubted else ())
        if self._warm and not (self._members or self._starting or self.failures or self._cold):
            lacking = max(lacking, 1)
        for _ in range(min(lacking, STARTS_AT_ONCE - self._starting)):
            if len(self._members) + self._starting >= self._most + len(self._doubted):
                if not self._idle:
                    return
                self._retire(self._idle[0])  # what waits wants a fresh one
            self._starting += 1
            self._spawn(self._start())

    async def _start(self) -> None:
        try:
            process = await self._started()
        finally:
            self._starting -= 1
        if process is not None:
            self._members.add(process)
            if self._draining:
                self._retire(process)
            else:
                self._idle.append(process)
        else:
            self._forgo_waiting()
        self._match()

    async def _started(self) -> BodyProcess | None:
        rest_s = self._rest_s()
        if rest_s > 0:
            await asyncio.wait((self._shut,), timeout=rest_s)
        if self._draining:
            return None
        began = self._loop.time()
        try:
            process = BodyProcess(self._loop, self._source, self._hello, self._on_gone)
        except OSError as error:
            self._failed(began, f"{type(error).__name__}: {error}")
            return None
        self._others.add(process)
        try:
            async with asyncio.timeout(START_S):
                hindrance = await asyncio.shield(process.ready)
        except TimeoutError:
            hindrance = f"not ready in {START_S:g} s"
        if hindrance is None and not process.lives:
            hindrance = process.gone.result()
        if hindrance is None:
            self._others.discard(process)
            _log.debug("body process started", pid=process.pid, seconds=self._loop.time() - began)
            return process
        process.kill()
        self._failed(began, hindrance)
        return None

    def _note_failure(self, began: float) -> None:
        """Starts that fail beside each other count as one failure."""
        if began >= self._failed_at:
            self.failures += 1
            self._failed_at = self._loop.time()

    def _failed(self, began: float, hindrance: str) -> None:
        if not self._draining:
            self._note_failure(began)
            next_s = restart_delay_s(self.failures)
            _log.error("body process cannot start", error=hindrance, next_try_s=next_s)

    def _retire(self, process: BodyProcess) -> None:
        """Let it close what it has, and end."""
        self._members.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        if process.lives:
            self._others.add(process)
            self._spawn(process.close())

    def _on_gone(self, process: BodyProcess) -> None:
        self._others.discard(process)
        if process in self._idle:
            self._idle.remove(process)
            # No failed start: it was ready. But one that dies of itself each time must not be started for
            # nothing again and again.
            self._cold = self._cold or process.jobs == 0
            _log.warning("body process gone while it was idle", pid=process.pid, how=process.gone.result())
        if process in self._members:
            self._members.discard(process)
            self._match()

    # -- the end -----------------------------------------------------------------------------------------
    def drain(self) -> None:
        """Send nothing any more: hand back what waits, and let go of processes as they become free, so that
        they have the time of the drain to close what they hold."""
        self._draining = True
        self._forgo_waiting()
        for process in list(self._idle):
            self._retire(process)

    def _shut_down(self) -> None:
        self.drain()
        if not self._shut.done():
            self._shut.set_result(None)

    async def close(self) -> None:
        """Have every process close its resources and end. When no body runs any more. One that has none to
        close is not waited for longer than a moment: `kill` ends it."""
        self._shut_down()
        for process in self._others:
            if not process.ready.done():
                process.kill()  # it has built nothing yet
        for process in list(self._members):
            self._retire(process)
        if self._tasks:
            patience_s = CLOSE_S + KILL_S if self._has_resources else MOMENT_S
            await asyncio.wait(tuple(self._tasks), timeout=patience_s)

    async def kill(self) -> None:
        """End whatever is left, now. Bounded by what the kernel takes to end a process."""
        self._shut_down()
        left = [*self._members, *self._others]
        for process in left:
            process.kill()
        if left:
            await asyncio.wait({process.gone for process in left}, timeout=KILL_S)
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=KILL_S)
