"""A worker that holds jobs: how many, what it begins, and what becomes of those that it does not."""

from __future__ import annotations

import asyncio

import pytest

from fluxmesh.job import Status
from fluxmesh.storage.values import Owned, Standing, WorkerRef
from tests.service.stockroom import BEAT_S, LEASE_S, Stockroom, stockroom, until


@stockroom
async def test_an_idle_worker_whose_jobs_are_short_fills_its_buffer(room: Stockroom) -> None:
    ids = await room.put(64)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 63)
    await one.rests()
    assert one.started == ids[:1]
    assert await room.by_status() == {Status.RUNNING: 1, Status.CLAIMED: 63}
    assert all(request.extra <= 16 for request in one.storage.requests)
    assert max(request.extra for request in one.storage.requests) == 16
    assert one.stock.counts["prefetch_jobs"] == 63
    assert one.stock.counts["prefetch_count"] >= 4


@stockroom
async def test_jobs_that_are_shorter_than_an_exchange_are_claimed_to_run_and_not_to_be_held(
    room: Stockroom,
) -> None:
    await room.put(60)
    one = await room.worker(concurrency=4)
    one.far(0.9 * BEAT_S)
    await one.fetcher.start()
    for number in range(60):
        await until(lambda number=number: len(one.started) > number)
        one.end(one.started[number])
    await one.rests()
    assert await room.by_status() == {Status.COMPLETED: 60}
    assert [request.extra for request in one.storage.requests if request.extra] == []
    assert one.stock.counts["prefetch_jobs"] == 0


@stockroom
async def test_when_they_turn_out_to_be_longer_the_buffer_is_filled(room: Stockroom) -> None:
    await room.put(64)
    one = await room.worker()
    one.far(0.02)
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 63)
    first, *more = one.storage.requests
    assert (first.slots, first.extra) == (1, 0)
    assert [(request.slots, request.extra) for request in more[:3]] == [(0, 16)] * 3


@stockroom
async def test_one_whose_slots_are_full_asks_for_no_more_before_something_ends(room: Stockroom) -> None:
    await room.put(3)
    one = await room.worker(concurrency=2)
    await one.fetcher.start()
    await until(lambda: len(one.started) == 2 and len(one.stock) == 1)
    await one.rests()
    asked = len(one.storage.requests)
    await room.put(5)
    one.fetcher.look()
    await one.rests()
    assert len(one.storage.requests) == asked
    one.end(one.started[0])
    await until(lambda: len(one.started) == 3 and len(one.stock) == 5)


@stockroom
async def test_a_worker_whose_jobs_are_long_holds_one_for_each_slot(room: Stockroom) -> None:
    await room.put(30)
    one = await room.worker(concurrency=3, warm=False)
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 3)
    await one.rests()
    assert await room.by_status() == {Status.RUNNING: 3, Status.CLAIMED: 3, Status.PENDING: 24}


@stockroom
async def test_what_idle_workers_could_start_is_held_by_none_of_them(room: Stockroom) -> None:
    workers = [await room.worker(f"w{number}") for number in range(3)]
    for one in workers:
        await one.fetcher.start()
    for one in workers:
        await until(lambda one=one: bool(one.storage.requests) and one.at_rest)
    for _ in range(5):
        ids = await room.put(3)
        await until(lambda: all(one.table.runs for one in workers))
        started = [one.started[-1] for one in workers]
        assert sorted(started) == sorted(ids)
        for one, job_id in zip(workers, started, strict=True):
            one.end(job_id)
            await one.rests()
    assert sum(one.stock.counts["prefetch_jobs"] for one in workers) == 0


@stockroom
async def test_while_bodies_end_no_exchange_is_made_only_to_hold(room: Stockroom) -> None:
    ids = await room.put(30)
    one = await room.worker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fluxmesh.worker.holding.FILL_REST_S", 60.0)  # every end comes before that is over
        await one.fetcher.start()
        for number in range(6):
            await until(lambda number=number: len(one.started) == number + 1)
            await one.rests()
            if number < 5:
                one.end(ids[number])
    assert len(one.stock) > 0
    assert [request.extra for request in one.storage.requests if not request.settle] == [0]
    assert len(one.storage.requests) == 6


@stockroom
async def test_a_claim_is_never_larger_than_the_batch(room: Stockroom) -> None:
    await room.put(30)
    one = await room.worker(concurrency=4)
    one.fetcher._batch = 5
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 26)
    assert all(request.slots + request.extra + len(request.begin) <= 5 for request in one.storage.requests)


@stockroom
async def test_a_worker_without_a_mesh_holds_nothing(room: Stockroom) -> None:
    await room.put(10)
    one = await room.worker(concurrency=2, plain=True)
    await one.fetcher.start()
    await until(lambda: len(one.started) == 2)
    await one.rests()
    assert all(request.extra == 0 and not request.begin for request in one.storage.requests)
    assert await room.by_status() == {Status.RUNNING: 2, Status.PENDING: 8}


