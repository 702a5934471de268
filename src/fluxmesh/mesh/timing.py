"""Every number of the protocol in one place, each with its formula. Nanoseconds unless the name says
otherwise."""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

MS: Final = 1_000_000
S: Final = 1_000_000_000

DATAGRAM_MAX_BYTES: Final = 1_200  # sealed, with everything in: fits WireGuard and a path of MTU 1,280
SEAL_BYTES: Final = 40  # what sealing adds
META_MAX_BYTES: Final = 512
FRAME_MAX_BYTES: Final = 1 << 20
METAS_MAX: Final = 256  # in one frame: an eighth of it at the most
MEMBERS_MAX: Final = 20_000  # rows of the table, the dead with it
SCORE_MAX: Final = 7  # local health: 0 is well
TOMBSTONE_NS: Final = 24 * 3_600 * S
LOAD_STALE_MS: Final = 5_000
READY_AFTER_NS: Final = S


class Timing(Struct, frozen=True, kw_only=True):
    """The three knobs of MeshWorker and what follows from them."""

    period_ns: int = 500 * MS  # T
    indirect_ping_count: int = 3
    suspicion_multiplier: int = 4
    gossip_ns: int = 200 * MS
    gossip_fanout: int = 3
    push_pull_ns: int = 30 * S
    leave_ns: int = 2 * S  # at most, for the news of it to spread
    linger_ns: int = S  # and then pings are answered

    def suspicion_min_ns(self, n: int) -> int:
        """Lifeguard's minimum: multiplier * max(1, log10 n) * T."""
        return int(self.suspicion_multiplier * max(1.0, math.log10(max(n, 1))) * self.period_ns)

    def confirmations(self, n: int) -> int:
        """K, the confirmations a suspicion can hope for: multiplier - 2, or none if fewer others are there
        to give them."""
        expected = self.suspicion_multiplier - 2
        return expected if 0 < expected <= n - 2 else 0

    def suspicion_ns(self, n: int, confirmations: int, *, known: int | None = None) -> int:
        """Lifeguard: max(Smin, Smax - (Smax - Smin) * ln(C+1) / ln(K+1)), Smax = 6 Smin, K = multiplier - 2;
        with fewer than K others who could confirm, the wait is Smin. `known`: how many of the n could, with
        the suspect and us; all, if None."""
        shortest = self.suspicion_min_ns(n)
        expected = self.confirmations(n if known is None else min(n, known))
        if not expected:
            return shortest
        longest = 6 * shortest
        share = math.log(min(confirmations, expected) + 1) / math.log(expected + 1)
        return max(shortest, int(longest - (longest - shortest) * share))

    def push_pull_every_ns(self, n: int) -> int:
        """Stretched by log2(n/32) above 32 nodes."""
        return int(self.push_pull_ns * max(1.0, math.log2(max(n, 1) / 32) if n > 32 else 1.0))


def sends_of_news(n: int) -> int:
    """How often one update is sent: 4 * ceil(log10(n + 1)), but below ten nodes as often as there are others:
    with four sends of each, one update in eight would not reach everybody."""
    return max(4 * math.ceil(math.log10(n + 1)), 4, min(n - 1, 8))
