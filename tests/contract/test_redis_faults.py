"""Redis: a script that fails in the middle. Scripts are not rolled back: what makes one fail has to be found before
it writes, and what it owes for the jobs that it has moved is written all the same."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import pytest

from fluxmesh.errors import StorageError
from fluxmesh.storage.redis.scripts import Scripts
from fluxmesh.storage.values import HELD_TAKEABLE_AFTER_S, OnDeath, Owned, ProgressNote, Reap, Settle, TaskSpec
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
    scenario,
)
from tests.contract.redis_walk import Keys, faults, lost, miscounts, restore, snapshot
from tests.contract.test_redis import RedisBackend, backend, redis_server  # noqa: F401

Act = Callable[[], Awaitable[object]]
Scene = Callable[[Lab], Awaitable[Act]]
SCENES: dict[str, Scene] = {}

# Stands in for `local call = redis.call`: the write whose number is stored fails, and each is noted.
_CALL: Final = "local call = redis.call\n"
_FAULTY: Final = """
local call = (function()
  local at, n = tonumber(redis.call('GET', 'fault') or 0), 0
  local reads = {HGET = 1, HMGET = 1, HGETALL = 1, HEXISTS = 1, HKEYS = 1, ZRANGE = 1, ZRANGEBYSCORE = 1, EXISTS = 1,
    GET = 1, SMEMBERS = 1, TIME = 1, ZCARD = 1, ZSCORE = 1, TYPE = 1, PUBLISH = 1, SISMEMBER = 1, HLEN = 1,
    ZREVRANGE = 1, ZREVRANGEBYSCORE = 1, ZREVRANGEBYLEX = 1, SCARD = 1, STRLEN = 1}
  return function(name, key, ...)
    if not reads[name] then
      n = n + 1
      redis.call('RPUSH', 'written', name .. ' ' .. key)
      if n == at then
        error('an ordered fault')
      end
    end
    return redis.call(name, key, ...)
  end
end)()
"""


@pytest.fixture
def failing_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every script fails at the write that the key `fault` names."""
    real = Scripts._text

    def text(self: Scripts, verb: str) -> tuple[str, str]:
        script, _ = real(self, verb)
        assert script.count(_CALL) == 1
        script = script.replace(_CALL, _FAULTY)
        return script, hashlib.sha1(script.encode()).hexdigest()

    monkeypatch.setattr(Scripts, "_text", text)


def scene(build: Scene) -> Scene:
    SCENES[build.__name__] = build
    return build


FULL: Final = {
    "tags": ["x", "y"],
    "expires_in": 500,
    "concurrency_key": "k",
    "concurrency_limit": 9,
}


def full(n: int, **fields: Any) -> Any:
    """A job on which everything hangs that can."""
    return new_job("work", n, unique_key=f"u{n}", idempotency_key=f"i{n}", **FULL | fields)


async def put_full(lab: Lab, count: int, **fields: Any) -> list[str]:
    answers = await lab.enqueue(*(full(n, **fields) for n in range(count)))
    return [answer.id for answer in answers]


@scene
async def enqueue(lab: Lab) -> Act:
    jobs = [full(1), new_job("work"), full(2, delay=5), full(3, queue="other")]
    return lambda: lab.storage.enqueue(jobs, queue_cap=QUEUE_CAP)


@scene
async def register(lab: Lab) -> Act:
    registration = (await lab.worker("w1", tasks=[TaskSpec("work", max_concurrent=3)])).registration
    return lambda: lab.storage.register(registration)


def claiming(lab: Lab, worker: Puppet, *, slots: int = 0, extra: int = 0, settle: Sequence[Settle] = ()) -> Act:
    """A repeated request is given what the first was given; what it did not come to, the next one is."""
    first = worker.request(settle=settle, slots=slots, extra=extra)

    async def act() -> None:
        answer = await lab.storage.exchange(first)
        left = slots - len(answer.running), extra - len(answer.held)
        if any(left):
            await lab.storage.exchange(worker.request(slots=left[0], extra=left[1]))

    return act


