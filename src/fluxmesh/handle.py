"""A submitted job as its producer holds it: `job.result()`, `await job`, `job.cancel()` and the rest.

Every verb has two faces. The async ones are the real ones: `job.aio.cancel()`, `job.aio.result()` and so on,
awaitable on any loop; the blocking ones of the same names wait for them. `await job` is
`await job.aio.result()`. `job.refresh()` is both: see there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar, cast

from fluxmesh.clock import MonoS
from fluxmesh.context import current_run
from fluxmesh.errors import (
    IdempotencyConflict,
    JobCancelled,
    JobConflict,
    JobExpired,
    JobFailed,
    JobNotFound,
    OutcomeUnknown,
    QueueFull,
    WaitTimeout,
    WouldDeadlock,
)
from fluxmesh.job import Attempt, Job, Status
from fluxmesh.link import Link
from fluxmesh.outage import AWAY, Outage
from fluxmesh.outcome import checked_delay_s
from fluxmesh.portal import current_portal, run
from fluxmesh.storage.values import Cancelled, Done, Enqueued, Verdict
from fluxmesh.submission import NewJob, checked_tier

WAIT_SLICE_S: Final = 60.0  # one storage call waits so long at most
R = TypeVar("R")
T = TypeVar("T")


def result_of(job: Job) -> Any:
    """The result of an ended job. Raises JobFailed, JobCancelled or JobExpired if there is none."""
    match job.status:
        case Status.COMPLETED:
            return job.result
        case Status.CANCELLED:
            raise JobCancelled(f"job {job.id} ({job.task}) was cancelled", job_id=job.id)
        case Status.EXPIRED:
            raise JobExpired(f"job {job.id} ({job.task}) was not started in time", job_id=job.id)
        case _:
            reason = job.reason or "error"
            what = f": {job.error.type}: {job.error.message}" if job.error else ""
            raise JobFailed(
                f"job {job.id} ({job.task}) failed, {reason}{what}",
                job_id=job.id,
                reason=reason,
                error_type=job.error.type if job.error else "",
                error_message=job.error.message if job.error else "",
                frames=job.error.frames if job.error else (),
                hint="its history tells of every attempt; replay it once the cause is mended",
            )


def not_found(job_id: str) -> JobNotFound:
    return JobNotFound(f"there is no job {job_id}", hint="wrong namespace or file, or its retention is over")


class Refreshing(Awaitable[T]):
    """A read that has begun. Awaiting it gives what was read, or raises."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()


class JobHandle(Generic[R]):
    """A job by its id. `deduplicated`: the submission met a job that existed already, and this is it."""

    __slots__ = ("_link", "_record", "deduplicated", "id")

    def __init__(self, link: Link, job_id: str, *, deduplicated: bool = False, record: Job | None = None):
        self._link = link
        self._record = record
        self.id: Final = job_id
        self.deduplicated: Final = deduplicated

    @property
    def aio(self) -> AsyncJob[R]:
        """The same verbs, to be awaited."""
        return AsyncJob(self)

    @property
    def record(self) -> Job:
        """The record as it was last read; it is read now if it never was."""
        return self._record if self._record is not None else run(self.aio.read())

    @property
    def status(self) -> Status:
        """The state now: every look reads it anew."""
        return run(self.aio.read()).status

    def refresh(self) -> Refreshing[JobHandle[R]]:
        """Read `record` anew. In a thread without a running loop that is done when this returns; on a loop
        it has begun, and `await job.refresh()` waits for it without blocking. Raises JobNotFound."""
        future = current_portal().submit(self.aio.refresh())
        if not _loop_runs_here():
            future.result()
        return Refreshing(future)

    def result(self, timeout: float | None = None) -> R:
        """What the body returned, as it came through storage (a tuple comes back as a list). Waits for the
        end, at most `timeout` seconds; a storage that is away for less than half a minute ends no wait.

        Raises JobFailed, JobCancelled, JobExpired, WaitTimeout, JobNotFound; WouldDeadlock inside a body."""
        refuse_inside_a_body(self.id)
        return run(self.aio.result(timeout))

    def cancel(self) -> Cancelled:
        """CANCELLED at once, or REQUESTED from the worker that runs it; ENDED if it had ended already."""
        return run(self.aio.cancel())

    def replay(self) -> None:
        """A new life for a job that ended without completing. Raises JobConflict, JobNotFound."""
        run(self.aio.replay())

    def discard(self) -> None:
        """Delete an ended job with its history. Raises JobConflict if it has not ended, JobNotFound."""
        run(self.aio.discard())

    def reprioritise(self, priority: int | str) -> None:
        """Move a job that has not ended to another tier. Raises JobConflict, JobNotFound."""
        run(self.aio.reprioritise(priority))

    def history(self) -> list[Attempt]:
        """Ended starts of all lives, oldest first, the last 50."""
        return run(self.aio.history())

    def __await__(self) -> Generator[Any, None, R]:
        return self.aio.result().__await__()

    def __repr__(self) -> str:
        return f"<JobHandle {self.id}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JobHandle):
            return NotImplemented
        return self.id == other.id and self._link is other._link

    def __hash__(self) -> int:
        return hash(self.id)


