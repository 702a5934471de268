"""Resources in a running worker: who gets one, how often it is built, when and where it is closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from fluxmesh.context import current_run
from fluxmesh.errors import ResourceFailed
from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import Snooze
from fluxmesh.resources import ResourceRegistry, Scope, define_resource
from fluxmesh.worker import supply
from fluxmesh.worker.observe import JobStarted
from tests.service.log_tap import tapped
from tests.service.workshop import Workshop, workshop

ONCE = {"max_retries": 0}
AT_ONCE = {"max_retries": 2, "backoff_strategy": "fixed", "backoff_base_seconds": 0.0}


def resource(
    shop: Workshop, scope: Scope = Scope.WORKER, name: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(factory: Callable[..., Any]) -> Callable[..., Any]:
        shop.registry.resources.add(define_resource(factory, scope=scope, name=name))
        return factory

    return add


async def stopped(shop: Workshop) -> None:
    for worker in shop.workers:
        await worker.stop(5)


class Closing:
    """What a plain function returns: it closes itself."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def close(self) -> None:
        self.told.append(f"closed on {where()}")


class AsyncClosing(Closing):
    async def aclose(self) -> None:
        self.told.append(f"aclosed on {where()}")


def where() -> str:
    return "the loop" if threading.current_thread() is threading.main_thread() else "a thread"


@workshop()
async def test_a_worker_resource_is_built_once_off_the_loop_and_closed_at_the_end(shop: Workshop) -> None:
    told: list[str] = []

    @resource(shop)
    def pool() -> Iterator[list[str]]:
        told.append(f"built on {where()}")
        yield told
        told.append(f"closed on {where()}")

    @shop.task("coro")
    async def coro(number: int, pool: list[str]) -> bool:
        return pool is told

    @shop.task("sync")
    def sync(number: int, *, pool: list[str]) -> bool:
        return pool is told

    await shop.worker(concurrency=4)
    assert told == []  # lazily
    ids = [await shop.put(task, number) for number in range(5) for task in ("coro", "sync")]
    assert [(await shop.ended(job_id)).result for job_id in ids] == [True] * 10
    assert told == ["built on a thread"]
    await stopped(shop)
    assert told == ["built on a thread", "closed on a thread"]


@workshop()
async def test_async_resources_live_on_the_loop_and_belong_to_no_job(shop: Workshop) -> None:
    told: list[Any] = []

    @resource(shop)
    async def pool() -> AsyncIterator[int]:
        await asyncio.sleep(0)
        told.append(("built", where(), current_run.get()))
        yield 7
        await asyncio.sleep(0)
        told.append(("closed", where()))

    @resource(shop)
    async def other() -> int:
        return 8

    @shop.task("sync")
    def sync(pool: int, other: int) -> list[int]:
        return [pool, other]

    await shop.worker()
    assert (await shop.ended(await shop.put("sync"))).result == [7, 8]
    await stopped(shop)
    assert told == [("built", "the loop", None), ("closed", "the loop")]


@workshop()
async def test_what_a_plain_function_made_is_closed_by_its_own_close(shop: Workshop) -> None:
    told: list[str] = []

    @resource(shop, name="one")
    def make_one() -> Closing:
        return Closing(told)

    @resource(shop, name="two")
    def make_two(one: Closing) -> AsyncClosing:
        return AsyncClosing(told)

    @resource(shop, name="three")
    async def make_three(two: Closing) -> Closing:
        return Closing(told)

    @shop.task("use")
    async def use(three: Closing) -> None: ...

    await shop.worker()
    await shop.ended(await shop.put("use"))
    await stopped(shop)
    assert told == ["closed on the loop", "aclosed on the loop", "closed on a thread"]


