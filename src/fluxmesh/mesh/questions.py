"""What a node can be asked, by any thread: all of it from an immutable snapshot, and from counters."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from fluxmesh.affinity import slot_of
from fluxmesh.errors import InvalidOption
from fluxmesh.mesh.effects import MemberView
from fluxmesh.mesh.inbox import Inbox
from fluxmesh.mesh.messages import Address, Meta, NodeRef
from fluxmesh.mesh.reports import told_counters
from fluxmesh.mesh.ring import Ring
from fluxmesh.mesh.roster import Share, Snapshot

NOTHING: Final = Snapshot(0, (), (), frozenset(), {}, 0)
# How the stock stands; its other figures are counters.
STANDS: Final = frozenset({"buffered", "adaptive_prefetch", "should_prefetch", "should_steal"})
# Each counter with a name of its own is there from the start; of a family (`refused_…`) what has counted.
_ZEROS: Final = dict.fromkeys(
    (
        "prefetch_count",
        "prefetch_jobs",
        "local_pops",
        "buffer_released_old",
        "steals_initiated",
        "steals_succeeded",
        "steals_failed",
        "steals_empty",
        "steals_lost",
        "steals_dropped",
        "steals_late",
        "steals_wrong",
        "steals_unresolved",
        "jobs_stolen_in",
        "jobs_stolen_out",
        "jobs_taken_held",
        "steal_requests",
        "steals_refused",
        "jobs_offered",
        "taken_untold",
        "taken_unasked",
        "idleness_told",
        "affinity_hits",
        "affinity_misses",
        "ring_recalculations",
        "acks_late",
        "notices_sent",
        "pings_for_others",
        "surges_sent",
        "sends_failed",
        "stranger_unanswered",
        "metas_not_found",
        "met_our_own_id",
        "table_full",
    ),
    0,
)
_slot_of_task: Final = lru_cache(maxsize=4_096)(slot_of)


def _shown(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.port}"


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidOption(
            name, f"must be a text, not {type(value).__name__}", hint=f"{name}={str(value)!r}?"
        )


class Questions:
    """The part of a node that answers. `counted`: what its carrier and core have counted; `figures`: what the
    worker's stock has (its counters, and STANDS)."""

    def __init__(
        self,
        *,
        me: NodeRef,
        meta: Meta,
        address: Address,
        inbox: Inbox,
        receive_buffer_bytes: int,
        counted: Callable[[], dict[str, int]],
        figures: Callable[[], dict[str, int]],
    ) -> None:
        self._me = me
        self._meta = meta
        self._address = address
        self._inbox = inbox
        self._receive_buffer_bytes = receive_buffer_bytes
        self._counted = counted
        self._figures = figures
        self._snapshot = NOTHING
        self._before: dict[str, int] = {}

    def go_on_from(self, former: Questions) -> None:
        """This node takes the place of another of the same worker, which is over: what that one has counted
        of stealing counts on. Before anything is asked."""
        self._before = told_counters(former._counted_in_all())

    def __repr__(self) -> str:
        peers = len(list(self._snapshot.peers()))
        return (
            f"<{type(self).__name__} {self._me.worker_id}.{self._me.epoch} at {_shown(self._address)},"
            f" {peers} {'peer' if peers == 1 else 'peers'}>"
        )

    @property
    def me(self) -> NodeRef:
        return self._me

    @property
    def address(self) -> Address:
        """Where others reach it."""
        return self._address

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def members(self) -> tuple[MemberView, ...]:
        """The others as this node saw them when it last looked, a second ago at most."""
        return self._snapshot.members

    # -- the ring ------------------------------------------------------------------------------------------
    def preferred_worker(self, key: str, *, queue: str | None = None) -> str | None:
        """Who owns a key on the ring of a queue (default: the worker's first). None: nobody is on it. Raises
        InvalidOption for what is no text."""
        _require_text("key", key)
        if queue is not None:
            _require_text("queue", queue)
        ring = self._ring_of(queue)
        return None if ring is None else ring.owner(key)

    def is_affinity_owner(self, key: str, *, queue: str | None = None) -> bool:
        """Whether that is this worker; raises as `preferred_worker` does."""
        return self.preferred_worker(key, queue=queue) == self._me.worker_id

    def _ring_of(self, queue: str | None) -> Ring | None:
        return self._snapshot.rings.get(self._meta.queues[0] if queue is None else queue)

    def affinity(self) -> Share:
        """The part of the work that is this worker's before others': what storage is to be told."""
        return self._snapshot.share

    def owns(self, queue: str, task: str, slot: int | None) -> bool | None:
        """Whether a job is this worker's by the ring: by its slot, or without one by that of its task. None:
        nobody but this worker is on the ring of that queue, or nobody at all."""
        ring = self._snapshot.rings.get(queue)
        if ring is None or len(ring) < 2:
            return None
        return ring.owner_of_slot(_slot_of_task(task) if slot is None else slot) == self._me.worker_id

    def owns_of(self, worker_id: str, queue: str, task: str, slot: int | None) -> bool:
        """The same of another worker; False where there is no ring."""
        ring = self._snapshot.rings.get(queue)
        if ring is None or len(ring) < 2:
            return False
        return ring.owner_of_slot(_slot_of_task(task) if slot is None else slot) == worker_id

    def claim_share(self) -> float:
        """This worker's part of the capacity of all that live, of those that serve a queue of it: 1 for one
        alone."""
        return self._snapshot.claim_share

    # -- figures -------------------------------------------------------------------------------------------
    def cluster_info(self) -> dict[str, Any]:
        """Peers that live, or may, and this worker with them: capacity and load of all. `local_buffer_len`
        and `adaptive_prefetch` are what is held here, and what one claim may hold beyond its free slots."""
        peers = list(self._snapshot.peers())
        own = self._inbox.load
        loads = [view.load for view in peers if view.load is not None] + [own]
        figures = self._figures()
        return {
            "worker_id": self._me.worker_id,
            "epoch": self._me.epoch,
            "address": _shown(self._address),
            "peer_count": len(peers),
            "total_capacity": sum(view.meta.capacity for view in peers if view.meta) + self._meta.capacity,
            "total_load": sum(load.running + load.queued for load in loads),
            "total_buffered": sum(load.queued for load in loads),
            "local_buffer_len": figures.get("buffered", own.queued),
            "adaptive_prefetch": figures.get("adaptive_prefetch", 0),
            "ring_members": sorted(self._snapshot.in_ring),
        }

    def metrics(self) -> dict[str, int]:
        """Counters since the start: buffer and stealing, the ring, events by kind, the protocol, the wire."""
        figures = self._figures()
        return {
            **_ZEROS,
            "receive_buffer_bytes": self._receive_buffer_bytes,
            **self._counted_in_all(),
            "ring_recalculations": self._snapshot.ring_recalculations,
            **{name: count for name, count in figures.items() if name not in STANDS},
        }

    def _counted_in_all(self) -> dict[str, int]:
        counted = self._counted()
        return counted | {name: counted.get(name, 0) + count for name, count in self._before.items()}
