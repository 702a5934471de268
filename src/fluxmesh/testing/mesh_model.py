"""A Monte-Carlo model of the mesh's formulas, for sizes that no simulation of real cores reaches.

It is not the program: it draws when a dead node is probed, how accusations spread and when the wait of a
suspicion is over, by the same `Timing` that the core uses. Tables call its rows "model".
"""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random
from typing import Final

from msgspec import Struct

from fluxmesh.mesh.timing import MS, S, Timing, sends_of_news
from fluxmesh.testing.mesh_figures import Figures

LINK_NS: Final = MS  # one way
SPREADS: Final = 12
DEATHS: Final = 2_000
ACCUSERS_MAX: Final = 64


class Spread(Struct, frozen=True):
    """One piece of news: when each node heard it, in order, from its first teller on."""

    heard_ns: list[int]
    packets: int

    @property
    def to_all_ns(self) -> int:
        return self.heard_ns[-1]


def spread(n: int, *, rng: Random, timing: Timing, loss: float = 0.0) -> Spread:
    """Push gossip: who has news tells `gossip_fanout` peers every `gossip_ns`, one more with each ping and
    each ack of a period, until it was sent `sends_of_news(n)` times."""
    limit = sends_of_news(n)
    sends = [0] * n
    heard: list[int] = [-1] * n
    order: list[int] = []
    packets = 0
    heap: list[tuple[int, int, int]] = [
        (0, 0, 0)
    ]  # when, kind, node; kind 0 hears, 1 gossips, 2 pings or answers
    while heap:
        now, kind, node = heappop(heap)
        if kind == 0:
            if heard[node] >= 0:
                continue
            heard[node] = now
            order.append(now)
            heappush(heap, (now + int(rng.random() * timing.gossip_ns), 1, node))
            heappush(heap, (now + int(rng.random() * timing.period_ns), 2, node))
            heappush(heap, (now + int(rng.random() * timing.period_ns), 2, node))
            continue
        fanout = timing.gossip_fanout if kind == 1 else 1
        for _ in range(min(fanout, limit - sends[node])):
            sends[node] += 1
            packets += 1
            peer = (node + 1 + rng.randrange(n - 1)) % n
            if heard[peer] < 0 and (not loss or rng.random() >= loss):
                heappush(heap, (now + LINK_NS, 0, peer))
        if sends[node] < limit:
            heappush(heap, (now + (timing.gossip_ns if kind == 1 else timing.period_ns), kind, node))
    return Spread(order, packets)


def death(n: int, *, rng: Random, timing: Timing, heard: list[int]) -> int:
    """How long after a crash the first Dead is declared.

    The n - 1 others probe it once each in a round of n - 1 periods, at instants that are even over the round.
    A probe accuses at the end of its period. The first accuser waits `suspicion_ns(n, C)`, C the accusations
    that have reached it by then.
    """
    others = n - 1
    period = timing.period_ns
    round_ns = (others or 1) * period
    accused: list[int] = []
    low = 0.0
    for left in range(others, max(0, others - ACCUSERS_MAX), -1):
        low = 1.0 - (1.0 - low) * rng.random() ** (1.0 / left)  # the next of `left` even draws above `low`
        accused.append(int(low * round_ns) + period)
    first = accused[0]
    arrivals = sorted(at + rng.choice(heard) for at in accused[1:])
    deadline = first + timing.suspicion_ns(n, 0)
    for confirmations, at in enumerate(arrivals, start=1):
        if at >= deadline:
            break
        deadline = max(at, first + timing.suspicion_ns(n, confirmations))
    return deadline


def model(n: int, *, seed: int = 1, timing: Timing | None = None, loss: float = 0.0) -> Figures:
    """Figures of `n` nodes by the formulas alone: no real core, no loss but for the spread."""
    timing = timing or Timing()
    rng = Random(f"model of {n}, {seed}")
    spreads = [spread(n, rng=rng, timing=timing, loss=loss) for _ in range(SPREADS)]
    reached = [one for one in spreads if len(one.heard_ns) == n]
    heard = [at for one in spreads for at in one.heard_ns[:: max(1, n // 500)]]
    deaths = sorted(death(n, rng=rng, timing=timing, heard=heard) for _ in range(DEATHS))
    return Figures(
        nodes=n,
        by="model",
        loss=loss,
        kills=DEATHS,
        dead_ns=deaths,
        spread_ns=sorted(one.to_all_ns for one in reached),
        everywhere_ns=[],
        packets_per_s=2.0 * S / timing.period_ns,
        bytes_per_s=0.0,
        false_dead=0,
        false_suspects=0,
        missed=SPREADS - len(reached),
    )