@workshop()
async def test_resources_take_each_other_and_are_closed_in_reverse(shop: Workshop) -> None:
    told: list[str] = []

    @resource(shop)
    def inner() -> Iterator[str]:
        told.append("+inner")
        yield "inner"
        told.append("-inner")

    @resource(shop, Scope.TASK)
    def middle(inner: str) -> Iterator[str]:
        told.append("+middle")
        yield f"middle({inner})"
        told.append("-middle")

    @resource(shop, Scope.TASK)
    async def outer(middle: str, inner: str, size: int = 3) -> AsyncIterator[str]:
        told.append("+outer")
        yield f"outer({middle},{inner},{size})"
        told.append("-outer")

    @shop.task("coro")
    async def coro(outer: str) -> str:
        return outer

    @shop.task("sync")
    def sync(outer: str) -> str:
        return outer

    await shop.worker()
    for task in ("coro", "sync"):
        assert (await shop.ended(await shop.put(task))).result == "outer(middle(inner),inner,3)"
    own = ["+middle", "+outer", "-outer", "-middle"]
    assert told == ["+inner", *own, *own]
    await stopped(shop)
    assert told[-1] == "-inner"


@workshop()
async def test_what_the_caller_passes_is_not_replaced(shop: Workshop) -> None:
    built: list[int] = []

    @resource(shop)
    def pool() -> int:
        built.append(1)
        return 7

    @shop.task("use")
    async def use(order: int, pool: int | None = None, ctx: Any = None) -> Any:
        return [order, pool, ctx is None]

    await shop.worker()
    assert (await shop.ended(await shop.put("use", 1, None))).result == [1, None, True]
    assert (await shop.ended(await shop.put("use", 1, kwargs={"pool": 3}))).result == [1, 3, True]
    assert built == []
    assert (await shop.ended(await shop.put("use", 1))).result == [1, 7, True]


@workshop()
async def test_a_thread_resource_is_built_used_and_closed_on_its_thread(shop: Workshop) -> None:
    told: list[tuple[str, int]] = []

    @resource(shop, Scope.THREAD)
    def connection() -> Iterator[int]:
        told.append(("built", threading.get_ident()))
        yield threading.get_ident()
        told.append(("closed", threading.get_ident()))

    together = threading.Barrier(2)

    @shop.task("sync")
    def sync(connection: int, alone: bool = False) -> bool:
        if not alone:
            together.wait(15)  # so that two threads there are
        return connection == threading.get_ident()

    @shop.task("coro")
    async def coro(connection: int) -> bool:
        return connection == threading.main_thread().ident

    await shop.worker(concurrency=2)
    ids = [await shop.put("sync"), await shop.put("sync")]
    assert [(await shop.ended(job_id)).result for job_id in ids] == [True, True]
    for _ in range(3):
        assert (await shop.ended(await shop.put("sync", kwargs={"alone": True}))).result is True
        assert (await shop.ended(await shop.put("coro"))).result is True
    threads = [ident for what, ident in told if what == "built"]
    assert len(set(threads)) == len(threads) == 3
    await stopped(shop)
    assert sorted(ident for what, ident in told if what == "closed") == sorted(threads)


async def returns() -> None: ...


async def raises() -> None:
    raise ValueError("its own")


async def hangs() -> None:
    await asyncio.Event().wait()


@workshop(hard_grace_s=0.2)
async def test_a_task_resource_is_closed_whatever_the_end_of_its_job(shop: Workshop) -> None:
    told: list[str] = []

    @resource(shop, Scope.TASK)
    def first() -> Iterator[str]:
        told.append("+first")
        yield "first"
        told.append("-first")

    @resource(shop, Scope.TASK)
    async def second(first: str) -> AsyncIterator[str]:
        told.append("+second")
        yield "second"
        told.append("-second")

    bodies = {"returns": returns, "raises": raises, "hangs": hangs}

    @shop.task("coro", **ONCE)
    async def coro(kind: str, second: str) -> None:
        await bodies[kind]()

    @shop.task("sync", **ONCE)
    def sync(kind: str, first: str) -> None:
        if kind == "raises":
            raise ValueError("its own")
        while kind == "hangs":
            pass

    await shop.worker()
    whole = ["+first", "+second", "-second", "-first"]
    for task, expected in (("coro", whole), ("sync", ["+first", "-first"])):
        for kind, outcome in (
            ("returns", Outcome.COMPLETED),
            ("raises", Outcome.FAILED),
            ("hangs", Outcome.TIMEOUT),
        ):
            told.clear()
            job_id = await shop.put(task, kind, timeout=0.3 if kind == "hangs" else 30)
            await shop.ended(job_id)
            assert [entry.outcome for entry in await shop.history(job_id)] == [outcome], (task, kind)
            assert told == expected, (task, kind)
        told.clear()
        job_id = await shop.put(task, "hangs")
        await shop.witness.saw(JobStarted, job_id=job_id)
        await shop.storage.cancel([job_id])
        assert (await shop.ended(job_id)).status is Status.CANCELLED
        assert told.count("+first") == told.count("-first")
        assert told.count("+second") == told.count("-second")


