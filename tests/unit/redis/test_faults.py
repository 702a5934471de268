"""A server frozen under claims, one whose memory is full, and a crowd of jobs that nobody can run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from fluxmesh.clock import SystemClock
from fluxmesh.config import Settings
from fluxmesh.errors import OutcomeUnknown, StorageError, StorageUnreachable
from fluxmesh.job import Status
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import Reap, Registration, Settle, Settled, TaskSpec, Verdict
from fluxmesh.submission import prepare
from fluxmesh.testing.contract.lab import COMPLETED, CRASHED, Puppet, insist, own, retention
from tests.cli.harness import run as run_command
from tests.redis_server import Server

BOUND_S: Final = 30.0
TIERS: Final = (0, 1, 2, 3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def play(
    url: str, scene: Callable[..., Awaitable[None]], *, storages: int = 1, bound_s: float = BOUND_S
) -> None:
    """Play it on this many storages: as many processes, so to speak."""

    async def bounded() -> None:
        async with asyncio.timeout(bound_s), contextlib.AsyncExitStack() as stack:
            opened: list[Storage] = []
            for _ in range(storages):
                opened.append(await open_storage(url, Settings(), create=True, clock=SystemClock()))
                stack.push_async_callback(opened[-1].close)
            await scene(*opened)

    asyncio.run(bounded())


async def worker(storage: Storage, name: str = "w1", *, lease_s: float = 6.0, beat_s: float = 2.0) -> Puppet:
    seen = Registration(name, ("default",), TIERS, (TaskSpec("work"),), 8, lease_s, beat_s)
    return Puppet(storage, seen, await storage.register(seen))


async def put(storage: Storage, count: int, task: str = "work", **fields: Any) -> list[str]:
    made: list[str] = []
    template = prepare({"task": task, **fields})
    for start in range(0, count, 1_000):
        jobs = [template.job((n,), {}) for n in range(start, min(start + 1_000, count))]
        answers = await insist(lambda jobs=jobs: storage.enqueue(jobs, queue_cap=10_000_000))  # type: ignore[misc]
        assert {answer.verdict for answer in answers} <= {Verdict.CREATED, Verdict.EXISTING}
        made += [answer.id for answer in answers]
    return made


class Hand:
    """A worker by the book: it claims and runs, beats, and never asks again for what it was not told."""

    def __init__(self, puppet: Puppet, beat_s: float, runs: Counter[str]) -> None:
        self.puppet = puppet
        self.beat_s = beat_s
        self.runs = runs
        self.unheard = 0
        self._ended: list[Settle] = []
        self._loop = asyncio.get_running_loop()

    async def beat(self) -> None:
        while True:
            with contextlib.suppress(StorageError):
                await self.puppet.beat()
            await asyncio.sleep(self.beat_s)

    async def work(self, all_run: Callable[[], bool]) -> None:
        while not all_run():
            request = self.puppet.request(settle=self._ended, slots=3)
            sent = self._loop.time()
            try:
                answer = await self.puppet.send(request)
            except OutcomeUnknown:
                self.unheard += 1
                continue
            except StorageUnreachable:
                continue
            assert Settled.STALE not in answer.settled
            self._ended = []
            if self._loop.time() - sent > self.beat_s:
                await self.puppet.release(*answer.running)
                continue
            self.runs.update(job.id for job in answer.running)
            self._ended = [Settle(job.id, job.token, COMPLETED) for job in answer.running]
            if not answer.running:
                await self.puppet.storage.wait_for_work(self.puppet.ref, self.beat_s)
        await self.puppet.exchange(settle=self._ended)


async def frozen_under_claims(
    server: Server, storages: Sequence[Storage], *, frozen_s: float, beat_s: float
) -> None:
    storage = storages[0]
    made = await put(storage, 40)
    runs: Counter[str] = Counter()
    hands = [
        Hand(await worker(own_one, f"w{n}", lease_s=3 * beat_s, beat_s=beat_s), beat_s, runs)
        for n, own_one in enumerate(storages)
    ]
    for hand in hands:  # whose scripts the server knows: what it is asked for now, it does when it has thawed
        await hand.puppet.exchange()
    loop = asyncio.get_running_loop()
    server.process.send_signal(signal.SIGSTOP)
    working = [asyncio.create_task(hand.work(lambda: len(runs) == len(made))) for hand in hands]
    beating = [asyncio.create_task(hand.beat()) for hand in hands]
    await asyncio.sleep(frozen_s)  # how long it is frozen is what this is about
    server.process.send_signal(signal.SIGCONT)
    thawed = loop.time()
    await asyncio.gather(*working)
    took = loop.time() - thawed
    for task in beating:
        task.cancel()
    assert all(hand.unheard for hand in hands), "each worker has lost the answer to a claim"
    assert runs == Counter(made), "each job was run, and once"
    counts = await storage.counts()
    assert {status: n for status, n in counts.by_status.items() if n} == {Status.COMPLETED: len(made)}
    assert counts.stale_settles == 0
    assert [(await storage.get(job_id)).crashes for job_id in made] == [0] * len(made)  # type: ignore[union-attr]
    # Two beats until it may count as lost, two lists that lack it, and a beat for this machine.
    assert 2 * beat_s < took < 5 * beat_s + 1


def test_a_server_frozen_under_claims_strands_nothing_and_nothing_runs_twice(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen for longer than an answer is waited for, and than a lease."""
    monkeypatch.setattr("fluxmesh.storage.redis.dialer.ANSWER_S", 0.3)
    monkeypatch.setattr("fluxmesh.storage.redis.dialer.CONNECT_S", 0.3)
    play(
        server.url(), lambda *three: frozen_under_claims(server, three, frozen_s=1.5, beat_s=0.4), storages=3
    )


