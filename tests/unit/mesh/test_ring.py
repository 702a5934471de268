"""Keys belong to workers evenly, to the same one whoever asks, and stay where they are when others go."""

from __future__ import annotations

import bisect
import itertools
import random
from collections import Counter

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fluxmesh.affinity import SLOT_BITMAP_BYTES, SLOTS, has_slot, slot_of
from fluxmesh.mesh import ring as ring_module
from fluxmesh.mesh.ring import Ring

names = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=12)
fleets = st.dictionaries(names, st.integers(1, 60), min_size=1, max_size=8)
KEYS = [f"customer-{number}" for number in range(3_000)]


def points_of(members: dict[str, int]) -> list[tuple[int, str]]:
    return sorted(
        (xxhash.xxh3_64_intdigest(f"{worker}-{number}".encode()), worker)
        for worker, many in members.items()
        for number in range(many)
    )


def by_the_book(points: list[tuple[int, str]], slot: int) -> str:
    """The same in the plainest way: of all points in order the first at or after the slot's start."""
    at = bisect.bisect_left(points, (slot << 52, ""))
    return points[at % len(points)][1]


@settings(max_examples=60, deadline=None)
@given(fleets, st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=20))
@example({"one": 1}, [0, 1, 2_047, 4_095])
def test_a_slot_belongs_to_the_first_point_clockwise_of_its_start(
    members: dict[str, int], slots: list[int]
) -> None:
    ring, points = Ring(members), points_of(members)
    for slot in slots:
        assert ring.owner_of_slot(slot) == by_the_book(points, slot)


def test_so_does_every_slot_where_one_worker_has_several_points_in_it() -> None:
    members = {"a": 1_000, "b": 1_000, "c": 700}
    ring, points = Ring(members), points_of(members)
    assert all(ring.owner_of_slot(slot) == by_the_book(points, slot) for slot in range(SLOTS))


@settings(max_examples=60, deadline=None)
@given(fleets, st.text(max_size=30).filter(lambda key: key.isprintable()))
def test_a_key_belongs_to_the_owner_of_its_slot(members: dict[str, int], key: str) -> None:
    ring = Ring(members)
    assert slot_of(key) == xxhash.xxh3_64_intdigest(key.encode()) // (1 << 52)
    assert ring.owner(key) == ring.owner_of_slot(slot_of(key))


@settings(max_examples=60, deadline=None)
@given(fleets, st.randoms())
def test_the_same_members_in_any_order_are_the_same_ring(members: dict[str, int], rng: random.Random) -> None:
    shuffled = list(members.items())
    rng.shuffle(shuffled)
    one, other = Ring(members), Ring(dict(shuffled))
    assert one == other
    assert hash(one) == hash(other)
    assert one.spans() == other.spans()
    assert [one.owner(key) for key in KEYS[:50]] == [other.owner(key) for key in KEYS[:50]]


@pytest.mark.parametrize("fleet", range(20))
def test_three_workers_of_150_points_get_700_to_1300_of_3000_keys_each(fleet: int) -> None:
    ring = Ring({f"fleet{fleet}-worker{number}": 150 for number in range(3)})
    counts = Counter(ring.owner(key) for key in KEYS)
    assert len(counts) == 3
    assert all(700 <= count <= 1_300 for count in counts.values()), counts


@settings(max_examples=40, deadline=None)
@given(fleets, st.data())
def test_a_leavers_keys_alone_move_and_a_joiner_takes_only_for_itself(
    members: dict[str, int], data: st.DataObject
) -> None:
    before = Ring(members)
    leaver = data.draw(st.sampled_from(sorted(members)))
    after = Ring({worker: many for worker, many in members.items() if worker != leaver})
    for slot in range(SLOTS):
        if before.owner_of_slot(slot) != leaver:
            assert after.owner_of_slot(slot) == before.owner_of_slot(slot)
        elif len(after):
            assert after.owner_of_slot(slot) is not None


