"""Reads for doors. Each runs on a reader's connection, inside one short read transaction.

`find` walks one index, newest first, and judges what it meets by a few small columns; only jobs of the page
are read in full. A walk ends at SCAN_CAP jobs: the page is then partial, and its cursor goes on from there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Final

import apsw
import msgspec
from msgspec import Struct

from fluxmesh.errors import InvalidOption
from fluxmesh.job import TERMINAL, TIERS, Attempt, Job, Status
from fluxmesh.query import SCAN_CAP, Page, Query, checked_limit, decode_cursor, encode_cursor
from fluxmesh.storage.records import error_of, history_of
from fluxmesh.storage.sqlite import place
from fluxmesh.storage.sqlite.rows import job_of
from fluxmesh.storage.sqlite.sqltext import Statements
from fluxmesh.storage.values import Counts, DeadGroup, MeshView, QueueStats, Registration, WorkerInfo

_PAST_ALL: Final = (1 << 63) - 1
_PAST_LANES: Final = ":"  # every lane is empty or begins with a digit, and all digits sort before it
_ORDERED_BY_TIME: Final = TERMINAL | {Status.SCHEDULED}
_SILENT_BEATS: Final = 2
_decode_registration = msgspec.msgpack.Decoder(Registration).decode
Place = tuple[int | str, ...]


class Met(Struct, frozen=True, gc=False):
    """The columns of a walk, in order."""

    rid: int
    place: int
    lane: str
    pos: int
    queue: str
    task: str
    worker_id: str | None
    created_us: int


def get(db: apsw.Connection, sql: Statements, job_id: str) -> Job | None:
    found = next(db.execute(sql["reads.rid"], (job_id,)), None)
    return None if found is None else _job_at(db, sql, found[0])


def _job_at(db: apsw.Connection, sql: Statements, rid: int) -> Job | None:
    row = next(db.execute(sql["reads.job"], (rid,)), None)
    return None if row is None else job_of(row)


def history(db: apsw.Connection, sql: Statements, job_id: str) -> list[Attempt] | None:
    found = next(db.execute(sql["reads.history"], (job_id,)), None)
    return None if found is None else history_of(found[0])


# -- find ----------------------------------------------------------------------------------------------


def find(db: apsw.Connection, sql: Statements, query: Query, cursor: str | None, limit: int) -> Page[Job]:
    """Jobs that match, newest first; by state alone in the order of their ends or due times.

    Raises InvalidOption for a cursor that is not one of this query's.
    """
    limit = checked_limit(limit)
    search = _Search(db, sql, query)
    after = None if cursor is None else search.checked(decode_cursor(query, cursor))
    matches: list[Met] = []
    last: Met | None = None
    stopped = False
    for scanned, met in enumerate(search.walk(after)):
        if scanned == SCAN_CAP:
            stopped = True
            break
        if search.matches(met):
            if len(matches) == limit:
                # One more than asked for: there is a next page, and it begins after the last match.
                last, stopped = matches[-1], True
                break
            matches.append(met)
        last = met
    jobs = [job for met in matches if (job := _job_at(db, sql, met.rid)) is not None]
    if not stopped or last is None:
        return Page(tuple(jobs))
    following = encode_cursor(query, search.place_of(last))
    return Page(tuple(jobs), following, partial=len(matches) < limit)


class _Search:
    """One query: which index is walked, and what a cursor of it holds.

    By state alone (and what no index knows) the walk follows the place index; its cursor is (pos, rid) where
    time orders the places, (place, lane, pos, rid) elsewhere. Everything else goes by rid, which orders
    jobs by creation; its cursor is (rid).
    """

    def __init__(self, db: apsw.Connection, sql: Statements, query: Query) -> None:
        self.db = db
        self.sql = sql
        self.query = query
        self.by_rid = query.state is None or any(
            part is not None for part in (query.queue, query.task, query.tag)
        )
        self.by_time = not self.by_rid and query.state in _ORDERED_BY_TIME

    def place_of(self, met: Met) -> Place:
        if self.by_rid:
            return (met.rid,)
        if self.by_time:
            return met.pos, met.rid
        return met.place, met.lane, met.pos, met.rid

    def checked(self, after: Place) -> Place:
        kinds = (int,) if self.by_rid else (int, int) if self.by_time else (int, str, int, int)
        sound = len(after) == len(kinds) and all(
            isinstance(part, kind) and (kind is str or abs(int(part)) <= _PAST_ALL)
            for part, kind in zip(after, kinds, strict=False)
        )
        if not sound:
            hint = "use next_cursor of the page before, with the same q"
            raise InvalidOption("cursor", "it does not name a place of this list", hint=hint)
        return after

    # -- walking -------------------------------------------------------------------------------------
    def walk(self, after: Place | None) -> Iterator[Met]:
        if self.by_rid:
            return self._walk_by_rid(_PAST_ALL if after is None else int(after[0]))
        assert self.query.state is not None
        places = place.PLACES[self.query.state]
        if self.by_time:
            return self._walk_by_time(places[0], after or (_PAST_ALL, _PAST_ALL))
        return self._walk_by_place(places, after)

    def _run(self, name: str, *values: Any) -> Iterator[Met]:
        for row in self.db.execute(self.sql[name], values):
            yield Met(*row)

    def _walk_by_rid(self, before: int) -> Iterator[Met]:
        query = self.query
        if query.state is not None and self._count_of(query.state) <= SCAN_CAP:
            # Few enough to look at them all: none is missed among very many of the queue or task.
            found = [met for met in self._all_of(query.state) if met.rid < before and self.matches(met)]
            return iter(sorted(found, key=lambda met: -met.rid))
        if query.tag is not None:
            return self._run("reads.walk_tag", query.tag, before)
        if query.task is not None:
            return self._run("reads.walk_task", query.task, before)
        if query.queue is not None:
            return self._run("reads.walk_queue", query.queue, before)
        return self._run("reads.walk_all", before)

    def _count_of(self, state: Status) -> int:
        counts = (next(self.db.execute(self.sql["reads.of_place"], (at,)))[0] for at in place.PLACES[state])
        return sum(int(count) for count in counts)

    def _all_of(self, state: Status) -> Iterator[Met]:
        for at in place.PLACES[state]:
            yield from self._run("reads.all_of_place", at)

    def _walk_by_time(self, at: int, after: Place) -> Iterator[Met]:
        lanes = [str(tier) for tier in TIERS] if at == place.SCHEDULED else [""]
        walks = [self._run("reads.walk_lane", at, lane, *after) for lane in lanes]
        return heapq.merge(*walks, key=lambda met: (met.pos, met.rid), reverse=True)

    def _walk_by_place(self, places: tuple[int, ...], after: Place | None) -> Iterator[Met]:
        for at in sorted(places, reverse=True):
            if after is None or int(after[0]) > at:
                yield from self._run("reads.walk_place", at, _PAST_LANES, _PAST_ALL, _PAST_ALL)
            elif after[0] == at:
                yield from self._run("reads.walk_place", at, *after[1:])

    # -- judging -------------------------------------------------------------------------------------
    def matches(self, met: Met) -> bool:
        query = self.query
        if query.state is not None and place.STATUS[met.place] is not query.state:
            return False
        if query.queue is not None and met.queue != query.queue:
            return False
        if query.task is not None and met.task != query.task:
            return False
        if query.worker is not None and met.worker_id != query.worker:
            return False
        if query.created_after_us is not None and met.created_us <= query.created_after_us:
            return False
        if query.created_before_us is not None and met.created_us >= query.created_before_us:
            return False
        return query.tag is None or self._has_tag(query.tag, met.rid)

    def _has_tag(self, tag: str, rid: int) -> bool:
        return next(self.db.execute(self.sql["reads.has_tag"], (tag, rid)), None) is not None


# -- numbers -------------------------------------------------------------------------------------------


def counts(db: apsw.Connection, sql: Statements) -> Counts:
    by_status = dict.fromkeys(Status, 0)
    queued: dict[tuple[str, int], int] = {}
    for queue, tier, at, n in db.execute(sql["reads.tally"]):
        by_status[place.STATUS[at]] += n
        if at in (place.READY, place.PARKED, place.HELD):
            queued[(queue, tier)] = queued.get((queue, tier), 0) + n
    failed = next(db.execute(sql["reads.failed"]))[0]
    stale = next(db.execute(sql["reads.stale"]))[0]
    return Counts(by_status, queued, failed, stale)


def queue_stats(db: apsw.Connection, sql: Statements, now_us: int) -> list[QueueStats]:
    """Every queue that holds jobs or is paused, by name. `oldest_wait_s` is that of its ready jobs."""
    paused = {row[0] for row in db.execute(sql["reads.paused"])}
    tallies: dict[str, dict[tuple[int, int], int]] = {queue: {} for queue in paused}
    for queue, tier, at, n in db.execute(sql["reads.tally"]):
        tallies.setdefault(queue, {})[(tier, at)] = n
    return [
        _stats_of(db, sql, queue, tallies[queue], now_us=now_us, paused=queue in paused)
        for queue in sorted(tallies)
    ]


def _stats_of(
    db: apsw.Connection,
    sql: Statements,
    queue: str,
    tally: dict[tuple[int, int], int],
    *,
    now_us: int,
    paused: bool,
) -> QueueStats:
    def of_place(at: int) -> int:
        return sum(n for (_, in_place), n in tally.items() if in_place == at)

    def of_tier(tier: int) -> int:
        return sum(tally.get((tier, at), 0) for at in (place.READY, place.PARKED, place.HELD))

    waits = []
    for tier in TIERS:
        if tally.get((tier, place.READY)):
            lane = place.ready_lane(tier, queue)
            for created_us, due_us in db.execute(sql["reads.first_ready"], (lane,)):
                waits.append(max(0, now_us - max(created_us, due_us or 0)) / 1e6)
    return QueueStats(
        queue=queue,
        paused=paused,
        queued=(of_tier(0), of_tier(1), of_tier(2), of_tier(3)),
        scheduled=of_place(place.SCHEDULED),
        running=of_place(place.RUNNING),
        parked=of_place(place.PARKED),
        oldest_wait_s=max(waits, default=None),
    )


def dlq_groups(db: apsw.Connection, sql: Statements, limit: int) -> list[DeadGroup]:
    """The largest groups first."""
    limit = checked_limit(limit)
    groups = []
    for fingerprint, count, newest_us in list(db.execute(sql["reads.groups"], (limit,))):
        for job_id, task, reason, error in db.execute(sql["reads.newest_of_group"], (fingerprint,)):
            groups.append(
                DeadGroup(
                    fingerprint=fingerprint,
                    task=task,
                    reason=reason or "",
                    count=count,
                    newest_at=newest_us / 1e6,
                    example=job_id,
                    error=error_of(error),
                )
            )
    return groups


# -- workers -------------------------------------------------------------------------------------------


class _Seen(Struct, frozen=True, gc=False):
    """The columns of `reads.workers`, in order."""

    epoch: int
    worker_id: str
    registration: bytes
    lease_us: int
    beat_us: int
    beat_at_us: int
    beat_wall_us: int
    boot_id: str
    started_us: int
    status: str
    fenced: int
    dead_how: str | None


def fleet(db: apsw.Connection, sql: Statements, now_us: int, boot_us: int) -> list[WorkerInfo]:
    """Every worker epoch that has a row, in the order of their registrations."""
    boot_id = next(db.execute(sql["reads.boot"]))[0]
    infos = []
    for row in list(db.execute(sql["reads.workers"])):
        seen = _Seen(*row)
        owned = {int(at): int(n) for at, n in db.execute(sql["reads.owned"], (str(seen.epoch),))}
        told = _decode_registration(seen.registration)
        infos.append(
            WorkerInfo(
                worker_id=seen.worker_id,
                epoch=seen.epoch,
                hostname=told.hostname,
                pid=told.pid,
                queues=told.queues,
                tiers=told.tiers,
                status=_status_of(seen, boot_id, now_us=now_us, boot_us=boot_us),
                capacity=told.capacity,
                running=owned.get(place.RUNNING, 0),
                held=owned.get(place.HELD, 0),
                started_at=seen.started_us / 1e6,
                last_heartbeat=seen.beat_wall_us / 1e6,
            )
        )
    return infos


def mesh_views(db: apsw.Connection, sql: Statements) -> list[MeshView]:
    return [
        MeshView(worker_id, epoch, told_us / 1e6, view)
        for worker_id, epoch, told_us, view in db.execute(sql["reads.mesh"])
    ]


def _status_of(seen: _Seen, boot_id: str, *, now_us: int, boot_us: int) -> str:
    if seen.fenced or seen.dead_how is not None:
        return "dead"
    silent_us = boot_us - seen.beat_at_us
    if seen.boot_id != boot_id or silent_us < 0:
        # The beat is of another boot, beside which ours means nothing: wall time has to do.
        silent_us = now_us - seen.beat_wall_us
    if silent_us > seen.lease_us:
        return "lapsed"
    return "silent" if silent_us > _SILENT_BEATS * seen.beat_us else seen.status
