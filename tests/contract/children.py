"""What the processes of test_processes do: `python -m tests.contract.children <what> <url> <argument>`.

A child says "ready", waits for a line, acts, and prints its answer as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys

from fluxmesh.config import Settings
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import Registration, Settle, Settled, TaskSpec
from fluxmesh.testing.contract.lab import COMPLETED, Puppet, new_job

IN_HAND = 7


async def claim_all(storage: Storage, name: str) -> object:
    """Claim and complete until nothing is left; the ids that were given, and how often a settle was stale."""
    tiers = (0, 1, 2, 3)
    registration = Registration(name, ("default",), tiers, (TaskSpec("work"),), IN_HAND, 6.0, 2.0)
    worker = Puppet(storage, registration, await storage.register(registration))
    _start()
    given: list[str] = []
    stale = 0
    settles: list[Settle] = []
    while True:
        answer = await worker.exchange(settle=settles, slots=IN_HAND)
        stale += sum(settled is not Settled.APPLIED for settled in answer.settled)
        settles = [Settle(job.id, job.token, COMPLETED) for job in answer.running]
        given += [job.id for job in answer.running]
        if not settles:
            return {"given": given, "stale": stale}


async def enqueue_each(storage: Storage, keys: str) -> object:
    """One job under each of the keys given as JSON; the verdicts, and the ids of the jobs that stand."""
    _start()
    answers: list[tuple[str, str]] = []
    for field, value in json.loads(keys).items():
        (put,) = await storage.enqueue([new_job("work", 1, **{field: value})], queue_cap=1_000)
        answers.append((put.verdict, put.id))
    return answers


def _start() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


async def main() -> None:
    what, url, argument = sys.argv[1:]
    storage = await open_storage(url, Settings(), create=False)
    try:
        act = {"claim_all": claim_all, "enqueue_each": enqueue_each}[what]
        print(json.dumps(await act(storage, argument)), flush=True)
    finally:
        await storage.close()


if __name__ == "__main__":
    asyncio.run(main())
