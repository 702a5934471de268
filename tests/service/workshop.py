"""One SQLite file with tasks and workers of a test, and a witness that waits for what workers tell."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import apsw

from fluxmesh.clock import system_clock
from fluxmesh.config import Settings
from fluxmesh.job import Attempt, Job, Status
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import WorkerRef
from fluxmesh.submission import prepare
from fluxmesh.task import TaskRegistry, define
from fluxmesh.worker.config import WorkerConfig
from fluxmesh.worker.isolated.source import BodySource
from fluxmesh.worker.observe import WorkerEvent
from fluxmesh.worker.worker import Worker

LIMIT_S = 30.0
E = TypeVar("E")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


class Witness:
    """An observer that keeps every event and lets a test wait for one, also one that came before."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()

    def __call__(self, event: WorkerEvent) -> None:
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._came.set)  # the beat thread tells of things too

    def all(self, kind: type[E], **fields: Any) -> list[E]:
        return [
            event
            for event in list(self.events)
            if isinstance(event, kind)
            and all(getattr(event, name) == value for name, value in fields.items())
        ]

    async def saw(self, kind: type[E], count: int = 1, limit_s: float = LIMIT_S, **fields: Any) -> list[E]:
        """The first `count` such events, once so many have come."""
        async with asyncio.timeout(limit_s):
            while len(self.all(kind, **fields)) < count:
                self._came.clear()
                await self._came.wait()
        return self.all(kind, **fields)[:count]


class Workshop:
    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.path = tmp_path / "jobs.db"
        self.url = f"sqlite:///{self.path}"
        self.settings = Settings(**{"lease_s": 3.0, "reap_s": 0.2, **settings})
        self.registry = TaskRegistry()
        self.source: BodySource | None = None
        self.clock = system_clock()
        self.witness = Witness()
        self.workers: list[Worker] = []
        self.opened: list[Storage] = []
        self.gates: list[threading.Event | asyncio.Event] = []
        self.storage: Storage

    async def __aenter__(self) -> Workshop:
        self.storage = await self.open(False)
        return self

    async def __aexit__(self, *_: object) -> None:
        # Whatever the test has failed at: bodies that still wait must end, or the failure that is shown is
        # that of this wait; and what stays open is held against a later test.
        for gate in self.gates:
            gate.set()
        try:
            for worker in self.workers:
                worker.stop_now()
            for worker in self.workers:
                async with asyncio.timeout(LIMIT_S):
                    await asyncio.wait((asyncio.ensure_future(worker.wait()),))
                    await worker.gone()
        finally:
            for storage in self.opened:
                await storage.close()

    def gate(self) -> threading.Event:
        """Closed, for bodies on threads to wait at; it opens at the latest when the test is over."""
        gate = threading.Event()
        self.gates.append(gate)
        return gate

    async def open(self, inline: bool) -> Storage:
        storage = await open_storage(self.url, self.settings, create=True, clock=self.clock, inline=inline)
        if not self.workers or not inline:
            self.opened.append(storage)
        return storage

    def task(self, name: str, **options: Any) -> Callable[[F], F]:
        def add(function: F) -> F:
            self.registry.add(define(function, name, options))
            return function

        return add

    async def put(self, task: str, *args: Any, kwargs: dict[str, Any] | None = None, **options: Any) -> str:
        job = prepare({"task": task, **options}).job(list(args), kwargs or {})
        [answer] = await self.storage.enqueue([job], queue_cap=1_000)
        return answer.id

    async def worker(
        self,
        worker_id: str = "w1",
        *,
        concurrency: int = 2,
        grace_s: float = 5.0,
        witness: Witness | None = None,
        open_storage: Callable[[bool], Awaitable[Storage]] | None = None,
        **config: Any,
    ) -> Worker:
        """A started worker; it is stopped with the workshop."""
        worker = self.make_worker(
            worker_id,
            concurrency=concurrency,
            grace_s=grace_s,
            witness=witness,
            open_storage=open_storage,
            **config,
        )
        await worker.start()
        self.workers.append(worker)
        return worker

    def make_worker(
        self,
        worker_id: str = "w1",
        *,
        concurrency: int = 2,
        grace_s: float = 5.0,
        witness: Witness | None = None,
        open_storage: Callable[[bool], Awaitable[Storage]] | None = None,
        **config: Any,
    ) -> Worker:
        return Worker(
            open_storage=open_storage or self._open_for_worker,
            registry=self.registry,
            settings=self.settings,
            config=WorkerConfig(worker_id=worker_id, concurrency=concurrency, grace_s=grace_s, **config),
            clock=self.clock,
            source=self.source,
            observer=witness or self.witness,
        )

    async def _open_for_worker(self, inline: bool) -> Storage:
        return await open_storage(self.url, self.settings, create=False, clock=self.clock, inline=inline)

    async def job(self, job_id: str) -> Job:
        job = await self.storage.get(job_id)
        assert job is not None
        return job

    async def ended(self, job_id: str, limit_s: float = LIMIT_S) -> Job:
        job = await self.storage.wait_for(job_id, limit_s)
        assert job is not None
        assert job.ended, f"still {job.status} after {limit_s} s"
        return job

    async def history(self, job_id: str) -> list[Attempt]:
        return await self.storage.history(job_id) or []

    async def until(self, job_id: str, holds: Callable[[Job], bool], limit_s: float = LIMIT_S) -> Job:
        """The job once this is true of its record. For what only the record tells: it is read again and
        again, and never waited for a fixed time."""
        async with asyncio.timeout(limit_s):
            while not holds(job := await self.job(job_id)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return job

    async def status(self, job_id: str) -> Status:
        return (await self.job(job_id)).status

    @contextmanager
    def back_door(self) -> Iterator[apsw.Connection]:
        """The file by the storage's own driver: a second SQLite library would break the first one's locks."""
        with closing(apsw.Connection(str(self.path))) as db:
            db.set_busy_timeout(5_000)
            yield db

    @staticmethod
    def ref(worker: Worker) -> WorkerRef:
        return WorkerRef(worker.worker_id, worker.epoch)


def workshop(
    **settings: Any,
) -> Callable[[Callable[Concatenate[Workshop, P], Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Make a test of an `async def` whose first parameter, `shop`, is a Workshop of its own."""

    def decorate(
        body: Callable[Concatenate[Workshop, P], Coroutine[Any, Any, None]],
    ) -> Callable[..., None]:
        async def play(tmp_path: Path, *args: P.args, **kwargs: P.kwargs) -> None:
            async with asyncio.timeout(150), Workshop(tmp_path, **settings) as shop:
                await body(shop, *args, **kwargs)

        @functools.wraps(body)
        def test(tmp_path: Path, *args: P.args, **kwargs: P.kwargs) -> None:
            asyncio.run(play(tmp_path, *args, **kwargs))

        # pytest asks for fixtures by the names it finds in the signature.
        own = list(inspect.signature(body).parameters.values())[1:]
        first = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]
        return test

    return decorate
