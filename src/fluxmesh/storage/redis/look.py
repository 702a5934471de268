"""Looking at jobs and at the sets in which they stand, past the verbs and off the hot path.

Each method is a few round trips of bounded size. Names of sets are without the namespace's prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fluxmesh.job import TIERS, Job, Status
from fluxmesh.storage.redis.keys import key
from fluxmesh.storage.redis.rows import FIELDS, STATUS, Values, job_of, number, text
from fluxmesh.storage.redis.scripts import Scripts

_WHOLE_JOBS: Final = 50  # read at once: each may have a payload and a result
READY: Final = 1
PARKED: Final = 2
Tally = dict[tuple[str, int, int], int]


def name_of(what: str, *parts: object) -> str:
    return key("", what, *parts)


def score_of(value: Any) -> int:
    """A score as the driver gives it; all of ours are whole."""
    return round(float(value))


def tally_of(flat: Sequence[bytes]) -> Tally:
    """(queue, tier, place) -> jobs, without what another hand may have written there."""
    found: Tally = {}
    for field, count in zip(flat[::2], flat[1::2], strict=True):
        queue, _, rest = (text(field) or "").rpartition(":")[0].rpartition(":")
        tier, place = number(rest.encode()), number(bytes(field).rpartition(b":")[2])
        n = number(count)
        if n is not None and tier in TIERS and place is not None and 0 <= place < len(STATUS):
            found[(queue, tier, place)] = n
    return found


class Look:
    """A reader's view of one namespace."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts = scripts

    async def jobs(self, ids: Sequence[str]) -> list[Job]:
        """The records of those that there are, in order."""
        if not ids:
            return []
        paused = await self.paused()
        found = []
        for start in range(0, len(ids), _WHOLE_JOBS):
            some = ids[start : start + _WHOLE_JOBS]
            rows = await self.fields(some, FIELDS)
            found += [job_of(job_id, row, paused) for job_id, row in zip(some, rows, strict=True)]
        return [job for job in found if job is not None]

    async def paused(self) -> frozenset[str]:
        members = await self.scripts.read("SMEMBERS", self.scripts.key("paused"))
        return frozenset(text(queue) or "" for queue in members)

    async def fields(self, ids: Sequence[str], names: Sequence[str]) -> list[Values]:
        """Fields of jobs; all None for what is not a record."""
        rows = await self.scripts.run("read_fields", ids, names) if ids else []
        return [row or [None] * len(names) for row in rows]

    async def arrivals(
        self, ids: Sequence[str], among: str, names: Sequence[str]
    ) -> list[tuple[int | None, Values]]:
        """The score of each job in a set (None: not in it), and its fields."""
        rows = await self.scripts.run("read_fields", ids, names, among) if ids else []
        whole = [row or [None] * (len(names) + 1) for row in rows]
        return [(None if row[0] is None else score_of(row[0]), row[1:]) for row in whole]

    async def after(
        self, sets: Sequence[str], place: tuple[int, str] | None, count: int
    ) -> list[tuple[int, str]]:
        """The next `count` entries (score, id) of these sets taken as one, from high to low."""
        stretches = await self.scripts.run("read_after", sets, count, *(place or ()))
        found = [
            (score_of(score), text(member) or "")
            for stretch in stretches
            for member, score in zip(stretch[::2], stretch[1::2], strict=True)
        ]
        found.sort(reverse=True)
        return found[:count]

    async def members(self, sets: Sequence[str], most: int) -> list[str] | None:
        """All members of the sets; None if there are more than `most`."""
        found = await self.scripts.run("read_members", sets, most)
        return None if found is None else [text(member) or "" for member in found]

    async def sets_of(self, state: Status) -> list[str]:
        """The sets in which jobs of that state stand (among those of RUNNING also held ones)."""
        if state is Status.SCHEDULED:
            return [name_of("delayed", tier) for tier in TIERS]
        if state is Status.CLAIMED:
            return [name_of("held")]
        if state is Status.RUNNING:
            owners = await self.scripts.read("HGETALL", self.scripts.key("owners"))
            pairs = zip(owners[1::2], owners[::2], strict=True)
            return [name_of("in_flight", text(worker_id), text(epoch)) for worker_id, epoch in pairs]
        if state is Status.PENDING:
            return await self._waiting_sets()
        return [name_of("dlq") if state is Status.DEAD_LETTER else name_of("ended", state.value)]

    async def _waiting_sets(self) -> list[str]:
        tally = tally_of(await self.scripts.read("HGETALL", self.scripts.key("tally")))
        ready = [
            name_of("ready", queue, tier) for (queue, tier, place), n in tally.items() if place == READY and n
        ]
        if not any(n for (_, _, place), n in tally.items() if place == PARKED):
            return ready
        lanes = await self.scripts.run("read_lanes")
        return ready + [name_of("parked", text(lane)) for lane in lanes]
