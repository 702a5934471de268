"""Seeds of faults against the promises of the membership, in virtual time."""

from __future__ import annotations

import re

import pytest

from fluxmesh.testing.simnet_faults import NODES_MAX, NODES_MIN, Kind, Severity, draw
from fluxmesh.testing.simnet_run import run_seed

# A hundred, in five parts, so that a failure is seen early and names its neighbourhood.
PARTS = [range(start, start + 20) for start in range(1, 101, 20)]


@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_no_seed_breaks_a_promise(seeds: range) -> None:
    told = [outcome.told for outcome in map(run_seed, seeds) if outcome.problem]
    assert not told, "\n\n".join(told)


def test_a_hundred_plans_hold_every_kind_of_fault_every_severity_and_small_and_large_meshes() -> None:
    plans = [draw(seed) for seed in range(1, 101)]
    assert {kind for plan in plans for kind in plan.kinds} == set(Kind)
    assert {plan.severity for plan in plans} == set(Severity)
    assert {plan.nodes for plan in plans} >= {NODES_MIN, NODES_MAX - 2}
    assert any(plan.sealed for plan in plans)
    assert not all(plan.sealed for plan in plans)


def test_a_plan_is_the_same_every_time() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]


def test_a_failing_seed_prints_its_plan_the_rule_and_the_last_events_of_whom_it_is_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.sim.mutants import MUTANTS

    MUTANTS["no indirect probes"].apply(monkeypatch)

    outcome = next(outcome for seed in range(1, 51) if (outcome := run_seed(seed)).rule == "no suspicion")

    lines = outcome.told.splitlines()
    assert lines[0].startswith(f"seed {outcome.seed}: {outcome.nodes} nodes")
    head = next(index for index, line in enumerate(lines) if "the last events about" in line)
    events = lines[head + 1 :]
    assert 10 <= len(events) <= 40
    one, other = re.findall(r"w\d+", lines[head])
    assert all(one in line or other in line for line in events)
