"""A worker's part in the mesh: its ports before it registers, its node while it works, its goodbye.

The node lives on a thread of its own (mesh/node.py). The watching thread of the worker, which turns whatever
the worker's loop does, tells it the load and that the loop stands still; the beat takes its report to
storage.

Whether a newer run of this worker stands, storage alone knows. That somebody in the mesh says so ends the
node, and is a reason to beat at once; what storage answers decides about the worker. If storage knows of no
newer run, the worker goes on without its part in the mesh and tries after a while to have it again, by a new
node of the same run. That is sound: to the others it is one that fell silent, may have been called dead, and
refutes that. It is in vain as long as they remember the run that never was, which is a day at most after its
end, or until they are all started anew.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Literal

from fluxmesh.config import Settings
from fluxmesh.errors import FluxMeshError, InvalidOption, shown
from fluxmesh.obs.log import get_logger
from fluxmesh.storage.values import BeatAnswer, Registration, Standing, WorkerView

if TYPE_CHECKING:
    from fluxmesh.clock import Clock
    from fluxmesh.mesh.messages import Flag, Meta, NodeRef, Offered, Record
    from fluxmesh.mesh.node import MeshNode
    from fluxmesh.mesh.options import MeshWorker
    from fluxmesh.mesh.ports import Ports
    from fluxmesh.worker.config import WorkerConfig
    from fluxmesh.worker.runs import RunTable
    from fluxmesh.worker.sharing import Sharing
    from fluxmesh.worker.stock import Stock
    from fluxmesh.worker.trading import Trading

CHILD_FLAG: Final = "--mesh-child"  # the number of a process among those of one worker
PREPARE_S: Final = 10.0  # to look up the names that the own address depends on
READY_AFTER_S: Final = 1.0  # of readiness, before others may rely on it
LEAVE_LEAST_S: Final = 0.2  # for the first goodbyes, when there is no grace period
LEAVE_MOST_S: Final = 3.5  # of a leave: 2 s to spread, 1 s to answer
REJOIN_FIRST_S: Final = 60.0  # after a claim of our id that storage knows nothing of; doubled at each one
REJOIN_MOST_S: Final = 600.0
_log = get_logger("mesh")


def mesh_of(
    given: MeshWorker | Literal[False] | None, settings: Settings, *, child: int = 0
) -> MeshWorker | None:
    """A worker's part in the mesh: what was given, the settings for the rest. None: it is in no mesh. `child`
    is its number among the processes of one worker. Raises InvalidOption."""
    if given is False or (given is None and not settings.mesh):
        return None
    from fluxmesh.mesh.options import MeshWorker

    if given is not None and not isinstance(given, MeshWorker):
        raise InvalidOption(
            "mesh",
            f"{shown(given)} is neither a MeshWorker nor False",
            hint="such as mesh=MeshWorker(port=7946)",
        )
    return (given or MeshWorker()).resolved(settings, child=child)


def tell(level: str, event: str, fields: dict[str, object]) -> None:
    """An event of the node as an event of the log: the mesh stands below the log and knows no logger."""
    say = {"debug": _log.debug, "info": _log.info, "warning": _log.warning}.get(level, _log.error)
    say(event, **fields)


class Meshing:
    """`prepare` before the registration, `start` after it, `begin_leave` when the worker drains, `left` at
    its end; `publish` is for the thread that watches, `view` and `told` for the one that beats. Of a worker
    that is in no mesh there is nothing to do."""

    def __init__(
        self,
        config: WorkerConfig,
        registration: Registration,
        label: str,
        clock: Clock,
        table: RunTable,
    ) -> None:
        self._options = config.mesh
        self._optional = config.mesh_optional
        self._grace_s = config.grace_s
        self._registration = registration
        self._label = label
        self._clock = clock
        self._table = table
        self._stock: Stock | None = None
        self._trading: Trading | None = None
        self._sharing: Sharing | None = None
        self._ports: Ports | None = None
        self._node: MeshNode | None = None
        self._ready_since_s: float | None = None
        self._blocked = False
        self._draining = False
        self._epoch = 0
        self._ask_storage: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Somebody says that a newer run of this id is there, and a beat that was sent since asks storage.
        self._claim: Record | None = None
        self._claim_asked: Record | None = None
        self._joined_s = 0.0
        self._pause_s = REJOIN_FIRST_S
        self._rejoin_timer: asyncio.TimerHandle | None = None
        self._rejoining: asyncio.Task[None] | None = None

    @property
    def node(self) -> MeshNode | None:
        return self._node

    @property
    def stock(self) -> Stock | None:
        """From `prepare` on: what the worker holds. None: it is in no mesh and holds nothing."""
        return self._stock

    @property
    def trading(self) -> Trading | None:
        return self._trading

    def give_to(self, receive: Callable[[NodeRef, tuple[Offered, ...]], None]) -> None:
        """Whom to give jobs that a peer has offered, on the worker's loop."""
        if self._trading is not None:
            self._trading.receive = receive

    @property
    def poll_jitter_s(self) -> float:
        """By so much sooner an idle worker asks storage, so that not all ask together."""
        if self._options is None:
            return 0.0
        from fluxmesh.mesh.buffer import poll_jitter_s

        return poll_jitter_s(self._registration.worker_id, self._options.timing().period_ns / 1e9)

    async def prepare(self) -> None:
        """Bind the ports and find the own address, before anybody hears of this worker: what keeps it out of
        the mesh keeps it from starting. Raises InvalidOption, unless the mesh is optional."""
        if self._options is None:
            return
        try:
            await self._prepare(self._options)
        except FluxMeshError as error:
            self._go_without(error)
        else:
            self._make_stock(self._options)

    def _make_stock(self, options: MeshWorker) -> None:
        from fluxmesh.worker.sharing import Sharing
        from fluxmesh.worker.stock import Rules, Stock
        from fluxmesh.worker.trading import Trading

        rules = Rules(
            concurrency=self._table.slots.concurrency,
            local_buffer=options.local_buffer,
            steal=options.steal,
            steal_threshold=options.steal_threshold,
            steal_batch=options.steal_batch,
            weight=options.affinity_weight,
        )
        stock = self._stock = self._table.stock = Stock(rules, self._clock)
        self._trading = Trading(stock, self._table.slots, self._clock, self._flags)
        stock.on_taken = self._trading.on_taken
        self._sharing = Sharing(self._clock, lambda: self._ask_storage())

    def _go_without(self, error: FluxMeshError) -> None:
        """Raises the error, unless the mesh is optional."""
        if not self._optional:
            raise error
        self._options = None
        if self._stock is not None:
            self._stock.give_up()
        name = self._registration.worker_id
        _log.error("worker runs without the mesh", worker=name, error=str(error))

    async def _prepare(self, options: MeshWorker) -> None:
        from fluxmesh.mesh.advertise import find_address
        from fluxmesh.mesh.options import check_member
        from fluxmesh.mesh.ports import bind_ports

        check_member(self._registration.worker_id, self._meta(options))
        if options.is_exposed:
            _log.warning(
                "mesh is open to the network",
                host=options.bind_host,
                hint="anybody there can speak for a worker; `fluxmesh mesh keygen` makes a key",
            )
        for name in options.key_files_open:
            _log.warning("everybody may read the key of the mesh", file=name, hint=f"chmod 600 {name}")
        self._ports = bind_ports(options.bind_host, options.port)
        try:
            async with asyncio.timeout(PREPARE_S):
                self._address = await asyncio.to_thread(find_address, options)
        except TimeoutError:
            self.abandon()
            raise InvalidOption(
                "mesh_advertise_addr",
                f"the own address was not found within {PREPARE_S:g} s: names are not answered",
                hint="give it as an IP address",
            ) from None
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Give up what was begun: the worker does not start."""
        if self._node is not None:
            self._node.close_after(0.0)
        elif self._ports is not None:
            self._ports.close()

    async def start(self, epoch: int, *, ask_storage: Callable[[], None]) -> None:
        """Become a member under this epoch. `ask_storage` is called, on any thread, when a beat is needed at
        once. Raises FluxMeshError, unless the mesh is optional."""
        if self._options is None or self._ports is None:
            return
        self._loop = asyncio.get_running_loop()
        self._epoch = epoch
        self._ask_storage = ask_storage
        try:
            await self._start_node(self._options, self._ports)
        except FluxMeshError as error:
            self._go_without(error)
            self._node = None

    async def _start_node(self, options: MeshWorker, ports: Ports) -> None:
        from fluxmesh.mesh.delays import WEATHER_ENV, parse_weather
        from fluxmesh.mesh.node import MeshNode

        assert self._stock is not None
        assert self._trading is not None
        assert self._sharing is not None
        weather = os.environ.get(WEATHER_ENV)
        former = self._node
        node = self._node = MeshNode(
            options,
            ports=ports,
            address=self._address,
            worker_id=self._registration.worker_id,
            epoch=self._epoch,
            meta=self._meta(options),
            label=self._label,
            tell=tell,
            on_fenced=self._claimed,
            shelf=self._stock,
            tasks=tuple(task.name for task in self._registration.tasks),
            store=self._stock,
            on_take=self._trading.on_take,
            on_share=self._share_changed,
            weather=None if weather is None else parse_weather(weather),
        )
        if former is not None:
            node.go_on_from(former)
        self._joined_s = self._clock.mono_s()
        await asyncio.to_thread(node.start)
        self._sharing.join(node)
        self._trading.join(node, asyncio.get_running_loop())

    def _share_changed(self) -> None:
        """On the node's thread."""
        if self._stock is not None and self._sharing is not None:
            self._stock.share_changed()
            self._sharing.changed()

    # -- a claim of our id -----------------------------------------------------------------------------
    def _claimed(self, claim: Record) -> None:
        """Somebody says that a newer run of this id is there. On the node's thread."""
        self._claim = claim
        self._ask_storage()

    def _disowned(self, claim: Record) -> None:
        """Storage knows nothing of that run."""
        if self._draining:
            return
        now_s = self._clock.mono_s()
        if now_s - self._joined_s >= REJOIN_MOST_S:
            self._pause_s = REJOIN_FIRST_S
        _log.error(
            "worker goes on without the mesh",
            worker=self._registration.worker_id,
            epoch=self._epoch,
            claimed_epoch=claim.epoch,
            claimed_from=f"{claim.host}:{claim.port}",
            again_in_s=self._pause_s,
            hint="storage knows no newer run of this worker: if it was made anew, start all workers of the"
            " mesh anew; if not, somebody speaks in its name: look who is at that address, and give all"
            " workers a new key",
        )
        self._rejoin_later()

    def _rejoin_later(self) -> None:
        if self._loop is not None and not self._draining:
            self._rejoin_timer = self._loop.call_later(self._pause_s, self._begin_rejoin)
            self._pause_s = min(2 * self._pause_s, REJOIN_MOST_S)

    def _begin_rejoin(self) -> None:
        if self._loop is not None and self._options is not None and not self._draining:
            self._rejoining = self._loop.create_task(self._rejoin(self._options), name="fluxmesh-mesh-rejoin")

    async def _rejoin(self, options: MeshWorker) -> None:
        from fluxmesh.mesh.ports import bind_ports

        if self._draining:
            return
        try:
            ports = self._ports = bind_ports(options.bind_host, options.port)
            await self._start_node(options, ports)
        except FluxMeshError as error:
            _log.warning("mesh not joined again", error=str(error), again_in_s=self._pause_s)
            self._rejoin_later()

    def _meta(self, options: MeshWorker) -> Meta:
        from fluxmesh.mesh.messages import Meta

        seen = self._registration
        return Meta(
            queues=seen.queues,
            tiers=seen.tiers,
            capacity=seen.capacity,
            steals=options.steal,
            virtual_nodes=options.virtual_nodes,
            affinity_weight=options.affinity_weight,
            version=version("fluxmesh"),
        )

    # -- for the watching thread and the beating one -------------------------------------------------
    def publish(self, blocked: bool) -> None:  # noqa: FBT001 - a state, not a mode of the call
        """The worker as it is now."""
        self._blocked = blocked
        if self._trading is not None:
            self._trading.publish()
        if self._sharing is not None:
            self._sharing.look()

    def _flags(self) -> Flag:
        """Ready is who has been so for a second."""
        from fluxmesh.mesh.messages import Flag

        now_s, blocked = self._clock.mono_s(), self._blocked
        if blocked or self._draining:
            self._ready_since_s = None
        elif self._ready_since_s is None:
            self._ready_since_s = now_s
        flags = Flag.STEALS if self._registration.donates else Flag(0)
        if self._ready_since_s is not None and now_s - self._ready_since_s >= READY_AFTER_S:
            flags |= Flag.READY
        if blocked:
            flags |= Flag.DEGRADED
        if self._draining:
            flags |= Flag.DRAINING
        return flags

    def view(self, status: str) -> WorkerView:
        """What the next beat tells of this worker, and of the mesh if there is something new."""
        self._claim_asked = self._claim
        report = None
        if self._node is not None:
            try:
                report = self._node.report(self._clock.mono_s())
            except Exception:  # the mesh is no ground to lose a lease by a beat that is not sent
                _log.exception("mesh report failed")
        affinity = self._sharing.to_tell() if self._sharing is not None else None
        return WorkerView(self._registration, status, self._table.slots.occupied, report, affinity)

    def told(self, view: WorkerView, answer: BeatAnswer) -> None:
        """A beat has told it, and this is what storage says of the worker. One that is fenced hears so from
        the beat itself; of one that storage does not know yet the next beat knows more."""
        if self._node is not None and view.mesh is not None:
            self._node.reported(view.mesh, self._clock.mono_s())
        if self._sharing is not None:
            self._sharing.told(view.affinity, answer)
        claim = self._claim_asked
        if claim is not None and answer.standing is Standing.GOOD and self._loop is not None:
            self._claim = self._claim_asked = None
            try:
                self._loop.call_soon_threadsafe(self._disowned, claim)
            except RuntimeError:
                pass  # the worker has ended

    # -- the end ---------------------------------------------------------------------------------------
    def begin_leave(self) -> None:
        """Say goodbye while the worker drains."""
        self._draining = True
        if self._sharing is not None:
            self._sharing.close()
        if self._rejoin_timer is not None:
            self._rejoin_timer.cancel()
        if self._node is not None:
            self._node.begin_leave()

    async def left(self, *, hurried: bool) -> None:
        """Return when the goodbye has spread, or the time for that is up; then the node is silent and closed.
        The grace period is the measure: what ends sooner than its jobs do has time for it."""
        if self._trading is not None:
            self._trading.close()
        if self._node is not None:
            patience_s = LEAVE_LEAST_S if hurried else max(LEAVE_LEAST_S, min(self._grace_s, LEAVE_MOST_S))
            await asyncio.to_thread(self._node.close_after, patience_s)
            if self._rejoining is not None:
                await asyncio.wait((self._rejoining,), timeout=patience_s)
