"""One core on a bench: peers that it knows, and what it did as plain values."""

from __future__ import annotations

import random
from typing import TypeVar

from fluxmesh.mesh import wire
from fluxmesh.mesh.effects import Arm, Call, Disarm, Effect, Emit, Join, Reply, Send, Take, Timer
from fluxmesh.mesh.membership import GREETINGS_AT_ONCE
from fluxmesh.mesh.messages import (
    PROTOCOL,
    Ack,
    Address,
    Frame,
    Gossip,
    Load,
    Message,
    Meta,
    NodeRef,
    Packet,
    Ping,
    Record,
    Standing,
    StreamFrame,
)
from fluxmesh.mesh.shelf import Shelf
from fluxmesh.mesh.swim import Swim
from fluxmesh.mesh.timing import DATAGRAM_MAX_BYTES, SEAL_BYTES, S, Timing

EffectT = TypeVar("EffectT", Send, Arm, Disarm, Emit, Call, Reply, Take)

META = Meta(("default",), (0, 1, 2, 3), 8)
HASH = wire.meta_hash(META)
ME = NodeRef("me", 5)
MY_ADDRESS = Address("10.0.0.1", 7946)
BUDGET = DATAGRAM_MAX_BYTES - SEAL_BYTES


def address_of(number: int) -> Address:
    return Address(f"10.{number // 62_500}.{number // 250 % 250}.{number % 250 + 2}", 7946)


def a_record(
    number: int,
    *,
    standing: Standing = Standing.ALIVE,
    incarnation: int = 0,
    epoch: int = 1,
    accuser: str = "",
    meta_hash: int = HASH,
) -> Record:
    where = address_of(number)
    return Record(
        f"peer-{number}", epoch, incarnation, int(standing), where.host, where.port, meta_hash, accuser
    )


def about_me(standing: Standing, incarnation: int = 0, epoch: int = ME.epoch, accuser: str = "x") -> Record:
    return Record(
        ME.worker_id, epoch, incarnation, int(standing), MY_ADDRESS.host, MY_ADDRESS.port, HASH, accuser
    )


