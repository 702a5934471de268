"""Figures of a mesh and what the design expects of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from fluxmesh.mesh.timing import S

P50_WITHIN: Final = 0.15
P99_WITHIN: Final = 0.30

# By the formulas without loss: seconds from a crash to the first Dead, p50 and p99.
EXPECTED_DEAD_S: Final = {
    3: (2.8, 3.4),
    10: (2.9, 4.3),
    100: (4.9, 7.1),
    1_000: (6.8, 8.9),
    10_000: (8.9, 10.8),
}


class Figures(Struct, frozen=True, kw_only=True):
    """One row of the table. Lists are sorted, in nanoseconds. `by`: "cores" or "model"."""

    nodes: int
    by: str
    loss: float
    kills: int
    dead_ns: list[int]  # from the crash to the first Dead
    spread_ns: list[int]  # of a suspicion, from the first who holds it to the last
    everywhere_ns: list[int]  # from the crash to Dead at everybody
    packets_per_s: float  # sent by a node while nothing happens
    bytes_per_s: float
    false_dead: int
    false_suspects: int
    missed: int  # deaths, or spreads of the model, that did not reach everybody

    def row(self) -> dict[str, str]:
        expected = EXPECTED_DEAD_S.get(self.nodes)
        return {
            "NODES": f"{self.nodes:,}",
            "BY": self.by,
            "LOSS": f"{self.loss:.0%}",
            "KILLS": str(self.kills),
            "DEAD P50": _seconds(self.dead_ns, 0.5),
            "DEAD P99": _seconds(self.dead_ns, 0.99),
            "EXPECTED": "" if expected is None or self.loss else f"{expected[0]}/{expected[1]}",
            "SPREAD P50": _seconds(self.spread_ns, 0.5),
            "EVERYWHERE P50": _seconds(self.everywhere_ns, 0.5),
            "WORST": _seconds(self.everywhere_ns, 1.0),
            "PACKETS/S": f"{self.packets_per_s:.2f}",
            "BYTES/S": f"{self.bytes_per_s:.0f}" if self.bytes_per_s else "",
            "FALSE DEAD": str(self.false_dead),
            "MISSED": str(self.missed),
        }

    def document(self) -> dict[str, object]:
        """The same as numbers, for machines: seconds, shares and counts; null where there is nothing to
        tell."""
        expected = None if self.loss else EXPECTED_DEAD_S.get(self.nodes)
        return {
            "nodes": self.nodes,
            "by": self.by,
            "loss": self.loss,
            "kills": self.kills,
            "dead_p50_s": _number(self.dead_ns, 0.5),
            "dead_p99_s": _number(self.dead_ns, 0.99),
            "expected_p50_s": expected[0] if expected else None,
            "expected_p99_s": expected[1] if expected else None,
            "spread_p50_s": _number(self.spread_ns, 0.5),
            "everywhere_p50_s": _number(self.everywhere_ns, 0.5),
            "everywhere_worst_s": _number(self.everywhere_ns, 1.0),
            "packets_per_s": round(self.packets_per_s, 3),
            "bytes_per_s": round(self.bytes_per_s, 1) if self.bytes_per_s else None,
            "false_dead": self.false_dead,
            "false_suspects": self.false_suspects,
            "missed": self.missed,
        }

    def off(self) -> list[str]:
        """Where it is farther from what is expected than allowed; nothing where nothing is expected."""
        expected = EXPECTED_DEAD_S.get(self.nodes)
        if expected is None or self.loss or not self.dead_ns:
            return []
        found = []
        for name, share, wanted, within in (
            ("p50", 0.5, expected[0], P50_WITHIN),
            ("p99", 0.99, expected[1], P99_WITHIN),
        ):
            measured = quantile(self.dead_ns, share) / S
            if abs(measured - wanted) > within * wanted:
                found.append(
                    f"{self.nodes} nodes: Dead {name} {measured:.2f} s, expected {wanted} s +-{within:.0%}"
                )
        return found


def quantile(values: Sequence[int], share: float) -> int:
    """Of a sorted list, the nearest rank; 0 of nothing."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else 0


def _number(values: Sequence[int], share: float) -> float | None:
    return round(quantile(values, share) / S, 3) if values else None


def _seconds(values: Sequence[int], share: float) -> str:
    return f"{quantile(values, share) / S:.2f}" if values else ""