@scene
async def claim(lab: Lab) -> Act:
    await put_full(lab, 3)
    await lab.put("alien")
    await lab.put("work", expires_in=1)
    await lab.put_many(2, delay=1)
    worker = await lab.worker(tasks=[TaskSpec("work", rate_limit="100/s"), "free"], queues=("default", "other"))
    await lab.put("free", queue="other")
    lab.clock.advance(2)
    return claiming(lab, worker, slots=6)


@scene
async def hold(lab: Lab) -> Act:
    await lab.put_many(4, expires_in=50)
    return claiming(lab, await lab.worker(), extra=3)


@scene
async def claim_of_parked(lab: Lab) -> Act:
    await put_full(lab, 3, concurrency_limit=1)
    worker = await lab.worker()
    (job,) = await worker.claim(3)
    return claiming(lab, worker, settle=[Settle(job.id, job.token, COMPLETED)], slots=1)


@scene
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


@scene
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


@scene
async def release(lab: Lab) -> Act:
    worker, jobs = await owned(lab)
    return lambda: lab.storage.release(worker.ref, jobs)


@scene
async def transfer(lab: Lab) -> Act:
    await lab.put_many(3)
    held = [own(job) for job in await (await lab.worker()).hold(3)]
    thief = await lab.worker("w2")
    return lambda: lab.storage.transfer(thief.ref, held)


@scene
async def take_held(lab: Lab) -> Act:
    await lab.put_many(3, expires_in=50)
    await (await lab.worker()).hold(3)
    thief = await lab.worker("w2")
    lab.clock.advance(HELD_TAKEABLE_AFTER_S + 0.01)
    return lambda: lab.storage.take_held(thief.ref, 3)


@scene
async def progress(lab: Lab) -> Act:
    worker, jobs = await owned(lab)
    notes = [ProgressNote(job.id, job.token, 5.0, "half", OnDeath.TIMEOUT) for job in jobs]
    return lambda: lab.storage.progress(worker.ref, notes)


@scene
async def beat(lab: Lab) -> Act:
    """Of a worker that has heard of none of its jobs, twice."""
    worker, _ = await owned(lab)
    worker.owned.clear()
    lab.clock.advance(3 * BEAT_S)
    await worker.beat()
    return worker.beat


@scene
async def beat_of_a_forgotten_worker(lab: Lab) -> Act:
    worker, _ = await owned(lab)
    lab.backend.forget_worker(worker.ref)
    return worker.beat


@scene
async def declare_dead(lab: Lab) -> Act:
    worker, _ = await owned(lab)
    return lambda: lab.storage.declare_dead(worker.ref, "killed")


@scene
async def declare_left(lab: Lab) -> Act:
    worker = await lab.worker()
    return lambda: lab.storage.declare_dead(worker.ref, "left")


@scene
async def orphans(lab: Lab) -> Act:
    await owned(lab)
    lab.clock.advance(60)
    return lambda: lab.storage.orphans(10)


@scene
async def reap(lab: Lab) -> Act:
    worker, _ = await owned(lab)
    await lab.storage.declare_dead(worker.ref, "killed")
    reaps = [Reap(job.id, job.token, CRASHED if job.started else None) for job in await lab.orphans()]
    return lambda: lab.storage.reap(reaps)


@scene
async def command(lab: Lab) -> Act:
    await lab.worker()
    return lambda: lab.storage.command("w1", "quiet")


@scene
async def lead(lab: Lab) -> Act:
    return lambda: lab.storage.lead("me", 5.0)


@scene
async def promote(lab: Lab) -> Act:
    await put_full(lab, 2, delay=1)
    await lab.put_many(2, expires_in=1)
    lab.clock.advance(2)
    return lambda: lab.storage.promote(10)


@scene
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


@scene
async def cancel(lab: Lab) -> Act:
    _, jobs = await owned(lab)
    later = await lab.put(delay=5)
    return lambda: lab.storage.cancel([later, *(job.id for job in jobs)])


async def ended(lab: Lab) -> list[str]:
    made = await put_full(lab, 3)
    worker = await lab.worker()
    jobs = await worker.claim(2)
    await worker.settle(jobs[0], dead())
    await worker.settle(jobs[1], dead())
    await lab.storage.cancel(made)
    return made