def test_the_leaver_of_three_moves_a_third_of_the_keys_to_both_others() -> None:
    members = {f"worker-{number}": 150 for number in range(3)}
    before, after = Ring(members), Ring({w: many for w, many in members.items() if w != "worker-1"})
    moved = [key for key in KEYS if before.owner(key) != after.owner(key)]
    assert {before.owner(key) for key in moved} == {"worker-1"}
    assert 700 <= len(moved) <= 1_300
    assert {after.owner(key) for key in moved} == {"worker-0", "worker-2"}


@settings(max_examples=40, deadline=None)
@given(fleets)
def test_spans_cover_the_circle_once_and_shares_add_up_to_one(members: dict[str, int]) -> None:
    ring = Ring(members)
    spans = ring.spans()
    assert spans[0].start == 0
    assert spans[-1].end == 1
    assert all(one.end == other.start for one, other in itertools.pairwise(spans))
    assert all(one.worker_id != other.worker_id for one, other in itertools.pairwise(spans))
    shares = ring.shares()
    assert sum(shares.values()) == 1
    assert set(shares) == set(members)
    for worker, share in shares.items():
        assert share == sum(span.end - span.start for span in spans if span.worker_id == worker)


@settings(max_examples=20, deadline=None)
@given(fleets)
def test_the_bitmaps_of_all_workers_share_out_the_slots(members: dict[str, int]) -> None:
    ring = Ring(members)
    bitmaps = {worker: ring.owned_slots(worker) for worker in members}
    for slot in range(0, SLOTS, 37):
        owners = [w for w, bits in bitmaps.items() if bits[slot >> 3] & 0x80 >> (slot & 7)]
        assert owners == [ring.owner_of_slot(slot)]
    assert all(len(bits) == SLOT_BITMAP_BYTES for bits in bitmaps.values())
    assert sum(int.from_bytes(bits, "big").bit_count() for bits in bitmaps.values()) == SLOTS
    assert ring.owned_slots("nobody") == bytes(SLOT_BITMAP_BYTES)


def test_a_worker_of_more_points_owns_more() -> None:
    shares = Ring({"small": 100, "large": 400}).shares()
    assert 0.7 < shares["large"] < 0.9


@pytest.mark.parametrize("members", [{"b": 1, "a": 1}, {"a": 1, "b": 1}])
def test_of_equal_points_that_of_the_lower_id_counts(
    members: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_module, "_points", lambda worker_id, many: [5 << 52])
    assert {Ring(members).owner_of_slot(slot) for slot in range(SLOTS)} == {"a"}


def test_a_point_at_the_very_start_of_a_slot_owns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"a": [5 << 52], "b": [(5 << 52) + 1]}
    monkeypatch.setattr(ring_module, "_points", lambda worker_id, many: points[worker_id])
    owners = [Ring({"a": 1, "b": 1}).owner_of_slot(slot) for slot in (4, 5, 6)]
    assert owners == ["a", "a", "a"]  # from 6 on around the circle, to 5 again


def test_nobody_owns_anything_where_nobody_is() -> None:
    ring = Ring({})
    assert ring.owner("key") is None
    assert ring.owner_of_slot(7) is None
    assert ring.spans() == []
    assert ring.shares() == {}
    assert list(ring.candidates("key")) == []
    assert ring.owned_slots("worker") == bytes(SLOT_BITMAP_BYTES)


def test_candidates_begin_with_the_owner_and_name_each_worker_once() -> None:
    ring = Ring({f"worker-{number}": 150 for number in range(3)})
    for key in KEYS[:200]:
        candidates = list(ring.candidates(key))
        assert candidates[0] == ring.owner(key)
        assert sorted(candidates) == ["worker-0", "worker-1", "worker-2"]


