"""What a seed means: the same choices each time, and enough of them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaos.plan import (
    FAULTS_EACH_60_S,
    KINDS_LEAST,
    MESH_PROCESS_KINDS,
    MESH_STORAGE_KINDS,
    PROCESS_KINDS,
    STORAGE_KINDS,
    Plan,
    make_mesh_plan,
    make_plan,
)


def plans(storage: str) -> list[Plan]:
    return [make_plan(seed, storage, 60) for seed in range(1, 21)]


@pytest.mark.parametrize("storage", ["sqlite", "redis", "replicas"])
def test_the_same_seed_gives_the_same_choices(storage: str) -> None:
    assert make_plan(7, storage, 60) == make_plan(7, storage, 60)
    assert make_plan(7, storage, 60).digest != make_plan(8, storage, 60).digest


@pytest.mark.parametrize("storage", ["sqlite", "redis"])
def test_a_run_of_60_s_draws_enough_faults_of_enough_kinds(storage: str) -> None:
    for plan in plans(storage):
        assert len(plan.faults) >= FAULTS_EACH_60_S
        assert len({fault.kind for fault in plan.faults}) >= KINDS_LEAST


@pytest.mark.parametrize("storage", ["sqlite", "redis"])
def test_twenty_runs_draw_every_kind_often(storage: str) -> None:
    drawn = Counter(fault.kind for plan in plans(storage) for fault in plan.faults)
    for kind in (*PROCESS_KINDS, *STORAGE_KINDS[storage]):
        assert drawn[kind] >= 13, (kind, drawn)  # some may not come about, and 10 have to


def test_a_primary_is_lost_once() -> None:
    for plan in plans("replicas"):
        assert [fault.kind for fault in plan.faults].count("primary_lost") == 1


@pytest.mark.parametrize("storage", ["sqlite", "redis", "replicas"])
def test_faults_of_the_storage_do_not_overlap(storage: str) -> None:
    for plan in plans(storage):
        of_storage = [fault for fault in plan.faults if fault.kind not in PROCESS_KINDS]
        ends = [fault.at_s + fault.length_s for fault in of_storage]
        assert all(end < after.at_s for end, after in zip(ends, of_storage[1:], strict=False))


def test_a_plan_can_favour_and_leave_out() -> None:
    favoured = make_plan(1, "redis", 20, favours=("term", "replies_lost"))
    assert {fault.kind for fault in favoured.faults} == {"term", "replies_lost"}
    left_out = make_plan(1, "sqlite", 60, without=("storage_full",))
    assert "storage_full" not in {fault.kind for fault in left_out.faults}


@pytest.mark.parametrize("storage", ["sqlite", "redis"])
def test_a_run_in_a_mesh_has_workers_that_steal_and_all_kinds_of_faults_beside_them(storage: str) -> None:
    plan = make_mesh_plan(3, storage, 60)
    assert plan == make_mesh_plan(3, storage, 60)
    assert plan.mesh
    assert {fault.kind for fault in plan.faults} == {*MESH_PROCESS_KINDS, *MESH_STORAGE_KINDS[storage]}
    assert sum(job.batch for job in plan.jobs if job.kind == "burst") > 1_500
    assert len(plan.faults) >= FAULTS_EACH_60_S
    assert min(fault.length_s for fault in plan.faults if fault.kind == "streams_cut") > 0