@scene
async def replay(lab: Lab) -> Act:
    made = await ended(lab)
    return lambda: lab.storage.replay(made)


@scene
async def discard(lab: Lab) -> Act:
    made = await ended(lab)
    return lambda: lab.storage.discard(made)


@scene
async def reprioritise(lab: Lab) -> Act:
    _, jobs = await owned(lab)
    made = [job.id for job in jobs]
    made += [await lab.put(delay=5), await lab.put()]
    return lambda: lab.storage.reprioritise(made, 0)


@scene
async def pause(lab: Lab) -> Act:
    await lab.put_many(3)
    await (await lab.worker()).hold(3)
    return lambda: lab.storage.pause("default")


@scene
async def resume(lab: Lab) -> Act:
    await lab.put_many(3)
    await lab.storage.pause("default")
    return lambda: lab.storage.resume("default")


TOLD: Final = ("place", "tier", "attempts", "crashes", "life", "cancel", "percent", "reason")


def outcome(keys: Keys) -> dict[str, list[str]]:
    """What a verb did to each job, without its instants. What is not stored is 0."""
    return {job_id: [job.get(name, "0") for name in TOLD] for job_id, job in keys.jobs.items()}


class TestFailingScripts:
    @pytest.mark.usefixtures("failing_scripts")
    @pytest.mark.parametrize("name", sorted(SCENES))
    @scenario
    async def test_a_verb_that_failed_at_any_write_loses_nothing_and_can_be_repeated(
        self, lab: Lab, name: str
    ) -> None:
        assert isinstance(lab.backend, RedisBackend)
        client = lab.backend.client
        act = await SCENES[name](lab)
        client.delete("written")
        before = snapshot(client)
        await act()
        writes = [line.decode() for line in client.lrange("written", 0, -1)]
        client.delete("written")
        assert writes, "the scene writes nothing"
        keys = Keys(client)
        assert faults(keys) == []
        right = outcome(keys)
        wrong: list[str] = []
        for at, write in enumerate(writes, 1):
            restore(client, before)
            client.set("fault", at)
            with pytest.raises(StorageError, match="an ordered fault"):
                await act()
            client.delete("fault", "written")
            keys = Keys(client)
            broken = [f"afterwards: {fault}" for fault in (*lost(keys), *miscounts(keys))]
            await act()
            client.delete("written")
            keys = Keys(client)
            broken += [f"repeated: {fault}" for fault in faults(keys)]
            if outcome(keys) != right:
                broken.append(f"repeated: {outcome(keys)} and not {right}")
            wrong += [f"{at} {write}: {fault}" for fault in broken]
        assert not wrong, "\n".join(wrong)

    @pytest.mark.usefixtures("failing_scripts")
    @pytest.mark.parametrize("name", sorted(SCENES))
    @scenario
    async def test_a_key_of_another_type_takes_no_job_with_it(self, lab: Lab, name: str) -> None:
        """What a verb could not write for the sake of one key, it has written to all the others."""
        assert isinstance(lab.backend, RedisBackend)
        client = lab.backend.client
        act = await SCENES[name](lab)
        client.delete("written")
        before = snapshot(client)
        await act()
        written = {line.split(b" ", 1)[1] for line in client.lrange("written", 0, -1)}
        wrong: list[str] = []
        for key in sorted(key for key in written if not key.startswith(b"fluxmesh:jobs:")):
            restore(client, before)
            client.delete(key)
            if key.startswith(b"fluxmesh:unique:"):
                client.hset(key, "another", "type")
            else:
                client.set(key, "another type")
            with contextlib.suppress(StorageError):
                await act()
            client.delete(key, "written")
            keys = Keys(client)
            name_ = key.decode().removeprefix("fluxmesh:")
            broken = [fault for fault in lost(keys) if name_ not in fault]
            broken += [fault for fault in miscounts(keys) if name_ not in ("tally", "running", "counters")]
            wrong += [f"{name_}: {fault}" for fault in broken]
        assert not wrong, "\n".join(wrong)
