"""Every verb of the client, written once as a plan of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from fluxmesh.client import answers
from fluxmesh.client.answers import Metrics, Replayed, Submitted
from fluxmesh.client.plans import Ask, Pause, Plan, Reply, asked
from fluxmesh.client.problems import Problem, ServerBusy, problem_error, unreadable
from fluxmesh.clock import Clock
from fluxmesh.config import BATCH_MAX
from fluxmesh.errors import FluxMeshError, InvalidOption, OutcomeUnknown, StorageUnreachable, WaitTimeout
from fluxmesh.ids import is_job_id
from fluxmesh.job import Attempt, Job
from fluxmesh.outcome import checked_delay_s
from fluxmesh.peers import Observation, OwnerView, RingView, Totals
from fluxmesh.query import PAGE_DEFAULT, Page
from fluxmesh.storage.values import Cancelled, DeadGroup, QueueStats, WorkerInfo
from fluxmesh.submission import (
    checked_arguments,
    checked_int,
    checked_queue,
    checked_tier,
    normalised,
    prepare,
)

T = TypeVar("T")
API: Final = "/api/v1"
WAIT_SLICE_S: Final = 20.0  # one request waits so long at most: proxies cut off what is silent for longer
LOOK_AGAIN_S: Final = 0.5
BULK_BYTES: Final = 8 << 20  # the server takes 16 MiB
DEFAULT_LIMIT: Final = PAGE_DEFAULT
PAYLOAD_MOST_BYTES: Final = 64 << 20  # the server's own limit is lower, as a rule; no server's is higher
_encode = msgspec.json.Encoder().encode


class Item(msgspec.Struct, frozen=True):
    """A checked submission as it is sent. `own_id`: the id, if it was made here and now."""

    id: str
    own_id: str | None
    body: bytes


def checked(fields: Mapping[str, Any]) -> Item:
    """The submission with an id, so that it may be repeated. Raises UsageError as the SDK does."""
    template = prepare(fields)
    args, kwargs = fields.get("args"), fields.get("kwargs")
    positional, named = checked_arguments([] if args is None else args, {} if kwargs is None else kwargs)
    job = template.job(positional, named, limit=PAYLOAD_MOST_BYTES)
    known = normalised(fields)
    # As the payload holds them: nothing is left in it that JSON would silently change.
    known["args"], known["kwargs"] = msgspec.msgpack.decode(job.payload)
    known["id"] = job.id
    if isinstance(known.get("run_at"), datetime):
        known["run_at"] = known["run_at"].isoformat()
    return Item(job.id, None if template.id else job.id, _encode(known))


class Verbs:
    """Plans of requests to one server. `where` is its address, for messages."""

    def __init__(self, where: str, *, retries: int, clock: Clock) -> None:
        self.where = where
        self.retries = retries
        self._clock = clock

    def _reply(self, ask: Ask) -> Plan[Reply]:
        return asked(ask, self.where, self.retries)

    def _read(self, reply: Reply, read: Callable[[Any], T]) -> T:
        try:
            return answers.parsed(reply.body, read)
        except msgspec.MsgspecError as error:
            raise unreadable(self.where, error) from error

    def _get(self, path: str, read: Callable[[Any], T], **query: object) -> Plan[T]:
        given = {name: str(value) for name, value in query.items() if value is not None}
        return self._read((yield from self._reply(Ask("GET", f"{API}{path}", given))), read)

    def _post(
        self, path: str, read: Callable[[Any], T], body: object = None, *, repeatable: bool = False
    ) -> Plan[T]:
        data = _encode({} if body is None else body)
        ask = Ask("POST", f"{API}{path}", body=data, repeatable=repeatable)
        return self._read((yield from self._reply(ask)), read)

    # -- jobs --------------------------------------------------------------------------------------------

    def submit(self, fields: Mapping[str, Any]) -> Plan[Submitted]:
        item = checked(fields)
        try:
            reply = yield from self._reply(Ask("POST", f"{API}/jobs", body=item.body))
        except OutcomeUnknown as error:
            error.hint = f"submit it again with id={item.id!r}: it is then stored once"
            raise
        return self._read(reply, lambda document: answers.submitted(document, item.own_id))

    def submit_many(self, jobs: Sequence[Mapping[str, Any]]) -> Plan[list[Submitted | FluxMeshError]]:
        told: list[Submitted | FluxMeshError | None] = [None] * len(jobs)
        items: list[tuple[int, Item]] = []
        for index, fields in enumerate(jobs):
            try:
                items.append((index, checked(fields)))
            except FluxMeshError as error:
                told[index] = error
        stored_some = False
        failed: FluxMeshError | None = None
        for batch in _batches(items):
            if failed is None:
                try:
                    outcomes = yield from self._bulk([item for _, item in batch])
                    stored_some = True
                except FluxMeshError as error:
                    if not stored_some:
                        raise
                    failed = error
                    outcomes = [error] * len(batch)
            else:
                unsent = StorageUnreachable(f"not sent, because a batch before it failed: {failed.message}")
                outcomes = [unsent] * len(batch)
            for (index, _), outcome in zip(batch, outcomes, strict=True):
                told[index] = outcome
        return [one for one in told if one is not None]

    def _bulk(self, items: Sequence[Item]) -> Plan[list[Submitted | FluxMeshError]]:
        body = b'{"jobs":[%b]}' % b",".join(item.body for item in items)
        reply = yield from self._reply(Ask("POST", f"{API}/jobs/bulk", body=body))

        def read(document: Any) -> list[Submitted | FluxMeshError]:
            return [_told(one, item) for one, item in zip(document["items"], items, strict=True)]

        return self._read(reply, read)

    def get(self, job_id: str) -> Plan[Job]:
        return self._get(_job(job_id), answers.job)

    def history(self, job_id: str) -> Plan[list[Attempt]]:
        return self._get(f"{_job(job_id)}/history", answers.list_of(answers.attempt))

    def jobs(self, q: str, cursor: str | None, limit: int) -> Plan[Page[Job]]:
        return self._get("/jobs", answers.page_of(answers.job), q=q or None, cursor=cursor, limit=limit)

    def wait(self, job_id: str, timeout: float | None) -> Plan[Job]:
        path = f"{API}{_job(job_id)}/wait"
        left_s = math.inf if timeout is None else checked_delay_s("timeout", timeout)
        deadline = self._clock.mono_s() + left_s
        while True:
            began = self._clock.mono_s()
            slice_s = min(WAIT_SLICE_S, max(0.0, deadline - began))
            ask = Ask("GET", path, {"timeout": f"{slice_s:.3f}"}, extra_s=slice_s)
            try:
                job = self._read((yield from self._reply(ask)), answers.job)
            except ServerBusy:  # so many wait there that it takes no more of them, but it answers a look
                job = yield from self.get(job_id)
            now = self._clock.mono_s()
            if job.ended:
                return job
            if now >= deadline:
                raise WaitTimeout(f"job {job_id} is {job.status} after {timeout:g} s", hint="wait longer")
            if now - began < slice_s / 2:  # or it stops, and answers at once
                yield Pause(min(LOOK_AGAIN_S, deadline - now))

    def cancel(self, job_id: str) -> Plan[Cancelled]:
        def read(document: Any) -> Cancelled:
            return Cancelled.CANCELLED if document["status"] == "CANCELLED" else Cancelled.REQUESTED

        return self._post(f"{_job(job_id)}/cancel", read)

    def retry(self, job_id: str) -> Plan[None]:
        return self._post(f"{_job(job_id)}/retry", _nothing)

    def reprioritise(self, job_id: str, priority: int | str) -> Plan[None]:
        return self._post(f"{_job(job_id)}/reprioritise", _nothing, {"priority": checked_tier(priority)})

    # -- dead letters ------------------------------------------------------------------------------------

    def dlq(self, q: str, cursor: str | None, limit: int) -> Plan[Page[Job]]:
        return self._get("/dlq", answers.page_of(answers.job), q=q or None, cursor=cursor, limit=limit)

    def dlq_groups(self, limit: int) -> Plan[list[DeadGroup]]:
        return self._get("/dlq/groups", answers.list_of(answers.dead_group), limit=limit)

    def dlq_replay(self, job_id: str) -> Plan[None]:
        return self._post(f"/dlq/{_checked_id(job_id)}/replay", _nothing)

    def dlq_replay_many(self, q: str, *, dry_run: bool) -> Plan[Replayed]:
        body = {"q": q, "dry_run": dry_run}
        return self._post("/dlq/replay", answers.replayed, body, repeatable=dry_run)

    def dlq_discard(self, job_id: str) -> Plan[None]:
        return self._post(f"/dlq/{_checked_id(job_id)}/discard", _nothing)

    # -- workers and queues ------------------------------------------------------------------------------

    def queues(self) -> Plan[list[QueueStats]]:
        return self._get("/queues", answers.list_of(answers.queue_stats))

    def pause(self, queue: str) -> Plan[bool]:
        return self._post(f"/queues/{_queue(queue)}/pause", _changed, repeatable=True)

    def resume(self, queue: str) -> Plan[bool]:
        return self._post(f"/queues/{_queue(queue)}/resume", _changed, repeatable=True)

    def workers(self) -> Plan[list[WorkerInfo]]:
        return self._get("/workers", answers.list_of(answers.as_struct(WorkerInfo)))

    def mesh(self) -> Plan[list[Observation]]:
        return self._get("/mesh", answers.list_of(answers.as_struct(Observation)))

    def mesh_totals(self) -> Plan[Totals]:
        read = answers.as_struct(Totals)
        return self._get("/mesh", lambda document: read(document["totals"]))

    def mesh_rings(self, queue: str | None) -> Plan[list[RingView]]:
        return self._get("/mesh/ring", answers.list_of(answers.as_struct(RingView)), queue=queue)

    def mesh_owner(self, key: str, queue: str) -> Plan[OwnerView]:
        return self._get("/mesh/owner", answers.as_struct(OwnerView), key=key, queue=queue)

    def metrics(self) -> Plan[Metrics]:
        return self._get("/metrics", answers.as_struct(Metrics))

    def health(self) -> Plan[None]:
        self._read((yield from self._reply(Ask("GET", "/readyz"))), lambda document: document["status"])


def checked_limit(limit: int | None) -> int | None:
    """How many items of an iteration, None for all."""
    return None if limit is None else checked_int("limit", limit, 0, 1 << 62)


def page_size(left: int | None, page: int) -> int:
    return page if left is None else min(page, left)


def _told(one: Any, item: Item) -> Submitted | FluxMeshError:
    if "job" in one:
        return answers.submitted(one["job"], item.own_id)
    return problem_error(msgspec.convert(one["problem"], Problem), one["status"])


def _batches(items: Sequence[tuple[int, Item]]) -> list[list[tuple[int, Item]]]:
    """In order, each of at most 1,000 items and, unless it has only one, BULK_BYTES."""
    batches: list[list[tuple[int, Item]]] = []
    room = 0
    for index, item in items:
        size = len(item.body) + 1
        if not batches or size > room or len(batches[-1]) == BATCH_MAX:
            batches.append([])
            room = BULK_BYTES
        batches[-1].append((index, item))
        room -= size
    return batches


def _nothing(document: Any) -> None:
    if "job_id" not in document:
        raise KeyError("job_id")


def _changed(document: Any) -> bool:
    return bool(document["changed"])


def _checked_id(job_id: str) -> str:
    if not isinstance(job_id, str) or not is_job_id(job_id):
        raise InvalidOption("job_id", f"{str(job_id)[:80]!r} is not a UUIDv7 in lower case")
    return job_id


def _job(job_id: str) -> str:
    return f"/jobs/{_checked_id(job_id)}"


def _queue(name: str) -> str:
    return quote(checked_queue(name), safe="")
