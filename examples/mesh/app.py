"""Reports on tenants. What a report needs of its tenant takes a second to load, and the process keeps it."""

import asyncio
import os

from fluxmesh import Queue

queue = Queue(db_path="reports.db")
known: dict[str, asyncio.Task[str]] = {}


async def load(tenant: str) -> str:
    await asyncio.sleep(1.0)  # as a model, an index or a connection is loaded
    return f"the data of {tenant}"


@queue.task
async def report(tenant: str) -> dict[str, object]:
    cold = tenant not in known
    if cold:
        known[tenant] = asyncio.create_task(load(tenant))
    await asyncio.shield(known[tenant])
    await asyncio.sleep(0.05)
    return {"tenant": tenant, "cold": cold, "process": os.getpid()}
