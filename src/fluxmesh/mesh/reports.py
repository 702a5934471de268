"""When a node tells storage of the mesh, and what: as seldom as those who look at it can do with."""

from __future__ import annotations

from typing import Final

from fluxmesh.mesh.roster import Snapshot
from fluxmesh.mesh.view import NodeReport, encode_report, essence, is_worth_telling, member_report

REPORT_EVERY_S: Final = 3.0
# So often numbers of jobs and round trips alone are told, and a report in which nothing has changed: its time
# shows that the worker still sees it so, and storage may have lost it with the worker's row.
REPORT_AGAIN_S: Final = 15.0
REPORT_MEMBERS: Final = 50  # of more members reports are rarer in proportion: all send one of that size
_TOLD: Final = ("prefetch_", "local_pops", "steal", "jobs_", "affinity_", "buffer_", "ring_")


def told_counters(metrics: dict[str, int]) -> dict[str, int]:
    """Those of the buffer, of stealing and of affinity."""
    return {name: count for name, count in metrics.items() if name.startswith(_TOLD)}


def make_report(
    snapshot: Snapshot, metrics: dict[str, int], figures: dict[str, int], *, wall_zero_s: float
) -> NodeReport:
    """`figures`: how the worker's stock stands; `wall_zero_s`: the wall clock's time at the monotonic clock's
    zero."""
    rows = [
        member_report(view, in_ring=view.record.worker_id in snapshot.in_ring, wall_zero_s=wall_zero_s)
        for view in (*snapshot.members, *snapshot.me)
        if is_worth_telling(view, snapshot.taken_ns)
    ]
    rows.sort(key=lambda row: row.worker_id)
    return NodeReport(
        members_total=len(rows),
        members=tuple(rows),
        jobs_stolen_in=metrics.get("jobs_stolen_in", 0),
        jobs_stolen_out=metrics.get("jobs_stolen_out", 0),
        counters=told_counters(metrics),
        buffered=figures.get("buffered", 0),
        adaptive_prefetch=figures.get("adaptive_prefetch", 0),
        over=snapshot.over(),
    )


class Reporter:
    """Remembers what storage was told last. All calls by one thread; all instants monotonic seconds."""

    def __init__(self) -> None:
        self._sent: bytes | None = None
        self._told: NodeReport | None = None
        self._pending: NodeReport | None = None
        self._at_s = 0.0

    def is_early(self, members: int, now_s: float) -> bool:
        """Whether it is too soon to tell anything."""
        return self._told is not None and self._waited_s(members, now_s) < REPORT_EVERY_S

    def has_news(self, counters: dict[str, int], members: int, now_s: float) -> bool:
        """Whether counters stand otherwise than they were told, and it is time to tell so."""
        told = self._told
        return told is None or (not self.is_early(members, now_s) and told.counters != counters)

    def due(self, report: NodeReport, members: int, now_s: float) -> bytes | None:
        """The report as it is to be told now; None: it says nothing new, or nothing that cannot wait."""
        told, waited_s = self._told, self._waited_s(members, now_s)
        if told is not None and waited_s < REPORT_AGAIN_S and essence(report) == essence(told):
            return None
        self._pending = report
        return encode_report(report)

    def end(self) -> bytes | None:
        """What a node that is over tells: that there is nothing any more, once."""
        return None if self._sent in (None, b"") else b""

    def told(self, report: bytes, now_s: float) -> None:
        """Storage has this report."""
        self._sent = report
        self._told = self._pending
        self._at_s = now_s

    def _waited_s(self, members: int, now_s: float) -> float:
        return (now_s - self._at_s) / max(1.0, members / REPORT_MEMBERS)
