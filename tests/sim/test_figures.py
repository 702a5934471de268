"""Figures of the mesh: real cores at sizes that take seconds, the model of the formulas beside them."""

from __future__ import annotations

from random import Random

import pytest

from fluxmesh.mesh.timing import S, Timing
from fluxmesh.testing.mesh_figures import EXPECTED_DEAD_S, Figures, quantile
from fluxmesh.testing.mesh_model import death, model, spread
from fluxmesh.testing.simnet_measure import measure

PACKETS_PER_S = 4.5  # sent, mean over nodes, while nothing happens
BYTES_PER_S = 2_500


@pytest.mark.parametrize(("n", "kills"), [(3, 60), (10, 60), (100, 30)])
def test_deaths_are_known_as_soon_as_expected_and_steady_traffic_is_small(n: int, kills: int) -> None:
    figures = measure(n, kills=kills, seed=n)

    print(figures.row())
    assert figures.off() == []
    assert figures.kills == kills
    assert (figures.missed, figures.false_dead, figures.false_suspects) == (0, 0, 0)
    assert figures.packets_per_s <= PACKETS_PER_S
    assert figures.bytes_per_s <= BYTES_PER_S


def test_thirty_percent_loss_slows_the_news_and_kills_nobody_who_lives() -> None:
    figures = measure(10, kills=30, seed=30, loss=0.3)

    print(figures.row(), figures.false_suspects)
    assert figures.false_dead == 0
    assert figures.missed == 0
    assert quantile(figures.dead_ns, 0.5) < 2 * EXPECTED_DEAD_S[10][0] * S


@pytest.mark.parametrize("n", [3, 10, 100, 1_000])
def test_the_model_gives_the_expected_figures(n: int) -> None:
    figures = model(n)
    print(figures.row())
    assert figures.by == "model"
    assert figures.off() == []


@pytest.mark.slow
def test_the_model_gives_the_expected_figures_of_ten_thousand() -> None:
    figures = model(10_000)
    print(figures.row())
    assert figures.off() == []


def test_a_figure_that_is_off_is_named() -> None:
    slow = Figures(
        nodes=3,
        by="cores",
        loss=0.0,
        kills=2,
        dead_ns=[3 * S, 9 * S],
        spread_ns=[],
        everywhere_ns=[],
        packets_per_s=4.0,
        bytes_per_s=0.0,
        false_dead=0,
        false_suspects=0,
        missed=0,
    )
    assert slow.off() == ["3 nodes: Dead p99 9.00 s, expected 3.4 s +-30%"]


def test_the_quantile_is_the_nearest_rank() -> None:
    values = list(range(1, 101))
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert quantile([], 0.5) == 0


def test_without_confirmations_a_modelled_death_takes_a_probe_a_period_and_the_shortest_wait() -> None:
    timing = Timing()
    shortest = timing.period_ns + timing.suspicion_min_ns(3)
    for seed in range(100):
        took = death(3, rng=Random(seed), timing=timing, heard=[0])
        assert shortest <= took <= shortest + 2 * timing.period_ns


def test_modelled_news_reaches_everybody_in_a_bounded_number_of_packets() -> None:
    timing = Timing()
    told = spread(200, rng=Random(1), timing=timing)
    assert len(told.heard_ns) == 200
    assert told.heard_ns == sorted(told.heard_ns)
    assert told.packets <= 200 * 12
