"""The mutating verbs of producers and workers: values of the port to arguments of a script, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from fluxmesh.codec import encode_error
from fluxmesh.errors import OutcomeUnknown, StorageUnreachable
from fluxmesh.job import Status
from fluxmesh.limits import parse_rate
from fluxmesh.outcome import Counters, Transition
from fluxmesh.storage.affinities import kept
from fluxmesh.storage.base import BATCH_BYTES
from fluxmesh.storage.redis.scripts import Scripts, blob
from fluxmesh.storage.values import (
    MESH_VIEW_BYTES,
    PROCESS_GONE,
    Affinity,
    BeatAnswer,
    Begun,
    ClaimedJob,
    Enqueued,
    ExchangeAnswer,
    ExchangeRequest,
    Ground,
    OnDeath,
    Orphan,
    OrphansAnswer,
    Owned,
    ProgressNote,
    Promoted,
    Reap,
    Registration,
    Settle,
    Settled,
    Standing,
    TakeAnswer,
    TaskSpec,
    Tended,
    Verdict,
    WorkerRef,
    WorkerView,
)
from fluxmesh.submission import NewJob

US: Final = 1_000_000
EACH_MOST: Final = 250  # items of one script: what runs on the server, everybody waits for
_SETTLED: Final = {ord("a"): Settled.APPLIED, ord("d"): Settled.ALREADY, ord("s"): Settled.STALE}
_BEGUN: Final = {ord("b"): Begun.BEGUN, ord("o"): Begun.OUTRANKED, ord("l"): Begun.LOST}
_NOTHING_MORE: Final = (None,) * 10
_NO_RESERVE: Final = (0, 0, 0, 0)
_CREATED: Final = Verdict.CREATED
_encode = msgspec.msgpack.Encoder().encode
_decode_spec = msgspec.msgpack.Decoder(TaskSpec).decode


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / US


async def _each(scripts: Scripts, verb: str, leading: tuple[Any, ...], items: Sequence[Any]) -> list[Any]:
    """A verb over many items, atomic per item, in scripts that stay short for everybody else."""
    answers: list[Any] = []
    for start in range(0, len(items), EACH_MOST):
        answers += await scripts.run(verb, *leading, items[start : start + EACH_MOST])
    return answers


# -- producers -------------------------------------------------------------------------------------------
def _new(job: NewJob) -> tuple[Any, ...]:
    """What the script needs of a job, without the Nones at the end."""
    rest = (
        job.delay_us, job.run_at_us, job.expires_in_us, job.idempotency_key, blob(job.payload_hash),
        job.unique_key, job.concurrency_key, job.concurrency_limit, job.tags or None,
        job.slot,
    )  # fmt: skip
    first = (job.id, job.task, job.queue, job.tier, blob(job.payload), blob(job.options))
    return first if rest == _NOTHING_MORE else (*first, *rest, True)


def _by_size(jobs: Sequence[NewJob]) -> Iterator[Sequence[NewJob]]:
    """Stretches of the jobs with payloads of BATCH_BYTES at most, or of one job."""
    begun = size = 0
    for at, job in enumerate(jobs):
        size += len(job.payload)
        if size > BATCH_BYTES and at > begun:
            yield jobs[begun:at]
            begun, size = at, len(job.payload)
    yield jobs[begun:]


async def enqueue(
    scripts: Scripts, jobs: Sequence[NewJob], queue_cap: int, replicas: int = 0
) -> list[Enqueued]:
    answers: list[Any] = []
    for some in _by_size(jobs):
        try:
            answers += await scripts.run("enqueue", queue_cap, list(map(_new, some)), replicas=replicas)
        except StorageUnreachable as error:
            if not answers:
                raise
            raise OutcomeUnknown(
                f"{error.message}, after a part was stored", hint="repeat the call"
            ) from error
    return [
        Enqueued(job.id, _CREATED) if answer == 1 else _enqueued(answer)
        for job, answer in zip(jobs, answers, strict=True)
    ]


def _enqueued(answer: list[Any]) -> Enqueued:
    verdict, job_id, by, status, pruned = answer
    return Enqueued(
        job_id.decode(),
        Verdict(verdict.decode()),
        by.decode() if by else None,
        Status(status.decode()) if status else None,
        pruned=bool(pruned),
    )


# -- the hot path ----------------------------------------------------------------------------------------
def _transition(transition: Transition) -> tuple[Any, ...]:
    return (
        transition.status,
        transition.outcome,
        int(transition.charge),
        blob(transition.result),
        None if transition.error is None else blob(encode_error(transition.error)),
        round(transition.delay_s * US),
        transition.reason,
        transition.fingerprint,
    )


def _settle(item: Settle) -> tuple[Any, ...]:
    end = item.transition
    if end.status is Status.COMPLETED and item.message is None:
        return (item.id, str(item.token), False if end.result is None else blob(end.result))
    return (item.id, str(item.token), False, _transition(end), item.percent, item.message)


def _claimed(row: list[Any]) -> ClaimedJob:
    job_id, token, task, queue, tier, payload, options = row[:7]
    job = (job_id.decode(), int(token), task.decode(), queue.decode(), int(tier), payload, options)
    if len(row) == 7:
        return ClaimedJob(*job, 0, 0, 0, 0, 1)
    attempts, crashes, snoozes, interruptions, life, hops, slot = row[7:]
    return ClaimedJob(
        *job,
        int(attempts or 0),
        int(crashes or 0),
        int(snoozes or 0),
        int(interruptions or 0),
        int(life or 1),
        int(hops or 0),
        None if slot is None else int(slot),
    )


async def exchange(scripts: Scripts, request: ExchangeRequest) -> ExchangeAnswer:
    answer = await scripts.run(
        "exchange",
        request.worker.worker_id,
        request.worker.epoch,
        request.request_id,
        [_settle(item) for item in request.settle],
        [(item.id, item.token) for item in request.begin],
        request.slots,
        request.extra,
        request.reserve or _NO_RESERVE,
    )
    standing, settled, begun, running, held, more, next_due_us, next_held_us = answer
    return ExchangeAnswer(
        Standing(standing.decode()),
        tuple(map(_SETTLED.__getitem__, settled)),
        tuple(map(_BEGUN.__getitem__, begun)),
        tuple(map(_claimed, running)),
        tuple(map(_claimed, held)),
        more=bool(more),
        next_due_s=_seconds(next_due_us),
        next_held_s=_seconds(next_held_us),
    )


async def promote(scripts: Scripts, limit: int) -> Promoted:
    count, next_us = await scripts.run("promote", min(limit, EACH_MOST * 4))
    return Promoted(count, _seconds(next_us))


# -- ownership -------------------------------------------------------------------------------------------
def _owned(jobs: Sequence[Owned]) -> list[tuple[str, int]]:
    return [(job.id, job.token) for job in jobs]


async def release(scripts: Scripts, worker: WorkerRef, jobs: Sequence[Owned]) -> list[bool]:
    return [bool(answer) for answer in await _each(scripts, "release", (worker.epoch,), _owned(jobs))]


async def transfer(scripts: Scripts, thief: WorkerRef, jobs: Sequence[Owned]) -> list[ClaimedJob]:
    return [
        _claimed(row) for row in await scripts.run("transfer", thief.epoch, _owned(jobs), thief.worker_id)
    ]


async def take_held(scripts: Scripts, worker: WorkerRef, slots: int) -> TakeAnswer:
    taken, next_held_us = await scripts.run("take_held", worker.epoch, slots, worker.worker_id)
    return TakeAnswer(tuple(map(_claimed, taken)), _seconds(next_held_us))


async def progress(scripts: Scripts, worker: WorkerRef, notes: Sequence[ProgressNote]) -> list[bool]:
    items = [
        (
            note.id,
            note.token,
            note.percent,
            note.message,
            None if note.on_death is None else int(note.on_death),
        )
        for note in notes
    ]
    return [bool(answer) for answer in await _each(scripts, "progress", (worker.epoch,), items)]


# -- liveness --------------------------------------------------------------------------------------------
def _view(seen: Registration, status: str, running: int) -> tuple[Any, ...]:
    tasks = "".join(f"\0{spec.name}" for spec in seen.tasks) + "\0"
    me = (seen.queues, sorted(seen.tiers), tasks, seen.donates)
    lease_us, beat_us = round(seen.lease_s * US), round(seen.beat_s * US)
    return (seen.worker_id, blob(_encode(seen)), blob(_encode(me)), lease_us, beat_us, status, running)


def _affinity(told: Affinity) -> tuple[Any, ...]:
    """As the scripts know it: weight, and the parts as text. Tasks are one text, as in `_view`."""
    affinity = kept(told)
    if affinity is None:
        return ("", "")
    parts = [
        (part.queues, blob(part.slots), "".join(f"\0{task}" for task in part.tasks) + "\0")
        for part in affinity.parts
    ]
    return (repr(float(affinity.weight)), blob(_encode(parts)))


def _task(spec: TaskSpec) -> tuple[Any, ...]:
    limit = None
    if spec.rate_limit is not None or spec.max_concurrent is not None:
        rate = None if spec.rate_limit is None else parse_rate(spec.rate_limit)
        numbers = (0, 0, 0) if rate is None else (rate.count, rate.period_us, rate.interval_us)
        limit = blob(_encode((*numbers, spec.max_concurrent or 0)))
    return (spec.name, blob(_encode(spec)), limit)


def _tasks(seen: Registration) -> list[tuple[Any, ...]]:
    return [_task(spec) for spec in seen.tasks]


async def register(scripts: Scripts, lease_us: int, registration: Registration) -> int:
    epoch: int = await scripts.run(
        "register", lease_us, _view(registration, "ready", 0), _tasks(registration)
    )
    return epoch


async def beat(
    scripts: Scripts, lease_us: int, worker: WorkerRef, owned: Sequence[Owned] | None, view: WorkerView
) -> BeatAnswer:
    standing, lost, cancelled, command, now_us, has_affinity = await scripts.run(
        "beat",
        lease_us,
        worker.epoch,
        _view(view.registration, view.status, view.running),
        _tasks(view.registration),
        None if owned is None else _owned(owned),
        None if view.mesh is None else blob(view.mesh if len(view.mesh) <= MESH_VIEW_BYTES else b""),
        None if view.affinity is None else _affinity(view.affinity),
    )
    return BeatAnswer(
        Standing(standing.decode()),
        tuple(job_id.decode() for job_id in lost),
        tuple(job_id.decode() for job_id in cancelled),
        None if command is None else command.decode(),
        now_us,
        bool(has_affinity),
    )


async def declare_dead(scripts: Scripts, lease_us: int, worker: WorkerRef, how: str) -> bool:
    return bool(
        await scripts.run("declare_dead", lease_us, worker.worker_id, worker.epoch, how, PROCESS_GONE)
    )


def _orphans(answer: list[Any]) -> OrphansAnswer:
    armed, rows, next_lapse_us = answer
    lapse_s = math.inf if next_lapse_us is None else next_lapse_us / US
    return OrphansAnswer(bool(armed), tuple(map(_orphan, rows)), lapse_s)


async def orphans(scripts: Scripts, lease_us: int, limit: int) -> OrphansAnswer:
    return _orphans(await scripts.run("orphans", lease_us, limit))


async def tend(
    scripts: Scripts, lease_us: int, holder: str, ttl_s: float, promote: int, orphans: int
) -> Tended:
    ttl_us = round(ttl_s * US)
    most = min(promote, EACH_MOST * 4)
    leads, count, next_us, found = await scripts.run("tend", lease_us, holder, ttl_us, most, orphans)
    return Tended(bool(leads), Promoted(count, _seconds(next_us)), _orphans(found))


def _orphan(row: list[Any]) -> Orphan:
    job_id, token, worker_id, epoch, ground, how, started, on_death, task, options, spec = row[:11]
    return Orphan(
        id=job_id.decode(),
        token=int(token),
        worker=WorkerRef(worker_id.decode(), int(epoch)),
        ground=Ground(ground.decode()),
        how=how.decode(),
        started=bool(started),
        on_death=OnDeath(int(on_death)),
        task=task.decode("utf-8", "replace"),
        options=options,
        spec=None if spec is None else _decode_spec(spec),
        counters=Counters(*map(int, row[11:])),
    )


async def reap(scripts: Scripts, lease_us: int, items: Sequence[Reap]) -> list[Settled]:
    rows = [
        (item.id, item.token, None if item.transition is None else _transition(item.transition))
        for item in items
    ]
    return [_SETTLED[letter] for letter in await _each(scripts, "reap", (lease_us,), rows)]


async def command(scripts: Scripts, lease_us: int, worker_id: str, word: str | None) -> bool:
    return bool(await scripts.run("command", lease_us, worker_id, word))


async def lead(scripts: Scripts, holder: str, ttl_s: float) -> bool:
    return bool(await scripts.run("lead", holder, round(ttl_s * US)))
