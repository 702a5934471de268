"""One scene or more for each verb that changes something: what there is before it, and the very call, to be
made again and again. The fault points of every backend are tried on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from fluxmesh.storage.values import (
    HELD_TAKEABLE_AFTER_S,
    OnDeath,
    Owned,
    ProgressNote,
    Reap,
    Settle,
    TaskSpec,
    WorkerView,
)
from fluxmesh.submission import NewJob
from fluxmesh.testing.contract.lab import (
    BEAT_S,
    COMPLETED,
    CRASHED,
    QUEUE_CAP,
    Lab,
    Puppet,
    dead,
    new_job,
    own,
    retention,
    retry,
)

Act = Callable[[], Awaitable[object]]  # asks lab.storage, whatever that is by then
Build = Callable[[Lab], Awaitable[Act]]
SCENES: Final[dict[str, Build]] = {}
VERB_OF: Final[dict[str, str]] = {}  # scene -> the verb that it calls


def scene(verb: str) -> Callable[[Build], Build]:
    def known(build: Build) -> Build:
        SCENES[build.__name__] = build
        VERB_OF[build.__name__] = verb
        return build

    return known


FULL: Final[dict[str, Any]] = {
    "tags": ["x", "y"],
    "expires_in": 500,
    "concurrency_key": "k",
    "concurrency_limit": 9,
}


def full(n: int, **fields: Any) -> NewJob:
    """A job on which everything hangs that can."""
    return new_job("work", n, unique_key=f"u{n}", idempotency_key=f"i{n}", **FULL | fields)


async def put_full(lab: Lab, count: int, **fields: Any) -> list[str]:
    answers = await lab.enqueue(*(full(n, **fields) for n in range(count)))
    return [answer.id for answer in answers]


@scene("enqueue")
async def enqueue(lab: Lab) -> Act:
    jobs = [full(1), new_job("work"), full(2, delay=5), full(3, queue="other")]
    return lambda: lab.storage.enqueue(jobs, queue_cap=QUEUE_CAP)


@scene("register")
async def register(lab: Lab) -> Act:
    registration = (await lab.worker("w1", tasks=[TaskSpec("work", max_concurrent=3)])).registration
    return lambda: lab.storage.register(registration)


def claiming(
    lab: Lab, worker: Puppet, *, slots: int = 0, extra: int = 0, settle: Sequence[Settle] = ()
) -> Act:
    """A repeated request is given what the first was given; what it did not come to, the next one is."""
    first = worker.request(settle=settle, slots=slots, extra=extra)

    async def act() -> None:
        answer = await lab.storage.exchange(first)
        left = slots - len(answer.running), extra - len(answer.held)
        if any(left):
            await lab.storage.exchange(worker.request(slots=left[0], extra=left[1]))

    return act


@scene("exchange")
async def claim(lab: Lab) -> Act:
    await put_full(lab, 3)
    await lab.put("alien")
    await lab.put("work", expires_in=1)
    await lab.put_many(2, delay=1)
    worker = await lab.worker(
        tasks=[TaskSpec("work", rate_limit="100/s"), "free"], queues=("default", "other")
    )
    await lab.put("free", queue="other")
    lab.clock.advance(2)
    return claiming(lab, worker, slots=6)


@scene("exchange")
async def hold(lab: Lab) -> Act:
    await lab.put_many(4, expires_in=50)
    return claiming(lab, await lab.worker(), extra=3)


@scene("exchange")
async def claim_of_own(lab: Lab) -> Act:
    """Own jobs first, then one that was passed by; one is left to another."""
    worker, other = await lab.worker(), await lab.worker("w2")
    await worker.own("mine", weight=1.0)
    await other.own("theirs", weight=1.0)
    for key in ("theirs", "nobodys", "mine", "mine", "nobodys"):
        await lab.put(affinity_key=key)
    return claiming(lab, worker, slots=3)


@scene("exchange")
async def claim_of_parked(lab: Lab) -> Act:
    await put_full(lab, 3, concurrency_limit=1)
    worker = await lab.worker()
    (job,) = await worker.claim(3)
    return claiming(lab, worker, settle=[Settle(job.id, job.token, COMPLETED)], slots=1)


@scene("exchange")
async def settle(lab: Lab) -> Act:
    await put_full(lab, 5)
    worker = await lab.worker()
    jobs = await worker.claim(5)
    await lab.storage.cancel([jobs[4].id])
    ends = (COMPLETED, retry(3), dead(), COMPLETED, retry(3))
    request = worker.request(
        settle=[Settle(job.id, job.token, end) for job, end in zip(jobs, ends, strict=True)]
    )
    return lambda: lab.storage.exchange(request)


@scene("exchange")
async def begin(lab: Lab) -> Act:
    await lab.put_many(3, expires_in=50)
    worker = await lab.worker()
    held = await worker.hold(3)
    await lab.storage.reprioritise([held[0].id], 3)
    held = [*held[1:], *(await worker.hold(1))]
    await lab.put(priority=2)
    request = worker.request(begin=[own(job) for job in held])
    return lambda: lab.storage.exchange(request)


async def owned(lab: Lab) -> tuple[Puppet, list[Owned]]:
    await put_full(lab, 2)
    await lab.put_many(2)
    worker = await lab.worker()
    answer = await worker.exchange(slots=3, extra=1)
    return worker, [own(job) for job in (*answer.running, *answer.held)]


@scene("release")
async def release(lab: Lab) -> Act:
    worker, jobs = await owned(lab)
    return lambda: lab.storage.release(worker.ref, jobs)


@scene("transfer")
async def transfer(lab: Lab) -> Act:
    await lab.put_many(3)
    held = [own(job) for job in await (await lab.worker()).hold(3)]
    thief = await lab.worker("w2")
    return lambda: lab.storage.transfer(thief.ref, held)


@scene("take_held")
async def take_held(lab: Lab) -> Act:
    await lab.put_many(3, expires_in=50)
    await (await lab.worker()).hold(3)
    thief = await lab.worker("w2")
    lab.clock.advance(HELD_TAKEABLE_AFTER_S + 0.01)
    return lambda: lab.storage.take_held(thief.ref, 3)


@scene("progress")
async def progress(lab: Lab) -> Act:
    worker, jobs = await owned(lab)
    notes = [ProgressNote(job.id, job.token, 5.0, "half", OnDeath.TIMEOUT) for job in jobs]
    return lambda: lab.storage.progress(worker.ref, notes)


@scene("beat")
async def beat(lab: Lab) -> Act:
    """Of a worker that has heard of none of its jobs, twice."""
    worker, _ = await owned(lab)
    lab.clock.advance(3 * BEAT_S)
    await worker.beat_listing([])
    return lambda: lab.storage.beat(worker.ref, [], WorkerView(worker.registration))


@scene("beat")
async def beat_of_a_forgotten_worker(lab: Lab) -> Act:
    worker, jobs = await owned(lab)
    lab.backend.forget_worker(worker.ref)
    return lambda: lab.storage.beat(worker.ref, jobs, WorkerView(worker.registration))


@scene("declare_dead")
async def declare_dead(lab: Lab) -> Act:
    worker, _ = await owned(lab)
    return lambda: lab.storage.declare_dead(worker.ref, "killed")


@scene("declare_dead")
async def declare_left(lab: Lab) -> Act:
    worker = await lab.worker()
    return lambda: lab.storage.declare_dead(worker.ref, "left")


@scene("orphans")
async def orphans(lab: Lab) -> Act:
    await owned(lab)
    lab.clock.advance(60)
    return lambda: lab.storage.orphans(10)


@scene("reap")
async def reap(lab: Lab) -> Act:
    worker, _ = await owned(lab)
    await lab.storage.declare_dead(worker.ref, "killed")
    reaps = [Reap(job.id, job.token, CRASHED if job.started else None) for job in await lab.orphans()]
    return lambda: lab.storage.reap(reaps)


@scene("command")
async def command(lab: Lab) -> Act:
    await lab.worker()
    return lambda: lab.storage.command("w1", "quiet")


@scene("lead")
async def lead(lab: Lab) -> Act:
    return lambda: lab.storage.lead("me", 5.0)


@scene("tend")
async def tend(lab: Lab) -> Act:
    await put_full(lab, 2, delay=1)
    await lab.put("work", expires_in=1)
    lab.clock.advance(2)
    return lambda: lab.storage.tend("me", 5, promote=10, orphans=10)


@scene("promote")
async def promote(lab: Lab) -> Act:
    await put_full(lab, 2, delay=1)
    await lab.put_many(2, expires_in=1)
    lab.clock.advance(2)
    return lambda: lab.storage.promote(10)


@scene("prune")
async def prune(lab: Lab) -> Act:
    made = await put_full(lab, 3)
    worker = await lab.worker()
    jobs = await worker.claim(2)
    await worker.settle(jobs[0])
    await worker.settle(jobs[1], dead())
    await lab.storage.cancel([made[2]])
    await lab.storage.declare_dead(worker.ref, "killed")
    lab.clock.advance(5_000)
    return lambda: lab.storage.prune(retention(), 10)


@scene("cancel")
async def cancel(lab: Lab) -> Act:
    _, jobs = await owned(lab)
    later = await lab.put(delay=5)
    return lambda: lab.storage.cancel([later, *(job.id for job in jobs)])


async def ended(lab: Lab) -> list[str]:
    made = [*await put_full(lab, 3), await lab.put()]
    worker = await lab.worker()
    jobs = await worker.claim(2)
    await worker.settle(jobs[0], dead())
    await worker.settle(jobs[1], dead())
    await lab.storage.cancel(made)
    return made


@scene("replay")
async def replay(lab: Lab) -> Act:
    made = await ended(lab)
    return lambda: lab.storage.replay(made)


@scene("discard")
async def discard(lab: Lab) -> Act:
    made = await ended(lab)
    return lambda: lab.storage.discard(made)


@scene("reprioritise")
async def reprioritise(lab: Lab) -> Act:
    _, jobs = await owned(lab)
    made = [job.id for job in jobs]
    made += [await lab.put(delay=5), await lab.put()]
    return lambda: lab.storage.reprioritise(made, 0)


@scene("pause")
async def pause(lab: Lab) -> Act:
    await lab.put_many(3)
    await (await lab.worker()).hold(3)
    return lambda: lab.storage.pause("default")


@scene("resume")
async def resume(lab: Lab) -> Act:
    await lab.put_many(3)
    await lab.storage.pause("default")
    return lambda: lab.storage.resume("default")
