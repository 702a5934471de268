"""A real fetcher with a stock, on a real SQLite file, and bodies that end when a test says so.

The clock of the lease, of the stock and of late answers is the test's own; storage has its own time. Answers
of storage can be held back, so that a test decides what happens while they are under way.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from fluxmesh.clock import ManualClock, system_clock
from fluxmesh.config import Settings
from fluxmesh.job import TIERS, Outcome, Status
from fluxmesh.mesh.messages import NodeRef, Offered
from fluxmesh.outcome import Transition
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import (
    BeatAnswer,
    Begun,
    ClaimedJob,
    ExchangeAnswer,
    ExchangeRequest,
    Owned,
    Registration,
    Settle,
    Settled,
    Standing,
    TaskSpec,
    WorkerRef,
    WorkerView,
)
from fluxmesh.submission import prepare
from fluxmesh.worker.fetcher import Fetcher
from fluxmesh.worker.lease import Lease
from fluxmesh.worker.observe import JobsReleased, WorkerEvent
from fluxmesh.worker.runs import Plan, Run, RunTable
from fluxmesh.worker.slots import Slots
from fluxmesh.worker.stock import Rules, Stock

BEAT_S = 1.0
LEASE_S = 60.0
DONE = Transition(Status.COMPLETED, Outcome.COMPLETED)
PEER = NodeRef("peer", 1)


class Held:
    """Answers of one verb that wait until a test lets them come."""

    def __init__(self) -> None:
        self.closed = False
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def gate(self) -> None:
        if self.closed:
            waiting = asyncio.get_running_loop().create_future()
            self.waiting.append(waiting)
            await waiting

    def open(self) -> None:
        self.closed = False
        while self.waiting:
            self.waiting.popleft().set_result(None)


class Tapped:
    """The storage of one worker: what was asked is noted, and answers may be held back."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.requests: list[ExchangeRequest] = []
        self.takes: list[int] = []
        self.standing: Standing | None = None  # what storage is made to say of the worker
        self.on_answer: Callable[[], object] = lambda: None
        self.exchanges = Held()
        self.transfers = Held()

    async def exchange(self, request: ExchangeRequest) -> ExchangeAnswer:
        self.requests.append(request)
        if self.standing is not None:
            lost = tuple(Begun.LOST for _ in request.begin)
            settled = tuple(Settled.STALE for _ in request.settle)
            return ExchangeAnswer(self.standing, settled, lost)
        answer = await self._storage.exchange(request)
        await self.exchanges.gate()
        self.on_answer()
        return answer

    async def transfer(self, thief: WorkerRef, jobs: Sequence[Owned]) -> list[ClaimedJob]:
        rows = await self._storage.transfer(thief, jobs)
        await self.transfers.gate()
        return rows

    async def take_held(self, worker: WorkerRef, slots: int) -> Any:
        self.takes.append(slots)
        return await self._storage.take_held(worker, slots)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


class Told:
    """The trade, as the fetcher meets it."""

    def __init__(self) -> None:
        self.wants: list[int] = []
        self.takes: list[tuple[NodeRef, tuple[Offered, ...], tuple[Offered, ...]]] = []

    def seek(self, want: int) -> None:
        self.wants.append(want)

    def took(self, peer: NodeRef, jobs: Sequence[Offered], got: Sequence[Offered]) -> None:
        self.takes.append((peer, tuple(jobs), tuple(got)))

    def changed(self) -> None: ...


