"""What crosses the storage port: requests and answers, all frozen. Times in answers are relative
seconds unless a name ends in `_us` (storage time, microseconds)."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Final

from msgspec import Struct

from fluxmesh.job import JobError, JobOptions, Status
from fluxmesh.outcome import Counters, Transition

PARK_CAP: Final = 1_000
MAX_HOPS: Final = 2
MESH_VIEW_BYTES: Final = 64 << 10
HELD_TAKEABLE_AFTER_S: Final = 0.1
AFFINITY_WINDOW: Final = 63  # candidates of a tier beyond the first, at full weight
STRICT_S: Final = 30.0  # at weight 1 a job is kept for its living owner so long
NOBODYS_AFTER_S: Final = 5.0  # below it a job that has waited so long is everybody's own: none starves
# How an owner died when storage found out by itself; `declare_dead` of one who knows better replaces it.
PROCESS_GONE: Final = "its process is gone"


class WorkerRef(Struct, frozen=True, gc=False):
    """One run of a worker: its name and the epoch that `register` gave it."""

    worker_id: str
    epoch: int


class Owned(Struct, frozen=True, gc=False):
    """A job and the fencing token under which it is owned."""

    id: str
    token: int


class TaskSpec(Struct, frozen=True, array_like=True):
    """What a registration tells storage of a task: limits it enforces, defaults it applies.

    `options` holds the task's own run options, for whoever has to decide about its jobs without its code.
    """

    name: str
    queue: str | None = None
    tier: int | None = None
    rate_limit: str | None = None
    max_concurrent: int | None = None
    options: JobOptions = JobOptions()


class Registration(Struct, frozen=True, array_like=True):
    """A worker as it presents itself. `lease_s` and `beat_s` are its own; `donates`: others may take
    what it holds."""

    worker_id: str
    queues: tuple[str, ...]
    tiers: tuple[int, ...]
    tasks: tuple[TaskSpec, ...]
    capacity: int
    lease_s: float
    beat_s: float
    hostname: str = ""
    pid: int = 0
    donates: bool = True


class Verdict(StrEnum):
    """What became of one job of an enqueue."""

    CREATED = "created"
    EXISTING = "existing"
    CONFLICT = "conflict"
    FULL = "full"


class Enqueued(Struct, frozen=True, gc=False):
    """`id` is that of the job that stands: the new one, or the one that holds the id or key.

    `by` says what matched: "id", "idempotency" or "unique". `pruned`: the key is remembered, the job is gone.
    """

    id: str
    verdict: Verdict
    by: str | None = None
    status: Status | None = None
    pruned: bool = False


class OnDeath(IntEnum):
    """How a running job is to be ended when its owner is found dead."""

    CRASH = 0
    TIMEOUT = 1
    INTERRUPTED = 2


class ProgressNote(Struct, frozen=True):
    """Progress of an owned job. `on_death` (None = unchanged) is what its owner's death shall mean."""

    id: str
    token: int
    percent: float | None = None
    message: str | None = None
    on_death: OnDeath | None = None


class Settle(Struct, frozen=True):
    """The end of one attempt. Progress goes with it, as the body last reported it."""

    id: str
    token: int
    transition: Transition
    percent: float | None = None
    message: str | None = None


class Settled(StrEnum):
    APPLIED = "applied"
    ALREADY = "already"  # this very settle was applied before
    STALE = "stale"  # not the owner any more: counted, nothing changed


class Begun(StrEnum):
    BEGUN = "begun"
    OUTRANKED = (
        "outranked"  # a higher tier is ready, the queue is paused, or a limit registered since: released
    )
    LOST = "lost"


class Standing(StrEnum):
    """What storage thinks of the worker that asks."""

    GOOD = "good"
    UNKNOWN = "unknown"  # no row: claims are refused until a beat has put it back
    FENCED = "fenced"  # a newer epoch of the same id exists, or this one was declared dead: never again


class ClaimedJob(Struct, frozen=True, gc=False):
    """An owned job with all that is needed to run it. `options` is as stored (codec.decode_options)."""

    id: str
    token: int
    task: str
    queue: str
    tier: int
    payload: bytes
    options: bytes | None
    attempts: int
    crashes: int
    snoozes: int
    interruptions: int
    life: int
    hops: int = 0  # transfers so far of the present claim
    slot: int | None = None  # as NewJob has it

    @property
    def counters(self) -> Counters:
        return Counters(self.attempts, self.crashes, self.snoozes, self.interruptions)


class ExchangeRequest(Struct, frozen=True):
    """One round of a worker. `request_id` grows by one with each new request of an epoch and stays the
    same when a request is repeated. `slots` jobs may be given running, then `extra` held. `reserve[t]` of
    the slots are kept for jobs of tier t (what the worker's own reserve still lacks; empty = none). A job of
    `begin` that is not begun leaves its slot to the claim of this very exchange, beyond `slots`."""

    worker: WorkerRef
    request_id: int
    settle: tuple[Settle, ...] = ()
    begin: tuple[Owned, ...] = ()
    slots: int = 0
    extra: int = 0
    reserve: tuple[int, ...] = ()


class ExchangeAnswer(Struct, frozen=True):
    """`settled` and `begun` are in the order of the request. `more`: parking was cut short, ask again at
    once. `next_due_s`: when a job becomes due or a rate permit free; `next_held_s`: when take_held may
    find something. None = nothing known."""

    standing: Standing = Standing.GOOD
    settled: tuple[Settled, ...] = ()
    begun: tuple[Begun, ...] = ()
    running: tuple[ClaimedJob, ...] = ()
    held: tuple[ClaimedJob, ...] = ()
    more: bool = False
    next_due_s: float | None = None
    next_held_s: float | None = None


