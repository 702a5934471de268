"""The core as its shell sees it: every input goes in here and is handed to the part that it concerns.

`member` holds the table, `membership` decides what is believed, `probe` looks for signs of life, `gossip`,
`spreading` and `loads` are what is told, `pushpull`, `joining` and `particulars` speak over TCP, `stealing`
and `donating` move work, `voice` is how all of them speak.
"""

from __future__ import annotations

import random
from enum import Enum, auto
from typing import Final

from fluxmesh.mesh.calls import Calls
from fluxmesh.mesh.donating import Donor
from fluxmesh.mesh.effects import (
    Command,
    Effect,
    Join,
    Leave,
    MemberView,
    Reply,
    Seek,
    Timer,
    Took,
    UpdateLoad,
    UpdateMeta,
)
from fluxmesh.mesh.joining import REDIAL_NS, Joiner
from fluxmesh.mesh.loads import aged, is_eligible, known_load, says_ready
from fluxmesh.mesh.member import Member, with_standing
from fluxmesh.mesh.membership import Membership
from fluxmesh.mesh.messages import (
    Ack,
    AckRelay,
    Address,
    Message,
    Meta,
    Nack,
    NodeRef,
    Packet,
    Ping,
    PingReq,
    Record,
    Standing,
)
from fluxmesh.mesh.particulars import Particulars
from fluxmesh.mesh.probe import Prober
from fluxmesh.mesh.pushpull import PushPull
from fluxmesh.mesh.shelf import EmptyShelf, Shelf
from fluxmesh.mesh.spreading import Spreader
from fluxmesh.mesh.stealing import Thief
from fluxmesh.mesh.surge import Surge
from fluxmesh.mesh.timing import MS, Timing
from fluxmesh.mesh.voice import Voice
from fluxmesh.mesh.wire import decode_packet, meta_hash


class Phase(Enum):
    IDLE = auto()  # before Join: nothing is sent, nothing heard
    PRESENT = auto()
    LEAVING = auto()  # the news of our leave is on its way
    LINGERING = auto()  # it is out; pings are answered for a little while
    GONE = auto()
    FENCED = auto()  # our id belongs to a newer run; whatever we said would be said in its name


_HEARS: Final = frozenset({Phase.PRESENT, Phase.LEAVING, Phase.LINGERING})


