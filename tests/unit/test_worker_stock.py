"""What a worker in the mesh holds, as its loop, its beats and its node see it."""

from __future__ import annotations

import threading

import msgspec
import pytest
import xxhash

from fluxmesh.clock import ManualClock
from fluxmesh.mesh.messages import NodeRef, Offered, Steal
from fluxmesh.storage.values import ClaimedJob, Owned
from fluxmesh.worker.stock import OFFERS_MAX, Rules, Stock

THIEF = NodeRef("thief", 7)


def job(
    number: int, *, token: int = 1, tier: int = 2, task: str = "t", slot: int = 1, hops: int = 0
) -> ClaimedJob:
    return ClaimedJob(
        f"{number:036}", token, task, "default", tier, b"", None, 0, 0, 0, 0, 1, hops=hops, slot=slot
    )


def as_offered(*jobs: ClaimedJob) -> tuple[Offered, ...]:
    return tuple(Offered(job.id, job.token) for job in jobs)


def owned(*jobs: ClaimedJob) -> list[Owned]:
    return [Owned(job.id, job.token) for job in jobs]


def wish(want: int = 9, *, tasks: tuple[str, ...] = ()) -> Steal:
    hashes = tuple(xxhash.xxh3_64_intdigest(task.encode()) for task in tasks)
    return Steal(want, ("default",), (0, 1, 2, 3), hashes)


