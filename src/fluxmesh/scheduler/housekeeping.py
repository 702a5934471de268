"""What any process may do for all: promote what is due, take back dead owners' jobs, prune.

Every step is idempotent, so it does no harm that many do it. The `lead` key only decides who bothers to
promote and prune. Orphans are looked for by everybody: the key of a leader that was killed lives on for
some seconds, and its jobs shall not wait for that.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from fluxmesh.clock import Clock
from fluxmesh.codec import decode_options
from fluxmesh.config import Settings
from fluxmesh.errors import StorageDamaged
from fluxmesh.ids import new_nonce
from fluxmesh.job import JobError, JobOptions, Outcome
from fluxmesh.outcome import MAX_DELAY_S, End, decide
from fluxmesh.service import Service
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import (
    PROCESS_GONE,
    OnDeath,
    Orphan,
    OrphansAnswer,
    Reap,
    Retention,
    Settled,
)
from fluxmesh.task import TaskRegistry, policy_for

# How a process ended that its operator or its supervisor stopped; a reason may follow. Nothing is charged
# for it.
STOPPED: Final = "stopped"
LEFT: Final = "left"  # of its own accord, no body running: what it owned never reached it, or its end did not
WATCH_S: Final = 0.4  # longest time between two looks for orphans where only a look can find them
# Longest time between two looks where it is known what lapses when; of the time of the leader's key.
QUIET_SHARE: Final = 2 / 3
PATIENCE_S: Final = 0.1  # for a dead process's own supervisor, which knows what killed it, to say so
LEAD_PERIODS: Final = 3  # the key outlives so many reap periods
PRUNE_EVERY_S: Final = 5.0
ORPHANS_BATCH: Final = 100
PROMOTE_BATCH: Final = 1_000
PRUNE_BATCH: Final = 500
ROUNDS_MAX: Final = 20  # batches of one kind in one round; the rest is left to the next
SHORTEST_REST_S: Final = 0.002  # between promotions of jobs that are due one right after the other


def options_of(blob: bytes | None) -> JobOptions:
    """The job's own options; for a blob that cannot be read, none: its owner's death must not wait."""
    try:
        return decode_options(blob)
    except (msgspec.MsgspecError, RecursionError):
        return JobOptions()


def end_of(orphan: Orphan) -> End:
    """How a started job ended whose owner is dead. A crash is charged only where the process died of itself:
    not for a body that was overdue, not for a job that its worker had marked, not for an operator's stop."""
    how = orphan.how or orphan.ground.value
    if orphan.on_death is OnDeath.TIMEOUT:
        message = f"the process of {orphan.worker.worker_id} ended before it did: {how}"
        return End(Outcome.TIMEOUT, error=JobError("JobTimeout", message), reason=how)
    if orphan.on_death is OnDeath.INTERRUPTED or how.startswith(STOPPED) or how == LEFT:
        return End(Outcome.INTERRUPTED, reason=how)
    message = f"{orphan.worker.worker_id} (epoch {orphan.worker.epoch}): {how}"
    return End(Outcome.CRASHED, error=JobError("WorkerLost", message), reason=how)


def decide_orphan(
    orphan: Orphan, settings: Settings, rng: random.Random, registry: TaskRegistry | None = None
) -> Reap:
    """What becomes of an orphan. Total: odd stored options fall back to the defaults."""
    if not orphan.started:
        return Reap(orphan.id, orphan.token)
    own = orphan.spec.options if orphan.spec is not None else None
    if own is None and registry is not None:
        definition = registry.get(orphan.task)
        own = definition.spec.options if definition is not None else None
    end, task, counters = end_of(orphan), orphan.task, orphan.counters
    try:
        transition = decide(task, end, counters, policy_for(options_of(orphan.options), own, settings), rng)
        if math.isfinite(transition.delay_s) and 0 <= transition.delay_s <= MAX_DELAY_S:
            return Reap(orphan.id, orphan.token, transition)
    except (TypeError, ValueError, ArithmeticError):
        pass  # options that decode and still make no sense
    transition = decide(task, end, counters, policy_for(JobOptions(), None, settings), rng)
    return Reap(orphan.id, orphan.token, transition)


