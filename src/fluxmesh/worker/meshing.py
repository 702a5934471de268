"""A worker's part in the mesh: its ports before it registers, its node while it works, its goodbye.

The node lives on a thread of its own (mesh/node.py). The watching thread of the worker, which turns whatever
the worker's loop does, tells it the load and that the loop stands still; the beat takes its report to
storage.
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
from fluxmesh.storage.values import Registration, WorkerView

if TYPE_CHECKING:
    from fluxmesh.clock import Clock
    from fluxmesh.mesh.messages import Meta
    from fluxmesh.mesh.node import MeshNode
    from fluxmesh.mesh.options import MeshWorker
    from fluxmesh.mesh.ports import Ports
    from fluxmesh.worker.config import WorkerConfig

CHILD_FLAG: Final = "--mesh-child"  # the number of a process among those of one worker
PREPARE_S: Final = 10.0  # to look up the names that the own address depends on
READY_AFTER_S: Final = 1.0  # of readiness, before others may rely on it
LEAVE_LEAST_S: Final = 0.2  # for the first goodbyes, when there is no grace period
LEAVE_MOST_S: Final = 3.5  # of a leave: 2 s to spread, 1 s to answer
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
        running: Callable[[], int],
    ) -> None:
        self._options = config.mesh
        self._optional = config.mesh_optional
        self._grace_s = config.grace_s
        self._registration = registration
        self._label = label
        self._clock = clock
        self._running = running
        self._ports: Ports | None = None
        self._node: MeshNode | None = None
        self._ready_since_s: float | None = None
        self._draining = False

    @property
    def node(self) -> MeshNode | None:
        return self._node

    async def prepare(self) -> None:
        """Bind the ports and find the own address, before anybody hears of this worker: what keeps it out of
        the mesh keeps it from starting. Raises InvalidOption, unless the mesh is optional."""
        if self._options is None:
            return
        try:
            await self._prepare(self._options)
        except FluxMeshError as error:
            self._go_without(error)

    def _go_without(self, error: FluxMeshError) -> None:
        """Raises the error, unless the mesh is optional."""
        if not self._optional:
            raise error
        self._options = None
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

    async def start(self, epoch: int, *, on_fenced: Callable[[], None]) -> None:
        """Become a member under this epoch. `on_fenced` is called on the calling loop. Raises FluxMeshError,
        unless the mesh is optional."""
        if self._options is None or self._ports is None:
            return
        from fluxmesh.mesh.delays import WEATHER_ENV, parse_weather
        from fluxmesh.mesh.node import MeshNode

        loop = asyncio.get_running_loop()
        seen, options = self._registration, self._options
        weather = os.environ.get(WEATHER_ENV)

        def fenced() -> None:
            try:
                loop.call_soon_threadsafe(on_fenced)
            except RuntimeError:
                pass  # the worker has ended

        node = self._node = MeshNode(
            options,
            ports=self._ports,
            address=self._address,
            worker_id=seen.worker_id,
            epoch=epoch,
            meta=self._meta(options),
            label=self._label,
            tell=tell,
            on_fenced=fenced,
            weather=None if weather is None else parse_weather(weather),
        )
        try:
            await asyncio.to_thread(node.start)
        except FluxMeshError as error:
            self._go_without(error)
            self._node = None

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
        """The worker as it is now. Ready is who has been so for a second."""
        if self._node is None or self._options is None:
            return
        from fluxmesh.mesh.messages import Flag

        now_s = self._clock.mono_s()
        if blocked or self._draining:
            self._ready_since_s = None
        elif self._ready_since_s is None:
            self._ready_since_s = now_s
        flags = Flag.STEALS if self._options.steal else Flag(0)
        if self._ready_since_s is not None and now_s - self._ready_since_s >= READY_AFTER_S:
            flags |= Flag.READY
        if blocked:
            flags |= Flag.DEGRADED
        if self._draining:
            flags |= Flag.DRAINING
        self._node.publish(queued=0, running=self._running(), flags=flags)

    def view(self, status: str) -> WorkerView:
        """What the next beat tells of this worker, and of the mesh if there is something new."""
        report = None
        if self._node is not None:
            try:
                report = self._node.report(self._clock.mono_s())
            except Exception:  # the mesh is no ground to lose a lease by a beat that is not sent
                _log.exception("mesh report failed")
        return WorkerView(self._registration, status, self._running(), report)

    def told(self, view: WorkerView) -> None:
        """A beat has told it."""
        if self._node is not None and view.mesh is not None:
            self._node.reported(view.mesh, self._clock.mono_s())

    # -- the end ---------------------------------------------------------------------------------------
    def begin_leave(self) -> None:
        """Say goodbye while the worker drains."""
        self._draining = True
        if self._node is not None:
            self._node.begin_leave()

    async def left(self, *, hurried: bool) -> None:
        """Return when the goodbye has spread, or the time for that is up; then the node is silent and closed.
        The grace period is the measure: what ends sooner than its jobs do has time for it."""
        if self._node is not None:
            patience_s = LEAVE_LEAST_S if hurried else max(LEAVE_LEAST_S, min(self._grace_s, LEAVE_MOST_S))
            await asyncio.to_thread(self._node.close_after, patience_s)
