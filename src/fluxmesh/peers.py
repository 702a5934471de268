"""The mesh from outside: what workers have told storage of it, put together for doors.

Each worker tells what it sees, and no two need to agree: a door shows all of it, says who sees what, and
whether they agree. Only workers whose lease has not lapsed are asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from fluxmesh.affinity import SLOTS, slot_of
from fluxmesh.errors import NotInMesh
from fluxmesh.mesh.ring import Ring
from fluxmesh.mesh.view import MemberReport, decode_report
from fluxmesh.storage.base import Storage

POINTS_MOST: Final = 1_000  # of the option; options.py would bring the ciphers with it
_SUMMED: Final = (
    "steals_initiated",
    "steals_succeeded",
    "steals_empty",
    "steals_lost",
    "steals_dropped",
    "steals_failed",
    "steal_requests",
    "steals_refused",
    "jobs_taken_held",
    "affinity_hits",
    "affinity_misses",
)
SEEN: Final = frozenset({"ready", "draining", "retiring", "silent"})  # its lease has not lapsed


class Observation(Struct, frozen=True, kw_only=True):
    """The mesh as `worker_id` told it at `told_at` (epoch seconds, the storage's), itself among the members.
    `members_total` is more than there are members here if they did not fit. `buffered`: jobs that it holds
    and has not started; `adaptive_prefetch`: so many one claim of it may hold beyond its free slots.
    `counters`: what it did since its start, by the names of `MeshNode.metrics`; the two of jobs stolen stand
    beside them as well. `over`: who has too much and passes keys on, by queue."""

    worker_id: str
    epoch: int
    told_at: float
    members_total: int
    members: tuple[MemberReport, ...]
    jobs_stolen_in: int
    jobs_stolen_out: int
    counters: dict[str, int] = {}
    buffered: int = 0
    adaptive_prefetch: int = 0
    over: dict[str, tuple[str, ...]] = {}


class Totals(Struct, frozen=True, kw_only=True):
    """Sums over all workers that have told of the mesh and live. Each tells at another instant and since its
    own start, so jobs stolen in and out may differ while jobs are stolen, and after a worker has gone."""

    workers: int
    buffered: int
    jobs_stolen_in: int
    jobs_stolen_out: int
    steals_initiated: int
    steals_succeeded: int
    steals_empty: int
    steals_lost: int
    steals_dropped: int
    steals_failed: int
    steal_requests: int
    steals_refused: int
    jobs_taken_held: int
    affinity_hits: int
    affinity_misses: int


class RingMember(Struct, frozen=True):
    """`share`: the part of all keys that it owns, 0 to 1. `over`: it has too much, and passes keys on: its
    share is 0 for as long as others have room."""

    worker_id: str
    virtual_nodes: int
    share: float
    over: bool = False


class RingView(Struct, frozen=True):
    """The ring of one queue, as these workers see it. `agreed`: so do all who see a ring of this queue. Who
    has too much changes by the second and is seen by each at another instant."""

    queue: str
    members: tuple[RingMember, ...]
    seen_by: tuple[str, ...]
    agreed: bool


class OwnerView(Struct, frozen=True):
    """Who owns a key of a queue, as most see it; `seen_by` are those. `slot`: where the key lies, of
    `slots`."""

    key: str
    queue: str
    slot: int
    slots: int
    owner: str
    seen_by: tuple[str, ...]
    agreed: bool


async def observe(storage: Storage) -> list[Observation]:
    """What each worker that lives has told, by the order of their registrations."""
    live = {info.epoch for info in await storage.fleet() if info.status in SEEN}
    found = []
    for view in await storage.mesh_views():
        report = decode_report(view.view) if view.epoch in live else None
        if report is not None:
            found.append(
                Observation(
                    worker_id=view.worker_id,
                    epoch=view.epoch,
                    told_at=view.told_at,
                    members_total=report.members_total,
                    members=report.members,
                    jobs_stolen_in=report.jobs_stolen_in,
                    jobs_stolen_out=report.jobs_stolen_out,
                    counters=report.counters,
                    buffered=report.buffered,
                    adaptive_prefetch=report.adaptive_prefetch,
                    over=report.over,
                )
            )
    return found


def totals(seen: Sequence[Observation]) -> Totals:
    """What all of these did and hold together."""
    counted = dict.fromkeys(_SUMMED, 0)
    for one in seen:
        for name in _SUMMED:
            counted[name] += one.counters.get(name, 0)
    return Totals(
        workers=len(seen),
        buffered=sum(one.buffered for one in seen),
        jobs_stolen_in=sum(one.jobs_stolen_in for one in seen),
        jobs_stolen_out=sum(one.jobs_stolen_out for one in seen),
        **counted,
    )


def unseen(seen: Sequence[Observation]) -> dict[str, tuple[str, ...]]:
    """For each worker that has told, those of the others that it does not know or holds for dead. Who sees
    all of them is left out, and who has told only a part of what it sees."""
    found = {}
    for one in seen:
        if one.members_total > len(one.members):
            continue
        sees = {member.worker_id for member in one.members if member.standing != "dead"}
        missing = sorted({other.worker_id for other in seen} - sees - {one.worker_id})
        if missing:
            found[one.worker_id] = tuple(missing)
    return found


def rings(seen: Sequence[Observation], queue: str | None = None) -> list[RingView]:
    """The rings by queue (None: of all queues), the one that most see first."""
    told: list[RingView] = []
    for name in _queues(seen) if queue is None else [queue]:
        sets = _rings_seen(seen, name)
        for ring, observers in sorted(sets.items(), key=lambda one: (-len(one[1]), one[1])):
            shares = ring.shares()
            shown = tuple(
                RingMember(one, points, shares[one], one in ring.over) for one, points in ring.members.items()
            )
            told.append(RingView(name, shown, observers, len(sets) == 1))
    return told


def owner(seen: Sequence[Observation], key: str, queue: str) -> OwnerView:
    """Raises NotInMesh if nobody sees a ring of this queue."""
    votes: dict[str, list[str]] = {}
    for ring, observers in _rings_seen(seen, queue).items():
        chosen = ring.owner(key)
        if chosen is not None:
            votes.setdefault(chosen, []).extend(observers)
    if not votes:
        raise NotInMesh(
            f"no worker has told of a mesh that serves the queue {queue!r}",
            hint="`fluxmesh mesh members` shows who is there; workers join with --mesh",
        )
    best = min(votes, key=lambda one: (-len(votes[one]), one))
    return OwnerView(key, queue, slot_of(key), SLOTS, best, tuple(sorted(votes[best])), len(votes) == 1)


def _queues(seen: Iterable[Observation]) -> list[str]:
    return sorted(
        {queue for one in seen for member in one.members if member.in_ring for queue in member.queues}
    )


def _rings_seen(seen: Iterable[Observation], queue: str) -> dict[Ring, tuple[str, ...]]:
    """Each ring that somebody sees, by its members with their points and by who of them is over the bound of
    load, and who that is: the one way from what was told to an owner. A number of points that no worker can
    have is nobody's: a ring of them would be computed for ever."""
    rings: dict[Ring, tuple[str, ...]] = {}
    for one in seen:
        members = {
            member.worker_id: member.virtual_nodes
            for member in one.members
            if member.in_ring
            and queue in member.queues
            and member.virtual_nodes is not None
            and 1 <= member.virtual_nodes <= POINTS_MOST
        }
        if members:
            ring = Ring(members, frozenset(one.over.get(queue, ())))
            rings[ring] = tuple(sorted((*rings.get(ring, ()), one.worker_id)))
    return rings
