"""The skeleton of every loop: it rests, wakes, backs off and ends."""

from __future__ import annotations

import asyncio
import random

import pytest

from fluxmesh.errors import StorageUnreachable
from fluxmesh.service import FIRST_PAUSE_S, LONGEST_PAUSE_S, Service, pause_after_s
from tests.service.log_tap import tapped

LONG_S = 3_600.0


class Counting(Service):
    """Counts its rounds; fails in the first `failing` of them."""

    def __init__(
        self, *, interval_s: float = LONG_S, failing: int = 0, error: Exception | None = None
    ) -> None:
        super().__init__("counting", interval_s=interval_s)
        self.rounds = 0
        self.answer: float | None = None
        self._failing = failing
        self._error = error or RuntimeError("no")
        self._news = asyncio.Condition()

    async def run_once(self) -> float | None:
        self.rounds += 1
        async with self._news:
            self._news.notify_all()
        if self.rounds <= self._failing:
            raise self._error
        return self.answer

    async def reached(self, rounds: int) -> None:
        async with asyncio.timeout(10), self._news:
            await self._news.wait_for(lambda: self.rounds >= rounds)


def test_the_first_round_follows_the_start_at_once_and_the_next_one_a_wake() -> None:
    async def scenario() -> None:
        service = Counting()
        await service.start()
        await service.reached(1)
        service.wake()
        await service.reached(2)
        await service.stop()
        assert service.rounds == 2
        assert not service.running

    asyncio.run(scenario())


def test_a_wake_during_a_round_is_not_lost() -> None:
    class WakingItself(Counting):
        async def run_once(self) -> float | None:
            if self.rounds == 0:
                self.wake()
            return await super().run_once()

    async def scenario() -> None:
        service = WakingItself()
        await service.start()
        await service.reached(2)
        await service.stop()
        assert service.rounds == 2

    asyncio.run(scenario())


def test_a_round_says_itself_how_long_to_rest() -> None:
    async def scenario() -> None:
        service = Counting()
        service.answer = 0.0
        await service.start()
        await service.reached(50)
        await service.stop()

    asyncio.run(scenario())


def test_a_failed_round_is_logged_and_the_loop_goes_on() -> None:
    async def scenario() -> None:
        with tapped() as tap:
            service = Counting(failing=1)
            await service.start()
            failed = await tap.until("service round failed", service="counting")
            assert failed["failures"] == 1
            assert "RuntimeError: no" in failed["error"]
            assert "Traceback" in failed["exception"]
            await service.reached(2)
            await tap.until("service works again")
            assert service.failures == 0
            await service.stop()

    asyncio.run(scenario())


def test_an_expected_outage_is_logged_without_a_stack() -> None:
    async def scenario() -> None:
        with tapped() as tap:
            service = Counting(failing=1, error=StorageUnreachable("locked"))
            await service.start()
            assert "exception" not in await tap.until("service round failed")
            await service.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("when", ["during the round", "during the pause"])
def test_a_wake_does_not_cut_the_pause_after_a_failure(when: str) -> None:
    class Woken(Counting):
        async def run_once(self) -> float | None:
            if when == "during the round":
                self.wake()
            return await super().run_once()

    async def scenario() -> None:
        with tapped() as tap:
            service = Woken(failing=1_000)
            await service.start()
            pause_s = (await tap.until("service round failed"))["pause_s"]
            loop = asyncio.get_running_loop()
            began = loop.time()
            if when == "during the pause":
                service.wake()
            await service.reached(2)
            assert loop.time() - began >= pause_s * 0.8
            await service.stop()

    asyncio.run(scenario())


def test_something_cancelled_inside_a_round_does_not_end_the_loop() -> None:
    class Hit(Counting):
        async def run_once(self) -> float | None:
            await super().run_once()
            if self.rounds == 1:
                raise asyncio.CancelledError
            return None

    async def scenario() -> None:
        service = Hit()
        await service.start()
        await service.reached(2)
        await service.stop()

    asyncio.run(scenario())


class Hanging(Service):
    """A round that does not end, until it is cancelled."""

    def __init__(self, *, round_limit_s: float | None = None) -> None:
        super().__init__("hanging", interval_s=LONG_S, round_limit_s=round_limit_s)
        self.entered = asyncio.Event()

    async def run_once(self) -> float | None:
        self.entered.set()
        await asyncio.Event().wait()
        return None


def test_a_stop_cancels_a_round_that_does_not_end() -> None:
    async def scenario() -> None:
        service = Hanging()
        await service.start()
        await service.entered.wait()
        await service.stop(0.01)
        assert not service.running

    asyncio.run(scenario())


def test_a_round_past_its_limit_counts_as_failed() -> None:
    async def scenario() -> None:
        with tapped() as tap:
            service = Hanging(round_limit_s=0.01)
            await service.start()
            assert "TimeoutError" in (await tap.until("service round failed"))["error"]
            await service.stop()

    asyncio.run(scenario())


def test_a_round_may_make_itself_the_last() -> None:
    class Once(Counting):
        async def run_once(self) -> float | None:
            self.request_stop()
            await self.stop()  # from inside: does not wait for itself
            return await super().run_once()

    async def scenario() -> None:
        service = Once()
        await service.start()
        await asyncio.wait_for(service.wait(), 10)
        assert service.rounds == 1

    asyncio.run(scenario())


def test_stop_is_idempotent_and_a_stopped_service_does_not_start() -> None:
    async def scenario() -> None:
        service = Counting()
        await service.stop()
        await service.start()
        await service.stop()
        await service.wait()
        assert service.rounds == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("failures", [1, 2, 5, 100, 100_000])
def test_pauses_after_failures_grow_to_a_bound(failures: int) -> None:
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20))
    for seed in range(20):
        assert longest / 2 <= pause_after_s(failures, random.Random(seed)) <= longest
