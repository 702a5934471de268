"""Lists: one index is walked, newest first, and what it meets is judged by a few small fields.

A walk goes in chunks, each one round trip for the ids and one for their fields; only jobs of the page are
read in full. It ends at SCAN_CAP jobs: the page is then partial, and its cursor goes on from there. An id
whose job is gone meanwhile, or whose record is not one, is passed by.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from msgspec import Struct

from fluxmesh.errors import InvalidOption
from fluxmesh.job import TERMINAL, Job, Status
from fluxmesh.query import SCAN_CAP, Page, Query, checked_limit, decode_cursor, encode_cursor
from fluxmesh.storage.redis.look import Look, name_of
from fluxmesh.storage.redis.rows import Values, number, status_of, text
from fluxmesh.storage.redis.scripts import Scripts

CHUNK: Final = 500
_FIRST_CHUNK: Final = 64
_FIELDS: Final = ("place", "queue", "task", "worker_id", "created_us")
_MOST: Final = (1 << 63) - 1
_ORDERED_BY_TIME: Final = TERMINAL | {Status.SCHEDULED}
Place = tuple[int | str, ...]


class Spot(Struct, frozen=True, gc=False):
    """One entry of a sorted set. `group` names the set, where a walk goes from set to set."""

    group: str
    score: int
    id: str


class Met(Struct, frozen=True, gc=False):
    """A job as a walk judges it."""

    spot: Spot
    status: Status
    queue: str
    task: str
    worker_id: str | None
    created_us: int


async def find(scripts: Scripts, query: Query, cursor: str | None, limit: int) -> Page[Job]:
    """Jobs that match, newest first; by state alone in the order of their ends or due times.

    Raises InvalidOption for a cursor that is not one of this query's.
    """
    limit = checked_limit(limit)
    look = Look(scripts)
    search = _Search(look, query, limit)
    after = None if cursor is None else search.checked(decode_cursor(query, cursor))
    matches: list[Met] = []
    last: Spot | None = None
    stopped = False
    scanned = 0
    async with contextlib.aclosing(search.walk(after)) as walk:
        async for spot, met in walk:
            if scanned == SCAN_CAP:
                stopped = True
                break
            scanned += 1
            if met is not None and search.matches(met):
                if len(matches) == limit:
                    # One more than asked for: there is a next page, and it begins after the last match.
                    last, stopped = matches[-1].spot, True
                    break
                matches.append(met)
            last = spot
    jobs = tuple(await look.jobs([met.spot.id for met in matches]))
    if not stopped or last is None:
        return Page(jobs)
    following = encode_cursor(query, search.place_of(last))
    return Page(jobs, following, partial=len(matches) < limit)


class _Search:
    """One query: which sets are walked, and what a cursor of it holds.

    By state alone (and what no index knows) the walk follows the sets of that state; its cursor is
    (score, id) where time orders them, (set, score, id) elsewhere. Everything else goes by arrival; its
    cursor is (arrival, id).
    """

    def __init__(self, look: Look, query: Query, limit: int) -> None:
        self.look = look
        self.query = query
        self.by_arrival = query.state is None or any(
            part is not None for part in (query.queue, query.task, query.tag)
        )
        self.by_set = not self.by_arrival and query.state not in _ORDERED_BY_TIME
        self._chunk = min(max(limit + 1, _FIRST_CHUNK), CHUNK)

    def place_of(self, spot: Spot) -> Place:
        return (spot.group, spot.score, spot.id) if self.by_set else (spot.score, spot.id)

    def checked(self, after: Place) -> Spot:
        kinds = (str, int, str) if self.by_set else (int, str)
        sound = len(after) == len(kinds) and all(
            isinstance(part, kind) and (kind is str or abs(int(part)) <= _MOST)
            for part, kind in zip(after, kinds, strict=False)
        )
        if not sound:
            hint = "use next_cursor of the page before, with the same q"
            raise InvalidOption("cursor", "it does not name a place of this list", hint=hint)
        group = str(after[0]) if self.by_set else ""
        return Spot(group, int(after[-2]), str(after[-1]))

    # -- walking -------------------------------------------------------------------------------------
    async def walk(self, after: Spot | None) -> AsyncGenerator[tuple[Spot, Met | None], None]:
        """Every spot after that one, with the job that stands there; None for one that does not any more."""
        if self.by_arrival and self.query.state is not None:
            few = await self._few_of(self.query.state, after)
            if few is not None:
                for one in few:
                    yield one.spot, one
                return
        spots = self._by_set(after) if self.by_set else self._merged(await self._sets(), after)
        async with contextlib.aclosing(spots) as chunks:
            async for chunk in chunks:
                for spot, met in zip(chunk, await self._met(chunk), strict=True):
                    yield spot, met

    async def _sets(self) -> Sequence[str]:
        """The sets that are walked as one, by their scores."""
        query = self.query
        if not self.by_arrival:
            assert query.state is not None
            return await self.look.sets_of(query.state)
        if query.tag is not None:
            return [name_of("by_tag", query.tag)]
        if query.task is not None:
            return [name_of("by_task", query.task)]
        return [name_of("all") if query.queue is None else name_of("by_queue", query.queue)]

    async def _merged(
        self, sets: Sequence[str], after: Spot | None, group: str = ""
    ) -> AsyncGenerator[list[Spot], None]:
        while True:
            place = None if after is None else (after.score, after.id)
            found = await self.look.after(sets, place, self._chunk)
            spots = [Spot(group, score, job_id) for score, job_id in found]
            if spots:
                yield spots
            if len(spots) < self._chunk:
                return
            after = spots[-1]
            self._chunk = CHUNK

    async def _by_set(self, after: Spot | None) -> AsyncGenerator[list[Spot], None]:
        assert self.query.state is not None
        for name in sorted(await self.look.sets_of(self.query.state), reverse=True):
            if after is not None and name > after.group:
                continue
            start = after if after is not None and name == after.group else None
            async with contextlib.aclosing(self._merged([name], start, name)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _few_of(self, state: Status, after: Spot | None) -> list[Met] | None:
        """All matching jobs of a state by arrival, if the state has few: none is missed among very many of
        the queue or task. None: there are too many to look at."""
        ids = await self.look.members(await self.look.sets_of(state), SCAN_CAP)
        if ids is None:
            return None
        tag = self.query.tag
        among = name_of("all") if tag is None else name_of("by_tag", tag)
        found = []
        for start in range(0, len(ids), CHUNK):
            some = ids[start : start + CHUNK]
            rows = await self.look.arrivals(some, among, _FIELDS)
            for job_id, (arrival, row) in zip(some, rows, strict=True):
                met = None if arrival is None else _met_of(Spot("", arrival, job_id), row)
                if met is not None and self.matches(met):
                    found.append(met)
        found.sort(key=lambda met: (met.spot.score, met.spot.id), reverse=True)
        if after is None:
            return found
        return [met for met in found if (met.spot.score, met.spot.id) < (after.score, after.id)]

    async def _met(self, spots: Sequence[Spot]) -> list[Met | None]:
        rows = await self.look.fields([spot.id for spot in spots], _FIELDS)
        return [_met_of(spot, row) for spot, row in zip(spots, rows, strict=True)]

    # -- judging -------------------------------------------------------------------------------------
    def matches(self, met: Met) -> bool:
        query = self.query
        if query.state is not None and met.status is not query.state:
            return False
        if query.queue is not None and met.queue != query.queue:
            return False
        if query.task is not None and met.task != query.task:
            return False
        if query.worker is not None and met.worker_id != query.worker:
            return False
        if query.created_after_us is not None and met.created_us <= query.created_after_us:
            return False
        return query.created_before_us is None or met.created_us < query.created_before_us


def _met_of(spot: Spot, row: Values) -> Met | None:
    place, queue, task, worker_id, created_us = row
    status = status_of(place)
    if status is None:
        return None
    return Met(spot, status, text(queue) or "", text(task) or "", text(worker_id), number(created_us) or 0)
