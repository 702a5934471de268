"""What figures should be, by storage and measurement, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.figures import Bound

_BOTH: Final = {
    "bulk-enqueue": Bound(40_000),
    "delayed": Bound(20.0, at_most=True),
    "priority": Bound(0, at_most=True, of="worst"),
    "kill": Bound(1.0, at_most=True, of="worst"),
    "kill-lapsed": Bound(8.0, at_most=True, of="worst"),
    "mesh-coding": Bound(15.0, at_most=True),
    "mesh-ring": Bound(2.0, at_most=True),
    "mesh-pickup": Bound(0.3, at_most=True),
    "steal-p50": Bound(10.0, at_most=True),
    "steal-p99": Bound(60.0, at_most=True),
    "take-held-p99": Bound(400.0, at_most=True),
    "skewed-buffer": Bound(6.0, at_most=True),
    "affinity-chance": Bound(0.05, at_most=True),
    "affinity-falls": Bound(0.01, at_most=True),
    "affinity-hits-0.7": Bound(0.5),
    "affinity-hits-1": Bound(0.95),
    "affinity-load-0.5": Bound(2.0, at_most=True),
    "affinity-load-0.7": Bound(1 / 0.3, at_most=True),
    "affinity-load-0.9": Bound(10.0, at_most=True),
    "affinity-hot": Bound(1.25, at_most=True),
    "affinity-pick-up": Bound(1.0, at_most=True),
    "endurance-memory": Bound(20.0, at_most=True),
    "endurance-records": Bound(0, at_most=True),
}
BOUNDS: Final[Mapping[str, Mapping[str, Bound]]] = {
    "sqlite": _BOTH
    | {
        "drain": Bound(10_000),
        "pick-up": Bound(5.0, at_most=True),
        "idle": Bound(0.5, at_most=True),
        "kill-shortest": Bound(4.5, at_most=True, of="worst"),
    },
    "redis": _BOTH
    | {
        "drain": Bound(15_000),
        "awaited-enqueue": Bound(0.5, of="ratio to floor"),
        "pick-up": Bound(2.0, at_most=True),
        "kill-shortest": Bound(3.5, at_most=True, of="worst"),
        "idle-commands": Bound(2.0, at_most=True, of="worst"),
    },
}
