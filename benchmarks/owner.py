"""A process that registers as a worker, claims jobs through the storage port, and then does nothing more.

python -m benchmarks.owner URL COUNT      prints how many it owns and its epoch, then waits to be killed
"""

from __future__ import annotations

import asyncio
import os
import sys

from fluxmesh.config import Settings
from fluxmesh.job import TIERS
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import ExchangeRequest, Registration, TaskSpec, WorkerRef

OWNER = "benchmark-owner"


async def own(url: str, count: int) -> None:
    settings = Settings(url=url)
    storage = await open_storage(url, settings, create=False)
    registration = Registration(
        worker_id=OWNER,
        queues=("default",),
        tiers=TIERS,
        tasks=(TaskSpec("noop"),),
        capacity=count,
        lease_s=settings.lease_s,
        beat_s=settings.beat_every_s,
        pid=os.getpid(),
    )
    epoch = await storage.register(registration)
    answer = await storage.exchange(ExchangeRequest(WorkerRef(OWNER, epoch), 1, slots=count))
    print(len(answer.running), epoch, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # ends with whoever started it


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1], int(sys.argv[2])))
