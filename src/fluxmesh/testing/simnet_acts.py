"""The stage on which a plan is played: nodes, addresses, seeds, and how each fault begins and ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final

from msgspec import msgpack

from fluxmesh.mesh.effects import Leave
from fluxmesh.mesh.messages import PROTOCOL, Address, Gossip, NodeRef, Packet, Ping, Record, Standing
from fluxmesh.mesh.timing import MS, S
from fluxmesh.testing.simnet import Simnet
from fluxmesh.testing.simnet_faults import CHAOS_TO_NS, Act, Kind, Plan, Seeds, Severity
from fluxmesh.testing.simnet_network import Via
from fluxmesh.testing.simnet_node import Seal, SimNode, Spec
from fluxmesh.testing.simnet_rules import CANARY
from fluxmesh.testing.simnet_seal import Sealing
from fluxmesh.testing.simnet_trace import Violation

PORT: Final = 7946
LIVING_MIN: Final = 2
ATTACK_EVERY_NS: Final = 250 * MS
CAPTURED: Final = 200
HOSTILE: Final = Address("10.66.6.6", PORT)
NOWHERE: Final = Address("10.99.9.9", PORT)
_NAMES: Final = ("one.mesh.test", "two.mesh.test")
LEFT_BY_NS: Final = 8 * S


class Stage:
    def __init__(self, net: Simnet, plan: Plan) -> None:
        self.net = net
        self.plan = plan
        self.rng = Random(f"acts of {plan.seed}")
        self.sealing = Sealing(seed=plan.seed) if plan.sealed else None
        self._hosts: dict[int, str] = {}
        self._moves = 0
        self._begin: dict[Kind, Callable[[Act], None]] = {
            Kind.DOUBLED: self._share("doubled", 0.2),
            Kind.OVERTAKEN: self._overtaken,
            Kind.PAIR_CUT: self._pair_cut,
            Kind.UDP_CUT: self._pair_cut,
            Kind.CLOCK_RATE: self._clock_rate,
            Kind.NO_NAMES: self._lie,
            Kind.STALE_NAMES: self._lie,
            Kind.JUNK: self._attack,
            Kind.REPLAYS: self._attack,
            Kind.RESETS: self._share("resets", 0.3),
            Kind.LATE_JOIN: lambda act: self.start(act.who[0]),
            Kind.STRANGE_KEY: self._stranger,
            Kind.STRANGE_LABEL: self._stranger,
            Kind.LOSS: self._share("loss", 0.05),
            Kind.CRASH: self._crash,
            Kind.RESTART: self._restart,
            Kind.MOVE: self._restart,
            Kind.LEAVE: self._leave,
            Kind.REJOIN: self._leave,
            Kind.HEAVY_LOSS: self._share("loss", 0.4),
            Kind.ONE_WAY_CUT: self._pair_cut,
            Kind.UDP_BLOCKED: self._udp_blocked,
            Kind.PARTITION: self._partition,
            Kind.ISLANDS: self._partition,
            Kind.SMALL_MTU: self._small_mtu,
            Kind.SUSPEND: self._freeze,
            Kind.STALL: self._freeze,
            Kind.SLOW: self._slow,
            Kind.CLOCK_JUMP: self._clock_jump,
            Kind.SEND_ERRORS: self._send_errors,
            Kind.CLONE: self._clone,
            Kind.WITNESS: self._crash_and_stall,
            Kind.LIAR: self._lies,
        }
        if any(act.kind in (Kind.JUNK, Kind.REPLAYS) for act in plan.acts):
            net.captured = deque(maxlen=CAPTURED)
        self._tell_names(0)
        net.on_emit.append(self._fenced)

    # -- nodes -------------------------------------------------------------------------------------------

    def start(self, number: int, *, host: str = "") -> None:
        """Node `number` starts, if it does not run: at its place, or at a new one."""
        name = f"w{number}"
        old = self.net.nodes.get(name)
        if old is not None and old.alive and not host:
            return
        self._hosts[number] = host or self._hosts.get(number) or f"10.0.0.{number + 1}"
        ppm = 0
        spec = Spec(name=name, host=self._hosts[number], seeds=self._seeds(number), ppm=ppm)
        node = self.net.start(spec, seal=self._seal(name))
        self._work(node)

    def _work(self, node: SimNode) -> None:
        """Loads change all the time."""
        if node.alive and not node.leaving:
            node.publish(queued=self.net.chance(12), running=self.net.chance(8))
            self.net.after(S + self.net.chance(2 * S), self._work, node)

    def _seal(self, name: str) -> Seal | None:
        return None if self.sealing is None else self.sealing.of(name, self.net.epochs[name] + 1)

    def _address(self, number: int) -> Address:
        return Address(self._hosts.get(number, f"10.0.0.{number + 1}"), PORT)

    def _seeds(self, number: int) -> tuple[str, ...]:
        match self.plan.seeds:
            case Seeds.NAMES:
                return _NAMES
            case Seeds.ALL:
                numbers = range(self.plan.nodes)
            case Seeds.TWO:
                numbers = range(2)
            case _:
                numbers = range(1)
        if list(numbers) == [number] and self.net.epochs[f"w{number}"]:
            numbers = range(2)  # it comes back to a mesh in which only itself is a seed
        return tuple(f"{self._address(one).host}:{PORT}" for one in numbers)

    def _tell_names(self, since_ns: int) -> None:
        for number, name in enumerate(_NAMES):
            self.net.names.tell(name, (self._address(number),), since_ns=since_ns)

    def _node(self, number: int) -> SimNode | None:
        node = self.net.nodes.get(f"w{number}")
        return node if node is not None and node.alive else None

    def _spare(self, number: int) -> int:
        """A node that may go for good or elsewhere: its address is not the one that others have as a seed."""
        if number >= 2 or self.plan.seeds is Seeds.ALL:
            return number
        return min(2, self.plan.nodes - 1)

    def _living(self) -> int:
        """How many ids live: two runs of one id, and nobody else, could not know of each other."""
        return len({node.name for node in self._witnesses() if not node.leaving})

    # -- faults ------------------------------------------------------------------------------------------

    def begin(self, act: Act) -> None:
        self.net.told("plan", "begins", act.tell())
        self._begin[act.kind](act)

    def _share(self, field: str, most: float) -> Callable[[Act], None]:
        def set_it(act: Act) -> None:
            least = 0.05 if act.kind is Kind.HEAVY_LOSS else 0.01
            setattr(self.net.network, field, least + act.amount * (most - least))

        return set_it

    def _overtaken(self, act: Act) -> None:
        self.net.network.late_share = 0.02 + act.amount * 0.3
        self.net.network.late_ns = 60 * MS

    def _pair_cut(self, act: Act) -> None:
        one, two = (self._address(number).host for number in act.who)
        via = Via.UDP if act.kind is Kind.UDP_CUT else Via.BOTH
        self._cut((one, two), via, act.length_ns)
        if act.kind is not Kind.ONE_WAY_CUT:
            self._cut((two, one), via, act.length_ns)

    def _cut(self, pair: tuple[str, str], via: Via, length_ns: int) -> None:
        self.net.network.cuts[pair] = via
        self.net.after(length_ns, self.net.network.cuts.pop, pair, None)

    def _udp_blocked(self, act: Act) -> None:
        host = self._address(act.who[0]).host
        for other in sorted(self.net.up - {host}):
            self._cut((host, other), Via.UDP, act.length_ns)
            self._cut((other, host), Via.UDP, act.length_ns)

    def _partition(self, act: Act) -> None:
        sides = self.net.network.sides
        hosts = [self._address(number).host for number in act.who]
        sides.update(dict.fromkeys(hosts, 1))
        for host in hosts:
            self.net.after(act.length_ns, sides.pop, host, None)

    def _clock_rate(self, act: Act) -> None:
        for number in range(self.plan.nodes):
            self.net.push(
                3 * S, self._set_rate, number, int((self.rng.random() - 0.5) * 1_000 * (1 + act.amount))
            )

    def _set_rate(self, number: int, ppm: int) -> None:
        node = self._node(number)
        if node is not None:
            node.set_rate(ppm)

    def _clock_jump(self, act: Act) -> None:
        node = self._node(act.who[0])
        if node is not None:
            node.jump(int(act.amount**2 * 20 * S))

    def _lie(self, act: Act) -> None:
        until = int(act.amount * 20 * S)
        wrong = () if act.kind is Kind.NO_NAMES else (NOWHERE,)
        for name in _NAMES:
            self.net.names.forget(name)
            self.net.names.tell(name, wrong, since_ns=0)
        self._tell_names(until)

    def _crash(self, act: Act) -> None:
        node = self._node(self._spare(act.who[0]))
        if node is None or self._living() <= LIVING_MIN:
            return
        self.net.kill(node, host_too=act.amount < 0.5)
        if self.plan.severity is Severity.MILD:
            n = self.plan.nodes + 3
            timing = self.net.timing
            bound = (n + 3) * timing.period_ns + 6 * timing.suspicion_min_ns(n) + 3 * S
            self.net.after(bound, self._is_given_up, node, self._witnesses(), Standing.DEAD)

    def _witnesses(self) -> list[SimNode]:
        return [node for node in self.net.living if node.name.startswith("w")]

    def _crash_and_stall(self, act: Act) -> None:
        """The first crashes; the others stand still while their suspicion of it runs."""
        first, *witnesses = act.who
        self._crash(act)
        for number in witnesses:
            witness = self._node(number)
            if witness is not None and number != self._spare(first):
                self.net.after(S + self.net.chance(4 * S), witness.freeze, act.length_ns)

    def _is_given_up(self, gone: SimNode, witnesses: list[SimNode], least: Standing) -> None:
        for witness in witnesses:
            if not witness.alive or witness.leaving:
                continue
            for view in witness.core.members(witness.now):
                record = view.record
                if record.ref == gone.me and record.standing < least:
                    raise Violation(
                        "completeness" if least is Standing.DEAD else "leave",
                        f"{witness.name} still holds {gone.name} as {Standing(record.standing).name}",
                        about=(witness.name, gone.name),
                    )

    def _restart(self, act: Act) -> None:
        number = act.who[0] if act.kind is Kind.RESTART else self._spare(act.who[0])
        node = self._node(number)
        if node is None or self._living() <= LIVING_MIN:
            return
        self.net.kill(node)
        self.net.after(act.length_ns, self.start, number)
        if act.kind is Kind.MOVE:
            self._hosts[number] = self._new_host()

    def _new_host(self) -> str:
        self._moves += 1
        return f"10.0.1.{self._moves}"

    def _leave(self, act: Act) -> None:
        number = self._spare(act.who[0])
        node = self._node(number)
        if node is None or node.leaving or node.frozen or self._living() <= LIVING_MIN:
            return
        # Who hears of it only while it leaves may be the last it told that it is there.
        witnesses = [other for other in self._witnesses() if _knows(other, node)]
        node.command(Leave())
        if act.kind is Kind.REJOIN:
            self.net.push(min(self.net.now + 4 * S + act.length_ns, CHAOS_TO_NS), self.start, number)
        if self.plan.severity is not Severity.HARSH:
            self.net.after(LEFT_BY_NS, self._is_given_up, node, witnesses, Standing.LEFT)

    def _clone(self, act: Act) -> None:
        number = self._spare(act.who[0])
        if self._node(number) is not None:
            self.start(number, host=self._new_host())

    def _fenced(self, node: SimNode, emit: object) -> None:
        """A worker that is fenced stops; its process ends."""
        if getattr(emit, "kind", "") == "fenced" and node.alive:
            self.net.after(S, self._end, node)

    def _end(self, node: SimNode) -> None:
        if node.alive:
            self.net.kill(node)

    def _small_mtu(self, act: Act) -> None:
        self.net.network.mtu = 800 + int(act.amount * 480)

    def _freeze(self, act: Act) -> None:
        node = self._node(act.who[0])
        if node is not None:
            node.freeze(act.length_ns)

    def _slow(self, act: Act) -> None:
        node = self._node(act.who[0])
        if node is not None:
            node.lag_ns = int(30 * MS + act.amount * 600 * MS)

    def _send_errors(self, act: Act) -> None:
        host = self._address(act.who[0]).host
        self.net.network.send_errors.add(host)
        self.net.after(act.length_ns, self.net.network.send_errors.discard, host)

    # -- attackers ---------------------------------------------------------------------------------------

    def _stranger(self, act: Act) -> None:
        """A node of another cluster that has us as its seeds."""
        if self.sealing is None:
            return
        name = "key" if act.kind is Kind.STRANGE_KEY else "label"
        spec = Spec(
            name=f"strange-{name}", host=f"10.7.0.{len(name)}", seeds=self._seeds(99), realm=f"strange {name}"
        )
        self.net.start(spec, seal=self.sealing.strange(name))

    def _attack(self, act: Act) -> None:
        """Where packets are sealed, what was tampered with goes to everybody and has to be refused. Without a
        seal a flipped bit may make a lie of a member: it goes to a core that nobody hears."""
        if act.kind is Kind.JUNK and self.sealing is None and CANARY not in self.net.nodes:
            self.net.dark.add(HOSTILE.host)
            self.net.start(Spec(name=CANARY, host=HOSTILE.host))
        self.net.after(ATTACK_EVERY_NS, self._strike, act)

    def _strike(self, act: Act) -> None:
        captured = self.net.captured
        if captured and self.net.now < act.at_ns + act.length_ns:
            source, to, data = captured[self.rng.randrange(len(captured))]
            if act.kind is Kind.REPLAYS:
                self.net.network.happened["replayed"] += 1
                self.net.push(self.net.now, self.net.arrive, source, to, data)
            elif self.sealing is None and self.rng.random() < 0.3:
                self._ping_as_a_stranger(to)
            else:
                self.net.network.happened["tampered"] += 1
                target = to if self.sealing is not None else HOSTILE
                source = source if self.rng.random() < 0.5 else HOSTILE
                self.net.push(self.net.now, self.net.arrive, source, target, tampered(data, self.rng))
        if self.net.now < act.at_ns + act.length_ns:
            self.net.after(self.net.chance(2 * ATTACK_EVERY_NS), self._strike, act)

    def _ping_as_a_stranger(self, to: Address) -> None:
        """Well-formed, in the hope of an answer that is larger than the question."""
        node = self.net.running.get(to)
        if node is not None and node.name.startswith("w"):
            self.net.network.happened["ping of a stranger"] += 1
            packet = Packet(PROTOCOL, NodeRef("nobody", 1), 0, Ping(self.rng.randrange(1_000), node.me))
            self.net.push(self.net.now, self.net.arrive, HOSTILE, to, msgpack.encode(packet))

    def _lies(self, act: Act) -> None:
        """A member tells what is not so: a living one is suspected, dead, or has left; or lives nowhere."""
        liar = self._node(act.who[0])
        if liar is None or self.net.now >= act.at_ns + act.length_ns:
            return
        others = [node for node in self.net.living if node.name.startswith("w") and node is not liar]
        if len(others) > 1:
            victim, hearer = self.rng.sample(others, 2)
            self._tell_lie(liar, hearer, victim)
            self._tell_lie(liar, victim, victim)
        self.net.after(S // 2 + self.net.chance(4 * S), self._lies, act)

    def _tell_lie(self, liar: SimNode, hearer: SimNode, victim: SimNode) -> None:
        standing = self.rng.choice((Standing.SUSPECT, Standing.DEAD, Standing.LEFT, Standing.ALIVE))
        held = next(
            (view.record for view in liar.core.members(liar.now) if view.record.ref == victim.me), None
        )
        if held is None:
            return
        host = "0.0.0.0" if standing is Standing.ALIVE else victim.address.host
        raised = 5 if standing is Standing.ALIVE else 0  # of no use: nobody can live at that address
        lie = Record(
            victim.name,
            victim.me.epoch,
            held.incarnation + raised,
            int(standing),
            host,
            PORT,
            0,
            "" if raised else liar.name,
        )
        packet = Packet(PROTOCOL, liar.me, _incarnation(liar), Gossip(), [lie])
        data = msgpack.encode(packet)
        self.net.network.happened["lie"] += 1
        self.net.arrive(liar.address, hearer.address, data if liar.seal is None else liar.seal.seal(data))

    # -- the end -----------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Every fault is over; who sleeps wakes up."""
        self.net.told("plan", "heals", "")
        self.net.network.heal()
        for node in self.net.living:
            node.lag_ns = 0
        self._tell_names(self.net.now)


def _knows(node: SimNode, other: SimNode) -> bool:
    return any(view.record.ref == other.me for view in node.core.members(node.now))


def _incarnation(node: SimNode) -> int:
    own = [view.record for view in node.core.members(node.now) if view.record.worker_id == node.name]
    return own[0].incarnation if own else 0


def tampered(data: bytes, rng: Random) -> bytes:
    """What an attacker without a key can make of a datagram."""
    changed = bytearray(data)
    match rng.randrange(5):
        case 0:
            return bytes(changed[: rng.randrange(len(changed) + 1)])
        case 1:
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        case 2:
            return rng.randbytes(rng.randrange(1_400))
        case 3:
            changed[rng.randrange(len(changed))] = rng.choice((0xDD, 0xDF, 0xC6, 0xDB, 0xC1, 0xFF))
        case _:
            cut = rng.randrange(len(changed))
            return bytes(changed[:cut] + changed[cut:] * rng.randint(2, 5))[:1_400]
    return bytes(changed)
