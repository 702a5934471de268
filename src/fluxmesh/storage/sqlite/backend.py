"""`SqliteStorage`: the port's verbs over the writer and the reader. No logic of jobs lives here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import apsw

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.errors import StorageUnreachable
from fluxmesh.events import MAX_TOPICS, Event, decode_event
from fluxmesh.job import Attempt, Job
from fluxmesh.query import Page, Query, checked_limit
from fluxmesh.storage import forks
from fluxmesh.storage.base import checked_batch
from fluxmesh.storage.sqlite import enqueue as enqueue_verbs
from fluxmesh.storage.sqlite import exchange as exchange_verbs
from fluxmesh.storage.sqlite import liveness, operate, ownership, prune, push, reads
from fluxmesh.storage.sqlite.bells import ENDED, EVENT, NOTICE, WORK, Belfry, Bell
from fluxmesh.storage.sqlite.connection import check_present, connect, file_system, path_of, prepare_schema
from fluxmesh.storage.sqlite.engine import Answer, Call, Checkpointer, Reader, Transactor, Writer
from fluxmesh.storage.sqlite.locks import DeathLock
from fluxmesh.storage.sqlite.sqltext import Statements
from fluxmesh.storage.sqlite.step import Shared
from fluxmesh.storage.values import (
    BeatAnswer,
    Cancelled,
    ClaimedJob,
    Counts,
    DeadGroup,
    Done,
    Enqueued,
    ExchangeAnswer,
    ExchangeRequest,
    MeshView,
    OrphansAnswer,
    Owned,
    ProgressNote,
    Promoted,
    Pruned,
    QueueStats,
    Reap,
    Registration,
    Retention,
    Settled,
    StorageInfo,
    TakeAnswer,
    Tended,
    WorkerInfo,
    WorkerRef,
    WorkerView,
)
from fluxmesh.submission import NewJob

LOOK_S: Final = 0.25  # how often to look where there are no doorbells
_WAIT_LOOK_S: Final = 5.0
_LISTEN_TTL_S: Final = 60.0
_EVENTS_KEPT: Final = 1_000
EACH_MOST: Final = 100
_CLOSE_S: Final = 10.0
_CLOSE_LOOK_S: Final = 0.002

T = TypeVar("T")

# Bell and lock of every worker run registered by this process, so that a heartbeat on a storage of its
# own can put back the whole of a missing row.
_registered: dict[tuple[str, str, int], tuple[str | None, str | None]] = {}


class SqliteStorage:
    """One namespace of one file. See fluxmesh.storage.base.Storage for what each verb promises."""

    def __init__(self, path: Path, settings: Settings, clock: Clock, *, inline: bool) -> None:
        self.path = path
        self.clock = clock
        self.namespace = settings.namespace
        self._sql = Statements(settings.namespace)
        self._belfry = Belfry(path.with_name(path.name + "-bells"))
        self._shared = Shared(
            self._sql, clock, self._belfry, proof_of_death=settings.proof_of_death, lease_s=settings.lease_s
        )
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._inline = inline
        self._transactor = Transactor(path, self._shared, settings.durability, lambda: False)
        self._checkpointer = Checkpointer(path, settings.durability)
        self._writer = Writer(self._transactor, clock, self._checkpointer)
        self._reader = Reader(path)
        self._bell: Bell | None = None
        self._work = asyncio.Event()
        self._notice = asyncio.Event()
        self._ended: dict[str, list[asyncio.Event]] = {}
        self._listeners: list[tuple[frozenset[str], asyncio.Queue[Event]]] = []
        if not inline:
            self._writer.start()
            self._reader.start()
            self._checkpointer.start()

    # -- the way to the threads --------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            raise StorageUnreachable(f"{self.path} has been closed", hint="open it again")
        if os.getpid() != self._pid:
            raise StorageUnreachable(f"{self.path} was opened before a fork", hint="open it in the child")

    async def _write(self, verb: Callable[..., Any], *args: Any) -> Any:
        self._check_open()
        future: asyncio.Future[Any] = self._loop.create_future()
        call = Call(verb, args, future, self._loop)
        if self._inline:
            return _answer(self._transactor.run(call)[0])
        self._writer.put(call)
        return await future

    async def _write_each(
        self, verb: Callable[..., list[T]], items: Sequence[Any], *args: Any, leading: tuple[Any, ...] = ()
    ) -> list[T]:
        """A verb over many items, atomic per item, in transactions that stay short for everybody else."""
        answers: list[T] = []
        checked_batch(items)
        for start in range(0, len(items), EACH_MOST):
            answers += await self._write(verb, *leading, items[start : start + EACH_MOST], *args)
        return answers

    async def _read(self, verb: Callable[..., Any], *args: Any) -> Any:
        self._check_open()
        future: asyncio.Future[Any] = self._loop.create_future()
        call = Call(verb, (self._sql, *args), future, self._loop)
        if self._inline:
            return _answer(self._reader.read(call))
        self._reader.put(call)
        return await future

    def _own_bell(self) -> str | None:
        self._check_open()
        if self._bell is None:
            self._bell = Bell(self._belfry, self._loop, self._hear)
        return self._bell.name

    def _hear(self, kind: bytes, body: bytes) -> None:
        if kind == WORK:
            self._work.set()
        elif kind == NOTICE:
            self._notice.set()
        elif kind == ENDED:
            for event in self._ended.get(body.decode("ascii", "replace"), ()):
                event.set()
        elif kind == EVENT:
            event_heard = decode_event(body)
            if event_heard is not None:
                self._pass_on(event_heard)

    def _pass_on(self, event: Event) -> None:
        for topics, heard in self._listeners:
            if event.topic in topics:
                if heard.full():
                    heard.get_nowait()
                heard.put_nowait(event)

    # -- producers -----------------------------------------------------------------------------------
    async def enqueue(self, jobs: Sequence[NewJob], *, queue_cap: int) -> list[Enqueued]:
        answer: list[Enqueued] = await self._write(enqueue_verbs.enqueue, checked_batch(jobs), queue_cap)
        return answer

    async def wait_for(self, job_id: str, timeout_s: float) -> Job | None:
        bell = self._own_bell()
        event = asyncio.Event()
        self._ended.setdefault(job_id, []).append(event)
        try:
            if await self._write(push.watch, job_id, bell, timeout_s):
                await self._wait_ended(job_id, event, timeout_s, rung=bell is not None)
                if bell is not None and not event.is_set():
                    await self._write(push.unwatch, job_id, bell)
        finally:
            waiting = self._ended[job_id]
            waiting.remove(event)
            if not waiting:
                del self._ended[job_id]
        return await self.get(job_id)

    async def _wait_ended(self, job_id: str, event: asyncio.Event, timeout_s: float, *, rung: bool) -> None:
        deadline = self._loop.time() + timeout_s
        while (left := deadline - self._loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _WAIT_LOOK_S if rung else LOOK_S)):
                    await event.wait()
                return
            job = await self.get(job_id)
            if job is None or job.ended:
                return

    # -- workers -------------------------------------------------------------------------------------
    async def register(self, registration: Registration) -> int:
        bell = self._own_bell()
        self._shared.bell_name = bell
        if self._shared.lock is None and self._shared.proof_of_death:
            self._shared.lock = DeathLock(self._belfry.folder)
        lock = None if self._shared.lock is None else self._shared.lock.name
        epoch: int = await self._write(liveness.register, registration, bell, lock)
        _registered[(str(self.path), self.namespace, epoch)] = (bell, lock)
        return epoch

    async def exchange(self, request: ExchangeRequest) -> ExchangeAnswer:
        checked_batch(request.settle)
        checked_batch(request.begin)
        checked_batch(range(request.slots + request.extra))
        answer: ExchangeAnswer = await self._write(exchange_verbs.exchange, request)
        return answer

    async def wait_for_work(self, worker: WorkerRef, timeout_s: float) -> bool:
        self._check_open()
        if self._own_bell() is None:
            await asyncio.sleep(min(timeout_s, LOOK_S))
            return True
        return await _rung(self._work, timeout_s)

    async def wait_for_notice(self, worker: WorkerRef, timeout_s: float) -> bool:
        self._own_bell()
        return await _rung(self._notice, timeout_s)

    async def release(self, worker: WorkerRef, jobs: Sequence[Owned]) -> list[bool]:
        return await self._write_each(ownership.release, jobs, leading=(worker,))

    async def transfer(self, thief: WorkerRef, jobs: Sequence[Owned]) -> list[ClaimedJob]:
        answer: list[ClaimedJob] = await self._write(ownership.transfer, thief, checked_batch(jobs))
        return answer

    async def take_held(self, worker: WorkerRef, slots: int) -> TakeAnswer:
        answer: TakeAnswer = await self._write(ownership.take_held, worker, slots)
        return answer

    async def progress(self, worker: WorkerRef, notes: Sequence[ProgressNote]) -> list[bool]:
        return await self._write_each(ownership.progress, notes, leading=(worker,))

    # -- liveness ------------------------------------------------------------------------------------
    async def beat(self, worker: WorkerRef, owned: Sequence[Owned] | None, view: WorkerView) -> BeatAnswer:
        bell, lock = _registered.get((str(self.path), self.namespace, worker.epoch), (None, None))
        answer: BeatAnswer = await self._write(liveness.beat, worker, owned, view, bell, lock)
        return answer

    async def declare_dead(self, worker: WorkerRef, how: str) -> bool:
        answer: bool = await self._write(liveness.declare_dead, worker, how)
        return answer

    async def orphans(self, limit: int) -> OrphansAnswer:
        answer: OrphansAnswer = await self._write(liveness.orphans, limit)
        return answer

    async def reap(self, items: Sequence[Reap]) -> list[Settled]:
        return await self._write_each(liveness.reap, items)

    async def command(self, worker_id: str, command: str | None) -> bool:
        answer: bool = await self._write(liveness.command, worker_id, command)
        return answer

    # -- housekeeping --------------------------------------------------------------------------------
    async def lead(self, holder: str, ttl_s: float) -> bool:
        answer: bool = await self._write(liveness.lead, holder, round(ttl_s * 1e6))
        return answer

    async def promote(self, limit: int) -> Promoted:
        answer: Promoted = await self._write(exchange_verbs.promote, limit)
        return answer

    async def tend(self, holder: str, ttl_s: float, *, promote: int, orphans: int) -> Tended:
        answer: Tended = await self._write(liveness.tend, holder, round(ttl_s * 1e6), promote, orphans)
        return answer

    async def prune(self, retention: Retention, limit: int) -> Pruned:
        answer: Pruned = await self._write(prune.prune, retention, limit)
        return answer

    # -- operators -----------------------------------------------------------------------------------
    async def cancel(self, ids: Sequence[str]) -> list[Cancelled]:
        return await self._write_each(operate.cancel, ids)

    async def replay(self, ids: Sequence[str]) -> list[Done]:
        return await self._write_each(operate.replay, ids)

    async def discard(self, ids: Sequence[str]) -> list[Done]:
        return await self._write_each(operate.discard, ids)

    async def reprioritise(self, ids: Sequence[str], tier: int) -> list[Done]:
        return await self._write_each(operate.reprioritise, ids, tier)

    async def pause(self, queue: str) -> bool:
        answer: bool = await self._write(operate.pause, queue)
        return answer

    async def resume(self, queue: str) -> bool:
        answer: bool = await self._write(operate.resume, queue)
        return answer

    # -- reads ---------------------------------------------------------------------------------------
    async def get(self, job_id: str) -> Job | None:
        answer: Job | None = await self._read(reads.get, job_id)
        return answer

    async def history(self, job_id: str) -> list[Attempt] | None:
        answer: list[Attempt] | None = await self._read(reads.history, job_id)
        return answer

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 50) -> Page[Job]:
        answer: Page[Job] = await self._read(reads.find, query, cursor, checked_limit(limit))
        return answer

    async def counts(self) -> Counts:
        answer: Counts = await self._read(reads.counts)
        return answer

    async def queue_stats(self) -> list[QueueStats]:
        answer: list[QueueStats] = await self._read(reads.queue_stats, self.clock.wall_us())
        return answer

    async def dlq_groups(self, limit: int) -> list[DeadGroup]:
        answer: list[DeadGroup] = await self._read(reads.dlq_groups, checked_limit(limit))
        return answer

    async def fleet(self) -> list[WorkerInfo]:
        answer: list[WorkerInfo] = await self._read(reads.fleet, self.clock.wall_us(), self.clock.boot_us())
        return answer

    async def mesh_views(self) -> list[MeshView]:
        answer: list[MeshView] = await self._read(reads.mesh_views)
        return answer

    async def info(self) -> StorageInfo:
        size = self.path.stat().st_size if self.path.exists() else 0
        details = (
            ("file system", file_system(self.path) or "unknown"),
            ("size", f"{size:,} bytes"),
            ("doorbells", "yes" if self._own_bell() else "no: looking every 250 ms"),
            ("proof of death", "file locks" if self._shared.proof_of_death else "off: leases only"),
        )
        return StorageInfo(
            "sqlite", str(self.path), self.namespace, apsw.sqlite_lib_version(), details, self.clock.wall_us()
        )

    # -- push ----------------------------------------------------------------------------------------
    async def publish(self, event: Event) -> int:
        answer: int = await self._write(push.publish, event)
        return answer

    @contextlib.asynccontextmanager
    async def subscribe(self, topics: Sequence[str]) -> AsyncIterator[AsyncIterator[Event]]:
        bell = self._own_bell()
        if bell is None:
            raise StorageUnreachable("events need unix datagram sockets", hint="read the lists instead")
        wanted = list(topics)[:MAX_TOPICS]
        heard: asyncio.Queue[Event] = asyncio.Queue(_EVENTS_KEPT)
        entry = (frozenset(wanted), heard)
        await self._write(push.listen, wanted, bell, _LISTEN_TTL_S)
        self._listeners.append(entry)
        renewing = asyncio.create_task(self._keep_listening(wanted, bell))
        try:
            yield _events(heard)
        finally:
            renewing.cancel()
            self._listeners.remove(entry)
            if not self._listeners and not self._closed:
                await self._write(push.unlisten, bell)

    async def _keep_listening(self, topics: list[str], bell: str) -> None:
        while True:
            await asyncio.sleep(_LISTEN_TTL_S / 3)
            with contextlib.suppress(StorageUnreachable):
                await self._write(push.listen, topics, bell, _LISTEN_TTL_S)

    async def close(self) -> None:
        """Verbs under way are finished; the lock is given up, which proves the end of this worker."""
        if self._closed:
            return
        self._closed = True
        if self._bell is not None:
            self._bell.close()
        if self._inline:
            self._transactor.close()
            self._reader.close()
        else:
            self._writer.stop()
            self._reader.stop()
            self._checkpointer.stop()
            # Looked at, not joined in an executor: at the interpreter's end there are no executors any more.
            deadline = self._loop.time() + _CLOSE_S
            threads = (self._writer, self._reader, self._checkpointer)
            while any(thread.is_alive() for thread in threads) and self._loop.time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(_CLOSE_LOOK_S)
        if self._shared.lock is not None:
            self._shared.lock.release()
        self._belfry.close()


async def _rung(rang: asyncio.Event, timeout_s: float) -> bool:
    """Whether it has rung before the time is up; what has rung counts at once, and once."""
    if not rang.is_set():
        try:
            async with asyncio.timeout(timeout_s):
                await rang.wait()
        except TimeoutError:
            return False
    rang.clear()
    return True


async def _events(heard: asyncio.Queue[Event]) -> AsyncIterator[Event]:
    while True:
        yield await heard.get()


def _answer(answer: Answer) -> Any:
    _, value, error = answer
    if error is not None:
        raise error
    return value


async def open_backend(
    url: str, settings: Settings, *, create: bool, clock: Clock, inline: bool = False
) -> SqliteStorage:
    """Open (or create) the file that `url` names. Raises a StorageError that says why it cannot."""
    path = path_of(url)

    def prepare() -> None:
        check_present(path, create=create)
        with forks.opening:
            db = connect(path, durability=settings.durability, create=create)
            try:
                prepare_schema(db, Statements(settings.namespace), path)
            finally:
                db.close()

    if inline:
        prepare()
    else:
        await asyncio.to_thread(prepare)
    return SqliteStorage(path, settings, clock, inline=inline)
