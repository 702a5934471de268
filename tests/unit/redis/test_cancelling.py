"""Whoever waits for an answer may be cancelled at any moment: he is, and nothing is left of his wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fluxmesh.config import Settings
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.submission import prepare
from tests.redis_server import Server, shared_server  # noqa: F401 - a fixture

TURNS = 24  # of the loop, after which a call has certainly come to wait for its answer
BOUND_S = 20.0


async def cancelled_at_every_turn(storage: Storage, job_id: str) -> None:
    for verb in (lambda: storage.get(job_id), lambda: storage.wait_for(job_id, 60)):
        for turns in range(TURNS):
            task = asyncio.ensure_future(verb())
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.cancel():
                done, _ = await asyncio.wait({task}, timeout=BOUND_S)
                assert done, f"still waiting, {turns} turns after its start"
                assert task.cancelled() or task.exception() is None
    found = await storage.get(job_id)
    assert found is not None
    assert found.id == job_id


def channels(server: Server) -> list[bytes]:
    """But for the one that says that ends are awaited here: who has waited listens to it until he closes."""
    with server.client() as client:
        return [name for name in client.pubsub_channels() if not name.endswith(b"awaited")]


def test_a_cancellation_is_never_swallowed_and_leaves_no_subscription(server: Server, tmp_path: Path) -> None:
    async def main() -> None:
        storage = await open_storage(server.url(), Settings(), create=True)
        job = prepare({"task": "t"}).job((), {})
        await storage.enqueue([job], queue_cap=10)
        await cancelled_at_every_turn(storage, job.id)
        async with asyncio.timeout(BOUND_S):
            while channels(server):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await storage.close()
        with server.client() as client:
            async with asyncio.timeout(BOUND_S):
                while client.pubsub_channels():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    asyncio.run(main())
