"""Rate limits: how they are written, and what GCRA promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxmesh.errors import InvalidOption
from fluxmesh.limits import Rate, next_permit_us, parse_rate, permits, take

NOW = 1_700_000_000_000_000
# Down to one start a microsecond: finer than storage's own clock no rate can be.
rates = st.builds(Rate, st.integers(1, 100_000), st.sampled_from([1_000_000, 60_000_000, 3_600_000_000]))
instants = st.integers(1_600_000_000_000_000, 2_000_000_000_000_000)


@pytest.mark.parametrize(
    ("text", "count", "period_us"),
    [("1/s", 1, 1_000_000), ("100/m", 100, 60_000_000), ("1000/h", 1_000, 3_600_000_000)],
)
def test_a_rate_is_a_count_per_second_minute_or_hour(text: str, count: int, period_us: int) -> None:
    assert parse_rate(text) == Rate(count, period_us)


@pytest.mark.parametrize(
    "text",
    ["", "0/s", "-1/s", "1", "1/d", "1/sec", "1.5/s", " 1/s", "1/s\n", "1 / s", "nan/s", "1" * 10 + "/s"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidOption, match="100/m"):
        parse_rate(text)


@given(rate=rates, now=instants)
def test_a_fresh_limit_allows_exactly_its_count_at_once(rate: Rate, now: int) -> None:
    assert permits(rate, 0.0, now) == rate.count
    spent = take(rate, 0.0, now, rate.count)
    assert permits(rate, spent, now) == 0


@given(rate=rates, now=instants, taken=st.integers(0, 100_000))
def test_what_is_taken_is_missing_and_no_more(rate: Rate, now: int, taken: int) -> None:
    taken = min(taken, rate.count)
    assert permits(rate, take(rate, 0.0, now, taken), now) == rate.count - taken


@given(rate=rates, now=instants)
def test_after_a_whole_period_all_permits_are_back(rate: Rate, now: int) -> None:
    spent = take(rate, 0.0, now, rate.count)
    assert permits(rate, spent, now + rate.period_us) == rate.count


@given(rate=rates, now=instants)
def test_the_next_permit_comes_when_it_is_announced_and_not_before(rate: Rate, now: int) -> None:
    spent = take(rate, 0.0, now, rate.count)
    at = next_permit_us(rate, spent)
    assert permits(rate, spent, at) >= 1
    assert permits(rate, spent, at - 1) == 0


@given(rate=rates, now=instants, pauses=st.lists(st.integers(0, 4_000_000_000), max_size=30))
def test_greedy_takers_never_get_more_than_burst_and_rate_allow(
    rate: Rate, now: int, pauses: list[int]
) -> None:
    tat_us, got, at = 0.0, 0, now
    for pause in (0, *pauses):
        at += pause
        free = permits(rate, tat_us, at)
        assert 0 <= free <= rate.count
        tat_us = take(rate, tat_us, at, free)
        got += free
    assert got <= rate.count + (at - now) / rate.interval_us


@given(rate=rates)
def test_the_rate_in_force_is_the_rate_that_was_asked_for(rate: Rate) -> None:
    assert rate.burst_us <= rate.period_us
    assert rate.period_us - rate.burst_us <= rate.count / 4


@pytest.mark.parametrize("count", [7, 68, 850, 997])
def test_a_burst_taken_one_by_one_has_exactly_its_count(count: int) -> None:
    rate, tat_us, got = Rate(count, 1_000_000), 0.0, 0
    while permits(rate, tat_us, NOW) and got <= 2 * count:
        tat_us = take(rate, tat_us, NOW, 1)
        got += 1
    assert got == count


@given(rate=rates, back_us=st.integers(1, 10_000_000_000_000), later_us=st.integers(0, 10_000_000_000_000))
def test_a_clock_that_is_set_back_shuts_a_limit_for_one_more_period_at_most(
    rate: Rate, back_us: int, later_us: int
) -> None:
    spent = take(rate, 0.0, NOW, rate.count)
    at = NOW - back_us + later_us
    if permits(rate, spent, at) == 0:
        opens = next_permit_us(rate, spent)
        assert opens - at <= rate.period_us + rate.interval_us + 1
        assert permits(rate, spent, opens) >= 1
    else:
        assert take(rate, spent, at, 1) <= at + rate.burst_us + rate.interval_us


@given(rate=rates, back_us=st.integers(0, 1_000_000))
def test_a_clock_that_is_corrected_by_a_little_gives_no_second_burst(rate: Rate, back_us: int) -> None:
    spent = take(rate, 0.0, NOW, rate.count)
    assert permits(rate, spent, NOW - back_us) == 0