@pytest.mark.parametrize("kind", ["coro", "sync"])
@workshop()
async def test_a_resource_that_fails_fails_the_attempt_and_not_the_worker(shop: Workshop, kind: str) -> None:
    tries: list[int] = []

    @resource(shop)
    def sync() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("the database is away")
        return 7

    @resource(shop)
    async def coro() -> int:
        return sync()

    @shop.task("use_sync", **AT_ONCE)
    def use_sync(sync: int) -> int:
        return sync

    @shop.task("use_coro", **AT_ONCE)
    async def use_coro(coro: int) -> int:
        return coro

    await shop.worker()
    job_id = await shop.put(f"use_{kind}")
    job = await shop.ended(job_id)
    assert (job.status, job.result, job.attempts) == (Status.COMPLETED, 7, 3)
    first = (await shop.history(job_id))[0]
    assert first.error is not None
    assert first.error.type == "fluxmesh.errors.ResourceFailed"
    assert first.error.message == (
        f"resource '{kind}' could not be built: ConnectionError: the database is away"
    )
    assert any("test_worker_resources" in frame for frame in first.error.frames)  # where it failed


@workshop()
async def test_a_failing_resource_of_a_thread_fails_the_attempt(shop: Workshop) -> None:
    @resource(shop, Scope.THREAD)
    def broken() -> Iterator[int]:
        if threading.active_count() < 0:
            yield 1

    @shop.task("use", **ONCE)
    def use(broken: int) -> None: ...

    @shop.task("other")
    def other() -> int:
        return 1

    await shop.worker()
    job = await shop.ended(await shop.put("use"))
    assert job.error is not None
    assert "resource 'broken' yielded nothing" in job.error.message
    assert (await shop.ended(await shop.put("other"))).result == 1


@workshop()
async def test_a_resource_may_say_when_to_try_again(shop: Workshop) -> None:
    tries: list[int] = []

    @resource(shop)
    def pool() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise Snooze(0.01)
        return 7

    @shop.task("use", **ONCE)
    async def use(pool: int) -> int:
        return pool

    await shop.worker()
    job = await shop.ended(await shop.put("use"))
    assert (job.result, job.snoozes, job.attempts) == (7, 1, 1)


@workshop()
async def test_a_build_is_shared_by_all_who_wait_and_outlives_who_gives_up(shop: Workshop) -> None:
    building, go_on = asyncio.Event(), asyncio.Event()
    builds: list[int] = []

    @resource(shop)
    async def pool() -> int:
        builds.append(1)
        building.set()
        await go_on.wait()
        return 7

    @shop.task("use", **ONCE)
    async def use(pool: int) -> int:
        return pool

    await shop.worker(concurrency=3)
    hasty = await shop.put("use", timeout=0.2)
    patient = [await shop.put("use") for _ in range(2)]
    await building.wait()
    assert [entry.outcome for entry in await shop.history(hasty)] in ([], [Outcome.TIMEOUT])
    assert (await shop.ended(hasty)).status is Status.DEAD_LETTER
    go_on.set()
    assert [(await shop.ended(job_id)).result for job_id in patient] == [7, 7]
    assert builds == [1]


