"""Resources in a worker: built when first needed, shared within their scope, closed in reverse order.

Those of scope WORKER, and of scope THREAD for bodies on the loop, are built once by a task of their own:
jobs wait for it, and a job that gives up waiting does not stop it. Those of a `def` body's own thread are
built and closed there. What fails to be built is tried again by the next job that needs it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Final, TypeVar

from fluxmesh.errors import ResourceFailed
from fluxmesh.obs.log import get_logger
from fluxmesh.outcome import DeadLetter, JobInterrupted, RetryAfter, Snooze
from fluxmesh.resources import (
    ResourceDefinition,
    ResourceRegistry,
    Scope,
    SupplyPlan,
    arguments_for,
    plan_supply,
)
from fluxmesh.worker.failure import message_of
from fluxmesh.worker.threads import ThreadCall, ThreadPool

BUILD_S: Final = 60.0
CLOSE_S: Final = 5.0
_SAID: Final = (Snooze, RetryAfter, DeadLetter, ResourceFailed)
_PLANS_MAX: Final = 1_024
T = TypeVar("T")
_log = get_logger("worker")


class Built:
    """One living resource."""

    __slots__ = ("definition", "generator", "value")

    def __init__(self, definition: ResourceDefinition, value: Any, generator: Any = None) -> None:
        self.definition = definition
        self.value = value
        self.generator = generator


class Given:
    """What one run was given: values by name, and what ends with the run."""

    __slots__ = ("late", "own", "values")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.own: list[Built] = []
        self.late: tuple[ResourceDefinition, ...] = ()


class _OfThread(threading.local):
    """Resources of the thread that looks."""

    def __init__(self) -> None:
        self.built: dict[str, Built] = {}


class Supply:
    """Builds and closes for one worker. All on its loop, but for `call` and `end_thread`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, registry: ResourceRegistry) -> None:
        self._loop = loop
        self._registry = registry
        self._pool = ThreadPool(loop, f"{name}-resource")
        self._shared: dict[str, asyncio.Task[Built]] = {}
        self._built: list[Built] = []  # shared ones, in the order in which they were finished
        self._plans: dict[tuple[bool, tuple[str, ...]], SupplyPlan] = {}
        self._here = _OfThread()
        self._threads: set[int] = set()  # those that have resources of their own
        self._thread_ended = asyncio.Event()
        self._context = contextvars.copy_context()  # what is shared belongs to no job

    # -- giving --------------------------------------------------------------------------------------
    async def give(self, given: Given, names: tuple[str, ...], *, on_thread: bool) -> None:
        """Fill `given` with what can be built from the loop; `late` of it is left to `call`.

        Raises ResourceFailed, or what a resource's function raised to steer the job (Snooze and its like).
        What was built so far is in `given` all the same."""
        plan = self._plan(names, on_thread=on_thread)
        given.late = plan.late
        for definition in plan.early:
            if definition.scope is Scope.TASK:
                built = await self._make(definition, arguments_for(definition, given.values))
                given.own.append(built)
            else:
                built = await self._share(definition, given.values)
            given.values[definition.name] = built.value

    def _plan(self, names: tuple[str, ...], *, on_thread: bool) -> SupplyPlan:
        plan = self._plans.get((on_thread, names))
        if plan is None:
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            plan = plan_supply(self._registry, names, on_thread=on_thread)
            self._plans[on_thread, names] = plan
        return plan

    async def _share(self, definition: ResourceDefinition, values: Mapping[str, Any]) -> Built:
        task = self._shared.get(definition.name)
        if task is None:
            building = self._build_shared(definition, arguments_for(definition, values))
            name, context = f"fluxmesh-resource-{definition.name}", self._context.copy()
            task = self._loop.create_task(building, name=name, context=context)
            task.add_done_callback(_heard)
            self._shared[definition.name] = task
        return await asyncio.shield(task)

    async def _build_shared(self, definition: ResourceDefinition, arguments: dict[str, Any]) -> Built:
        try:
            if definition.scope is Scope.THREAD and not definition.is_async:
                built = build(definition, arguments)  # on the loop's own thread, which it belongs to
            else:
                built = await self._make(definition, arguments)
        except BaseException:
            self._shared.pop(definition.name, None)
            raise
        self._built.append(built)
        _log.debug("resource built", resource=definition.name, scope=definition.scope.value)
        return built

    async def _make(self, definition: ResourceDefinition, arguments: dict[str, Any]) -> Built:
        """Build it on the loop if it is async, else on a thread."""
        try:
            async with asyncio.timeout(BUILD_S):
                if definition.is_async:
                    return await build_async(definition, arguments)
                return await self._on_thread(lambda: build(definition, arguments), self._discard)
        except TimeoutError:  # the bound's: one of the function's own comes as ResourceFailed
            raise ResourceFailed(
                f"resource {definition.name!r} was not built in {BUILD_S:g} s", hint="bound what it waits for"
            ) from None

    async def _on_thread(self, work: Callable[[], T], late: Callable[[T], None] | None = None) -> T:
        """Run this on a thread that no body uses. Whoever stops waiting interrupts it; what it made all the
        same goes to `late`."""
        ended: asyncio.Future[None] = self._loop.create_future()
        unwanted = False

        def on_end(call: ThreadCall) -> None:
            if unwanted or ended.cancelled():
                forgo(call)
            else:
                ended.set_result(None)

        def forgo(call: ThreadCall) -> None:
            if late is not None and call.error is None:
                late(call.value)

        call = ThreadCall(work, [], {}, contextvars.copy_context(), on_end)
        self._pool.submit(call)
        try:
            await ended
        except asyncio.CancelledError:
            if ended.done() and not ended.cancelled():
                forgo(call)  # it was there, and the cancellation with it
            else:
                unwanted = True
                call.interrupt(JobInterrupted)
                self._pool.abandon(call)
            raise
        error, call.error = call.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # it holds this frame by its traceback
        value: T = call.value
        return value

    def _discard(self, built: Built) -> None:
        """Close what was built too late, once it is there."""
        self._pool.submit(
            ThreadCall(lambda: close(built), [], {}, contextvars.copy_context(), lambda _: None)
        )

    # -- on the body's thread ------------------------------------------------------------------------
    def call(
        self,
        function: Callable[..., Any],
        names: tuple[str, ...],
        given: Given,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a `def` body with what it needs, and close on this thread what was built for it here."""
        own: list[Built] = []
        values = given.values
        try:
            for definition in given.late:
                built = self._built_here(definition, values, own)
                values[definition.name] = built.value
            kwargs.update({name: values[name] for name in names})
            return function(*args, **kwargs)
        finally:
            _close_all(own)

    def _built_here(
        self, definition: ResourceDefinition, values: Mapping[str, Any], own: list[Built]
    ) -> Built:
        if definition.scope is Scope.TASK:
            built = build(definition, arguments_for(definition, values))
            own.append(built)
            return built
        here = self._here.built
        if definition.name not in here:
            self._threads.add(threading.get_ident())
            here[definition.name] = build(definition, arguments_for(definition, values))
        return here[definition.name]

    def end_thread(self) -> None:
        """The thread that calls this ends: so do its resources."""
        if threading.get_ident() not in self._threads:
            return
        here = self._here.built
        _close_all(list(here.values()))
        here.clear()
        self._threads.discard(threading.get_ident())
        try:
            self._loop.call_soon_threadsafe(self._thread_ended.set)
        except RuntimeError:
            pass  # the loop is closed: nobody waits for this thread

    # -- closing ---------------------------------------------------------------------------------------
    async def take_back(self, given: Given) -> None:
        """Close what was built for one run, the last one first. Bounded; failures are logged."""
        while given.own:
            await self._close(given.own.pop())

    @property
    def empty(self) -> bool:
        """Nothing was built that would have to be closed."""
        return not (self._shared or self._threads)

    async def close(self) -> None:
        """Wait for the threads that have resources of their own, which must have been told to end; then close
        what the whole worker shared, the last one first. Each is given CLOSE_S."""
        try:
            async with asyncio.timeout(CLOSE_S):
                while self._threads:
                    self._thread_ended.clear()
                    await self._thread_ended.wait()
        except TimeoutError:
            _log.warning("resources of a thread were not closed in time", threads=len(self._threads))
        for task in list(self._shared.values()):
            task.cancel()  # it is built no more; what is done already does not hear of it
        self._shared.clear()
        try:
            while self._built:
                await self._close(self._built[-1])
                self._built.pop()
        finally:
            for built in self._built:
                _log.warning("resource not closed", resource=built.definition.name, error="no time was left")

    def stop(self) -> None:
        """Let the threads end."""
        self._pool.close()

    async def _close(self, built: Built) -> None:
        definition = built.definition
        try:
            async with asyncio.timeout(CLOSE_S):
                if definition.is_async or _closes_on_loop(built):
                    await close_async(built)
                elif definition.scope is Scope.THREAD:
                    close(built)
                else:
                    await self._on_thread(lambda: close(built))
        except Exception as error:
            _not_closed(definition, error)


def _heard(task: asyncio.Task[Built]) -> None:
    """Take note of an error, so that it is not reported as lost when every job has stopped waiting."""
    if not task.cancelled():
        task.exception()


def build(definition: ResourceDefinition, arguments: dict[str, Any]) -> Built:
    """Call the function of a sync resource. Raises ResourceFailed, or what the function raised to steer."""
    try:
        made = definition.factory(**arguments)
        if not definition.yields:
            return Built(definition, made)
        return Built(definition, next(made), made)
    except _SAID:
        raise
    except StopIteration:
        raise _yielded_nothing(definition) from None
    except Exception as error:
        raise _failed(definition, error) from error


async def build_async(definition: ResourceDefinition, arguments: dict[str, Any]) -> Built:
    """The same for an async one."""
    try:
        made = definition.factory(**arguments)
        if not definition.yields:
            return Built(definition, await made)
        return Built(definition, await anext(made), made)
    except _SAID:
        raise
    except StopAsyncIteration:
        raise _yielded_nothing(definition) from None
    except Exception as error:
        raise _failed(definition, error) from error


def _yielded_nothing(definition: ResourceDefinition) -> ResourceFailed:
    return ResourceFailed(f"resource {definition.name!r} yielded nothing ({definition.where})")


def _failed(definition: ResourceDefinition, error: Exception) -> ResourceFailed:
    what = f"{type(error).__name__}: {message_of(error)}"
    return ResourceFailed(f"resource {definition.name!r} could not be built: {what}")


def close(built: Built) -> None:
    """Go on after the `yield`; what a plain function made is closed by its own close(), if it has one."""
    if built.generator is None:
        method = _closer(built.value, ("close",))
        if method is not None:
            method()
        return
    try:
        next(built.generator)
    except StopIteration:
        return
    built.generator.close()
    raise _yielded_twice(built)


async def close_async(built: Built) -> None:
    """The same on the loop, by aclose() or close()."""
    if built.generator is None:
        method = _closer(built.value, ("aclose", "close"))
        answer = method() if method is not None else None
        if inspect.isawaitable(answer):
            await answer
    elif not built.definition.is_async:
        close(built)
    else:
        try:
            await anext(built.generator)
        except StopAsyncIteration:
            return
        await built.generator.aclose()
        raise _yielded_twice(built)


def _yielded_twice(built: Built) -> ResourceFailed:
    return ResourceFailed(f"resource {built.definition.name!r} yielded twice ({built.definition.where})")


def _closer(value: Any, names: Iterable[str]) -> Callable[[], Any] | None:
    if isinstance(value, type | ModuleType):  # `os.close` closes something else
        return None
    for name in names:
        method = getattr(value, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    return None


def _closes_on_loop(built: Built) -> bool:
    """True for what a plain function made and only a loop can close."""
    if built.generator is not None:
        return False
    method = _closer(built.value, ("aclose", "close"))
    return inspect.iscoroutinefunction(method)


def _close_all(own: list[Built]) -> None:
    """On the thread that built them, the last one first. An interruption of the body that comes so late
    stops one of them, and not the rest."""
    while own:
        built = own.pop()
        try:
            if _closes_on_loop(built):
                raise ResourceFailed(
                    "its close() is async, and it belongs to a thread", hint="make the resource async"
                )
            close(built)
        except BaseException as error:
            _not_closed(built.definition, error)


def _not_closed(definition: ResourceDefinition, error: BaseException) -> None:
    what = f"{type(error).__name__}: {message_of(error)}"
    _log.warning("resource not closed", resource=definition.name, error=what)
