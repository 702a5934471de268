"""The network of the simulator: how long things take between two hosts, and what never arrives.

All instants and lengths of time are nanoseconds of true time. Chance comes from the generator handed in.
"""

from __future__ import annotations

from collections import Counter
from enum import IntFlag
from random import Random
from typing import Final

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from fluxmesh.mesh.messages import Address
from fluxmesh.mesh.timing import MS

US: Final = 1_000
IP_AND_UDP_BYTES: Final = 28
RETRANSMIT_NS: Final = 200 * MS  # the first wait of TCP for a segment that is lost; it doubles
RETRANSMITS_MAX: Final = 6


class Via(IntFlag):
    """What a cut stops."""

    UDP = 1
    TCP = 2
    BOTH = 3


class Link(Struct, frozen=True):
    """Delays of one kind of network, one way: base (of far ones by pair), even jitter, a rare long tail."""

    name: str
    base_ns: int
    spread_ns: int  # the base of a pair lies up to this above `base_ns`
    jitter_ns: int
    tail_share: float
    tail_ns: int


LOOPBACK: Final = Link("loopback", 30 * US, 0, 120 * US, 0.001, 2 * MS)
LAN: Final = Link("lan", 150 * US, 200 * US, 700 * US, 0.01, 10 * MS)
WAN: Final = Link("wan", 10 * MS, 40 * MS, 5 * MS, 0.005, 80 * MS)
LINKS: Final = {link.name: link for link in (LOOPBACK, LAN, WAN)}


class Network:
    """Hosts are IP addresses. Faults are plain fields that a plan sets and `heal` takes back."""

    def __init__(self, *, link: Link, rng: Random) -> None:
        self.link = link
        self._rng = rng
        self._random = rng.random
        self._bases: dict[tuple[str, str], int] = {}
        self.loss = 0.0
        self.doubled = 0.0
        self.late_share = 0.0  # overtaken by others: later by up to `late_ns`
        self.late_ns = 0
        self.resets = 0.0  # of calls
        self.mtu: int | None = None
        self.cuts: dict[tuple[str, str], Via] = {}  # one way
        self.sides: dict[str, int] = {}  # of a partition; who has none is on side 0
        self.send_errors: set[str] = set()  # hosts whose own kernel refuses to send
        self.unreachable: set[str] = set()  # hosts to which every kernel refuses to send
        self.happened: Counter[str] = Counter()

    def heal(self) -> None:
        """Whatever was set is gone; the delays stay."""
        self.loss = self.doubled = self.late_share = self.resets = 0.0
        self.mtu = None
        self.cuts.clear()
        self.sides.clear()
        self.send_errors.clear()
        self.unreachable.clear()

    def open(self, source: str, target: str, via: Via) -> bool:
        """Whether packets of this kind come through from one host to the other, loss apart."""
        if self.sides and self.sides.get(source, 0) != self.sides.get(target, 0):
            return False
        return not (self.cuts and self.cuts.get((source, target), 0) & via)

    def datagram(self, source: str, target: str, size: int) -> tuple[int, ...]:
        """The delays after which it arrives: none if it is lost, two if it is doubled."""
        if (self.sides or self.cuts) and not self.open(source, target, Via.UDP):
            self.happened["cut"] += 1
            return ()
        if self.mtu is not None and size + IP_AND_UDP_BYTES > self.mtu:
            self.happened["too big"] += 1
            return ()
        if self.loss and self._random() < self.loss:
            self.happened["lost"] += 1
            return ()
        if self.doubled and self._random() < self.doubled:
            self.happened["doubled"] += 1
            return (self._delay(source, target), self._delay(source, target) + self._extra())
        delay = self._delay(source, target)
        if self.late_share and self._random() < self.late_share:
            self.happened["overtaken"] += 1
            delay += self._extra()
        return (delay,)

    def segments(self, source: str, target: str, *, count: int) -> int | None:
        """How long `count` segments of TCP, one after the other, take there; None: they do not come through.

        A lost one is sent again after 200 ms, 400 ms and so on, and gives up after six times.
        """
        if not (self.open(source, target, Via.TCP) and self.open(target, source, Via.TCP)):
            self.happened["cut stream"] += 1
            return None
        total = 0
        for _ in range(count):
            total += self._delay(source, target)
            if self.loss:
                wait = RETRANSMIT_NS
                for _again in range(RETRANSMITS_MAX):
                    if self._random() >= self.loss:
                        break
                    total += wait
                    wait *= 2
        return total

    def is_reset(self) -> bool:
        if self.resets and self._random() < self.resets:
            self.happened["reset"] += 1
            return True
        return False

    def _delay(self, source: str, target: str) -> int:
        link = self.link
        base = link.base_ns
        if link.spread_ns:
            pair = (source, target) if source < target else (target, source)
            known = self._bases.get(pair)
            if known is None:
                known = base + xxh3_64_intdigest(f"{pair[0]} {pair[1]}".encode()) % link.spread_ns
                self._bases[pair] = known
            base = known
        random = self._random
        delay = base + int(random() * link.jitter_ns)
        if random() < link.tail_share:
            delay += int(random() * link.tail_ns)
        return delay

    def _extra(self) -> int:
        return int(self._random() * (self.late_ns or 50 * MS))


class Names:
    """Name service: what a name answers from which instant on. Lies are earlier, wrong answers."""

    def __init__(self, *, rng: Random) -> None:
        self._rng = rng
        self._answers: dict[str, list[tuple[int, tuple[Address, ...]]]] = {}
        self.slow_ns = 20 * MS

    def tell(self, name: str, addresses: tuple[Address, ...], *, since_ns: int) -> None:
        self._answers.setdefault(name, []).append((since_ns, addresses))
        self._answers[name].sort(key=lambda pair: pair[0])

    def forget(self, name: str) -> None:
        self._answers.pop(name, None)

    def resolve(self, seed: str, now_ns: int) -> list[Address]:
        """A literal `ip:port` is itself; a name is what was told last; an unknown one is nothing."""
        host, _, port = seed.rpartition(":")
        if host and host[0].isdigit():
            return [Address(host, int(port))]
        found: tuple[Address, ...] = ()
        for since_ns, addresses in self._answers.get(seed, ()):
            if since_ns <= now_ns:
                found = addresses
        return list(found)

    def takes(self) -> int:
        return MS + int(self._rng.random() * self.slow_ns)


class LocalClock:
    """A node's monotonic clock: it may run fast or slow and may jump ahead, never back."""

    def __init__(self, *, base_ns: int, ppm: int = 0) -> None:
        self._base = base_ns
        self._since = 0
        self._rate = 1_000_000 + ppm

    def read(self, true_ns: int) -> int:
        if self._rate == 1_000_000:
            return self._base + true_ns - self._since
        return self._base + (true_ns - self._since) * self._rate // 1_000_000

    def true(self, local_ns: int) -> int:
        """The first true instant at which it reads at least this."""
        if self._rate == 1_000_000:
            return local_ns - self._base + self._since
        return self._since - (-(local_ns - self._base) * 1_000_000 // self._rate)

    def set_rate(self, true_ns: int, *, ppm: int) -> None:
        self._base = self.read(true_ns)
        self._since = true_ns
        self._rate = 1_000_000 + ppm

    def jump(self, true_ns: int, *, ahead_ns: int) -> None:
        self._base = self.read(true_ns) + ahead_ns
        self._since = true_ns
