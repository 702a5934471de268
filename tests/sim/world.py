"""A mesh for one case: nodes w0, w1 ... of one cluster, all that they send, and the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, msgpack

from fluxmesh.mesh.effects import Call, Emit, Send
from fluxmesh.mesh.messages import (
    PROTOCOL,
    Address,
    Gossip,
    Message,
    Packet,
    Record,
    Standing,
    StreamFrame,
)
from fluxmesh.mesh.timing import S, Timing, sends_of_news
from fluxmesh.testing.simnet import Simnet, Watch
from fluxmesh.testing.simnet_network import LAN, Link, Via
from fluxmesh.testing.simnet_node import Seal, SimNode, Spec
from fluxmesh.testing.simnet_rules import Expect, Rules
from fluxmesh.testing.simnet_run import unlike
from fluxmesh.testing.simnet_trace import Trace

PORT = 7946


class Sent(Struct):
    at_s: float
    node: str
    to: Address
    packet: Packet


class Called(Struct):
    at_s: float
    node: str
    to: Address
    body: Any


class Told(Struct):
    at_s: float
    node: str
    kind: str
    record: Record | None


class Eyes(Rules):
    """The rules, and a list of all that is sent while `keeps`."""

    def __init__(self, *, timing: Timing, expect: Expect, trace: Trace) -> None:
        super().__init__(timing=timing, expect=expect, trace=trace)
        self.keeps = True
        self.sent: list[Sent] = []
        self.called: list[Called] = []

    def sends(self, node: SimNode, effect: Send) -> None:
        super().sends(node, effect)
        if self.keeps:
            packet = msgpack.decode(effect.data, type=Packet)
            self.sent.append(Sent(node.net.now / S, node.name, effect.to, packet))

    def calls(self, node: SimNode, effect: Call) -> None:
        super().calls(node, effect)
        if self.keeps:
            body = msgpack.decode(effect.frame, type=StreamFrame).body
            self.called.append(Called(node.net.now / S, node.name, effect.to, body))


class World:
    def __init__(
        self,
        *,
        seed: int = 1,
        link: Link = LAN,
        expect: Expect | None = None,
        watch: Watch | None = None,
        most_nodes: int = 16,
    ) -> None:
        self.trace = Trace()
        expect = expect or Expect(news_sends=sends_of_news(most_nodes))
        self.eyes = Eyes(timing=Timing(), expect=expect, trace=self.trace)
        self.net = Simnet(seed=seed, link=link, watch=watch or self.eyes, trace=self.trace)
        self.told: list[Told] = []
        self.net.on_emit.append(self._hear)
        self.seeds: tuple[str, ...] = (f"10.0.0.1:{PORT}", f"10.0.0.2:{PORT}")

    def _hear(self, node: SimNode, emit: Emit) -> None:
        self.told.append(Told(self.now_s, node.name, emit.kind, emit.record))

    @property
    def now_s(self) -> float:
        return self.net.now / S

    # -- to arrange --------------------------------------------------------------------------------------

    def start(
        self,
        number: int,
        *,
        host: str = "",
        seeds: tuple[str, ...] | None = None,
        realm: str = "",
        name: str = "",
        seal: Seal | None = None,
    ) -> SimNode:
        spec = Spec(
            name=name or f"w{number}",
            host=host or f"10.0.{number + 1 >> 8}.{number + 1 & 255}",
            seeds=self.seeds if seeds is None else seeds,
            realm=realm,
        )
        return self.net.start(spec, seal=seal)

    def form(
        self, n: int, *, within_s: float = 15, seal: Callable[[int], Seal] | None = None
    ) -> list[SimNode]:
        """`n` nodes that all know each other, and have calmed down."""
        nodes = [self.start(number, seal=None if seal is None else seal(number)) for number in range(n)]
        self.merges(within_s)
        self.run(2)
        return nodes

    def run(self, seconds: float) -> None:
        self.net.run(self.net.now + int(seconds * S))

    def merges(self, within_s: float) -> float:
        """All tables become one in that time; how long it took."""
        began = self.now_s
        assert self.net.run(self.net.now + int(within_s * S), done=lambda: not unlike(self.net)), (
            f"{within_s} s are over and {unlike(self.net)}\n{self.trace.tell()}"
        )
        return self.now_s - began

    def cut(self, one: SimNode, others: Iterable[SimNode], via: Via, *, one_way: bool = False) -> None:
        for other in others:
            self.net.network.cuts[one.address.host, other.address.host] = via
            if not one_way:
                self.net.network.cuts[other.address.host, one.address.host] = via

    def part(self, side: Iterable[SimNode]) -> None:
        self.net.network.sides.update({node.address.host: 1 for node in side})

    def forge(
        self, to: SimNode, sender: SimNode, *, news: list[Record], message: Message | None = None
    ) -> None:
        """A datagram to `to` in the name of `sender`, as a member with a bug would send it."""
        packet = Packet(PROTOCOL, sender.me, 0, message or Gossip(), news)
        self.net.arrive(sender.address, to.address, msgpack.encode(packet))

    # -- to look -----------------------------------------------------------------------------------------

    def row(self, node: SimNode, name: str) -> Record | None:
        rows = [view.record for view in node.core.members(node.now) if view.record.worker_id == name]
        assert len(rows) <= 1, rows
        return rows[0] if rows else None

    def standings(self, name: str) -> dict[str, Standing | None]:
        found = {}
        for node in self.net.living:
            if node.name != name:
                row = self.row(node, name)
                found[node.name] = None if row is None else Standing(row.standing)
        return found

    def emits(self, *kinds: str, about: str = "", since_s: float = 0.0) -> list[Told]:
        return [
            one
            for one in self.told
            if one.kind in kinds
            and one.at_s >= since_s
            and (not about or (one.record is not None and one.record.worker_id == about))
        ]


def record_of(
    node: SimNode, standing: Standing, *, incarnation: int = 0, accuser: str = "", **changes: Any
) -> Record:
    """A claim about a node, as others would make it."""
    fields: dict[str, Any] = {
        "worker_id": node.name,
        "epoch": node.me.epoch,
        "incarnation": incarnation,
        "standing": int(standing),
        "host": node.address.host,
        "port": node.address.port,
        "meta_hash": 0,
        "accuser": accuser,
    }
    return Record(**(fields | changes))