class Ring:
    """Even slots are ours, slot 3 is the thief's."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def owns(self, queue: str, task: str, slot: int | None) -> bool | None:
        return None if queue == "alone" else slot is not None and slot % 2 == 0

    def owns_of(self, worker_id: str, queue: str, task: str, slot: int | None) -> bool:
        return worker_id == "thief" and slot == 3

    def claim_share(self) -> float:
        return self.share


def stock_of(*jobs: ClaimedJob, clock: ManualClock | None = None, weight: float = 0.7, steal: bool = True,
             local_buffer: int = 64, ring: Ring | None = None) -> Stock:  # fmt: skip
    rules = Rules(concurrency=8, weight=weight, steal=steal, local_buffer=local_buffer)
    stock = Stock(rules, clock or ManualClock())
    stock.neighbours = ring
    assert stock.put(jobs) == []
    return stock


def test_a_job_on_its_way_to_its_start_is_named_in_every_beat_and_offered_to_nobody() -> None:
    first, second = job(1), job(2)
    stock = stock_of(first, second)
    assert stock.pick(1) == [first]
    assert sorted(stock.owned(), key=lambda item: item.id) == owned(first, second)
    assert stock.offer(wish(), 9, THIEF).jobs == as_offered(second)
    stock.landed(first)
    assert stock.owned() == owned(second)
    assert len(stock) == 1


def test_what_a_beat_calls_lost_while_its_begin_is_under_way_must_not_run() -> None:
    first, second = job(1), job(2)
    stock = stock_of(first, second)
    stock.pick(1)
    assert stock.lose(Owned(first.id, first.token)) is None
    assert stock.must_not_run(first)
    assert stock.owned() == owned(second)
    stock.landed(first)
    assert not stock.must_not_run(first), "a later claim of the same token is another matter"
    assert stock.lose(Owned(second.id, second.token + 1)) is None
    assert stock.lose(Owned(second.id, second.token)) == second
    assert stock.owned() == []


def test_a_job_that_is_claimed_anew_is_not_held_under_its_old_token_any_more() -> None:
    stock = stock_of(job(1, token=1))
    stock.forget(job(1, token=1))
    assert len(stock) == 1
    stock.forget(job(1, token=2))
    assert stock.owned() == []


def test_what_does_not_fit_is_handed_back() -> None:
    stock = stock_of(job(1), job(2), job(3), local_buffer=4)
    assert stock.room == 1
    assert stock.put([job(4), job(5)]) == [job(5)]
    assert stock.prefetch([job(6)]) == 0


def test_five_seconds_are_enough() -> None:
    clock = ManualClock()
    stock = stock_of(job(1), clock=clock)
    clock.advance(3.0)
    stock.put([job(2)])
    assert stock.old_in_s() == pytest.approx(2.0)
    clock.advance(1.9)
    assert stock.take_old() == []
    clock.advance(0.1)
    assert stock.take_old() == [job(1)]
    assert stock.owned() == owned(job(2))
    assert stock.counts["buffer_released_old"] == 1


def test_it_is_counted_once_that_a_job_was_stolen_whoever_said_so_first() -> None:
    jobs = [job(number) for number in range(1, 5)]
    stock = stock_of(*jobs)
    offer = stock.offer(wish(), 9, THIEF)
    assert {item.id for item in offer.jobs} == {one.id for one in jobs}
    stock.pick(1)  # 1 is on its way to its start
    stock.lose(Owned(jobs[1].id, 1))  # a beat has said it of 2
    calls: list[int] = []
    stock.on_taken = lambda: calls.append(1)
    assert stock.taken(as_offered(*jobs[:3]), THIEF) == 3
    assert stock.must_not_run(jobs[0])
    assert stock.owned() == owned(jobs[3])
    assert stock.taken(as_offered(*jobs[:3]), THIEF) == 0, "told again"
    assert stock.taken(as_offered(job(9), job(4, token=2)), THIEF) == 0, "never offered"
    assert stock.owned() == owned(jobs[3])
    assert stock.counts["jobs_stolen_out"] == 3
    assert calls == [1]


def test_offers_are_forgotten_after_half_a_minute_and_beyond_a_bound() -> None:
    clock = ManualClock()
    stock = stock_of(job(1), clock=clock)
    stock.offer(wish(), 9, THIEF)
    clock.advance(31)
    stock.put([job(2)])
    stock.offer(wish(1), 1, THIEF)
    assert stock.taken(as_offered(job(1)), THIEF) == 0
    big = stock_of(*[job(number) for number in range(OFFERS_MAX + 1)], local_buffer=OFFERS_MAX + 1)
    big.offer(Steal(1_000, ("default",), (2,), ()), OFFERS_MAX + 1, THIEF)
    for number in range(OFFERS_MAX + 1):
        big._remember([big._buffer.held[job(number).id]])
    assert big.taken(as_offered(job(0)), THIEF) == 0
    assert big.taken(as_offered(job(1)), THIEF) == 1


def test_a_thief_is_offered_what_it_can_run_and_its_own_first() -> None:
    jobs = [job(1, slot=3), job(2, slot=1), job(3, task="other", slot=1), job(4, slot=0), job(5, hops=2)]
    stock = stock_of(*jobs, ring=Ring())
    offer = stock.offer(wish(tasks=("t",)), 9, THIEF)
    assert offer.jobs == as_offered(jobs[0], jobs[1], jobs[3])
    assert stock.offer(wish(2, tasks=("t",)), 9, THIEF).surplus == 2
    assert stock.offer(wish(), 1, THIEF).jobs == as_offered(jobs[0])
    assert stock.offer(Steal(9, ("mail",), (2,), ()), 9, THIEF).jobs == ()
    assert stock.offer(Steal(9, ("default",), (0, 1), ()), 9, THIEF).jobs == ()


def test_without_weight_the_ring_has_no_say_and_at_full_weight_own_jobs_stay() -> None:
    jobs = (job(1, slot=1), job(2, slot=0))
    assert stock_of(*jobs, ring=Ring(), weight=0.0).pick(1) == [jobs[0]]
    assert stock_of(*jobs, ring=Ring(), weight=0.7).pick(1) == [jobs[1]]
    strict = stock_of(*jobs, ring=Ring(), weight=1.0)
    assert strict.offer(wish(), 9, THIEF).jobs == as_offered(jobs[0])
    assert strict.stealable() == (1, 2)


def test_one_that_does_not_steal_offers_nothing() -> None:
    stock = stock_of(job(1), steal=False)
    assert stock.offer(wish(), 9, THIEF).jobs == ()
    assert stock.stealable()[0] == 0


def test_starts_are_counted_by_whose_they_are_if_there_is_a_ring() -> None:
    stock = stock_of()
    stock.note_starts([job(1)])
    stock.neighbours = Ring()
    stock.note_starts([job(1, slot=0), job(2, slot=1), job(3, slot=3)])
    assert (stock.counts["affinity_hits"], stock.counts["affinity_misses"]) == (1, 2)
    alone = msgspec.structs.replace(job(4, slot=0), queue="alone")
    stock.note_starts([alone, job(5, slot=0), alone, alone, job(6, slot=1)])
    assert (stock.counts["affinity_hits"], stock.counts["affinity_misses"]) == (2, 3)


def test_how_much_a_claim_may_hold_follows_from_what_is_held_what_is_coming_and_how_many_share() -> None:
    stock = stock_of()
    assert (stock.lacks(), stock.extra()) == (8, 8)
    for _ in range(20):
        stock.times.note(0.001)
    assert (stock.lacks(), stock.extra()) == (64, 16)
    assert (stock.lacks(60), stock.extra(60)) == (4, 0), "not worth a claim of its own"
    assert stock.extra(60, fills=True) == 4
    assert (stock.extra(49), stock.extra(48)) == (0, 16)
    stock.neighbours = Ring(1 / 3)
    assert stock.extra() == 5
    assert stock.figures()["adaptive_prefetch"] == 5
    stock.put([job(number) for number in range(62)])
    assert (stock.lacks(), stock.extra(fills=True)) == (2, 2)
    stock.give_up()
    assert stock.extra() == 0


def test_its_figures_are_counters_and_how_things_stand() -> None:
    stock = stock_of(job(1))
    stock.want = 3
    figures = stock.figures()
    assert (figures["buffered"], figures["should_prefetch"], figures["should_steal"]) == (1, 1, 1)
    assert stock.pop() == job(1)
    assert stock.pop() is None
    assert stock.figures()["local_pops"] == 1


def test_threads_that_look_and_take_meanwhile_never_meet_half_a_change() -> None:
    stock = stock_of(local_buffer=200)
    over = threading.Event()
    failures: list[BaseException] = []
    taken: set[str] = set()

    def node() -> None:
        try:
            while not over.is_set():
                offer = stock.offer(wish(4), 4, THIEF)
                if stock.taken(offer.jobs[:1], THIEF):
                    taken.add(offer.jobs[0].id)
                stock.stealable()
        except BaseException as error:
            failures.append(error)

    def beats() -> None:
        try:
            while not over.is_set():
                ids = [item.id for item in stock.owned()]
                assert len(ids) <= 400
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for call in (node, beats)]
    for thread in threads:
        thread.start()
    begun: set[str] = set()
    for number in range(3_000):
        stock.put([job(number)])
        if number % 3 == 0:
            for one in stock.pick(2):
                if not stock.must_not_run(one):
                    begun.add(one.id)
                stock.landed(one)
        stock.old_in_s()
    over.set()
    for thread in threads:
        thread.join(10)
    left = {item.id for item in stock.owned()}
    assert not failures
    assert not begun & left
    assert not taken & left