class AsyncJob(Generic[R]):
    """The verbs of a job handle, to be awaited on any loop. They promise what the blocking ones promise."""

    __slots__ = ("_job",)

    def __init__(self, job: JobHandle[R]) -> None:
        self._job = job

    async def read(self) -> Job:
        """The record now. Raises JobNotFound."""
        record = await self._job._link.use(lambda storage: storage.get(self._job.id))
        return self._seen(record)

    async def refresh(self) -> JobHandle[R]:
        await self.read()
        return self._job

    async def result(self, timeout: float | None = None) -> R:
        refuse_inside_a_body(self._job.id)
        return cast(R, result_of(await self.ended(timeout)))

    async def ended(self, timeout: float | None = None) -> Job:
        """The record once the job has ended, however it did. Bears with a storage that is away for half a
        minute. Raises WaitTimeout, JobNotFound, StorageUnreachable."""
        left_s = None if timeout is None else checked_delay_s("timeout", timeout)
        loop = asyncio.get_running_loop()
        deadline = None if left_s is None else MonoS(loop.time() + left_s)
        outage = Outage()
        while True:
            slice_s = (
                WAIT_SLICE_S if deadline is None else min(WAIT_SLICE_S, max(0.0, deadline - loop.time()))
            )
            try:
                record = self._seen(await self._job._link.use(self._waiting(slice_s)))
            except AWAY as error:
                await asyncio.sleep(outage.bear(error, MonoS(loop.time()), deadline))
                continue
            outage.answered()
            if record.ended:
                return record
            if deadline is not None and loop.time() >= deadline:
                raise WaitTimeout(
                    f"job {self._job.id} is {record.status} after {timeout:g} s",
                    hint=_why_waiting(record),
                )

    async def cancel(self) -> Cancelled:
        [answer] = await self._job._link.use(lambda storage: storage.cancel([self._job.id]))
        if answer is Cancelled.UNKNOWN:
            raise not_found(self._job.id)
        return answer

    async def replay(self) -> None:
        [answer] = await self._job._link.use(lambda storage: storage.replay([self._job.id]))
        await self._must_be_done(answer, "replayed", "only what ended without completing is replayed")

    async def discard(self) -> None:
        [answer] = await self._job._link.use(lambda storage: storage.discard([self._job.id]))
        await self._must_be_done(answer, "discarded", "cancel it first")

    async def reprioritise(self, priority: int | str) -> None:
        tier = checked_tier(priority)
        [answer] = await self._job._link.use(lambda storage: storage.reprioritise([self._job.id], tier))
        await self._must_be_done(answer, "moved to another tier", "it has ended")

    async def history(self) -> list[Attempt]:
        attempts = await self._job._link.use(lambda storage: storage.history(self._job.id))
        if attempts is None:
            raise not_found(self._job.id)
        return attempts

    def _seen(self, record: Job | None) -> Job:
        if record is None:
            raise not_found(self._job.id)
        self._job._record = record
        return record

    def _waiting(self, slice_s: float) -> Any:
        return lambda storage: storage.wait_for(self._job.id, slice_s)

    async def _must_be_done(self, answer: Done, verb: str, hint: str) -> None:
        if answer is Done.UNKNOWN:
            raise not_found(self._job.id)
        if answer is Done.CONFLICT:
            status = (await self.read()).status
            raise JobConflict(f"job {self._job.id} is {status} and cannot be {verb}", hint=hint)


