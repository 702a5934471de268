"""Suspicions, our own health, round trips."""

from __future__ import annotations

import pytest

from fluxmesh.mesh.detector import Health, RoundTrips, Suspicion, blame_of_silence
from fluxmesh.mesh.timing import MS, SCORE_MAX, S, Timing

TIMING = Timing()


def a_suspicion(population: int = 10) -> Suspicion:
    return Suspicion(started_ns=100 * S, population=population, accusers=["a"])


def test_each_accuser_counts_once() -> None:
    suspicion = a_suspicion()
    assert not suspicion.confirm("a", timing=TIMING)
    assert suspicion.confirm("b", timing=TIMING)
    assert not suspicion.confirm("b", timing=TIMING)
    assert suspicion.accusers == ["a", "b"]


def test_more_than_the_expected_confirmations_do_not_count() -> None:
    suspicion = a_suspicion()
    assert [suspicion.confirm(who, timing=TIMING) for who in "bcd"] == [True, True, False]


def test_where_nobody_could_confirm_nobody_does() -> None:
    assert not a_suspicion(population=3).confirm("b", timing=TIMING)


def test_a_nameless_accuser_is_none() -> None:
    assert not a_suspicion().confirm("", timing=TIMING)


def test_confirmations_bring_the_deadline_forward_to_the_shortest_wait() -> None:
    suspicion = a_suspicion()
    deadlines = [suspicion.deadline_ns(TIMING)]
    for who in "bc":
        suspicion.confirm(who, timing=TIMING)
        deadlines.append(suspicion.deadline_ns(TIMING))
    assert deadlines == sorted(deadlines, reverse=True)
    assert deadlines[0] == 112 * S
    assert deadlines[2] == 102 * S


def test_d20_the_time_we_stood_still_is_given_back() -> None:
    suspicion = a_suspicion()
    suspicion.push_out(3 * S)
    assert suspicion.deadline_ns(TIMING) == 115 * S


def test_the_score_stays_between_well_and_seven() -> None:
    health = Health()
    health.blame(-1)
    assert (health.score, health.factor) == (0, 1)
    health.blame(100)
    assert (health.score, health.factor) == (SCORE_MAX, 8)
    health.blame(-1)
    assert health.score == SCORE_MAX - 1


@pytest.mark.parametrize(
    ("helpers", "nacks", "blame"),
    [(3, 3, 0), (3, 1, 2), (3, 0, 3), (1, 1, 0), (0, 0, 1)],
)
def test_silence_is_our_own_fault_as_far_as_helpers_are_silent_too(
    helpers: int, nacks: int, blame: int
) -> None:
    assert blame_of_silence(helpers=helpers, nacks=nacks) == blame


def test_patience_is_half_a_period_until_enough_is_known() -> None:
    trips = RoundTrips()
    for _ in range(15):
        trips.note(MS)
    assert trips.patience_ns(500 * MS) == 250 * MS
    trips.note(MS)
    assert trips.patience_ns(500 * MS) == 50 * MS


@pytest.mark.parametrize(("slowest", "patience"), [(1, 50), (30, 90), (200, 250)])
def test_patience_is_three_times_the_slowest_answer_within_bounds(slowest: int, patience: int) -> None:
    trips = RoundTrips()
    for rtt in [1] * 63 + [slowest]:
        trips.note(rtt * MS)
    assert trips.patience_ns(500 * MS) == patience * MS


def test_old_round_trips_are_forgotten() -> None:
    trips = RoundTrips()
    trips.note(S)
    for _ in range(64):
        trips.note(MS)
    assert trips.patience_ns(500 * MS) == 50 * MS
