"""`RedisStorage`: the port's verbs over one server. No logic of jobs lives here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from fluxmesh.clock import US, Clock
from fluxmesh.config import Settings
from fluxmesh.errors import StorageUnreachable
from fluxmesh.events import MAX_TOPICS, Event, encode_event
from fluxmesh.job import Attempt, Job
from fluxmesh.query import Page, Query, checked_limit
from fluxmesh.storage.base import checked_batch
from fluxmesh.storage.redis import find as find_verb
from fluxmesh.storage.redis import operate, prune, reads, verbs
from fluxmesh.storage.redis.connection import Connections
from fluxmesh.storage.redis.keys import prefix_of
from fluxmesh.storage.redis.push import Bells, Listener, subscribed
from fluxmesh.storage.redis.scripts import Scripts
from fluxmesh.storage.values import (
    BeatAnswer,
    Cancelled,
    ClaimedJob,
    Counts,
    DeadGroup,
    Done,
    Enqueued,
    ExchangeAnswer,
    ExchangeRequest,
    MeshView,
    OrphansAnswer,
    Owned,
    ProgressNote,
    Promoted,
    Pruned,
    QueueStats,
    Reap,
    Registration,
    Retention,
    Settled,
    StorageInfo,
    TakeAnswer,
    Tended,
    WorkerInfo,
    WorkerRef,
    WorkerView,
)
from fluxmesh.submission import NewJob

_WAIT_LOOK_S: Final = 5.0  # push is lossy
OPEN_S: Final = 3.0  # a command that finds nobody shall end within 5 s


class RedisStorage:
    """One namespace of one server. See fluxmesh.storage.base.Storage for what each verb promises."""

    def __init__(self, connections: Connections, settings: Settings, clock: Clock) -> None:
        self.namespace = settings.namespace
        self._lease_us = round(settings.lease_s * US)
        self._connections = connections
        self._wait_replicas = settings.wait_replicas
        prefix = prefix_of(settings.namespace, in_cluster=connections.in_cluster)
        self._scripts = Scripts(connections, prefix, clock)
        self._listener = Listener(connections)
        self._bells = Bells(self._listener)
        self._awaits = False
        self._loop = asyncio.get_running_loop()

    # -- producers -----------------------------------------------------------------------------------
    async def enqueue(self, jobs: Sequence[NewJob], *, queue_cap: int) -> list[Enqueued]:
        self._connections.check_usable()
        if not jobs:
            return []
        return await verbs.enqueue(self._scripts, checked_batch(jobs), queue_cap, self._wait_replicas)

    async def wait_for(self, job_id: str, timeout_s: float) -> Job | None:
        over = asyncio.Event()
        channel = self._scripts.key("over", job_id)

        def hear(_: bytes | None) -> None:
            over.set()

        if not self._awaits:
            # Kept for as long as this storage is open: who has waited for one job will wait for more.
            await self._listener.add(self._scripts.key("awaited"), lambda _: None)
            self._awaits = True
        await self._listener.add(channel, hear)
        try:
            deadline = self._loop.time() + timeout_s
            while True:
                over.clear()
                job = await self.get(job_id)
                left = deadline - self._loop.time()
                if job is None or job.ended or left <= 0:
                    return job
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left, _WAIT_LOOK_S)):
                        await over.wait()
        finally:
            await self._listener.remove(channel, hear)

    # -- workers -------------------------------------------------------------------------------------
    async def register(self, registration: Registration) -> int:
        epoch = await verbs.register(self._scripts, self._lease_us, registration)
        await self._bells.hang(self._scripts.key("bell", epoch))
        return epoch

    async def exchange(self, request: ExchangeRequest) -> ExchangeAnswer:
        checked_batch(request.settle)
        checked_batch(request.begin)
        checked_batch(range(request.slots + request.extra))
        return await verbs.exchange(self._scripts, request)

    async def wait_for_work(self, worker: WorkerRef, timeout_s: float) -> bool:
        self._connections.check_usable()
        return await self._bells.wait_for_work(self._scripts.key("bell", worker.epoch), timeout_s)

    async def wait_for_notice(self, worker: WorkerRef, timeout_s: float) -> bool:
        self._connections.check_usable()
        return await self._bells.wait_for_notice(self._scripts.key("bell", worker.epoch), timeout_s)

    async def release(self, worker: WorkerRef, jobs: Sequence[Owned]) -> list[bool]:
        return await verbs.release(self._scripts, worker, checked_batch(jobs))

    async def transfer(self, thief: WorkerRef, jobs: Sequence[Owned]) -> list[ClaimedJob]:
        return await verbs.transfer(self._scripts, thief, checked_batch(jobs))

    async def take_held(self, worker: WorkerRef, slots: int) -> TakeAnswer:
        return await verbs.take_held(self._scripts, worker, slots)

    async def progress(self, worker: WorkerRef, notes: Sequence[ProgressNote]) -> list[bool]:
        return await verbs.progress(self._scripts, worker, checked_batch(notes))

    # -- liveness ------------------------------------------------------------------------------------
    async def beat(self, worker: WorkerRef, owned: Sequence[Owned] | None, view: WorkerView) -> BeatAnswer:
        return await verbs.beat(self._scripts, self._lease_us, worker, owned, view)

    async def declare_dead(self, worker: WorkerRef, how: str) -> bool:
        return await verbs.declare_dead(self._scripts, self._lease_us, worker, how)

    async def orphans(self, limit: int) -> OrphansAnswer:
        return await verbs.orphans(self._scripts, self._lease_us, limit)

    async def reap(self, items: Sequence[Reap]) -> list[Settled]:
        return await verbs.reap(self._scripts, self._lease_us, checked_batch(items))

    async def command(self, worker_id: str, command: str | None) -> bool:
        return await verbs.command(self._scripts, self._lease_us, worker_id, command)

    # -- housekeeping --------------------------------------------------------------------------------
    async def lead(self, holder: str, ttl_s: float) -> bool:
        return await verbs.lead(self._scripts, holder, ttl_s)

    async def promote(self, limit: int) -> Promoted:
        return await verbs.promote(self._scripts, limit)

    async def tend(self, holder: str, ttl_s: float, *, promote: int, orphans: int) -> Tended:
        return await verbs.tend(self._scripts, self._lease_us, holder, ttl_s, promote, orphans)

    async def prune(self, retention: Retention, limit: int) -> Pruned:
        return await prune.prune(self._scripts, retention, limit)

    # -- operators -----------------------------------------------------------------------------------
    async def cancel(self, ids: Sequence[str]) -> list[Cancelled]:
        return await operate.cancel(self._scripts, ids)

    async def replay(self, ids: Sequence[str]) -> list[Done]:
        return await operate.replay(self._scripts, ids)

    async def discard(self, ids: Sequence[str]) -> list[Done]:
        return await operate.discard(self._scripts, ids)

    async def reprioritise(self, ids: Sequence[str], tier: int) -> list[Done]:
        return await operate.reprioritise(self._scripts, ids, tier)

    async def pause(self, queue: str) -> bool:
        return await operate.pause(self._scripts, queue)

    async def resume(self, queue: str) -> bool:
        return await operate.resume(self._scripts, queue)

    # -- reads ---------------------------------------------------------------------------------------
    async def get(self, job_id: str) -> Job | None:
        return await reads.get(self._scripts, job_id)

    async def history(self, job_id: str) -> list[Attempt] | None:
        return await reads.history(self._scripts, job_id)

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 50) -> Page[Job]:
        return await find_verb.find(self._scripts, query, cursor, checked_limit(limit))

    async def counts(self) -> Counts:
        return await reads.counts(self._scripts)

    async def queue_stats(self) -> list[QueueStats]:
        return await reads.queue_stats(self._scripts)

    async def dlq_groups(self, limit: int) -> list[DeadGroup]:
        return await reads.dlq_groups(self._scripts, checked_limit(limit))

    async def fleet(self) -> list[WorkerInfo]:
        return await reads.fleet(self._scripts)

    async def mesh_views(self) -> list[MeshView]:
        return await reads.mesh_views(self._scripts)

    async def info(self) -> StorageInfo:
        return await reads.info(self._scripts, self.namespace)

    # -- push ----------------------------------------------------------------------------------------
    async def publish(self, event: Event) -> int:
        encode_event(event)  # refuses what is too large
        heard: int = await self._scripts.read("PUBLISH", self._scripts.key("event", event.topic), event.body)
        return heard

    def subscribe(self, topics: Sequence[str]) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        wanted = dict.fromkeys(list(topics)[:MAX_TOPICS])
        return subscribed(self._listener, [(topic, self._scripts.key("event", topic)) for topic in wanted])

    async def close(self) -> None:
        await self._connections.close()
        await self._listener.close()


async def open_backend(
    url: str, settings: Settings, *, create: bool, clock: Clock, inline: bool = False
) -> RedisStorage:
    """Connect to the server that `url` names. There is nothing to create, and verbs never block the loop, so
    `create` and `inline` make no difference. Raises a StorageError that says why it cannot."""
    connections = Connections(url)
    try:
        async with asyncio.timeout(OPEN_S):
            await connections.check(settings.namespace)
    except TimeoutError:
        await connections.close()
        raise StorageUnreachable(
            f"{connections.where} did not answer in {OPEN_S:g} s", hint="is the server running?"
        ) from None
    except BaseException:
        await connections.close()
        raise
    return RedisStorage(connections, settings, clock)
