"""A mesh in virtual time: one event heap, real cores, a model of everything around them.

Nothing here sleeps, reads a clock or draws chance of its own: a run is a function of its seed.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Final, Protocol

from fluxmesh.mesh.effects import Call, Effect, Emit, Reply, Send
from fluxmesh.mesh.messages import Address, NodeRef
from fluxmesh.mesh.swim import Swim
from fluxmesh.mesh.timing import Timing
from fluxmesh.testing.simnet_network import LAN, Link, Names, Network
from fluxmesh.testing.simnet_node import MakeCore, Seal, SimNode, Spec
from fluxmesh.testing.simnet_trace import Trace, Violation

SAME_INSTANT_MAX: Final = 100_000  # events without time going on: somebody goes round in circles


class Watch(Protocol):
    """Who looks on. Called before the effects of an input are carried out; may raise a Violation."""

    def started(self, node: SimNode) -> None: ...
    def stopped(self, node: SimNode) -> None: ...
    def received(self, node: SimNode, source: Address, data: bytes) -> None: ...
    def asked(self, node: SimNode, caller: SimNode, frame: bytes) -> None: ...
    def answered(self, node: SimNode, frame: bytes) -> None: ...
    def handled(self, node: SimNode, cause: str, detail: object, effects: list[Effect]) -> None: ...
    def sends(self, node: SimNode, effect: Send) -> None: ...
    def calls(self, node: SimNode, effect: Call) -> None: ...
    def replies(self, node: SimNode, effect: Reply) -> None: ...


class NobodyWatches:
    """For measurements: no rule is checked."""

    def started(self, node: SimNode) -> None: ...
    def stopped(self, node: SimNode) -> None: ...
    def received(self, node: SimNode, source: Address, data: bytes) -> None: ...
    def asked(self, node: SimNode, caller: SimNode, frame: bytes) -> None: ...
    def answered(self, node: SimNode, frame: bytes) -> None: ...
    def handled(self, node: SimNode, cause: str, detail: object, effects: list[Effect]) -> None: ...
    def sends(self, node: SimNode, effect: Send) -> None: ...
    def calls(self, node: SimNode, effect: Call) -> None: ...
    def replies(self, node: SimNode, effect: Reply) -> None: ...


OnEmit = Callable[[SimNode, Emit], None]
# How a frame of a call is meddled with: from, to, the frame; the delays beyond the usual one after which it
# arrives. None of them: it is lost. None at all: the connection is reset.
Meddle = Callable[[SimNode, Address, bytes], tuple[int, ...] | None]


class Simnet:
    """The world: `now` is true time in nanoseconds. Add nodes, push actions, run.

    `epochs` is the model of the storage: every start of a worker id takes the next one.
    """

    def __init__(
        self,
        *,
        seed: int,
        link: Link = LAN,
        timing: Timing | None = None,
        make_core: MakeCore = Swim,
        watch: Watch | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.seed = seed
        self.timing = timing if timing is not None else Timing()
        self.rng = Random(f"network of {seed}")
        self.network = Network(link=link, rng=self.rng)
        self.names = Names(rng=self.rng)
        self.watch: Watch = watch if watch is not None else NobodyWatches()
        self.trace = trace
        self.make_core = make_core
        self.now = 0
        self.steps = 0
        self.epochs: Counter[str] = Counter()
        self.nodes: dict[str, SimNode] = {}  # the newest run of every id
        self.running: dict[Address, SimNode] = {}
        self.up: set[str] = set()  # hosts that answer for a port where nobody listens
        self.dark: set[str] = set()  # hosts of which nothing is ever heard
        self.on_emit: list[OnEmit] = []
        self.captured: deque[tuple[Address, Address, bytes]] | None = None  # what an attacker has overheard
        self.emits: Counter[str] = Counter()
        self.meddle: Meddle | None = None
        self._heap: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = 0
        self._acting = ""

    # -- time --------------------------------------------------------------------------------------------

    def push(self, when_ns: int, action: Callable[..., object], *args: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (when_ns, self._sequence, action, args))

    def after(self, delay_ns: int, action: Callable[..., object], *args: Any) -> None:
        self.push(self.now + delay_ns, action, *args)

    def chance(self, below_ns: int) -> int:
        return int(self.rng.random() * below_ns)

    def run(
        self, until_ns: int, *, done: Callable[[], bool] | None = None, look_ns: int = 250_000_000
    ) -> bool:
        """Goes on to that instant, or until `done` says so, asked every `look_ns`. Answers whether it did."""
        heap = self._heap
        look = self.now if done is not None else until_ns + 1
        same = 0
        while heap and heap[0][0] <= until_ns:
            when, _, action, args = heappop(heap)
            if when >= look and done is not None:
                self.now = max(self.now, look)
                look += look_ns * (1 + (when - look) // look_ns)
                if done():
                    heappush(heap, (when, _, action, args))
                    return True
            same = same + 1 if when <= self.now else 0
            if same > SAME_INSTANT_MAX:
                raise Violation("circles", f"{same} events without time going on")
            if when > self.now:
                self.now = when
            self.steps += 1
            try:
                action(*args)
            except Violation:
                raise
            except Exception as error:
                names = tuple(one.name for one in (_owner(action), *args) if isinstance(one, SimNode))
                raise Violation("raised", f"{', '.join(names)}: {_where(error)}", about=names) from error
        self.now = until_ns
        return done is not None and done()

    # -- nodes -------------------------------------------------------------------------------------------

    def start(self, spec: Spec, *, seal: Seal | None = None, make_core: MakeCore | None = None) -> SimNode:
        """A process of that id starts, registers with the storage and joins."""
        self.epochs[spec.name] += 1
        epoch = self.epochs[spec.name]
        core = (make_core or self.make_core)(
            me=NodeRef(spec.name, epoch),
            address=spec.address,
            meta=spec.meta,
            timing=self.timing,
            seeds=spec.seeds,
            rng=Random(f"{self.seed} {spec.name} {epoch}"),
        )
        node = SimNode(self, spec, epoch=epoch, core=core, seal=seal)
        self.nodes[spec.name] = node
        self.running[spec.address] = node
        self.up.add(spec.host)
        self.watch.started(node)
        self.told(node.name, "start", f"epoch {epoch} at {spec.host}")
        node.join()
        return node

    def kill(self, node: SimNode, *, host_too: bool = False) -> None:
        """No goodbye. With `host_too` nothing answers there any more, else the kernel refuses connections."""
        if host_too:
            self.up.discard(node.address.host)
        self.told(node.name, "killed", f"epoch {node.me.epoch}")
        node.stop()

    def remove(self, node: SimNode) -> None:
        if self.running.get(node.address) is node:
            del self.running[node.address]
        self.watch.stopped(node)

    @property
    def living(self) -> list[SimNode]:
        return [node for node in self.running.values() if node.alive]

    # -- what nodes send ---------------------------------------------------------------------------------

    def arrive(self, source: Address, to: Address, data: bytes) -> None:
        node = self.running.get(to)
        if node is not None:
            node.receive(source, data)

    def connect(self, caller: SimNode, call: int, to: Address, frame: bytes) -> None:
        takes = self.network.segments(caller.address.host, to.host, count=3)
        if takes is None:
            return
        extra = (0,) if self.meddle is None else self.meddle(caller, to, frame)
        if extra is None or self.network.is_reset():
            self.after(takes, caller.answered, call, None)
            return
        for more in extra:
            self.after(takes + more, self._connected, caller, call, to, frame)

    def _connected(self, caller: SimNode, call: int, to: Address, frame: bytes) -> None:
        target = self.running.get(to)
        if target is not None and target.spec.realm == caller.spec.realm:
            target.take_call(caller, call, frame)
        elif target is not None or to.host in self.up:
            caller.answered(call, None)  # refused

    def answer(self, node: SimNode, caller: SimNode, call: int, frame: bytes | None) -> None:
        takes = self.network.segments(node.address.host, caller.address.host, count=1)
        if takes is None:
            return
        extra = (0,) if self.meddle is None or frame is None else self.meddle(node, caller.address, frame)
        if extra is None or self.network.is_reset():
            self.after(takes, caller.answered, call, None)
            return
        for more in extra:
            self.after(takes + more, caller.answered, call, frame)

    def stream_ends(self, node: SimNode, caller: SimNode, call: int) -> None:
        if node.address.host in self.up:
            takes = self.network.segments(node.address.host, caller.address.host, count=1)
            if takes is not None:
                self.after(takes, caller.answered, call, None)

    def emitted(self, node: SimNode, emit: Emit) -> None:
        self.emits[emit.kind] += 1
        if self.trace is not None:
            about = emit.record
            text = "" if about is None else f"{about.worker_id}.{about.epoch}/{about.incarnation}"
            by = f" by {about.accuser}" if about is not None and about.accuser else ""
            self.trace.event(self.now, node.name, emit.kind, f"{text}{by} {emit.text}")
        for hear in self.on_emit:
            hear(node, emit)
        if emit.kind == "gone":
            node.gone = True
            self.push(self.now, node.stop)
        elif emit.kind == "fenced":
            node.fenced = True

    def told(self, who: str, what: str, detail: object) -> None:
        if self.trace is not None:
            self.trace.event(self.now, who, what, detail)


def _owner(action: Callable[..., object]) -> object:
    return getattr(action, "__self__", None)


def _where(error: Exception) -> str:
    """The error and the innermost lines that it came from."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return f"{error!r} in " + " < ".join(
        f"{f.name} ({f.filename.rpartition('/')[2]}:{f.lineno})" for f in frames[::-1]
    )
