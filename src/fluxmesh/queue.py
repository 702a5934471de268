"""The Queue: where a program's tasks are defined, its jobs submitted and watched, its workers started.

Every verb has two faces. The async ones are the real ones (`await queue.aio.counts()`, on any loop); the
blocking ones of the same names wait for them (`queue.counts()`, in any thread).
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from fluxmesh.calls import AsyncTask, BoundTask, SubmitOptions, Task, TaskDecorator, TaskOptions, defined
from fluxmesh.clock import Clock
from fluxmesh.config import Settings, load_settings, telling_arguments
from fluxmesh.errors import AppImportFailed, InvalidOption, masked
from fluxmesh.handle import JobHandle, not_found
from fluxmesh.ids import new_nonce
from fluxmesh.job import TIERS, Job
from fluxmesh.link import Link
from fluxmesh.middleware import Middleware, Outgoing, checked_middleware, checked_outgoing
from fluxmesh.portal import run
from fluxmesh.query import Page, parse_query
from fluxmesh.resources import Scope, define_resource
from fluxmesh.storage.registry import refuse_idle_promises, resolved_url
from fluxmesh.storage.values import (
    Cancelled,
    Counts,
    DeadGroup,
    Done,
    QueueStats,
    StorageInfo,
    WorkerInfo,
)
from fluxmesh.submission import (
    checked_arguments,
    checked_int,
    checked_name,
    checked_queue,
    checked_seconds,
    checked_tier,
)
from fluxmesh.task import TaskRegistry

if TYPE_CHECKING:
    from fluxmesh.running import WorkerHandle, WorkerOptions
    from fluxmesh.worker.config import WorkerEnd

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Queue:
    """Jobs of one namespace of one storage.

    Nothing is opened before the first verb. A file named by `url` or `db_path` (or the setting `url`) is
    created then; the unnamed `fluxmesh.db` of the working directory is created only by a worker, elsewhere
    its absence is StorageMissing. `create` True or False overrules that. `settings` takes any other
    setting by its name. Raises InvalidOption for what cannot be right.
    """

    @telling_arguments
    def __init__(
        self,
        url: str | None = None,
        *,
        db_path: str | PathLike[str] | None = None,
        namespace: str | None = None,
        default_timeout: float | None = None,
        default_max_retries: int | None = None,
        result_ttl: float | None = None,
        durability: str | None = None,
        wait_replicas: int | None = None,
        scheduler_batch_size: int | None = None,
        settings: Mapping[str, Any] | None = None,
        create: bool | None = None,
        clock: Clock | None = None,
    ) -> None:
        if default_timeout is not None:
            checked_seconds("default_timeout", default_timeout)
        if default_max_retries is not None:
            checked_int("default_max_retries", default_max_retries, 0, 1_000_000)
        named = url if db_path is None else resolved_url(url, fspath(db_path))
        given = {
            "url": named,
            "namespace": namespace,
            "timeout_s": default_timeout,
            "max_retries": default_max_retries,
            "result_ttl": result_ttl,
            "durability": durability,
            "wait_replicas": wait_replicas,
            "scheduler_batch_size": scheduler_batch_size,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        self.settings: Settings = load_settings({**(settings or {}), **chosen})
        self.url: str = resolved_url(self.settings.url)
        refuse_idle_promises(self.url, self.settings)
        self.registry = TaskRegistry()
        self._create = create
        self._clock = clock
        creates = self.settings.url is not None if create is None else create
        self._link = Link(self.url, self.settings, create=creates, clock=clock)

    @property
    def aio(self) -> AsyncQueue:
        """The same verbs, to be awaited."""
        return AsyncQueue(self)

    # -- tasks -------------------------------------------------------------------------------------
    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, /, *, name: str | None = None, **options: Unpack[TaskOptions]) -> TaskDecorator: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        **options: Any,
    ) -> TaskDecorator | Task[..., Any] | AsyncTask[..., Any]:
        """Make a task of a function: `@queue.task` or `@queue.task(priority="high", timeout=30)`.

        Options are the submission fields, rate_limit ("10/s"), max_concurrent, on_lease_lost, isolation
        ("process": the body runs in a process of its own, which can be killed) and memory_limit_mb of that
        process (MB of 2**20 bytes; a body above it is killed, which counts as a crash); `name` is
        module.function by default. Raises InvalidOption and names the option, DuplicateTask."""
        decorator = TaskDecorator(self._link, self.registry, name, options)
        return decorator if function is None else decorator(function)

    @overload
    def worker_resource(self, function: F, /) -> F: ...
    @overload
    def worker_resource(
        self, /, *, scope: Scope = Scope.WORKER, name: str | None = None
    ) -> Callable[[F], F]: ...
    def worker_resource(
        self, function: F | None = None, /, *, scope: Scope = Scope.WORKER, name: str | None = None
    ) -> F | Callable[[F], F]:
        """Make a resource of a function: `@queue.worker_resource(scope=Scope.THREAD)`.

        Tasks and other resources get it by the name of a parameter that is left out. A generator yields it,
        and closes it in what follows; what a plain function returns is closed by its aclose() or close(), if
        it has one. Raises InvalidOption."""

        def add(function: F) -> F:
            self.registry.resources.add(define_resource(function, scope=scope, name=name))
            return function

        return add if function is None else add(function)

    def add_middleware(self, middleware: Middleware) -> Middleware:
        """Put `async def middleware(run, call_next)` around every run of workers that are started later,
        inside those added before. Usable as a decorator. Raises InvalidOption."""
        self.registry.middleware.append(checked_middleware(middleware))
        return middleware

    def add_outgoing(self, hook: Outgoing) -> Outgoing:
        """Have `hook(submitting)` return headers for every job that is submitted through this Queue. Usable
        as a decorator. Raises InvalidOption."""
        self.registry.outgoing.append(checked_outgoing(hook))
        return hook

    def task_named(self, name: str) -> BoundTask[..., Any]:
        """A task by its name, to submit jobs of it without its code. A task defined here brings its
        options along; an unknown one is left to the workers that have it."""
        known = self.registry.get(name)
        if known is not None:
            return defined(self._link, self.registry, known)
        return BoundTask(self._link, self.registry, checked_name("task", name), {})

    def submit(
        self,
        task: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **fields: Unpack[SubmitOptions],
    ) -> JobHandle[Any]:
        """Submit one job by the name of its task, with arguments and submission fields as data."""
        return run(self.aio.submit(task, args, kwargs, **fields))

    # -- jobs --------------------------------------------------------------------------------------
    def get(self, job_id: str) -> JobHandle[Any]:
        """A handle for a stored job, its record read. Raises JobNotFound."""
        return run(self.aio.get(job_id))

    def find(self, q: str = "", *, cursor: str | None = None, limit: int = 50) -> Page[Job]:
        """Records that match a query such as "state:dead_letter queue:mail", newest first, by pages."""
        return run(self.aio.find(q, cursor=cursor, limit=limit))

    def cancel(self, job_ids: Sequence[str]) -> list[Cancelled]:
        """Cancel at most 1,000 jobs; what became of each. One job: `handle.cancel()`."""
        return run(self.aio.cancel(job_ids))

    def replay(self, job_ids: Sequence[str]) -> list[Done]:
        """Give a new life to at most 1,000 jobs that ended without completing; the answer for each."""
        return run(self.aio.replay(job_ids))

    def discard(self, job_ids: Sequence[str]) -> list[Done]:
        """Delete at most 1,000 ended jobs with their history; the answer for each."""
        return run(self.aio.discard(job_ids))

    def reprioritise(self, job_ids: Sequence[str], priority: int | str) -> list[Done]:
        """Move at most 1,000 jobs that have not ended to another tier; the answer for each."""
        return run(self.aio.reprioritise(job_ids, priority))

    # -- queues and workers ------------------------------------------------------------------------
    def counts(self) -> Counts:
        """True numbers of stored jobs."""
        return run(self.aio.counts())

    def stats(self) -> list[QueueStats]:
        """Every queue with its depth by tier, what runs, what waits longest."""
        return run(self.aio.stats())

    def pause(self, queue: str = "default") -> bool:
        """Start no more jobs of a queue; those that run go on. False: it was paused already."""
        return run(self.aio.pause(queue))

    def resume(self, queue: str = "default") -> bool:
        """Take a pause back. False: the queue was not paused."""
        return run(self.aio.resume(queue))

    def dead_letter_groups(self, limit: int = 50) -> list[DeadGroup]:
        """Dead letters by kind of failure."""
        return run(self.aio.dead_letter_groups(limit))

    def list_workers(self) -> list[WorkerInfo]:
        """Workers with worker_id, epoch, hostname, pid, queues, status, capacity, running,
        last_heartbeat and more."""
        return run(self.aio.list_workers())

    def info(self) -> StorageInfo:
        """Which storage this is, in words."""
        return run(self.aio.info())

    def close(self) -> None:
        """Release the storage. The next verb opens it anew; without this it is closed at exit."""
        run(self.aio.close())

    # -- running -----------------------------------------------------------------------------------
    def worker(self, queues: Sequence[str] = ("default",), **options: Unpack[WorkerOptions]) -> WorkerHandle:
        """A worker for this queue's tasks, to be started on a thread of this process.

        `queues`: names, or tier names alone (`["critical", "high"]`), which mean these tiers of the default
        queue. The options are those of `running.WorkerOptions`; what is left out is as the settings say."""
        from fluxmesh.running import WorkerHandle, keeper_for, refuse_unknown, worker_maker

        refuse_unknown("worker", options)
        make, name = worker_maker(self, queues, clock=self._clock, create=self._create, **options)
        return WorkerHandle(make, name, keeper_for(self.url, self.settings, self._clock))

    def run_worker(self, queues: Sequence[str] = ("default",), **options: Unpack[WorkerOptions]) -> WorkerEnd:
        """Run a worker in this thread until SIGTERM or SIGINT: the first drains it, the second hurries it.
        Options as for `worker`. Raises WorkerRetired, WorkerFenced, StorageError."""
        from fluxmesh.running import (
            keeper_for,
            refuse_unknown,
            refuse_while_loading,
            run_until_signal,
            worker_maker,
        )

        refuse_unknown("run_worker", options)
        refuse_while_loading()
        make, _ = worker_maker(self, queues, clock=self._clock, create=self._create, **options)
        return run_until_signal(make, keeper_for(self.url, self.settings, self._clock))

    def __repr__(self) -> str:
        return f"<Queue {masked(self.url)} namespace={self.settings.namespace!r}>"


class AsyncQueue:
    """The verbs of a Queue, to be awaited on any loop. They promise what the blocking ones promise."""

    __slots__ = ("_link", "_queue")

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._link = queue._link

    async def submit(
        self,
        task: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **fields: Unpack[SubmitOptions],
    ) -> JobHandle[Any]:
        positional, named = checked_arguments(args, {} if kwargs is None else kwargs)
        return await self._queue.task_named(task).options(**fields).enqueue(*positional, **named)

    async def get(self, job_id: str) -> JobHandle[Any]:
        record = await self._link.use(lambda storage: storage.get(job_id))
        if record is None:
            raise not_found(job_id)
        return JobHandle(self._link, job_id, record=record)

    async def find(self, q: str = "", *, cursor: str | None = None, limit: int = 50) -> Page[Job]:
        query = parse_query(q)
        return await self._link.use(lambda storage: storage.find(query, cursor=cursor, limit=limit))

    async def cancel(self, job_ids: Sequence[str]) -> list[Cancelled]:
        ids = _checked_ids(job_ids)
        return await self._link.use(lambda storage: storage.cancel(ids))

    async def replay(self, job_ids: Sequence[str]) -> list[Done]:
        ids = _checked_ids(job_ids)
        return await self._link.use(lambda storage: storage.replay(ids))

    async def discard(self, job_ids: Sequence[str]) -> list[Done]:
        ids = _checked_ids(job_ids)
        return await self._link.use(lambda storage: storage.discard(ids))

    async def reprioritise(self, job_ids: Sequence[str], priority: int | str) -> list[Done]:
        ids, tier = _checked_ids(job_ids), checked_tier(priority)
        return await self._link.use(lambda storage: storage.reprioritise(ids, tier))

    async def counts(self) -> Counts:
        return await self._link.use(lambda storage: storage.counts())

    async def stats(self) -> list[QueueStats]:
        return await self._link.use(lambda storage: storage.queue_stats())

    async def pause(self, queue: str = "default") -> bool:
        name = checked_queue(queue)
        return await self._link.use(lambda storage: storage.pause(name))

    async def resume(self, queue: str = "default") -> bool:
        name = checked_queue(queue)
        return await self._link.use(lambda storage: storage.resume(name))

    async def dead_letter_groups(self, limit: int = 50) -> list[DeadGroup]:
        return await self._link.use(lambda storage: storage.dlq_groups(limit))

    async def list_workers(self) -> list[WorkerInfo]:
        return await self._link.use(lambda storage: storage.fleet())

    async def info(self) -> StorageInfo:
        return await self._link.use(lambda storage: storage.info())

    async def close(self) -> None:
        await self._link.close()


def default_worker_id() -> str:
    """Host, process and four random digits: a program may run several workers."""
    host = "".join(char if char.isprintable() and char not in "{}:" else "-" for char in socket.gethostname())
    return f"{host[:100] or 'worker'}-{os.getpid()}-{new_nonce()[:4]}"


def checked_reserve(
    reserve: Mapping[int | str, int], concurrency: int, tiers: Sequence[int] = TIERS
) -> dict[int, int]:
    """Slots kept free, by tier. Raises InvalidOption for a tier that is not served or too many slots."""
    from fluxmesh.worker import slots

    kept = {checked_tier(tier): count for tier, count in reserve.items()}
    slots.checked_reserve(kept, concurrency, tiers)
    return kept


def _checked_ids(job_ids: Sequence[str]) -> list[str]:
    if isinstance(job_ids, str):  # a sequence of characters to Python
        raise InvalidOption("job_ids", "one text where a list of ids is wanted", hint=f"[{job_ids[:40]!r}]")
    return list(job_ids)


def load_app(text: str) -> Queue:
    """The Queue that "module:name" means, the working directory searched first. Raises AppImportFailed."""
    from fluxmesh.running import loading

    module_name, found, attribute = text.partition(":")
    if not found or not module_name or not attribute:
        hint = (
            f"{text}:queue, if its Queue has that name" if text.isidentifier() else "such as shop.jobs:queue"
        )
        raise AppImportFailed(f"{text[:200]!r} is not module:queue", hint=hint)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with loading(module_name):
            value: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"
        hint = "run it in the folder where the module lies, or set PYTHONPATH"
        if module_name.endswith(".py"):
            hint = f"{module_name.removesuffix('.py').replace('/', '.')}:{attribute}"
        elif not (isinstance(error, ModuleNotFoundError) and module_name.startswith(str(error.name))):
            hint = f"`python -c 'import {module_name}'` shows where"
        raise AppImportFailed(f"the module {module_name!r} cannot be imported: {what}", hint=hint) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise AppImportFailed(
                f"the module {module_name!r} has no {attribute!r}", hint=_its_queues(module_name)
            )
        value = getattr(value, part)
    if not isinstance(value, Queue):
        raise AppImportFailed(
            f"{text!r} is of type {type(value).__name__} and not a Queue", hint=_its_queues(module_name)
        )
    return value


def _its_queues(module_name: str) -> str:
    names = vars(sys.modules[module_name]).items()
    found = [f"{module_name}:{name}" for name, value in names if isinstance(value, Queue)]
    return " or ".join(found[:3]) or "name its Queue"
