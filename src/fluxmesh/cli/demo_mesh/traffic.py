"""What is submitted: requests of tenants, most of which belong to two of the five regions. Pure but for
chance.

A tenant's key lies somewhere on the ring, and so belongs to a region. Most requests are short. A region that
has run short ones expects more of them and fills its buffer well; then a burst brings long ones of the same
tenants, which would wait there while others have nothing to do. That is what stealing is for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from fluxmesh.cli.demo_mesh.atlas import BUSY, REGIONS
from fluxmesh.mesh.options import MeshWorker
from fluxmesh.mesh.ring import Ring
from fluxmesh.submission import NewJob, prepare

SKEW: Final = 0.9  # of the requests are of tenants of the busy regions
SHORT_MS: Final = (4.0, 12.0)
LONG_MS: Final = (400.0, 900.0)
WAVE: Final = 30  # short requests
WAVE_EVERY_S: Final = 0.4
BURST: Final = 60  # long ones
BURST_EVERY_S: Final = 4.0
_TENANTS_EACH: Final = 8


def tenants(regions: Sequence[str] = REGIONS) -> dict[str, tuple[str, ...]]:
    """Keys of each region, as long as all of them are there."""
    ring = Ring(dict.fromkeys(regions, MeshWorker().virtual_nodes))
    found: dict[str, list[str]] = {region: [] for region in regions}
    number = 0
    while any(len(keys) < _TENANTS_EACH for keys in found.values()):
        number += 1
        key = f"tenant-{number}"
        owner = ring.owner(key)
        if owner is not None and len(found[owner]) < _TENANTS_EACH:
            found[owner].append(key)
    return {region: tuple(keys) for region, keys in found.items()}


class Traffic:
    """Requests for one task and one queue."""

    def __init__(self, task: str, queue: str, rng: random.Random) -> None:
        self._task = task
        self._queue = queue
        self._rng = rng
        self._tenants = tenants()

    def wave(self) -> list[NewJob]:
        return [self._request(SHORT_MS) for _ in range(WAVE)]

    def burst(self) -> list[NewJob]:
        return [self._request(LONG_MS) for _ in range(BURST)]

    def _request(self, takes_ms: tuple[float, float]) -> NewJob:
        rng = self._rng
        region = rng.choice(BUSY if rng.random() < SKEW else REGIONS)
        fields = {
            "task": self._task,
            "queue": self._queue,
            "affinity_key": rng.choice(self._tenants[region]),
            "max_retries": 0,
            "max_crashes": 10,  # of which the visitor is the cause
        }
        return prepare(fields).job([round(rng.uniform(*takes_ms), 1)], {})
