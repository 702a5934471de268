"""Storage and bodies work at the same time: a full answer is begun in two halves, and each half has an
exchange of its own, the second of which is at hand when storage is done with the first."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import msgspec

from fluxmesh.clock import ManualClock
from fluxmesh.errors import OutcomeUnknown
from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import Transition
from fluxmesh.storage.base import BATCH_BYTES, Storage
from fluxmesh.storage.values import (
    ClaimedJob,
    ExchangeAnswer,
    ExchangeRequest,
    Settle,
    Settled,
    Standing,
    WorkerRef,
)
from fluxmesh.worker.fetcher import HALVED_FROM, Fetcher
from fluxmesh.worker.lease import Lease
from fluxmesh.worker.runs import Plan, Run, RunTable
from fluxmesh.worker.slots import Slots

JOBS = 4 * HALVED_FROM
NO_RESERVE: Final[Mapping[int, int]] = {}
DONE = Transition(Status.COMPLETED, Outcome.COMPLETED)


class Endless:
    """Gives as many jobs as there are slots, one request after the other, as any storage; notes each request,
    how many bodies ran while it was done, and how many more requests were at hand then."""

    def __init__(self, rounds: int, told: Callable[[], int]) -> None:
        self.requests: list[tuple[int, int]] = []  # settles, slots
        self.ids: list[int] = []
        self.run_meanwhile: list[int] = []
        self.at_hand: list[int] = []
        self.owned = self.owned_most = 0
        self._under_way = 0
        self._lock = asyncio.Lock()
        self._left = rounds
        self._told = told
        self._made = 0

    async def exchange(self, request: ExchangeRequest) -> ExchangeAnswer:
        self._under_way += 1
        try:
            async with self._lock:
                return await self._exchange(request)
        finally:
            self._under_way -= 1

    async def _exchange(self, request: ExchangeRequest) -> ExchangeAnswer:
        before = self._told()
        self.requests.append((len(request.settle), request.slots))
        self.ids.append(request.request_id)
        for _ in range(10):
            await asyncio.sleep(0)  # storage is busy, the loop is not
        self.run_meanwhile.append(self._told() - before)
        self.at_hand.append(self._under_way - 1)
        self._left -= 1
        slots = request.slots if self._left > 0 else 0
        jobs = [
            ClaimedJob(f"job {self._made + n}", 1, "t", "default", 2, b"", None, 0, 0, 0, 0, 1)
            for n in range(slots)
        ]
        self._made += slots
        self.owned += slots - len(request.settle)
        self.owned_most = max(self.owned_most, self.owned)
        return ExchangeAnswer(Standing.GOOD, tuple(Settled.APPLIED for _ in request.settle), (), tuple(jobs))

    async def wait_for_work(self, worker: WorkerRef, timeout_s: float) -> bool:
        await asyncio.Event().wait()
        return True


async def drained(
    concurrency: int,
    rounds: int,
    kind: type[Endless] = Endless,
    end_as: Transition = DONE,
    reserve: Mapping[int, int] = NO_RESERVE,
) -> Endless:
    ran: list[str] = []
    storage = kind(rounds, lambda: len(ran))
    table = RunTable(Slots(concurrency, reserve))
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def admit(job: ClaimedJob, now: float) -> Callable[[], None]:
        run = Run(job, cast("Plan", None), cast("Any", None), now)
        table.add(run)

        def end() -> None:
            ran.append(job.id)
            table.end(run)
            fetcher.deliver(run, Settle(job.id, job.token, end_as))

        return lambda: cast("None", loop.call_soon(end))

    lease = Lease(ManualClock(), lease_s=60.0, beat_s=1.0)
    lease.renewed(0.0)
    fetcher = Fetcher(
        cast("Storage", storage), WorkerRef("w", 1), table=table, lease=lease,
        clock=ManualClock(), beat_s=1.0, batch=1_000, admit_job=admit,
        nudge_beat=lambda: None, on_fenced=over.set, on_failure=lambda _: over.set(),
        rng=random.Random(1), observer=None,
    )  # fmt: skip
    await fetcher.start()
    async with asyncio.timeout(10):
        while storage._left > 0 or len(ran) < storage._made:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await fetcher.stop()
    assert len(ran) == len(set(ran)) == storage._made
    assert not over.is_set()
    return storage


def test_one_half_runs_while_storage_is_busy_with_the_other() -> None:
    storage = asyncio.run(drained(JOBS, 8))
    assert storage.requests[:3] == [(0, JOBS), (JOBS // 2, JOBS // 2), (JOBS // 2, JOBS // 2)]
    assert storage.run_meanwhile[1:7] == [JOBS // 2] * 6
    assert storage.at_hand[1:7] == [1] * 6
    assert storage.owned_most == JOBS


def test_an_exchange_that_has_to_be_repeated_holds_up_nothing_and_keeps_its_id() -> None:
    class Lossy(Endless):
        async def _exchange(self, request: ExchangeRequest) -> ExchangeAnswer:
            if request.request_id == 4 and request.request_id not in self.ids:
                self.ids.append(request.request_id)
                raise OutcomeUnknown("the answer is lost")
            return await super()._exchange(request)

    storage = asyncio.run(drained(JOBS, 40, Lossy))
    again = len(storage.ids) - storage.ids[::-1].index(4) - 1
    assert again - storage.ids.index(4) > 1, "others went on"
    assert storage.ids.count(4) == 2
    assert storage.owned_most == JOBS


def test_with_a_reserve_one_exchange_is_under_way() -> None:
    storage = asyncio.run(drained(JOBS, 8, reserve={0: 1}))
    assert storage.at_hand == [0] * len(storage.at_hand)
    assert storage.run_meanwhile[1:5] == [JOBS // 2] * 4


def test_few_jobs_are_begun_all_at_once() -> None:
    few = HALVED_FROM - 1
    storage = asyncio.run(drained(few, 4))
    assert storage.requests[:3] == [(0, few), (few, few), (few, few)]


def test_an_exchange_carries_so_many_bytes_of_results() -> None:
    sizes: list[int] = []

    class Counting(Endless):
        async def _exchange(self, request: ExchangeRequest) -> ExchangeAnswer:
            sizes.append(sum(len(settle.transition.result or b"") for settle in request.settle))
            return await super()._exchange(request)

    blob = b"x" * (BATCH_BYTES // 4)
    asyncio.run(drained(HALVED_FROM - 1, 3, Counting, msgspec.structs.replace(DONE, result=blob)))
    assert max(sizes) == BATCH_BYTES
