"""The promises of the membership, checked while a simulated mesh runs.

Everything is judged from outside: by the packets a node sends and is given, and by the table it shows.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

import msgspec
from msgspec import Struct

from fluxmesh.mesh.effects import Call, Effect, Reply, Send
from fluxmesh.mesh.messages import (
    Ack,
    AckRelay,
    Address,
    Exchange,
    Packet,
    Ping,
    Record,
    Records,
    Standing,
    StreamFrame,
)
from fluxmesh.mesh.swim import Swim
from fluxmesh.mesh.timing import DATAGRAM_MAX_BYTES, MS, SEAL_BYTES, S, Timing, sends_of_news
from fluxmesh.mesh.voice import CORRECTIONS_MAX
from fluxmesh.testing.simnet_node import SimNode
from fluxmesh.testing.simnet_trace import Trace, Violation, told

CANARY: Final = "canary"  # is fed with what nobody should believe; no rule about tables holds for it
TIMERS_A_MEMBER: Final = 6
TIMERS_MIN: Final = 32
PINGS_KEPT: Final = 12  # of each target
CALLS_OPEN_MAX: Final = 64
_DECODED_MAX: Final = 4_000
_SLACK_NS: Final = 2 * MS  # of rounding between the clocks of a node and of the world

State = tuple[int, int, int]  # epoch, incarnation, standing

_packet_of: Final = msgspec.msgpack.Decoder(Packet).decode
_frame_of: Final = msgspec.msgpack.Decoder(StreamFrame).decode


class Expect(Struct, frozen=True, kw_only=True):
    """What may be asked for beyond what always holds, by what the plan does to the mesh."""

    no_dead: bool = False  # nobody who lives is declared dead
    no_suspect: bool = False  # nobody who lives is even suspected
    news_sends: int = sends_of_news(16) + CORRECTIONS_MAX  # of one update by one node


class Observer:
    """What the rules remember of one run of a node."""

    __slots__ = ("accusers", "acked", "counted", "held", "known", "pinged", "pings", "stranger", "suspected")

    def __init__(self) -> None:
        self.held: dict[str, Record] = {}
        self.known: dict[str, State] = {}
        self.suspected: dict[str, tuple[int, int, int | None]] = {}  # awake since when, among how many, known
        self.accusers: dict[tuple[str, int, int], set[str]] = {}
        self.pings: dict[int, tuple[str, int]] = {}  # by seq: whom, awake when
        self.pinged: dict[str, deque[int]] = {}  # the seqs of the latest, by whatever reason
        self.acked: set[int] = set()  # answered inside their period
        self.counted: Counter[tuple[str, int, int, int, str]] = Counter()
        self.stranger: tuple[Address, str, int] | None = None


class Rules:
    """A Watch. Raises Violation at the event that breaks a promise."""

    def __init__(self, *, timing: Timing, expect: Expect, trace: Trace) -> None:
        self._timing = timing
        self._expect = expect
        self._trace = trace
        self._observers: dict[int, Observer] = {}
        self._truth: dict[str, tuple[int, int]] = {}  # what the subject itself has said, the highest
        self._alive: dict[str, int] = {}  # epoch of the run that lives
        self._realms: dict[str, str] = {}
        self._decoded: dict[bytes, Packet] = {}
        self.checks = 0
        self.last_news_ns = 0

    def relax(self, expect: Expect) -> None:
        """From now on this is asked for."""
        self._expect = expect

    # -- lives -------------------------------------------------------------------------------------------

    def started(self, node: SimNode) -> None:
        self._observers[id(node)] = Observer()
        epoch, _ = self._truth.get(node.name, (0, 0))
        if node.me.epoch > epoch:
            self._truth[node.name] = (node.me.epoch, 0)
        self._alive[node.name] = node.me.epoch
        self._realms[node.name] = node.spec.realm

    def stopped(self, node: SimNode) -> None:
        self._observers.pop(id(node), None)
        if self._alive.get(node.name) == node.me.epoch:
            del self._alive[node.name]

    # -- what is sent ------------------------------------------------------------------------------------

    def sends(self, node: SimNode, effect: Send) -> None:
        data = effect.data
        packet = self._packet(data)
        target = node.net.running.get(effect.to)
        name = effect.to.host if target is None else target.name
        self._trace.bytes_event(node.net.now, node.name, "send", data, (name, packet))
        if len(data) > DATAGRAM_MAX_BYTES - SEAL_BYTES:
            raise Violation("budget", f"{node.name} sends {len(data)} bytes", about=(node.name,))
        if node.name == CANARY:
            return
        if packet.sender != node.me:
            raise Violation("sender", f"{node.name} speaks as {packet.sender}", about=(node.name,))
        self._said(node, packet.incarnation)
        seen = self._observers[id(node)]
        message = packet.message
        if type(message) is Ping:
            seen.pings[message.seq] = (message.target.worker_id, self._awake(node))
            seen.pinged.setdefault(message.target.worker_id, deque(maxlen=PINGS_KEPT)).append(message.seq)
        if packet.news:
            self._count_news(node, seen, packet.news, effect.to, name)

    def _count_news(
        self, node: SimNode, seen: Observer, news: list[Record], to: Address, receiver: str
    ) -> None:
        """What is about the sender or the receiver answers what one of them holds, and is no news. A notice,
        which corrects its receiver, has its own bound: one a period and row."""
        counted = seen.counted
        for record in news:
            if record.worker_id in (node.name, receiver) or record.address == to:
                continue
            self.last_news_ns = node.net.now
            key = (record.worker_id, record.epoch, record.incarnation, record.standing, record.accuser)
            counted[key] += 1
            if counted[key] > self._expect.news_sends + node.core.counters().get("notices_sent", 0):
                raise Violation(
                    "bounded news",
                    f"{node.name} sends {told(record)} for the {counted[key]}th time",
                    about=(node.name, record.worker_id),
                )

    def calls(self, node: SimNode, effect: Call) -> None:
        self._frame(node, "call", effect.frame, effect.to)
        if node.calls_open > CALLS_OPEN_MAX:
            raise Violation("bounded calls", f"{node.name} has {node.calls_open} open", about=(node.name,))

    def replies(self, node: SimNode, effect: Reply) -> None:
        if effect.frame is not None:
            self._frame(node, "reply", effect.frame, effect.call)

    def _frame(self, node: SimNode, what: str, data: bytes, to: object) -> None:
        frame = _frame_of(data)
        self._trace.bytes_event(node.net.now, node.name, what, data, (to, frame))
        if node.name != CANARY:
            self._said(node, frame.incarnation)

    def _said(self, node: SimNode, incarnation: int) -> None:
        mine = (node.me.epoch, incarnation)
        before = self._truth.get(node.name, (0, 0))
        if mine > before:
            self._truth[node.name] = mine

    # -- what arrives ------------------------------------------------------------------------------------

    def received(self, node: SimNode, source: Address, data: bytes) -> None:
        self._trace.bytes_event(node.net.now, node.name, "packet", b"%d" % len(data), source)
        if node.name == CANARY:
            return
        packet = self._packet(data)
        seen = self._observers[id(node)]
        sender = packet.sender.worker_id
        seen.stranger = (source, sender, len(data)) if sender not in seen.known else None
        message = packet.message
        kind = type(message)
        if kind is Ack or kind is AckRelay:
            seq = message.seq  # type: ignore[union-attr]
            asked = seen.pings.get(seq)
            if asked is not None and self._awake(node) - asked[1] < self._timing.period_ns:
                seen.acked.add(seq)
        elif kind is Ping and message.about is not None:  # type: ignore[union-attr]
            self._heard(seen, message.about)  # type: ignore[union-attr]
        for record in packet.news:
            self._heard(seen, record)

    def asked(self, node: SimNode, caller: SimNode, frame: bytes) -> None:
        self._heard_frame(node, frame)

    def answered(self, node: SimNode, frame: bytes) -> None:
        self._heard_frame(node, frame)

    def _heard_frame(self, node: SimNode, data: bytes) -> None:
        body = _frame_of(data).body
        seen = self._observers.get(id(node))
        if seen is not None and isinstance(body, Exchange | Records):
            for record in body.records:
                self._heard(seen, record)

    def _heard(self, seen: Observer, record: Record) -> None:
        if record.standing not in (Standing.SUSPECT, Standing.DEAD):
            return
        key = (record.worker_id, record.epoch, record.incarnation)
        seen.accusers.setdefault(key, set()).add(record.accuser)

    # -- what follows ------------------------------------------------------------------------------------

    def handled(self, node: SimNode, cause: str, detail: object, effects: list[Effect]) -> None:
        if cause != "packet":
            self._trace.event(node.net.now, node.name, cause, _short(cause, detail))
        if node.name == CANARY:
            return
        seen = self._observers.get(id(node))
        if seen is None:
            return
        self._check_table(node, seen, cause)
        limit = max(TIMERS_MIN, TIMERS_A_MEMBER * len(seen.known))
        if node.armed > limit:
            raise Violation("bounded timers", f"{node.name} has armed {node.armed}", about=(node.name,))
        if cause == "packet" and seen.stranger is not None:
            self._check_stranger(node, seen, effects)

    def _check_stranger(self, node: SimNode, seen: Observer, effects: list[Effect]) -> None:
        assert seen.stranger is not None
        source, sender, size = seen.stranger
        if sender in seen.known or sender == node.name:
            return
        back = sum(len(one.data) for one in effects if isinstance(one, Send) and one.to == source)
        if back > size:
            raise Violation(
                "amplification",
                f"{node.name} answers {back} bytes to {size} of a stranger",
                about=(node.name,),
            )

    def _check_table(self, node: SimNode, seen: Observer, cause: str) -> None:
        held = seen.held
        known = seen.known
        records = _records(node)
        for record in records:
            name = record.worker_id
            if held.get(name) is not record:
                held[name] = record
                before = known.get(name)
                state = (record.epoch, record.incarnation, record.standing)
                if state != before:
                    known[name] = state
                    self.checks += 1
                    self._check_change(node, seen, record, before, cause)
        if len(records) != len(known):
            raise Violation(
                "one row an id",
                f"{node.name} shows {len(records)} rows, {len(known)} ids have been seen",
                about=(node.name,),
            )

    def _check_change(
        self, node: SimNode, seen: Observer, record: Record, before: State | None, cause: str
    ) -> None:
        name = record.worker_id
        about = (node.name, name)
        state = (record.epoch, record.incarnation, record.standing)
        if self._realms.get(name) != node.spec.realm:
            raise Violation("realm", f"{node.name} holds {told(record)} of another cluster", about=about)
        if before is not None and state < before:
            raise Violation("order", f"{node.name} goes from {before} back to {told(record)}", about=about)
        if state[:2] > self._truth.get(name, (0, 0)) and name != node.name:
            raise Violation(
                "only the subject raises",
                f"{node.name} holds {told(record)}, it has said {self._truth.get(name)}",
                about=about,
            )
        if name == node.name:
            return
        if record.standing == Standing.SUSPECT:
            self._check_suspect(node, seen, record, cause)
        elif record.standing == Standing.DEAD:
            self._check_dead(node, seen, record, cause)

    def _check_suspect(self, node: SimNode, seen: Observer, record: Record, cause: str) -> None:
        name = record.worker_id
        about = (node.name, name)
        if self._expect.no_suspect and self._alive.get(name) == record.epoch:
            raise Violation("no suspicion", f"{node.name} holds {told(record)}", about=about)
        awake = self._awake(node)
        seen.suspected[name] = (awake, self._size(seen), _could_confirm(node, record))
        if record.accuser != node.name or cause != "timer":
            return
        over = awake - self._timing.period_ns + _SLACK_NS
        old = [seq for seq in seen.pinged.get(name, ()) if seen.pings[seq][1] <= over]
        if not old:
            raise Violation("window", f"{node.name} suspects {name}, no probe of it is over", about=about)
        if all(seq in seen.acked for seq in old):
            raise Violation("answered", f"{node.name} suspects {name}, which answered {old}", about=about)
        seen.accusers.setdefault((name, record.epoch, record.incarnation), set()).add(node.name)

    def _check_dead(self, node: SimNode, seen: Observer, record: Record, cause: str) -> None:
        name = record.worker_id
        about = (node.name, name)
        if self._expect.no_dead and self._alive.get(name) == record.epoch:
            raise Violation("no false death", f"{node.name} holds {told(record)}", about=about)
        if cause in {"call", "reply"}:
            raise Violation("push-pull", f"{node.name} took {told(record)} from a push-pull", about=about)
        if cause != "timer":
            return
        since = seen.suspected.get(name)
        awake = self._awake(node)
        if since is None:
            raise Violation("dead at once", f"{node.name} declares {told(record)} unsuspected", about=about)
        heard = seen.accusers.get((name, record.epoch, record.incarnation), set()) | {node.name}
        least = min(
            self._timing.suspicion_ns(
                n, min(len(heard) - 1, self._timing.suspicion_multiplier - 2), known=since[2]
            )
            for n in {since[1], self._size(seen)}
        )
        if awake - since[0] < least - _SLACK_NS:
            raise Violation(
                "too soon",
                f"{node.name} declares {name} dead after {(awake - since[0]) / S:.2f} s awake,"
                f" {least / S:.2f} s is the least with {sorted(heard)}",
                about=about,
            )

    # -- small -------------------------------------------------------------------------------------------

    def _awake(self, node: SimNode) -> int:
        return node.now - node.slept_ns

    def _size(self, seen: Observer) -> int:
        """The members that are not given up, without a change that is just being looked at."""
        return sum(1 for state in seen.known.values() if state[2] < Standing.DEAD)

    def _packet(self, data: bytes) -> Packet:
        packet = self._decoded.get(data)
        if packet is None:
            packet = _packet_of(data)
            if len(self._decoded) >= _DECODED_MAX:
                self._decoded.clear()
            self._decoded[data] = packet
        return packet


def _records(node: SimNode) -> list[Record]:
    """What a node believes of others. Read from the table itself after every event, because `members` makes a
    view of each row; where a core has another inside, from that."""
    core = node.core
    if isinstance(core, Swim):
        return [row.record for row in core.table.rows.values()]
    return [view.record for view in core.members(node.now) if view.record.worker_id != node.name]


def _short(cause: str, detail: object) -> object:
    if cause == "command":
        return type(detail).__name__
    if cause == "timer":
        return "{} {}".format(*detail)  # type: ignore[misc]
    return detail


def _could_confirm(node: SimNode, record: Record) -> int | None:
    """How many could confirm a suspicion, as the promise of the core counts them; None: all."""
    core = node.core
    if not isinstance(core, Swim):
        return None
    rows = core.table.rows
    if record.accuser == node.name and not rows[record.worker_id].answered:
        return 2
    return 2 + sum(row.answered and row.is_living for name, row in rows.items() if name != record.worker_id)
