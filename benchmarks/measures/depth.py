"""Whether a long queue makes anything slower: the same rounds beside a thousand and a million others."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator
from typing import Final

from msgspec import Struct

from benchmarks.bench import Bench, Site
from benchmarks.figures import CheckFailed, Figure
from fluxmesh.codec import encode_result
from fluxmesh.config import BATCH_MAX, Settings
from fluxmesh.job import TIERS, Outcome, Status
from fluxmesh.outcome import Transition
from fluxmesh.storage.values import (
    ExchangeRequest,
    Registration,
    Settle,
    Settled,
    TaskSpec,
    Verdict,
    WorkerRef,
)
from fluxmesh.submission import prepare

SHALLOW: Final = 1_000
DEEP: Final = 1_000_000
DEEP_QUICK: Final = 20_000
ROUNDS: Final = 20
BATCH: Final = 250
CAP: Final = 2_000_000  # the queue's own cap is just what the deeper queue holds
OWNER: Final = "benchmark-depth"


class Rates(Struct, frozen=True):
    enqueue: float
    claim: float


async def flatness(bench: Bench) -> AsyncIterator[Figure]:
    """Storage verbs alone, without a worker around them: enqueue by the thousand, claim and settle by 250."""
    enqueue: dict[int, list[float]] = {}
    claim: dict[int, list[float]] = {}
    depths = (SHALLOW, DEEP_QUICK if bench.quick else DEEP)
    for depth in depths:
        rates = []
        for _ in range(bench.repeat):
            async with bench.site() as site:
                rates.append(await _at_depth(site, depth))
        enqueue[depth] = [rate.enqueue for rate in rates]
        claim[depth] = [rate.claim for rate in rates]
    for name, values in (("enqueue", enqueue), ("claim and settle", claim)):
        shallow = statistics.median(values[SHALLOW])
        for depth in depths:
            yield Figure(
                name=f"{name} beside a queue",
                unit="jobs/s",
                values=values[depth],
                parameters={"queued": depth, "rounds": ROUNDS, "enqueue_batch": BATCH_MAX, "claim": BATCH},
                details={"to_the_shallow": [round(value / shallow, 3) for value in values[depth]]},
            )


async def _at_depth(site: Site, depth: int) -> Rates:
    template = prepare({"task": "noop"})
    limit = Settings().payload_limit_bytes
    worker = await _register(site)

    async def put() -> float:
        jobs = [template.job((number,), {}, limit=limit) for number in range(BATCH_MAX)]
        began = time.perf_counter()
        answers = await site.storage.enqueue(jobs, queue_cap=CAP)
        took_s = time.perf_counter() - began
        if any(answer.verdict is not Verdict.CREATED for answer in answers):
            raise CheckFailed("a job was not stored")
        return took_s

    for _ in range(depth // BATCH_MAX):
        await put()
    enqueue_s = claim_s = 0.0
    request = 0
    for _ in range(ROUNDS):
        enqueue_s += await put()
        for _ in range(BATCH_MAX // BATCH):
            claim_s += await _claim_and_settle(site, worker, request)
            request += 2
    count = ROUNDS * BATCH_MAX
    counts = (await site.storage.counts()).by_status
    if counts.get(Status.COMPLETED) != count or counts.get(Status.PENDING) != depth:
        raise CheckFailed(f"at the end: {dict(counts)}")
    return Rates(count / enqueue_s, count / claim_s)


async def _register(site: Site) -> WorkerRef:
    settings = Settings()
    registration = Registration(
        worker_id=OWNER,
        queues=("default",),
        tiers=TIERS,
        tasks=(TaskSpec("noop"),),
        capacity=BATCH,
        lease_s=settings.lease_s,
        beat_s=settings.beat_every_s,
    )
    return WorkerRef(OWNER, await site.storage.register(registration))


async def _claim_and_settle(site: Site, worker: WorkerRef, request: int) -> float:
    result = encode_result(None, limit=1_024)
    done = Transition(status=Status.COMPLETED, outcome=Outcome.COMPLETED, result=result)
    began = time.perf_counter()
    answer = await site.storage.exchange(ExchangeRequest(worker, request + 1, slots=BATCH))
    settles = tuple(Settle(job.id, job.token, done) for job in answer.running)
    settled = await site.storage.exchange(ExchangeRequest(worker, request + 2, settle=settles))
    took_s = time.perf_counter() - began
    if len(settles) != BATCH or set(settled.settled) != {Settled.APPLIED}:
        raise CheckFailed(f"{len(settles)} jobs were given, and settled as {set(settled.settled)}")
    return took_s
