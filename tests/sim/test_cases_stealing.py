"""Failures of stealing that people reported of other systems, as scenes in virtual time, by the case."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from fluxmesh.mesh.timing import MS, S
from fluxmesh.testing.simnet_points import Points
from fluxmesh.testing.simnet_store import MAX_HOPS, Place
from fluxmesh.testing.simnet_thefts import draw_scheme, finished, play
from tests.sim.thefts import (
    LONG,
    debit_is_undone,
    goes_on,
    moved_to,
    one_thief_takes_half,
    shop_of,
    until_moved,
    who_stands_still_asks,
)

SHORT = (30 * MS, 60 * MS)


def test_d28_a_job_changes_hands_twice_at_most_and_runs_once() -> None:
    """Everybody says to hold twenty jobs more, so that each asks each as soon as it has room."""
    shop = shop_of([1] * 6)
    for worker in shop.workers.values():
        worker.lies = 20
    for _ in range(20):
        shop.submit(30, tiers=(2,), run_ns=(100 * MS, 400 * MS), to=0)
        goes_on(shop, 1)

    assert shop.books.most_hops == MAX_HOPS, "no job came as far as the bound"
    shop.heal()
    finished(shop, exact=False)
    assert all(account.starts == 1 for account in shop.books.accounts.values())


class Overtaken(Points):
    """Offers come late or twice, and what a thief asks storage for comes after newer requests."""

    def on_the_way(self, message: str) -> str:
        return self._rng.choice(("late", "doubled")) if message == "offer" and self._share else ""

    def in_storage(self, verb: str) -> str:
        slow = verb == "transfer" and self._share and self._rng.random() < 0.7
        return self._rng.choice(("request late", "request doubled")) if slow else ""


def test_d29_an_answer_that_comes_late_meets_another_token_and_does_nothing() -> None:
    shop = shop_of([1, 3, 3, 3], points=Overtaken(rng=Random(29), share=1.0, blows=0.0))
    for _ in range(40):
        shop.submit(24, tiers=(2,), run_ns=SHORT, to=0)
        goes_on(shop, 0.4)

    shop.heal()
    finished(shop, exact=False)
    counters = [worker.node.core.counters() for worker in shop.workers.values()]
    assert sum(one.get("steals_lost", 0) for one in counters) > 10, "no transfer met another token"
    assert shop.books.verbs["transfer"] > 10
    assert all(account.starts == 1 for account in shop.books.accounts.values())


def test_d30_what_is_taken_first_is_of_the_highest_tier_and_nothing_starts_below_a_ready_one() -> None:
    """Books and onlooker check each start and each offer; here is that there was something to check."""
    shop = shop_of([1, 4, 4])
    for _ in range(60):
        shop.submit(24, tiers=(0, 1, 2, 3), run_ns=SHORT, to=0)
        goes_on(shop, 0.03)
        shop.submit(12, tiers=(0,), run_ns=SHORT)  # while buffers hold lower ones
        goes_on(shop, 0.3)
    finished(shop, exact=True)

    assert shop.thefts > 100
    outranked = shop.books.releases["outranked"]
    assert outranked > 0, "no begin met a ready job of a higher tier"


@pytest.mark.parametrize("seed", range(1, 6))
def test_d31_one_thief_does_not_take_nearly_all(seed: int) -> None:
    assert one_thief_takes_half(seed) == ""


def test_d32_who_stands_still_or_drains_is_no_thief() -> None:
    """That no request is sent the onlooker checks at every call; here the work is in reach, and is left."""
    shop = shop_of([1, 8, 8, 2])
    shop.workers["w1"].degrade(10 * S)
    shop.workers["w2"].drain()
    goes_on(shop, 0.1)
    shop.submit(40, tiers=(2,), run_ns=LONG, to=0)
    goes_on(shop, 0.8)

    assert shop.onlooker.asked_by["w1"] == shop.onlooker.asked_by["w2"] == 0
    assert shop.onlooker.asked_by["w3"] > 0
    assert [moved_to(shop, shop.workers[name]) for name in ("w1", "w2")] == [0, 0]
    assert not shop.workers["w1"].shelf.held
    assert not shop.workers["w1"].bodies


@pytest.mark.parametrize("seed", range(1, 6))
def test_d32_work_in_reach_of_one_that_stands_still_is_left_alone(seed: int) -> None:
    assert who_stands_still_asks(seed) == ""


@pytest.mark.parametrize("seed", range(1, 6))
def test_d33_half_a_second_of_pause_does_not_make_a_worker_idle_for_the_whole_run(seed: int) -> None:
    shop = shop_of([1, 8], seed=seed)
    shop.workers["w1"].degrade(S // 2)
    shop.submit(40, tiers=(2,), run_ns=LONG, to=0)
    goes_on(shop, 0.5)
    assert moved_to(shop, shop.workers["w1"]) == 0

    waited = until_moved(shop, shop.workers["w1"], 2.0)

    assert waited is not None, "it has taken nothing 2 s after its pause"


@pytest.mark.parametrize("seed", range(1, 6))
def test_d34_a_debit_is_undone_though_nothing_new_is_heard_of_that_peer(seed: int) -> None:
    assert debit_is_undone(seed) == ""


def test_stealing_stops_within_three_rounds_under_static_load() -> None:
    """Jobs that do not end: once nobody has more than it needs and a peer that could use it, nobody asks."""
    shop = shop_of([2, 4, 6, 8, 10])
    shop.submit(60, tiers=(2,), run_ns=LONG, to=0)
    goes_on(shop, 4)

    assert shop.thefts >= 5
    rounds = (shop.onlooker.last_ask_ns - shop.books.last_move_ns) / (125 * MS)
    assert rounds <= 3, f"asked for {rounds:.1f} rounds after the last job had moved"
    assert shop.onlooker.last_ask_ns < shop.net.now - 2 * S


def test_with_all_gossip_dropped_the_same_jobs_are_done() -> None:
    """P12: storage alone is enough. What the mesh does is that they are stolen sooner."""
    for seed in (3, 5, 7, 9):
        scheme = draw_scheme(seed)
        calm = replace(
            scheme,
            habits=tuple(replace(habits, takes_held=True) for habits in scheme.habits),
            share=0.0,
            blows=0.0,
            loss=0.0,
            away=(),
            drains=(),
            stands=(),
            liars=(),
        )
        on, off = (play(replace(calm, mute=mute)) for mute in (False, True))
        assert (on.problem, off.problem) == ("", "")
        assert on.done == off.done
        assert len(on.done) == on.jobs == off.jobs > 100
        assert on.thefts > 0 == off.thefts
        assert off.taken_held > 0


def test_a_job_that_a_dead_thief_had_taken_is_done_by_another() -> None:
    shop = shop_of([1, 4, 4])
    thief = shop.workers["w1"]
    shop.submit(30, tiers=(2,), run_ns=(S, S), to=0)
    assert until_moved(shop, thief, 2.0) is not None
    stolen = [row.id for row in shop.store.owned[thief.me].values()]
    shop.kill(thief.me)
    finished(shop, exact=False)

    assert stolen
    assert all(shop.books.accounts[job].place is Place.DONE for job in stolen)