class TakeAnswer(Struct, frozen=True):
    """Jobs taken from other workers' buffers, given running."""

    running: tuple[ClaimedJob, ...] = ()
    next_held_s: float | None = None


class AffinityPart(Struct, frozen=True, array_like=True):
    """What belongs to a worker in these queues: jobs whose slot is in `slots` (affinity.has_slot), and those
    without one whose task is among `tasks`."""

    queues: tuple[str, ...]
    slots: bytes
    tasks: tuple[str, ...]


class Affinity(Struct, frozen=True, array_like=True):
    """The part of the work that a worker shall have before others. `weight` is from 0 (none) to 1 (strict);
    a queue that no part names has no order but that of arrival."""

    weight: float = 0.0
    parts: tuple[AffinityPart, ...] = ()


class WorkerView(Struct, frozen=True):
    """What a beat tells of its worker. A beat of a supervisor has no list of jobs and only renews.

    `mesh` is the mesh as the worker sees it, at most MESH_VIEW_BYTES, which storage keeps without reading
    it: None = as told before, b"" = nothing any more. `affinity` None = as told before."""

    registration: Registration
    status: str = "ready"  # ready, draining, retiring
    running: int = 0
    mesh: bytes | None = None
    affinity: Affinity | None = None


class BeatAnswer(Struct, frozen=True):
    """`lost`: presented as owned, but owned no longer. `cancelled`: their cancel flag stands.
    `command`: None, "quiet" or "stop". `now_us`: the storage's time. `has_affinity`: after this beat, storage
    knows of something that belongs to the worker; never to a supervisor."""

    standing: Standing
    lost: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    command: str | None = None
    now_us: int = 0
    has_affinity: bool = False


class Ground(StrEnum):
    """Why an owner is taken for dead."""

    LAPSED = "lease lapsed"
    PROVEN = "death proven"
    MISSING = "worker row missing"


class Orphan(Struct, frozen=True):
    """A job of a dead owner. `started` is False for one merely held. `task` as registered, if it is."""

    id: str
    token: int
    worker: WorkerRef
    ground: Ground
    how: str
    started: bool
    on_death: OnDeath
    task: str
    options: bytes | None
    spec: TaskSpec | None
    counters: Counters


class OrphansAnswer(Struct, frozen=True):
    """`armed` False: storage was out of sight or its clock was stepped; no lease counts as lapsed yet.

    `next_lapse_s`: when the first lease of a living worker lapses if it is not renewed; inf: nobody lives.
    None: this storage finds deaths by itself that are no lapse, and has to be asked all the time.
    """

    armed: bool
    jobs: tuple[Orphan, ...] = ()
    next_lapse_s: float | None = None


class Reap(Struct, frozen=True):
    """End or hand back an orphan. `transition` None: it was held, or never entered: back to its place."""

    id: str
    token: int
    transition: Transition | None = None


class Promoted(Struct, frozen=True):
    count: int
    next_due_s: float | None = None


class Tended(Struct, frozen=True):
    """One round of housekeeping. `promoted` is empty for one who does not lead."""

    leads: bool
    promoted: Promoted
    orphans: OrphansAnswer


class Retention(Struct, frozen=True):
    """How long what is over is kept, seconds. `worker_ttl_s`: rows of workers that are gone."""

    result_ttl_s: float
    dead_letter_ttl_s: float
    idempotency_ttl_s: float
    worker_ttl_s: float = 3_600.0


class Pruned(Struct, frozen=True):
    jobs: int = 0
    other: int = 0
    more: bool = False


class Cancelled(StrEnum):
    CANCELLED = "cancelled"
    REQUESTED = "requested"  # running: the flag is set, its worker will hear of it
    ENDED = "ended"
    UNKNOWN = "unknown"


class Done(StrEnum):
    """Answer per id of replay, discard and reprioritise."""

    DONE = "done"
    CONFLICT = "conflict"  # its state, or a unique key held by another job, does not allow it
    UNKNOWN = "unknown"


class Counts(Struct, frozen=True):
    """True numbers of stored jobs. `queued` is PENDING (parked too) + CLAIMED by (queue, tier)."""

    by_status: dict[Status, int]
    queued: dict[tuple[str, int], int]
    failed: int  # dead letters by error or timeout
    stale_settles: int

    @property
    def total(self) -> int:
        return sum(self.by_status.values())


class QueueStats(Struct, frozen=True):
    queue: str
    paused: bool
    queued: tuple[int, int, int, int]  # by tier: ready, parked and held
    scheduled: int
    running: int
    parked: int
    oldest_wait_s: float | None


class DeadGroup(Struct, frozen=True):
    """Dead letters of one fingerprint. `example` is the newest of them."""

    fingerprint: str
    task: str
    reason: str
    count: int
    newest_at: float
    example: str
    error: JobError | None


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """A worker for doors. `status`: ready, draining, retiring, silent, lapsed, dead."""

    worker_id: str
    epoch: int
    hostname: str
    pid: int
    queues: tuple[str, ...]
    tiers: tuple[int, ...]
    status: str
    capacity: int
    running: int
    held: int
    started_at: float
    last_heartbeat: float


class MeshView(Struct, frozen=True):
    """The mesh as one worker told it last, `told_at` by the storage's clock. `view` as in WorkerView."""

    worker_id: str
    epoch: int
    told_at: float
    view: bytes


class StorageInfo(Struct, frozen=True):
    """For `doctor`: what storage this is, in words, and its time. `details` are (name, value) pairs."""

    kind: str
    where: str
    namespace: str
    version: str
    details: tuple[tuple[str, str], ...] = ()
    now_us: int = 0
