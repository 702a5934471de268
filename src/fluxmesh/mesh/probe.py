"""Who is asked for a sign of life, when, by which ways; what we ask for others."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from fluxmesh.mesh.detector import RoundTrips, blame_of_silence
from fluxmesh.mesh.member import Member, Table
from fluxmesh.mesh.membership import Membership
from fluxmesh.mesh.messages import (
    AckRelay,
    Address,
    Nack,
    NodeRef,
    Ping,
    PingReq,
    Record,
    Standing,
    TcpPing,
)
from fluxmesh.mesh.timing import MS, SCORE_MAX, S
from fluxmesh.mesh.voice import Pending, Voice

RELAYS_MAX: Final = 256  # pings for others under way; more are left to other helpers
RELAYS_OF_STRANGERS_MAX: Final = 64  # of them for those who never answered us: names cost a liar nothing
# An honest asker has one probe open, and the relay of the one before may not have ended here yet.
RELAYS_AN_ASKER: Final = 2
HELLOS_MAX: Final = 64
UNMET_EVERY: Final = 4  # this probe goes to one that never answered us, if there is one
DETOUR_QUIET_NS: Final = 600 * S  # once told, not every period for as long as the short way is shut
_NACK_AT: Final = 0.8  # of the window


@dataclass(slots=True)
class Probe:
    """The question of this period."""

    seq: int
    ref: NodeRef
    number: int
    to: Address
    sent_ns: int
    ends_ns: int
    answered: str = ""  # by which way: "direct", "relay", "tcp"
    has_detoured: bool = False
    helpers: list[str] = field(default_factory=list)
    witnesses: list[str] = field(default_factory=list)  # those of the helpers that have answered us before
    nacks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Relay:
    """A ping on behalf of another."""

    seq: int  # of the one who asked
    asker: NodeRef
    reply_to: Address
    target: NodeRef
    ends_ns: int
    is_nacked: bool = False


class Order:
    """Whose turn it is to be probed. Those who have answered us in this run have a round of their own; all
    who never did share every fourth probe: names are made up for nothing, and were they all in one round, a
    thousand of them would hide a real death for minutes."""

    def __init__(self, *, table: Table, rng: random.Random) -> None:
        self._table = table
        self._rng = rng
        self._turns = 0

    def pick(self) -> Member | None:
        """The next to be probed; None when nobody lives."""
        met, unmet = self._table.met, self._table.unmet
        self._turns += 1
        if unmet.rows and (self._turns % UNMET_EVERY == 0 or not met.rows):
            return unmet.pick(self._rng)
        return met.pick(self._rng)


class Prober:
    """One probe a period, its detours and its verdict; and the pings that we send for others."""

    def __init__(self, *, voice: Voice, membership: Membership, rng: random.Random) -> None:
        self.voice = voice
        self.membership = membership
        self.order = Order(table=voice.table, rng=rng)
        self.round_trips = RoundTrips()
        self.open: Probe | None = None
        self.relays: dict[int, Relay] = {}
        self._relays_of: dict[NodeRef, list[int]] = {}
        self.hellos: dict[int, tuple[NodeRef, int]] = {}
        self._rng = rng

    # --- the period -------------------------------------------------------------------------------------

    def on_round(self, now: int) -> None:
        """The end of a period: a verdict on the last probe, then the next one."""
        self._judge(now)
        voice = self.voice
        period = voice.timing.period_ns * voice.health.factor
        voice.arm(("round", 0), now + period)
        member = self.order.pick()
        if member is None:
            return
        seq = voice.new_seq()
        self.open = Probe(seq, member.ref, member.number, member.address, now, now + period)
        patience = self.round_trips.patience_ns(voice.timing.period_ns) * voice.health.factor
        voice.arm(("detour", seq), now + patience)
        voice.ping(member, seq, now)

    def _judge(self, now: int) -> None:
        probe, self.open = self.open, None
        if probe is None:
            return
        health = self.voice.health
        if probe.answered == "direct":
            health.blame(-1)
        if probe.answered:
            return
        self.voice.disarm(("detour", probe.seq))
        member = self.voice.table.numbers.get(probe.number)
        if member is None or not member.is_living or member.ref != probe.ref:
            return  # another said so meanwhile, or it lives in another run
        if member.answered:
            # The silence of those who never answered, as targets or as helpers, says nothing about us.
            nacks = sum(helper in probe.witnesses for helper in probe.nacks)
            health.blame(blame_of_silence(helpers=len(probe.witnesses), nacks=nacks))
        self.voice.count("probes_unanswered")
        self.membership.suspect(member, now)
        # Its turn comes again in a round of everybody; what it is accused of it shall hear now.
        self.hello(member, now)

    def on_detour(self, seq: int, now: int) -> None:
        """No direct answer in time: others ask for us, and we ask over TCP."""
        probe = self.open
        if probe is None or probe.seq != seq or probe.answered or probe.has_detoured:
            return
        member = self.voice.table.numbers.get(probe.number)
        if member is None or member.ref != probe.ref:
            return
        probe.has_detoured = True
        left = probe.ends_ns - now
        window_ms = max(1, left // MS)
        for helper in self._helpers(member):
            probe.helpers.append(helper.record.worker_id)
            if helper.answered:
                probe.witnesses.append(helper.record.worker_id)
            request = PingReq(seq, probe.ref, probe.to.host, probe.to.port, window_ms)
            self.voice.say(helper.address, request, helper, now)
        about = None if member.record.standing == Standing.ALIVE else member.record
        pending = Pending("tcp_ping", probe.to, ref=probe.ref, number=seq)
        self.voice.call(TcpPing(probe.ref, about), pending, max(MS, left))

    def _helpers(self, target: Member) -> list[Member]:
        """Those who answered us before, the Alive first; a suspect is asked only where there are too few,
        because a small cluster needs every witness, and who never answered only after it."""
        count = self.voice.timing.indirect_ping_count
        table = self.voice.table
        helpers: list[Member] = []
        for among, standing in (
            (table.met, Standing.ALIVE),
            (table.met, Standing.SUSPECT),
            (table.unmet, Standing.ALIVE),
        ):
            if len(helpers) < count:
                helpers += table.choose(
                    self._rng,
                    count - len(helpers),
                    lambda row, wanted=standing: row is not target and row.record.standing == wanted,  # type: ignore[misc]
                    among=among.rows,
                )
        return helpers

    def on_send_failed(self, to: Address, now: int) -> None:
        """A ping that did not even leave is a direct probe without an answer."""
        probe = self.open
        if probe is not None and probe.to == to and not probe.answered:
            self.voice.disarm(("detour", probe.seq))
            self.on_detour(probe.seq, now)

    def void(self, now: int) -> None:
        """We stood still: whatever is open says nothing about others."""
        if self.open is not None:
            self.voice.disarm(("detour", self.open.seq))
            self.open = None
        for seq in self.relays:
            self.voice.disarm(("relay", seq))
        self.relays.clear()
        self._relays_of.clear()
        self.hellos.clear()
        self.voice.arm(("round", 0), now + self.voice.timing.period_ns)

    def stop(self) -> None:
        if self.open is not None:
            self.voice.disarm(("detour", self.open.seq))
            self.open = None
        self.voice.disarm(("round", 0))

    # --- signs of life ----------------------------------------------------------------------------------

    def hello(self, member: Member, now: int, *, queued: list[Record] | None = None) -> None:
        """A ping out of turn: no verdict hangs on it."""
        if len(self.hellos) >= HELLOS_MAX:
            del self.hellos[next(iter(self.hellos))]
        seq = self.voice.new_seq()
        self.hellos[seq] = (member.ref, now)
        self.voice.ping(member, seq, now, queued=queued)

    def on_ack(self, seq: int, sender: NodeRef, now: int) -> None:
        probe = self.open
        if probe is not None and probe.seq == seq and probe.ref == sender:
            if probe.answered != "direct":
                self._was_answered(probe, "direct", now)
                self._first_hand(sender, now - probe.sent_ns)
        elif (hello := self.hellos.get(seq)) is not None and hello[0] == sender:
            del self.hellos[seq]
            self._first_hand(sender, now - hello[1])
        elif (relay := self.relays.get(seq)) is not None and relay.target == sender:
            self._end_relay(seq)
            asker = self.voice.table.find(relay.asker)
            if asker is not None:
                self.voice.say(relay.reply_to, AckRelay(relay.seq, relay.target), asker, now)
        else:
            self.voice.count("acks_late")

    def on_ack_relay(self, message: AckRelay, sender: NodeRef, now: int) -> None:
        probe = self.open
        if probe is None or probe.seq != message.seq or probe.ref != message.target:
            self.voice.count("acks_late")
        elif sender.worker_id in probe.helpers and not probe.answered:
            self._was_answered(probe, "relay", now, f"answered by way of {sender.worker_id}")

    def on_nack(self, seq: int, sender: NodeRef) -> None:
        """Counts once for each helper that was asked for this probe."""
        probe = self.open
        if probe is None or probe.seq != seq:
            return
        if sender.worker_id in probe.helpers and sender.worker_id not in probe.nacks:
            probe.nacks.append(sender.worker_id)

    def on_tcp_ack(self, pending: Pending, now: int) -> None:
        probe = self.open
        if probe is None or probe.seq != pending.number or probe.ref != pending.ref or probe.answered:
            return
        self._was_answered(
            probe, "tcp", now, "answered over TCP and not over UDP: is UDP blocked on the way?"
        )

    def _was_answered(self, probe: Probe, way: str, now: int, text: str = "") -> None:
        probe.answered = way
        self.voice.disarm(("detour", probe.seq))
        member = self.voice.table.numbers.get(probe.number)
        if member is None or member.ref != probe.ref:
            return
        if way == "tcp":
            self.membership.answered(member)
        if way == "direct":
            return
        self.voice.count(f"probes_by_{way}")
        told = member.detour_ns
        if told is None or now - told >= DETOUR_QUIET_NS:
            member.detour_ns = now
            self.voice.tell("probe_resolved", member.record, text=text)

    def _first_hand(self, sender: NodeRef, rtt_ns: int) -> None:
        self.round_trips.note(rtt_ns)
        member = self.voice.table.find(sender)
        if member is not None:
            self.membership.answered(member)
            member.rtt_ns = rtt_ns if member.rtt_ns is None else (7 * member.rtt_ns + rtt_ns) // 8

    # --- for others -------------------------------------------------------------------------------------

    def on_ping_req(self, message: PingReq, asker: Member, src: Address, now: int) -> None:
        if not self._has_room_for(asker):
            self.voice.count("relays_crowded_out")
            return
        row = self.voice.table.rows.get(message.target.worker_id)
        if row is not None and (row.record.epoch > message.target.epoch or not row.is_living):
            # The asker has not heard what became of it, and is about to suspect one who left.
            self.membership.owe(asker, row)
        # Nobody has longer than its period, stretched as far as poor health does.
        window = min(message.window_ms * MS, self.voice.timing.period_ns * (SCORE_MAX + 1))
        seq = self.voice.new_seq()
        self._relays_of.setdefault(asker.ref, []).append(seq)
        self.relays[seq] = Relay(message.seq, asker.ref, src, message.target, now + window)
        self.voice.arm(("relay", seq), now + int(window * _NACK_AT))
        ping = Ping(seq, message.target)
        target = self.voice.table.find(message.target)
        if target is not None and target.record.standing != Standing.ALIVE:
            ping = Ping(seq, message.target, target.record)
        to = Address(message.host, message.port)
        if target is not None:
            self.voice.say(to, ping, target, now)
        else:
            self.voice.say_bare(to, ping)

    def _has_room_for(self, asker: Member) -> bool:
        """Whether another relay may begin. An asker that has its share already has given up the oldest of
        them: it asks about one at a time."""
        own = self._relays_of.get(asker.ref, ())
        if len(own) >= RELAYS_AN_ASKER:
            self._end_relay(own[0])
        if len(self.relays) >= RELAYS_MAX:
            return False
        return asker.answered or len(self.relays) < RELAYS_OF_STRANGERS_MAX

    def on_relay_timer(self, seq: int, now: int) -> None:
        """At 0.8 of the window the asker hears that we at least are well; at its end we stop listening."""
        relay = self.relays.get(seq)
        if relay is None:
            return
        if relay.is_nacked:
            self._end_relay(seq)
            return
        relay.is_nacked = True
        self.voice.arm(("relay", seq), relay.ends_ns)
        asker = self.voice.table.find(relay.asker)
        if asker is not None:
            self.voice.say(relay.reply_to, Nack(relay.seq), asker, now)

    def _end_relay(self, seq: int) -> None:
        asker = self.relays.pop(seq).asker
        own = self._relays_of[asker]
        own.remove(seq)
        if not own:
            del self._relays_of[asker]
        self.voice.disarm(("relay", seq))
