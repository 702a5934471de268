"""Where a simulated theft can go wrong: named boundaries, what may happen at each, and how often it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Final

from fluxmesh.mesh.timing import MS, S

if TYPE_CHECKING:
    from fluxmesh.testing.simnet import Simnet

# On the way: messages of a theft, and both halves of every call of storage.
ON_THE_WAY: Final = ("lost", "doubled", "late", "reset")
MESSAGES: Final = ("steal", "offer", "nothing", "taken", "noted")
VERBS: Final = ("exchange", "transfer", "take_held", "release", "beat")
IN_STORAGE: Final = ("request lost", "request late", "request doubled", "reply lost", "reply late")
# What becomes of the two at a boundary of a theft.
STEPS: Final = (
    "before the steal arrives",
    "after the offer, before it arrives",
    "before the transfer",
    "after the transfer, before its reply",
    "after its reply, before the begin",
    "after the begin, before its reply",
    "after the begin's reply",
    "before the taken arrives",
    "after the taken, before it is noted",
    "after the settle, before its reply",
)
BLOWS: Final = ("thief dies", "victim dies", "thief stops", "victim stops")


def every_point() -> tuple[str, ...]:
    """The names of all, as the histogram has them."""
    named = [f"{message}: {kind}" for message in MESSAGES for kind in ON_THE_WAY]
    named += [f"{verb}: {kind}" for verb in VERBS for kind in IN_STORAGE]
    named += [f"{step}: {blow}" for step in STEPS for blow in BLOWS]
    return tuple(named)


class Points:
    """Draws what happens at a boundary. `share` of the messages and calls meet a fault, `blows` of the steps.
    With `heal` nothing happens any more."""

    def __init__(self, *, rng: Random, share: float, blows: float) -> None:
        self._rng = rng
        self._share = share
        self._blows = blows
        self.hit: Counter[str] = Counter()

    def heal(self) -> None:
        self._share = self._blows = 0.0

    def on_the_way(self, message: str) -> str:
        return self._draw(self._share, message, ON_THE_WAY)

    def in_storage(self, verb: str) -> str:
        # There are many more exchanges and beats than thefts.
        rare = 0.1 if verb in {"exchange", "beat"} else 1.0
        return self._draw(self._share * rare, verb, IN_STORAGE)

    def blow(self, step: str) -> str:
        return self._draw(self._blows, step, BLOWS)

    def _draw(self, share: float, where: str, kinds: tuple[str, ...]) -> str:
        if not share or self._rng.random() >= share:
            return ""
        kind = self._rng.choice(kinds)
        self.hit[f"{where}: {kind}"] += 1
        return kind


class Line:
    """The way of workers to storage: it takes a while, and requests and replies get lost on it.

    While storage is away no request is applied. What a caller hears of a request that has met a fault is
    None, after a while: it cannot know whether it was applied.
    """

    def __init__(self, net: Simnet, points: Points, *, rng: Random) -> None:
        self._net = net
        self.points = points
        self._rng = rng
        self.one_way_ns = 500_000
        self.patience_ns = 400 * MS
        self.away_until_ns = 0
        self.slow_until_ns = 0

    @property
    def is_away(self) -> bool:
        return self._net.now < self.away_until_ns

    def ask(self, verb: str, apply: Callable[[], Any], heard: Callable[[Any], None]) -> None:
        """`apply` is one step of storage; `heard` gets what it answered, or None, exactly once."""
        fault = self.points.in_storage(verb)
        takes = self._takes()
        if fault == "request lost":
            self._net.after(self.patience_ns, heard, None)
            return
        if fault == "request late":
            takes += self._late()
        self._net.after(takes, self._arrives, apply, heard, fault)
        if fault == "request doubled":
            self._net.after(takes + self._rng.randrange(20 * MS), self._once_more, apply)

    def _arrives(self, apply: Callable[[], Any], heard: Callable[[Any], None], fault: str) -> None:
        if self.is_away:
            self._net.after(self.patience_ns, heard, None)
            return
        answer = apply()
        if fault == "reply lost":
            self._net.after(self.patience_ns, heard, None)
            return
        takes = self._takes() + (self._late() if fault == "reply late" else 0)
        self._net.after(takes, heard, answer)

    def _once_more(self, apply: Callable[[], Any]) -> None:
        if not self.is_away:
            apply()

    def _takes(self) -> int:
        slow = 40 if self._net.now < self.slow_until_ns else 1
        return slow * (self.one_way_ns + self._rng.randrange(self.one_way_ns))

    def _late(self) -> int:
        return 20 * MS + int(self._rng.random() ** 2 * 3 * S)
