"""The process above the workers: it starts them, keeps their leases, proves their deaths and fills their
places.

It runs no user code, so nothing a job does can stop it. Children stay in its process group (the reasons
stand in signals.py); they end by themselves when it dies, by the end of file on their standard input.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.obs.log import get_logger
from fluxmesh.scheduler.housekeeping import STOPPED
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import WorkerRef
from fluxmesh.worker.child_process import ChildProcess, ChildSpec
from fluxmesh.worker.death_reporter import CLOSE_S, Death, DeathReporter
from fluxmesh.worker.deaths import (
    EXIT_FENCED,
    EXIT_HURRIED,
    EXIT_STOPPED,
    STABLE_AFTER_S,
    Next,
    how_ended,
    next_step,
    restart_delay_s,
)
from fluxmesh.worker.guard import NOTE_S, ChildGuard
from fluxmesh.worker.rival import live_rival
from fluxmesh.worker.signals import TELLING_GAP_S, StopSignals

# The whole worker ends so long after the grace periods, and after the second telling; its children before.
EXIT_SLACK_S: Final = 2.0
KILL_SLACK_S: Final = 1.4
HURRY_EXIT_S: Final = 1.0
HURRY_KILL_S: Final = 0.6
LAST_S: Final = 0.4  # of these, for the end of this process itself
LEAST_CLOSE_S: Final = 0.2
KILLED: Final = "killed by its supervisor"
# A process manager that signals the process and its group means it once.
SAME_MOMENT_S: Final = 0.02
FORWARD_GAP_S: Final = TELLING_GAP_S + 0.05


class _Place:
    """What the supervisor knows of one child's place."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.log = get_logger("supervisor").bind(worker=spec.worker_id)
        self.child: ChildProcess | None = None
        self.killed = False  # by us, because it did not end in time
        self.was_ready = False
        self.failures = 0  # short lives running
        self.stalls = 0  # and those that were ended because they stood still

    def noted_ready(self) -> None:
        self.was_ready = True
        pid = None if self.child is None else self.child.pid
        self.log.info("worker ready", pid=pid)


