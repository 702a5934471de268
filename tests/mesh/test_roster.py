"""Who has too much to do, what is ours, and how much of a claim. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxmesh.affinity import SLOTS, has_slot, slot_of
from fluxmesh.mesh.effects import MemberView
from fluxmesh.mesh.messages import Flag, Load, Meta, NodeRef, Record, Standing
from fluxmesh.mesh.ring import Ring
from fluxmesh.mesh.roster import RELEASE_AT, Roster, bound_of, over_bound

ME = NodeRef("me", 1)
READY = int(Flag.READY)
TASKS = tuple(f"app.task{number}" for number in range(40))


def meta_of(weight: float = 0.7, *, queues: tuple[str, ...] = ("default",), capacity: int = 4) -> Meta:
    return Meta(queues, (0, 1, 2, 3), capacity, affinity_weight=weight)


def member(
    name: str,
    *,
    jobs: int = 0,
    meta: Meta | None = None,
    age_ms: int = 0,
    standing: Standing = Standing.ALIVE,
) -> MemberView:
    meta = meta or meta_of()
    record = Record(name, 1, 0, int(standing), "127.0.0.1", 7_946, 0)
    running = min(jobs, meta.capacity)
    load = Load(name, 1, 1, jobs - running, running, meta.capacity, flags=READY, age_ms=age_ms)
    return MemberView(record, meta, load, 0, answered=True, rtt_ns=None, eligible=True)


class TestBound:
    @pytest.mark.parametrize(
        ("weight", "bound"), [(0.1, 1.25), (0.2, 1.25), (0.5, 2), (0.7, 10 / 3), (0.9, 10), (1.0, None)]
    )
    def test_it_is_the_larger_of_a_quarter_more_and_what_the_weight_allows(
        self, weight: float, bound: float | None
    ) -> None:
        assert bound_of(weight) == (None if bound is None else pytest.approx(bound))

    @pytest.mark.parametrize(
        ("jobs", "weight", "over"),
        [
            ({"a": 16, "b": 8, "c": 0}, 0.5, set()),  # the mean is 2 a slot, the bound 4
            ({"a": 17, "b": 7, "c": 0}, 0.5, {"a"}),
            ({"a": 26, "b": 4, "c": 0}, 0.5, {"a"}),
            ({"a": 26, "b": 4, "c": 0}, 0.9, set()),
            ({"a": 26, "b": 4, "c": 0}, 1.0, set()),
            ({"a": 400, "b": 0, "c": 0}, 1.0, set()),
            ({"a": 400, "b": 0, "c": 0}, 0.0, set()),
            ({"a": 4, "b": 0, "c": 0}, 0.1, set()),  # it has a slot for each of them
            ({"a": 5, "b": 0, "c": 0}, 0.1, {"a"}),
            ({"a": 400}, 0.5, set()),  # to whom?
            ({"a": 0, "b": 0}, 0.5, set()),
        ],
    )
    def test_who_has_too_much(self, jobs: dict[str, int], weight: float, over: set[str]) -> None:
        loads = {name: (count, 4) for name, count in jobs.items()}
        assert over_bound(loads, frozenset(), weight) == over

    def test_a_load_that_trembles_about_the_bound_changes_nothing(self) -> None:
        def look(jobs: int, before: frozenset[str]) -> frozenset[str]:
            # Of three workers of 10 slots, 30 jobs in all: at weight 0.5 the bound is 2 a slot.
            return over_bound({"a": (jobs, 10), "b": (30 - jobs, 10), "c": (0, 10)}, before, 0.5)

        nobody, a = frozenset[str](), frozenset({"a"})
        assert look(20, nobody) == nobody
        assert look(21, nobody) == a
        assert look(17, a) == a
        assert look(int(20 * RELEASE_AT), a) == nobody
        assert look(17, nobody) == nobody

    def test_one_of_whom_nothing_is_known_stays_as_it_was_and_counts_for_nobody(self) -> None:
        loads = {"a": None, "b": (4, 4), "c": (4, 4)}
        assert over_bound(loads, frozenset(), 0.5) == frozenset()
        assert over_bound(loads, frozenset({"a"}), 0.5) == {"a"}

    @given(
        st.dictionaries(
            st.sampled_from("abcdef"),
            st.one_of(st.none(), st.tuples(st.integers(0, 200), st.integers(0, 20))),
            max_size=6,
        ),
        st.sets(st.sampled_from("abcdef")),
        st.floats(0, 1),
    )
    def test_somebody_whose_load_is_known_can_always_take(
        self, loads: dict[str, tuple[int, int] | None], before: set[str], weight: float
    ) -> None:
        over = over_bound(loads, before, weight)
        assert over <= loads.keys()
        known = {name for name, load in loads.items() if load is not None and load[1] > 0}
        if known and not (before & known):
            assert known - over


class TestRings:
    def test_one_with_too_much_passes_its_slots_on_and_gets_them_back(self) -> None:
        roster = Roster(ME, meta_of(0.5))
        even = [member("me", jobs=3), member("a", jobs=3), member("b", jobs=3)]
        first = roster.look(even, READY, 0)
        assert first.over() == {}
        hot = [member("me", jobs=1), member("a", jobs=40), member("b", jobs=1)]
        second = roster.look(hot, READY, 1)
        assert second.over() == {"default": ("a",)}
        assert second.rings["default"] == Ring({"me": 150, "a": 150, "b": 150}, {"a"})
        assert second.ring_recalculations == first.ring_recalculations + 1
        assert roster.look(hot, READY, 2).rings["default"] is second.rings["default"]
        third = roster.look(even, READY, 3)
        assert third.rings["default"] == first.rings["default"]
        assert third.ring_recalculations == first.ring_recalculations + 2

    def test_so_do_we(self) -> None:
        roster = Roster(ME, meta_of(0.5), TASKS)
        hot = [member("me", jobs=40), member("a", jobs=1), member("b", jobs=1)]
        snapshot = roster.look(hot, READY, 0)
        assert snapshot.over() == {"default": ("me",)}
        (part,) = snapshot.share.parts
        assert (part.slots, part.tasks) == (bytes(SLOTS // 8), ())

    def test_a_load_that_is_too_old_decides_nothing(self) -> None:
        roster = Roster(ME, meta_of(0.5))
        roster.look([member("me"), member("a"), member("b")], READY, 0)
        old = [member("me", jobs=1), member("a", jobs=40, age_ms=5_001), member("b", jobs=1)]
        assert roster.look(old, READY, 1).over() == {}

    @pytest.mark.parametrize("weight", [0.0, 1.0])
    def test_without_a_weight_and_at_full_weight_nobody_passes_anything_on(self, weight: float) -> None:
        roster = Roster(ME, meta_of(weight))
        hot = [member("me", jobs=1), member("a", jobs=400), member("b", jobs=1)]
        assert roster.look(hot, READY, 0).over() == {}


class TestShare:
    def test_it_names_our_slots_and_those_of_our_tasks_that_are_ours(self) -> None:
        share = Roster(ME, meta_of(), TASKS).look([member("me"), member("a")], READY, 0).share
        ring = Ring({"me": 150, "a": 150})
        (part,) = share.parts
        assert (share.weight, part.queues) == (0.7, ("default",))
        assert part.slots == ring.owned_slots("me")
        assert part.tasks == tuple(task for task in TASKS if has_slot(part.slots, slot_of(task)))
        assert 0 < len(part.tasks) < len(TASKS)

    def test_queues_that_share_a_ring_share_a_part(self) -> None:
        ours = meta_of(queues=("alone", "mail", "web", "both"))
        views = [
            member("me", meta=ours),
            member("a", meta=meta_of(queues=("mail", "web", "both"))),
            member("b", meta=meta_of(queues=("both", "others"))),
        ]
        share = Roster(ME, ours).look(views, READY, 0).share
        assert [part.queues for part in share.parts] == [("mail", "web"), ("both",)]  # alone: none

    @pytest.mark.parametrize(("weight", "flags"), [(0.0, READY), (0.7, 0), (0.7, READY | Flag.DRAINING)])
    def test_without_a_weight_or_a_place_on_the_ring_there_is_none(self, weight: float, flags: int) -> None:
        share = Roster(ME, meta_of(weight), TASKS).look([member("me"), member("a")], flags, 0).share
        assert (share.weight, share.parts) == (weight, ())

    def test_it_is_the_same_value_until_something_of_it_changes(self) -> None:
        roster = Roster(ME, meta_of(), TASKS)
        first = roster.look([member("me"), member("a", jobs=1)], READY, 0).share
        assert roster.look([member("me", jobs=2), member("a", jobs=2)], READY, 1).share is first
        other = roster.look([member("me"), member("a"), member("b")], READY, 2).share
        assert other != first
        alone = roster.look([member("me")], READY, 3).share
        assert alone.parts == ()


class TestClaimShare:
    def test_it_is_our_part_of_the_capacity_of_all_that_live_and_serve_a_queue_of_ours(self) -> None:
        def share(*others: MemberView) -> float:
            return Roster(ME, meta_of(capacity=4)).look([member("me"), *others], READY, 0).claim_share

        assert share() == 1.0
        assert share(member("a"), member("b")) == pytest.approx(1 / 3)
        assert share(member("a", meta=meta_of(capacity=12))) == pytest.approx(1 / 4)
        assert share(member("a", standing=Standing.SUSPECT)) == pytest.approx(1 / 2)
        assert share(member("a", standing=Standing.DEAD), member("b", standing=Standing.LEFT)) == 1.0
        assert share(member("a", meta=meta_of(queues=("mail",)))) == 1.0
