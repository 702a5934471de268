"""When silence is held against somebody: suspicions that shrink with their accusers, our own health, round
trips. After Lifeguard (Dadgar, Phillips, Currey 2017)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from fluxmesh.mesh.timing import SCORE_MAX, Timing

ROUND_TRIPS_KEPT: Final = 64
ROUND_TRIPS_NEEDED: Final = 16  # before they say anything about the next


@dataclass(slots=True)
class Suspicion:
    """One suspect incarnation. The first accuser starts the clock, each other one shortens it."""

    started_ns: int
    population: int  # when it started: a mass death must not shorten the wait of the last
    accusers: list[str]
    known: int | None = None  # how many of them could confirm, the two of us with them; all, if None

    def confirm(self, accuser: str, *, timing: Timing) -> bool:
        """Whether this accuser is a new one, and one of those that count: multiplier - 2, if so many others
        are there."""
        if not accuser or accuser in self.accusers:
            return False
        n = self.population if self.known is None else min(self.population, self.known)
        if len(self.accusers) > timing.confirmations(n):
            return False
        self.accusers.append(accuser)
        return True

    def deadline_ns(self, timing: Timing) -> int:
        return self.started_ns + timing.suspicion_ns(
            self.population, len(self.accusers) - 1, known=self.known
        )

    def push_out(self, late_ns: int) -> None:
        """We stood still so long: nobody could have told us otherwise in that time."""
        self.started_ns += late_ns


@dataclass(slots=True)
class Health:
    """How far our own eyes can be trusted, 0 (well) to 7. All waits for others are multiplied by one more."""

    score: int = 0

    def blame(self, points: int) -> None:
        self.score = max(0, min(SCORE_MAX, self.score + points))

    @property
    def factor(self) -> int:
        return self.score + 1


@dataclass(slots=True)
class RoundTrips:
    """The latest round trips, of anybody. The largest of 64 stands for the 99th percentile."""

    kept: deque[int] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS_KEPT))

    def note(self, rtt_ns: int) -> None:
        self.kept.append(rtt_ns)

    def patience_ns(self, period_ns: int) -> int:
        """How long a direct answer is waited for before the detours: T/2, or sooner if three times the p99
        is less, but not before T/10, because a busy peer is no lost packet."""
        if len(self.kept) < ROUND_TRIPS_NEEDED:
            return period_ns // 2
        return min(period_ns // 2, max(period_ns // 10, 3 * max(self.kept)))


def blame_of_silence(*, helpers: int, nacks: int) -> int:
    """What a probe without any answer says about us: each helper that did not even say no, or one point if
    there was nobody to ask."""
    return helpers - nacks if helpers else 1