@stockroom
async def test_held_jobs_are_begun_in_their_order_by_the_exchange_that_settles_the_one_before(
    room: Stockroom,
) -> None:
    ids = await room.put(10)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 9)
    await one.rests()
    asked = len(one.storage.requests)
    for number in range(10):
        await until(lambda number=number: len(one.started) == number + 1)
        one.end(ids[number])
    await one.rests()
    assert one.started == ids
    assert await room.by_status() == {Status.COMPLETED: 10}
    settling = [request for request in one.storage.requests[asked:] if request.settle]
    assert [len(request.begin) for request in settling] == [1] * 9 + [0]
    assert one.stock.counts["local_pops"] == 9


@stockroom
async def test_a_held_job_starts_only_by_winning_its_begin(room: Stockroom) -> None:
    ids = await room.put(4)
    one, thief = await room.worker(), await room.worker("thief")
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 3)
    await one.rests()
    [stolen] = [item for item in one.offered() if item.id == ids[1]]
    assert await room.storage.transfer(thief.ref, [Owned(stolen.id, stolen.token)])
    one.end(ids[0])
    await until(lambda: len(one.started) == 2)
    await one.rests()
    assert one.started == [ids[0], ids[2]]
    assert one.held == {ids[3]}
    assert await room.status(ids[1]) is Status.CLAIMED
    assert not one.table._waiting
    assert stolen.id not in {item.id for item in one.table.owned()}


@stockroom
async def test_a_critical_job_that_comes_while_lows_are_held_starts_on_the_first_free_slot(
    room: Stockroom,
) -> None:
    low = await room.put(12, tier=3)
    one = await room.worker(concurrency=2)
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 10)
    await one.rests()
    [critical] = await room.put(tier=0)
    one.end(low[0])
    await until(lambda: len(one.started) == 3)
    assert one.started[2] == critical
    assert await room.status(low[2]) is not Status.RUNNING
    await one.rests()
    one.end(critical)
    await until(lambda: len(one.started) == 4)
    assert one.started[3] in low


@stockroom
async def test_a_reserve_is_kept_from_held_jobs_and_given_to_those_of_its_tier(room: Stockroom) -> None:
    low = await room.put(6, tier=3)
    one = await room.worker(concurrency=3, reserve={0: 1})
    await one.fetcher.start()
    await until(lambda: len(one.started) == 2 and len(one.stock) == 4)
    await one.rests()
    asked = len(one.storage.requests)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(one.storage.requests) == asked, (
        "a slot that none of the held jobs may have is no reason to ask"
    )
    critical = await room.put(2, tier=0)
    await until(lambda: critical[0] in one.started)
    await one.rests()
    one.end(low[0])
    await until(lambda: len(one.started) == 4)
    assert one.started[3] == critical[1]
    one.end(critical[0])
    await one.rests()
    assert len(one.started) == 5, "the other critical job fills the reserve"
    one.end(critical[1])
    await one.rests()
    assert len(one.started) == 5, "two lows leave one slot, which is kept"
    assert sorted(one.table.runs[job_id].job.tier for job_id in one.table.runs) == [3, 3]


@stockroom
async def test_beats_keep_held_jobs_alive(room: Stockroom) -> None:
    await room.put(5)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 4)
    await one.rests()
    for _ in range(5):  # the storage's time passes: a job that two lists miss is released after two beats
        answer = await one.beat()
        assert not answer.lost
        await asyncio.sleep(0.75 * BEAT_S)
    assert await room.by_status() == {Status.RUNNING: 1, Status.CLAIMED: 4}


@stockroom
async def test_what_is_held_for_five_seconds_is_given_back(room: Stockroom) -> None:
    await room.put(4)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 3)
    await one.rests()
    old = one.held
    one.clock.advance(4.9)
    one.fetcher.look()
    await one.rests()
    assert one.held == old
    one.clock.advance(0.2)
    one.fetcher.look()
    await until(lambda: bool(one.released))
    await one.rests()
    assert set(one.released[0]) == old
    assert one.stock.counts["buffer_released_old"] == 3
    assert await room.by_status() == {Status.RUNNING: 1, Status.PENDING: 3}
    assert not one.held


@stockroom
async def test_a_job_held_too_long_is_seen_without_anybody_looking(room: Stockroom) -> None:
    await room.put(2)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 1)
    await one.rests()
    timer = one.fetcher._lookout._timer
    assert timer is not None
    left_s = timer.when() - asyncio.get_running_loop().time()
    assert 4.0 < left_s <= 5.1


