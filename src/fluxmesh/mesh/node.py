"""A worker's node in the mesh: the shell around the core, on a thread of its own.

The worker and its node talk over two bounded ways. To the node: the load as it is now, of several the last
counts. From it: an immutable snapshot of the members, which any thread may read, and few calls (`on_fenced`),
which whoever made the node carries to its own loop.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable
from typing import Any, Final

from fluxmesh.clock import system_clock
from fluxmesh.errors import FluxMeshError
from fluxmesh.mesh.carrier import Carrier
from fluxmesh.mesh.delays import Weather
from fluxmesh.mesh.effects import Emit, Join, MemberView, UpdateLoad
from fluxmesh.mesh.messages import Address, Flag, Load, Meta, NodeRef, Record
from fluxmesh.mesh.names import Lookup, Names, look_up
from fluxmesh.mesh.options import DEFAULT_PORT, MeshWorker
from fluxmesh.mesh.ports import Ports
from fluxmesh.mesh.seal import SALT_BYTES
from fluxmesh.mesh.swim import Swim
from fluxmesh.mesh.thread import LoopThread
from fluxmesh.mesh.told import Bounded, Tell
from fluxmesh.mesh.view import (
    NodeReport,
    Roster,
    Snapshot,
    encode_report,
    essence,
    is_worth_telling,
    member_report,
)

START_S: Final = 10.0
LOOK_S: Final = 1.0  # so often the members are looked at anew, for loads and readiness
LOOK_SOON_S: Final = 0.02  # after an event
LEAVE_SLACK_S: Final = 1.0  # beyond what a leave takes by itself
CLOSE_S: Final = 2.0
REPORT_EVERY_S: Final = 3.0
REPORT_LOADS_S: Final = 15.0  # if nothing but numbers of jobs has changed
REPORT_AGAIN_S: Final = (
    60.0  # an unchanged report is repeated: storage may have lost it with the worker's row
)
REPORT_MEMBERS: Final = 50  # of more members reports are rarer in proportion: all send one of that size
_NOTHING: Final = Snapshot(0, (), (), frozenset(), {}, 0)

# Event of the core -> level, words of the log.
_TOLD: Final[dict[str, tuple[str, str]]] = {
    "joined": ("info", "mesh joined"),
    "discovered": ("info", "peer discovered"),
    "restarted": ("info", "peer restarted"),
    "suspected": ("warning", "member suspected"),
    "refuted": ("info", "member refuted"),
    "dead": ("warning", "member dead"),
    "left": ("info", "member left"),
    "accused": ("warning", "accused by a peer"),
    "probe_resolved": ("warning", "probe resolved"),
    "seed_failed": ("warning", "seed not reached"),
    "seed_reached": ("info", "seed reached"),
    "forgotten": ("debug", "member forgotten"),
    "meta": ("debug", "member described itself"),
    "surge": ("debug", "peer has surplus"),
}
# No reason to look anew at once:
_QUIET: Final = frozenset({"meta", "surge", "forgotten", "probe_resolved", "seed_failed", "seed_reached"})


class MeshNode:
    """One node. `start` once, `leave` as often as you like, everything else at any time and from any thread.

    `ports` are bound already and belong to the node from `start` on. `on_fenced` is called on the node's
    thread when somebody says that a run of this id with a higher epoch is there, with that claim: the node
    then ends by itself, whoever was right, and knows no members any more. `on_event` hears of every event
    there, and must be quick.
    """

    def __init__(
        self,
        options: MeshWorker,
        *,
        ports: Ports,
        address: Address,
        worker_id: str,
        epoch: int,
        meta: Meta,
        label: str,
        tell: Tell,
        on_fenced: Callable[[Record], None] = lambda _: None,
        on_event: Callable[[Emit], None] | None = None,
        lookup: Lookup = look_up,
        weather: Weather | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._options = options
        self._timing = options.timing()
        self._ports = ports
        self._address = address
        self._me = NodeRef(worker_id, epoch)
        self._meta = meta
        self._label = label
        self._lines = Bounded(tell, system_clock().mono_s)
        self._tell = self._lines.tell
        self._on_fenced = on_fenced
        self._listener = on_event
        self._lookup = lookup
        self._weather = weather
        self._rng = rng or random.Random(int.from_bytes(os.urandom(16), "big"))
        self._wall_zero_s: float = 0.0
        self._thread = LoopThread(f"{worker_id}-mesh", self._main, failed=self._thread_failed)
        self._lock = threading.Lock()
        self._started = False
        self._ended = False
        self._silenced = False
        self._load = Load(worker_id, epoch, 0, capacity=meta.capacity)
        self._posted = False
        self._published = False
        self._roster = Roster(self._me, meta)
        self._snapshot = _NOTHING
        self._is_fenced = False
        self._core_counts: dict[str, int] = {}
        self._report_sent: bytes | None = None
        self._report_told: NodeReport | None = None
        self._report_pending: NodeReport | None = None
        self._report_at_s = 0.0
        # On the node's thread:
        self._carrier: Carrier | None = None
        self._core: Swim | None = None
        self._gone = asyncio.Event()  # it belongs to the loop that first waits for it
        self._leaving = False
        self._flags_seen = 0
        self._look: asyncio.TimerHandle | None = None

    # -- life ----------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Listen, then look for the seeds. Returns when that has begun; raises what hinders it. A second call
        does nothing."""
        with self._lock:
            if self._started or self._ended:
                return
            self._started = True
        try:
            self._thread.start(START_S)
        except TimeoutError:
            self.close_after(0.0)
            raise FluxMeshError(
                f"the node of the mesh did not start within {START_S:g} s", hint="is this machine overloaded?"
            ) from None
        except Exception as error:
            self._ports.close()
            if isinstance(error, FluxMeshError):
                raise
            raise FluxMeshError(
                f"the node of the mesh did not start: {str(error) or type(error).__name__}",
                hint="it needs one thread and three open files more: look at `ulimit -n` and `ulimit -u`,"
                " or start with mesh_optional",
            ) from error

    def leave(self) -> None:
        """Say goodbye, wait until it has spread (at most 2 s, and answer for 1 s more), close everything.
        Idempotent, also while another call is at it, and after the node ended by itself."""
        self.begin_leave()
        self.close_after((self._timing.leave_ns + self._timing.linger_ns) / 1e9 + LEAVE_SLACK_S)

    def begin_leave(self) -> None:
        """The same, without waiting: the node goes on answering until it has left."""
        with self._lock:
            started, self._ended = self._started, True
        if not started:
            self._ports.close()
        else:
            self._thread.post(self._begin_leave)

    def close_after(self, patience_s: float) -> None:
        """Return when the node has left and is closed; when the time is up it is closed as it is."""
        with self._lock:
            started, self._ended = self._started, True
        if not started:
            self._ports.close()
        elif not self._thread.join(patience_s):
            self._silenced = True  # for a thread that is only starting, and hears nothing yet
            self._thread.post(self._abandon)
            self._thread.join(CLOSE_S)

    def close_now(self) -> None:
        """Silence without a goodbye: for one who is to look like dead."""
        self.close_after(0.0)

    @property
    def me(self) -> NodeRef:
        return self._me

    @property
    def address(self) -> Address:
        """Where others reach it."""
        return self._address

    @property
    def running(self) -> bool:
        return self._started and not self._thread.over

    # -- what the worker tells -----------------------------------------------------------------------------
    def publish(self, *, queued: int, running: int, flags: Flag) -> None:
        """The load as it is now. Never waits; of several the last counts."""
        load = Load(
            self._me.worker_id,
            self._me.epoch,
            0,
            queued=queued,
            running=running,
            capacity=self._meta.capacity,
            flags=int(flags),
        )
        with self._lock:
            if load == self._load:
                return
            self._load = load
            self._published = True
            if self._posted:
                return
            self._posted = True
        if not self._thread.post(self._take_load):
            self._posted = False

    # -- what it knows -------------------------------------------------------------------------------------
    def members(self) -> tuple[MemberView, ...]:
        """The others as this node saw them when it last looked, a second ago at most."""
        return self._snapshot.members

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def preferred_worker(self, key: str, *, queue: str | None = None) -> str | None:
        """Who owns a key on the ring of a queue (default: the worker's first). None: nobody is on it."""
        ring = self._snapshot.rings.get(self._meta.queues[0] if queue is None else queue)
        return None if ring is None else ring.owner(key)

    def is_affinity_owner(self, key: str, *, queue: str | None = None) -> bool:
        """Whether that is this worker."""
        return self.preferred_worker(key, queue=queue) == self._me.worker_id

    def cluster_info(self) -> dict[str, Any]:
        """Peers that live, or may, and this worker with them: capacity and load of all. `local_buffer_len`
        and `adaptive_prefetch` are what is held here, and what one claim may hold beyond its free slots."""
        peers = list(self._snapshot.peers())
        loads = [view.load for view in peers if view.load is not None] + [self._load]
        return {
            "worker_id": self._me.worker_id,
            "epoch": self._me.epoch,
            "address": f"{self._address.host}:{self._address.port}",
            "peer_count": len(peers),
            "total_capacity": sum(view.meta.capacity for view in peers if view.meta) + self._meta.capacity,
            "total_load": sum(load.running + load.queued for load in loads),
            "total_buffered": sum(load.queued for load in loads),
            "local_buffer_len": self._load.queued,
            "adaptive_prefetch": 0,
            "ring_members": sorted(self._snapshot.in_ring),
        }

    def metrics(self) -> dict[str, int]:
        """Counters since the start: buffer and stealing (nothing is held or stolen yet), the ring, events by
        kind, the protocol, the wire."""
        counts = {
            "prefetch_count": 0,
            "prefetch_jobs": 0,
            "local_pops": 0,
            "steals_initiated": 0,
            "steals_succeeded": 0,
            "jobs_stolen_in": 0,
            "jobs_stolen_out": 0,
            "ring_recalculations": self._snapshot.ring_recalculations,
            "receive_buffer_bytes": self._ports.receive_buffer_bytes,
        }
        return {**counts, **self._core_counts}

    def report(self, now_s: float) -> bytes | None:
        """What the next beat shall tell storage of the mesh; None: nothing new, b"": nothing any more.
        `now_s`: monotonic; both calls by one thread."""
        if not self._started:
            return None
        if self._thread.over:
            return None if self._report_sent in (None, b"") else b""
        snapshot = self._snapshot
        stretch = max(1.0, len(snapshot.members) / REPORT_MEMBERS)
        waited_s = (now_s - self._report_at_s) / stretch
        if self._report_told is not None and waited_s < REPORT_EVERY_S:
            return None
        report = self._full_report(snapshot)
        if self._report_told is not None and waited_s < REPORT_AGAIN_S:
            told = self._report_told
            same = essence(report, loads=False) == essence(told, loads=False)
            if same and (
                waited_s < REPORT_LOADS_S or essence(report, loads=True) == essence(told, loads=True)
            ):
                return None
        self._report_pending = report
        return encode_report(report)

    def reported(self, report: bytes, now_s: float) -> None:
        """Storage has this report."""
        self._report_sent = report
        self._report_told = self._report_pending
        self._report_at_s = now_s

    def _full_report(self, snapshot: Snapshot) -> NodeReport:
        rows = [
            member_report(
                view, in_ring=view.record.worker_id in snapshot.in_ring, wall_zero_s=self._wall_zero_s
            )
            for view in (*snapshot.members, *snapshot.me)
            if is_worth_telling(view, snapshot.taken_ns)
        ]
        rows.sort(key=lambda row: row.worker_id)
        return NodeReport(members_total=len(rows), members=tuple(rows))

    # -- on its own thread -----------------------------------------------------------------------------------
    async def _main(self, ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._step_failed)
        self._wall_zero_s = system_clock().wall_us() / 1e6 - loop.time()
        options = self._options
        core = Swim(
            me=self._me,
            address=self._address,
            meta=self._meta,
            timing=self._timing,
            seeds=options.seeds,
            rng=self._rng,
            steal_threshold=options.steal_threshold,
            steal_batch=options.steal_batch,
        )
        self._core = core
        carrier = Carrier(
            core,
            self._ports,
            envelope=options.envelope(label=self._label, salt=os.urandom(SALT_BYTES)),
            period_ns=self._timing.period_ns,
            default_port=DEFAULT_PORT,
            names=Names(self._lookup),
            rng=self._rng,
            tell=self._tell,
            on_event=self._on_event,
            on_take=lambda _: None,
            weather=self._weather,
        )
        self._carrier = carrier
        try:
            await carrier.start()
            self._tell(
                "info",
                "gossip listening",
                {
                    "bind": self._options.bind_host,
                    "told": f"{self._address.host}:{self._address.port}",
                    "port": self._ports.port,
                    "sealed": bool(options.encryption_key),
                    "receive_buffer_bytes": self._ports.receive_buffer_bytes,
                },
            )
            carrier.command(Join())
            if self._published:
                self._take_load()  # told before there was anybody to hear it
            self._look_now()
            ready()
            if not self._silenced:
                await self._gone.wait()
        finally:
            if self._look is not None:
                self._look.cancel()
            self._core_counts = carrier.counters()
            if self._is_fenced:
                self._snapshot = _NOTHING
            await carrier.close()
            self._lines.end()

    def _begin_leave(self) -> None:
        if self._carrier is not None and not self._leaving:
            self._leaving = True
            self._tell("info", "leave sent", {"peers": len(list(self._snapshot.peers()))})
            self._carrier.leave()

    def _abandon(self) -> None:
        self._gone.set()

    def _take_load(self) -> None:
        with self._lock:
            self._posted = False
            load = self._load
        if self._carrier is not None:
            self._carrier.command(UpdateLoad(load))
            if load.flags != self._flags_seen:
                self._look_soon()

    def _on_event(self, event: Emit) -> None:
        told = _TOLD.get(event.kind)
        if told is not None:
            level, words = told
            if event.seed and event.seed == self._options.sibling_seed:
                level = "debug"  # nobody has named it, and its supervisor watches over it
            self._tell(level, words, _fields_of(event))
        if event.kind == "gone":
            self._gone.set()
        elif event.kind == "fenced" and event.record is not None:
            self._is_fenced = True
            self._gone.set()  # in whose name could it speak now?
            self._tell("warning", "mesh fenced", _fields_of(event))
            self._on_fenced(event.record)
        if self._listener is not None:
            self._listener(event)
        if event.kind not in _QUIET:
            self._look_soon()

    def _look_soon(self) -> None:
        """Not at once: the core is in the middle of an input, and what follows may follow quickly."""
        loop = asyncio.get_running_loop()
        if self._look is None or self._look.when() > loop.time() + LOOK_SOON_S:
            if self._look is not None:
                self._look.cancel()
            self._look = loop.call_later(LOOK_SOON_S, self._look_now)

    def _look_now(self) -> None:
        if self._core is None or self._carrier is None:
            return
        self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_now)
        now_ns = self._carrier.now_ns()
        self._flags_seen = self._load.flags
        self._snapshot = self._roster.look(self._core.members(now_ns), self._flags_seen, now_ns)
        self._core_counts = self._carrier.counters()
        self._carrier.tell_refusals()
        self._lines.look()

    def _step_failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A defect. It is told, and the node goes on with what comes next."""
        error = context.get("exception")
        told = context.get("message") if error is None else f"{type(error).__name__}: {error}"
        self._tell("error", "mesh step failed", {"error": told, "exc_info": error})

    def _thread_failed(self, error: BaseException) -> None:
        self._tell("error", "mesh node failed", {"error": f"{type(error).__name__}: {error}"})


def _fields_of(event: Emit) -> dict[str, object]:
    fields: dict[str, object] = {}
    if event.record is not None:
        record = event.record
        fields = {
            "member": record.worker_id,
            "epoch": record.epoch,
            "address": f"{record.host}:{record.port}",
        }
        if record.accuser:
            fields["by"] = record.accuser
    if event.seed:
        fields["seed"] = event.seed
    if event.text:
        fields["why" if event.kind == "seed_failed" else "how"] = event.text
    if event.again_ns:
        fields["next_try_s"] = round(event.again_ns / 1e9, 1)
    return fields
