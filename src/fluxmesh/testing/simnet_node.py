"""One node of a simulated mesh: a real core in a model of the shell and of the machine around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

from fluxmesh.mesh.effects import (
    Arm,
    Call,
    Command,
    Core,
    Disarm,
    Effect,
    Emit,
    Join,
    Leave,
    Reply,
    Resolve,
    Send,
    Take,
    Timer,
    Took,
    UpdateLoad,
)
from fluxmesh.mesh.messages import Address, Flag, Load, Meta, NodeRef
from fluxmesh.mesh.timing import SEAL_BYTES, Timing
from fluxmesh.testing.simnet_network import LocalClock

if TYPE_CHECKING:
    from fluxmesh.testing.simnet import Simnet

BACKLOG_MAX: Final = 2_000  # what a socket keeps for a process that does not read
EPHEMERAL: Final = 40_000


class MakeCore(Protocol):
    """How a core is made; `fluxmesh.mesh.swim.Swim` is the one that is meant."""

    def __call__(
        self,
        *,
        me: NodeRef,
        address: Address,
        meta: Meta,
        timing: Timing,
        seeds: tuple[str, ...],
        rng: Random,
    ) -> Core: ...


class Seal(Protocol):
    """What is around every datagram of a node. `open` answers None for what it refuses."""

    def seal(self, data: bytes) -> bytes: ...
    def open(self, data: bytes, now_ns: int) -> bytes | None: ...


class Spec(Struct, frozen=True, kw_only=True):
    """How a node is started. `realm` is its key and label: calls reach only nodes of the same realm."""

    name: str
    host: str
    port: int = 7946
    seeds: tuple[str, ...] = ()
    meta: Meta = Meta(queues=("default",), tiers=(0, 1, 2, 3), capacity=8, version="sim")
    realm: str = ""
    ppm: int = 0

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


class SimNode:
    """A process with one core: its timers, its socket's backlog, its calls, its own monotonic clock.

    It can be frozen (nothing runs, the socket fills up) and killed; a restart is another SimNode.
    """

    def __init__(self, net: Simnet, spec: Spec, *, epoch: int, core: Core, seal: Seal | None) -> None:
        self.net = net
        self.spec = spec
        self.name = spec.name
        self.address = spec.address
        self.me = NodeRef(spec.name, epoch)
        self.core = core
        self.seal = seal
        self.clock = LocalClock(base_ns=1_000_000_000 * (1 + epoch) + len(spec.name), ppm=spec.ppm)
        self.lag_ns = 0  # a slow machine: everything happens up to this much later
        self.alive = True
        self.leaving = False
        self.gone = False  # its leave is complete
        self.fenced = False
        self.packets = 0
        self.sent_bytes = 0
        self.frames = 0
        self.slept_ns = 0  # of its own clock, in which it did not run
        self.on_take: Callable[[Take], None] | None = None  # who carries out what the core has found
        self._armed: dict[Timer, tuple[int, int]] = {}  # when, by its own clock, and in which order
        self._armings = 0
        self._frozen_until = 0
        self._backlog: deque[Callable[[], None]] = deque()
        self._calls: dict[int, Address] = {}
        self._inbound: dict[int, tuple[SimNode, int]] = {}
        self._inbound_count = 0

    @property
    def now(self) -> int:
        return self.clock.read(self.net.now)

    @property
    def frozen(self) -> bool:
        return self._frozen_until > self.net.now

    @property
    def frozen_until(self) -> int:
        """The true instant at which it goes on."""
        return self._frozen_until

    # -- what comes in -----------------------------------------------------------------------------------

    def command(self, command: Command) -> None:
        if isinstance(command, Leave):
            self.leaving = True
        self._run("command", command, self.core.command(command, self.now))

    def join(self) -> None:
        self.command(Join())

    def publish(self, *, queued: int, running: int, flags: Flag = Flag.READY) -> None:
        """A new load, as the worker's loop tells it."""
        if not self.alive:
            return
        if self.frozen:
            self._keep(lambda: self.publish(queued=queued, running=running, flags=flags))
            return
        load = Load(
            "", 0, 0, queued, running, self.spec.meta.capacity, max(0, queued - 2), 2, 1_000, int(flags)
        )
        self._run("command", None, self.core.command(UpdateLoad(load), self.now))

    def receive(self, source: Address, data: bytes) -> None:
        """A datagram has arrived at the socket."""
        if self._frozen_until > self.net.now:
            self._keep(lambda: self._handle(source, data))
        elif self.lag_ns:
            self.net.push(self.net.now + self.net.chance(self.lag_ns), self._handle, source, data)
        else:
            self._handle(source, data)

    def _handle(self, source: Address, data: bytes) -> None:
        if not self.alive:
            return
        now = self.clock.read(self.net.now)
        if self.seal is not None:
            opened = self.seal.open(data, now)
            if opened is None:
                self.net.network.happened["unsealed"] += 1
                return
            data = opened
        self.net.watch.received(self, source, data)
        self._run("packet", source, self.core.on_packet(source, data, now))

    def take_call(self, caller: SimNode, call: int, frame: bytes) -> None:
        if self.frozen:
            self._keep(lambda: self.take_call(caller, call, frame))
            return
        if not self.alive:
            return
        self._inbound_count += 1
        number = self._inbound_count
        self._inbound[number] = (caller, call)
        source = Address(caller.address.host, EPHEMERAL + number % 20_000)
        self.net.watch.asked(self, caller, frame)
        self._run("call", caller.name, self.core.on_call(number, source, frame, self.now))

    def answered(self, call: int, frame: bytes | None) -> None:
        """A call of ours is over. Only the first end counts."""
        if not self.alive or call not in self._calls:
            return
        if self.frozen:
            self._keep(lambda: self.answered(call, frame))
            return
        del self._calls[call]
        if frame is not None:
            self.net.watch.answered(self, frame)
        self._run("reply", call, self.core.on_reply(call, frame, self.now))

    def resolved(self, addresses: dict[str, list[Address]]) -> None:
        if self.frozen:
            self._keep(lambda: self.resolved(addresses))
        elif self.alive:
            self._run("resolved", addresses, self.core.on_resolved(addresses, self.now))

    def send_failed(self, to: Address) -> None:
        if self.alive:
            self._run("failed", to, self.core.on_send_failed(to, self.now))

    def _timer(self, timer: Timer, at: int, order: int) -> None:
        if self._armed.get(timer) != (at, order) or not self.alive or self._frozen_until > self.net.now:
            return
        now = self.clock.read(self.net.now)
        if now - at > self.net.timing.period_ns // 2:
            self._catch_up()
            return
        del self._armed[timer]
        self._run("timer", timer, self.core.on_timer(timer, now))

    # -- pauses ------------------------------------------------------------------------------------------

    def freeze(self, length_ns: int) -> None:
        """Nothing of it runs for so long: stopped by a signal, or its loop stands."""
        if self.alive:
            self._frozen_until = max(self._frozen_until, self.net.now + length_ns)
            self.net.push(self._frozen_until, self._thaw)

    def jump(self, ahead_ns: int) -> None:
        """Its monotonic clock jumps ahead, as after a pause of the whole machine."""
        self.clock.jump(self.net.now, ahead_ns=ahead_ns)
        for timer, (at, order) in self._armed.items():
            self.net.push(max(self.net.now, self.clock.true(at)), self._timer, timer, at, order)

    def set_rate(self, ppm: int) -> None:
        self.clock.set_rate(self.net.now, ppm=ppm)
        for timer, (at, order) in self._armed.items():
            self.net.push(max(self.net.now, self.clock.true(at)), self._timer, timer, at, order)

    def _keep(self, thing: Callable[[], None]) -> None:
        if len(self._backlog) < BACKLOG_MAX:
            self._backlog.append(thing)
        else:
            self.net.network.happened["backlog full"] += 1

    def _thaw(self) -> None:
        if self.alive and not self.frozen:
            self._catch_up()

    def _catch_up(self) -> None:
        """As the shell does it: read the socket empty, tell the core how late it is, then the timers that are
        still due."""
        now = self.now
        due = [at for at, _order in self._armed.values() if at <= now]
        late = now - min(due) if due else 0
        for _ in range(len(self._backlog)):
            self._backlog.popleft()()
        if late > self.net.timing.period_ns // 2:
            self.slept_ns += late
            self._run("stall", late, self.core.on_stall(late, now))
        for at, order, timer in sorted(
            (at, order, timer) for timer, (at, order) in self._armed.items() if at <= now
        ):
            if self._armed.get(timer) == (at, order) and self.alive:
                del self._armed[timer]
                self._run("timer", timer, self.core.on_timer(timer, now))

    def stop(self) -> None:
        """The process is no more. Who waits for an answer of it sees its connection end."""
        self.alive = False
        self.net.remove(self)
        for caller, call in self._inbound.values():
            self.net.stream_ends(self, caller, call)
        self._armed.clear()
        self._backlog.clear()
        self._inbound.clear()
        self._calls.clear()

    # -- what goes out -----------------------------------------------------------------------------------

    def _run(self, cause: str, detail: object, effects: list[Effect]) -> None:
        net = self.net
        net.watch.handled(self, cause, detail, effects)
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                self._send(effect)  # type: ignore[arg-type]
            elif kind is Arm:
                self._arm(effect)  # type: ignore[arg-type]
            elif isinstance(effect, Disarm):
                self._armed.pop(effect.timer, None)
            elif isinstance(effect, Call):
                self._call(effect)
            elif isinstance(effect, Reply):
                self._reply(effect)
            elif isinstance(effect, Emit):
                net.emitted(self, effect)
            elif isinstance(effect, Resolve):
                found = {seed: net.names.resolve(seed, net.now) for seed in effect.seeds}
                net.push(net.now + net.names.takes(), self.resolved, found)
            elif isinstance(effect, Take):
                self._take(effect)

    def _take(self, effect: Take) -> None:
        if self.on_take is not None:
            self.on_take(effect)
        else:
            self.command(Took(effect.peer, effect.jobs, ()))

    def _send(self, effect: Send) -> None:
        net = self.net
        net.watch.sends(self, effect)
        data = effect.data
        size = len(data) + SEAL_BYTES
        self.packets += 1
        self.sent_bytes += size
        host = self.address.host
        network = net.network
        if host in network.send_errors or effect.to.host in network.unreachable:
            network.happened["send error"] += 1
            net.push(net.now, self.send_failed, effect.to)
            return
        if host in net.dark:
            return
        if self.seal is not None:
            data = self.seal.seal(data)
        if net.captured is not None:
            net.captured.append((self.address, effect.to, data))
        for delay in network.datagram(host, effect.to.host, size):
            net.push(net.now + delay, net.arrive, self.address, effect.to, data)

    def _arm(self, effect: Arm) -> None:
        self._armings += 1
        at = effect.at_ns
        self._armed[effect.timer] = (at, self._armings)
        when = max(self.net.now, self.clock.true(at))
        if self.lag_ns:
            when += self.net.chance(self.lag_ns)
        self.net.push(when, self._timer, effect.timer, at, self._armings)

    def _call(self, effect: Call) -> None:
        net = self.net
        net.watch.calls(self, effect)
        self.frames += 1
        self._calls[effect.call] = effect.to
        net.push(self.clock.true(self.now + effect.timeout_ns), self.answered, effect.call, None)
        if self.address.host not in net.dark:
            net.connect(self, effect.call, effect.to, effect.frame)

    def _reply(self, effect: Reply) -> None:
        waiting = self._inbound.pop(effect.call, None)
        if waiting is None:
            return
        self.frames += 1
        caller, call = waiting
        self.net.watch.replies(self, effect)
        self.net.answer(self, caller, call, effect.frame)

    @property
    def armed(self) -> int:
        return len(self._armed)

    @property
    def calls_open(self) -> int:
        return len(self._calls)

    def waits_for(self, call: int) -> bool:
        """Whether this call of ours is still to be answered."""
        return call in self._calls
