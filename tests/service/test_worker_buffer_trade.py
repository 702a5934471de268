"""Work that changes hands: when a worker asks for it, how it takes it, and that nothing runs twice."""

from __future__ import annotations

from fluxmesh.job import Status
from fluxmesh.mesh.messages import Offered
from fluxmesh.storage.values import Owned
from tests.service.stockroom import BEAT_S, PEER, Bench, Stockroom, stockroom, until


async def full(room: Stockroom, count: int) -> tuple[Bench, list[str]]:
    """A worker that runs one job and holds the rest."""
    ids = await room.put(count)
    one = await room.worker()
    await one.fetcher.start()
    await until(lambda: len(one.stock) == count - 1)
    await one.rests()
    return one, ids


@stockroom
async def test_a_worker_whose_claim_found_nothing_asks_others_once(room: Stockroom) -> None:
    one = await room.worker(concurrency=2, warm=False)
    await one.fetcher.start()
    await until(lambda: one.told.wants == [4])  # two free slots, two to hold
    one.fetcher.look()
    await one.rests()
    assert one.told.wants == [4]
    assert one.stock.hungry
    await room.put(20)
    await until(lambda: len(one.stock) == 2)
    await one.rests()
    assert one.told.wants == [4, 0]
    one.end(one.started[0])
    await one.rests()
    assert one.told.wants == [4, 0], "there is more where that came from"


@stockroom
async def test_what_it_wants_is_what_one_steal_can_bring_at_the_most(room: Stockroom) -> None:
    one = await room.worker(concurrency=50)
    await one.fetcher.start()
    await until(lambda: bool(one.told.wants))
    assert one.told.wants == [4]


@stockroom
async def test_one_with_free_hands_asks_for_nothing_while_it_is_quiet_drains_or_its_lease_lapsed(
    room: Stockroom,
) -> None:
    one = await room.worker(concurrency=2, warm=False)
    await one.fetcher.start()
    await until(lambda: one.told.wants == [4])
    one.fetcher.set_quiet(True)
    await until(lambda: one.told.wants == [4, 0])
    one.fetcher.set_quiet(False)
    await until(lambda: one.told.wants == [4, 0, 4])
    one.lease.renewed(-1_000.0)
    one.fetcher.look()
    await until(lambda: one.told.wants == [4, 0, 4, 0])
    one.lease.renewed(one.clock.mono_s())
    one.fetcher.look()
    await until(lambda: one.told.wants[-1] == 4)
    one.fetcher.stop_claiming()
    await until(lambda: one.told.wants[-1] == 0)


@stockroom
async def test_one_that_holds_more_than_the_threshold_asks_nobody(room: Stockroom) -> None:
    one, ids = await full(room, 5)
    assert one.told.wants == []
    one.end(ids[0])
    await until(lambda: len(one.started) == 2)
    await one.rests()
    assert len(one.stock) == 3
    assert one.told.wants == []
    one.end(ids[1])
    await until(lambda: len(one.started) == 3)
    await one.rests()
    assert len(one.stock) == 2
    assert one.told.wants == [4]


@stockroom
async def test_what_is_taken_is_begun_at_once_and_the_rest_is_held(room: Stockroom) -> None:
    one, ids = await full(room, 10)
    two = await room.worker("w2", concurrency=2)
    await two.fetcher.start()
    await until(lambda: two.told.wants == [4])
    jobs = one.offered(4)
    assert [item.id for item in jobs] == ids[:5:-1]
    two.fetcher.take(PEER, jobs)
    await until(lambda: len(two.started) == 2)
    await two.rests()
    assert two.told.takes == [(PEER, jobs, jobs)]
    assert set(two.started) | two.held == {item.id for item in jobs}
    assert two.told.wants == [4, 4], "the wish was fulfilled, and is as large again"
    assert [two.table.runs[job_id].job.hops for job_id in two.started] == [1, 1]
    assert one.stock.taken(jobs, PEER) == 4
    assert len(one.stock) == 5


