"""The bench on which a scenario is played: a manual clock, jobs by the dozen, workers without bodies.

A scenario is an `async def` of a test class, decorated with `scenario`; it gets a Lab and is run by
`asyncio.run` under a bound.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

from fluxmesh.affinity import SLOT_BITMAP_BYTES, slot_of
from fluxmesh.clock import ManualClock
from fluxmesh.errors import OutcomeUnknown
from fluxmesh.job import TIERS, Job, JobError, Outcome, Status, fingerprint
from fluxmesh.outcome import Charge, Transition
from fluxmesh.query import Query
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import (
    Affinity,
    AffinityPart,
    BeatAnswer,
    Begun,
    ClaimedJob,
    Enqueued,
    ExchangeAnswer,
    ExchangeRequest,
    Orphan,
    Owned,
    ProgressNote,
    Reap,
    Registration,
    Retention,
    Settle,
    Settled,
    TakeAnswer,
    TaskSpec,
    Verdict,
    WorkerRef,
    WorkerView,
)
from fluxmesh.submission import NewJob, prepare
from fluxmesh.testing.contract.harness import NAMESPACE, Backend

LEASE_S: Final = 6.0
BEAT_S: Final = 2.0
QUEUE_CAP: Final = 1_000_000
BOUND_S: Final = 60.0  # of one scenario: what hangs is a failure, not a stuck run
WAIT_S: Final = 20.0  # for a signal that is due at once
T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")


def scenario(
    body: Callable[Concatenate[S, Lab, P], Awaitable[None]],
) -> Callable[Concatenate[S, Backend, P], None]:
    """A plain pytest test that plays `body` on a new Lab over the fixture `backend`.

    Parameters of `body` after the Lab are left to pytest (parametrize, fixtures).
    """

    async def play(case: S, backend: Backend, *args: P.args, **kwargs: P.kwargs) -> None:
        async with asyncio.timeout(BOUND_S):
            lab = await Lab.build(backend)
            try:
                await body(case, lab, *args, **kwargs)
            finally:
                await lab.close()

    def test(self: S, backend: Backend, *args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(play(self, backend, *args, **kwargs))

    case, _, *rest = inspect.signature(body).parameters.values()
    fixture = inspect.Parameter("backend", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([case, fixture, *rest])  # type: ignore[attr-defined]
    test.__name__ = getattr(body, "__name__", "scenario")
    test.__doc__ = body.__doc__
    return cast("Callable[Concatenate[S, Backend, P], None]", test)


async def insist(call: Callable[[], Awaitable[T]], *, tries: int = 3) -> T:
    """What a careful caller does when a reply was lost: the same call again."""
    for _ in range(tries - 1):
        try:
            return await call()
        except OutcomeUnknown:
            continue
    return await call()


def own(job: ClaimedJob | Orphan) -> Owned:
    return Owned(job.id, job.token)


def ids(jobs: Iterable[ClaimedJob | Job | Orphan]) -> list[str]:
    return [job.id for job in jobs]


ERROR: Final = JobError("ValueError", "no such order", ("shop/orders.py:7 load",))
COMPLETED: Final = Transition(Status.COMPLETED, Outcome.COMPLETED, Charge.ATTEMPT, result=b"\x07")
INTERRUPTED: Final = Transition(Status.PENDING, Outcome.INTERRUPTED, Charge.INTERRUPTION)
CRASHED: Final = Transition(Status.PENDING, Outcome.CRASHED, Charge.CRASH)
CANCELLED: Final = Transition(Status.CANCELLED, Outcome.CANCELLED)


def retry(delay_s: float = 10.0) -> Transition:
    return Transition(Status.SCHEDULED, Outcome.FAILED, Charge.ATTEMPT, error=ERROR, delay_s=delay_s)


def snooze(delay_s: float) -> Transition:
    return Transition(Status.SCHEDULED, Outcome.SNOOZED, Charge.SNOOZE, delay_s=delay_s)


def dead(task: str = "work", error: JobError = ERROR, reason: str = "error") -> Transition:
    print_ = fingerprint(task, error)
    return Transition(
        Status.DEAD_LETTER, Outcome.FAILED, Charge.ATTEMPT, error=error, reason=reason, fingerprint=print_
    )


def new_job(task: str = "work", *args: Any, kwargs: dict[str, Any] | None = None, **fields: Any) -> NewJob:
    """A checked submission; `fields` are those of the contract."""
    return prepare({"task": task, **fields}).job(args, kwargs or {})


def affinity_of(
    keys: Iterable[str], *, weight: float, queues: Sequence[str] = ("default",), tasks: Sequence[str] = ()
) -> Affinity:
    """Of these affinity keys, and of these tasks without one, in these queues."""
    bits = bytearray(SLOT_BITMAP_BYTES)
    for slot in map(slot_of, keys):
        bits[slot >> 3] |= 0x80 >> (slot & 7)
    return Affinity(weight, (AffinityPart(tuple(queues), bytes(bits), tuple(tasks)),))


class Puppet:
    """A worker without bodies: the test moves its hands. `owned` is what it believes it owns (id, token);
    `given` is every job that an answer gave it."""

    def __init__(self, storage: Storage, registration: Registration, epoch: int) -> None:
        self.storage = storage
        self.registration = registration
        self.ref = WorkerRef(registration.worker_id, epoch)
        self.owned: dict[str, int] = {}
        self.given: dict[str, ClaimedJob] = {}
        self.requests = 0

    def request(
        self,
        *,
        settle: Sequence[Settle] = (),
        begin: Sequence[Owned] = (),
        slots: int = 0,
        extra: int = 0,
        reserve: Sequence[int] = (),
        request_id: int | None = None,
    ) -> ExchangeRequest:
        """The next request, or `request_id` once more."""
        if request_id is None:
            self.requests += 1
            request_id = self.requests
        return ExchangeRequest(
            self.ref, request_id, tuple(settle), tuple(begin), slots, extra, tuple(reserve)
        )

    async def send(self, request: ExchangeRequest) -> ExchangeAnswer:
        answer = await self.storage.exchange(request)
        for settle in request.settle:
            self.owned.pop(settle.id, None)
        for begin, begun in zip(request.begin, answer.begun, strict=True):
            if begun is not Begun.BEGUN:
                self.owned.pop(begin.id, None)
        self._take(*answer.running, *answer.held)
        return answer

    def _take(self, *jobs: ClaimedJob) -> None:
        self.owned.update({job.id: job.token for job in jobs})
        self.given.update({job.id: job for job in jobs})

    def only(self) -> ClaimedJob:
        """The one job it owns."""
        (job_id,) = self.owned
        return self.given[job_id]

    async def exchange(self, **parts: Any) -> ExchangeAnswer:
        return await self.send(self.request(**parts))

    async def claim(self, slots: int = 1) -> list[ClaimedJob]:
        """Jobs given running."""
        return list((await self.exchange(slots=slots)).running)

    async def claim_one(self) -> ClaimedJob:
        (job,) = await self.claim(1)
        return job

    async def hold(self, extra: int = 1) -> list[ClaimedJob]:
        """Jobs given held."""
        return list((await self.exchange(extra=extra)).held)

    async def hold_one(self) -> ClaimedJob:
        (job,) = await self.hold(1)
        return job

    async def begin(self, *jobs: ClaimedJob) -> list[Begun]:
        return list((await self.exchange(begin=[own(job) for job in jobs])).begun)

    async def settle(self, job: ClaimedJob, transition: Transition = COMPLETED) -> Settled:
        (settled,) = (await self.exchange(settle=[Settle(job.id, job.token, transition)])).settled
        return settled

    async def complete(self, *jobs: ClaimedJob) -> None:
        answer = await self.exchange(settle=[Settle(job.id, job.token, COMPLETED) for job in jobs])
        assert set(answer.settled) <= {Settled.APPLIED}

    async def release(self, *jobs: ClaimedJob) -> list[bool]:
        for job in jobs:
            self.owned.pop(job.id, None)
        return await self.storage.release(self.ref, [own(job) for job in jobs])

    async def take_held(self, slots: int = 1) -> TakeAnswer:
        answer = await self.storage.take_held(self.ref, slots)
        self._take(*answer.running)
        return answer

    async def transfer(self, *jobs: ClaimedJob) -> list[ClaimedJob]:
        moved = await self.storage.transfer(self.ref, [own(job) for job in jobs])
        self._take(*moved)
        return moved

    async def note(self, job: ClaimedJob, **note: Any) -> bool:
        (kept,) = await self.storage.progress(self.ref, [ProgressNote(job.id, job.token, **note)])
        return kept

    async def beat(self, *, status: str = "ready") -> BeatAnswer:
        """A beat with the list of everything it believes it owns."""
        return await self.beat_listing(
            [Owned(id_, token) for id_, token in self.owned.items()], status=status
        )

    async def beat_listing(
        self,
        owned: Sequence[Owned] | None,
        *,
        status: str = "ready",
        mesh: bytes | None = None,
        affinity: Affinity | None = None,
    ) -> BeatAnswer:
        view = WorkerView(self.registration, status, len(owned or ()), mesh, affinity)
        return await self.storage.beat(self.ref, owned, view)

    async def own(
        self,
        *keys: str,
        weight: float = 1.0,
        queues: Sequence[str] = ("default",),
        tasks: Sequence[str] = (),
        status: str = "ready",
    ) -> None:
        """A beat by which jobs of these keys, and of these tasks without a key, belong to it from now on."""
        affinity = affinity_of(keys, weight=weight, queues=queues, tasks=tasks)
        mine = [Owned(id_, token) for id_, token in self.owned.items()]
        await self.beat_listing(mine, status=status, affinity=affinity)


class Lab:
    """One storage under a manual clock, and everything a scenario needs to act on it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.clock = ManualClock()
        self._open: list[Storage] = []
        self.storage: Storage

    @classmethod
    async def build(cls, backend: Backend) -> Lab:
        lab = cls(backend)
        lab.storage = await lab.open()
        return lab

    async def close(self) -> None:
        for storage in self._open:
            await storage.close()

    async def open(self, namespace: str = NAMESPACE) -> Storage:
        """One more process's view of the storage."""
        storage = await self.backend.open(self.clock, namespace=namespace)
        self._open.append(storage)
        return storage

    # -- jobs ----------------------------------------------------------------------------------------
    async def enqueue(
        self, *jobs: NewJob, storage: Storage | None = None, queue_cap: int = QUEUE_CAP
    ) -> list[Enqueued]:
        return await (storage or self.storage).enqueue(jobs, queue_cap=queue_cap)

    async def put(self, task: str = "work", *args: Any, **fields: Any) -> str:
        """The id of one new job."""
        (put,) = await self.enqueue(new_job(task, *args, **fields))
        assert put.verdict is Verdict.CREATED, put
        return put.id

    async def put_many(self, count: int, task: str = "work", **fields: Any) -> list[str]:
        """Ids of `count` new jobs, in their order of arrival."""
        made: list[str] = []
        template = prepare({"task": task, **fields})
        for start in range(0, count, 1_000):
            jobs = [template.job((index,), {}) for index in range(start, min(start + 1_000, count))]
            answers = await self.storage.enqueue(jobs, queue_cap=QUEUE_CAP)
            assert {answer.verdict for answer in answers} == {Verdict.CREATED}
            made += [answer.id for answer in answers]
        return made

    async def job(self, job_id: str) -> Job:
        job = await self.storage.get(job_id)
        assert job is not None, f"job {job_id} is lost"
        return job

    async def status(self, job_id: str) -> Status:
        return (await self.job(job_id)).status

    async def statuses(self, job_ids: Iterable[str]) -> list[Status]:
        return [await self.status(job_id) for job_id in job_ids]

    async def everything(self, query: Query | None = None) -> list[Job]:
        """The brute-force walk: every page of a list."""
        found: list[Job] = []
        cursor: str | None = None
        while True:
            page = await self.storage.find(query or Query(), cursor=cursor, limit=500)
            found += page.items
            if page.next_cursor is None:
                return found
            assert len(found) < 1_000_000, "the cursor does not come to an end"
            cursor = page.next_cursor

    async def end(self, transition: Transition = COMPLETED, **fields: Any) -> str:
        """The id of a job that a passing worker has ended like this."""
        job_id = await self.put("ended", queue="ends", **fields)
        passing = await self.worker("passing", tasks=("ended",), queues=("ends",))
        job = await passing.claim_one()
        assert job.id == job_id
        assert await passing.settle(job, transition) is Settled.APPLIED
        await self.storage.declare_dead(passing.ref, "left")
        return job_id

    # -- workers -------------------------------------------------------------------------------------
    async def worker(
        self,
        worker_id: str = "w1",
        *,
        tasks: Sequence[str | TaskSpec] = ("work",),
        queues: Sequence[str] = ("default",),
        tiers: Sequence[int] = TIERS,
        donates: bool = True,
        storage: Storage | None = None,
    ) -> Puppet:
        """Register a worker, by default as one more user of the scenario's storage."""
        specs = tuple(TaskSpec(task) if isinstance(task, str) else task for task in tasks)
        registration = Registration(
            worker_id, tuple(queues), tuple(tiers), specs, 8, LEASE_S, BEAT_S, "host", 1, donates
        )
        storage = storage or self.storage
        return Puppet(storage, registration, await storage.register(registration))

    # -- time ----------------------------------------------------------------------------------------
    async def pass_time(self, seconds: float, *beating: Puppet) -> None:
        """Let time pass while these workers, and no others, go on beating."""
        left = seconds
        while left > 1e-9:
            step = min(left, BEAT_S)
            self.clock.advance(step)
            left -= step
            for worker in beating:
                await worker.beat()

    async def arm(self, *beating: Puppet) -> None:
        """The fleet has been in good order for longer than a lease: silence means death from now on."""
        await self.storage.orphans(10)
        await self.pass_time(LEASE_S + BEAT_S, *beating)
        assert (await self.storage.orphans(10)).armed

    def step_lease_clock(self, seconds: float) -> None:
        if self.backend.lease_clock == "boot":
            self.clock.step_boot(seconds)
        else:
            self.clock.step_wall(seconds)

    # -- housekeeping --------------------------------------------------------------------------------
    async def orphans(self) -> tuple[Orphan, ...]:
        return (await self.storage.orphans(1_000)).jobs

    async def reap_all(self, transition: Transition = CRASHED) -> list[str]:
        """Reap like a housekeeper that charges each started job the same; the ids that it freed."""
        found = await self.orphans()
        reaps = [Reap(job.id, job.token, transition if job.started else None) for job in found]
        answers = await self.storage.reap(reaps)
        return [job.id for job, answer in zip(found, answers, strict=True) if answer is Settled.APPLIED]


def retention(
    *,
    result_s: float = 100.0,
    dead_letter_s: float = 1_000.0,
    key_s: float = 10_000.0,
    worker_s: float = 3_600.0,
) -> Retention:
    return Retention(result_s, dead_letter_s, key_s, worker_s)
