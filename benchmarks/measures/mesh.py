"""What the mesh costs a packet and a key, on one core, without sockets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

from benchmarks.bench import Bench
from benchmarks.figures import CheckFailed, Figure, rounded
from fluxmesh.mesh.messages import PROTOCOL, Gossip, Load, Message, NodeRef, Packet, Ping, Record
from fluxmesh.mesh.ring import Ring
from fluxmesh.mesh.seal import Keyring, Refusal, Sealed
from fluxmesh.mesh.timing import DATAGRAM_MAX_BYTES, SEAL_BYTES
from fluxmesh.mesh.wire import decode_packet, encode_packet

BATCH: Final = 500
ME: Final = NodeRef("web-7f9c-1", 1_201)
KEYS: Final = 3_000


def _news(many: int) -> list[Record]:
    return [
        Record(
            f"web-7f9c-{number}",
            1_000 + number,
            number % 3,
            number % 4,
            f"10.0.{number // 250}.{number % 250 + 1}",
            7_946,
            0xFEDC_BA98_7654_3210 - number % 5,
            f"web-7f9c-{number + 1}" if number % 4 else "",
        )
        for number in range(many)
    ]


def _loads(many: int) -> list[Load]:
    return [
        Load(f"web-7f9c-{number}", 1_000 + number, 40_000, 12, 8, 8, 6, 2, 140, 9, 250)
        for number in range(many)
    ]


# A packet with what is handed in for it; the last takes as much of that as there is room for.
PACKETS: Final[dict[str, tuple[Message, list[Record], list[Load]]]] = {
    "probe": (Ping(1_000_000, NodeRef("web-7f9c-2", 1_202)), [], _loads(1)),
    "probe with hints and some news": (Ping(1_000_000, NodeRef("web-7f9c-2", 1_202)), _news(4), _loads(9)),
    "full": (Gossip(), _news(60), _loads(9)),
}


def best_us(step: Callable[[], object], *, batches: int) -> float:
    """Microseconds a call in the batch that was disturbed least."""
    best_s = float("inf")
    for _ in range(batches):
        begun_s = time.perf_counter()
        for _ in range(BATCH):
            step()
        best_s = min(best_s, time.perf_counter() - begun_s)
    return best_s / BATCH * 1e6


class Way:
    """One packet's way from values to sealed bytes and back, and each of its steps."""

    def __init__(self, message: Message, news: list[Record], loads: list[Load]) -> None:
        self._head = Packet(PROTOCOL, ME, 2, message)
        self._news = news
        self._loads = loads
        ring = Keyring([bytes(range(32))], label="fluxmesh")
        self._here = Sealed(ring, salt=bytes(12))
        self._there = Sealed(ring, salt=bytes(11) + b"\1")
        self.plain, self.told, self.carried = self._encoded()
        packet = decode_packet(self.plain)
        if isinstance(packet, str) or (packet.news, packet.loads) != (
            news[: self.told],
            loads[: self.carried],
        ):
            raise CheckFailed(f"a packet did not come back as it was: {packet!r:.80}")

    def _encoded(self) -> tuple[bytes, int, int]:
        return encode_packet(self._head, self._news, self._loads, DATAGRAM_MAX_BYTES - SEAL_BYTES)

    def whole(self) -> object:
        data, _, _ = self._encoded()
        opened = self._there.open(self._here.seal(data), 0)
        if isinstance(opened, Refusal):
            raise CheckFailed(f"what was sealed does not open: {opened}")
        return decode_packet(opened)

    def steps(self) -> dict[str, Callable[[], object]]:
        return {
            "encode_us": self._encoded,
            "seal_us": lambda: self._here.seal(self.plain),
            "decode_us": lambda: decode_packet(self.plain),
        }


async def coding(bench: Bench) -> AsyncIterator[Figure]:
    """One packet encoded, sealed, opened and decoded; the steps alone beside it."""
    batches = 5 if bench.quick else 60
    for name, (message, news, loads) in PACKETS.items():
        way = Way(message, news, loads)
        yield Figure(
            name="mesh coding",
            unit="us",
            values=[best_us(way.whole, batches=batches) for _ in range(bench.repeat)],
            parameters={
                "packet": name,
                "bytes": len(way.plain) + SEAL_BYTES,
                "news": way.told,
                "loads": way.carried,
            },
            bound=bench.bound("mesh-coding"),
            details={key: rounded(best_us(step, batches=batches)) for key, step in way.steps().items()},
        )


async def ring(bench: Bench) -> AsyncIterator[Figure]:
    """The owner of a key. Beside it: what a ring of so many workers takes to make, and how even it is."""
    batches = 5 if bench.quick else 60
    keys = [f"customer-{number}" for number in range(KEYS)]
    for workers in (3, 100, 1_000):
        members = {f"web-7f9c-{number}": 150 for number in range(workers)}
        made = Ring(members)
        first_ms = _made_ms(made)
        again_ms = _made_ms(Ring({name: many for name, many in members.items() if name != "web-7f9c-1"}))
        shares = made.shares()
        if sum(shares.values()) != 1:
            raise CheckFailed("the shares of the ring do not add up to 1")
        yield Figure(
            name="mesh ring owner",
            unit="us",
            values=[best_us(partial(made.owner, keys[7]), batches=batches) for _ in range(bench.repeat)],
            parameters={"workers": workers, "virtual_nodes": 150},
            bound=bench.bound("mesh-ring"),
            details={
                "made_ms": rounded(first_ms),
                "made_again_without_one_ms": rounded(again_ms),
                "share_least": rounded(min(shares.values()) * workers),
                "share_most": rounded(max(shares.values()) * workers),
                f"most_of_{KEYS}_keys": max(Counter(map(made.owner, keys)).values()),
            },
        )


def _made_ms(ring: Ring) -> float:
    begun_s = time.perf_counter()
    ring.owner("first")
    return (time.perf_counter() - begun_s) * 1e3
