"""Running a worker inside this program: on a thread of its own, or in the calling thread until a signal.

The worker has its own event loop, never the portal's: a body may block it without harm to anybody who
submits jobs meanwhile.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import difflib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from msgspec import structs

from fluxmesh.clock import Clock, system_clock
from fluxmesh.config import Settings, load_settings
from fluxmesh.errors import InvalidOption, UsageError, WaitTimeout, WorkerFenced, WorkerRetired
from fluxmesh.job import TIERS
from fluxmesh.outcome import checked_delay_s
from fluxmesh.storage.registry import open_storage
from fluxmesh.submission import checked_name, checked_tier, split_queues

if TYPE_CHECKING:
    from fluxmesh.mesh.node import MeshNode
    from fluxmesh.mesh.options import MeshWorker
    from fluxmesh.queue import Queue
    from fluxmesh.storage.base import Storage
    from fluxmesh.worker.config import WorkerEnd
    from fluxmesh.worker.keeper_process import KeeperProcess
    from fluxmesh.worker.observe import Observer
    from fluxmesh.worker.signals import StopSignals
    from fluxmesh.worker.worker import Worker

EXIT_BUDGET_S: Final = 1.5
_loading: list[str] = []  # modules that are being imported for a worker now


@contextlib.contextmanager
def loading(module: str) -> Iterator[None]:
    """While a module is imported for a worker, it must not start one itself."""
    _loading.append(module)
    try:
        yield
    finally:
        _loading.pop()


def refuse_while_loading() -> None:
    """Raises UsageError for a worker that a module starts while it is imported for one."""
    if _loading:
        raise UsageError(
            f"run_worker() is called while {_loading[-1]!r} is imported for a worker",
            hint='put the call under `if __name__ == "__main__":`',
        )


def keeper_for(url: str, settings: Settings, clock: Clock | None) -> KeeperProcess | None:
    """What will keep the lease of a worker in this program while a body lets it say nothing
    (worker/keeper.py). None: it is switched off, or the storage or the clock lives in this process alone."""
    from fluxmesh.clock import SystemClock
    from fluxmesh.worker.keeper_process import KeeperProcess

    shared = not url.startswith("memory:") and (clock is None or isinstance(clock, SystemClock))
    possible = settings.keeper and shared and os.name == "posix" and bool(sys.executable)
    return KeeperProcess(url, settings) if possible else None


class WorkerOptions(TypedDict, total=False):
    """What `queue.worker` and `queue.run_worker` take; what is left out, or None, is as the settings say.

    `reserve`: slots kept free for a tier. `mesh`: be a node of the mesh; None: as the settings say, False:
    of none. `mesh_optional`: if the mesh cannot be had, log an error and run without it."""

    tiers: Sequence[int | str] | None
    concurrency: int | None
    reserve: Mapping[int | str, int] | None
    grace_s: float | None
    worker_id: str | None
    on_lease_lost: str | None
    mesh: MeshWorker | Literal[False] | None
    mesh_optional: bool | None


def refuse_unknown(verb: str, options: Iterable[str]) -> None:
    """Raises TypeError as Python does for an argument that `verb` does not take, and says which may have been
    meant."""
    known = tuple(WorkerOptions.__annotations__)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"{verb}() got an unexpected keyword argument {name!r}{meant}")


def worker_maker(
    queue: Queue,
    queues: Sequence[str],
    *,
    clock: Clock | None,
    create: bool | None,
    observer: Observer | None = None,
    tiers: Sequence[int | str] | None = None,
    concurrency: int | None = None,
    reserve: Mapping[int | str, int] | None = None,
    grace_s: float | None = None,
    worker_id: str | None = None,
    on_lease_lost: str | None = None,
    mesh: MeshWorker | Literal[False] | None = None,
    mesh_optional: bool | None = None,
) -> tuple[Callable[[], Worker], str]:
    """What makes the worker on its loop, and its id. Options are checked now, so that a mistake is seen where
    it was made."""
    from fluxmesh.bodies import source_of_registry
    from fluxmesh.queue import checked_reserve, default_worker_id
    from fluxmesh.worker.config import WorkerConfig
    from fluxmesh.worker.meshing import mesh_of
    from fluxmesh.worker.worker import Worker

    names, served = _served(queues, tiers)
    given = {
        "concurrency": concurrency,
        "grace_s": grace_s,
        "on_lease_lost": on_lease_lost,
        "mesh_optional": mesh_optional,
    }
    settings = load_settings(
        {**structs.asdict(queue.settings), **{k: v for k, v in given.items() if v is not None}}
    )
    config = WorkerConfig(
        worker_id=(
            default_worker_id() if worker_id is None else checked_name("worker_id", worker_id, queue=True)
        ),
        queues=names,
        tiers=served,
        concurrency=settings.concurrency,
        reserve=checked_reserve(reserve or {}, settings.concurrency, served),
        grace_s=settings.grace_s,
        on_lease_lost=settings.on_lease_lost,
        mesh=mesh_of(mesh, settings),
        mesh_optional=settings.mesh_optional,
    )

    async def opened(inline: bool) -> Storage:  # noqa: FBT001
        return await open_storage(queue.url, settings, create=create is not False, clock=clock, inline=inline)

    def make() -> Worker:
        return Worker(
            open_storage=opened,
            registry=queue.registry,
            settings=settings,
            config=config,
            clock=clock or system_clock(),
            source=source_of_registry(queue.registry),
            observer=observer,
        )

    return make, config.worker_id


def _served(
    queues: Sequence[str], tiers: Sequence[int | str] | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names of queues, and tiers, by either way to say them."""
    names, served = split_queues(queues)
    if tiers is None:
        return names, served
    if len(served) < len(TIERS):
        raise InvalidOption("tiers", "given together with tier names in queues", hint="give one of them")
    served = tuple(sorted({checked_tier(tier) for tier in tiers}))
    if not served:
        raise InvalidOption("tiers", "the list is empty", hint="leave it out for all tiers")
    return names, served


