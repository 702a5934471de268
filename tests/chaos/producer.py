"""A producer: a process that submits its share of a plan, and writes down what it was told.

python -m tests.chaos.producer PLAN SHARE OF START_NS GIVE_UP_S LOG
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from fluxmesh import Queue
from fluxmesh.errors import FluxMeshError, OutcomeUnknown, StorageError
from fluxmesh.ids import new_job_id
from fluxmesh.testing.history import Answer, CancelTold, Told
from tests.chaos.files import Appender
from tests.chaos.plan import EXPECTED, STOLEN_KINDS, Plan, Submission

AGAIN_MOST: Final = 4
QUIET_MOST: Final = 30  # jobs that are queued or held
AGAIN_AFTER_S: Final = 0.5


class Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the log: one of the two. `error`: why it was not accepted."""

    told: Told | None = None
    cancel: CancelTold | None = None
    error: str = ""


class Producer:
    def __init__(self, queue: Queue, log: Appender, start_ns: int) -> None:
        self._queue = queue
        self._log = log
        self._start_ns = start_ns

    async def run(self, jobs: list[Submission], give_up_s: float) -> None:
        under_way = set()
        for job in jobs:
            await asyncio.sleep(max(0.0, self._start_ns / 1e9 + job.at_s - time.monotonic()))
            task = asyncio.create_task(self._submit_many(job) if job.batch else self._submit(job))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        if under_way:
            left_s = self._start_ns / 1e9 + give_up_s - time.monotonic()
            await asyncio.wait(under_way, timeout=max(0.0, left_s))

    async def _submit(self, job: Submission) -> None:
        """What is not known is asked again with the same id; a crash of this process leaves it unknown."""
        job_id = new_job_id()
        self._tell(job_id, job, Answer.UNKNOWN, "not answered yet")
        answer, error = Answer.UNKNOWN, ""
        for _ in range(AGAIN_MOST):
            try:
                handle = await self._queue.aio.submit(
                    job.task, self._arguments(job), id=job_id, **job.options
                )
            except OutcomeUnknown as caught:
                answer, error = Answer.UNKNOWN, str(caught)
                await asyncio.sleep(AGAIN_AFTER_S)
            except FluxMeshError as caught:
                if not error:  # nothing was ever in doubt
                    answer, error = Answer.REFUSED, str(caught)
                break
            else:
                # Another holds the unique key: this id was never stored.
                answer = Answer.ACCEPTED if handle.id == job_id else Answer.REFUSED
                error = "" if handle.id == job_id else "deduplicated"
                break
        self._tell(job_id, job, answer, error)
        if job.cancel_after_s is not None and answer is not Answer.REFUSED:
            await asyncio.sleep(job.cancel_after_s)
            await self._cancel(job_id)

    async def _submit_many(self, job: Submission) -> None:
        """The ids of a batch are made by the SDK; if its outcome is unknown nobody knows them. A load that is
        there to be stolen is left out while there is plenty: nobody would want it."""
        if job.kind in STOLEN_KINDS and not await self._is_quiet():
            self._log.write(Word(error=f"{job.kind}: left out, there is enough to do"))
            return
        task = self._queue.task_named(job.task).options(**job.options)
        try:
            handles = await task.enqueue_map([self._arguments(job)] * job.batch)
        except FluxMeshError as caught:
            self._log.write(Word(error=f"batch: {caught}"))
            return
        for handle in handles:
            self._tell(handle.id, job, Answer.ACCEPTED, "")

    async def _is_quiet(self) -> bool:
        try:
            counts = await self._queue.aio.counts()
        except StorageError:
            return False
        return sum(counts.queued.values()) <= QUIET_MOST

    async def _cancel(self, job_id: str) -> None:
        try:
            [answer] = await self._queue.aio.cancel([job_id])
        except StorageError as caught:
            self._log.write(Word(error=f"cancel: {caught}"))
            return
        self._log.write(Word(cancel=CancelTold(job_id, answer, time.monotonic_ns())))

    def _arguments(self, job: Submission) -> tuple[Any, ...]:
        if job.task == "snoozing":
            return (self._start_ns + round((job.at_s + job.args[0]) * 1e9),)
        return job.args

    def _tell(self, job_id: str, job: Submission, answer: Answer, error: str) -> None:
        self._log.write(Word(Told(job_id, answer, time.monotonic_ns(), EXPECTED[job.kind]), error=error))


def main() -> None:
    plan_file, share, of, start_ns, give_up_s, log_file = sys.argv[1:]
    plan = msgspec.json.decode(Path(plan_file).read_bytes(), type=Plan)
    jobs = list(plan.jobs[int(share) :: int(of)])
    queue = Queue()
    producer = Producer(queue, Appender(Path(log_file)), int(start_ns))
    asyncio.run(producer.run(jobs, float(give_up_s)))


if __name__ == "__main__":
    main()