def _why_waiting(record: Job) -> str:
    if record.waiting_for:
        return f"it waits for {record.waiting_for}"
    if record.status is Status.PENDING:
        return "is a worker running that serves its queue?"
    return "wait longer, or look again later"


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def refuse_inside_a_body(job_id: str) -> None:
    """Raise WouldDeadlock where the caller is a task's body: it holds the slot that the job may need."""
    here = current_run.get()
    if here is not None:
        raise WouldDeadlock(
            f"a task's body waits for job {job_id} while it holds a slot of its worker",
            hint="submit it and return; let the other job go on with the work",
        )


async def send(
    link: Link,
    jobs: Sequence[NewJob],
    *,
    fresh_ids: bool,
    before: Sequence[JobHandle[Any]] = (),
    of: int | None = None,
) -> list[JobHandle[Any]]:
    """Store at most 1,000 checked jobs in one round trip; a handle for each, in order.

    `fresh_ids`: the ids were made just now, so a job that is known by its id is this very submission
    repeated after a lost answer. `before`: what the same call, of so many jobs in all, has stored already.
    Raises IdempotencyConflict or QueueFull for the first refused item; ids of the items that were stored are
    in the error's `accepted`. Raises OutcomeUnknown, with the `ids` of all."""
    cap = link.settings.queue_cap
    try:
        answers = await link.use(lambda storage: storage.enqueue(jobs, queue_cap=cap))
    except OutcomeUnknown as error:
        raise error.about([job.id for job in jobs]) from error
    handles: list[JobHandle[Any]] = []
    for answer in answers:
        if answer.verdict is Verdict.CREATED:
            handles.append(JobHandle(link, answer.id))
        elif answer.verdict is Verdict.EXISTING:
            own = answer.by == "id" and fresh_ids
            handles.append(JobHandle(link, answer.id, deduplicated=not own))
        else:
            refused = _refused(jobs, answers, cap, first=len(before), of=of or len(jobs))
            refused.accepted = (*[handle.id for handle in before], *refused.accepted)
            raise refused
    return handles


def _refused(
    jobs: Sequence[NewJob], answers: Sequence[Enqueued], cap: int, *, first: int, of: int
) -> IdempotencyConflict | QueueFull:
    bad = next(
        index for index, answer in enumerate(answers) if answer.verdict in (Verdict.CONFLICT, Verdict.FULL)
    )
    accepted = tuple(answer.id for answer in answers if answer.verdict in (Verdict.CREATED, Verdict.EXISTING))
    which = f"item {first + bad:,} of {of:,}: " if of > 1 else ""
    error: IdempotencyConflict | QueueFull
    if answers[bad].verdict is Verdict.CONFLICT:
        error = IdempotencyConflict(
            f"{which}idempotency key {jobs[bad].idempotency_key!r} belongs to job {answers[bad].id},"
            " which has another task or other arguments",
            hint="use a key of its own for other work",
        )
    else:
        error = QueueFull(
            f"{which}queue {jobs[bad].queue or 'default'!r} holds {cap:,} jobs that have not started",
            hint="start workers, submit more slowly, or raise queue_cap",
        )
    error.accepted = accepted
    return error
