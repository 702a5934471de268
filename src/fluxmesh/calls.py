"""A task as its producer calls it: `process.delay(7)`, `await process.enqueue(7)`, `process.map(…)`.

`Task` and `AsyncTask` are what `@queue.task` makes of a function: calling one calls the function. A
`BoundTask` is what they have in common: a name and options, checked once, ready to submit jobs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

from msgspec.structs import replace

from fluxmesh.callshape import CallShape
from fluxmesh.codec import WARN_PAYLOAD_BYTES, decode_options, encode_options
from fluxmesh.config import BATCH_MAX
from fluxmesh.errors import InvalidOption, InvalidPayload, PayloadTooLarge
from fluxmesh.handle import JobHandle, send
from fluxmesh.link import Link
from fluxmesh.middleware import Outgoing, Submitting
from fluxmesh.obs.log import get_logger
from fluxmesh.portal import run
from fluxmesh.submission import NewJob, checked_headers, normalised, prepare
from fluxmesh.task import TaskDefinition, TaskRegistry, define

# A job that leaves these out takes them from its task when a worker starts it: they are not sent.
RUN_OPTIONS: Final = frozenset(
    {
        "max_retries",
        "max_crashes",
        "backoff_strategy",
        "backoff_base_seconds",
        "max_backoff_seconds",
        "jitter",
        "timeout_seconds",
    }
)
# Of each pair the one that a call gives replaces the other that its task gives.
_EITHER: Final = {"run_at": "delay_seconds", "delay_seconds": "run_at"}

P = ParamSpec("P")
R = TypeVar("R")
_log = get_logger(__name__)


class JobFields(TypedDict, total=False):
    """Options of a task and of a job alike. None = not given. `timeout`, `delay` and `expires_in` are
    short for the names with `_seconds`."""

    queue: str | None
    priority: int | str | None
    max_retries: int | None
    max_crashes: int | None
    backoff_strategy: str | None
    backoff_base_seconds: float | None
    max_backoff_seconds: float | None
    jitter: str | None
    timeout: float | None
    timeout_seconds: float | None
    delay: float | None
    delay_seconds: float | None
    expires_in: float | None
    expires_in_seconds: float | None
    unique_key: str | None
    affinity_key: str | None
    concurrency_key: str | None
    concurrency_limit: int | None
    tags: Sequence[str] | None
    headers: Mapping[str, str] | None


class TaskOptions(JobFields, total=False):
    """Options of a task only."""

    rate_limit: str | None
    max_concurrent: int | None
    on_lease_lost: str | None
    isolation: str | None
    memory_limit_mb: int | None


class SubmitOptions(JobFields, total=False):
    """Options of a job only."""

    id: str | None
    idempotency_key: str | None
    run_at: float | str | datetime | None


class BoundTask(Generic[P, R]):
    """A task's name with options for its jobs. Making one checks every option.

    `registry` knows the resources and the outgoing hooks. `shape`: how its function is called, if it is
    defined in this process; arguments are held against it."""

    def __init__(
        self,
        link: Link,
        registry: TaskRegistry,
        name: str,
        fields: Mapping[str, Any],
        shape: CallShape | None = None,
    ) -> None:
        self._link = link
        self._registry = registry
        self._shape = shape
        self._fields = dict(fields)
        self._template = prepare({**self._fields, "task": name})
        self.name: Final = name

    def options(self, **options: Unpack[SubmitOptions]) -> BoundTask[P, R]:
        """The same task with other options for its jobs. Raises InvalidOption and names the option."""
        given = normalised(options)
        for name in given.keys() & {"task", "args", "kwargs"}:
            raise InvalidOption(name, "is no option", hint="give arguments to delay() or enqueue()")
        dropped = {_EITHER.get(name) for name in given}
        kept = {name: value for name, value in self._fields.items() if name not in dropped}
        return BoundTask(self._link, self._registry, self.name, {**kept, **given}, self._shape)

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Submit one job and wait until it is stored.

        Raises InvalidPayload, PayloadTooLarge, IdempotencyConflict, QueueFull, StorageError."""
        return run(self._send([self._job(args, kwargs)]))[0]

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """`delay`, to be awaited on any loop."""
        return (await self._send([self._job(args, kwargs)]))[0]

    def map(self, items: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> list[JobHandle[R]]:
        """Submit a job for each item, a tuple of arguments or a dict of keyword arguments; 1,000 of them a
        round trip. The arguments of all are checked before the first is stored.

        Raises what `delay` raises, and names the item; `accepted` of the error holds the ids of the jobs
        that were stored."""
        return run(self._send(self._jobs(items)))

    async def enqueue_map(self, items: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> list[JobHandle[R]]:
        """`map`, to be awaited on any loop."""
        return await self._send(self._jobs(items))

    async def _send(self, jobs: list[NewJob]) -> list[JobHandle[R]]:
        fresh = self._template.id is None
        handles: list[JobHandle[R]] = []
        for start in range(0, len(jobs), BATCH_MAX):
            some = jobs[start : start + BATCH_MAX]
            handles += await send(self._link, some, fresh_ids=fresh, before=handles, of=len(jobs))
        return handles

    def _job(self, args: Sequence[Any], kwargs: dict[str, Any]) -> NewJob:
        if self._shape is not None:
            self._shape.check(args, kwargs, self._registry.resources)
        job = self._template.job(args, kwargs, limit=self._link.settings.payload_limit_bytes)
        if len(job.payload) > WARN_PAYLOAD_BYTES:
            _log.warning("large payload", task=self.name, job_id=job.id, size_bytes=len(job.payload))
        return with_headers(job, self._registry.outgoing) if self._registry.outgoing else job

    def _jobs(self, items: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> list[NewJob]:
        if self._template.id is not None:
            raise InvalidOption(
                "id", "belongs to one job", hint="leave it out: every job gets an id of its own"
            )
        jobs = []
        for index, item in enumerate(items):
            try:
                if isinstance(item, tuple):
                    jobs.append(self._job(item, {}))
                elif isinstance(item, Mapping):
                    jobs.append(self._job((), dict(item)))
                else:
                    raise InvalidPayload(
                        f"{type(item).__name__} is neither a tuple nor a dict",
                        hint="a tuple of arguments, such as (7,), or a dict of keyword arguments",
                    )
            except (InvalidPayload, PayloadTooLarge) as error:
                raise type(error)(f"item {index}: {error.message}", hint=error.hint) from None
        return jobs

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def with_headers(job: NewJob, hooks: Sequence[Outgoing]) -> NewJob:
    """The job with what outgoing hooks add to its headers. Raises what they raise, and InvalidOption."""
    options = decode_options(job.options)
    headers = dict(options.headers)
    for hook in hooks:
        headers |= checked_headers(hook(Submitting(job.id, job.task, dict(headers))))
    options = replace(options, headers=checked_headers(headers))
    return replace(job, options=encode_options(options))


class _Defined(BoundTask[P, R]):
    """A task with its function in this process."""

    def __init__(self, link: Link, registry: TaskRegistry, definition: TaskDefinition) -> None:
        sent = {name: value for name, value in definition.fields.items() if name not in RUN_OPTIONS}
        super().__init__(link, registry, definition.name, sent, definition.shape)
        self.definition: Final = definition
        functools.update_wrapper(self, definition.function)  # type: ignore[arg-type]


class Task(_Defined[P, R]):
    """A task made of a function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, here and now."""
        return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]


class AsyncTask(_Defined[P, R]):
    """A task made of an `async def` function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the function itself: a coroutine."""
        return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]


def defined(
    link: Link, registry: TaskRegistry, definition: TaskDefinition
) -> Task[..., Any] | AsyncTask[..., Any]:
    """The task of a function that is defined in this process."""
    kind = AsyncTask if definition.is_async else Task
    return kind(link, registry, definition)


class TaskDecorator:
    """`@queue.task(…)`: options that wait for their function."""

    def __init__(
        self, link: Link, registry: TaskRegistry, name: str | None, options: Mapping[str, Any]
    ) -> None:
        self._link = link
        self._registry = registry
        self._name = name
        self._options = options

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Task[..., Any] | AsyncTask[..., Any]:
        _must_be_a_function(function)
        definition = define(function, self._name, self._options)
        self._registry.add(definition)
        return defined(self._link, self._registry, definition)


def _must_be_a_function(thing: object) -> None:
    hint = "put @queue.task on a function"
    if isinstance(thing, BoundTask):
        raise InvalidOption("task", f"{thing.name!r} is a task already", hint=f"{hint}, once")
    if not inspect.isroutine(thing):
        raise InvalidOption("task", f"{type(thing).__name__} is not a function", hint=hint)
    if inspect.isgeneratorfunction(thing) or inspect.isasyncgenfunction(thing):
        raise InvalidOption(
            "task", f"{thing.__name__} is a generator", hint="return a list instead of yielding"
        )
