"""How this node speaks: packets with what rides behind them, calls and their answers, the timers it sets."""

from __future__ import annotations

import random
from typing import Final, Literal

from msgspec import Struct

from fluxmesh.mesh.detector import Health
from fluxmesh.mesh.effects import Arm, Call, Disarm, Effect, Emit, EventKind, Reply, Send, Timer
from fluxmesh.mesh.gossip import News
from fluxmesh.mesh.loads import Loads
from fluxmesh.mesh.member import Member, Table
from fluxmesh.mesh.messages import (
    PROTOCOL,
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
from fluxmesh.mesh.timing import DATAGRAM_MAX_BYTES, SEAL_BYTES, Timing, sends_of_news
from fluxmesh.mesh.wire import encode_frame, encode_packet

BUDGET_BYTES: Final = DATAGRAM_MAX_BYTES - SEAL_BYTES
NEWS_PER_PACKET: Final = 40  # looked at; the budget decides how many go
CORRECTIONS_MAX: Final = 8  # of one record, beside the times it is sent as news
CALLS_MAX: Final = 64  # under way at once
_COUNTERS_MAX: Final = 256

CallKind = Literal["compare", "exchange", "meta", "tcp_ping", "steal", "taken"]


class Pending(Struct, frozen=True):
    """A call under way: what for, to whom, and what its answer is to be held against."""

    kind: CallKind
    to: Address
    why: str = ""
    ref: NodeRef | None = None
    number: int = 0  # a sequence number, or a hash


class Voice:
    """Everything that leaves the core goes through here; `take` hands it over."""

    def __init__(self, *, record: Record, timing: Timing, rng: random.Random) -> None:
        self.me = record.ref
        self.record = record  # our own, as we want to be known
        self.timing = timing
        self.table = Table()
        self.news = News(record.worker_id)
        self.loads = Loads(record.ref)
        self.health = Health()
        self.counts: dict[str, int] = {}
        self.calls: dict[int, Pending] = {}
        self._out: list[Effect] = []
        self._next_call = 1
        # Packets are not sealed for one receiver: were every run to count from 1, an answer that was meant
        # for another could be passed to us and fit.
        self._next_seq = 1 + rng.getrandbits(31)

    # --- effects ----------------------------------------------------------------------------------------

    def take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    def arm(self, timer: Timer, at_ns: int) -> None:
        self._out.append(Arm(timer, at_ns))

    def disarm(self, timer: Timer) -> None:
        self._out.append(Disarm(timer))

    def put(self, effect: Effect) -> None:
        self._out.append(effect)

    def tell(
        self,
        kind: EventKind,
        record: Record | None = None,
        *,
        meta: Meta | None = None,
        load: Load | None = None,
        text: str = "",
        seed: str = "",
        again_ns: int = 0,
        jobs: int = 0,
    ) -> None:
        self.count(f"event_{kind}")
        self._out.append(Emit(kind, record, meta, load, text, seed, again_ns, jobs))

    def count(self, name: str, by: int = 1) -> None:
        if name in self.counts or len(self.counts) < _COUNTERS_MAX:
            self.counts[name] = self.counts.get(name, 0) + by

    def new_seq(self) -> int:
        self._next_seq += 1
        return self._next_seq - 1

    # --- datagrams --------------------------------------------------------------------------------------

    def ping(self, member: Member, seq: int, now: int, *, queued: list[Record] | None = None) -> None:
        """Ask a member for a sign of life, and tell it what we hold about it, so that it can say no."""
        about = None if member.record.standing == Standing.ALIVE else member.record
        self.say(member.address, Ping(seq, member.ref, about), member, now, queued=queued)

    def gossip(self, member: Member, now: int, *, queued: list[Record]) -> None:
        self.say(member.address, Gossip(), member, now, queued=queued)

    def queued(self) -> list[Record]:
        """The news that is next to be told."""
        return self.news.candidates(NEWS_PER_PACKET)

    def say(
        self,
        to: Address,
        message: Message,
        peer: Member,
        now: int,
        *,
        queued: list[Record] | None = None,
    ) -> None:
        """One datagram to a node that we know, with as much behind it as fits: what it must know of itself
        and of us, then news, then loads. `queued` is given where several are to hear the same news."""
        first = self._due(peer, message)
        news = first
        if len(self.news):
            skip = {record.worker_id for record in first}
            if len(self.table.living) > 1:
                skip.add(peer.record.worker_id)  # that it is well it knows; the telling is for others
            waiting = self.news.slots
            news = first + [
                record
                for record in (self.queued() if queued is None else queued)
                if record.worker_id not in skip and record.worker_id in waiting
            ]
        head = Packet(PROTOCOL, self.me, self.record.incarnation, message)
        data, told, _ = encode_packet(head, news, self.loads.to_tell(peer, now), BUDGET_BYTES)
        if told:
            limit = sends_of_news(self.table.population)
            self.news.sent((record.worker_id for record in news[:told]), limit=limit)
        self._send(to, data)

    def surge(self, member: Member, now: int) -> None:
        """Our load, at once, and nothing that could crowd it out."""
        head = Packet(PROTOCOL, self.me, self.record.incarnation, Gossip())
        data, _, _ = encode_packet(head, (), self.loads.to_tell(member, now), BUDGET_BYTES)
        self._send(member.address, data)

    def say_bare(self, to: Address, message: Message) -> None:
        """Nothing but the message, to whom we do not know."""
        self._send(to, self._bare(message))

    def answer_stranger(self, to: Address, message: Message, request_bytes: int) -> None:
        """The bare message, and not even that if it is larger than what was asked: nobody shall be flooded
        in our name."""
        data = self._bare(message)
        if len(data) <= request_bytes:
            self._send(to, data)
        else:
            self.count("stranger_unanswered")

    def _bare(self, message: Message) -> bytes:
        head = Packet(PROTOCOL, self.me, self.record.incarnation, message)
        return encode_packet(head, (), (), BUDGET_BYTES)[0]

    def correct(self, to: Address, row: Member, now: int) -> None:
        """Tell `to` unasked what we hold of the row it claims to be, and of ourselves: once a period and row
        at the most."""
        last = row.notice_ns
        if last is not None and now - last < self.timing.period_ns:
            return
        row.notice_ns = now
        row.owed = row.behind = False
        self.count("notices_sent")
        head = Packet(PROTOCOL, self.me, self.record.incarnation, Gossip())
        news = (row.record, self.record, *_corrections(row))
        data, _, _ = encode_packet(head, news, (), BUDGET_BYTES)
        self._send(to, data)

    def _due(self, peer: Member, message: Message) -> list[Record]:
        due = []
        told_by_ping = isinstance(message, Ping) and message.about is not None
        if (peer.behind or peer.record.standing != Standing.ALIVE) and not told_by_ping:
            due.append(peer.record)
        if peer.owed or not peer.answered or self.record.standing == Standing.LEFT:
            due.append(self.record)
        if peer.outdated:
            due += _corrections(peer)
        peer.owed = peer.behind = False
        return due

    def _send(self, to: Address, data: bytes) -> None:
        self.count("packets_sent")
        self._out.append(Send(to, data))

    # --- calls ------------------------------------------------------------------------------------------

    def call(self, body: Frame, pending: Pending, timeout_ns: int) -> int | None:
        """Ask over TCP; None when too much is under way already."""
        if len(self.calls) >= CALLS_MAX:
            self.count("calls_crowded_out")
            return None
        number = self._next_call
        self._next_call += 1
        self.calls[number] = pending
        self._out.append(Call(number, pending.to, self.frame(number, body), timeout_ns))
        return number

    def reply(self, call: int, number: int, body: Frame) -> None:
        self._out.append(Reply(call, self.frame(number, body)))

    def frame(self, number: int, body: Frame) -> bytes:
        return encode_frame(StreamFrame(PROTOCOL, self.me, self.record.incarnation, number, body))


def _corrections(peer: Member) -> list[Record]:
    """What we hold of those of whom `peer` told something older, once each time it does, but of one record no
    more often than is bounded."""
    rows, peer.outdated = peer.outdated or [], None
    told = []
    for row in rows:
        if row is not peer and row.corrected < CORRECTIONS_MAX:
            row.corrected += 1
            told.append(row.record)
    return told
