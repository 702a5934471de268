"""A simple model of a storage: what each job may be, given all that was answered so far.

It is told every call and its answer, objects to answers that no sound storage could give, and is compared
with every job after every step. Where the port leaves room (when a due job is promoted, when a late one is
expired), the model allows what may be and then takes over what is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fluxmesh import limits
from fluxmesh.job import TERMINAL, Job, Status, is_legal
from fluxmesh.outcome import Transition
from fluxmesh.storage.affinities import Own, is_everybodys, is_kept_apart
from fluxmesh.storage.values import Begun, ClaimedJob, TaskSpec, WorkerRef
from fluxmesh.submission import NewJob

OWNED = (Status.CLAIMED, Status.RUNNING)
QUEUED = (Status.SCHEDULED, Status.PENDING, Status.CLAIMED)


@dataclass(slots=True)
class Known:
    """One job as the model knows it. Times are storage wall microseconds."""

    new: NewJob
    queue: str
    tier: int
    status: Status
    due_us: int
    expires_us: int | None
    token: int = 0
    life: int = 1
    owner: WorkerRef | None = None
    cancel: bool = False
    started: bool = False
    ended_us: int = 0
    taken_us: int = 0
    hops: int = 0
    # (arrival number, due instant): jobs promoted in one step share the number and go by the instant.
    arrival: tuple[int, int] = (0, 0)

    @property
    def id(self) -> str:
        return self.new.id

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL


NOTHING_OWN: Final = Own(0.0, {})


@dataclass(slots=True)
class Seat:
    """One worker epoch."""

    ref: WorkerRef
    queues: tuple[str, ...]
    tiers: tuple[int, ...]
    tasks: frozenset[str]
    donates: bool = True
    renewed_us: int = 0
    fenced: bool = False
    dead: bool = False
    missing: bool = False
    own: Own = NOTHING_OWN

    @property
    def is_good(self) -> bool:
        return not (self.fenced or self.dead or self.missing)


@dataclass(slots=True)
class Model:
    jobs: dict[str, Known] = field(default_factory=dict)
    keys: dict[str, tuple[str, bytes | None]] = field(default_factory=dict)
    seats: list[Seat] = field(default_factory=list)
    specs: dict[str, TaskSpec] = field(default_factory=dict)
    tats: dict[str, float] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    gone: dict[str, Known] = field(default_factory=dict)
    stale: int = 0
    lease_us: int = 0
    arrivals: int = 0

    # -- what may be -----------------------------------------------------------------------------------
    def allowed(self, job: Known, now_us: int) -> set[Status]:
        """Where the job may be found at this instant."""
        may = {job.status}
        if job.status is Status.SCHEDULED and job.due_us <= now_us:
            may.add(Status.PENDING)
        if job.status in QUEUED and self.is_late(job, now_us):
            may.add(Status.EXPIRED)
        return may

    def is_late(self, job: Known, now_us: int) -> bool:
        return job.expires_us is not None and not job.started and job.expires_us <= now_us

    def owned_by(self, ref: WorkerRef, *statuses: Status) -> list[Known]:
        return [job for job in self.jobs.values() if job.owner == ref and job.status in statuses]

    def running(self) -> list[Known]:
        return [job for job in self.jobs.values() if job.status is Status.RUNNING]

    def holder(self, queue: str, unique_key: str) -> Known | None:
        for job in self.jobs.values():
            if (job.queue, job.new.unique_key) == (queue, unique_key) and not job.ended:
                return job
        return None

    def can_run(self, seat: Seat, job: Known) -> bool:
        return job.queue in seat.queues and job.tier in seat.tiers and job.new.task in seat.tasks

    def is_limited(self, job: Known) -> bool:
        spec = self.specs.get(job.new.task, TaskSpec(job.new.task))
        return (
            job.new.concurrency_key is not None
            or spec.rate_limit is not None
            or spec.max_concurrent is not None
        )

    def has_permit(self, job: Known, now_us: int) -> bool:
        """Whether no limit keeps the job from being started now."""
        running = self.running()
        key, spec = job.new.concurrency_key, self.specs.get(job.new.task, TaskSpec(job.new.task))
        if key is not None:
            of_key = sum(other.new.concurrency_key == key for other in running)
            if of_key >= (job.new.concurrency_limit or 1):
                return False
        if spec.max_concurrent is not None:
            of_task = sum(other.new.task == spec.name for other in running)
            if of_task >= spec.max_concurrent:
                return False
        if spec.rate_limit is not None:
            rate = limits.parse_rate(spec.rate_limit)
            return limits.permits(rate, self.tats.get(spec.name, 0.0), now_us) > 0
        return True

    def is_own(self, seat: Seat, job: Known, now_us: int) -> bool:
        """Whether the job comes before others for this worker."""
        return self.belongs(seat, job) or is_everybodys(job.due_us, now_us)

    def belongs(self, seat: Seat, job: Known) -> bool:
        return seat.own.has(job.queue, job.new.task, job.new.slot)

    def is_left(self, seat: Seat, job: Known, now_us: int) -> bool:
        """Whether this worker has to leave the job to another, to whom it belongs."""
        if not seat.own.is_strict or job.queue not in seat.own.by_queue or self.belongs(seat, job):
            return False
        return is_kept_apart(job.due_us, now_us) and any(
            other.is_good
            and now_us - other.renewed_us <= self.lease_us
            and self.belongs(other, job)
            and self.can_run(other, job)
            for other in self.seats
            if other is not seat
        )

    def ready_for(self, seat: Seat, now_us: int) -> list[Known]:
        """Jobs that this worker could be given now, each by itself."""
        return [
            job
            for job in self.jobs.values()
            if Status.PENDING in self.allowed(job, now_us)
            and not self.is_late(job, now_us)
            and self.can_run(seat, job)
            and job.queue not in self.paused
            and self.has_permit(job, now_us)
            and not self.is_left(seat, job, now_us)
        ]

    # -- what happens ----------------------------------------------------------------------------------
    def arrive(self, *jobs: Known) -> None:
        """A new place in the order of arrival, after all before; one common one for many."""
        self.arrivals += 1
        for job in jobs:
            job.arrival = (self.arrivals, job.due_us)

    def promote(self, now_us: int) -> None:
        due = [job for job in self.jobs.values() if job.status is Status.SCHEDULED and job.due_us <= now_us]
        for job in due:
            job.status = Status.PENDING
        self.arrive(*due)

    def own(self, seat: Seat, given: ClaimedJob, to: Status, now_us: int) -> Known:
        """The storage says that this job is this worker's from now on."""
        job = self.jobs[given.id]
        assert seat.is_good, f"{seat.ref} got a job though it is fenced or dead"
        assert self.can_run(seat, job), f"{seat.ref} got a job that it cannot run"
        assert job.queue not in self.paused, "a paused queue gave a job"
        assert not self.is_late(job, now_us), "a job was given that is past its time"
        assert not self.is_left(seat, job, now_us), "a job was given that was to be left to another"
        assert given.slot == job.new.slot
        assert given.token > job.token, "a new owner, and the token did not grow"
        assert (given.tier, given.queue, given.life) == (job.tier, job.queue, job.life)
        assert self.has_permit(job, now_us), "a job was started beyond its limit"
        assert to is Status.RUNNING or not self.is_limited(job), "a limited job was held"
        job.status, job.owner, job.token, job.taken_us = to, seat.ref, given.token, now_us
        spec = self.specs.get(job.new.task)
        if to is Status.RUNNING and spec is not None and spec.rate_limit is not None:
            rate = limits.parse_rate(spec.rate_limit)
            self.tats[spec.name] = limits.take(rate, self.tats.get(spec.name, 0.0), now_us, 1)
        return job

    def claim(
        self, seat: Seat, slots: int, running: Sequence[ClaimedJob], held: Sequence[ClaimedJob], now_us: int
    ) -> None:
        """An answer to a claim: sound, in order, and as much as there was."""
        ready = self.ready_for(seat, now_us)
        assert {job.id for job in (*running, *held)} <= {job.id for job in ready}
        for given in running:
            self.own(seat, given, Status.RUNNING, now_us).hops = 0
        for given in held:
            self.own(seat, given, Status.CLAIMED, now_us).hops = 0
        left = [job for job in ready if job.status is Status.PENDING and self.has_permit(job, now_us)]
        if len(running) < slots:
            assert not left, f"{len(left)} jobs could have run in {slots - len(running)} free slots"
        for given in (*running, *held):
            job = self.jobs[given.id]
            for other in left:
                if job.status is Status.CLAIMED and self.is_limited(other):
                    continue
                assert other.tier >= job.tier, f"tier {job.tier} was given before tier {other.tier}"
                if (other.queue, other.tier) == (job.queue, job.tier):
                    self.in_order(seat, job, other, now_us)

    def in_order(self, seat: Seat, given: Known, left: Known, now_us: int) -> None:
        """The window is larger here than there are jobs: own ones first, both kinds by arrival."""
        first, second = (
            (self.is_own(seat, job, now_us) if job.queue in seat.own.by_queue else True)
            for job in (given, left)
        )
        assert first or not second, "another's job was given before an own one"
        if first == second:
            assert left.arrival >= given.arrival, "one that arrived later was given first"

    def begin(self, seat: Seat, job: Known | None, token: int, now_us: int) -> Begun:
        """What begin has to answer, and what it does."""
        if not seat.is_good or job is None or job.owner != seat.ref or job.token != token:
            return Begun.LOST
        if job.status is Status.RUNNING:
            return Begun.BEGUN
        if self.is_late(job, now_us):
            job.owner = None
            self.move(job, Status.EXPIRED, now_us)
            return Begun.LOST
        if any(other.tier < job.tier for other in self.ready_for(seat, now_us)):
            self.give_back(job, now_us)
            return Begun.OUTRANKED
        job.status = Status.RUNNING
        return Begun.BEGUN

    def end(self, job: Known, transition: Transition, now_us: int) -> None:
        """A start of this job has ended like this."""
        status = transition.status
        if job.cancel and status is not Status.COMPLETED:
            status = Status.CANCELLED
        assert is_legal(job.status, status)
        job.started = True
        job.owner = None
        self.move(job, status, now_us)
        if status is Status.SCHEDULED:
            job.due_us = now_us + round(transition.delay_s * 1e6)

    def give_back(self, job: Known, now_us: int) -> None:
        """An owned job was released: to its place, or to its end."""
        job.owner = None
        if job.cancel:
            self.move(job, Status.CANCELLED, now_us)
        elif self.is_late(job, now_us):
            self.move(job, Status.EXPIRED, now_us)
        else:
            self.move(job, Status.PENDING, now_us)

    def move(self, job: Known, status: Status, now_us: int) -> None:
        job.status = status
        if status in TERMINAL:
            job.ended_us = now_us
        if status is not Status.RUNNING:
            job.cancel = job.cancel and status in TERMINAL

    def replay(self, job: Known, now_us: int) -> None:
        job.life += 1
        job.cancel = job.started = False
        job.expires_us = None
        job.due_us = now_us
        self.move(job, Status.PENDING, now_us)
        self.arrive(job)

    # -- what is ---------------------------------------------------------------------------------------
    def compare(self, job: Known, seen: Job, now_us: int) -> None:
        """Object to what cannot be, then take over what is."""
        may = self.allowed(job, now_us)
        assert seen.status in may, f"{job.id} is {seen.status}, and may only be {sorted(may)}"
        assert (seen.priority, seen.queue, seen.life) == (job.tier, job.queue, job.life)
        assert seen.token >= job.token, "a token went back"
        if job.status in OWNED:
            assert job.owner is not None
            if seen.status is job.status:
                assert (seen.worker_id, seen.token) == (job.owner.worker_id, job.token)
                assert seen.cancel_requested == job.cancel
        if seen.status in (Status.PENDING, Status.SCHEDULED):
            assert seen.worker_id is None
        if seen.status is not job.status:
            job.owner = None
            self.move(job, seen.status, now_us)
            if seen.status is Status.PENDING:
                self.arrive(job)
        job.token = seen.token

    def limits_hold(self) -> None:
        """No more jobs run than their limits allow, at this very moment."""
        running = self.running()
        for job in running:
            key = job.new.concurrency_key
            if key is not None:
                of_key = [other for other in running if other.new.concurrency_key == key]
                assert len(of_key) <= (job.new.concurrency_limit or 1), (
                    f"{len(of_key)} run with the key {key}"
                )
        for spec in self.specs.values():
            if spec.max_concurrent is not None:
                of_task = sum(job.new.task == spec.name for job in running)
                assert of_task <= spec.max_concurrent, f"{of_task} of {spec.name} run"
