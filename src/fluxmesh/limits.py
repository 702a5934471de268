"""Rate limits: "n/s", "n/m", "n/h" as a GCRA (generic cell rate algorithm, ITU-T I.371) with burst n.

The whole state of a limit is one instant, the theoretical arrival time (TAT). Pure functions only.
"""

from __future__ import annotations

import math
import re
from typing import Final

from msgspec import Struct

from fluxmesh.clock import US
from fluxmesh.errors import InvalidOption, shown

_PERIODS_US: Final = {"s": US, "m": 60 * US, "h": 3_600 * US}
_RATE: Final = re.compile(r"(\d{1,9})/([smh])")


class Rate(Struct, frozen=True):
    """`count` starts in each `period_us`, all of which may come at once (burst = count)."""

    count: int
    period_us: int

    @property
    def interval_us(self) -> float:
        """Microseconds a start, rounded down to quarters: sums with instants of this century are then exact
        in a float, and a burst has neither one more nor one less than `count`. (4 million a second at most.)
        """
        return max(1, 4 * self.period_us // self.count) / 4

    @property
    def burst_us(self) -> float:
        return self.count * self.interval_us


def parse_rate(text: object) -> Rate:
    """Read "100/m". Raises InvalidOption for anything but a positive count per s, m or h."""
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match[1]) == 0:
        raise InvalidOption(
            "rate_limit", f"{shown(text)} is not a rate", hint='write "10/s", "100/m" or "1000/h"'
        )
    return Rate(int(match[1]), _PERIODS_US[match[2]])


def _standing_tat(rate: Rate, tat_us: float, now_us: int) -> float:
    """The TAT from which to count. One that lies more than two periods ahead was made before the clock was
    set back, or under a slower rate: it must not shut the limit until that time has come again."""
    if tat_us - now_us > 2 * rate.period_us:
        return now_us
    return max(tat_us, now_us)


def permits(rate: Rate, tat_us: float, now_us: int) -> int:
    """How many starts the limit allows at this instant (0..count)."""
    backlog_us = _standing_tat(rate, tat_us, now_us) - now_us
    return max(0, int((rate.burst_us - backlog_us) // rate.interval_us))


def take(rate: Rate, tat_us: float, now_us: int, count: int) -> float:
    """The new TAT after `count` starts at this instant."""
    return _standing_tat(rate, tat_us, now_us) + count * rate.interval_us


def next_permit_us(rate: Rate, tat_us: float) -> int:
    """The first instant at which one more start is allowed."""
    return math.ceil(tat_us + rate.interval_us - rate.burst_us)
