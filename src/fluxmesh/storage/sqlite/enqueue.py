"""Storing new jobs: known ids and keys are found in the same step in which the rest is stored."""

from __future__ import annotations

from collections.abc import Sequence

import apsw

from fluxmesh.job import Status
from fluxmesh.storage.sqlite import place
from fluxmesh.storage.sqlite.step import Step
from fluxmesh.storage.values import Enqueued, Verdict
from fluxmesh.submission import DEFAULT_QUEUE, NewJob

DEFAULT_TIER = 2


def enqueue(step: Step, jobs: Sequence[NewJob], queue_cap: int) -> list[Enqueued]:
    return _Intake(step, queue_cap).take(jobs)


class _Intake:
    """One batch on its way in."""

    def __init__(self, step: Step, queue_cap: int) -> None:
        self.step = step
        self.room: dict[str, int] = {}
        self.defaults: dict[str, tuple[str, int]] = {}
        self.queue_cap = queue_cap

    def take(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        if len(jobs) > 1 and all(job.idempotency_key is None and job.unique_key is None for job in jobs):
            stored = self._take_all(jobs)
            if stored is not None:
                return stored
        return [self._take_one(job) for job in jobs]

    def _take_all(self, jobs: Sequence[NewJob]) -> list[Enqueued] | None:
        """All at once; None (and nothing stored) if one of the ids is known or a queue has no room."""
        homes = [self._home(job) for job in jobs]
        needed: dict[str, int] = {}
        for queue, _ in homes:
            needed[queue] = needed.get(queue, 0) + 1
        if any(self._room(queue) < count for queue, count in needed.items()):
            return None
        first = self.step.next_seq(len(jobs))
        rows = [
            self._row(job, *home, first + n) for n, (job, home) in enumerate(zip(jobs, homes, strict=True))
        ]
        try:
            with self.step.db:
                self.step.db.executemany(self.step.sql["enqueue.insert"], rows)
        except apsw.ConstraintError:
            return None
        for job, row in zip(jobs, rows, strict=True):
            self._note(job, row)
        return [Enqueued(job.id, Verdict.CREATED) for job in jobs]

    def _take_one(self, job: NewJob) -> Enqueued:
        known = self._known(job)
        if known is not None:
            return known
        queue, tier = self._home(job)
        if self._room(queue) < 1:
            return Enqueued(job.id, Verdict.FULL)
        row = self._row(job, queue, tier, self.step.next_seq())
        self.step.db.execute(self.step.sql["enqueue.insert"], row)
        if job.idempotency_key is not None:
            self.step.run("enqueue.put_key", job.idempotency_key, job.payload_hash, job.id)
        self._note(job, row)
        return Enqueued(job.id, Verdict.CREATED)

    def _known(self, job: NewJob) -> Enqueued | None:
        found = self.step.one("enqueue.by_id", job.id)
        if found is not None:
            return Enqueued(job.id, Verdict.EXISTING, "id", place.STATUS[found[0]])
        if job.idempotency_key is not None:
            known = self._known_key(job)
            if known is not None:
                return known
        if job.unique_key is not None:
            found = self.step.one("enqueue.by_unique", self._home(job)[0], job.unique_key)
            if found is not None:
                return Enqueued(found[0], Verdict.EXISTING, "unique", place.STATUS[found[1]])
        return None

    def _known_key(self, job: NewJob) -> Enqueued | None:
        found = self.step.one("enqueue.by_key", job.idempotency_key)
        if found is None:
            return None
        payload_hash, job_id, status, forget_us = found
        if forget_us is not None and forget_us <= self.step.now_us:
            return None
        if payload_hash != job.payload_hash:
            return Enqueued(job_id, Verdict.CONFLICT, "idempotency")
        row = self.step.one("enqueue.by_id", job_id)
        if row is None:
            return Enqueued(
                job_id, Verdict.EXISTING, "idempotency", Status(status or "COMPLETED"), pruned=True
            )
        return Enqueued(job_id, Verdict.EXISTING, "idempotency", place.STATUS[row[0]])

    def _home(self, job: NewJob) -> tuple[str, int]:
        if job.queue is not None and job.tier is not None:
            return job.queue, job.tier
        default = self.defaults.get(job.task)
        if default is None:
            found = self.step.one("enqueue.spec", job.task)
            spec = None if found is None else self.step.shared.spec(found[0])
            queue = DEFAULT_QUEUE if spec is None or spec.queue is None else spec.queue
            tier = DEFAULT_TIER if spec is None or spec.tier is None else spec.tier
            default = self.defaults[job.task] = (queue, tier)
        return (
            default[0] if job.queue is None else job.queue,
            default[1] if job.tier is None else job.tier,
        )

    def _room(self, queue: str) -> int:
        room = self.room.get(queue)
        if room is None:
            found = self.step.one("enqueue.queued", queue)
            queued = (found[0] if found else 0) + self.step.pending_change(queue)
            room = self.room[queue] = self.queue_cap - queued
        return room

    def _row(self, job: NewJob, queue: str, tier: int, seq: int) -> tuple[object, ...]:
        now_us = self.step.now_us
        due_us = job.run_at_us
        if job.delay_us is not None:
            due_us = now_us + job.delay_us
        if due_us is not None and due_us > now_us:
            at, lane, pos = place.SCHEDULED, str(tier), due_us
        else:
            at, lane, pos = place.READY, place.ready_lane(tier, queue), seq
        expires_us = None if job.expires_in_us is None else now_us + job.expires_in_us
        return (
            seq, job.id, at, lane, pos, seq, queue, tier, job.task, job.payload, job.options, now_us, due_us,
            expires_us, job.unique_key, job.idempotency_key, job.concurrency_key, job.concurrency_limit,
            job.slot,
        )  # fmt: skip

    def _note(self, job: NewJob, row: tuple[object, ...]) -> None:
        rid, at, queue, tier = row[0], row[2], str(row[6]), int(str(row[7]))
        self.room[queue] = self.room.get(queue, 0) - 1
        if at == place.READY:
            self.step.count(queue, tier, place.READY, 1)
            self.step.ready(queue, tier, job.task, slot=job.slot)
        else:
            self.step.count(queue, tier, place.SCHEDULED, 1)
            self.step.scheduled(int(str(row[4])), queue, tier, job.task)
        if job.tags:
            self.step.db.executemany(self.step.sql["enqueue.tag"], [(tag, rid) for tag in job.tags])
