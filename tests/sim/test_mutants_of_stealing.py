"""The simulator of stealing can fail: every mutant is caught within 50 seeds."""

from __future__ import annotations

import pytest

from tests.sim.mutants_of_stealing import MUTANTS, seeds_of

SEEDS = range(1, 51)
LEAST_MUTANTS = 8


def test_there_are_enough_mutants_of_stealing() -> None:
    assert len(MUTANTS) >= LEAST_MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_stealing_is_caught_within_fifty_seeds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    for seed in seeds_of(mutant, SEEDS):
        problem = mutant.play(seed)
        assert not problem.startswith("raised"), f"the mutant itself is broken: {problem}"
        if problem:
            print(f"{name}: caught by seed {seed}: {problem}")
            return
    pytest.fail(f"no seed of {SEEDS.start} to {SEEDS.stop - 1} notices: {name}")
