"""What can be measured, by name, in the order in which it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final

from benchmarks.bench import Bench
from benchmarks.figures import Figure
from benchmarks.measures import (
    affinity,
    apart,
    classic,
    death,
    depth,
    endurance,
    mesh,
    meshed,
    skewed,
    speed,
    stealing,
    waiting,
)

Measure = Callable[[Bench], AsyncIterator[Figure]]

MEASURES: Final[dict[str, Measure]] = {
    "floor": speed.floor,
    "drain": speed.drain,
    "drain-apart": apart.drain_apart,
    "bulk-enqueue": speed.bulk_enqueue,
    "awaited-enqueue": speed.awaited_enqueue,
    "delay-enqueue": speed.delay_enqueue,
    "pick-up": waiting.pick_up,
    "result": waiting.result,
    "delayed": waiting.delayed,
    "idle": waiting.idle,
    "classic": classic.throughput,
    "classic-latency": classic.latency,
    "priority": classic.priority,
    "reap": death.reap_call,
    "kill": death.kill_proven,
    "kill-lapsed": death.kill_lapsed,
    "kill-shortest": death.kill_shortest,
    "mesh-coding": mesh.coding,
    "mesh-ring": mesh.ring,
    "mesh-pickup": meshed.mesh_pickup,
    "mesh-cost": meshed.mesh_cost,
    "steal-latency": stealing.steal_latency,
    "take-held-latency": stealing.take_held_latency,
    "skewed": skewed.skewed,
    "affinity": affinity.affinity,
    "depth": depth.flatness,
    "endurance": endurance.endurance,
}
FULL_ONLY: Final = frozenset({"affinity", "depth", "endurance"})