@workshop()
async def test_a_build_without_end_is_given_up(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply, "BUILD_S", 0.1)
    released, closed = shop.gate(), threading.Event()
    told: list[str] = []

    @resource(shop)
    def stuck() -> Iterator[int]:
        try:
            released.wait(15)
        except BaseException:  # it does not let itself be interrupted
            told.append("interrupted")
        yield 1
        closed.set()

    @resource(shop)
    async def hanging() -> int:
        await asyncio.Event().wait()
        return 1

    @shop.task("sync", **ONCE)
    def sync(stuck: int) -> None: ...

    @shop.task("coro", **ONCE)
    async def coro(hanging: int) -> None: ...

    await shop.worker()
    for task, name in (("sync", "stuck"), ("coro", "hanging")):
        job = await shop.ended(await shop.put(task))
        assert job.error is not None
        assert job.error.message.startswith(f"resource '{name}' was not built in 0.1 s")
    released.set()
    assert await asyncio.to_thread(closed.wait, 15)  # what came too late was closed all the same
    assert told == ["interrupted"]


@workshop()
async def test_closing_is_bounded_and_its_failures_are_logged(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "CLOSE_S", 0.1)
    told: list[str] = []

    @resource(shop)
    async def first() -> AsyncIterator[int]:
        yield 1
        told.append("closed")

    @resource(shop)
    async def hanging(first: int) -> AsyncIterator[int]:
        yield 2
        await asyncio.Event().wait()

    @resource(shop)
    def failing(hanging: int) -> Iterator[int]:
        yield 3
        raise ValueError("cannot close")

    @resource(shop, Scope.TASK)
    def twice() -> Iterator[int]:
        yield 4
        yield 5

    @shop.task("use")
    async def use(failing: int, twice: int) -> int:
        return failing + twice

    with tapped() as log:
        await shop.worker()
        assert (await shop.ended(await shop.put("use"))).result == 7
        await stopped(shop)
    assert told == ["closed"]
    lost = {event["resource"]: event["error"] for event in log.found("resource not closed")}
    assert lost["failing"] == "ValueError: cannot close"
    assert lost["hanging"].startswith("TimeoutError")
    assert "yielded twice" in lost["twice"]


@workshop()
async def test_a_hurried_worker_does_not_wait_for_resources(shop: Workshop) -> None:
    @resource(shop)
    async def pool() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    @shop.task("use")
    async def use(pool: int) -> None: ...

    worker = await shop.worker()
    await shop.ended(await shop.put("use"))
    worker.stop_now()
    async with asyncio.timeout(1.5):
        await worker.wait()


@workshop()
async def test_the_loop_goes_on_while_a_resource_is_built_on_a_thread(shop: Workshop) -> None:
    building, go_on = threading.Event(), shop.gate()

    @resource(shop)
    def slow() -> int:
        building.set()
        assert go_on.wait(15)
        return 7

    @shop.task("use")
    async def use(slow: int) -> int:
        return slow

    @shop.task("other")
    async def other() -> int:
        return 1

    await shop.worker()
    waiting = await shop.put("use")
    await asyncio.to_thread(building.wait, 15)
    assert (await shop.ended(await shop.put("other"))).result == 1
    go_on.set()
    assert (await shop.ended(waiting)).result == 7


def test_the_error_of_a_resource_is_retryable() -> None:
    assert ResourceFailed("x").retryable


@pytest.mark.parametrize("turns", range(6))
def test_what_is_built_as_its_job_gives_up_is_closed(turns: int) -> None:
    """However the end of the build and the cancellation fall together."""
    told: list[str] = []
    go_on = threading.Event()

    def one() -> Iterator[int]:
        go_on.wait(15)
        yield 1
        told.append("closed")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        registry = ResourceRegistry()
        registry.add(define_resource(one, scope=Scope.TASK))
        store = supply.Supply(loop, "test", registry)
        given = supply.Given()
        building = loop.create_task(store.give(given, ("one",), on_thread=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if turns == 0:
            building.cancel()
        go_on.set()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("test-resource")]
        assert len(threads) == 1
        while not store._pool._ended and not building.done():  # built, and the loop does not know yet
            pass
        for _ in range(turns - 1):
            await asyncio.sleep(0)
        building.cancel()
        await asyncio.wait((building,))
        await store.take_back(given)
        store.stop()
        for thread in threads:
            await asyncio.to_thread(thread.join, 15)
        await asyncio.sleep(0)
        if building.cancelled():
            assert given.values == {}

    asyncio.run(scenario())
    assert told in (["closed"], []) if turns == 0 else told == ["closed"]