async def drained(room: Stockroom, ids: list[str]) -> None:
    """A worker with a full buffer, told to drain in the middle of an exchange, hands back everything."""
    one = await room.worker(f"w{len(room.benches)}", concurrency=4)
    await one.fetcher.start()
    await until(lambda: len(one.stock) >= 32)
    one.storage.exchanges.closed = len(room.benches) % 2 == 0
    for job_id in one.started[:2]:
        one.end(job_id)
    await asyncio.sleep(0)
    one.fetcher.stop_claiming()
    assert len(one.stock) == 0
    one.storage.exchanges.open()
    for job_id in list(one.table.runs):
        if job_id in one.started and not one.table.runs[job_id].ended:
            one.end(job_id)
    assert await one.fetcher.flush(5.0)
    await one.fetcher.stop()
    assert one.table.owned() == []
    counts = await room.by_status()
    assert counts.get(Status.CLAIMED, 0) == counts.get(Status.RUNNING, 0) == 0
    assert counts[Status.COMPLETED] + counts.get(Status.PENDING, 0) == len(ids)


@stockroom
async def test_a_drain_with_a_full_buffer_hands_back_everything_twenty_times(room: Stockroom) -> None:
    ids = await room.put(200)
    for _ in range(20):
        await drained(room, ids)
    started = [job_id for bench in room.benches for job_id in bench.started]
    assert len(set(started)) == len(started), "what was handed back had not been started"


@stockroom
async def test_a_quiet_worker_gives_back_what_it_holds_and_holds_no_more(room: Stockroom) -> None:
    ids = await room.put(10)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 9)
    await one.rests()
    one.storage.exchanges.closed = True
    one.end(ids[0])
    await until(lambda: bool(one.storage.exchanges.waiting))
    one.fetcher.set_quiet(True)
    assert not one.held
    one.storage.exchanges.open()
    await until(lambda: len(one.started) == 2)  # it was begun already
    await one.rests()
    assert await room.by_status() == {Status.COMPLETED: 1, Status.RUNNING: 1, Status.PENDING: 8}
    one.fetcher.set_quiet(False)
    one.end(one.started[1])
    await until(lambda: len(one.started) == 3 and len(one.stock) == 7)


@stockroom
async def test_while_the_lease_may_have_lapsed_no_held_job_is_begun(room: Stockroom) -> None:
    ids = await room.put(4)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 3)
    await one.rests()
    one.stock.counts["buffer_released_old"] = 0
    one.clock.advance(4.0)
    one.lease.renewed(one.clock.mono_s() - LEASE_S)
    one.end(ids[0])
    await one.rests()
    assert one.started == ids[:1]
    assert len(one.stock) == 3
    one.lease.renewed(one.clock.mono_s())
    one.fetcher.look()
    await until(lambda: len(one.started) == 2)


@stockroom
async def test_the_held_jobs_of_a_queue_that_is_paused_are_not_started(room: Stockroom) -> None:
    ids = await room.put(5)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 4)
    await one.rests()
    await room.storage.pause("default")
    one.end(ids[0])
    await until(lambda: len(one.stock) < 4)
    await one.rests()
    await one.beat()
    assert not one.held
    assert one.started == ids[:1]
    assert await room.by_status() == {Status.COMPLETED: 1, Status.PENDING: 4}
    await room.storage.resume("default")
    one.fetcher.look()
    await until(lambda: len(one.started) == 2)


@stockroom
async def test_begins_that_are_answered_late_are_given_back_and_never_run(room: Stockroom) -> None:
    ids = await room.put(3)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 2)
    await one.rests()
    one.storage.exchanges.closed = True
    one.end(ids[0])
    await until(lambda: bool(one.storage.exchanges.waiting))
    assert await room.status(ids[1]) is Status.RUNNING, "storage has begun it"
    one.clock.advance(1.1 * BEAT_S)
    one.lease.renewed(one.clock.mono_s())
    one.fetcher._pause_until = float("inf")  # so that it does not claim it anew
    one.storage.exchanges.open()
    await until(lambda: bool(one.released))
    await one.rests()
    assert one.released == [(ids[1],)]
    assert one.started == ids[:1]
    assert one.held == {ids[2]}
    assert await room.by_status() == {Status.COMPLETED: 1, Status.PENDING: 1, Status.CLAIMED: 1}


@stockroom
async def test_a_begun_job_that_a_beat_calls_lost_before_the_answer_comes_does_not_run(
    room: Stockroom,
) -> None:
    ids = await room.put(2)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 1)
    await one.rests()
    one.storage.exchanges.closed = True
    one.end(ids[0])
    await until(lambda: bool(one.storage.exchanges.waiting))
    [owned] = [item for item in one.table.owned() if item.id == ids[1]]
    assert await room.status(ids[1]) is Status.RUNNING
    await room.storage.release(one.ref, [owned])  # whatever took it away
    answer = await one.beat()
    assert ids[1] in answer.lost
    one.fetcher.set_quiet(True)  # it shall not claim it anew
    one.storage.exchanges.open()
    await one.rests()
    assert one.started == ids[:1]
    assert ids[1] not in one.table, "it was not even let in"
    assert await room.status(ids[1]) is Status.PENDING