class Housekeeper(Service):
    """The housekeeping loop of one process.

    `on_time_s` None: rounds follow when a lease may lapse, or at the watching interval, as in a worker, whose
    claims promote what is due anyhow. A number: a leader also wakes at each due instant, and rests at most so
    long while none is known (`fluxmesh scheduler`).
    """

    def __init__(
        self,
        storage: Storage,
        settings: Settings,
        clock: Clock,
        rng: random.Random,
        registry: TaskRegistry | None = None,
        *,
        on_time_s: float | None = None,
        on_damage: Callable[[StorageDamaged], object] | None = None,
    ) -> None:
        interval_s = min(WATCH_S, settings.reap_s / 2)
        super().__init__("housekeeping", interval_s=interval_s, rng=rng, on_damage=on_damage)
        self.leading = False
        self._storage = storage
        self._settings = settings
        self._clock = clock
        self._registry = registry
        self._on_time_s = on_time_s
        self._holder = f"{socket.gethostname()}-{os.getpid()}-{new_nonce()}"
        self._prune_again_s = self._clock.mono_s() + PRUNE_EVERY_S * rng.random()
        # A leader that dies is followed by another before its own lease lapses.
        self._lead_s = min(LEAD_PERIODS * settings.reap_s, settings.lease_s / 2)
        self._armed: bool | None = None  # not known before the first look
        self._retention = Retention(settings.result_ttl, settings.dead_letter_ttl, settings.idempotency_ttl)

    async def run_once(self) -> float | None:
        """Lead or look who does; as leader promote and, now and then, prune; in any case reap."""
        now_s = self._clock.mono_s()
        ttl_s = self._lead_s
        tended = await self._storage.tend(self._holder, ttl_s, promote=PROMOTE_BATCH, orphans=ORPHANS_BATCH)
        self.leading = tended.leads
        next_due_s = tended.promoted.next_due_s
        if tended.promoted.count >= PROMOTE_BATCH:
            next_due_s = await self._promote()
        await self._reap(tended.orphans, PATIENCE_S)
        if self.leading and now_s >= self._prune_again_s:
            await self._prune(now_s)
        return self.rest_s(next_due_s, tended.orphans.next_lapse_s)

    def rest_s(self, next_due_s: float | None, next_lapse_s: float | None) -> float | None:
        """None: the watching interval."""
        if self._on_time_s is not None:
            rest_s = self._on_time_s if next_due_s is None else max(next_due_s, SHORTEST_REST_S)
            return min(rest_s, self.interval_s)
        if next_lapse_s is None:
            return None
        # What lapses is known. What is due is promoted by claims, but by those of workers that know of it.
        rest_s = min(next_lapse_s + SHORTEST_REST_S, self._lead_s * QUIET_SHARE)
        if next_due_s is not None:
            rest_s = min(rest_s, next_due_s)
        return max(rest_s, self.interval_s)

    async def reap_orphans(self, *, patience_s: float = 0.0) -> int:
        """Take back the jobs of owners that are dead now. The number of jobs."""
        return await self._reap(await self._storage.orphans(ORPHANS_BATCH), patience_s)

    async def _reap(self, answer: OrphansAnswer, patience_s: float) -> int:
        """With patience, a job whose owner died of a cause nobody has named yet is looked at once more after
        that time."""
        reaped = 0
        for _ in range(ROUNDS_MAX):
            self._note_arming(answer)
            if not answer.jobs:
                break
            if patience_s and any(job.how == PROCESS_GONE for job in answer.jobs):
                await asyncio.sleep(patience_s)
                patience_s = 0.0
            else:
                items = [decide_orphan(job, self._settings, self._rng, self._registry) for job in answer.jobs]
                settled = await self._storage.reap(items)
                pairs = zip(answer.jobs, settled, strict=True)
                done = [job for job, what in pairs if what is Settled.APPLIED]
                self._note_reaped(done)
                reaped += len(done)
                if not done or len(answer.jobs) < ORPHANS_BATCH:
                    break
            answer = await self._storage.orphans(ORPHANS_BATCH)
        return reaped

    async def _promote(self) -> float | None:
        """Seconds to the next due instant; None: none known."""
        for _ in range(ROUNDS_MAX):
            promoted = await self._storage.promote(PROMOTE_BATCH)
            if promoted.count < PROMOTE_BATCH:
                return promoted.next_due_s
        return 0.0

    async def _prune(self, now_s: float) -> None:
        more = True
        for _ in range(ROUNDS_MAX):
            pruned = await self._storage.prune(self._retention, PRUNE_BATCH)
            more = pruned.more
            if not more or self.stopping:
                break
        if not more:  # else the next round goes on
            self._prune_again_s = now_s + PRUNE_EVERY_S * self._rng.uniform(0.8, 1.2)

    def _note_arming(self, answer: OrphansAnswer) -> None:
        before, self._armed = self._armed, answer.armed
        if answer.armed is before:
            return
        if answer.armed:
            self._log.info("leases armed")
        elif before is None:
            self._log.debug("leases disarmed", why="nobody has looked after this storage lately")
        else:
            self._log.warning("leases disarmed", why="storage was out of sight or its clock was stepped")

    def _note_reaped(self, jobs: Sequence[Orphan]) -> None:
        groups = Counter((job.worker, job.ground, job.how) for job in jobs)
        for (worker, ground, how), count in groups.items():
            self._log.warning(
                "jobs reaped",
                count=count,
                worker=worker.worker_id,
                epoch=worker.epoch,
                ground=ground.value,
                how=how,
            )
