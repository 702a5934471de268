"""The stage of the state machine: a storage, its model, workers, and what verbs do to both."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, Final, TypeVar

from fluxmesh.job import TIERS, Status
from fluxmesh.outcome import Transition
from fluxmesh.storage.values import (
    Begun,
    ExchangeRequest,
    Owned,
    Settle,
    Settled,
    Standing,
    TaskSpec,
    Verdict,
)
from fluxmesh.submission import NewJob
from fluxmesh.testing.contract.harness import Backend
from fluxmesh.testing.contract.lab import (
    LEASE_S,
    QUEUE_CAP,
    Lab,
    Puppet,
)
from fluxmesh.testing.contract.model import OWNED, Known, Model, Seat
from fluxmesh.testing.contract.walk import walked_counts, walked_queues

T = TypeVar("T")
STEP_BOUND_S: Final = 20.0
QUEUES: Final = ("default", "second")
TASKS: Final = {
    "plain": TaskSpec("plain"),
    "rare": TaskSpec("rare"),
    "paced": TaskSpec("paced", rate_limit="2/m"),
    "few": TaskSpec("few", max_concurrent=2),
}
AGES: Final = {"result_s": 40.0, "dead_letter_s": 90.0, "key_s": 200.0, "worker_s": 60.0}


class Stage:
    """One namespace of its own for each example. `lab.clock` is the only clock."""

    backend: ClassVar[Backend]
    names: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self) -> None:
        super().__init__()  # the other base is hypothesis's
        self.runner = asyncio.Runner()
        self.lab = Lab(self.backend)
        self.model = Model(specs=dict(TASKS), lease_us=round(LEASE_S * 1e6))
        self.puppets: list[tuple[Seat, Puppet]] = []
        self.last: list[tuple[Seat, Puppet, ExchangeRequest, set[tuple[str, int]]]] = []
        self.stale: list[tuple[Puppet, Owned]] = []
        self.lab.storage = self.run(self.lab.open(f"machine-{next(self.names)}"))

    def run(self, verb: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(STEP_BOUND_S):
                return await verb

        return self.runner.run(bounded())

    def teardown(self) -> None:
        self.run(self.lab.close())
        self.runner.close()

    # -- choosing --------------------------------------------------------------------------------------
    @property
    def now_us(self) -> int:
        return self.lab.clock.wall_us()

    def chosen(self, picks: Sequence[int], jobs: Sequence[Known]) -> list[Known]:
        """Different jobs, out of those there are."""
        return list({jobs[n % len(jobs)].id: jobs[n % len(jobs)] for n in picks}.values()) if jobs else []

    def any_jobs(self, picks: Sequence[int]) -> list[Known]:
        return self.chosen(picks, list(self.model.jobs.values()))

    def seat(self, n: int) -> tuple[Seat, Puppet]:
        return self.puppets[n % len(self.puppets)]

    def has_jobs(self) -> bool:
        return bool(self.model.jobs)

    def puppet_of(self, job: Known) -> Puppet:
        return next(puppet for seat, puppet in self.puppets if seat.ref == job.owner)

    def lost(self, job: Known) -> None:
        """The job is about to leave its owner: what the owner knows becomes stale."""
        if job.status in OWNED:
            self.stale.append((self.puppet_of(job), Owned(job.id, job.token)))

    def put(self, jobs: list[NewJob]) -> None:
        answers = self.run(self.lab.storage.enqueue(jobs, queue_cap=QUEUE_CAP))
        for new, answer in zip(jobs, answers, strict=True):
            expected, holder = self.expected(new)
            if expected is None:  # its key may or may not have been forgotten
                expected, holder = answer.verdict, answer.id
            assert (answer.verdict, answer.id) == (expected, holder)
            if expected is Verdict.CREATED:
                self.created(new)

    def expected(self, new: NewJob) -> tuple[Verdict | None, str]:
        if new.id in self.model.jobs:
            return Verdict.EXISTING, new.id
        key = new.idempotency_key
        if key is not None and key in self.model.keys:
            job_id, digest = self.model.keys[key]
            ended = self.model.jobs.get(job_id) or self.model.gone[job_id]
            if ended.ended and ended.ended_us + AGES["key_s"] * 1e6 <= self.now_us:
                return None, ""
            return (Verdict.EXISTING if digest == new.payload_hash else Verdict.CONFLICT), job_id
        if new.unique_key is not None:
            holder = self.model.holder(new.queue or "default", new.unique_key)
            if holder is not None:
                return Verdict.EXISTING, holder.id
        return Verdict.CREATED, new.id

    def created(self, new: NewJob) -> None:
        due_us = self.now_us + (new.delay_us or 0)
        job = Known(
            new=new,
            queue=new.queue or "default",
            tier=2 if new.tier is None else new.tier,
            status=Status.SCHEDULED if new.delay_us else Status.PENDING,
            due_us=due_us,
            expires_us=None if new.expires_in_us is None else self.now_us + new.expires_in_us,
        )
        self.model.jobs[job.id] = job
        self.model.arrive(job)
        if new.idempotency_key is not None:
            self.model.keys[new.idempotency_key] = (job.id, new.payload_hash)

    def seat_at(
        self,
        name: str,
        queues: tuple[str, ...],
        tiers: tuple[int, ...],
        unknown: str | None,
        *,
        donates: bool,
    ) -> None:
        tasks = [spec for task, spec in TASKS.items() if task != unknown]
        puppet = self.run(self.lab.worker(name, tasks=tasks, queues=queues, tiers=tiers, donates=donates))
        for seat, _ in self.puppets:
            seat.fenced = seat.fenced or seat.ref.worker_id == name
        seat = Seat(puppet.ref, queues, tiers, frozenset(spec.name for spec in tasks), donates, self.now_us)
        self.puppets.append((seat, puppet))
        self.model.seats.append(seat)

    def exchanged(
        self, who: int, settles: list[tuple[int, Transition]], begins: list[int], slots: int, extra: int
    ) -> None:
        seat, puppet = self.seat(who)
        running = self.model.owned_by(seat.ref, Status.RUNNING)
        ends = {self.chosen([n], running)[0].id: end for n, end in settles if running}
        held = self.chosen(begins, self.model.owned_by(seat.ref, Status.CLAIMED))
        request = puppet.request(
            settle=[Settle(job_id, self.model.jobs[job_id].token, end) for job_id, end in ends.items()],
            begin=[Owned(job.id, job.token) for job in held],
            slots=slots,
            extra=extra,
        )
        answer = self.run(puppet.send(request))
        assert answer.settled == (Settled.APPLIED,) * len(ends)
        for job_id, end in ends.items():
            self.model.end(self.model.jobs[job_id], end, self.now_us)
        assert (answer.standing is Standing.GOOD) == seat.is_good
        if not seat.is_good:
            assert (answer.running, answer.held) == ((), ())
            assert Begun.BEGUN not in answer.begun
            return
        self.model.promote(self.now_us)
        for item, begun in zip(request.begin, answer.begun, strict=True):
            job = self.model.jobs[item.id]
            assert begun is self.model.begin(seat, job, item.token, self.now_us)
            slots += begun is not Begun.BEGUN  # it leaves its slot to the claim
        assert not answer.more
        assert (len(answer.running) <= slots, len(answer.held) <= extra) == (True, True)
        self.model.claim(seat, slots, answer.running, answer.held, self.now_us)
        tokens = {(job.id, job.token) for job in (*answer.running, *answer.held)}
        self.last = [*self.last[-2:], (seat, puppet, request, tokens)] if tokens else self.last

    def forget_seats(self) -> None:
        """After a prune: the records of some workers are gone. One that was alive may come back with a beat;
        one that was fenced or dead is not heard of again."""
        kept = {(info.worker_id, info.epoch) for info in self.run(self.lab.storage.fleet())}
        for seat, puppet in list(self.puppets):
            if (seat.ref.worker_id, seat.ref.epoch) in kept:
                continue
            assert not self.model.owned_by(seat.ref, *OWNED), "the record of a worker that owns jobs is gone"
            assert self.now_us - seat.renewed_us > LEASE_S * 1e6 or not seat.is_good
            if seat.is_good:
                seat.missing = True
            else:
                self.puppets.remove((seat, puppet))
                self.model.seats.remove(seat)
        if not self.puppets:
            self.seat_at("w1", QUEUES, TIERS, None, donates=True)

    def is_over(self, job: Known) -> bool:
        """Older than the retention: at the very instant a job is kept still."""
        age = AGES["dead_letter_s" if job.status is Status.DEAD_LETTER else "result_s"]
        return job.ended_us + age * 1e6 < self.now_us

    async def compare(self) -> None:
        storage, model = self.lab.storage, self.model
        everything = await self.lab.everything()
        seen = {job.id: job for job in everything}
        assert len(seen) == len(everything), "a job is in two places"
        assert seen.keys() == model.jobs.keys(), "jobs were lost or invented"
        alone = await asyncio.gather(*(storage.get(job_id) for job_id in seen))
        assert alone == everything
        for job in sorted(model.jobs.values(), key=lambda job: job.due_us):
            model.compare(job, seen[job.id], self.now_us)
        model.limits_hold()
        counts = await storage.counts()
        queued = {place: n for place, n in counts.queued.items() if n}
        by_status = {status: n for status, n in counts.by_status.items() if n}
        assert (by_status, queued, counts.failed) == walked_counts(everything)
        assert counts.stale_settles == model.stale
        stats = await storage.queue_stats()
        shown = {
            queue.queue: (
                queue.queued,
                queue.scheduled,
                queue.running,
                None if queue.paused else queue.parked,
            )
            for queue in stats
            if any(queue.queued) or queue.scheduled or queue.running
        }
        assert shown == walked_queues(everything, model.paused)
        assert {queue.queue for queue in stats if queue.paused} == model.paused