@stockroom
async def test_a_job_whose_begin_is_under_way_is_named_once_in_each_beat(room: Stockroom) -> None:
    ids = await room.put(2)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 1)
    await one.rests()
    one.storage.exchanges.closed = True
    one.end(ids[0])
    for _ in range(20):
        owned = [item.id for item in one.table.owned()]
        assert owned.count(ids[1]) == 1
        if one.storage.exchanges.waiting:
            one.storage.exchanges.open()
        await asyncio.sleep(0.001)
    await until(lambda: len(one.started) == 2)
    assert [item.id for item in one.table.owned()].count(ids[1]) == 1
    assert not one.stock._beginning


@stockroom
async def test_a_held_job_that_is_cancelled_is_not_started(room: Stockroom) -> None:
    ids = await room.put(3)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 2)
    await one.rests()
    await room.storage.cancel([ids[1]])
    assert (await one.beat()).lost == (ids[1],)
    assert one.held == {ids[2]}
    one.end(ids[0])
    await until(lambda: len(one.started) == 2)
    assert one.started == [ids[0], ids[2]]
    assert await room.status(ids[1]) is Status.CANCELLED


@stockroom
async def test_a_fenced_worker_lets_go_of_what_it_holds(room: Stockroom) -> None:
    ids = await room.put(4)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 3)
    await one.rests()
    two = await room.worker()  # the same id
    assert two.ref.epoch > one.ref.epoch
    one.end(ids[0])
    await until(lambda: one.fenced)
    await one.rests()
    assert not one.held
    assert one.table.owned() == []
    assert one.started == ids[:1]
    await two.fetcher.start()
    await until(lambda: len(two.started) == 1)


@stockroom
async def test_begins_that_storage_did_not_even_look_at_are_given_back(room: Stockroom) -> None:
    ids = await room.put(2)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 1)
    await one.rests()
    one.storage.standing = Standing.UNKNOWN  # its row is gone until the next beat
    one.end(ids[0])
    await until(lambda: one.released == [(ids[1],)])
    assert one.started == ids[:1]
    assert await room.status(ids[1]) is Status.PENDING
    one.storage.standing = None
    await until(lambda: len(one.started) == 2)  # it looks again soon


@stockroom
async def test_jobs_of_a_worker_whose_loop_stands_still_are_taken_by_others(room: Stockroom) -> None:
    ids = await room.put(3)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 2)
    await one.rests()
    two = await room.worker("w2", plain=True)
    await two.fetcher.start()
    await until(lambda: len(two.started) == 1)  # one's loop, as far as its stock goes, does nothing
    assert two.started[0] in ids[1:]
    one.end(ids[0])
    await until(lambda: len(one.started) == 2)
    assert {one.started[1], two.started[0]} == set(ids[1:])


@stockroom
async def test_a_free_slot_that_is_reserved_is_no_reason_to_ask_for_what_others_hold(room: Stockroom) -> None:
    await room.put(1)
    two = await room.worker("w2", concurrency=2, reserve={0: 1}, plain=True)
    await two.fetcher.start()
    await until(lambda: len(two.started) == 1)
    await room.put(3)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == 2)
    await asyncio.sleep(0.15)  # HELD_TAKEABLE_AFTER_S is over
    two.fetcher.look()
    await two.rests()
    asked = len(two.storage.requests)
    await asyncio.sleep(0.25)
    assert len(two.storage.requests) == asked
    two.end(two.started[0])
    await until(lambda: len(two.started) == 2)
    assert two.storage.takes


@pytest.mark.parametrize("steal", [True, False])
def test_take_held_is_for_those_who_steal(tmp_path: object, steal: bool) -> None:
    @stockroom
    async def play(room: Stockroom) -> None:
        ids = await room.put(3)
        one = await room.worker(steal=steal)
        await one.fetcher.start()
        await until(lambda: len(one.stock) == 2)
        await one.rests()
        two = await room.worker("w2", steal=steal)
        await two.fetcher.start()
        if steal:
            await until(lambda: len(two.started) == 1)
            assert two.stock.counts["jobs_taken_held"] == 1
        else:
            await two.rests()
            await asyncio.sleep(0.15)  # HELD_TAKEABLE_AFTER_S is over: storage would give them now
            two.fetcher.look()
            await two.rests()
            assert two.storage.takes == []
            assert two.told.wants == []
            assert two.started == []
            assert await room.storage.transfer(WorkerRef("w2", two.ref.epoch), []) == []
        assert one.started == ids[:1]

    play(tmp_path)  # type: ignore[arg-type]
