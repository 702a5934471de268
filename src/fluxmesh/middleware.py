"""Middleware: plain async callables around a run. A feature is one of them.

    async def timing(run: JobRun, call_next: CallNext) -> End:
        began = perf_counter()
        end = await call_next()
        metrics.record(run.task, end.outcome, perf_counter() - began)
        return end

The first one added is the outermost. `call_next()` goes on to the next one, at last to the resources and the
body, and answers with the `End` of the run; a body's exception does not come out of it. What a middleware
returns is the end of the run for those around it and for the storage. What it raises counts as raised by the
body: `Snooze`, `RetryAfter` and `DeadLetter` too. A middleware that does not call `call_next` skips the body.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct

from fluxmesh.context import Context
from fluxmesh.errors import InvalidOption
from fluxmesh.outcome import End


class JobRun:
    """One start of a job, as its middleware sees it.

    `args` and `kwargs` are what the caller submitted; what a middleware puts into them before `call_next()`
    is what the body gets. After it, `end` is how the run ended, `exception` what the body raised, if it did.
    """

    __slots__ = ("args", "context", "end", "exception", "kwargs")

    def __init__(self, context: Context, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.context = context
        self.args = args
        self.kwargs = kwargs
        self.end: End | None = None
        self.exception: BaseException | None = None

    @property
    def task(self) -> str:
        return self.context.task

    @property
    def job_id(self) -> str:
        return self.context.job_id

    @property
    def queue(self) -> str:
        return self.context.queue

    @property
    def attempt(self) -> int:
        return self.context.attempt

    @property
    def headers(self) -> Mapping[str, str]:
        return self.context.headers


CallNext = Callable[[], Awaitable[End]]
Middleware = Callable[[JobRun, CallNext], Awaitable[End]]


class Submitting(Struct, frozen=True):
    """A job that is about to be stored, with the headers that it has so far."""

    job_id: str
    task: str
    headers: Mapping[str, str]


# Called where a job is submitted; the headers it returns are added. What it raises, the caller gets.
Outgoing = Callable[[Submitting], Mapping[str, str]]


def checked_middleware(middleware: Middleware) -> Middleware:
    """Raises InvalidOption for what is not an async callable."""
    if not _is_async(middleware):
        raise InvalidOption(
            "middleware",
            f"{_name(middleware)} is not an async callable",
            hint="async def middleware(run, call_next)",
        )
    return middleware


def checked_outgoing(hook: Outgoing) -> Outgoing:
    """Raises InvalidOption for what is not a plain callable."""
    if not callable(hook) or _is_async(hook):
        raise InvalidOption(
            "outgoing",
            f"{_name(hook)} is not a plain function",
            hint="def hook(submitting), which returns headers",
        )
    return hook


def _is_async(thing: object) -> bool:
    return inspect.iscoroutinefunction(thing) or inspect.iscoroutinefunction(
        getattr(type(thing), "__call__", None)  # noqa: B004 - an object whose __call__ is `async def`
    )


def _name(thing: object) -> str:
    return str(getattr(thing, "__name__", type(thing).__name__))
