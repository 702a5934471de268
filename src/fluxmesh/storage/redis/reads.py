"""Reads for doors, lists apart (those stand in find.py). Each is a script that changes nothing, or a few."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fluxmesh.errors import StorageRefused
from fluxmesh.job import TIERS, Attempt, Job, Status
from fluxmesh.query import checked_limit
from fluxmesh.storage.records import error_of, history_of
from fluxmesh.storage.redis.connection import Connections
from fluxmesh.storage.redis.look import PARKED, READY, Look, Tally, score_of, tally_of
from fluxmesh.storage.redis.rows import STATUS, number, status_of, text
from fluxmesh.storage.redis.scripts import Scripts
from fluxmesh.storage.values import (
    Counts,
    DeadGroup,
    MeshView,
    QueueStats,
    Registration,
    StorageInfo,
    WorkerInfo,
)

_HELD: Final = 3
_RUNNING: Final = 4
_SCHEDULED: Final = 0
_QUEUED: Final = (READY, PARKED, _HELD)
_SILENT_BEATS: Final = 2
_WORKERS_AT_ONCE: Final = 50
_VIEWS_AT_ONCE: Final = 16  # of MESH_VIEW_BYTES at most
_decode_registration = msgspec.msgpack.Decoder(Registration).decode


async def get(scripts: Scripts, job_id: str) -> Job | None:
    found = await Look(scripts).jobs([job_id])
    return found[0] if found else None


async def history(scripts: Scripts, job_id: str) -> list[Attempt] | None:
    ((place, blob),) = await Look(scripts).fields([job_id], ("place", "history"))
    return None if status_of(place) is None else history_of(blob)


# -- numbers -------------------------------------------------------------------------------------------


async def counts(scripts: Scripts) -> Counts:
    flat, failed, stale = await scripts.run("read_counts")
    by_status = dict.fromkeys(Status, 0)
    queued: dict[tuple[str, int], int] = {}
    for (queue, tier, place), n in tally_of(flat).items():
        by_status[STATUS[place]] += n
        if place in _QUEUED:
            queued[(queue, tier)] = queued.get((queue, tier), 0) + n
    return Counts(by_status, queued, number(failed) or 0, number(stale) or 0)


async def queue_stats(scripts: Scripts) -> list[QueueStats]:
    """Every queue that holds jobs or is paused, by name. `oldest_wait_s` is that of its ready jobs."""
    now, flat, shut, waits = await scripts.run("read_queues")
    now_us = int(now)
    paused = {text(queue) or "" for queue in shut}
    tallies: dict[str, Tally] = {queue: {} for queue in paused}
    for (queue, tier, place), n in tally_of(flat).items():
        tallies.setdefault(queue, {})[(queue, tier, place)] = n
    oldest: dict[str, float] = {}
    for queue_name, created, due in waits:
        queue = text(queue_name) or ""
        since_us = max(number(created) or now_us, number(due) or 0)
        oldest[queue] = max(oldest.get(queue, 0.0), (now_us - since_us) / 1e6)
    return [
        _stats_of(queue, tallies[queue], oldest.get(queue), paused=queue in paused)
        for queue in sorted(tallies)
    ]


def _stats_of(queue: str, tally: Tally, oldest_wait_s: float | None, *, paused: bool) -> QueueStats:
    def of_place(at: int) -> int:
        return sum(n for (_, _, place), n in tally.items() if place == at)

    def of_tier(tier: int) -> int:
        return sum(tally.get((queue, tier, place), 0) for place in _QUEUED)

    by_tier = [of_tier(tier) for tier in TIERS]
    return QueueStats(
        queue=queue,
        paused=paused,
        queued=(by_tier[0], by_tier[1], by_tier[2], by_tier[3]),
        scheduled=of_place(_SCHEDULED),
        running=of_place(_RUNNING),
        parked=of_place(PARKED),
        oldest_wait_s=oldest_wait_s,
    )


async def dlq_groups(scripts: Scripts, limit: int) -> list[DeadGroup]:
    """The largest groups first."""
    found = await scripts.run("read_groups", checked_limit(limit))
    groups = [
        DeadGroup(
            fingerprint=text(fingerprint) or "",
            task=text(task) or "",
            reason=text(reason) or "",
            count=score_of(count),
            newest_at=score_of(newest_us) / 1e6,
            example=text(job_id) or "",
            error=error_of(error),
        )
        for fingerprint, count, newest_us, job_id, task, reason, error in found
    ]
    return sorted(groups, key=lambda group: (-group.count, -group.newest_at))


# -- workers -------------------------------------------------------------------------------------------


async def fleet(scripts: Scripts) -> list[WorkerInfo]:
    """Every worker epoch that has a record, in the order of their registrations."""
    epochs = await scripts.read("HKEYS", scripts.key("workers"))
    known = sorted(epoch for epoch in map(number, epochs) if epoch is not None)
    infos: list[WorkerInfo] = []
    for start in range(0, len(known), _WORKERS_AT_ONCE):
        some = known[start : start + _WORKERS_AT_ONCE]
        now, rows = await scripts.run("read_workers", [str(epoch) for epoch in some])
        found = (_info_of(epoch, row, int(now)) for epoch, row in zip(some, rows, strict=True) if row)
        infos += [info for info in found if info is not None]
    return infos


async def mesh_views(scripts: Scripts) -> list[MeshView]:
    epochs = await scripts.read("HKEYS", scripts.key("workers"))
    known = sorted(epoch for epoch in map(number, epochs) if epoch is not None)
    views: list[MeshView] = []
    for start in range(0, len(known), _VIEWS_AT_ONCE):
        some = known[start : start + _VIEWS_AT_ONCE]
        rows = await scripts.run("read_mesh", [str(epoch) for epoch in some])
        views += [
            MeshView(text(row[0]) or "", epoch, (number(row[2]) or 0) / 1e6, bytes(row[1]))
            for epoch, row in zip(some, rows, strict=True)
            if row
        ]
    return views


def _info_of(epoch: int, row: list[Any], now_us: int) -> WorkerInfo | None:
    """None for a record that is not one."""
    worker_id, blob, lease, beat, beat_at, started, status, fenced, dead_how, in_flight, held = row
    try:
        told = _decode_registration(blob or b"")
    except (msgspec.MsgspecError, ValueError):
        return None
    silent_us = now_us - (number(beat_at) or 0)
    if number(fenced) or dead_how is not None:
        shown = "dead"
    elif silent_us > (number(lease) or 0):
        shown = "lapsed"
    elif silent_us > _SILENT_BEATS * (number(beat) or 0):
        shown = "silent"
    else:
        shown = text(status) or "ready"
    return WorkerInfo(
        worker_id=text(worker_id) or told.worker_id,
        epoch=epoch,
        hostname=told.hostname,
        pid=told.pid,
        queues=told.queues,
        tiers=told.tiers,
        status=shown,
        capacity=told.capacity,
        running=in_flight - held,
        held=held,
        started_at=(number(started) or 0) / 1e6,
        last_heartbeat=(number(beat_at) or 0) / 1e6,
    )


async def _snapshots(connections: Connections) -> str:
    """Whether the server saves its data by itself; not every user may ask."""
    try:
        answer = await connections.command("CONFIG", "GET", "save")
    except StorageRefused:
        return "unknown"
    flat = [item for pair in answer.items() for item in pair] if isinstance(answer, dict) else answer
    return "yes" if len(flat) > 1 and flat[1] else "no"


async def info(scripts: Scripts, namespace: str) -> StorageInfo:
    """What the server says of itself, and what of it bears on the promises."""
    connections = scripts.connections
    said = await connections.said()
    connections.check_policy(said)
    limit = said.get("maxmemory_human", "")
    details = (
        ("memory used", said.get("used_memory_human", "unknown")),
        ("memory limit", "none" if limit in ("", "0B") else limit),
        ("when memory is full", said.get("maxmemory_policy", "unknown")),
        ("append-only file", "yes" if said.get("aof_enabled") == "1" else "no"),
        ("snapshots", await _snapshots(connections)),
        ("replicas", said.get("connected_slaves", "unknown")),
        ("mode", said.get("redis_mode", "unknown")),
    )
    version = said.get("valkey_version") or said.get("redis_version", "unknown")
    now_us = await scripts.time_us()
    return StorageInfo(connections.kind, connections.where, namespace, version, details, now_us)
