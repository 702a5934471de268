"""A worker's node in the mesh: the shell around the core, on a thread of its own.

The worker and its node talk over two bounded ways. To the node: the load and the wish for work as they are
now, of several the last counts, and what became of a `Take`. From it: an immutable snapshot of the members,
which any thread may read, and few calls (`on_fenced`, `on_take`, `on_share`), which whoever made the node
carries to its own loop. Neither waits for the other.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import xxhash

from fluxmesh.clock import system_clock
from fluxmesh.errors import FluxMeshError
from fluxmesh.mesh.carrier import Carrier
from fluxmesh.mesh.delays import Weather
from fluxmesh.mesh.effects import Emit, Join, Seek, Take, Took
from fluxmesh.mesh.inbox import Inbox
from fluxmesh.mesh.messages import TASKS_MAX, Address, Flag, Load, Meta, NodeRef, Offered, Record
from fluxmesh.mesh.names import Lookup, Names, look_up
from fluxmesh.mesh.options import DEFAULT_PORT, MeshWorker
from fluxmesh.mesh.ports import Ports
from fluxmesh.mesh.questions import NOTHING, Questions
from fluxmesh.mesh.reports import Reporter, make_report, told_counters
from fluxmesh.mesh.roster import Roster, Snapshot
from fluxmesh.mesh.seal import SALT_BYTES
from fluxmesh.mesh.shelf import EmptyShelf, Shelf, Store
from fluxmesh.mesh.swim import Swim
from fluxmesh.mesh.thread import LoopThread
from fluxmesh.mesh.told import Bounded, Tell

START_S: Final = 10.0
LOOK_S: Final = 1.0  # so often the members are looked at anew, for loads and readiness
LOOK_SOON_S: Final = 0.02  # after an event
LEAVE_SLACK_S: Final = 1.0  # beyond what a leave takes by itself
CLOSE_S: Final = 2.0
TRY_S: Final = 1.0  # that the public verb `try_steal` waits to learn whether somebody was asked

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
    "stole": ("info", "jobs stolen"),
    "gave": ("info", "jobs given"),
}
# No reason to look anew at once:
_QUIET: Final = frozenset(
    {"meta", "surge", "stole", "gave", "forgotten", "probe_resolved", "seed_failed", "seed_reached"}
)


class MeshNode(Questions):
    """One node. `start` once, `leave` as often as you like, everything else at any time and from any thread.

    `ports` are bound already and belong to the node from `start` on. On the node's thread, and to be quick:
    `on_fenced` is called when somebody says that a run of this id with a higher epoch is there, with that
    claim: the node then ends by itself, whoever was right, and knows no members any more. `on_take` is called
    with jobs of a peer that storage is to transfer to this worker, whose answer is `took`; `on_share` when
    `affinity` has changed; `on_event` hears of every event.

    `shelf` is what others may take; `store` what the public verbs reach of the buffer; `stock_figures` its
    figures, if `store` is not given; `tasks` are the names of what this worker can run.
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
        shelf: Shelf | None = None,
        store: Store | None = None,
        stock_figures: Callable[[], dict[str, int]] | None = None,
        tasks: tuple[str, ...] = (),
        on_take: Callable[[NodeRef, tuple[Offered, ...]], None] | None = None,
        on_share: Callable[[], None] = lambda: None,
        lookup: Lookup = look_up,
        weather: Weather | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(
            me=NodeRef(worker_id, epoch),
            meta=meta,
            address=address,
            inbox=Inbox(Load(worker_id, epoch, 0, capacity=meta.capacity), self._post_told),
            receive_buffer_bytes=ports.receive_buffer_bytes,
            counted=self._counts,
            figures=stock_figures or (dict if store is None else store.figures),
        )
        self._options = options
        self._timing = options.timing()
        self._ports = ports
        self._label = label
        self._lines = Bounded(tell, system_clock().mono_s)
        self._tell = self._lines.tell
        self._on_fenced = on_fenced
        self._on_take = on_take
        self._on_share = on_share
        self._listener = on_event
        self._shelf: Shelf = EmptyShelf() if shelf is None else shelf  # an empty one is false
        self._store = store
        self._tasks = tasks if len(tasks) <= TASKS_MAX else ()
        self._lookup = lookup
        self._weather = weather
        self._rng = rng or random.Random(int.from_bytes(os.urandom(16), "big"))
        self._wall_zero_s: float = 0.0
        self._thread = LoopThread(f"{worker_id}-mesh", self._main, failed=self._thread_failed)
        self._lock = threading.Lock()
        self._started = False
        self._ended = False
        self._silenced = False
        self._roster = Roster(self._me, meta, tasks)
        self._is_fenced = False
        self._core_counts: dict[str, int] = {}
        self._reporter = Reporter()
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
    def running(self) -> bool:
        return self._started and not self._thread.over

    # -- what the worker tells: never waits ----------------------------------------------------------------
    def publish(
        self,
        *,
        queued: int,
        running: int,
        flags: Flag,
        stealable: int = 0,
        best_tier: int = 3,
        run_ms: int = 1_000,
    ) -> None:
        """The load as it is now; of several the last counts. `stealable` of the `queued` jobs others may
        have, the best of them of `best_tier`."""
        self._inbox.put_load(
            Load(
                self._me.worker_id,
                self._me.epoch,
                0,
                queued=queued,
                running=running,
                capacity=self._meta.capacity,
                stealable=stealable,
                best_tier=best_tier,
                run_ms=run_ms,
                flags=int(flags),
            )
        )

    def seek(self, want: int) -> None:
        """This worker could use so many jobs more, and found none to claim; 0: it needs none. The wish stands
        until the next one, less what was got meanwhile."""
        self._inbox.put_wish(want)

    def took(self, peer: NodeRef, jobs: Sequence[Offered], got: Sequence[Offered]) -> None:
        """The answer to `on_take`, with its `jobs`: `got` are those that storage gave us."""
        self._inbox.put_took(Took(peer, tuple(jobs), tuple(got)))

    # -- verbs for the user --------------------------------------------------------------------------------
    def should_prefetch(self) -> bool:
        """Whether more should be held than is: the next claim would hold some."""
        return bool(self._figures().get("should_prefetch"))

    def prefetch(self, jobs: Sequence[Any]) -> int:
        """Hold these jobs, which this worker has claimed (ClaimedJob), to be begun later; how many that are.
        Raises FluxMeshError if not all fit: the rest are still the caller's to give back."""
        held = self._store.prefetch(jobs) if self._store is not None else 0
        if held < len(jobs):
            raise FluxMeshError(
                f"the local buffer took {held:,} of {len(jobs):,} jobs and is full",
                hint="give the rest back to storage, or hold fewer: mesh_local_buffer",
            )
        return held

    def pop_local(self) -> Any | None:
        """Take the job out of the buffer that this worker would begin next, or None. It is still held in
        storage: whoever has it has to begin it, or give it back."""
        return None if self._store is None else self._store.pop()

    def should_steal(self) -> bool:
        """Whether this worker is hungry: it wants jobs, and found none to claim."""
        return self._inbox.wish > 0

    def try_steal(self) -> bool:
        """Ask one peer for work now; True if somebody is asked. Nobody is, unless this worker is hungry, has
        no request under way, and knows of a surplus."""
        if not self.should_steal():
            return False
        answer: Future[bool] = Future()
        if not self._thread.post(self._try_steal, answer):
            return False
        try:
            return answer.result(TRY_S)
        except TimeoutError:
            return False

    # -- what storage is told ------------------------------------------------------------------------------
    def report(self, now_s: float) -> bytes | None:
        """What the next beat shall tell storage of the mesh; None: nothing new, b"": nothing any more.
        `now_s`: monotonic; this and the next call by one thread, `has_news` by any."""
        if not self._started:
            return None
        if self._thread.over:
            return self._reporter.end()
        snapshot = self._snapshot
        if self._reporter.is_early(len(snapshot.members), now_s):
            return None
        report = make_report(snapshot, self.metrics(), self._figures(), wall_zero_s=self._wall_zero_s)
        return self._reporter.due(report, len(snapshot.members), now_s)

    def reported(self, report: bytes, now_s: float) -> None:
        """Storage has this report."""
        self._reporter.told(report, now_s)

    def has_news(self, now_s: float) -> bool:
        """Whether a beat now would tell counters that changed: worth one out of turn."""
        if not self.running:
            return False
        members = len(self._snapshot.members)
        if self._reporter.is_early(members, now_s):
            return False
        return self._reporter.has_news(told_counters(self.metrics()), members, now_s)

    def _counts(self) -> dict[str, int]:
        """As they were when it last looked, but those of stealing as of now: a copy is one step of the
        interpreter."""
        core = self._core
        if core is None or self._thread.over:
            return self._core_counts
        now = {name.replace(" ", "_"): count for name, count in core.voice.counts.copy().items()}
        return {**self._core_counts, **told_counters(now)}

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
            steals=options.steal,
            steal_rate_limit=options.steal_rate_limit,
            shelf=self._shelf,
            tasks=tuple(xxhash.xxh3_64_intdigest(task.encode()) for task in self._tasks),
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
            on_take=self._take,
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
            self._take_told()  # before there was anybody to hear it
            self._look_now()
            ready()
            if not self._silenced:
                await self._gone.wait()
        finally:
            if self._look is not None:
                self._look.cancel()
            self._core_counts = carrier.counters()
            if self._is_fenced:
                self._show(NOTHING)
            await carrier.close()
            self._lines.end()

    def _begin_leave(self) -> None:
        if self._carrier is not None and not self._leaving:
            self._leaving = True
            self._tell("info", "leave sent", {"peers": len(list(self._snapshot.peers()))})
            self._carrier.leave()

    def _abandon(self) -> None:
        self._gone.set()

    def _post_told(self) -> bool:
        return self._thread.post(self._take_told)

    def _take_told(self) -> None:
        carrier = self._carrier
        if carrier is None:
            return
        for command in self._inbox.take():
            carrier.command(command)
        if self._inbox.load.flags != self._flags_seen:
            self._look_soon()

    def _take(self, take: Take) -> None:
        """Hand it to the worker. Without one, or if that fails, nothing was got."""
        if self._on_take is None:
            self.took(take.peer, take.jobs, ())
            return
        try:
            self._on_take(take.peer, take.jobs)
        except Exception as error:  # not raised: what else the core asked for is still to be done
            self._tell("error", "mesh step failed", {"error": f"{type(error).__name__}: {error}"})
            self.took(take.peer, take.jobs, ())

    def _try_steal(self, answer: Future[bool]) -> None:
        core, carrier = self._core, self._carrier
        before = after = 0
        if core is not None and carrier is not None:
            before = core.voice.counts.get("steals_initiated", 0)
            carrier.command(Seek(self._inbox.wish))
            after = core.voice.counts.get("steals_initiated", 0)
        answer.set_result(after > before)

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
        self._flags_seen = self._inbox.load.flags
        self._core_counts = self._carrier.counters()
        self._show(self._roster.look(self._core.members(now_ns), self._flags_seen, now_ns))
        self._carrier.tell_refusals()
        self._lines.look()

    def _show(self, snapshot: Snapshot) -> None:
        has_changed = snapshot.share != self._snapshot.share
        self._snapshot = snapshot
        if has_changed:
            self._on_share()

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
    if event.jobs:
        fields["jobs"] = event.jobs
    if event.again_ns:
        fields["next_try_s"] = round(event.again_ns / 1e9, 1)
    return fields