class Bench:
    """A core that has joined and knows `peers` others, all of which have answered it. It is quiet now."""

    def __init__(
        self,
        peers: int = 0,
        *,
        seed: int = 1,
        timing: Timing | None = None,
        seeds: tuple[str, ...] = (),
        joins: bool = True,
        shelf: Shelf | None = None,
        steals: bool = True,
        steal_rate_limit: float = 10.0,
        tasks: tuple[int, ...] = (),
    ) -> None:
        self.now = 1_000 * S
        self.core = Swim(
            me=ME,
            address=MY_ADDRESS,
            meta=META,
            timing=timing or Timing(),
            seeds=seeds,
            rng=random.Random(seed),
            shelf=shelf,
            steals=steals,
            steal_rate_limit=steal_rate_limit,
            tasks=tasks,
        )
        self.timers: dict[Timer, int] = {}
        self.asked: list[Effect] = []  # all effects of the last call of a peer
        self.first: list[Effect] = self._note(self.core.command(Join(), self.now)) if joins else []
        for number in range(1, peers + 1):
            self.hear(number, news=[a_record(number)])
        for _ in range(200):
            if ("gossip", 0) not in self.timers:
                break
            self.core.membership.credit = GREETINGS_AT_ONCE
            for sent in of(self.fire(("gossip", 0)), Send):
                packet = decoded(sent)
                if isinstance(packet.message, Ping):
                    number = int(packet.message.target.worker_id.removeprefix("peer-"))
                    self.hear(number, Ack(packet.message.seq))
        # How long the answers above took says nothing.
        self.core.prober.round_trips.kept.clear()
        for row in self.core.table.living:
            row.rtt_ns = None

    # --- inputs -----------------------------------------------------------------------------------------

    def hear(
        self,
        number: int,
        message: Message | None = None,
        *,
        news: list[Record] | None = None,
        loads: list[Load] | None = None,
        epoch: int = 1,
        incarnation: int = 0,
        src: Address | None = None,
    ) -> list[Effect]:
        """A packet of peer `number`."""
        sender = NodeRef(f"peer-{number}", epoch)
        head = Packet(PROTOCOL, sender, incarnation, Gossip() if message is None else message)
        # A load of the sender would stand first; to the coder any first one does.
        data, told, _ = wire.encode_packet(head, news or [], loads or [], BUDGET)
        assert told == len(news or [])
        return self.packet(src or address_of(number), data)

    def packet(self, src: Address, data: bytes) -> list[Effect]:
        return self._note(self.core.on_packet(src, data, self.now))

    def ask(self, number: int, body: Frame, *, epoch: int = 1, call: int = 900) -> Frame:
        """A call of peer `number`; its answer."""
        frame = wire.encode_frame(StreamFrame(PROTOCOL, NodeRef(f"peer-{number}", epoch), 0, 77, body))
        self.asked = self._note(self.core.on_call(call, address_of(number), frame, self.now))
        (reply,) = of(self.asked, Reply)
        assert reply.call == call
        assert reply.frame is not None
        answer = wire.decode_frame(reply.frame)
        assert isinstance(answer, StreamFrame)
        assert (answer.sender, answer.call) == (self.core.me, 77)
        return answer.body

    def answer(self, call: Call, sender: NodeRef, body: Frame | None, incarnation: int = 0) -> list[Effect]:
        """The answer to a call of the core's; None: it failed."""
        frame = None
        if body is not None:
            frame = wire.encode_frame(StreamFrame(PROTOCOL, sender, incarnation, call.call, body))
        return self._note(self.core.on_reply(call.call, frame, self.now))

    def fire(self, timer: Timer) -> list[Effect]:
        """Let the armed timer come, at its time."""
        self.now = max(self.now, self.timers.pop(timer))
        return self._note(self.core.on_timer(timer, self.now))

    def do(self, effects: list[Effect]) -> list[Effect]:
        return self._note(effects)

    def round(self) -> tuple[int, int, list[Effect]]:
        """Start a period: the number of the peer that is probed, the sequence number, all effects."""
        effects = self.fire(("round", 0))
        for sent in of(effects, Send):
            message = decoded(sent).message
            if isinstance(message, Ping) and ("detour", message.seq) in self.timers:
                return int(message.target.worker_id.removeprefix("peer-")), message.seq, effects
        raise AssertionError("nobody was probed")

    def round_of(self, number: int) -> tuple[int, list[Effect]]:
        """Answer probes until it is the turn of peer `number`."""
        for _ in range(2 * len(self.core.table.living) + 2):
            target, seq, effects = self.round()
            if target == number:
                return seq, effects
            self.hear(target, Ack(seq))
        raise AssertionError(f"peer {number} was not probed in two rounds")

    # --- what is believed -------------------------------------------------------------------------------

    def standing(self, number: int) -> Standing | None:
        row = self.core.table.rows.get(f"peer-{number}")
        return None if row is None else Standing(row.record.standing)

    def suspicion_timer(self, number: int) -> Timer:
        return ("suspicion", self.core.table.rows[f"peer-{number}"].number)

    def _note(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Arm):
                self.timers[effect.timer] = effect.at_ns
            elif isinstance(effect, Disarm):
                self.timers.pop(effect.timer, None)
            elif isinstance(effect, Send):
                assert len(effect.data) <= BUDGET
        return effects


def of(effects: list[Effect], kind: type[EffectT]) -> list[EffectT]:
    return [effect for effect in effects if isinstance(effect, kind)]


def decoded(sent: Send) -> Packet:
    packet = wire.decode_packet(sent.data)
    assert isinstance(packet, Packet)
    return packet


def told(effects: list[Effect]) -> list[tuple[str, str]]:
    """The events as (kind, id of the node they are about)."""
    return [(e.kind, e.record.worker_id if e.record else "") for e in of(effects, Emit)]


def packets(effects: list[Effect]) -> list[tuple[Address, Packet]]:
    return [(sent.to, decoded(sent)) for sent in of(effects, Send)]


def frame_of(call: Call) -> Frame:
    frame = wire.decode_frame(call.frame)
    assert isinstance(frame, StreamFrame)
    assert frame.call == call.call
    return frame.body
