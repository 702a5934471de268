"""A worker: its life from registration to the last settled job. The work itself is in its parts."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.errors import StorageUnreachable
from fluxmesh.obs.log import get_logger
from fluxmesh.scheduler.housekeeping import Housekeeper
from fluxmesh.storage.base import WORK_POLL_S, Storage
from fluxmesh.storage.values import Registration, Standing, WorkerRef
from fluxmesh.submission import checked_name, checked_queue, checked_tier
from fluxmesh.task import TaskRegistry
from fluxmesh.worker.beater import Beater, BeatReport
from fluxmesh.worker.config import WorkerConfig, WorkerEnd
from fluxmesh.worker.fetcher import Fetcher
from fluxmesh.worker.isolated.isolation import check_isolation
from fluxmesh.worker.isolated.process import KILL_S
from fluxmesh.worker.isolated.source import BodySource
from fluxmesh.worker.lease import Lease
from fluxmesh.worker.leaving import LEAVE_S, leave_storage
from fluxmesh.worker.ledger import Ledger
from fluxmesh.worker.meshing import Meshing
from fluxmesh.worker.notices import NoticeListener
from fluxmesh.worker.observe import LeaseLapsed, Observer
from fluxmesh.worker.progress import ProgressSender
from fluxmesh.worker.runner import Runner
from fluxmesh.worker.runs import RunTable
from fluxmesh.worker.slots import Slots, checked_reserve
from fluxmesh.worker.watch import LoopWatch, Orphanage

if TYPE_CHECKING:
    from fluxmesh.mesh.node import MeshNode

STUCK_PER_SLOT: Final = 2  # more bodies than this that cannot be stopped, and the worker retires at once
OPEN_S: Final = 30.0
FLUSH_S: Final = 0.8
HURRIED_GRACE_S: Final = 0.15
HURRIED_FLUSH_S: Final = 0.3
RESOURCES_S: Final = 10.0  # to close what the worker built
ORPHAN_SLACK_S: Final = 2.0  # beyond the grace periods, before a worker without a supervisor ends itself
LAST_WORDS_S: Final = 1.0
_log = get_logger("worker")


class Worker:
    """Runs jobs on the event loop it is started in, until it is stopped.

    `open_storage(inline)` opens a connection: one for this loop, one (inline) for the beats. `observer`
    hears of every step; it is for tests and benchmarks. `source`: how other processes find the tasks.
    """

    def __init__(
        self,
        *,
        open_storage: Callable[[bool], Awaitable[Storage]],
        registry: TaskRegistry,
        settings: Settings,
        config: WorkerConfig,
        clock: Clock,
        source: BodySource | None = None,
        observer: Observer | None = None,
        rng: random.Random | None = None,
    ) -> None:
        checked_name("worker_id", config.worker_id, queue=True)
        for queue in config.queues:
            checked_queue(queue)
        tiers = tuple(sorted({checked_tier(tier) for tier in config.tiers}))
        checked_reserve(config.reserve, config.concurrency, tiers)
        check_isolation(registry, source)
        self._source = source
        self._open_storage = open_storage
        self._registry = registry
        self._settings = settings
        self._config = config
        self._clock = clock
        self._observer = observer
        self._rng = rng or random.Random()
        self._table = RunTable(Slots(config.concurrency, config.reserve))
        self._lease = Lease(clock, lease_s=settings.lease_s, beat_s=settings.beat_every_s)
        self._registration = Registration(
            worker_id=config.worker_id,
            queues=config.queues,
            tiers=tiers,
            tasks=tuple(task.spec for task in registry),
            capacity=config.concurrency,
            lease_s=settings.lease_s,
            beat_s=settings.beat_every_s,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            donates=config.mesh is None or config.mesh.steal,
        )
        self._meshing = Meshing(config, self._registration, settings.namespace, clock, self._table)
        self._orphanage: Orphanage | None = None
        self._status = "ready"
        self._ref = WorkerRef(config.worker_id, 0)
        self._command: str | None = None
        self._lapsed = False
        self._failure: BaseException | None = None
        self._begun = False
        self._wish: tuple[WorkerEnd, float] | None = None  # told to end before it had begun
        self._closing: asyncio.Task[None] | None = None
        self._lingering: asyncio.Task[None] | None = None
        self._lapse_timer: asyncio.TimerHandle | None = None
        self._retire_timer: asyncio.TimerHandle | None = None
        self._end: asyncio.Future[WorkerEnd] | None = None

    @property
    def worker_id(self) -> str:
        return self._config.worker_id

    @property
    def epoch(self) -> int:
        """What the registration gave; 0 before it."""
        return self._ref.epoch

    @property
    def mesh(self) -> MeshNode | None:
        """Its node in the mesh, from the start on; None: it is in none."""
        return self._meshing.node

    @property
    def running_count(self) -> int:
        """Jobs that occupy a slot now."""
        return self._table.slots.occupied

    @property
    def left_running(self) -> int:
        """Bodies that have not ended. After the worker's end: those that nothing can stop but the end of the
        process; a loop they run on would wait for them for ever."""
        return len(self._table.bodies())

    def write_ledger(self, fd: int) -> None:
        """Before the start: write into this file what whoever watches over this process has to know
        (ledger.py). The descriptor is not kept. Raises OSError, ValueError."""
        self._table.ledger = Ledger(
            fd,
            self._registration,
            concurrency=self._config.concurrency,
            hard_grace_s=self._settings.hard_grace_s,
            clock=self._clock,
        )

    def end_without(self, supervisor_fd: int, end: Callable[[], None]) -> None:
        """Before the start: once the other end of this pipe is gone, and the loop stands still, so that it
        cannot drain, call `end`, which ends the process. What that means for the jobs is stored before, if
        possible."""
        settings = self._settings
        patience_s = self._config.grace_s + settings.hard_grace_s + ORPHAN_SLACK_S

        def with_last_words() -> None:
            self._beater.say_last_words(LAST_WORDS_S)
            end()

        self._orphanage = Orphanage(supervisor_fd, patience_s, with_last_words)

    # -- beginning -----------------------------------------------------------------------------------
    async def start(self) -> None:
        """Open storage, register, begin to beat and to claim. Raises what any of the first three raises."""
        if self._end is not None:
            raise RuntimeError("a worker is started once; make a new one")
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.create_future()
        self._hurry = asyncio.Event()
        self._storage = await self._open_storage(False)
        try:
            await self._meshing.prepare()
            sent_s = self._clock.mono_s()
            epoch = await self._storage.register(self._registration)
            self._ref = WorkerRef(self.worker_id, epoch)
            self._lease.renewed(sent_s)
            if self._table.ledger is not None:
                self._table.ledger.registered(epoch, sent_s)
            self._make_parts()
            await self._start_beats()
        except BaseException:
            self._meshing.abandon()
            await self._storage.close()
            raise
        self._watch_lease()
        self._runner.start()
        await self._fetcher.start()
        await self._housekeeper.start()
        await self._notices.start()
        _log.info(
            "worker started",
            worker=self.worker_id,
            epoch=epoch,
            queues=",".join(self._config.queues),
            concurrency=self._config.concurrency,
            tasks=len(self._registry),
        )
        self._begun = True
        if self._wish is not None:
            self._begin_close(*self._wish)

    async def _start_beats(self) -> None:
        try:
            await self._beater.start(OPEN_S)
            await self._meshing.start(self.epoch, ask_storage=self._beater.nudge)
        except BaseException as error:
            await self._beater.stop(LEAVE_S)
            await self._storage.declare_dead(self._ref, "left")
            if isinstance(error, TimeoutError):
                message = f"the connection for heartbeats did not open in {OPEN_S:g} s"
                raise StorageUnreachable(message, hint="see `fluxmesh doctor`") from None
            raise
        self._watch.start()

    def _make_fetcher(self) -> Fetcher:
        return Fetcher(
            self._storage,
            self._ref,
            table=self._table,
            lease=self._lease,
            clock=self._clock,
            beat_s=self._settings.beat_every_s,
            batch=self._settings.scheduler_batch_size,
            admit_job=lambda job, now: self._runner.admit(job, now),
            nudge_beat=lambda: self._beater.nudge(),
            on_fenced=self._on_fenced,
            on_failure=self._on_failure,
            rng=self._rng,
            observer=self._observer,
            stock=self._meshing.stock,
            trade=self._meshing.trading,
            poll_s=WORK_POLL_S - self._meshing.poll_jitter_s,
        )

    def _make_parts(self) -> None:
        self._progress = ProgressSender(self._loop, self._storage, self._ref, self._table)
        self._fetcher = self._make_fetcher()
        self._meshing.give_to(self._fetcher.take)
        self._runner = Runner(
            self._loop,
            name=self.worker_id,
            registry=self._registry,
            settings=self._settings,
            cancel_on_lapse=self._config.on_lease_lost == "cancel",
            table=self._table,
            lease=self._lease,
            source=self._source,
            progress=self._progress,
            deliver=self._fetcher.deliver,
            give_back=self._fetcher.give_back,
            drop=self._fetcher.drop,
            on_overdue=self._on_overdue,
            rng=self._rng,
            observer=self._observer,
        )
        self._beater = Beater(
            self._loop,
            open_storage=self._open_storage,
            worker=self._ref,
            view=lambda: self._meshing.view(self._status),
            on_told=self._meshing.told,
            table=self._table,
            lease=self._lease,
            clock=self._clock,
            beat_s=self._settings.beat_every_s,
            on_report=self._on_report,
            on_failure=self._on_failure,
            on_end=lambda: self._watch.stop(),
            ledger=self._table.ledger,
        )
        self._watch = LoopWatch(
            self._loop,
            name=self.worker_id,
            table=self._table,
            clock=self._clock,
            ledger=self._table.ledger,
            orphanage=self._orphanage,
            on_blocked=self._beater.give_back_waiting,
            is_alone=self._beater.is_alone,
            on_alone=self._beater.wake,
            observer=self._observer,
            on_turn=self._meshing.publish,
        )
        self._notices = NoticeListener(self._storage, self._ref, nudge_beat=self._beater.nudge)
        self._housekeeper = Housekeeper(
            self._storage, self._settings, self._clock, self._rng, self._registry, on_damage=self._on_failure
        )

    # -- what the parts report ---------------------------------------------------------------------------
    def _on_report(self, report: BeatReport) -> None:
        for item in report.lost:
            if (run := self._table.find(item.id, item.token)) is not None:
                self._runner.lose(run)
        for item in report.cancelled:
            if (run := self._table.find(item.id, item.token)) is not None:
                self._runner.cancel(run)
            else:
                self._fetcher.refuse(item, "cancelled")
        if report.standing is Standing.FENCED:
            self._on_fenced()
        elif report.command != self._command:
            self._command = report.command
            _log.info("told by storage", worker=self.worker_id, command=report.command or "go on")
            self._fetcher.set_quiet(report.command == "quiet")
            if report.command == "stop":
                self._begin_close(WorkerEnd.STOPPED, self._config.grace_s)

    def _on_fenced(self) -> None:
        if self._closing is None:
            _log.error("worker fenced", worker=self.worker_id, epoch=self.epoch)
            self._begin_close(WorkerEnd.FENCED, 0.0)

    def _on_failure(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            _log.error("worker failed", worker=self.worker_id, error=f"{type(error).__name__}: {error}")
            self._begin_close(WorkerEnd.STOPPED, 0.0)

    def _on_overdue(self) -> None:
        self._fetcher.look()  # its slot is free
        if len(self._table.stuck()) > STUCK_PER_SLOT * self._config.concurrency:
            self._begin_close(WorkerEnd.RETIRED, self._config.grace_s)
        elif self._retire_timer is None:
            self._retire_timer = self._loop.call_later(self._retire_delay_s, self._consider_retirement)

    @property
    def _retire_delay_s(self) -> float:
        """So that its other jobs have ended when retire_after_s is over."""
        settings = self._settings
        return max(0.0, settings.retire_after_s - self._config.grace_s - settings.hard_grace_s)

    def _consider_retirement(self) -> None:
        self._retire_timer = None
        stuck = self._table.stuck()
        if not stuck:
            return
        due = min(run.overdue_since for run in stuck) + self._retire_delay_s
        if due <= self._loop.time():
            self._begin_close(WorkerEnd.RETIRED, self._config.grace_s)
        else:
            self._retire_timer = self._loop.call_at(due, self._consider_retirement)

    def _watch_lease(self) -> None:
        """Notice on time that the lease may have lapsed, and that it is good again."""
        left_s = self._lease.left_s()
        if left_s > 0:
            if self._lapsed:
                self._lapsed = False
                _log.warning("lease good again", worker=self.worker_id)
                self._fetcher.look()
        else:
            if not self._lapsed:
                self._lapsed = True
                _log.error("lease may have lapsed", worker=self.worker_id, hint="no beat reached storage")
                if self._observer is not None:
                    self._observer(LeaseLapsed())
                self._fetcher.look()  # it begins nothing now, and says so
            self._runner.interrupt_on_lapse()
            left_s = self._settings.beat_every_s / 4
        self._lapse_timer = self._loop.call_later(max(left_s, 0.001), self._watch_lease)

    # -- ending --------------------------------------------------------------------------------------
    async def stop(self, grace_s: float | None = None) -> None:
        """Drain: claim no more, let running bodies end for `grace_s`, stop the rest and hand them back.
        Returns when that is over. Idempotent; a drain under way keeps its own grace. A worker that is only
        starting ends as soon as it has started; that is not waited for."""
        if self._end is None:
            return
        self._begin_close(WorkerEnd.STOPPED, self._config.grace_s if grace_s is None else grace_s)
        if self._closing is not None:
            await asyncio.wait((self._closing,))

    def stop_now(self) -> None:
        """End within a second, with the same promises as a drain. Any thread."""
        if self._end is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._stop_now)
        except RuntimeError:
            pass  # the loop is closed, and the worker with it

    def _stop_now(self) -> None:
        self._hurry.set()
        self._begin_close(WorkerEnd.HURRIED, 0.0)

    async def wait(self) -> WorkerEnd:
        """How the worker ended, once it has. Raises the error that made it end, if one did."""
        if self._end is None:
            raise RuntimeError("the worker was not started")
        return await asyncio.shield(self._end)

    async def gone(self) -> None:
        """Return once nothing of the ended worker is left: until then its loop must go on, to settle the
        jobs of bodies that did not stop with it."""
        if self._lingering is not None:
            await asyncio.wait((self._lingering,))

    def _begin_close(self, end: WorkerEnd, grace_s: float) -> None:
        if not self._begun:
            self._wish = self._wish or (end, grace_s)
        elif self._closing is None:
            # Now, and not at that task's turn: a round just woken would claim what is only given back.
            self._fetcher.stop_claiming()
            self._runner.drain()
            self._closing = self._loop.create_task(self._close(end, grace_s), name="fluxmesh-worker-close")

    async def _close(self, end: WorkerEnd, grace_s: float) -> None:
        assert self._end is not None
        try:
            await self._drain(end, grace_s)
        except BaseException as error:
            if not self._end.done():
                self._end.set_exception(error)
            raise
        if self._hurry.is_set():
            end = WorkerEnd.HURRIED
        # Under a supervisor another takes its place. In a program nobody else would say that it is gone.
        say = _log.warning if end in (WorkerEnd.RETIRED, WorkerEnd.FENCED) else _log.info
        say("worker ended", worker=self.worker_id, epoch=self.epoch, end=end.value)
        if self._failure is not None:
            self._end.set_exception(self._failure)
        else:
            self._end.set_result(end)

    async def _drain(self, end: WorkerEnd, grace_s: float) -> None:
        _log.info("worker draining", worker=self.worker_id, why=end.value, running=self.running_count)
        self._status = "retiring" if end is WorkerEnd.RETIRED else "draining"
        self._housekeeper.request_stop()
        self._meshing.begin_leave()
        self._beater.nudge()
        await self._within(self._bodies_end(), grace_s, 0.0)
        for run in self._table.bodies():
            self._runner.interrupt(run)
        hard_s = self._settings.hard_grace_s
        await self._within(self._bodies_end(), hard_s, min(hard_s, HURRIED_GRACE_S))
        killed = self._runner.kill_isolated()
        if killed:
            await self._within(self._until(lambda: all(run.ended for run in killed)), KILL_S, HURRIED_GRACE_S)
        self._runner.mark_unstoppable()
        await self._within(self._last_words(), FLUSH_S, HURRIED_FLUSH_S)
        if self._table.bodies():
            # Their jobs stay owned and their lease is renewed for as long as they really run.
            self._beater.outlives = True
            self._lingering = self._loop.create_task(self._linger(), name="fluxmesh-worker-linger")
        else:
            await self._leave()

    async def _last_words(self) -> None:
        """Have storage know every end, and what the end of this process means for bodies that go on."""
        await asyncio.gather(self._fetcher.flush(FLUSH_S), self._progress.flush_deaths(FLUSH_S))

    async def _within(self, waiting: Coroutine[Any, Any, Any], calm_s: float, hurried_s: float) -> None:
        """Await this for at most so long; less from the moment on when the worker is hurried."""
        task = self._loop.create_task(waiting)
        if not self._hurry.is_set() and calm_s > 0:
            hurry = self._loop.create_task(self._hurry.wait())
            await asyncio.wait((task, hurry), timeout=calm_s, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        if self._hurry.is_set() and not task.done() and hurried_s > 0:
            await asyncio.wait((task,), timeout=hurried_s)
        task.cancel()
        await asyncio.wait((task,), timeout=LEAVE_S)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a step of the worker's end failed", error=f"{type(error).__name__}: {error}")

    async def _bodies_end(self) -> None:
        """Return when no slot is occupied; bodies that cannot be stopped occupy none."""
        await self._until(lambda: self._table.slots.occupied == 0)

    async def _until(self, holds: Callable[[], bool]) -> None:
        changed = asyncio.Event()
        self._table.on_change = changed.set
        try:
            while not holds():
                changed.clear()
                await changed.wait()
        finally:
            self._table.on_change = None

    async def _linger(self) -> None:
        await self._until(lambda: not self._table.bodies())
        await self._fetcher.flush(FLUSH_S)
        await self._leave()

    async def _leave(self) -> None:
        """End every part, say good-bye, close storage. Bounded."""
        for timer in (self._lapse_timer, self._retire_timer):
            if timer is not None:
                timer.cancel()
        self._runner.close()
        if self._runner.has_resources:
            await self._within(self._runner.close_resources(), RESOURCES_S, HURRIED_FLUSH_S)
        await self._runner.kill_processes()
        self._progress.close()
        await asyncio.gather(*(it.stop(LEAVE_S) for it in (self._fetcher, self._housekeeper, self._notices)))
        await self._meshing.left(hurried=self._hurry.is_set())
        await leave_storage(self._storage, self._ref, self._beater)
