"""A process that reads back every job of a storage with its history, through the storage port.

python -m benchmarks.reader URL      prints a JSON array of seen.Seen
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import msgspec

from benchmarks.seen import Seen
from fluxmesh.config import Settings
from fluxmesh.job import Job
from fluxmesh.query import Query
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage

PAGE: Final = 500
PAGES_MOST: Final = 100_000


async def read(url: str) -> list[Seen]:
    storage = await open_storage(url, Settings(url=url), create=False)
    try:
        seen: list[Seen] = []
        cursor: str | None = None
        for _ in range(PAGES_MOST):
            page = await storage.find(Query(), cursor=cursor, limit=PAGE)
            seen += await asyncio.gather(*(seen_of(storage, job) for job in page.items))
            cursor = page.next_cursor
            if cursor is None:
                break
        return seen
    finally:
        await storage.close()


async def seen_of(storage: Storage, job: Job) -> Seen:
    """One job with its history."""
    history = await storage.history(job.id) or []
    return Seen(
        id=job.id,
        task=job.task,
        number=job.args[0] if job.args else None,
        result=job.result,
        priority=job.priority,
        status=job.status,
        created_at=job.created_at,
        scheduled_at=job.scheduled_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
        worker_id=job.worker_id,
        outcomes=tuple(attempt.outcome for attempt in history),
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(read(sys.argv[1]))))
