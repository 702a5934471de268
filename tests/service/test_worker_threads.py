"""Interruptions hit bodies and nothing else: not the pool, not the next call on the thread."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fluxmesh.outcome import JobInterrupted, JobTimeout
from fluxmesh.worker.threads import Interruption, Phase, ThreadCall, ThreadPool

LIMIT_S = 30
set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc


def call_of(function: Callable[..., Any], *args: Any) -> tuple[ThreadCall, asyncio.Future[ThreadCall]]:
    ended: asyncio.Future[ThreadCall] = asyncio.get_running_loop().create_future()
    call = ThreadCall(function, list(args), {}, contextvars.copy_context(), ended.set_result)
    return call, ended


@pytest.fixture
def switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def strays() -> Iterator[list[BaseException]]:
    """Exceptions that ended a thread."""
    found: list[BaseException] = []
    before = threading.excepthook
    threading.excepthook = lambda args: found.append(args.exc_value or RuntimeError())
    yield found
    threading.excepthook = before


def spin(turns: int) -> str:
    for _ in range(turns):
        pass
    return "done"


def test_interruptions_at_any_instant_hit_only_the_body(switching: None, strays: list[BaseException]) -> None:
    rng = random.Random(7)
    hit = missed = 0

    async def scenario() -> None:
        nonlocal hit, missed
        pool = ThreadPool(asyncio.get_running_loop(), "test")
        for _ in range(1_000):
            call, ended = call_of(spin, rng.randrange(2_000))
            pool.submit(call)
            spin(rng.randrange(20_000))
            kinds: list[Interruption] = rng.sample([JobTimeout, JobInterrupted], rng.randrange(1, 3))
            sent = [call.interrupt(kind) for kind in kinds]
            if rng.random() < 0.2:
                await asyncio.sleep(0)
            async with asyncio.timeout(LIMIT_S):
                await ended
            assert call.phase is Phase.LEFT
            if call.error is None:
                missed += 1
                assert call.value == "done"
            else:
                hit += 1
                assert any(sent)
                assert isinstance(call.error, (JobTimeout, JobInterrupted)), call.error
            innocent, innocent_ended = call_of(spin, 50)
            pool.submit(innocent)
            async with asyncio.timeout(LIMIT_S):
                await innocent_ended
            assert (innocent.error, innocent.value) == (None, "done")
        assert pool.threads == 1
        pool.close()

    asyncio.run(scenario())
    assert strays == []
    assert hit > 50  # else the test has shown nothing
    assert missed > 50


def test_each_kind_is_sent_once_and_never_after_the_end() -> None:
    async def scenario() -> None:
        pool = ThreadPool(asyncio.get_running_loop(), "test")
        inside, release = threading.Event(), threading.Event()

        def body() -> str:
            inside.set()
            release.wait(LIMIT_S)
            return "done"

        call, ended = call_of(body)
        pool.submit(call)
        await asyncio.to_thread(inside.wait, LIMIT_S)
        assert call.interrupt(JobInterrupted)
        assert not call.interrupt(JobInterrupted)
        assert call.interrupt(JobTimeout)
        release.set()
        await ended
        assert isinstance(call.error, JobTimeout)  # the later one takes the place of one not yet raised
        assert not call.interrupt(JobTimeout)
        pool.close()

    asyncio.run(scenario())


def test_a_call_interrupted_before_it_began_is_never_entered() -> None:
    async def scenario() -> None:
        entered: list[int] = []
        pool = ThreadPool(asyncio.get_running_loop(), "test")
        call, ended = call_of(entered.append, 1)
        assert call.interrupt(JobInterrupted)
        pool.submit(call)
        await ended
        assert entered == []
        assert isinstance(call.error, JobInterrupted)
        pool.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_body_that_leaves_a_trace_function_behind_ends_as_any_other(interrupted: bool) -> None:
    """A debugger does. In CPython 3.11 a thread with one stood still for ever once the flag of an
    asynchronous exception was up and none was there to raise."""

    async def scenario() -> None:
        pool = ThreadPool(asyncio.get_running_loop(), "test")
        inside, release = threading.Event(), threading.Event()

        def body() -> str:
            inside.set()
            release.wait(LIMIT_S)
            sys.settrace(lambda *_: None)
            return "done"

        call, ended = call_of(body)
        pool.submit(call)
        await asyncio.to_thread(inside.wait, LIMIT_S)
        if interrupted:
            call.interrupt(JobInterrupted)
        release.set()
        async with asyncio.timeout(LIMIT_S / 3):
            await ended
        following, its_end = call_of(spin, 10)
        pool.submit(following)
        async with asyncio.timeout(LIMIT_S / 3):
            await its_end
        assert (following.error, following.value) == (None, "done")
        pool.close()

    asyncio.run(scenario())


def test_threads_are_made_when_needed_used_again_and_replaced_when_abandoned() -> None:
    async def scenario() -> None:
        pool = ThreadPool(asyncio.get_running_loop(), "test")
        release, inside = threading.Event(), threading.Barrier(3)

        def body() -> str:
            inside.wait(LIMIT_S)
            release.wait(LIMIT_S)
            return threading.current_thread().name

        assert pool.threads == 0
        stuck = [call_of(body) for _ in range(2)]
        for call, _ in stuck:
            pool.submit(call)
        await asyncio.to_thread(inside.wait, LIMIT_S)
        assert pool.threads == 2
        assert pool.abandon(stuck[0][0])
        assert pool.threads == 1
        quick, quick_ended = call_of(spin, 1)
        pool.submit(quick)  # the other thread is busy too: a new one
        await quick_ended
        assert pool.threads == 2
        for _ in range(5):
            again, again_ended = call_of(spin, 1)
            pool.submit(again)
            await again_ended
        assert pool.threads == 2
        release.set()
        for call, ended in stuck:
            await ended
            assert call.error is None
        assert not pool.abandon(stuck[1][0])  # too late: it has ended
        names = {call.value for call, _ in stuck}
        pool.close()
        for thread in list(threading.enumerate()):
            if thread.name in names or thread.name.startswith("test-"):
                await asyncio.to_thread(thread.join, LIMIT_S)
                assert not thread.is_alive()

    asyncio.run(scenario())


def test_a_body_that_outlives_its_loop_ends_quietly(strays: list[BaseException]) -> None:
    release = threading.Event()
    threads: list[threading.Thread] = []

    async def scenario() -> None:
        pool = ThreadPool(asyncio.get_running_loop(), "test")
        inside = threading.Event()

        def body() -> None:
            threads.append(threading.current_thread())
            inside.set()
            release.wait(LIMIT_S)

        pool.submit(call_of(body)[0])
        await asyncio.to_thread(inside.wait, LIMIT_S)

    asyncio.run(scenario())
    release.set()
    threads[0].join(LIMIT_S)
    assert not threads[0].is_alive()
    assert strays == []


class Struck(ThreadCall):
    """Hit by late interruptions inside its own code, one at each of the named steps."""

    def strike_at(self, *steps: str) -> None:
        self._strikes = list(steps)

    def _strike(self, step: str) -> None:
        if self.phase is Phase.ENTERED and step in self._strikes:
            self._strikes.remove(step)
            set_async_exc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(JobTimeout))

    def _leave(self) -> None:
        self._strike("leave")
        super()._leave()

    def _note_late(self, late: BaseException) -> None:
        self._strike("note")
        super()._note_late(late)


@pytest.mark.parametrize("steps", [(), ("leave",), ("leave", "leave"), ("leave", "note")])
@pytest.mark.parametrize("fails", [False, True])
def test_a_late_interruption_of_the_pools_own_code_is_swallowed(
    steps: tuple[str, ...], fails: bool, strays: list[BaseException]
) -> None:
    def body() -> str:
        if fails:
            raise ValueError("its own")
        return "done"

    async def scenario() -> None:
        pool = ThreadPool(asyncio.get_running_loop(), "test")
        ended: asyncio.Future[ThreadCall] = asyncio.get_running_loop().create_future()
        call = Struck(body, [], {}, contextvars.copy_context(), ended.set_result)
        call.strike_at(*steps)
        pool.submit(call)
        async with asyncio.timeout(5):
            await ended
        assert call._strikes == []  # all have hit
        assert call.phase is Phase.LEFT
        if fails:
            assert isinstance(call.error, ValueError)
        else:
            assert (call.error, call.value) == (None, "done")
        innocent, innocent_ended = call_of(spin, 50)
        pool.submit(innocent)
        async with asyncio.timeout(5):
            await innocent_ended
        assert (innocent.error, innocent.value) == (None, "done")
        pool.close()

    asyncio.run(scenario())
    assert strays == []


@pytest.mark.parametrize("how", ["asked on the thread", "taken away before"])
def test_a_body_that_may_not_begin_any_more_is_refused_on_its_thread(how: str) -> None:
    begun: list[int] = []

    async def scenario() -> ThreadCall:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[ThreadCall] = loop.create_future()
        call = ThreadCall(
            lambda: begun.append(1),
            [],
            {},
            contextvars.copy_context(),
            ended.set_result,
            may_enter=lambda: how != "asked on the thread",
        )
        if how == "taken away before":
            call.withdraw()
        ThreadPool(loop, "test").submit(call)
        async with asyncio.timeout(LIMIT_S):
            return await ended

    call = asyncio.run(scenario())
    assert (call.refused, call.phase, begun) == (True, Phase.LEFT, [])


def test_a_job_that_is_lost_while_its_body_runs_is_not_refused() -> None:
    async def scenario() -> ThreadCall:
        loop = asyncio.get_running_loop()
        entered, over = threading.Event(), threading.Event()

        def body() -> str:
            entered.set()
            assert over.wait(LIMIT_S)
            return "done"

        call, ended = call_of(body)
        ThreadPool(loop, "test").submit(call)
        assert await asyncio.to_thread(entered.wait, LIMIT_S)
        call.withdraw()
        over.set()
        async with asyncio.timeout(LIMIT_S):
            return await ended

    call = asyncio.run(scenario())
    assert (call.refused, call.value, call.error) == (False, "done", None)
