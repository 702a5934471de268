"""Runs that have more to them than their body: middleware around it, resources given to it.

Such a run is a task on the loop, a `def` body's too: inwards through the middleware, then the resources, then
the body, here, on a thread or in another process, and back. A run without any of that never comes here.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from typing import Any, Final

from fluxmesh.callshape import left_open
from fluxmesh.job import JobError, Outcome
from fluxmesh.middleware import JobRun, Middleware
from fluxmesh.outcome import End, JobInterrupted
from fluxmesh.worker import ending
from fluxmesh.worker.forked import end_if_forked
from fluxmesh.worker.isolated.call import IsolatedCall
from fluxmesh.worker.runs import NEVER, Run, RunTable
from fluxmesh.worker.supply import Given, Supply
from fluxmesh.worker.threads import ThreadCall, ThreadPool

TWICE: Final = "call_next() was called twice: a body runs once a start"
LATE: Final = "call_next() was called when the run was over: await it inside the middleware"


class Guide:
    """What guided runs of one worker share. `end_of_value` turns what a body returned into an End, `isolate`
    sends a body with these arguments to a process of its own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        middleware: tuple[Middleware, ...],
        supply: Supply,
        pool: ThreadPool,
        table: RunTable,
        end_of_value: Callable[[Run, Any], End],
        isolate: Callable[[Run, list[Any], dict[str, Any]], IsolatedCall],
    ) -> None:
        self.isolate = isolate
        self.loop = loop
        self.middleware = middleware
        self.supply = supply
        self.pool = pool
        self.table = table
        self.end_of_value = end_of_value
        self.pid = os.getpid()

    async def end_of(self, run: Run, args: list[Any], kwargs: dict[str, Any]) -> End:
        """Run it. Raises nothing, whatever middleware, resources and body do; only the end of the loop
        leaves it without an end."""
        way = _Way(self, run, args, kwargs)
        try:
            end = await way.layer(0)
        except BaseException as error:
            if isinstance(error, GeneratorExit) and not self.loop.is_running():
                raise
            end = ending.raised(run, error)
        await way.settle()
        way.seen.exception = None  # it holds the body's frames, and these hold it
        if run.overdue and end.outcome is not Outcome.TIMEOUT:
            end = ending.timed_out(run, None)
        return end


class _Way:
    """One run on its way to its body and back."""

    __slots__ = ("given", "guide", "inside", "over", "run", "seen")

    def __init__(self, guide: Guide, run: Run, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.guide = guide
        self.run = run
        self.seen = JobRun(run.context, args, kwargs)
        self.given = Given()
        self.inside: asyncio.Task[Any] | None = None  # the task that is in the body now
        self.over = False

    async def layer(self, index: int) -> End:
        chain = self.guide.middleware
        if index == len(chain):
            return await self._body()
        called = False

        async def call_next() -> End:
            nonlocal called
            if called:
                raise RuntimeError(TWICE)
            if self.over:
                raise RuntimeError(LATE)
            called = True
            return await self.layer(index + 1)

        try:
            answer: object = await chain[index](self.seen, call_next)
        except BaseException as error:
            if self._belongs_outside(error):
                raise
            answer = ending.raised(self.run, error)
        end = answer if isinstance(answer, End) else _no_end(chain[index], answer)
        self.seen.end = end
        return end

    async def _body(self) -> End:
        guide, run = self.guide, self.run
        self.inside = asyncio.current_task()
        try:
            if run.plan.isolated:
                end = await self._in_process()
            else:
                value = await self._value()
                end_if_forked(guide.pid, None)
                end = guide.end_of_value(run, value)
        except BaseException as error:
            end_if_forked(guide.pid, error)
            self.seen.exception = error
            if self._belongs_outside(error):
                raise
            end = ending.raised(run, error)
        finally:
            self.inside = None
        self.seen.end = end
        return end

    def _belongs_outside(self, error: BaseException) -> bool:
        """True for a cancellation that is not the worker's, such as that of a middleware's own timeout, and
        for the end of the loop."""
        if isinstance(error, GeneratorExit):
            return not self.guide.loop.is_running()
        run = self.run
        asked = run.timed_out or run.cancelled or run.interrupted or run.lost
        return isinstance(error, asyncio.CancelledError) and not asked

    async def _value(self) -> Any:
        run, plan, supply = self.run, self.run.plan, self.guide.supply
        assert plan.function is not None
        args, kwargs = list(self.seen.args), dict(self.seen.kwargs)
        if plan.shape is not None:
            plan.shape.place(args, kwargs, run.context)
        names = left_open(plan.fillable, args, kwargs)
        if names:
            await supply.give(self.given, names, on_thread=not plan.is_async)
        if plan.is_async:
            kwargs.update({name: self.given.values[name] for name in names})
            return await plan.function(*args, **kwargs)
        if names:
            call = [plan.function, names, self.given, args, kwargs]
            return await self._on_thread(supply.call, call, {})
        return await self._on_thread(plan.function, args, kwargs)

    async def _on_thread(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run it on a thread of its own. A cancellation of this wait stops the body and waits on: while the
        body runs, so does its job."""
        run = self.run
        ended: asyncio.Future[None] = self.guide.loop.create_future()
        call = ThreadCall(
            function,
            args,
            kwargs,
            contextvars.copy_context(),
            lambda _: ended.set_result(None),
            self.guide.table.mark_of_leaving(run),
        )
        outside, run.handle = run.handle, call
        cancelled: asyncio.CancelledError | None = None
        try:
            self.guide.pool.submit(call)
            while not ended.done():
                try:
                    await asyncio.wait((ended,))
                except asyncio.CancelledError as request:
                    cancelled = request
                    call.interrupt(JobInterrupted)
        finally:
            run.handle = outside
            self.guide.table.resumed(run)
        error, value = call.error, call.value
        call.error = call.value = None
        try:
            if cancelled is not None:
                raise cancelled
            if error is not None:
                raise error
        finally:
            del error, cancelled  # each holds this frame by its traceback
        return value

    async def _in_process(self) -> End:
        """Run it in a process of its own. A cancellation of this wait stops the body, kills it if need be,
        and waits on. Resources are built there; what the body raised is known by its description alone."""
        run = self.run
        call = self.guide.isolate(run, self.seen.args, self.seen.kwargs)
        outside, run.handle = run.handle, call
        cancelled: asyncio.CancelledError | None = None
        try:
            while not call.ended.done():
                try:
                    await asyncio.wait((call.ended,))
                except asyncio.CancelledError as request:
                    cancelled = request
                    call.interrupt(JobInterrupted)
        finally:
            run.handle = outside
        try:
            if cancelled is not None:
                raise cancelled
        finally:
            del cancelled  # it holds this frame by its traceback
        return call.ended.result()

    async def settle(self) -> None:
        """After the outermost middleware: end what one of them left running, close what the run was given.
        Nothing stops this from outside; closing has bounds of its own."""
        run = self.run
        self.over = True
        while (stray := self.inside) is not None and stray is not asyncio.current_task():
            stray.cancel()
            await asyncio.wait((stray,))
        if self.given.own:
            run.handle = None
            run.deadline = NEVER
            await self.guide.supply.take_back(self.given)


def _no_end(middleware: Middleware, answer: object) -> End:
    name = getattr(middleware, "__name__", type(middleware).__name__)
    message = f"middleware {name} returned {type(answer).__name__}: it must return what call_next() gave it"
    return End(Outcome.FAILED, error=JobError("TypeError", message))
