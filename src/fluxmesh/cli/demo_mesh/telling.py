"""What a region is told when it starts, and what it tells while it runs: one JSON object a line.

A process that is killed tells nothing more, so the demo keeps the last word of each run.
"""

from __future__ import annotations

from msgspec import Struct


class Orders(Struct, frozen=True, kw_only=True):
    """How to be a region. Its key and its weather stand in the environment."""

    region: str
    url: str
    queue: str
    port: int
    seeds: tuple[str, ...]
    concurrency: int
    steal: bool
    period_ms: int


class Seen(Struct, frozen=True, array_like=True):
    """Another region as this one sees it. `rtt_ms` None: not measured yet."""

    region: str
    standing: str
    rtt_ms: float | None


class Telling(Struct, frozen=True, kw_only=True):
    """A region as it is now. `ended`: jobs whose bodies have come to their end since the last line."""

    region: str
    epoch: int
    on_ring: int  # members of the ring of the demo's queue, itself among them
    running: int
    held: int
    counters: dict[str, int]
    seen: tuple[Seen, ...]
    ended: tuple[str, ...]