@stockroom
async def test_a_begin_that_is_lost_to_a_thief_runs_nowhere_twice(room: Stockroom) -> None:
    one, ids = await full(room, 40)
    two = await room.worker("w2")
    await two.fetcher.start()
    await two.rests()
    while len(one.started) + len(two.started) < 40 or one.table.runs or two.table.runs:
        jobs = one.offered(4)
        if jobs:
            two.fetcher.take(PEER, jobs)
        for bench in (one, two):  # both begin while the take is under way
            for job_id, run in list(bench.table.runs.items()):
                if not run.ended and job_id in bench.started:
                    bench.end(job_id)
        takes = len(two.told.takes)
        if jobs:
            await until(lambda takes=takes: len(two.told.takes) > takes)
        await one.rests()
        await two.rests()
    assert sorted(one.started + two.started) == sorted(ids)
    assert two.started
    assert await room.by_status() == {Status.COMPLETED: 40}


@stockroom
async def test_an_offer_that_is_out_of_date_brings_nothing_and_is_answered(room: Stockroom) -> None:
    one, ids = await full(room, 3)
    two = await room.worker("w2")
    await two.fetcher.start()
    await two.rests()
    stale = tuple(Offered(item.id, item.token - 1) for item in one.offered())
    two.fetcher.take(PEER, stale)
    await until(lambda: two.told.takes == [(PEER, stale, ())])
    assert two.started == []
    assert one.held == set(ids[1:])


@stockroom
async def test_a_transfer_that_is_answered_late_is_given_back(room: Stockroom) -> None:
    one, ids = await full(room, 3)
    two = await room.worker("w2")
    await two.fetcher.start()
    await two.rests()
    two.fetcher.set_quiet(False)
    two.storage.transfers.closed = True
    jobs = one.offered(1)
    two.fetcher.take(PEER, jobs)
    await until(lambda: bool(two.storage.transfers.waiting))
    two.clock.advance(1.1 * BEAT_S)
    two.storage.transfers.open()
    await until(lambda: two.released == [(ids[2],)])
    assert two.told.takes == [(PEER, jobs, jobs)]
    assert two.started == [] or two.started == [ids[2]], "if at all, by a claim of its own"


@stockroom
async def test_a_drain_in_the_middle_of_a_take_gives_back_what_it_brings(room: Stockroom) -> None:
    one, ids = await full(room, 6)
    two = await room.worker("w2")
    await two.fetcher.start()
    await two.rests()
    two.storage.transfers.closed = True
    jobs = one.offered(3)
    two.fetcher.take(PEER, jobs)
    await until(lambda: bool(two.storage.transfers.waiting))
    two.fetcher.stop_claiming()
    assert not two.fetcher._idle(), "it is not over before the take is"
    two.storage.transfers.open()
    assert await two.fetcher.flush(5.0)
    assert two.table.owned() == []
    assert two.started == []
    assert two.told.takes == [(PEER, jobs, jobs)]
    assert await room.by_status() == {Status.RUNNING: 1, Status.CLAIMED: 2, Status.PENDING: 3}
    assert ids


@stockroom
async def test_one_that_drains_takes_nothing_and_says_so(room: Stockroom) -> None:
    one, ids = await full(room, 4)
    two = await room.worker("w2")
    await two.fetcher.start()
    two.fetcher.stop_claiming()
    jobs = one.offered()
    two.fetcher.take(PEER, jobs)
    await until(lambda: two.told.takes == [(PEER, jobs, ())])
    assert one.held == set(ids[1:])
    assert (await one.beat()).lost == ()


@stockroom
async def test_a_job_that_has_changed_hands_twice_stays(room: Stockroom) -> None:
    one, ids = await full(room, 2)
    two, three = await room.worker("w2"), await room.worker("w3")
    [item] = one.offered()
    [row] = await room.storage.transfer(two.ref, [Owned(item.id, item.token)])
    [row] = await room.storage.transfer(three.ref, [Owned(row.id, row.token)])
    assert row.hops == 2
    three.stock.put([row])
    assert three.offered() == ()
    assert three.stock.stealable()[0] == 0
    assert row.id == ids[1]
