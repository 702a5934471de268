"""Bad weather on purpose: loss, delay and doubling of what a node sends, for tests and demonstrations.

Only outgoing traffic is touched, so that each node of a group can have weather of its own. A datagram is
delayed on its way there. Streams are delayed and never lose bytes: a lost segment of TCP is a late one. A
call waits before it is sent, and once more, for its answer, where the way to that peer has its own delay.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from fluxmesh.errors import InvalidOption, shown
from fluxmesh.mesh.messages import Address

WEATHER_ENV: Final = "FLUXMESH_TEST_MESH_WEATHER"  # a hook of the test-suite, as in "loss=0.3,delay_ms=40"
PEERS_MOST: Final = 1_000
_MOST_MS: Final = 60_000.0
_NUMBERS: Final = ("loss", "double", "delay_ms", "jitter_ms")


class Weather(Struct, frozen=True, kw_only=True):
    """`loss` and `double` are shares of datagrams in [0, 1]; a delay is delay_ms + U(0, jitter_ms), and what
    `to_ms` adds for the way to one peer, in one direction."""

    loss: float = 0.0
    double: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    to_ms: Mapping[Address, float] = {}

    def delay_s(self, rng: random.Random, to: Address | None = None) -> float:
        far_ms = 0.0 if to is None else self.to_ms.get(to, 0.0)
        return (self.delay_ms + far_ms + rng.uniform(0.0, self.jitter_ms)) / 1_000

    def back_s(self, to: Address) -> float:
        """How late the answer to a call is, beyond the delay of the call itself."""
        return self.to_ms.get(to, 0.0) / 1_000

    def deliveries_s(self, rng: random.Random, to: Address | None = None) -> list[float]:
        """After how long each copy of one datagram is to be sent; none: it is lost."""
        if rng.random() < self.loss:
            return []
        copies = 2 if rng.random() < self.double else 1
        return [self.delay_s(rng, to) for _ in range(copies)]


def parse_weather(text: str) -> Weather:
    """ "loss=0.3,delay_ms=40,jitter_ms=10,127.0.0.1:7948=75" as Weather; the last one: 75 ms to that peer.
    Raises InvalidOption."""
    given: dict[str, float] = {}
    to_ms: dict[Address, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        peer = _peer(name)
        most = 1.0 if name in ("loss", "double") else _MOST_MS
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if (peer is None and name not in _NUMBERS) or not 0 <= number <= most or len(to_ms) > PEERS_MOST:
            raise InvalidOption(
                "weather",
                f"{shown(part)} is no weather",
                hint="loss=0.3,double=0.1,delay_ms=40,jitter_ms=10, or a peer as in 127.0.0.1:7948=75",
            )
        if peer is None:
            given[name] = number
        else:
            to_ms[peer] = number
    return Weather(**given, to_ms=to_ms)


def write_weather(to_ms: Mapping[Address, float]) -> str:
    """As `parse_weather` reads it."""
    return ",".join(f"{peer.host}:{peer.port}={delay_ms:g}" for peer, delay_ms in to_ms.items())


def _peer(name: str) -> Address | None:
    """host:port, the host as peers know it: an address."""
    host, colon, port = name.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65_534:
        return None
    return Address(host, int(port))