def test_what_one_owner_passes_on_goes_to_all_the_others() -> None:
    ring = Ring({f"worker-{number}": 150 for number in range(10)})
    seconds: Counter[str] = Counter()
    for key in KEYS:
        first, second, *_ = ring.candidates(key)
        if first == "worker-0":
            seconds[second] += 1
    assert len(seconds) == 9
    assert max(seconds.values()) < 3 * sum(seconds.values()) / 9


def test_a_large_fleet_is_owned_whole() -> None:
    ring = Ring({f"worker-{number}": 150 for number in range(300)})
    shares = ring.shares()
    assert sum(shares.values()) == 1
    assert min(shares.values()) > 0


class TestOver:
    FLEET = {f"worker-{number}": 150 for number in range(10)}  # noqa: RUF012

    @settings(max_examples=40, deadline=None)
    @given(fleets, st.data())
    def test_only_slots_of_those_who_have_too_much_move_and_none_to_one_of_them(
        self, members: dict[str, int], data: st.DataObject
    ) -> None:
        over = data.draw(st.sets(st.sampled_from(sorted(members)), max_size=len(members)))
        before, after = Ring(members), Ring(members, over)
        for slot in range(0, SLOTS, 3):
            was, now = before.owner_of_slot(slot), after.owner_of_slot(slot)
            if len(over) == len(members) or was not in over:
                assert now == was
            else:
                assert now in members.keys() - over

    @settings(max_examples=20, deadline=None)
    @given(fleets, st.data())
    def test_every_answer_follows_from_the_same_table(
        self, members: dict[str, int], data: st.DataObject
    ) -> None:
        over = frozenset(data.draw(st.sets(st.sampled_from(sorted(members)))))
        ring = Ring(members, over)
        owners = [ring.owner_of_slot(slot) for slot in range(SLOTS)]
        shares = Counter(owners)
        assert {one: share * SLOTS for one, share in ring.shares().items() if share} == dict(shares)
        for worker in members:
            bits = ring.owned_slots(worker)
            assert all(has_slot(bits, slot) == (owners[slot] == worker) for slot in range(0, SLOTS, 31))
        for span in ring.spans():
            assert owners[int(span.start * SLOTS)] == span.worker_id
        for key in KEYS[:50]:
            assert ring.owner(key) == owners[slot_of(key)] == next(ring.candidates(key))
            assert len(over) == len(members) or over.isdisjoint(ring.candidates(key))

    def test_the_bound_is_part_of_what_a_ring_is(self) -> None:
        plain, bounded = Ring(self.FLEET), Ring(self.FLEET, {"worker-3"})
        assert plain != bounded
        passing = plain.passing({"worker-3"})
        assert bounded == passing == Ring(self.FLEET, {"worker-3", "nobody"})
        assert hash(bounded) == hash(passing)
        assert [passing.owner(key) for key in KEYS] == [bounded.owner(key) for key in KEYS]
        assert bounded.passing(frozenset()) == plain

    def test_what_one_passes_on_is_shared_out_among_all_others_and_not_given_to_its_neighbour(self) -> None:
        plain, bounded = Ring(self.FLEET), Ring(self.FLEET, {"worker-0"})
        went = Counter(bounded.owner(key) for key in KEYS if plain.owner(key) == "worker-0")
        assert len(went) == 9
        assert max(went.values()) < 3 * sum(went.values()) / 9

    def test_one_more_that_has_too_much_moves_only_its_own_slots(self) -> None:
        one, two = Ring(self.FLEET, {"worker-0"}), Ring(self.FLEET, {"worker-0", "worker-1"})
        for slot in range(SLOTS):
            if one.owner_of_slot(slot) != "worker-1":
                assert two.owner_of_slot(slot) == one.owner_of_slot(slot)

    def test_it_goes_to_somebody_even_if_the_others_have_hardly_a_point(self) -> None:
        ring = Ring({"large": 1_000, "tiny": 1, "small": 1}, {"large"})
        assert {ring.owner_of_slot(slot) for slot in range(SLOTS)} == {"tiny", "small"}
