"""One write transaction: its instant, its rows, and what has to follow from it.

A verb is a function that takes a Step. It changes rows through `moves`, and notes what it did; `finish` then
writes the counters and picks whom to wake, inside the same transaction; `ring` wakes them after the
commit.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import apsw
import msgspec
from msgspec import Struct

from fluxmesh.clock import Clock
from fluxmesh.limits import Rate, parse_rate
from fluxmesh.storage.affinities import Own, is_kept_apart, own_of
from fluxmesh.storage.sqlite.bells import ENDED, Belfry
from fluxmesh.storage.sqlite.locks import DeathLock
from fluxmesh.storage.sqlite.sqltext import Statements
from fluxmesh.storage.sqlite.wake import UNKNOWN_SLOT, Wish, wake
from fluxmesh.storage.values import Affinity, AffinityPart, Registration, Standing, TaskSpec

_decode_registration = msgspec.msgpack.Decoder(Registration).decode
_decode_spec = msgspec.msgpack.Decoder(TaskSpec).decode
_decode_parts = msgspec.msgpack.Decoder(tuple[AffinityPart, ...]).decode
encode_struct = msgspec.msgpack.Encoder().encode
_SEEN_MAX: Final = 4_096


class Row(Struct, frozen=True, gc=False):
    """The columns of a job by which moves are decided, as they stood at the start of the move."""

    rid: int
    id: str
    place: int
    lane: str
    pos: int
    seq: int
    queue: str
    tier: int
    task: str
    token: int
    life: int
    attempts: int
    crashes: int
    snoozes: int
    interruptions: int
    started_us: int | None
    worker_id: str | None
    history: bytes | None
    cancel: int | None
    on_death: int | None
    hops: int | None
    concurrency_key: str | None
    due_us: int | None
    expires_us: int | None
    percent: float | None
    message: str | None
    unique_key: str | None
    idempotency_key: str | None
    slot: int | None
    since_us: int  # when it became ready, if it did


class Me(Struct, frozen=True):
    """A registered worker, ready to be asked what it can run."""

    epoch: int
    worker_id: str
    queues: tuple[str, ...]
    tiers: tuple[int, ...]
    tasks: frozenset[str]
    donates: bool
    lease_us: int
    beat_us: int
    own: Own | None = None  # what belongs to it; None: nothing before others

    def can_run(self, queue: str, tier: int, task: str) -> bool:
        return task in self.tasks and tier in self.tiers and queue in self.queues


class Limit(Struct, frozen=True):
    """The limits of one task as registered. `tat_us`: see limits.py."""

    rate: Rate | None
    max_concurrent: int | None
    tat_us: float


class Shared:
    """What outlives a step: statements, caches of immutable rows, the clock, the bells."""

    def __init__(
        self, sql: Statements, clock: Clock, belfry: Belfry, *, proof_of_death: bool, lease_s: float
    ) -> None:
        self.sql = sql
        self.clock = clock
        self.belfry = belfry
        self.locks_folder = belfry.folder
        self.proof_of_death = proof_of_death
        self.lease_s = lease_s
        self.bell_name: str | None = None
        self.lock: DeathLock | None = None
        self.turns: dict[int, int] = {}
        self._registrations: dict[tuple[int, bytes], Me] = {}
        self._specs: dict[bytes, TaskSpec] = {}
        self._owns: dict[int, tuple[float, bytes, Own]] = {}

    def own(self, epoch: int, weight: float, parts: bytes) -> Own:
        known = self._owns.get(epoch)
        if known is None or known[:2] != (weight, parts):
            if len(self._owns) >= _SEEN_MAX:
                self._owns.clear()
            own = own_of(Affinity(weight, _decode_parts(parts)))
            known = self._owns[epoch] = (weight, parts, own)
        return known[2]

    def me(self, epoch: int, blob: bytes) -> Me:
        known = self._registrations.get((epoch, blob))
        if known is None:
            if len(self._registrations) >= _SEEN_MAX:
                self._registrations.clear()
            seen = _decode_registration(blob)
            known = self._registrations[(epoch, blob)] = Me(
                epoch=epoch,
                worker_id=seen.worker_id,
                queues=seen.queues,
                tiers=tuple(sorted(seen.tiers)),
                tasks=frozenset(spec.name for spec in seen.tasks),
                donates=seen.donates,
                lease_us=round(seen.lease_s * 1e6),
                beat_us=round(seen.beat_s * 1e6),
            )
        return known

    def spec(self, blob: bytes) -> TaskSpec:
        known = self._specs.get(blob)
        if known is None:
            if len(self._specs) >= _SEEN_MAX:
                self._specs.clear()
            known = self._specs[blob] = _decode_spec(blob)
        return known


class Step:
    """A transaction under way. `now_us` is wall time, `boot_us` time since boot; both are the storage's."""

    def __init__(self, db: apsw.Connection, shared: Shared) -> None:
        self.db = db
        self.shared = shared
        self.sql = shared.sql
        self.now_us: int = shared.clock.wall_us()
        self.boot_us: int = shared.clock.boot_us()
        self._seq: int | None = None
        self._tally: Counter[tuple[str, int, int]] = Counter()
        self._lanes: Counter[tuple[str, str, int, str, str]] = Counter()
        self._ready: Counter[Wish] = Counter()
        self._due: list[tuple[int, str, int, str]] = []
        self._ended: list[str] = []
        self._freed_tasks: set[str] = set()
        self._freed_keys: set[str] = set()
        self._opened_keys: set[str] = set()
        self._stale = 0
        self._limits: dict[str, Limit] | None = None
        self._owners: list[Me] | None = None
        self._rings: list[tuple[str, bytes]] = []
        self.asking: int | None = None  # the epoch whose own exchange this is: it need not be woken

    # -- reading -----------------------------------------------------------------------------------
    def one(self, name: str, *values: Any) -> tuple[Any, ...] | None:
        """The first row of a statement, or None."""
        return next(self.db.execute(self.sql[name], values), None)

    def all(self, name: str, *values: Any) -> list[tuple[Any, ...]]:
        return list(self.db.execute(self.sql[name], values))

    def run(self, name: str, *values: Any) -> int:
        """Execute; the number of rows changed."""
        self.db.execute(self.sql[name], values)
        return self.db.changes()

    def row(self, job_id: str) -> Row | None:
        found = next(self.db.execute(self.sql["step.row"], (job_id,)), None)
        return None if found is None else Row(*found)

    def standing(self, epoch: int) -> tuple[Standing, Me | None]:
        found = self.one("step.worker", epoch)
        if found is None:
            return Standing.UNKNOWN, None
        me = self.shared.me(epoch, found[1])
        if found[7] is not None:
            me = msgspec.structs.replace(me, own=self.shared.own(epoch, found[7], found[8]))
        if found[2] or found[3] is not None:
            return Standing.FENCED, me
        return Standing.GOOD, me

    def owners(self) -> list[Me]:
        """Living workers of good standing to whom something belongs."""
        if self._owners is None:
            self._owners = [
                msgspec.structs.replace(
                    self.shared.me(epoch, blob), own=self.shared.own(epoch, weight, parts)
                )
                for epoch, blob, weight, parts in self.all("step.owners", self.boot_us)
            ]
        return self._owners

    def limits(self) -> dict[str, Limit]:
        """Limits by task, as the newest registrations have them."""
        if self._limits is None:
            self._limits = {}
            for task, blob, tat_us in self.db.execute(self.sql["step.limits"]):
                spec = self.shared.spec(blob)
                rate = None if spec.rate_limit is None else parse_rate(spec.rate_limit)
                self._limits[task] = Limit(rate, spec.max_concurrent, tat_us)
        return self._limits

    def set_tat(self, task: str, tat_us: float) -> None:
        limit = self.limits()[task]
        self.limits()[task] = Limit(limit.rate, limit.max_concurrent, tat_us)
        self.run("step.set_tat", tat_us, task)

    # -- noting --------------------------------------------------------------------------------------
    def next_seq(self, count: int = 1) -> int:
        """The first of `count` fresh arrival numbers."""
        if self._seq is None:
            found = self.one("step.seq")
            self._seq = 0 if found is None else int(found[0])
        first = self._seq + 1
        self._seq += count
        return first

    def token_after(self, token: int) -> int:
        return max(token + 1, self.now_us)

    def count(self, queue: str, tier: int, place: int, change: int) -> None:
        self._tally[(queue, tier, place)] += change

    def pending_change(self, queue: str) -> int:
        """Jobs of a queue that this step has put into or taken from places 0-2 so far."""
        return sum(n for (name, _, place), n in self._tally.items() if name == queue and place <= 2)

    def lane_change(self, lane: str, queue: str, tier: int, change: int) -> None:
        _, _, kind, ref = lane.split(":", 3)
        self._lanes[(lane, queue, tier, kind, ref)] += change

    def ready(
        self, queue: str, tier: int, task: str, count: int = 1, *, slot: int | None = UNKNOWN_SLOT
    ) -> None:
        """Jobs that waiting workers should hear of; one to whom they belong before others, if `slot` is
        known (None: they have none)."""
        self._ready[(queue, tier, task, slot)] += count

    def ready_again(self, queue: str, tier: int, task: str, slot: int | None, since_us: int) -> None:
        """A job that waits since then; after a while it is nobody's in particular."""
        fresh = is_kept_apart(since_us, self.now_us)
        self.ready(queue, tier, task, slot=slot if fresh else UNKNOWN_SLOT)

    def scheduled(self, due_us: int, queue: str, tier: int, task: str) -> None:
        self._due.append((due_us, queue, tier, task))

    def ended(self, job_id: str) -> None:
        self._ended.append(job_id)

    def freed(self, task: str, key: str | None) -> None:
        """A running job has left its place, and with it the permits it had."""
        if task in self.limits():
            self._freed_tasks.add(task)
        if key is not None:
            self._freed_keys.add(key)

    def open_freed(self) -> None:
        """Let a claim of this very step see what a settle before it made free."""
        for key in self._freed_keys - self._opened_keys:
            self.run("step.open_key", key)
        self._opened_keys |= self._freed_keys

    def stale(self) -> None:
        self._stale += 1

    def ring(self, bell: str, message: bytes) -> None:
        """Send after the commit."""
        self._rings.append((bell, message))

    # -- ending --------------------------------------------------------------------------------------
    def finish(self) -> list[tuple[str, bytes]]:
        """Write counters, open what was freed, choose whom to wake. Returns the rings to send."""
        if self._seq is not None:
            self.run("step.set_seq", self._seq)
        if self._stale:
            self.run("step.add_stale", self._stale)
        if self._tally:
            changes = [(*key, n) for key, n in self._tally.items() if n]
            self.db.executemany(self.sql["step.tally"], changes)
        if self._lanes:
            self.db.executemany(self.sql["step.lane"], [(*key, n) for key, n in self._lanes.items() if n])
        self._announce_freed()
        self._announce_due()
        if self._ready:
            wake(self, self._ready)
        if self._ended and self.one("step.any_waiter"):
            self._tell_waiters()
        return self._rings

    def _announce_freed(self) -> None:
        for task in self._freed_tasks:
            for queue, tier, _ in self.all("step.lanes_of", "t", task):
                self.ready(queue, tier, task)
        self.open_freed()
        for key in self._freed_keys:
            for queue, tier, _ in self.all("step.lanes_of", "k", key):
                self.ready(queue, tier, "")

    def _announce_due(self) -> None:
        if not self._due:
            return
        first = min(self._due)
        stored = [at for at in self.one("claim.due") or () if at is not None]
        if not stored or first[0] <= min(stored):
            self.ready(*first[1:])

    def _tell_waiters(self) -> None:
        for job_id in self._ended:
            bells = self.all("step.waiters", job_id)
            for (bell,) in bells:
                self.ring(bell, ENDED + job_id.encode())
            if bells:
                self.run("step.drop_waiters", job_id)
