"""Rate limits: "n/s", "n/m", "n/h" as a GCRA (generic cell rate algorithm, ITU-T I.371) with burst n.

The whole state of a limit is one instant, the theoretical arrival time (TAT). Pure functions only.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from fluxmesh.clock import US
from fluxmesh.errors import InvalidOption

_PERIODS_US: Final = {"s": US, "m": 60 * US, "h": 3_600 * US}
_RATE: Final = re.compile(r"(\d{1,9})/([smh])")


class Rate(Struct, frozen=True):
    """`count` starts in each `period_us`, all of which may come at once (burst = count)."""

    count: int
    period_us: int

    @property
    def interval_us(self) -> float:
        return self.period_us / self.count


def parse_rate(text: str) -> Rate:
    """Read "100/m". Raises InvalidOption for anything but a positive count per s, m or h."""
    match = _RATE.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise InvalidOption("rate_limit", f"{text!r} is not a rate", hint='write "10/s", "100/m" or "1000/h"')
    return Rate(int(match[1]), _PERIODS_US[match[2]])


def permits(rate: Rate, tat_us: float, now_us: int) -> int:
    """How many starts the limit allows at this instant (0..count)."""
    backlog_us = max(tat_us - now_us, 0.0)
    room_us = rate.period_us - backlog_us
    return max(0, min(rate.count, int(room_us / rate.interval_us + 1e-6)))


def take(rate: Rate, tat_us: float, now_us: int, count: int) -> float:
    """The new TAT after `count` starts at this instant."""
    return max(tat_us, now_us) + count * rate.interval_us


def next_permit_us(rate: Rate, tat_us: float) -> int:
    """The first instant at which one more start is allowed."""
    return int(tat_us + rate.interval_us - rate.period_us + 0.999999)