class Bench:
    """One worker of the stockroom."""

    def __init__(
        self,
        storage: Storage,
        ref: WorkerRef,
        view: WorkerView,
        *,
        steal: bool,
        reserve: Mapping[int, int],
        local_buffer: int,
        concurrency: int,
        plain: bool,
    ) -> None:
        self.storage = Tapped(storage)
        self.ref = ref
        self.view = view
        self.clock = ManualClock()
        self.table = RunTable(Slots(concurrency, reserve))
        rules = Rules(concurrency=concurrency, steal=steal, local_buffer=local_buffer)
        self.stock = Stock(rules, self.clock)
        self.table.stock = None if plain else self.stock
        self.lease = Lease(self.clock, lease_s=LEASE_S, beat_s=BEAT_S)
        self.lease.renewed(self.clock.mono_s())
        self.told = Told()
        self.started: list[str] = []
        self.released: list[tuple[str, ...]] = []
        self.failures: list[object] = []
        self.fenced = False
        self.fetcher = Fetcher(
            cast("Storage", self.storage),
            ref,
            table=self.table,
            lease=self.lease,
            clock=self.clock,
            beat_s=BEAT_S,
            batch=1_000,
            admit_job=self._admit,
            nudge_beat=lambda: None,
            on_fenced=self._fence,
            on_failure=self.failures.append,
            rng=random.Random(1),
            observer=self._observe,
            stock=None if plain else self.stock,
            trade=None if plain else self.told,
        )

    def _fence(self) -> None:
        self.fenced = True
        self.fetcher.stop_claiming()

    def _observe(self, event: WorkerEvent) -> None:
        if isinstance(event, JobsReleased):
            self.released.append(event.job_ids)

    def _admit(self, job: ClaimedJob, now: float) -> Callable[[], None]:
        run = Run(job, cast("Plan", None), cast("Any", None), now)
        self.table.add(run)
        self.table.await_entry(run)

        def begin() -> None:
            if self.table.enter(run):
                self.started.append(job.id)

        return begin

    def warm(self, run_s: float = 0.001) -> None:
        """Its jobs are known to be short."""
        for _ in range(30):
            self.stock.times.note(run_s)

    def far(self, trip_s: float) -> None:
        """Its exchanges take so long, and are known to."""
        self.storage.on_answer = lambda: self.clock.advance(trip_s)
        for _ in range(9):
            self.stock.trips.note(trip_s)

    def end(self, job_id: str) -> None:
        """The body of this job returns."""
        run = self.table.runs[job_id]
        self.table.end(run)
        self.fetcher.deliver(run, Settle(job_id, run.job.token, DONE))

    async def beat(self, *, mark: bool = True) -> BeatAnswer:
        """A beat with all that this worker owns; as the beat thread does, it withdraws what is lost."""
        owned = self.table.owned()
        answer = await self.storage.beat(self.ref, owned, self.view)
        if mark:
            tokens = {item.id: item for item in owned}
            self.table.withdraw([tokens[job_id] for job_id in answer.lost])
        return cast("BeatAnswer", answer)

    def offered(self, most: int = 99) -> tuple[Offered, ...]:
        """What the next one to begin last is: all that is held, as an offer."""
        from fluxmesh.mesh.messages import Steal

        return self.stock.offer(Steal(most, ("default",), TIERS, ()), most, PEER).jobs

    @property
    def held(self) -> set[str]:
        return {job.id for job in self.stock._jobs.values()}

    @property
    def at_rest(self) -> bool:
        """Nothing is under way between this worker and storage."""
        return not (self.fetcher._flights or self.fetcher._woken) and self.fetcher._idle()

    async def rests(self) -> None:
        await until(lambda: self.at_rest)


async def until(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Return once it holds: looked at again and again, because what it waits for has no signal."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Stockroom:
    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.benches: list[Bench] = []

    async def worker(
        self,
        name: str = "w1",
        *,
        concurrency: int = 1,
        steal: bool = True,
        local_buffer: int = 64,
        reserve: Mapping[int, int] | None = None,
        plain: bool = False,
        warm: bool = True,
    ) -> Bench:
        """Registered; its fetcher is to be started by the test. `plain`: without a mesh."""
        registration = Registration(
            name, ("default",), TIERS, (TaskSpec("t"),), concurrency, LEASE_S, BEAT_S, donates=steal
        )
        ref = WorkerRef(name, await self.storage.register(registration))
        bench = Bench(
            self.storage, ref, WorkerView(registration), steal=steal, reserve=reserve or {},
            local_buffer=local_buffer, concurrency=concurrency, plain=plain,
        )  # fmt: skip
        if warm:
            bench.warm()
        self.benches.append(bench)
        return bench

    async def put(self, count: int = 1, *, tier: int = 2) -> list[str]:
        jobs = [prepare({"task": "t", "priority": tier}).job([], {}) for _ in range(count)]
        return [answer.id for answer in await self.storage.enqueue(jobs, queue_cap=10_000)]

    async def status(self, job_id: str) -> Status:
        job = await self.storage.get(job_id)
        assert job is not None
        return job.status

    async def by_status(self) -> dict[Status, int]:
        counts = await self.storage.counts()
        return {status: count for status, count in counts.by_status.items() if count}


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[Stockroom]:
    settings = Settings(lease_s=LEASE_S, proof_of_death=False)
    storage = await open_storage(
        f"sqlite:///{path}", settings, create=True, clock=system_clock(), inline=False
    )
    room = Stockroom(storage)
    try:
        yield room
    finally:
        for bench in room.benches:
            bench.storage.exchanges.open()
            bench.storage.transfers.open()
            await bench.fetcher.stop(1.0)
        await storage.close()
    for bench in room.benches:
        assert not bench.failures
        assert len(set(bench.started)) == len(bench.started)


def stockroom(test: Callable[[Stockroom], Awaitable[None]]) -> Callable[[Path], None]:
    """Make a test of an `async def` whose parameter is a Stockroom of its own."""

    async def play(path: Path) -> None:
        async with asyncio.timeout(60), _opened(path) as room:
            await test(room)

    @functools.wraps(test)
    def run(tmp_path: Path) -> None:
        asyncio.run(play(tmp_path / "jobs.db"))

    del run.__wrapped__  # pytest asks for fixtures by the names in the signature
    return run
