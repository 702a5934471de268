"""The order of claims and the table that keeps it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxmesh.mesh.member import TOMBSTONES_MAX, Table, merge, outranks, softened
from fluxmesh.mesh.messages import NodeRef, Record, Standing
from fluxmesh.mesh.timing import MEMBERS_MAX, TOMBSTONE_NS, S
from tests.unit.mesh.driving import a_record

Key = tuple[int, int, int]
claims = st.builds(
    Record,
    st.just("w"),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.just("10.0.0.1"),
    st.just(7946),
    st.just(1),
    st.sampled_from(["", "a", "b"]),
)


def key(record: Record) -> Key:
    return (record.epoch, record.incarnation, record.standing)


@given(claims, claims)
def test_it_does_not_matter_which_of_two_claims_came_first(one: Record, other: Record) -> None:
    assert key(merge(one, other)) == key(merge(other, one))


@given(claims, claims, claims)
def test_it_does_not_matter_in_which_groups_claims_come(one: Record, two: Record, three: Record) -> None:
    assert key(merge(merge(one, two), three)) == key(merge(one, merge(two, three)))


@given(claims)
def test_a_claim_heard_again_changes_nothing(claim: Record) -> None:
    assert merge(claim, claim) is claim
    assert not outranks(claim, claim)


@given(st.lists(claims, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_table_ends_the_same_whatever_the_order_and_never_goes_back(
    heard: list[Record], chance: random.Random
) -> None:
    ends = set()
    for _ in range(2):
        chance.shuffle(heard)
        table = Table()
        last: Key | None = None
        for claim in heard:
            row = table.rows.get("w")
            if outranks(claim, row.record if row else None):
                table.put(claim, 0)
            now = key(table.rows["w"].record)
            assert last is None or now >= last
            last = now
        assert len(table.rows) == 1
        ends.add(last)
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("held", "claim", "wins"),
    [
        ((1, 4, Standing.ALIVE), (1, 4, Standing.SUSPECT), True),
        ((1, 4, Standing.SUSPECT), (1, 4, Standing.ALIVE), False),  # only a higher incarnation refutes
        ((1, 4, Standing.SUSPECT), (1, 5, Standing.ALIVE), True),
        ((1, 4, Standing.SUSPECT), (1, 4, Standing.DEAD), True),
        ((1, 4, Standing.DEAD), (1, 4, Standing.LEFT), True),
        ((1, 4, Standing.LEFT), (1, 5, Standing.ALIVE), True),
        ((1, 9, Standing.LEFT), (2, 0, Standing.ALIVE), True),  # another run owes nothing to the last
        ((2, 0, Standing.ALIVE), (1, 9, Standing.LEFT), False),
        ((1, 4, Standing.ALIVE), (1, 3, Standing.LEFT), False),
    ],
)
def test_the_order_is_epoch_then_incarnation_then_standing(
    held: tuple[int, int, Standing], claim: tuple[int, int, Standing], wins: bool
) -> None:
    def record(epoch: int, incarnation: int, standing: Standing) -> Record:
        return a_record(1, epoch=epoch, incarnation=incarnation, standing=standing)

    assert outranks(record(*claim), record(*held)) is wins


def test_d18_an_epoch_may_jump_by_any_distance() -> None:
    assert outranks(a_record(1, epoch=(1 << 63) - 1), a_record(1, epoch=1))


def test_a_dead_of_another_table_is_a_suspect_and_all_else_is_what_it_is() -> None:
    dead = softened(a_record(1, standing=Standing.DEAD, incarnation=3, accuser="w"), "teller")
    assert (dead.standing, dead.incarnation, dead.accuser) == (Standing.SUSPECT, 3, "w")
    assert softened(a_record(1, standing=Standing.DEAD), "teller").accuser == "teller"
    for standing in (Standing.ALIVE, Standing.SUSPECT, Standing.LEFT):
        record = a_record(1, standing=standing)
        assert softened(record, "teller") is record


def test_d17_a_new_run_takes_the_row_of_the_old_one_and_nothing_it_earned() -> None:
    table = Table()
    row = table.put(a_record(1), 5)
    assert row is not None
    row.answered, row.rtt_ns, row.greetings = True, 7, 3
    assert table.put(a_record(1, epoch=2), 9) is row
    assert table.rows == {"peer-1": row}
    assert table.living == [row]
    assert (row.answered, row.rtt_ns, row.greetings, row.since_ns) == (False, None, 0, 9)
    assert table.find(NodeRef("peer-1", 1)) is None
    assert table.find(NodeRef("peer-1", 2)) is row


def test_a_tombstone_is_kept_for_a_day_from_the_death_and_then_forgotten() -> None:
    table = Table()
    for number in (1, 2):
        table.put(a_record(number), 0)
        table.put(a_record(number, standing=Standing.DEAD), number * S)
    assert table.population == 1
    assert table.expire(TOMBSTONE_NS + S - 1) == []
    assert [row.record.worker_id for row in table.expire(TOMBSTONE_NS + S)] == ["peer-1"]
    assert list(table.rows) == list(table.tombs) == ["peer-2"]
    assert len(table.numbers) == 1


def test_d7_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    table = Table()
    for number in range(TOMBSTONES_MAX + 10):
        table.put(a_record(number, standing=Standing.DEAD), number)
    assert len(table.tombs) == len(table.rows) == len(table.numbers) == TOMBSTONES_MAX
    assert "peer-9" not in table.rows
    assert "peer-10" in table.rows


def test_one_that_comes_back_is_no_tombstone_any_more() -> None:
    table = Table()
    table.put(a_record(1, standing=Standing.DEAD), 0)
    table.put(a_record(1, incarnation=1), 1)
    assert not table.tombs
    assert len(table.living) == 1
    assert table.expire(2 * TOMBSTONE_NS) == []


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=60))
def test_the_list_of_the_living_is_the_rows_that_live(steps: list[tuple[int, bool]]) -> None:
    table = Table()
    for incarnation, (number, lives) in enumerate(steps):
        standing = Standing.ALIVE if lives else Standing.DEAD
        table.put(a_record(number, standing=standing, incarnation=incarnation), incarnation)
        assert [row.position for row in table.living] == list(range(len(table.living)))
        living = {row.record.worker_id for row in table.rows.values() if row.is_living}
        assert {row.record.worker_id for row in table.living} == living
        assert len(living) == len(table.living)
        assert set(table.tombs) == set(table.rows) - living


@given(st.integers(0, 60), st.integers(0, 8), st.integers(1, 60), st.integers(0, 1_000))
def test_chance_finds_as_many_fitting_rows_as_there_are(n: int, count: int, every: int, seed: int) -> None:
    table = Table()
    for number in range(n):
        table.put(a_record(number), 0)
    fitting = [row for row in table.living if row.number % every == 0]
    chosen = table.choose(random.Random(seed), count, lambda row: row.number % every == 0)
    assert len(chosen) == min(count, len(fitting))
    assert len({row.number for row in chosen}) == len(chosen)
    assert all(row in fitting for row in chosen)


def test_a_full_table_takes_nobody_new_but_in_the_place_of_the_dead() -> None:
    table = Table()
    for number in range(MEMBERS_MAX - 1):
        table.put(a_record(number), 0)
    table.put(a_record(60_000, standing=Standing.DEAD), 0)
    assert len(table.rows) == MEMBERS_MAX
    assert table.put(a_record(60_001), 0) is not None
    assert "peer-60000" not in table.rows
    assert table.put(a_record(60_002), 0) is None
    assert len(table.rows) == len(table.numbers) == MEMBERS_MAX
    assert table.put(a_record(5, incarnation=1), 0) is not None  # whom it knows it keeps up with
