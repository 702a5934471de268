"""The simulator can fail: every mutant of the core is caught within 50 seeds."""

from __future__ import annotations

import pytest

from fluxmesh.testing.simnet_faults import draw
from fluxmesh.testing.simnet_run import run_seed
from tests.sim.mutants import MUTANTS

SEEDS = range(1, 51)
LEAST_MUTANTS = 15


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= LEAST_MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_within_fifty_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    for seed in sorted(SEEDS, key=lambda seed: not mutant.favours & set(draw(seed).kinds)):
        outcome = run_seed(seed)
        if outcome.problem:
            print(f"{name}: caught by seed {seed}: {outcome.problem}")
            return
    pytest.fail(f"no seed of {SEEDS.start} to {SEEDS.stop - 1} notices: {name}")
