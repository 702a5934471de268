"""Retry delays, by the formulas of the contract."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxmesh.backoff import JITTERS, STRATEGIES, Backoff, Jitter, Strategy, retry_delay_s

RNG = random.Random(7)


@pytest.mark.parametrize(
    ("strategy", "delays"),
    [
        ("exponential", [1.5, 3, 6, 12, 24, 48, 60, 60]),  # min(max_backoff, base * 2^(k-1))
        ("linear", [1.5, 3, 4.5, 6, 7.5, 9, 10.5, 12]),  # min(max_backoff, base * k)
        ("fixed", [1.5] * 8),
    ],
)
def test_delays_without_jitter_are_those_of_the_table(strategy: Strategy, delays: list[float]) -> None:
    backoff = Backoff(strategy, 1.5, 60.0, "none")
    assert [retry_delay_s(backoff, k, RNG) for k in range(1, 9)] == delays


@pytest.mark.parametrize("strategy", ["exponential", "linear"])
@pytest.mark.parametrize("k", [100, 1_000, 1_000_000])
def test_no_number_of_attempts_overflows_the_cap(strategy: Strategy, k: int) -> None:
    assert retry_delay_s(Backoff(strategy, 1.0, 60.0, "none"), k, RNG) == 60.0


@pytest.mark.parametrize(
    ("jitter", "low", "high"), [("half", 5.0, 10.0), ("full", 0.0, 10.0), ("none", 10.0, 10.0)]
)
def test_jitter_spreads_a_delay_over_its_whole_range_and_not_beyond(
    jitter: Jitter, low: float, high: float
) -> None:
    rng = random.Random(1)
    drawn = [retry_delay_s(Backoff("fixed", 10.0, 60.0, jitter), 1, rng) for _ in range(2_000)]
    assert low <= min(drawn) <= low + 0.05 * (high - low)
    assert high - 0.05 * (high - low) <= max(drawn) <= high


@given(
    strategy=st.sampled_from(STRATEGIES),
    jitter=st.sampled_from(JITTERS),
    base=st.floats(0, 316_224_000, allow_nan=False),
    most=st.floats(0, 316_224_000, allow_nan=False),
    k=st.integers(1, 10_000_000),
)
def test_every_delay_is_finite_and_within_its_cap(
    strategy: Strategy, jitter: Jitter, base: float, most: float, k: int
) -> None:
    delay = retry_delay_s(Backoff(strategy, base, most, jitter), k, RNG)
    assert 0 <= delay <= (base if strategy == "fixed" else most)


def test_the_defaults_are_those_of_the_contract() -> None:
    assert Backoff() == Backoff("exponential", 1.0, 60.0, "half")
