"""Workers that have told storage of the mesh, without a mesh: for doors."""

from __future__ import annotations

from collections.abc import Mapping

from fluxmesh.mesh.view import MemberReport, NodeReport, encode_report
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Registration, WorkerRef, WorkerView


def member(name: str, *, standing: str = "alive", queues: tuple[str, ...] = ("default",)) -> MemberReport:
    return MemberReport(
        worker_id=name,
        epoch=1,
        standing=standing,
        address="127.0.0.1:7946",
        since=1_700_000_000.5,
        queues=queues,
        in_ring=standing in ("alive", "suspect"),
        answered=True,
        rtt_ms=0.5,
        capacity=8,
        queued=0,
        running=3,
        flags=("ready",),
        virtual_nodes=150,
        version="0.1.0",
    )


async def tell(
    storage: Storage,
    views: Mapping[str, tuple[MemberReport, ...]],
    counters: Mapping[str, Mapping[str, int]] | None = None,
    over: Mapping[str, tuple[str, ...]] | None = None,
) -> list[WorkerRef]:
    """Register these workers and have each tell its view, with counters by worker. `over`: who has too much,
    by queue."""
    refs = []
    for name, members in views.items():
        registration = Registration(name, ("default",), (0, 1, 2, 3), (), 8, 60.0, 20.0, "host", 42)
        ref = WorkerRef(name, await storage.register(registration))
        counted = dict((counters or {}).get(name, {}))
        report = encode_report(
            NodeReport(
                members_total=len(members),
                members=members,
                jobs_stolen_in=counted.get("jobs_stolen_in", 0),
                jobs_stolen_out=counted.get("jobs_stolen_out", 0),
                counters=counted,
                buffered=counted.get("buffered", 0),
                adaptive_prefetch=5,
                over=dict(over or {}),
            )
        )
        await storage.beat(ref, (), WorkerView(registration, mesh=report))
        refs.append(ref)
    return refs
