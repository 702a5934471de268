"""Every mutant still finds what it changes. What they do is shown by `make chaos MUTANTS=1`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cases.workers import ROOT
from tests.chaos.mutants import MUTANTS, Edit, Mutant, MutantStale, _define, _source_of, apply
from tests.chaos.plan import PROCESS_KINDS, STORAGE_KINDS

APPLY = """
from tests.chaos import mutants
mutants.apply_named()
from fluxmesh.storage.redis.assembly import script_text
for verb in ("exchange", "reap", "beat", "tend", "promote", "release"):
    script_text(verb)
"""
NAMES = {
    "no_token_check",
    "release_without_token",
    "begin_by_anybody",
    "reap_ignores_lease",
    "ack_before_run",
    "double_promote",
    "permit_kept_at_reap",
    "settle_not_repeatable",
    "hand_back_before_body_ended",
    "lost_claim_reply",
    "reap_right_after_outage",
}


def test_there_are_eleven() -> None:
    assert set(MUTANTS) == NAMES


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_finds_what_it_changes(mutant: Mutant) -> None:
    env = {
        **os.environ,
        "FLUXMESH_TEST_MUTANT": mutant.name,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", APPLY], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(mutant.favours) <= {*PROCESS_KINDS, *STORAGE_KINDS[mutant.storage]}


def test_a_mutant_that_needs_what_is_not_there_is_an_error() -> None:
    where = "fluxmesh.worker.worker:Worker.stop_now"
    text = _source_of(where).replace("self._loop", "no_such_name()", 1)
    with pytest.raises(MutantStale, match="no_such_name"):
        _define(where, text)


@pytest.mark.parametrize(
    "where",
    [
        "lua:reap",
        "sql:liveness.gone",
        "fluxmesh.storage.sqlite.liveness:arm",
        "fluxmesh.worker.worker:Worker.stop",
    ],
)
def test_a_mutant_that_finds_nothing_is_an_error(where: str) -> None:
    with pytest.raises(MutantStale, match="found 0 times"):
        apply(Mutant("stale", "redis", "nothing", (Edit(where, "no such text", ""),)))