class Swim:
    """One node of the mesh, without any I/O: see `effects.Core` for its obligations.

    `me` is this run, `address` where others reach it, `seeds` are handed to the shell as they are whenever
    they are to be looked up. `rng` is the only source of chance. A surplus above `steal_threshold +
    steal_batch` is told at once, and asked for. `shelf` is what others may take from, `tasks` the hashes of
    the names of what this worker can run (none: no matter), `steal_rate_limit` requests per peer and second
    (0: any).
    """

    def __init__(
        self,
        *,
        me: NodeRef,
        address: Address,
        meta: Meta,
        timing: Timing,
        seeds: tuple[str, ...],
        rng: random.Random,
        incarnation: int = 0,
        steal_threshold: int = 2,
        steal_batch: int = 4,
        steals: bool = True,
        steal_rate_limit: float = 10.0,
        shelf: Shelf | None = None,
        tasks: tuple[int, ...] = (),
    ) -> None:
        self.phase = Phase.IDLE
        self.timing = timing
        self.voice = Voice(record=_own_record(me, address, meta, incarnation), timing=timing, rng=rng)
        self.table = self.voice.table
        self.membership = Membership(voice=self.voice, rng=rng, watcher=self)
        self.particulars = Particulars(voice=self.voice, rng=rng, meta=meta)
        self.prober = Prober(voice=self.voice, membership=self.membership, rng=rng)
        self.pushpull = PushPull(
            voice=self.voice, membership=self.membership, particulars=self.particulars, rng=rng
        )
        self.joiner = Joiner(
            voice=self.voice,
            pushpull=self.pushpull,
            prober=self.prober,
            rng=rng,
            seeds=seeds,
            address=address,
        )
        self._rng = rng
        self.spreader = Spreader(voice=self.voice, membership=self.membership, prober=self.prober, rng=rng)
        above = steal_threshold + steal_batch
        self.surge = Surge(voice=self.voice, rng=rng, above=above)
        self.donor = Donor(
            voice=self.voice,
            shelf=EmptyShelf() if shelf is None else shelf,
            steals=steals,
            batch=steal_batch,
            rate_per_s=steal_rate_limit,
        )
        self.thief = Thief(
            voice=self.voice,
            particulars=self.particulars,
            donor=self.donor,
            rng=rng,
            tasks=tasks,
            steals=steals,
            above=above,
            batch=steal_batch,
        )
        self.calls = Calls(
            voice=self.voice,
            membership=self.membership,
            prober=self.prober,
            pushpull=self.pushpull,
            particulars=self.particulars,
            joiner=self.joiner,
            thief=self.thief,
            donor=self.donor,
        )
        self._born_ns = 0

    # --- questions --------------------------------------------------------------------------------------

    @property
    def me(self) -> NodeRef:
        return self.voice.me

    @property
    def record(self) -> Record:
        """What we say of ourselves."""
        return self.voice.record

    def members(self, now: int) -> list[MemberView]:
        """Ourselves first, then everybody else, the dead and those who left with them."""
        own = self.voice.loads.own
        born = self.voice.loads.own_born_ns
        ready = own is not None and says_ready(own) and self.phase is Phase.PRESENT
        ours = None if own is None else aged(own, (now - born) // MS)
        views = [MemberView(self.record, self.particulars.own, ours, self._born_ns, True, 0, ready)]
        views += [
            MemberView(
                row.record,
                self.particulars.of(row.record),
                known_load(row, now),
                row.since_ns,
                row.answered,
                row.rtt_ns,
                is_eligible(row, now),
            )
            for row in self.table.rows.values()
        ]
        return views

    def counters(self) -> dict[str, int]:
        """What happened so far, and how full everything is now."""
        living = self.table.living
        return {
            **self.voice.counts,
            "members_living": len(living),
            "members_suspect": sum(row.suspicion is not None for row in living),
            "members_gone": len(self.table.tombs),
            "news_queued": len(self.voice.news),
            "news_dropped": self.voice.news.dropped,
            "health_score": self.voice.health.score,
            "relays_open": len(self.prober.relays),
            "calls_open": len(self.voice.calls),
        }

    # --- datagrams --------------------------------------------------------------------------------------

    def on_packet(self, src: Address, data: bytes, now: int) -> list[Effect]:
        if self.phase not in _HEARS:
            return []
        packet = decode_packet(data)
        if isinstance(packet, str):
            self.voice.count(f"packets_refused_{packet}")
        elif packet.sender.worker_id == self.me.worker_id:
            self.membership.meet_own_id(packet.sender, packet.incarnation, src)
        else:
            self.voice.count("packets_received")
            self._on_packet(packet, src, len(data), now)
        return self._done(now)

    def _on_packet(self, packet: Packet, src: Address, size: int, now: int) -> None:
        ours = self._hear(packet, now)
        sender, message = packet.sender, packet.message
        row = self.table.rows.get(sender.worker_id)
        is_this_run = row is not None and row.record.epoch == sender.epoch
        for claim in ours:
            self.membership.hear(claim, now, teller=row if is_this_run else None)
        if self.membership.is_fenced:
            return
        if row is None or row.record.epoch < sender.epoch:
            self._on_stranger(message, src, size)
        elif row.record.epoch > sender.epoch:
            # An older run that does not know yet. It is told, unless that is what it was telling us.
            if not ours:
                self.voice.correct(src, row, now)
        else:
            row.behind = row.behind or packet.incarnation > row.record.incarnation
            self._hear_loads(packet, now)
            self._on_message(message, row, src, now)
            if not (isinstance(message, Ping) and message.target == self.me):
                self._tell_what_is_due(packet, row, src, now, is_notice=bool(ours))

    def _hear_loads(self, packet: Packet, now: int) -> None:
        has_hint = False
        for load in packet.loads:
            member = self.surge.hear(load, now, teller=packet.sender)
            if member is not None:
                is_own_word = load.worker_id == packet.sender.worker_id
                has_hint = self.thief.hint(member, now, is_own_word=is_own_word) or has_hint
        if has_hint:
            self.thief.look(now)

    def _tell_what_is_due(
        self, packet: Packet, row: Member, src: Address, now: int, *, is_notice: bool
    ) -> None:
        """What an Ack would have carried. Whoever told us that we are down is not told the same for it, and
        a leaver not that it left."""
        if row.owed or row.outdated:
            self.voice.correct(src, row, now)
        elif row.record.standing != Standing.ALIVE and not is_notice:
            own_words = [r for r in packet.news if r.worker_id == row.record.worker_id]
            if not any(record.standing == Standing.LEFT for record in own_words):
                self.voice.correct(src, row, now)

    def _hear(self, packet: Packet, now: int) -> list[Record]:
        """Take in the news; answers the claims about ourselves, which are weighed when it is known who made
        them."""
        ours: list[Record] = []
        teller = self.table.find(packet.sender)
        for record in packet.news:
            if record.worker_id == self.me.worker_id:
                ours.append(record)
            else:
                self.membership.hear(record, now, teller=teller)
        message = packet.message
        about = message.about if isinstance(message, Ping) else None
        if about is not None and about.worker_id == self.me.worker_id:
            ours.append(about)
        return ours

    def _on_stranger(self, message: Message, src: Address, size: int) -> None:
        self.voice.count("packets_of_strangers")
        if isinstance(message, Ping) and message.target == self.me:
            self.voice.answer_stranger(src, Ack(message.seq), size)

    def _on_message(self, message: Message, row: Member, src: Address, now: int) -> None:
        match message:
            case Ping(seq=seq, target=target):
                if target == self.me:
                    self.voice.say(src, Ack(seq), row, now)
                else:
                    self.voice.count("pings_for_others")
                    row.owed = row.owed or target.worker_id == self.me.worker_id
            case Ack(seq=seq):
                self.prober.on_ack(seq, row.ref, now)
            case PingReq():
                self.prober.on_ping_req(message, row, src, now)
            case AckRelay():
                self.prober.on_ack_relay(message, row.ref, now)
            case Nack(seq=seq):
                self.prober.on_nack(seq, row.ref)
            case _:
                pass  # Gossip: all it says stands behind it

    def on_send_failed(self, to: Address, now: int) -> list[Effect]:
        if self.phase in _HEARS:
            self.voice.count("sends_failed")
            self.prober.on_send_failed(to, now)
        return self._done(now)

    # --- calls ------------------------------------------------------------------------------------------

    def on_call(self, call: int, src: Address, frame: bytes, now: int) -> list[Effect]:
        if self.phase in _HEARS:
            self.calls.on_call(call, src, frame, now, is_present=self.phase is Phase.PRESENT)
        else:
            self.voice.put(Reply(call, None))
        return self._done(now)

    def on_reply(self, call: int, frame: bytes | None, now: int) -> list[Effect]:
        pending = self.voice.calls.pop(call, None)
        if pending is not None and self.phase in _HEARS:
            self.calls.on_reply(call, pending, frame, now)
            if pending.kind == "steal":
                self._wish_changed(now)  # nothing came of it: then others may have something
        return self._done(now)

    def on_resolved(self, addresses: dict[str, list[Address]], now: int) -> list[Effect]:
        if self.phase is Phase.PRESENT:
            self.joiner.on_resolved(addresses, now)
        return self._done(now)

    # --- timers -----------------------------------------------------------------------------------------

    def on_timer(self, timer: Timer, now: int) -> list[Effect]:
        purpose, number = timer
        if self.phase is Phase.PRESENT:
            self._on_timer(purpose, number, now)
        elif self.phase in _HEARS:
            self._on_parting_timer(purpose, number, now)
        return self._done(now)

    def _on_timer(self, purpose: str, number: int, now: int) -> None:
        match purpose:
            case "round":
                self.voice.loads.renew(now)
                self.membership.on_period()
                self.prober.on_round(now)
            case "detour":
                self.prober.on_detour(number, now)
            case "suspicion":
                self.membership.on_suspicion_timer(number, now)
            case "gossip":
                self.spreader.on_timer(now, is_present=True)
            case "relay":
                self.prober.on_relay_timer(number, now)
            case "steal":
                self.thief.on_timer(now)
            case "take":
                self.thief.on_take_timer(now)
            case "taken":
                self.thief.on_told_timer(number, now)
            case "meta":
                self.particulars.on_timer(now)
            case "surge":
                self.surge.on_timer(now)
            case "idle":
                self._wish_changed(now)
            case "push_pull":
                self.joiner.on_push_pull_timer(now)
            case "seeds":
                self.joiner.on_seeds_timer(now)
            case "redial":
                self._sweep(now)
                self.joiner.on_redial_timer(now)

    def _on_parting_timer(self, purpose: str, number: int, now: int) -> None:
        match purpose:
            case "gossip":
                self._spread_leave(now)
            case "relay":
                self.prober.on_relay_timer(number, now)
            case "taken":
                self.thief.on_told_timer(number, now)
            case "leave":
                self._linger(now)
            case "linger":
                self._go()

    def _spread_leave(self, now: int) -> None:
        self.spreader.on_timer(now, is_present=False)
        if self.phase is Phase.LEAVING and self.voice.news.sends(self.me.worker_id) is None:
            self._linger(now)

    def _sweep(self, now: int) -> None:
        for member in self.table.expire(now):
            self.voice.tell("forgotten", member.record)
        self.particulars.sweep(now)

    def on_stall(self, late_ns: int, now: int) -> list[Effect]:
        """We stood still for `late_ns`; the shell has handed over what waited in the socket. Silence in that
        time was our own."""
        if self.phase is Phase.PRESENT:
            self.voice.count("stalls")
            self.voice.health.blame(1)
            self.prober.void(now)
            self.membership.push_out(late_ns, now)
        return self._done(now)

    # --- commands ---------------------------------------------------------------------------------------

    def command(self, command: Command, now: int) -> list[Effect]:
        match command:
            case Join():
                self._join(now)
            case Leave():
                self._leave(now)
            case UpdateLoad(load=load):
                self.surge.update(load, now, is_present=self.phase is Phase.PRESENT)
                self._wish_changed(now)
            case UpdateMeta(meta=meta):
                self.membership.describe(self.particulars.set_own(meta))
            case Seek(want=want):
                self.thief.seek(want)
                self._wish_changed(now)
            case Took(peer=peer, jobs=jobs, got=got):
                if self.phase in _HEARS:
                    self.thief.took(peer, jobs, got, now)
                    self._wish_changed(now)
        return self._done(now)

    def _wish_changed(self, now: int) -> None:
        """Ask, or if there is nobody to ask, tell a few that we would."""
        self.thief.look(now)
        if self.phase is Phase.PRESENT:
            self.surge.seeks(now, is_hungry=self.thief.wish > 0, is_busy=self.thief.is_busy)

    def _join(self, now: int) -> None:
        if self.phase is not Phase.IDLE:
            return
        self.phase = Phase.PRESENT
        self.thief.is_present = True
        self._born_ns = now
        period = self.timing.period_ns
        self.voice.arm(("round", 0), now + int(self._rng.random() * period))
        self.voice.arm(("push_pull", 0), now + int(self._rng.random() * self.timing.push_pull_ns))
        self.voice.arm(("redial", 0), now + int(self._rng.random() * REDIAL_NS))
        self.joiner.on_seeds_timer(now)

    def _leave(self, now: int) -> None:
        if self.phase in (Phase.IDLE, Phase.FENCED):
            # Whatever a fenced one said would be said in the name of the newer run.
            self._go()
        if self.phase is not Phase.PRESENT:
            return
        self.phase = Phase.LEAVING
        self.membership.announce(with_standing(self.record, Standing.LEFT, ""))
        self.membership.end_suspicions()
        self.prober.stop()
        self.thief.leave()
        for purpose in ("push_pull", "seeds", "redial", "meta", "surge", "idle"):
            self.voice.disarm((purpose, 0))
        self.voice.arm(("leave", 0), now + self.timing.leave_ns)
        self._spread_leave(now)

    def _linger(self, now: int) -> None:
        if self.phase is Phase.LEAVING:
            self.phase = Phase.LINGERING
            self.voice.disarm(("leave", 0))
            self.voice.arm(("linger", 0), now + self.timing.linger_ns)

    def _go(self) -> None:
        self.phase = Phase.GONE
        for purpose in ("gossip", "leave"):
            self.voice.disarm((purpose, 0))
        self.voice.tell("gone", self.record)

    # --- what the table tells us ------------------------------------------------------------------------

    def described(self, member: Member, now: int) -> None:
        self.particulars.described(member, now)

    def returned(self, member: Member, now: int) -> None:
        self.joiner.returned(member, now)

    def gone(self, ref: NodeRef) -> None:
        self.thief.forget(ref)
        self.donor.forget(ref)

    # --- the end of every input -------------------------------------------------------------------------

    def _done(self, now: int) -> list[Effect]:
        if self.membership.is_fenced and self.phase in _HEARS:
            is_leaving = self.phase is not Phase.PRESENT
            self.phase = Phase.FENCED
            if is_leaving:
                self._go()
        if self.phase is Phase.LEAVING and not self.table.living and not self.voice.calls:
            self._go()  # there is nobody to say goodbye to, and nobody whom a call may have told of us
        self.spreader.settle(now, hears=self.phase in _HEARS, is_present=self.phase is Phase.PRESENT)
        return self.voice.take()


def _own_record(me: NodeRef, address: Address, meta: Meta, incarnation: int) -> Record:
    alive, described = int(Standing.ALIVE), meta_hash(meta)
    return Record(me.worker_id, me.epoch, incarnation, alive, address.host, address.port, described)
