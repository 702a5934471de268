"""What a worker holds: nothing is lost or doubled, nothing starves, and a thief gets the best of it (D30)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fluxmesh.mesh.buffer import (
    HOPS_MAX,
    RUNS_KNOWN,
    TIERS,
    Buffer,
    Held,
    RunTimes,
    extra_of_claim,
    offered,
    pays,
    poll_jitter_s,
    wanted,
    worth_asking,
)
from fluxmesh.storage.values import MAX_HOPS


def held(number: int, tier: int = 2, *, slot: int = 0, hops: int = 0, since_ns: int = 0) -> Held:
    return Held(f"job {number}", number, "default", tier, "t", slot, hops, since_ns)


def in_order(jobs: list[Held]) -> list[int]:
    return [job.token for job in jobs]


def even(job: Held) -> bool:
    """Of the worker that owns the even slots."""
    return job.slot is not None and job.slot % 2 == 0


def filled(*jobs: Held, most: int = 64) -> Buffer:
    buffer = Buffer(most, even)
    for job in jobs:
        assert buffer.put(job)
    return buffer


jobs_of = st.lists(
    st.tuples(st.integers(0, TIERS - 1), st.integers(0, 3), st.integers(0, 3)), max_size=30
).map(
    lambda rows: [
        held(number, tier, slot=slot, hops=hops, since_ns=number)
        for number, (tier, slot, hops) in enumerate(rows)
    ]
)


def test_storage_and_buffer_agree_on_how_often_a_job_changes_hands() -> None:
    assert HOPS_MAX == MAX_HOPS


# -- what is begun next ----------------------------------------------------------------------------------
def test_the_highest_tier_is_begun_first_then_own_jobs_then_the_oldest() -> None:
    buffer = filled(
        held(1, 2, slot=1), held(2, 3, slot=0), held(3, 2, slot=2), held(4, 0, slot=1), held(5, 2, slot=4)
    )
    assert in_order(buffer.hot(9)) == [4, 3, 5, 1, 2]
    assert in_order(buffer.hot(2)) == [4, 3]


@given(jobs_of, st.integers(0, 40))
def test_no_job_is_begun_before_one_of_its_tier_and_kind_that_came_earlier(
    jobs: list[Held], most: int
) -> None:
    chosen = filled(*jobs).hot(most)
    assert len(chosen) == min(most, len(jobs))
    assert len({job.id for job in chosen}) == len(chosen)
    ahead = {job.id for job in chosen}
    for job in jobs:
        if job.id not in ahead:
            later = [other for other in chosen if (other.tier, even(other)) == (job.tier, even(job))]
            assert all(other.since_ns < job.since_ns for other in later)
            assert all((other.tier, not even(other)) <= (job.tier, not even(job)) for other in chosen)


@given(
    jobs_of,
    st.integers(0, 12),
    st.lists(st.integers(0, 4), min_size=TIERS, max_size=TIERS),
)
def test_a_reserved_slot_is_given_to_its_tier_alone(jobs: list[Held], most: int, lacking: list[int]) -> None:
    chosen = filled(*jobs).hot(most, lacking)
    by_tier = [sum(job.tier == tier for job in chosen) for tier in range(TIERS)]
    open_to_all = max(0, most - sum(lacking))
    assert sum(by_tier) <= most
    beyond = [max(0, count - kept) for count, kept in zip(by_tier, lacking, strict=True)]
    assert sum(beyond) <= open_to_all
    there = [sum(job.tier == tier for job in jobs) for tier in range(TIERS)]
    if sum(lacking) <= most:  # then no slot is left empty that a job could have
        for tier in range(TIERS):
            usable = lacking[tier] + open_to_all - sum(beyond)
            assert by_tier[tier] >= min(there[tier], lacking[tier])
            assert by_tier[tier] == there[tier] or usable <= by_tier[tier]


def test_other_rings_other_owners_and_the_same_ages() -> None:
    mine = {2}
    buffer = Buffer(9, lambda job: job.slot in mine)
    for job in (held(1, slot=1), held(2, slot=2), held(3, slot=1), held(4, slot=2)):
        buffer.put(job)
    assert in_order(buffer.hot(9)) == [2, 4, 1, 3]
    mine.clear()
    mine.add(1)
    assert in_order(buffer.hot(9)) == [2, 4, 1, 3], "nobody was asked anew"
    buffer.regard()
    assert in_order(buffer.hot(9)) == [1, 3, 2, 4]
    assert buffer.stealable(own_too=False) == (2, 2)


# -- what a thief is offered -----------------------------------------------------------------------------
def for_thief(jobs: list[Held], most: int, *, own_too: bool = True, thiefs: int = 3) -> list[Held]:
    return offered(
        jobs,
        most,
        can_run=lambda job: job.queue == "default",
        is_thiefs=lambda job: job.slot == thiefs,
        is_own=even,
        own_too=own_too,
    )


def test_d30_a_thief_gets_the_highest_tier_then_its_own_then_what_is_not_ours_and_of_each_the_newest() -> (
    None
):
    jobs = [
        held(1, 3, slot=3),
        held(2, 1, slot=2),
        held(3, 1, slot=1),
        held(4, 1, slot=1),
        held(5, 1, slot=3),
        held(6, 2, slot=3),
        held(7, 1, slot=0),
    ]
    assert in_order(for_thief(jobs, 9)) == [5, 4, 3, 7, 2, 6, 1]
    assert in_order(for_thief(jobs, 2)) == [5, 4]


def test_at_full_weight_what_belongs_to_the_holder_is_offered_to_nobody() -> None:
    jobs = [held(1, slot=0), held(2, slot=1), held(3, slot=3)]
    assert in_order(for_thief(jobs, 9, own_too=False)) == [3, 2]


def test_what_has_changed_hands_twice_or_cannot_be_run_there_is_not_offered() -> None:
    elsewhere = Held("job 9", 9, "mail", 0, "t", 1, 0, 0)
    assert in_order(for_thief([held(1, hops=2), held(2, hops=1), elsewhere], 9)) == [2]


@given(jobs_of, st.integers(0, 40), st.booleans())
def test_an_offer_never_passes_over_a_higher_tier(jobs: list[Held], most: int, own_too: bool) -> None:
    buffer = filled(*jobs)
    chosen = for_thief(list(buffer.held.values()), most, own_too=own_too)
    count, best = buffer.stealable(own_too=own_too)
    assert len(chosen) == min(most, count)
    assert len(buffer) == len(jobs), "an offer marks nothing"
    if chosen:
        assert chosen[0].tier == best
    left = [job for job in jobs if job not in chosen and job.hops < HOPS_MAX and (own_too or not even(job))]
    assert all(job.tier <= other.tier for job in chosen for other in left)


# -- what is held ----------------------------------------------------------------------------------------
class Holder(RuleBasedStateMachine):
    """The buffer beside the plainest one there is: a list."""

    @initialize(most=st.integers(0, 8))
    def begin(self, most: int) -> None:
        self.plain: list[Held] = []
        self.buffer = Buffer(most, even)
        self.now = 0

    @rule(number=st.integers(0, 12), tier=st.integers(0, 3), slot=st.integers(0, 3), hops=st.integers(0, 3))
    def put(self, number: int, tier: int, slot: int, hops: int) -> None:
        self.now += 1
        job = Held(f"job {number}", self.now, "default", tier, "t", slot, hops, self.now)
        self.plain = [other for other in self.plain if other.id != job.id]
        fits = len(self.plain) < self.buffer.most
        assert self.buffer.put(job) is fits
        if fits:
            self.plain.append(job)

    @rule(number=st.integers(0, 12), stale=st.booleans())
    def remove(self, number: int, stale: bool) -> None:
        held_now = next((job for job in self.plain if job.id == f"job {number}"), None)
        token = 0 if held_now is None else held_now.token - stale
        gone = self.buffer.remove(f"job {number}", token)
        if held_now is None or stale:
            assert gone is None
        else:
            assert gone == held_now
            self.plain.remove(held_now)

    @rule(most=st.integers(0, 4))
    def begin_hottest(self, most: int) -> None:
        for job in self.buffer.hot(most):
            assert self.buffer.remove(job.id, job.token) == job
            self.plain.remove(job)

    @rule()
    def ask_anew(self) -> None:
        self.buffer.regard()

    @invariant()
    def same(self) -> None:
        assert list(self.buffer.held.values()) == self.plain
        assert len(self.buffer) <= self.buffer.most
        assert self.buffer.room == self.buffer.most - len(self.plain)
        by_heat = sorted(self.plain, key=lambda job: (job.tier, not even(job), job.since_ns))
        assert self.buffer.hot(99) == by_heat
        for own_too in (True, False):
            movable = [job for job in self.plain if job.hops < HOPS_MAX and (own_too or not even(job))]
            best = min((job.tier for job in movable), default=TIERS - 1)
            assert self.buffer.stealable(own_too=own_too) == (len(movable), best)
        assert self.buffer.older_than(self.now - 3) == [
            job for job in self.plain if job.since_ns <= self.now - 3
        ]
        assert self.buffer.oldest_ns() == (self.plain[0].since_ns if self.plain else None)


TestHolder = Holder.TestCase


# -- how much to hold ------------------------------------------------------------------------------------
def test_a_run_counts_as_a_second_until_five_are_known() -> None:
    times = RunTimes()
    for _ in range(RUNS_KNOWN - 1):
        times.note(0.010)
        assert times.run_s == 1.0
    times.note(0.010)
    assert times.run_s == pytest.approx(0.010)


def noted(*runs_s: float) -> RunTimes:
    times = RunTimes()
    for run_s in runs_s:
        times.note(run_s)
    return times


@pytest.mark.parametrize("slow", list(itertools.combinations(range(9), 4)))
def test_four_slow_runs_of_nine_do_not_spoil_a_full_buffer(slow: tuple[int, ...]) -> None:
    times = noted(*[1.0 if number in slow else 0.0015 for number in range(9)])
    assert wanted(1, times.run_s, 64) == 64


def test_a_true_change_counts_wholly_from_the_fifth_run_on() -> None:
    times = noted(*[0.001] * 50)
    seen = []
    for _ in range(6):
        times.note(0.250)
        seen.append(times.run_s)
    assert seen == [0.001] * 4 + [0.250] * 2
    for _ in range(5):
        times.note(0.001)
    assert times.run_s == 0.001


@pytest.mark.parametrize(
    ("run_s", "trip_s", "quiet_s", "does"),
    [
        (0.020, 0.005, 0.0, True),
        (0.004, 0.005, 0.0, False),
        (0.004, 0.005, 0.0055, False),
        (0.004, 0.005, 0.0065, True),
        (0.001, 0.0003, 0.0, False),
        (0.003, 0.0003, 0.0, True),
        (1.0, 0.0, 0.0, True),
    ],
)
def test_it_pays_to_hold_what_lasts_longer_than_an_exchange(
    run_s: float,
    trip_s: float,
    quiet_s: float,
    does: bool,
) -> None:
    assert pays(run_s, trip_s, quiet_s) is does


@pytest.mark.parametrize(
    ("concurrency", "run_s", "local_buffer", "mark"),
    [
        (8, None, 64, 8),
        (8, 1.0, 64, 8),
        (8, 0.1, 64, 8),
        (8, 0.05, 64, 16),
        (1, 0.001, 64, 64),
        (1, 0.0, 64, 64),
        (1, 0.030, 64, 4),
        (8, 1.0, 0, 0),
    ],
)
def test_a_buffer_covers_a_tenth_of_a_second(
    concurrency: int, run_s: float | None, local_buffer: int, mark: int
) -> None:
    assert wanted(concurrency, run_s, local_buffer) == mark


def test_a_claim_pays_when_a_quarter_is_missing() -> None:
    assert next(lacks for lacks in range(65) if worth_asking(lacks, 64)) == 16
    assert worth_asking(1, 1)
    assert worth_asking(2, 8)
    assert not worth_asking(1, 8)
    assert not worth_asking(0, 0)


@pytest.mark.parametrize(
    ("local_buffer", "share", "extra"),
    [(64, 1.0, 16), (64, 1 / 3, 5), (64, 1 / 100, 1), (64, 0.0, 1), (2, 1.0, 1), (0, 1.0, 0), (48, 1 / 3, 4)],
)
def test_one_claim_holds_a_quarter_of_the_buffer_by_our_share_of_the_fleet(
    local_buffer: int, share: float, extra: int
) -> None:
    assert extra_of_claim(local_buffer, share) == extra


def test_workers_do_not_ask_all_together() -> None:
    rests = {name: poll_jitter_s(name, 0.5) for name in ("w1", "w2", "w3")}
    assert len(set(rests.values())) == 3
    assert all(0 <= rest < 0.25 for rest in rests.values())
    assert rests["w1"] == poll_jitter_s("w1", 0.5)