class WorkerHandle:
    """A worker on a daemon thread of this process: start, stop, wait. It runs once.

    The async verbs are under `aio`, to be awaited on any loop. At the interpreter's end a worker that is
    still running is hurried, as by a second signal."""

    def __init__(
        self, make: Callable[[], Worker], worker_id: str, keeper: KeeperProcess | None = None
    ) -> None:
        self.worker_id: Final = worker_id
        self._make = make
        self._keeper = keeper
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._started: Future[None] = Future()
        self._ended: Future[WorkerEnd] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None
        self._stops: set[asyncio.Task[None]] = set()

    @property
    def aio(self) -> AsyncWorkerHandle:
        """The same verbs, to be awaited."""
        return AsyncWorkerHandle(self)

    @property
    def mesh(self) -> MeshNode | None:
        """Its node in the mesh, once it has started; None: it is in none."""
        return self._worker.mesh if self._worker is not None else None

    @property
    def running_count(self) -> int:
        """How many jobs it runs now."""
        return self._worker.running_count if self._worker is not None else 0

    def start(self) -> None:
        """Open the storage, register, begin to claim. Raises what hinders it. A second call does nothing
        while it runs, and is a UsageError once it has ended."""
        self._begin().result()

    def stop(self, grace: float | None = None) -> None:
        """Claim no more, hand back what has not started, give running jobs `grace` seconds (default: the
        worker's own), hand back the rest, end. Returns when it has ended; may be called again."""
        ended = self._drain(grace)
        if ended is not None:
            ended.exception()

    def wait(self, timeout: float | None = None) -> WorkerEnd:
        """How the worker ended, once it has. Raises WaitTimeout."""
        left_s = None if timeout is None else checked_delay_s("timeout", timeout)
        try:
            return self._must_have_begun().result(left_s)
        except TimeoutError:
            raise _still_runs(self.worker_id, timeout) from None

    def stop_now(self) -> None:
        """End within a second: hand back everything without waiting for it. From any thread."""
        if self._worker is not None:
            self._worker.stop_now()

    def _begin(self) -> Future[None]:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"fluxmesh-worker-{self.worker_id}", daemon=True
                )
                atexit.register(self._end, os.getpid())
                self._thread.start()
            elif self._ended.done() and self._ended.exception() is None:
                raise UsageError(
                    f"worker {self.worker_id!r} has ended", hint="make a new one: queue.worker()"
                )
        return self._started

    def _serve(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            for future in (self._started, self._ended):
                if not future.done():
                    future.set_exception(error)

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        worker = self._worker = self._make()
        with _kept(self._keeper, worker) as keep:
            await worker.start()
            keep()
            self._started.set_result(None)
            end = await worker.wait()
            await asyncio.gather(*self._stops, return_exceptions=True)
            self._ended.set_result(end)
            await worker.gone()

    def _drain(self, grace: float | None) -> Future[WorkerEnd] | None:
        """Ask for the end; None if there was no start."""
        grace_s = None if grace is None else checked_delay_s("grace", grace)
        if self._thread is None:
            return None
        if self._started.exception() is None and not self._ended.done() and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._stop_here, grace_s)
        return self._ended

    def _stop_here(self, grace_s: float | None) -> None:
        if self._worker is not None:
            self._stops.add(asyncio.get_running_loop().create_task(self._worker.stop(grace_s)))

    def _must_have_begun(self) -> Future[WorkerEnd]:
        if self._thread is None:
            raise UsageError(f"worker {self.worker_id!r} was not started", hint="call start() first")
        return self._ended

    def __repr__(self) -> str:
        state = "ended" if self._ended.done() else "new" if self._thread is None else "started"
        return f"<WorkerHandle {self.worker_id} {state}>"

    def _end(self, pid: int) -> None:
        if pid == os.getpid() and self._thread is not None and not self._ended.done():
            self.stop_now()
            self._thread.join(EXIT_BUDGET_S)


