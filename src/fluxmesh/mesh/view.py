"""The mesh as one node tells storage of it, for those who stand outside. Pure: members as the core sees them
in, values out."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from fluxmesh.mesh.effects import MemberView
from fluxmesh.mesh.messages import Flag, Standing
from fluxmesh.mesh.timing import LOAD_STALE_MS, S

REPORT_VERSION: Final = 1
REPORT_MAX_BYTES: Final = 60 << 10  # storage takes 64 KiB
OVER_MAX_BYTES: Final = 8 << 10  # of the names of those who pass on; more are not told
GONE_TOLD_NS: Final = 3_600 * S
_FLAG_NAMES: Final = (
    (Flag.READY, "ready"),
    (Flag.DRAINING, "draining"),
    (Flag.DEGRADED, "degraded"),
    (Flag.STEALS, "steals"),
)
LIVING: Final = frozenset({Standing.ALIVE, Standing.SUSPECT})


class MemberReport(Struct, frozen=True, kw_only=True):
    """One member as a worker sees it. `since`: epoch seconds when its standing was last changed there; what
    is not known of it is null or empty. `flags`: ready, draining, degraded, steals."""

    worker_id: str
    epoch: int
    standing: str  # alive, suspect, dead, left
    address: str
    since: float
    queues: tuple[str, ...] = ()
    in_ring: bool = False
    answered: bool = False
    rtt_ms: float | None = None
    capacity: int | None = None
    queued: int | None = None
    running: int | None = None
    flags: tuple[str, ...] = ()
    virtual_nodes: int | None = None
    version: str = ""


class NodeReport(Struct, frozen=True, kw_only=True):
    """The mesh as one worker sees it, itself among the members. `members_total` is more than there are
    members here if they did not fit. `jobs_stolen_…`: taken from others by the mesh, and given to them.
    `counters`: as `MeshNode.metrics` has them, those of the buffer, of stealing and of affinity. `over`: the
    workers that pass their slots on for they have too much, by queue."""

    report: int = REPORT_VERSION
    members_total: int
    members: tuple[MemberReport, ...]
    jobs_stolen_in: int = 0
    jobs_stolen_out: int = 0
    counters: dict[str, int] = {}
    buffered: int = 0
    adaptive_prefetch: int = 0
    over: dict[str, tuple[str, ...]] = {}


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(NodeReport).decode


def encode_report(report: NodeReport) -> bytes:
    """At most REPORT_MAX_BYTES: those who are not plainly alive have the first claim to a place."""
    whole = _encode(report)
    if len(whole) <= REPORT_MAX_BYTES:
        return whole
    if report.over and len(_encode(report.over)) > OVER_MAX_BYTES:
        report = msgspec.structs.replace(report, over={})
    kept: list[MemberReport] = []
    left = REPORT_MAX_BYTES - len(_encode(msgspec.structs.replace(report, members=())))
    for member in sorted(report.members, key=lambda one: (one.standing == "alive", one.worker_id)):
        left -= len(_encode(member)) + 1
        if left < 0:
            break
        kept.append(member)
    kept.sort(key=lambda one: one.worker_id)
    return _encode(msgspec.structs.replace(report, members=tuple(kept)))


def decode_report(data: bytes) -> NodeReport | None:
    """None for what is none, or of a version that this program does not know."""
    try:
        report = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return report if report.report == REPORT_VERSION else None


def is_worth_telling(view: MemberView, now_ns: int) -> bool:
    """Who lives, or has gone within the last hour. The core remembers the gone for a day; a fleet that is
    deployed often, each time under new names, would show little else."""
    return view.record.standing in LIVING or now_ns - view.since_ns < GONE_TOLD_NS


def member_report(view: MemberView, *, in_ring: bool, wall_zero_s: float) -> MemberReport:
    """`wall_zero_s`: the wall clock's time at the monotonic clock's zero."""
    record, meta, load = view.record, view.meta, view.load
    fresh = load if load is not None and load.age_ms <= LOAD_STALE_MS else None
    host = f"[{record.host}]" if ":" in record.host else record.host
    return MemberReport(
        worker_id=record.worker_id,
        epoch=record.epoch,
        standing=Standing(record.standing).name.lower(),
        address=f"{host}:{record.port}",
        since=round(wall_zero_s + view.since_ns / 1e9, 1),
        queues=() if meta is None else meta.queues,
        in_ring=in_ring,
        answered=view.answered,
        rtt_ms=round(view.rtt_ns / 1e6, 2) if view.rtt_ns else None,
        capacity=None if meta is None else meta.capacity,
        queued=None if fresh is None else fresh.queued,
        running=None if fresh is None else fresh.running,
        flags=() if fresh is None else tuple(name for flag, name in _FLAG_NAMES if fresh.flags & flag),
        virtual_nodes=None if meta is None else meta.virtual_nodes,
        version="" if meta is None else meta.version,
    )


def essence(report: NodeReport) -> NodeReport:
    """For comparing two of them: without round trips, which are never the same twice, and without the numbers
    of jobs: those that are held here, and those of the members."""
    quiet = tuple(
        msgspec.structs.replace(member, rtt_ms=None, queued=None, running=None) for member in report.members
    )
    return msgspec.structs.replace(report, members=quiet, buffered=0, adaptive_prefetch=0)