@pytest.mark.slow
def test_a_server_frozen_for_twenty_seconds_strands_nothing_and_nothing_runs_twice(server: Server) -> None:
    play(
        server.url(),
        lambda *three: frozen_under_claims(server, three, frozen_s=20.0, beat_s=2.0),
        storages=3,
        bound_s=60.0,
    )


# -- memory --------------------------------------------------------------------------------------------------
def fill(server: Server, most: int) -> None:
    with server.client() as client:
        client.config_set("maxmemory", most)


def test_when_memory_is_full_only_new_work_is_refused_and_the_error_names_memory(server: Server) -> None:
    async def scene(storage: Storage) -> None:
        busy, victim = await worker(storage), await worker(storage, "w2")
        made = await put(storage, 6)
        ending, waiting = await busy.claim(2)
        (lost,) = await victim.claim(1)
        (held,) = await busy.hold(1)
        fill(server, 1)
        with pytest.raises(StorageUnreachable, match="memory"):
            await put(storage, 1)
        assert await storage.release(busy.ref, [own(held)]) == [True]
        assert await busy.note(waiting, percent=50.0)
        busy.owned = {waiting.id: waiting.token, ending.id: ending.token}
        assert (await busy.beat()).lost == ()
        assert await busy.settle(ending) is Settled.APPLIED
        # Housekeeping, by which memory is freed, and which a worker that is started again joins.
        assert await storage.lead("me", 5)
        assert await storage.declare_dead(victim.ref, "killed")
        (found,) = (await storage.orphans(10)).jobs
        assert found.id == lost.id
        assert await storage.reap([Reap(found.id, found.token, CRASHED)]) == [Settled.APPLIED]
        again = await worker(storage, "w2")
        assert [job.id for job in await again.claim(1)] == [made[2]]
        assert (await storage.promote(10)).count == 0
        assert (await storage.prune(retention(result_s=0.0), 10)).jobs == 1
        assert await storage.cancel(made[4:]) != []
        fill(server, 0)
        await put(storage, 1)
        assert await busy.settle(waiting) is Settled.APPLIED

    play(server.url(), scene)


def test_the_command_line_says_that_memory_is_full(server: Server, tmp_path: Path) -> None:
    fill(server, 1)
    done = run_command("submit", "--task", "work", "--url", server.url(), cwd=tmp_path)
    done.refused(4, "memory", str(server.port))


# -- a crowd -------------------------------------------------------------------------------------------------
async def parked_crowd(server: Server, storage: Storage, *, crowd: int, dearer: float) -> None:
    """What a claim costs the server, in commands and microseconds, alone and behind a parked crowd."""
    claimer = await worker(storage)

    async def cost() -> tuple[int, int]:
        await put(storage, 200)
        calls, spent_us = [], []
        with server.client() as client:
            for _ in range(20):
                client.config_resetstat()
                given = await claimer.claim(10)
                assert len(given) == 10
                stats = client.info("commandstats")
                calls.append(sum(of["calls"] for of in stats.values()))
                spent_us.append(stats["cmdstat_evalsha"]["usec"])
                await claimer.complete(*given)
        return min(calls), min(spent_us)  # the least: what else the machine does adds to it

    await cost()
    alone = await cost()
    await put(storage, crowd, "alien")
    answers = 0
    while (await insist(lambda: claimer.exchange(slots=10))).more:
        answers += 1
    assert answers >= crowd // 1_000 - 1, "at most a thousand are parked in one call"
    stats = {queue.queue: queue for queue in await storage.queue_stats()}
    assert stats["default"].parked == crowd
    behind = await cost()
    print(f"claim of 10, (commands, us): {alone} alone, {behind} behind {crowd:,} parked jobs")
    assert behind[0] <= alone[0] + 2
    assert behind[1] < dearer * alone[1]


def test_twenty_thousand_parked_jobs_do_not_slow_a_claim(server: Server) -> None:
    play(server.url(), lambda storage: parked_crowd(server, storage, crowd=20_000, dearer=3.0))


@pytest.mark.slow
def test_a_million_parked_jobs_do_not_slow_a_claim(server: Server) -> None:
    play(
        server.url(),
        lambda storage: parked_crowd(server, storage, crowd=1_000_000, dearer=3.0),
        bound_s=1_200.0,
    )