class AsyncWorkerHandle:
    """The verbs of a worker handle, to be awaited on any loop but the worker's own."""

    __slots__ = ("_handle",)

    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle

    async def start(self) -> None:
        await asyncio.wrap_future(self._handle._begin())

    async def stop(self, grace: float | None = None) -> None:
        ended = self._handle._drain(grace)
        if ended is not None:
            with contextlib.suppress(Exception):
                await asyncio.shield(asyncio.wrap_future(ended))

    async def wait(self, timeout: float | None = None) -> WorkerEnd:
        left_s = None if timeout is None else checked_delay_s("timeout", timeout)
        waiting = asyncio.wrap_future(self._handle._must_have_begun())
        try:
            # Shielded: giving up the wait must not cancel the future that others wait for.
            return await asyncio.wait_for(asyncio.shield(waiting), left_s)
        except TimeoutError:
            raise _still_runs(self._handle.worker_id, timeout) from None


def _still_runs(worker_id: str, timeout: float | None) -> WaitTimeout:
    return WaitTimeout(f"worker {worker_id!r} still runs after {timeout:g} s", hint="stop() ends it")


@contextlib.contextmanager
def _kept(keeper: KeeperProcess | None, worker: Worker) -> Iterator[Callable[[], None]]:
    """Around the life of a worker: what is yielded is called when it has started. A worker that ends with
    bodies left is kept until they have ended, which its keeper sees by itself."""
    if keeper is None:
        yield lambda: None
        return
    keeper.begin(worker)
    try:
        yield keeper.start
    finally:
        if not worker.left_running:
            keeper.close()


def run_until_signal(make: Callable[[], Worker], keeper: KeeperProcess | None = None) -> WorkerEnd:
    """Run a worker in this thread until it ends. In the main thread the first SIGTERM or SIGINT drains it
    and the second one hurries it.

    Raises WorkerRetired if a body could not be stopped, WorkerFenced if another took over the id, and what
    hinders the start."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise UsageError(
            "run_worker() blocks, and an event loop runs in this thread", hint="use queue.worker(…).aio"
        )
    runner = asyncio.Runner()
    left_running = 0
    try:
        end, left_running = runner.run(_until_signal(make, keeper))
    finally:
        if not left_running:
            # Else closing the loop would wait for an async body that swallows its cancellation.
            runner.close()
    match end.name:
        case "RETIRED":
            raise WorkerRetired(
                "the worker ended because the body of a job could not be stopped",
                hint="end this process, so that the job is taken back, and start another",
            )
        case "FENCED":
            raise WorkerFenced(
                "the worker ended because another one registered under its id, or it was declared dead",
                hint="give every worker an id of its own",
            )
        case _:
            return end


async def _until_signal(make: Callable[[], Worker], keeper: KeeperProcess | None) -> tuple[WorkerEnd, int]:
    """How the worker ended, and how many bodies it left."""
    from fluxmesh.worker.config import WorkerEnd
    from fluxmesh.worker.signals import StopSignals

    worker = make()
    loop = asyncio.get_running_loop()
    starting = loop.create_task(worker.start())
    stops: list[asyncio.Task[None]] = []

    def stop() -> None:
        if starting.done():
            stops.append(loop.create_task(worker.stop()))
        else:
            starting.cancel()

    with _handling(StopSignals(stop, worker.stop_now, gap_s=0)), _kept(keeper, worker) as keep:
        try:
            await starting
            keep()
        except asyncio.CancelledError:
            return WorkerEnd.STOPPED, 0
        end = await worker.wait()
        await asyncio.gather(*stops, return_exceptions=True)
    return end, worker.left_running


@contextlib.contextmanager
def _handling(signals: StopSignals) -> Iterator[None]:
    """Only the main thread may handle signals; elsewhere they stay with whoever has them. Afterwards the
    program's own handlers are back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    signals.install()
    try:
        yield
    finally:
        signals.remove()
        for number, handler in before:
            if handler is not None:
                signal.signal(number, handler)
