"""The program of a body process: loads the tasks, then runs one job at a time, on its main thread.

The event loop turns while a job is awaited and while an `async def` body runs; a `def` body is called
outside of it, as on a thread of its own, and may start a loop itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

import msgspec

from fluxmesh.callshape import left_open
from fluxmesh.clock import system_clock
from fluxmesh.codec import decode_options, decode_payload
from fluxmesh.config import Settings
from fluxmesh.context import Context, current_run
from fluxmesh.errors import FluxMeshError
from fluxmesh.job import JobError, Outcome
from fluxmesh.obs.log import configure
from fluxmesh.outcome import End
from fluxmesh.task import TaskDefinition, TaskRegistry
from fluxmesh.worker import ending
from fluxmesh.worker.failure import describe, without_tail
from fluxmesh.worker.forked import end_if_forked
from fluxmesh.worker.isolated.control import Control, Handle, be_deaf, install_signals
from fluxmesh.worker.isolated.frames import Broken, Ended, Hello, Inflow, Ready, Start, framed, from_worker
from fluxmesh.worker.supply import Given, Supply
from fluxmesh.worker.threads import ThreadCall

_PR_SET_PDEATHSIG: Final = 1
_READ_BYTES: Final = 256 << 10
_BROKEN: Final = 3
_JUNK: Final = (msgspec.MsgspecError, ValueError, RecursionError)
Load = Callable[[bytes, Settings], TaskRegistry]


def end_with(worker_pid: int) -> None:
    """Have the kernel kill this process when the worker dies, at whatever instant. Linux; elsewhere the end
    of the pipe does it, once the interpreter can see it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != worker_pid:
        os._exit(1)


def serve(fd: int, worker_pid: int, load: Load) -> int:
    """Run until the worker closes the pipe. `load` finds the tasks by the worker's spec."""
    end_with(worker_pid)
    install_signals()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    hello = _hello(sock)
    if hello is None:
        return 1
    if hello.log is not None:
        configure(*hello.log)
    try:
        registry = load(hello.spec, hello.settings)
    except BaseException as error:
        what = f"{error}" if isinstance(error, FluxMeshError) else describe(error).text
        sock.sendall(framed(Broken(what[-4_000:])))
        return _BROKEN
    gc.collect()
    gc.freeze()
    Bodies(sock, hello, registry).run()
    return 0


def _hello(sock: socket.socket) -> Hello | None:
    inflow = Inflow()
    while True:
        data = sock.recv(_READ_BYTES)
        if not data:
            return None
        for message in inflow.take(data, from_worker):
            return message if isinstance(message, Hello) else None


class Bodies:
    """The jobs of one body process, one after the other."""

    def __init__(self, sock: socket.socket, hello: Hello, registry: TaskRegistry) -> None:
        self._pid = os.getpid()
        self._clock = system_clock()
        self._settings = hello.settings
        self._registry = registry
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._supply = Supply(self._loop, hello.name, registry.resources)
        self._control = Control(sock, self._deliver)
        self._next: asyncio.Future[Start | None] = self._loop.create_future()

    def _deliver(self, start: Start | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this was the last
            self._loop.call_soon_threadsafe(self._next.set_result, start)

    def run(self) -> None:
        """Until the worker wants no more of it; then close what was built."""
        self._control.start()
        self._control.send(Ready())
        while (start := self._loop.run_until_complete(self._next)) is not None:
            self._next = self._loop.create_future()
            self._run(start)
        self._close()

    def _close(self) -> None:
        self._supply.end_thread()
        self._loop.run_until_complete(self._supply.close())
        self._supply.stop()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    # -- one job -------------------------------------------------------------------------------------------
    def _run(self, start: Start) -> None:
        job = start.job
        if start.begin_by_s is not None and self._clock.mono_s() > start.begin_by_s:
            # All processes were stopped together, perhaps.
            self._control.finish(Ended(job.token, End(Outcome.INTERRUPTED)))
            return
        context = Context(job, decode_options(job.options), self._control.notify)
        self._control.admit(context)
        with _bounded(start.address_space_bytes):
            outcome = self._outcome(job.task, job.payload, context)
        install_signals()  # the body may have set its own
        end, raised = (outcome, None) if isinstance(outcome, End) else (None, outcome)
        self._control.finish(Ended(job.token, end, raised, context.reported))

    def _outcome(self, task: str, payload: bytes, context: Context) -> End | ending.Raised:
        definition = self._registry.get(task)
        if definition is None:
            message = f"task {task!r} is not among those that its process has loaded"
            return End(Outcome.FAILED, error=JobError("UnknownTask", message))
        try:
            args, kwargs = decode_payload(payload)
        except _JUNK as error:
            return ending.undecodable(error)
        given = Given()
        seen = contextvars.copy_context()
        seen.run(current_run.set, context)
        try:
            value = self._value(definition, context, given, seen, args, kwargs)
        except BaseException as error:  # of any kind: it ends the job and nothing else
            end_if_forked(self._pid, error)
            without_tail(error, be_deaf.__code__)
            return ending.seen(error)
        else:
            end_if_forked(self._pid, None)
            return ending.returned(value, self._settings.result_limit_bytes)
        finally:
            if given.own:
                self._loop.run_until_complete(self._supply.take_back(given))

    def _value(
        self,
        definition: TaskDefinition,
        context: Context,
        given: Given,
        seen: contextvars.Context,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        function = definition.function
        definition.shape.place(args, kwargs, context)
        names = left_open(definition.shape.fillable(self._registry.resources), args, kwargs)
        on_thread = not definition.is_async

        async def inner() -> Any:
            if names:
                await self._supply.give(given, names, on_thread=on_thread)
            if on_thread:
                return None
            kwargs.update({name: given.values[name] for name in names})
            return await function(*args, **kwargs)

        if definition.is_async:
            return self._on_loop(inner(), seen)
        if names:
            self._on_loop(inner(), seen)
            return self._called(self._supply.call, [function, names, given, args, kwargs], {}, seen)
        return self._called(function, args, kwargs, seen)

    def _on_loop(self, work: Coroutine[Any, Any, Any], seen: contextvars.Context) -> Any:
        raised: list[BaseException] = []

        async def kept() -> Any:
            # SystemExit would leave the loop otherwise, past everything that waits in it.
            try:
                return await work
            except BaseException as error:
                raised.append(error)

        value = None
        task = self._loop.create_task(kept(), context=seen)
        with self._under_control(task):
            try:
                value = self._loop.run_until_complete(task)
            except asyncio.CancelledError as error:  # it was cancelled before it began
                work.close()
                raised.append(error)
        try:
            if raised:
                raise raised[0]
        finally:
            raised.clear()  # they hold this frame by their tracebacks
        return value

    def _called(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        seen: contextvars.Context,
    ) -> Any:
        call = ThreadCall(function, args, kwargs, seen, lambda _: None)
        with self._under_control(call):
            call.execute()
        error, value = call.error, call.value
        call.error = call.value = None
        try:
            if error is not None:
                raise error
        finally:
            del error
        return value

    @contextlib.contextmanager
    def _under_control(self, handle: Handle) -> Iterator[None]:
        self._control.enter(handle)
        try:
            yield
        finally:
            self._control.leave()


@contextlib.contextmanager
def _bounded(address_space_bytes: int | None) -> Iterator[None]:
    """Where the worker cannot see how much a process takes, the kernel refuses it more: a MemoryError."""
    if address_space_bytes is None or sys.platform == "win32":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
