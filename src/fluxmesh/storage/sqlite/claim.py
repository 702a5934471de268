"""Who gets what: strict tiers, queues of a tier in turns, arrival order inside a queue.

`Claim` walks the ready jobs and the parking sets of one worker's own tasks in that order. A job it meets that
this worker may not run is parked on the spot, so that nobody meets it again in vain; one past its time is
expired.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from msgspec import Struct

from fluxmesh import limits
from fluxmesh.job import Status
from fluxmesh.storage.affinities import AHEAD_BYTES_MOST, OTHERS_MOST, Own, is_everybodys
from fluxmesh.storage.records import NO_WORKER
from fluxmesh.storage.sqlite import moves, place
from fluxmesh.storage.sqlite.belonging import Apart
from fluxmesh.storage.sqlite.step import Limit, Me, Step
from fluxmesh.storage.values import PARK_CAP, ClaimedJob

RATE = "its rate limit"
CONCURRENT = "a free place under max_concurrent"
KEY = "its concurrency key"
_PASSED_OVER_MOST = 100


class Found(Struct, frozen=True, gc=False):
    """A job that was met, with all that taking it needs."""

    rid: int
    id: str
    token: int
    task: str
    payload: bytes
    options: bytes | None
    attempts: int
    crashes: int
    snoozes: int
    interruptions: int
    life: int
    seq: int
    expires_us: int | None
    concurrency_key: str | None
    concurrency_limit: int | None
    slot: int | None
    since_us: int  # when it became ready
    queue: str
    tier: int
    place: int
    lane: str


def claimed(found: Found, token: int, hops: int = 0) -> ClaimedJob:
    """What the new owner is told of it."""
    return ClaimedJob(
        found.id, token, found.task, found.queue, found.tier, found.payload, found.options,
        found.attempts, found.crashes, found.snoozes, found.interruptions, found.life, hops, found.slot,
    )  # fmt: skip


class Claim:
    """One worker's look at what it may run, inside one step."""

    def __init__(self, step: Step, me: Me, request_id: int | None = None) -> None:
        self.step = step
        self.me = me
        self._request_id = request_id
        self._running: dict[str, int] = {}
        self.more = False
        self.next_look_us: int | None = None  # when a permit is free, or a job is kept apart no longer
        self.apart = Apart.of(step, me)
        self._limits = step.limits()
        self._paused = {row[0] for row in step.all("claim.paused")}
        step.open_freed()
        self._lanes = step.all("claim.open_lanes")
        self._budget = PARK_CAP
        self._shut: set[str] = set()
        self._best: int | None = None
        self._empty_below = 0
        self._takes: list[tuple[object, ...]] = []

    # -- walking -------------------------------------------------------------------------------------
    def runnable(self, tiers: Sequence[int], want: int, *, own_first: bool = True) -> Iterator[Found]:
        """Jobs this worker could start now, best first. Ends early with `more` when parking is used up."""
        queues = [queue for queue in self.me.queues if queue not in self._paused]
        if not queues:
            return
        turn = self.step.shared.turns.get(self.me.epoch, 0) % len(queues)
        queues = queues[turn:] + queues[:turn]
        for tier in tiers:
            yield from self._tier(tier, queues, want, own_first=own_first)
            if self.more:
                return

    def _tier(self, tier: int, queues: list[str], want: int, *, own_first: bool) -> Iterator[Found]:
        walks = [self._queue(tier, queue, want, own_first=own_first) for queue in queues]
        if len(walks) == 1:
            yield from walks[0]
            return
        while walks:
            for walk in list(walks):
                found = next(walk, None)
                if found is None:
                    walks.remove(walk)
                    if self.more:
                        return
                else:
                    yield found

    def _queue(self, tier: int, queue: str, want: int, *, own_first: bool) -> Iterator[Found]:
        own = self.me.own
        if own is None or not own_first or queue not in own.by_queue:
            return self._by_arrival(tier, queue, want)
        return self._own_first(self._by_arrival(tier, queue, want + own.window - 1), own)

    def _by_arrival(self, tier: int, queue: str, want: int) -> Iterator[Found]:
        walks = [self._lane(place.READY, place.ready_lane(tier, queue), queue, tier, want)]
        for lane, in_queue, in_tier, kind, ref in self._lanes:
            if in_tier != tier or in_queue != queue or lane in self._shut:
                continue
            if kind == "t" and (ref not in self.me.tasks or self._block(ref) is not None):
                continue
            walks.append(self._lane(place.PARKED, lane, queue, tier, want))
        merged = walks[0] if len(walks) == 1 else heapq.merge(*walks, key=lambda found: found.seq)
        others = 0
        for found in merged:
            if self.apart is not None and self._is_left(self.apart, found):
                others += 1
                if others >= OTHERS_MOST:
                    return
                continue
            if self._may_run(found):
                yield found
            if self.more:
                return

    def _own_first(self, walk: Iterator[Found], own: Own) -> Iterator[Found]:
        """Of the next jobs of the walk, as far as the window goes: the first own one, else the first."""
        passed: deque[Found] = deque()
        ahead = 0
        for found in walk:
            if own.has(found.queue, found.task, found.slot) or is_everybodys(
                found.since_us, self.step.now_us
            ):
                yield found
                continue
            passed.append(found)
            ahead += len(found.payload)
            if len(passed) >= own.window or ahead > AHEAD_BYTES_MOST:
                ahead -= len(passed[0].payload)
                yield from self._if_still(passed.popleft())
        while passed:
            yield from self._if_still(passed.popleft())

    def _if_still(self, found: Found) -> Iterator[Found]:
        """A job that was passed by, unless the permits that there were are used up since."""
        if not self.is_limited(found) or self._may_run(found):
            yield found

    def _lane(self, at: int, lane: str, queue: str, tier: int, want: int) -> Iterator[Found]:
        name = "claim.ready" if at == place.READY else "claim.parked"
        chunk = max(2, min(want + 1, 257))
        after = -1
        while True:
            rows = self.step.all(name, lane, after, chunk)
            for row in rows:
                if lane in self._shut:
                    return
                yield Found(*(*row, queue, tier, at, lane))
            if len(rows) < chunk:
                return
            after = rows[-1][11]

    def is_paused(self, queue: str) -> bool:
        return queue in self._paused

    def outranks(self, tier: int) -> bool:
        """Whether a job of a higher tier than this is ready that this worker could run; also if the look at
        them was cut short by parking, for then nobody knows."""
        if self._best is None and self._empty_below < tier:
            tiers = [better for better in self.me.tiers if self._empty_below <= better < tier]
            found = next(self.runnable(tiers, 1, own_first=False), None)
            if found is None and not self.more:
                self._empty_below = tier
            self._best = None if found is None else found.tier
        return self.more or (self._best is not None and self._best < tier)

    def may_begin(self, task: str) -> bool:
        """Whether no limit keeps a held job of this task from its start; if so its permit is used. Such a
        limit was registered since: a limited job is never held."""
        if task not in self._limits:
            return True
        if self._block(task) is not None:
            return False
        self._use_permit(task, running=True)
        self._best = None  # it may have been the permit of what was found there
        return True

    def _is_left(self, apart: Apart, found: Found) -> bool:
        """Whether it is left to another worker, to whom it belongs. Notes when that ends."""
        until_us = apart.until_us(found.queue, found.tier, found.task, found.slot, found.since_us)
        if until_us is not None:
            self._look_again(until_us)
        return until_us is not None

    def _look_again(self, at_us: int) -> None:
        self.next_look_us = at_us if self.next_look_us is None else min(at_us, self.next_look_us)

    # -- judging -------------------------------------------------------------------------------------
    def _may_run(self, found: Found) -> bool:
        if found.expires_us is not None and found.expires_us <= self.step.now_us:
            self._spend()
            row = self.step.row(found.id)
            if row is not None:
                moves.to_end(self.step, row, Status.EXPIRED, token=row.token)
            return False
        if found.task not in self.me.tasks:
            self._park(found, place.task_lane(found.tier, found.queue, found.task), NO_WORKER)
            return False
        if self._limits:
            reason = self._block(found.task)
            if reason is not None:
                self._park(found, place.task_lane(found.tier, found.queue, found.task), reason)
                return False
        if found.concurrency_key is not None and not self._key_is_free(found):
            lane = place.key_lane(found.tier, found.queue, found.concurrency_key)
            self.step.run("claim.close_key", lane, found.queue, found.tier, found.concurrency_key)
            self._park(found, lane, KEY)
            return False
        return True

    def _block(self, task: str) -> str | None:
        """Why no job of this task may start now; None: one may."""
        limit = self._limits.get(task)
        if limit is None:
            return None
        if limit.max_concurrent is not None:
            if task not in self._running:
                counted = self.step.one("claim.running_of_task", task)
                self._running[task] = 0 if counted is None else counted[0]
            if self._running[task] >= limit.max_concurrent:
                return CONCURRENT
        if limit.rate is not None and limits.permits(limit.rate, limit.tat_us, self.step.now_us) < 1:
            self._look_again(limits.next_permit_us(limit.rate, limit.tat_us))
            return RATE
        return None

    def _key_is_free(self, found: Found) -> bool:
        running = self.step.one("claim.running_of_key", found.concurrency_key)
        return running is None or running[0] < (found.concurrency_limit or 1)

    def _park(self, found: Found, lane: str, reason: str) -> None:
        self._spend()
        if found.place == place.PARKED and found.lane == lane:
            self._shut.add(lane)  # all behind it wait for the same
            return
        self.step.run("claim.park", lane, found.seq, reason, found.rid)
        self.step.count(found.queue, found.tier, found.place, -1)
        self.step.count(found.queue, found.tier, place.PARKED, 1)
        self.step.lane_change(lane, found.queue, found.tier, 1)
        if found.place == place.PARKED:
            self.step.lane_change(found.lane, found.queue, found.tier, -1)

    def _spend(self) -> None:
        self._budget -= 1
        if self._budget <= 0:
            self.more = True

    # -- taking --------------------------------------------------------------------------------------
    def is_limited(self, found: Found) -> bool:
        return found.concurrency_key is not None or found.task in self._limits

    def take(self, found: Found, *, running: bool) -> ClaimedJob:
        """Make a job this worker's, with a new token."""
        step = self.step
        token = step.token_after(found.token)
        to = place.RUNNING if running else place.HELD
        values = (
            to, str(self.me.epoch), step.boot_us, token, step.now_us if running else None,
            self.me.worker_id, self._request_id, found.rid,
        )  # fmt: skip
        if self.is_limited(found):
            # At once, so that the next look at the permits counts it.
            step.db.execute(step.sql["claim.take"], values)
            self._use_permit(found.task, running=running)
        else:
            self._takes.append(values)
        step.count(found.queue, found.tier, found.place, -1)
        step.count(found.queue, found.tier, to, 1)
        if found.place == place.PARKED:
            step.lane_change(found.lane, found.queue, found.tier, -1)
        return claimed(found, token)

    def _use_permit(self, task: str, *, running: bool) -> None:
        if running and task in self._running:
            self._running[task] += 1
        limit: Limit | None = self._limits.get(task)
        if limit is not None and limit.rate is not None:
            self.step.set_tat(task, limits.take(limit.rate, limit.tat_us, self.step.now_us, 1))

    def write(self) -> None:
        """Store what was taken; at the end of the walk, for all at once."""
        if self._takes:
            self.step.db.executemany(self.step.sql["claim.take"], self._takes)
            self._takes.clear()

    def _tell_of(self, found: Found) -> None:
        self.step.ready_again(found.queue, found.tier, found.task, found.slot, found.since_us)

    def claim(
        self, slots: int, extra: int, reserve: Sequence[int]
    ) -> tuple[list[ClaimedJob], list[ClaimedJob]]:
        """Up to `slots` jobs given running, then up to `extra` held."""
        running: list[ClaimedJob] = []
        held: list[ClaimedJob] = []
        lacking = list(reserve) or [0, 0, 0, 0]
        left = slots
        passed_over = 0
        last_held: Found | None = None
        for found in self.runnable(self.me.tiers, slots + extra):
            kept = sum(lacking) - lacking[found.tier] if reserve else 0
            if left > kept:
                running.append(self.take(found, running=True))
                left -= 1
                lacking[found.tier] = max(0, lacking[found.tier] - 1)
            elif extra > len(held) and not self.is_limited(found):
                held.append(self.take(found, running=False))
                last_held = found
            elif left == 0 and extra <= len(held):
                self._tell_of(found)
                last_held = None
                break
            else:
                passed_over += 1
                if passed_over >= _PASSED_OVER_MOST:
                    break
        self.write()
        if last_held is not None:
            self._tell_of(last_held)  # there may be held jobs to take from now on
        if running:
            turns = self.step.shared.turns
            turns[self.me.epoch] = turns.get(self.me.epoch, 0) + len(running)
        return running, held
