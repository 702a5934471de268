"""One job from claim to settle: what a body gets, how it may end, and what storage holds afterwards."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from fluxmesh.context import Context, current_run
from fluxmesh.errors import InvalidOption
from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import DeadLetter, RetryAfter, Snooze
from fluxmesh.worker.observe import Claimed, JobStarted
from tests.service.workshop import Workshop, workshop

FAST = {"max_retries": 2, "backoff_strategy": "fixed", "backoff_base_seconds": 0.01, "jitter": "none"}


@workshop()
async def test_async_and_thread_bodies_return_their_results(shop: Workshop) -> None:
    @shop.task("add")
    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return a + b

    @shop.task("join")
    def join(*parts: str, glue: str = "") -> dict[str, Any]:
        return {"text": glue.join(parts), "thread": threading.current_thread() is not threading.main_thread()}

    await shop.worker()
    first = await shop.put("add", 2, 3)
    second = await shop.put("join", "a", "b", kwargs={"glue": "-"})

    assert (await shop.ended(first)).result == 5
    assert (await shop.ended(second)).result == {"text": "a-b", "thread": True}
    assert [entry.outcome for entry in await shop.history(first)] == [Outcome.COMPLETED]


@workshop()
async def test_a_body_learns_who_it_is_from_its_context(shop: Workshop) -> None:
    seen: dict[str, Any] = {}

    def look(ctx: Context) -> None:
        seen[ctx.job_id] = (
            ctx.task, ctx.queue, ctx.attempt, ctx.tags, dict(ctx.headers), ctx.cancelled, ctx.token > 0,
            current_run.get() is ctx,
        )  # fmt: skip
        ctx.log.info("seen")

    @shop.task("sync")
    def sync(ctx: Context) -> None:
        look(ctx)

    @shop.task("coro")
    async def coro(*, ctx: Context) -> None:
        look(ctx)

    await shop.worker()
    ids = [await shop.put(task, tags=["red"], headers={"trace": "7"}) for task in ("sync", "coro")]
    for job_id in ids:
        assert (await shop.ended(job_id)).status is Status.COMPLETED

    expected = ("default", 1, ("red",), {"trace": "7"}, False, True, True)
    assert seen == {ids[0]: ("sync", *expected), ids[1]: ("coro", *expected)}
    assert current_run.get() is None


@workshop()
async def test_context_variables_of_the_starter_reach_bodies_and_none_of_theirs_leaks(shop: Workshop) -> None:
    place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="none")
    place.set("starter")

    @shop.task("sync")
    def sync(mark: str) -> str:
        before = place.get()
        place.set(mark)
        return before

    @shop.task("coro")
    async def coro(mark: str) -> str:
        before = place.get()
        place.set(mark)
        return before

    await shop.worker(concurrency=1)
    ids = [await shop.put(task, "body") for task in ("sync", "sync", "coro", "coro")]
    assert [(await shop.ended(job_id)).result for job_id in ids] == ["starter"] * 4


@workshop()
async def test_progress_is_stored_while_the_body_runs_and_with_its_end(shop: Workshop) -> None:
    go_on = shop.gate()
    later = asyncio.Event()

    @shop.task("sync")
    def sync(ctx: Context) -> None:
        for percent in range(41):
            ctx.progress(percent, f"step {percent}")
        go_on.wait(10)

    @shop.task("coro", max_retries=0)
    async def coro(ctx: Context) -> None:
        ctx.progress(30, "in the middle")
        await later.wait()
        ctx.progress(70, "just before")
        raise ValueError("no more")

    await shop.worker()
    first, second = await shop.put("sync"), await shop.put("coro")
    job = await shop.until(first, lambda job: job.progress > 0)
    assert (job.progress, job.progress_message, job.status) == (40, "step 40", Status.RUNNING)
    await shop.until(second, lambda job: job.progress == 30)
    go_on.set()
    later.set()
    job = await shop.ended(second)
    assert (job.progress, job.progress_message) == (70, "just before")
    assert (await shop.ended(first)).progress == 100


@workshop()
async def test_progress_that_is_no_number_is_the_bodys_mistake(shop: Workshop) -> None:
    @shop.task("bad")
    async def bad(ctx: Context) -> str:
        for value in (float("nan"), "12", None, True):
            with pytest.raises(InvalidOption, match="not a number"):
                ctx.progress(value)  # type: ignore[arg-type]
        ctx.progress(900, "\udc80" + "x" * 5_000)
        return "survived"

    await shop.worker()
    job = await shop.ended(await shop.put("bad"))
    assert job.result == "survived"
    assert job.progress_message is not None
    assert job.progress_message.startswith("\\udc80x")
    assert len(job.progress_message) < 1_100


@workshop()
async def test_a_failing_job_is_retried_and_given_up_with_its_error(shop: Workshop) -> None:
    starts: list[int] = []

    @shop.task("fail", **FAST)
    async def fail(ctx: Context) -> None:
        starts.append(ctx.attempt)
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    await shop.worker()
    job = await shop.ended(await shop.put("fail"))
    assert starts == [1, 2, 3]
    assert (job.status, job.reason, job.attempts) == (Status.DEAD_LETTER, "error", 3)
    assert job.error is not None
    assert (job.error.type, job.error.message) == ("ValueError", "outer")
    assert all("test_worker_runs.py:" in frame and frame.endswith("fail") for frame in job.error.frames)
    assert len(job.error.frames) == 2  # of the cause, then its own
    assert "direct cause" in job.error.text
    assert [entry.outcome for entry in await shop.history(job.id)] == [Outcome.FAILED] * 3


@workshop()
async def test_a_body_may_snooze_ask_for_a_later_try_or_give_up(shop: Workshop) -> None:
    @shop.task("nap", max_retries=0)
    def nap(ctx: Context) -> str:
        if not starts["nap"]:
            starts["nap"].append(ctx.attempt)
            raise Snooze(0.01)
        return f"attempt {ctx.attempt}"

    @shop.task("again", max_retries=1, backoff_base_seconds=60)
    async def again(ctx: Context) -> str:
        if ctx.attempt == 1:
            raise RetryAfter(0.01, "busy")
        return f"attempt {ctx.attempt}"

    @shop.task("enough", max_retries=5)
    async def enough() -> None:
        raise DeadLetter("no such customer")

    starts: dict[str, list[int]] = {"nap": []}
    await shop.worker()
    ids = [await shop.put(task) for task in ("nap", "again", "enough")]
    nap_job, again_job, enough_job = [await shop.ended(job_id) for job_id in ids]
    assert (nap_job.result, nap_job.snoozes, nap_job.attempts) == ("attempt 1", 1, 1)
    assert (again_job.result, again_job.attempts) == ("attempt 2", 2)
    assert (enough_job.status, enough_job.reason) == (Status.DEAD_LETTER, "no such customer")
    assert [entry.outcome for entry in await shop.history(enough_job.id)] == [Outcome.GIVEN_UP]


@workshop()
async def test_a_result_that_cannot_be_encoded_is_a_clear_failure_and_the_body_is_not_repeated(
    shop: Workshop,
) -> None:
    calls: list[str] = []

    class Hostile(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("no items for you")

    results: dict[str, Any] = {
        "object": object(),
        "large": "x" * (1 << 20),
        "nan": {"a": [float("nan")]},
        "hostile": Hostile(a=1),
        "surrogate": "\udc80",
    }

    @shop.task("odd")
    async def odd(kind: str) -> Any:
        calls.append(kind)
        return results[kind]

    await shop.worker(concurrency=5)
    jobs = {kind: await shop.ended(await shop.put("odd", kind)) for kind in results}
    for kind, job in jobs.items():
        assert (job.status, job.reason) == (Status.DEAD_LETTER, "result cannot be encoded"), kind
        assert job.error is not None
    assert jobs["nan"].error is not None
    assert "result['a'][0]" in jobs["nan"].error.message
    assert sorted(calls) == sorted(results)


@workshop()
async def test_undecodable_jobs_are_given_up_and_the_rest_of_the_batch_runs(shop: Workshop) -> None:
    @shop.task("echo")
    async def echo(value: int) -> int:
        return value

    ids = [await shop.put("echo", value) for value in range(10)]
    with shop.back_door() as db:
        for index, field, blob in (
            (2, "payload", b"\xff\x00\x13\x37"),
            (4, "payload", b"\x92\x91\xa1\xff\x80"),
            (5, "payload", b"\x80\x04\x95."),
            (7, "options", b"\xc1"),
        ):
            db.execute(f'update "fluxmesh:job" set {field} = ? where id = ?', (blob, ids[index]))
    await shop.worker(concurrency=10)
    for index, job_id in enumerate(ids):
        job = await shop.ended(job_id)
        if index in (2, 4, 5, 7):
            assert (job.status, job.reason, job.attempts) == (Status.DEAD_LETTER, "undecodable", 0), index
        else:
            assert job.result == index


@workshop()
async def test_wrong_arguments_are_an_ordinary_failure(shop: Workshop) -> None:
    @shop.task("coro", max_retries=0)
    async def coro(a: int) -> None: ...

    @shop.task("sync", max_retries=0)
    def sync(a: int) -> None: ...

    await shop.worker()
    for task in ("coro", "sync"):
        job = await shop.ended(await shop.put(task, 1, 2))
        assert (job.status, job.reason) == (Status.DEAD_LETTER, "error")
        assert job.error is not None
        assert job.error.type == "TypeError"


@workshop()
async def test_whatever_a_body_raises_ends_its_run_and_nothing_else(shop: Workshop) -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise SystemExit("from __str__")

        __repr__ = __str__

    kinds: dict[str, BaseException] = {
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "hostile": Hostile(),
        "cancelled": asyncio.CancelledError(),
        "group": ExceptionGroup("several", [ValueError("a"), Hostile()]),
        "generator": GeneratorExit(),
        "surrogate": ValueError("\udc80"),
    }

    @shop.task("coro", max_retries=0)
    async def coro(kind: str) -> None:
        raise kinds[kind]

    @shop.task("sync", max_retries=0)
    def sync(kind: str) -> None:
        raise kinds[kind]

    await shop.worker(concurrency=3)
    for task in ("coro", "sync"):
        for kind in kinds:
            job = await shop.ended(await shop.put(task, kind))
            assert (job.status, job.reason) == (Status.DEAD_LETTER, "error"), (task, kind)
            assert job.error is not None
            assert job.error.type.endswith(type(kinds[kind]).__qualname__)


@workshop()
async def test_one_claim_takes_no_more_than_the_free_slots(shop: Workshop) -> None:
    gate = asyncio.Event()
    running = 0
    most = 0

    @shop.task("hold")
    async def hold() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    ids = [await shop.put("hold") for _ in range(9)]
    worker = await shop.worker(concurrency=3)
    await shop.witness.saw(JobStarted, 3)
    assert worker.running_count == 3
    assert [await shop.status(job_id) for job_id in ids] == [Status.RUNNING] * 3 + [Status.PENDING] * 6
    gate.set()
    for job_id in ids:
        await shop.ended(job_id)
    assert most == 3


@workshop(scheduler_batch_size=2)
async def test_a_claim_is_bounded_by_the_batch_size(shop: Workshop) -> None:
    gate = asyncio.Event()

    @shop.task("hold")
    async def hold() -> None:
        await gate.wait()

    for _ in range(5):
        await shop.put("hold")
    await shop.worker(concurrency=5)
    await shop.witness.saw(JobStarted, 5)
    assert max(claim.asked for claim in shop.witness.all(Claimed)) == 2
    gate.set()


@workshop()
async def test_reserved_slots_are_given_to_their_tier_alone(shop: Workshop) -> None:
    gate = asyncio.Event()

    @shop.task("hold")
    async def hold() -> None:
        await gate.wait()

    low = [await shop.put("hold", priority="low") for _ in range(5)]
    worker = await shop.worker(concurrency=3, reserve={0: 1})
    await shop.witness.saw(JobStarted, 2)
    urgent = await shop.put("hold", priority="critical")
    await shop.witness.saw(JobStarted, job_id=urgent)
    assert worker.running_count == 3
    assert [await shop.status(job_id) for job_id in low] == [Status.RUNNING] * 2 + [Status.PENDING] * 3
    gate.set()
    for job_id in (*low, urgent):
        assert (await shop.ended(job_id)).status is Status.COMPLETED


@pytest.mark.parametrize(
    ("reserve", "tiers"), [({0: 1}, (1, 2)), ({0: 3}, (0, 1)), ({0: 2, 1: 1}, (0, 1)), ({0: -1}, (0,))]
)
@workshop()
async def test_a_reserve_that_cannot_be_kept_is_refused(
    shop: Workshop, reserve: dict[int, int], tiers: tuple[int, ...]
) -> None:
    if reserve == {0: 2, 1: 1}:
        shop.make_worker(concurrency=3, reserve=reserve, tiers=tiers)  # each tier has a slot of its own
        return
    with pytest.raises(InvalidOption, match="reserve"):
        shop.make_worker(concurrency=3, reserve=reserve, tiers=tiers)


@workshop()
async def test_an_idle_worker_starts_a_due_job_on_time_and_a_new_one_at_once(shop: Workshop) -> None:
    loop = asyncio.get_running_loop()
    started: dict[str, float] = {}

    @shop.task("note")
    async def note(name: str) -> None:
        started[name] = loop.time()

    await shop.worker()
    await shop.witness.saw(Claimed, got=0)
    began = loop.time()
    later = await shop.put("note", "later", delay=0.4)
    now = await shop.put("note", "now")
    await shop.ended(now)
    await shop.ended(later)
    assert started["now"] - began < 0.2
    assert 0.4 <= started["later"] - began < 0.7
