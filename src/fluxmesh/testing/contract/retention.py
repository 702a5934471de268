"""Nothing grows for ever: prune."""

from __future__ import annotations

import pytest

from fluxmesh.job import Status
from fluxmesh.storage.values import Verdict
from fluxmesh.testing.contract.lab import COMPLETED, LEASE_S, Lab, dead, new_job, retention, scenario


async def prune_all(lab: Lab, *, limit: int = 1_000, **ages: float) -> int:
    """Prune until there is no more; the number of jobs that went."""
    jobs = 0
    for _ in range(1_000):
        pruned = await lab.storage.prune(retention(**ages), limit)
        assert pruned.jobs <= limit
        jobs += pruned.jobs
        if not pruned.more:
            return jobs
    pytest.fail("prune does not come to an end")


def growth(lab: Lab, before: dict[str, int]) -> dict[str, int]:
    """Tables with more rows than before, but for those the backend keeps on purpose."""
    after = lab.backend.rows()
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: more for name, more in grown.items() if more > 0 and name not in lab.backend.kept_tables}


class TestRetention:
    @scenario
    async def test_each_kind_of_end_has_its_own_age(self, lab: Lab) -> None:
        completed, given_up = await lab.end(COMPLETED), await lab.end(dead("ended"))
        cancelled, expired = await lab.put(), await lab.put(expires_in=0.001)
        await lab.storage.cancel([cancelled])
        lab.clock.advance(0.01)
        await lab.storage.promote(10)
        everything = [completed, given_up, cancelled, expired]
        lab.clock.advance(99)
        assert await prune_all(lab) == 0
        lab.clock.advance(2)
        assert await prune_all(lab) == 3
        assert [await lab.storage.get(job_id) is None for job_id in everything] == [True, False, True, True]
        lab.clock.advance(898)
        assert await prune_all(lab) == 0
        lab.clock.advance(2)
        assert await prune_all(lab) == 1

    @scenario
    async def test_what_has_not_ended_is_never_pruned_however_old(self, lab: Lab) -> None:
        made = [*await lab.put_many(3), await lab.put(delay=10 * 366 * 86_400 - 1)]
        worker = await lab.worker()
        await worker.exchange(slots=1, extra=1)
        alien = await lab.put("alien")
        await worker.claim(1)
        lab.clock.advance(366 * 86_400)
        assert await prune_all(lab) == 0
        assert all([await lab.storage.get(job_id) is not None for job_id in [*made, alien]])

    @scenario
    async def test_a_call_prunes_at_most_its_limit_and_says_that_there_is_more(self, lab: Lab) -> None:
        made = await lab.put_many(5)
        await lab.storage.cancel(made)
        lab.clock.advance(101)
        steps = [await lab.storage.prune(retention(), 2) for _ in range(3)]
        assert [pruned.jobs for pruned in steps] == [2, 2, 1]
        assert [pruned.more for pruned in steps[:2]] == [True, True]

    @scenario
    async def test_a_key_outlives_its_pruned_job_and_tells_how_it_ended(self, lab: Lab) -> None:
        first = await lab.end(COMPLETED, idempotency_key="i")
        lab.clock.advance(101)
        assert await prune_all(lab) == 1
        same = new_job("ended", queue="ends", idempotency_key="i")
        (known,) = await lab.enqueue(same)
        assert (known.id, known.verdict, known.pruned) == (first, Verdict.EXISTING, True)
        assert known.status is Status.COMPLETED
        (other,) = await lab.enqueue(new_job("ended", 1, idempotency_key="i"))
        assert other.verdict is Verdict.CONFLICT
        assert (await lab.storage.counts()).total == 0

    @scenario
    async def test_a_key_is_forgotten_its_time_after_the_end(self, lab: Lab) -> None:
        await lab.end(COMPLETED, idempotency_key="i")
        lab.clock.advance(10_001)
        await prune_all(lab)
        (anew,) = await lab.enqueue(new_job("ended", idempotency_key="i"))
        assert anew.verdict is Verdict.CREATED

    @scenario
    async def test_a_key_never_lives_shorter_than_its_job(self, lab: Lab) -> None:
        first = await lab.end(dead("ended"), idempotency_key="i")
        unended = await lab.put(idempotency_key="j")
        lab.clock.advance(50)
        await prune_all(lab, key_s=1)
        (same,) = await lab.enqueue(new_job("ended", idempotency_key="i"))
        (other,) = await lab.enqueue(new_job("work", idempotency_key="j"))
        assert (same.id, same.verdict) == (first, Verdict.EXISTING)
        assert (other.id, other.verdict) == (unended, Verdict.EXISTING)

    @scenario
    async def test_a_replayed_jobs_key_lives_on_with_its_new_life(self, lab: Lab) -> None:
        first = await lab.end(dead("ended"), idempotency_key="i")
        await lab.storage.replay([first])
        lab.clock.advance(20_000)
        await prune_all(lab)
        (same,) = await lab.enqueue(new_job("ended", idempotency_key="i"))
        assert (same.id, same.verdict) == (first, Verdict.EXISTING)

    @scenario
    async def test_a_silent_worker_is_forgotten_after_its_time_and_a_live_one_is_not(self, lab: Lab) -> None:
        silent, live = await lab.worker("silent"), await lab.worker("live")
        lab.clock.advance(50)
        await live.beat()
        await prune_all(lab, worker_s=100)
        assert {info.worker_id for info in await lab.storage.fleet()} == {"silent", "live"}
        lab.clock.advance(60)
        await live.beat()
        await prune_all(lab, worker_s=100)
        assert {info.worker_id for info in await lab.storage.fleet()} == {"live"}
        assert silent.ref.epoch != live.ref.epoch

    @scenario
    async def test_a_worker_that_owns_jobs_is_not_forgotten(self, lab: Lab) -> None:
        await lab.put()
        worker = await lab.worker()
        await worker.claim_one()
        lab.clock.advance(7_200)
        await prune_all(lab)
        assert len(await lab.storage.fleet()) == 1

    @scenario
    async def test_after_its_time_everything_is_back_to_the_empty_baseline(self, lab: Lab) -> None:
        """C22 a: results, dead letters, keys, tags, parking, limits, requests, waits, workers."""
        empty = lab.backend.rows()
        await self._a_busy_day(lab)
        assert sum(lab.backend.rows().values()) > sum(empty.values()) + 300
        lab.clock.advance(4 * 86_400)
        await lab.storage.orphans(10)
        await prune_all(lab)
        lab.clock.advance(1)
        await prune_all(lab)
        assert growth(lab, empty) == {}
        assert (await lab.storage.counts()).total == 0
        assert (await lab.storage.queue_stats(), await lab.storage.fleet()) == ([], [])

    async def _a_busy_day(self, lab: Lab) -> None:
        for index in range(50):
            await lab.put(idempotency_key=f"i{index}", tags=["a", f"t{index}"], unique_key=f"u{index}")
        await lab.put_many(50, "flaky", queue="second", priority=0, concurrency_key="k", concurrency_limit=50)
        await lab.put_many(20, "alien", queue="third")
        await lab.storage.cancel(await lab.put_many(20, "work", delay=60))
        await lab.put_many(10, "work", queue="fourth", expires_in=5)
        worker = await lab.worker(tasks=("work", "flaky"), queues=("default", "second", "third"))
        helper = await lab.worker("w2", tasks=("alien",), queues=("third",))
        for _ in range(10):
            for job in await worker.claim(10):
                await worker.settle(job, dead("flaky") if job.task == "flaky" else COMPLETED)
        await helper.complete(*await helper.claim(20))
        assert await lab.storage.wait_for((await lab.everything())[0].id, 0.01) is not None
        await lab.storage.pause("fifth")
        await lab.storage.resume("fifth")
        lab.clock.advance(LEASE_S)
        await lab.storage.promote(1_000)
        counts = (await lab.storage.counts()).by_status
        ended = (Status.COMPLETED, Status.DEAD_LETTER, Status.CANCELLED, Status.EXPIRED)
        assert [counts.get(status, 0) for status in ended] == [70, 50, 20, 10]
