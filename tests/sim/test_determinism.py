"""The same seed is the same run, whatever the process and whatever the Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fluxmesh.testing.simnet_run import run_seed
from tests.architecture.gates import ROOT

# Other interpreters that have the dependencies of the mesh; more by their paths in this variable.
PYTHONS_ENV = "FLUXMESH_TEST_PYTHONS"
VERSIONS = ("3.11", "3.12", "3.13")
SEEDS = (3, 5, 9, 14, 20, 31)
PROGRAM = """
import sys
from fluxmesh.testing.simnet_run import run_seed
print(sys.version_info[:2])
for seed in map(int, sys.argv[1:]):
    print(seed, run_seed(seed).hash)
"""


def hashes_in(python: str, *, hash_seed: str) -> list[str]:
    done = subprocess.run(
        [python, "-c", PROGRAM, *map(str, SEEDS)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    version, *lines = done.stdout.splitlines()
    print(python, version, *lines)
    return lines


def pythons() -> list[str]:
    named = [one for one in os.environ.get(PYTHONS_ENV, "").split(os.pathsep) if one]
    found = [shutil.which(f"python{version}") for version in VERSIONS] + named
    check = "import msgspec, xxhash, cryptography"
    return [
        python
        for python in dict.fromkeys(found)
        if python is not None
        and Path(python).exists()
        and subprocess.run([python, "-c", check], capture_output=True, check=False, timeout=60).returncode
        == 0
    ]


@pytest.fixture(scope="module")
def here() -> list[str]:
    return [f"{seed} {run_seed(seed).hash}" for seed in SEEDS]


def test_a_seed_gives_the_same_trace_again(here: list[str]) -> None:
    assert [f"{seed} {run_seed(seed).hash}" for seed in SEEDS] == here


def test_different_seeds_give_different_traces(here: list[str]) -> None:
    assert len({line.split()[1] for line in here}) == len(SEEDS)


@pytest.mark.parametrize("hash_seed", ["1", "4711"])
def test_a_seed_gives_the_same_trace_in_a_process_whose_sets_are_ordered_otherwise(
    hash_seed: str, here: list[str]
) -> None:
    assert hashes_in(sys.executable, hash_seed=hash_seed) == here


def test_a_seed_gives_the_same_trace_on_every_python_that_is_here(here: list[str]) -> None:
    for python in pythons():
        assert hashes_in(python, hash_seed="0") == here, python