class Supervisor:
    """Keeps one child alive for each spec until it is told to stop.

    `open_storage` is called at the first death. With `settings.proof_of_death` off, deaths are not
    declared: the leases run out. A child whose id another live worker has taken over is not started again:
    the later one keeps the id, and this whole worker ends with 1.
    """

    def __init__(
        self,
        *,
        children: Sequence[ChildSpec],
        open_storage: Callable[[bool], Awaitable[Storage]],
        settings: Settings,
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        self._places = [_Place(spec) for spec in children]
        self._settings = settings
        self._open_storage = open_storage
        self._clock = clock
        self._rng = rng or random.Random()
        self._reporter = DeathReporter(
            open_storage=open_storage, settings=settings, clock=clock, rng=self._rng
        )
        self._log = get_logger("supervisor")
        self._tellings = 0
        self._told = asyncio.Event()
        self._first_told_at = 0.0
        self._exit_at = 0.0
        self._closings: set[asyncio.Future[None]] = set()
        self._exit_code: int | None = None
        self._timers: list[asyncio.TimerHandle] = []

    async def run(self, *, take_signals: bool = True) -> int:
        """Start the children and keep them. Answers the exit code: 0 when all have ended after one
        telling or of their own accord, 1 after a second telling or if another took over a child's id, or
        that of a child which cannot start.

        Takes over SIGTERM and SIGINT meanwhile, and so runs on the main thread; with `take_signals` False
        whoever runs it beside something else calls `stop`.
        """
        signals = StopSignals(self.stop, self.stop, gap_s=SAME_MOMENT_S)
        if take_signals:
            signals.install()
        try:
            await self._reporter.start()
            await asyncio.gather(*(self._keep(place) for place in self._places))
        finally:
            for timer in self._timers:
                timer.cancel()
            await self._reporter.close(self._time_left_s())
        signals.end_with(self._code)
        return self._code

    @property
    def _code(self) -> int:
        if self._exit_code is not None:
            return self._exit_code
        return EXIT_STOPPED if self._tellings < 2 else EXIT_HURRIED

    def stop(self) -> None:
        """A telling, as by a signal: the first lets the children drain, the second ends them within 1 s."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._tellings += 1
        if self._tellings == 1:
            self._told.set()
            self._first_told_at = now
            self._log.info("worker stops", grace_s=self._settings.grace_s)
            self._forward()
            patience_s = self._settings.grace_s + self._settings.hard_grace_s + KILL_SLACK_S
            self._timers.append(loop.call_at(now + patience_s, self._kill))
            self._exit_at = now + patience_s - KILL_SLACK_S + EXIT_SLACK_S
        elif self._tellings == 2:
            self._log.warning("worker stops at once")
            forward_at = max(now, self._first_told_at + FORWARD_GAP_S)
            self._timers.append(loop.call_at(forward_at, self._forward))
            self._timers.append(loop.call_at(now + HURRY_KILL_S, self._kill))
            self._exit_at = min(self._exit_at, now + HURRY_EXIT_S)

    def _time_left_s(self) -> float:
        """What is left to tell storage of deaths in, so that the whole worker ends when it has to."""
        if not self._tellings:
            return CLOSE_S
        due = self._exit_at - LAST_S - asyncio.get_running_loop().time()
        return min(CLOSE_S, max(LEAST_CLOSE_S, due))

    def _forward(self) -> None:
        for place in self._places:
            if place.child is not None:
                place.child.send(signal.SIGTERM)

    def _kill(self) -> None:
        for place in self._places:
            if place.child is not None:
                place.killed = True
                place.log.warning("worker killed: it did not end in time", pid=place.child.pid)
                place.child.send(signal.SIGKILL)

    async def _keep(self, place: _Place) -> None:
        """One place, from its first child to its last."""
        loop = asyncio.get_running_loop()
        step = Next.RESTART
        while not self._told.is_set():
            began = loop.time()
            step = await self._live(place)
            if step in (Next.LEAVE, Next.GIVE_UP):
                return
            lived_s = loop.time() - began
            if step is Next.REPLACE or lived_s >= STABLE_AFTER_S:
                place.failures = 0
            if lived_s >= STABLE_AFTER_S:
                place.stalls = 0
            if step is Next.RESTART:
                place.failures += 1
            if step is Next.RENEW:
                place.stalls += 1
            if step is not Next.REPLACE:
                await self._rest(place)

    async def _live(self, place: _Place) -> Next:
        """One child from its start to its end."""
        try:
            child = await ChildProcess.spawn(place.spec, log=place.log, on_ready=place.noted_ready)
        except OSError as error:
            place.log.warning("worker cannot be started", error=str(error))
            return Next.RESTART
        place.child = child
        place.log.info("worker started", pid=child.pid)
        if self._told.is_set():
            child.send(signal.SIGTERM)  # told while it was being started
        guard = await self._guard(place, child)
        try:
            code = await child.wait()
            await guard.stop(self._patience_s)
            step = self._ended(place, child, code, guard)
        finally:
            place.child = None
            await self._close(guard)
            child.ledger.close()
        if step is Next.RESTART and code == EXIT_FENCED and await self._outlived_by_rival(place, child):
            return Next.GIVE_UP
        return step

    async def _close(self, guard: ChildGuard) -> None:
        """It may have to let go of a storage that does not answer; once told to end, we do not wait."""
        closing = asyncio.ensure_future(guard.close(self._patience_s))
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)
        await asyncio.wait((closing,), timeout=self._time_left_s() / 2 if self._tellings else None)

    @property
    def _patience_s(self) -> float:
        """For what has to be waited for at the end of a child."""
        return NOTE_S if self._tellings < 2 else NOTE_S / 20

    async def _guard(self, place: _Place, child: ChildProcess) -> ChildGuard:
        guard = ChildGuard(
            child,
            open_storage=self._open_storage,
            stall_limit_s=self._settings.stall_limit_s,
            clock=self._clock,
            log=place.log,
            rng=self._rng,
        )
        await guard.start()
        return guard

    async def _outlived_by_rival(self, place: _Place, child: ChildProcess) -> bool:
        rival = await live_rival(self._open_storage, place.spec.worker_id, child.epoch or 0)
        if rival is None:
            return False
        place.log.error(
            "worker id taken",
            by_pid=rival.pid,
            by_host=rival.hostname,
            hint="give every worker an --id of its own, or leave it out",
        )
        if not self._told.is_set():
            self._exit_code = EXIT_HURRIED
            self.stop()
        return True

    def _ended(self, place: _Place, child: ChildProcess, code: int, guard: ChildGuard) -> Next:
        stopping = self._told.is_set()
        drained = code == EXIT_STOPPED and child.ended
        by_us = place.killed or (stopping and code in (EXIT_HURRIED, -signal.SIGTERM))
        left = drained and not child.left_running
        how = STOPPED if by_us or (drained and not left) else how_ended(code)
        stall = guard.stall if code == -signal.SIGKILL else None
        if stall is not None:
            how = f"{KILLED if stall.culprit_unknown else STOPPED}: {stall.what}"
        if not left and child.epoch is not None:
            declared = how if self._settings.proof_of_death else None
            if declared is not None or guard.untold:
                ref = WorkerRef(place.spec.worker_id, child.epoch)
                self._reporter.report(Death(ref, declared, guard.untold))
        say = place.log.info if drained or by_us else place.log.warning
        say("worker ended", pid=child.pid, epoch=child.epoch, how=how)
        step = next_step(
            code,
            was_ready=any(other.was_ready for other in self._places),
            stopping=stopping,
            said_so=child.ended,
            hopeless=child.hopeless,
            stalled=stall is not None,
        )
        if step is Next.GIVE_UP:
            self._exit_code = code
            self.stop()
        return step

    async def _rest(self, place: _Place) -> None:
        """Back-off before a restart, cut short by a telling."""
        delay_s = restart_delay_s(place.failures, place.stalls)
        place.log.info("worker restarts", delay_s=delay_s, failures=place.failures, stalls=place.stalls)
        try:
            async with asyncio.timeout(delay_s):
                await self._told.wait()
        except TimeoutError:
            pass
