"""The numbers of the protocol, each against its formula."""

from __future__ import annotations

import math

import pytest

from fluxmesh.mesh.timing import MS, S, Timing, sends_of_news

TIMING = Timing()


@pytest.mark.parametrize(("n", "seconds"), [(1, 2.0), (3, 2.0), (10, 2.0), (100, 4.0), (1_000, 6.0)])
def test_the_shortest_suspicion_grows_with_the_logarithm_of_the_fleet(n: int, seconds: float) -> None:
    assert TIMING.suspicion_min_ns(n) == pytest.approx(seconds * S)


@pytest.mark.parametrize(
    ("n", "confirmations", "seconds"),
    [
        (3, 0, 2.0),  # one other at most could confirm, so nobody waits for two
        (4, 0, 12.0),
        (4, 1, 12.0 - 10.0 * math.log(2) / math.log(3)),
        (4, 2, 2.0),
        (4, 9, 2.0),
        (100, 0, 24.0),
        (100, 2, 4.0),
    ],
)
def test_a_suspicion_shrinks_with_its_confirmations(n: int, confirmations: int, seconds: float) -> None:
    assert TIMING.suspicion_ns(n, confirmations) == pytest.approx(seconds * S, abs=1)


@pytest.mark.parametrize("multiplier", [1, 2])
def test_without_hope_for_confirmations_the_wait_is_the_shortest(multiplier: int) -> None:
    timing = Timing(suspicion_multiplier=multiplier)
    assert timing.confirmations(100) == 0
    assert timing.suspicion_ns(100, 0) == timing.suspicion_min_ns(100)


@pytest.mark.parametrize("n", [2, 3, 4, 10, 100, 1_000, 10_000])
def test_with_its_confirmations_dead_comes_no_later_than_the_classic_wait(n: int) -> None:
    classic = 4 * math.log(n + 1) * TIMING.period_ns + 2 * TIMING.period_ns
    assert TIMING.suspicion_ns(n, TIMING.confirmations(n)) <= classic


def test_news_is_sent_more_often_in_larger_fleets() -> None:
    assert [sends_of_news(n) for n in (10, 99, 100, 999, 1_000, 10_000)] == [8, 8, 12, 12, 16, 20]


def test_in_small_fleets_it_is_sent_as_often_as_there_are_others() -> None:
    assert [sends_of_news(n) for n in range(1, 10)] == [4, 4, 4, 4, 4, 5, 6, 7, 8]


def test_push_pull_gets_rarer_above_32_nodes() -> None:
    every = [TIMING.push_pull_every_ns(n) / S for n in (1, 32, 64, 128, 1_024)]
    assert every == pytest.approx([30, 30, 30, 60, 150])


def test_all_times_follow_from_the_period() -> None:
    fast = Timing(period_ns=100 * MS)
    assert fast.suspicion_min_ns(10) == pytest.approx(TIMING.suspicion_min_ns(10) / 5)
