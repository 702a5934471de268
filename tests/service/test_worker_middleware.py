"""Middleware around runs: what it sees, what it may change, and that nothing it does loses a job."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fluxmesh.codec import encode_result
from fluxmesh.errors import InvalidOption
from fluxmesh.job import Outcome, Status
from fluxmesh.middleware import CallNext, JobRun, Middleware, checked_middleware, checked_outgoing
from fluxmesh.outcome import DeadLetter, End, Snooze
from fluxmesh.resources import Scope, define_resource
from fluxmesh.worker.observe import JobStarted
from tests.service.workshop import Workshop, workshop

ONCE = {"max_retries": 0}
trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="none")


def around(shop: Workshop, *middleware: Middleware) -> None:
    shop.registry.middleware += middleware


def bodies(shop: Workshop) -> None:
    """The same body twice: on the loop and on a thread."""

    @shop.task("coro", **ONCE)
    async def coro(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    @shop.task("sync", **ONCE)
    def sync(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)


def body(number: int, *, fails: bool = False) -> Any:
    if fails:
        raise ValueError(f"no {number}")
    return [number, trace.get()]


@workshop()
async def test_it_sees_the_run_and_its_end(shop: Workshop) -> None:
    seen: list[Any] = []

    async def watching(run: JobRun, call_next: CallNext) -> End:
        seen.append((run.task, run.queue, run.attempt, dict(run.headers), run.args, run.kwargs, run.end))
        end = await call_next()
        assert run.end is end
        seen.append((end.outcome, end.error and end.error.type, repr(run.exception)))
        return end

    around(shop, watching)
    bodies(shop)
    await shop.worker()
    for task in ("coro", "sync"):
        seen.clear()
        good = await shop.put(task, 7, headers={"trace": "t7"})
        assert (await shop.ended(good)).result == [7, "none"]
        bad = await shop.put(task, 8, kwargs={"fails": True})
        assert (await shop.ended(bad)).status is Status.DEAD_LETTER
        assert seen == [
            (task, "default", 1, {"trace": "t7"}, [7], {}, None),
            (Outcome.COMPLETED, None, "None"),
            (task, "default", 1, {}, [8], {"fails": True}, None),
            (Outcome.FAILED, "ValueError", "ValueError('no 8')"),
        ]
        [entry] = await shop.history(bad)
        assert entry.error is not None
        assert [frame.rpartition(".")[2].split()[-1] for frame in entry.error.frames] == [task, "body"]


@workshop()
async def test_the_first_added_is_the_outermost_and_context_reaches_the_body(shop: Workshop) -> None:
    order: list[str] = []

    def layer(name: str) -> Middleware:
        async def middleware(run: JobRun, call_next: CallNext) -> End:
            order.append(f"+{name}")
            token = trace.set(f"{trace.get()}/{name}")
            end = await call_next()
            trace.reset(token)
            order.append(f"-{name}")
            return end

        return middleware

    around(shop, layer("a"), layer("b"))
    bodies(shop)
    await shop.worker()
    for task in ("coro", "sync"):
        order.clear()
        assert (await shop.ended(await shop.put(task, 1))).result == [1, "none/a/b"]
        assert order == ["+a", "+b", "-b", "-a"]


@workshop()
async def test_it_may_change_arguments_and_the_end(shop: Workshop) -> None:
    async def doubling(run: JobRun, call_next: CallNext) -> End:
        run.args[0] *= 2
        end = await call_next()
        if end.outcome is Outcome.FAILED:
            return End(Outcome.COMPLETED, encode_result("mended"))
        return end

    around(shop, doubling)
    bodies(shop)
    await shop.worker()
    for task in ("coro", "sync"):
        assert (await shop.ended(await shop.put(task, 4))).result == [8, "none"]
        assert (await shop.ended(await shop.put(task, 4, kwargs={"fails": True}))).result == "mended"


class Refused(Exception):
    pass


@workshop()
async def test_what_it_raises_counts_as_raised_by_the_body(shop: Workshop) -> None:
    snoozed: list[str] = []
    ends: list[Outcome] = []

    async def outside(run: JobRun, call_next: CallNext) -> End:
        end = await call_next()
        ends.append(end.outcome)
        return end

    async def refusing(run: JobRun, call_next: CallNext) -> End:
        match run.args[0]:
            case 1:
                raise Refused("not today")
            case 2:
                raise DeadLetter("never")
            case 3 if not snoozed:
                snoozed.append(run.job_id)
                raise Snooze(0.01)
            case 4:
                await call_next()
                raise Refused("too late")
        return await call_next()

    around(shop, outside, refusing)
    bodies(shop)
    await shop.worker()
    refused, never, later, after = [await shop.put("coro", number) for number in (1, 2, 3, 4)]
    job = await shop.ended(refused)
    assert job.error is not None
    assert (job.error.type, job.error.message) == (
        "tests.service.test_worker_middleware.Refused",
        "not today",
    )
    assert (await shop.ended(never)).reason == "never"
    assert (await shop.ended(later)).result == [3, "none"]
    assert (await shop.ended(later)).snoozes == 1
    assert (await shop.ended(after)).status is Status.DEAD_LETTER
    assert sorted(ends) == sorted(
        [Outcome.FAILED, Outcome.GIVEN_UP, Outcome.SNOOZED, Outcome.COMPLETED, Outcome.FAILED]
    )


@workshop()
async def test_one_that_skips_the_body_or_breaks_the_rules_ends_its_run(shop: Workshop) -> None:
    entered: list[int] = []

    async def rules(run: JobRun, call_next: CallNext) -> End:
        if run.args[0] == 1:
            return End(Outcome.COMPLETED, encode_result("from a cache"))
        if run.args[0] == 2:
            return None  # type: ignore[return-value]
        await call_next()
        return await call_next()

    around(shop, rules)

    @shop.task("note", **ONCE)
    async def note(number: int) -> None:
        entered.append(number)

    await shop.worker()
    assert (await shop.ended(await shop.put("note", 1))).result == "from a cache"
    job = await shop.ended(await shop.put("note", 2))
    assert job.error is not None
    assert "middleware rules returned NoneType: it must return what call_next() gave" in job.error.message
    job = await shop.ended(await shop.put("note", 3))
    assert job.error is not None
    assert "call_next() was called twice" in job.error.message
    assert entered == [3]


@pytest.mark.parametrize("task", ["coro", "sync"])
@workshop(hard_grace_s=5.0)
async def test_a_timeout_and_a_cancel_reach_body_and_middleware(shop: Workshop, task: str) -> None:
    ends: list[Outcome] = []
    stay = threading.Event()

    async def watching(run: JobRun, call_next: CallNext) -> End:
        if run.kwargs.get("before"):
            await stay_here()
        end = await call_next()
        ends.append(end.outcome)
        if run.kwargs.get("after"):
            await stay_here()
        return end

    async def stay_here() -> None:
        await asyncio.Event().wait()

    around(shop, watching)

    @shop.task("coro", **ONCE)
    async def coro(**how: bool) -> None:
        if "inside" in how:
            await stay_here()

    @shop.task("sync", **ONCE)
    def sync(**how: bool) -> None:
        while "inside" in how and not stay.is_set():
            pass

    await shop.worker()
    for where in ("before", "inside", "after"):
        job_id = await shop.put(task, kwargs={where: True}, timeout=0.2)
        assert (await shop.ended(job_id)).reason == "timeout"
        job_id = await shop.put(task, kwargs={where: True})
        await shop.witness.saw(JobStarted, job_id=job_id)
        await shop.storage.cancel([job_id])
        assert (await shop.ended(job_id)).status is Status.CANCELLED
    assert ends[:2] == [Outcome.TIMEOUT, Outcome.CANCELLED]
    assert ends[2:] == [Outcome.COMPLETED, Outcome.COMPLETED]


@pytest.mark.parametrize("task", ["coro", "sync"])
@workshop()
async def test_a_timeout_of_the_middleware_own_stops_the_body_first(shop: Workshop, task: str) -> None:
    told: list[str] = []

    async def limiting(run: JobRun, call_next: CallNext) -> End:
        try:
            async with asyncio.timeout(0.2):
                return await call_next()
        except TimeoutError:
            told.append("limited")
            raise

    around(shop, limiting)

    @shop.task("coro", **ONCE)
    async def coro() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            told.append("stopped")

    @shop.task("sync", **ONCE)
    def sync() -> None:
        try:
            while True:
                pass
        finally:
            told.append("stopped")

    await shop.worker()
    job = await shop.ended(await shop.put(task))
    assert job.error is not None
    assert job.error.type == "TimeoutError"
    assert told == ["stopped", "limited"]


@pytest.mark.parametrize("task", ["coro", "sync"])
@workshop()
async def test_a_body_left_running_is_ended_before_its_job(shop: Workshop, task: str) -> None:
    """One that returned while the body went on would have the job run twice at once."""
    told: list[str] = []
    left: list[Any] = []
    inside = threading.Event()

    async def leaving(run: JobRun, call_next: CallNext) -> End:
        left.append(asyncio.ensure_future(call_next()))
        await asyncio.to_thread(inside.wait, 15)
        return End(Outcome.COMPLETED, encode_result("left"))

    around(shop, leaving)

    @shop.task("coro", **ONCE)
    async def coro() -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            told.append("stopped")

    @shop.task("sync", **ONCE)
    def sync() -> None:
        inside.set()
        try:
            while True:
                pass
        finally:
            told.append("stopped")

    await shop.worker()
    assert (await shop.ended(await shop.put(task))).result == "left"
    assert told == ["stopped"]


@workshop()
async def test_a_body_is_not_begun_after_its_run_is_over(shop: Workshop) -> None:
    left: list[asyncio.Future[End]] = []
    entered: list[int] = []

    async def leaving(run: JobRun, call_next: CallNext) -> End:
        left.append(asyncio.ensure_future(call_next()))
        return End(Outcome.COMPLETED, encode_result("left"))

    around(shop, leaving)

    @shop.task("note", **ONCE)
    async def note() -> None:
        entered.append(1)

    await shop.worker()
    assert (await shop.ended(await shop.put("note"))).result == "left"
    with pytest.raises(RuntimeError, match="when the run was over"):
        await left[0]
    assert entered == []


@workshop(grace_s=0.1)
async def test_a_drain_hands_back_a_guided_run_at_no_charge(shop: Workshop) -> None:
    async def passing(run: JobRun, call_next: CallNext) -> End:
        return await call_next()

    around(shop, passing)

    @shop.task("coro")
    async def coro() -> None:
        await asyncio.Event().wait()

    @shop.task("sync")
    def sync() -> None:
        while True:
            pass

    worker = await shop.worker(grace_s=0.1)
    ids = [await shop.put("coro"), await shop.put("sync")]
    await shop.witness.saw(JobStarted, 2)
    await worker.stop()
    for job_id in ids:
        job = await shop.job(job_id)
        assert (job.status, job.attempts, job.interruptions) == (Status.PENDING, 0, 1)


@workshop()
async def test_a_failing_resource_is_an_end_to_the_middleware(shop: Workshop) -> None:
    ends: list[str] = []

    async def watching(run: JobRun, call_next: CallNext) -> End:
        end = await call_next()
        ends.append(f"{end.outcome} {end.error and end.error.type}")
        return end

    around(shop, watching)

    def broken() -> Iterator[int]:
        raise OSError("away")
        yield 1

    shop.registry.resources.add(define_resource(broken, scope=Scope.TASK))

    @shop.task("coro", **ONCE)
    async def coro(broken: int) -> None: ...

    @shop.task("sync", **ONCE)
    def sync(broken: int) -> None: ...

    await shop.worker()
    for task in ("coro", "sync"):
        await shop.ended(await shop.put(task))
    assert ends == ["failed fluxmesh.errors.ResourceFailed"] * 2


def plain(run: Any, call_next: Any = None) -> Any: ...


class AsyncObject:
    async def __call__(self, run: JobRun, call_next: CallNext) -> End:
        return await call_next()


def test_only_async_callables_are_middleware_and_only_plain_ones_are_hooks() -> None:
    keeper = AsyncObject()
    assert checked_middleware(keeper) is keeper
    assert checked_outgoing(plain) is plain
    for wrong in (plain, AsyncObject, 7):
        with pytest.raises(InvalidOption, match="is not an async callable"):
            checked_middleware(wrong)  # type: ignore[arg-type]
    for wrong in (keeper, 7):
        with pytest.raises(InvalidOption, match="is not a plain function"):
            checked_outgoing(wrong)  # type: ignore[arg-type]
