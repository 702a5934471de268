"""How many jobs may be claimed now, and for which tiers: the concurrency of a worker and its reserve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fluxmesh.errors import InvalidOption
from fluxmesh.job import TIER_NAMES, TIERS

_NO_RESERVE: Final = ()


def checked_reserve(reserve: Mapping[int, int], concurrency: int, tiers: Sequence[int]) -> None:
    """Raise InvalidOption for a reserve of a tier that is not served, or that leaves another no slot."""
    for tier, count in reserve.items():
        if tier not in tiers:
            names = ", ".join(TIER_NAMES[known] for known in tiers)
            raise InvalidOption(
                "reserve", f"tier {tier!r} is not served by this worker", hint=f"it serves {names}"
            )
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InvalidOption("reserve", f"{count!r} is not a number of slots")
    kept = sum(reserve.values())
    if kept > concurrency or (kept == concurrency and any(not reserve.get(tier) for tier in tiers)):
        raise InvalidOption(
            "reserve", f"{kept} of {concurrency} slots leave none to the other tiers", hint="reserve fewer"
        )


class Slots:
    """Room for running jobs. `reserve[t]` of them are never given to jobs of other tiers."""

    def __init__(self, concurrency: int, reserve: Mapping[int, int]) -> None:
        self.concurrency = concurrency
        self.occupied = 0
        self._by_tier = [0 for _ in TIERS]
        self._reserve = (
            tuple(reserve.get(tier, 0) for tier in TIERS) if any(reserve.values()) else _NO_RESERVE
        )

    @property
    def reserves(self) -> bool:
        """Some slots are kept for a tier."""
        return bool(self._reserve)

    @property
    def free(self) -> int:
        return self.concurrency - self.occupied

    def enter(self, tier: int) -> None:
        self.occupied += 1
        self._by_tier[tier] += 1

    def leave(self, tier: int) -> None:
        self.occupied -= 1
        self._by_tier[tier] -= 1

    def lacking(self) -> tuple[int, ...]:
        """What each tier's reserve still lacks: free slots that only its own jobs may take. () = none."""
        if not self._reserve:
            return _NO_RESERVE
        return tuple(max(0, kept - used) for kept, used in zip(self._reserve, self._by_tier, strict=True))

    def open_to_all(self) -> int:
        """Free slots that a job of any tier may take."""
        return max(0, self.free - sum(self.lacking()))
