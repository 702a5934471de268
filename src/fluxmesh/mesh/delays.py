"""Bad weather on purpose: loss, delay and doubling of what a node sends, for tests and demonstrations.

Only outgoing traffic is touched, so that each node of a group can have weather of its own. Streams are
delayed and never lose bytes: a lost segment of TCP is a late one.
"""

from __future__ import annotations

import random
from typing import Final

from msgspec import Struct

from fluxmesh.errors import InvalidOption, shown

WEATHER_ENV: Final = "FLUXMESH_TEST_MESH_WEATHER"  # a hook of the test-suite, as in "loss=0.3,delay_ms=40"
_MOST_MS: Final = 60_000.0


class Weather(Struct, frozen=True, kw_only=True):
    """`loss` and `double` are shares of datagrams in [0, 1]; a delay is delay_ms + U(0, jitter_ms)."""

    loss: float = 0.0
    double: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0

    def delay_s(self, rng: random.Random) -> float:
        return (self.delay_ms + rng.uniform(0.0, self.jitter_ms)) / 1_000

    def deliveries_s(self, rng: random.Random) -> list[float]:
        """After how long each copy of one datagram is to be sent; none: it is lost."""
        if rng.random() < self.loss:
            return []
        copies = 2 if rng.random() < self.double else 1
        return [self.delay_s(rng) for _ in range(copies)]


def parse_weather(text: str) -> Weather:
    """ "loss=0.3,delay_ms=40,jitter_ms=10" as Weather. Raises InvalidOption."""
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        most = 1.0 if name in ("loss", "double") else _MOST_MS
        if name not in Weather.__struct_fields__ or not 0 <= number <= most:
            raise InvalidOption(
                "weather", f"{shown(part)} is no weather", hint="loss=0.3,double=0.1,delay_ms=40,jitter_ms=10"
            )
        given[name] = number
    return Weather(**given)
