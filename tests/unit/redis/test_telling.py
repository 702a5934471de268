"""Who is told of the end of a job: whoever waits for one, and while nobody does, nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluxmesh.clock import SystemClock
from fluxmesh.config import Settings
from fluxmesh.job import Outcome, Status
from fluxmesh.outcome import Charge, Transition
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import ExchangeRequest, Settle, WorkerRef
from tests.redis_server import Server
from tests.unit.redis.play import BOUND_S, play, put, register

COMPLETED = Transition(Status.COMPLETED, Outcome.COMPLETED, Charge.ATTEMPT)
MANY = 10
SOON_S = 4.0  # sooner than whoever waits looks for himself


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def told(server: Server) -> int:
    """How often the server has told anybody of anything."""
    with server.client() as client:
        calls: int = client.info("commandstats").get("cmdstat_publish", {}).get("calls", 0)
        return calls


async def run_many(storage: Storage, worker: WorkerRef, request_id: int) -> None:
    """Claim that many, and end them all in one exchange."""
    given = await storage.exchange(ExchangeRequest(worker, request_id, slots=MANY))
    assert len(given.running) == MANY
    ends = tuple(Settle(job.id, job.token, COMPLETED) for job in given.running)
    await storage.exchange(ExchangeRequest(worker, request_id + 1, settle=ends))


def test_of_many_ends_nobody_is_told_before_somebody_waits_for_one(server: Server) -> None:
    async def scene(storage: Storage) -> None:
        worker = await register(storage)
        for _ in range(MANY):
            await put(storage)
        before = told(server)
        await run_many(storage, worker, 1)
        assert told(server) == before
        ids = [(await put(storage)).id for _ in range(MANY)]
        other = await open_storage(server.url(), Settings(), create=True, clock=SystemClock())
        try:
            waiting = [asyncio.create_task(other.wait_for(job_id, BOUND_S)) for job_id in ids]
            async with asyncio.timeout(BOUND_S):
                while not await all_heard(server, ids):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            async with asyncio.timeout(SOON_S):
                await run_many(storage, worker, 3)
                jobs = await asyncio.gather(*waiting)
            assert all(job is not None and job.ended for job in jobs)
            assert told(server) >= before + MANY
        finally:
            await other.close()

    play(server.url(), scene)


async def all_heard(server: Server, ids: list[str]) -> bool:
    """Whether somebody listens for the end of each of these jobs."""
    with server.client() as client:
        heard = client.pubsub_numsub(*(f"fluxmesh:over:{job_id}" for job_id in ids))
    return all(listeners == 1 for _, listeners in heard)
