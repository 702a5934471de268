"""One short chaos run on each storage, so that the harness stays sound. The long ones: `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import without_of
from tests.chaos.plan import make_plan
from tests.chaos.run import Run
from tests.redis_server import program

SECONDS = 15.0
SEED = 1


@pytest.mark.parametrize("storage", ["sqlite", "redis"])
def test_a_short_run_violates_nothing(storage: str, tmp_path: Path) -> None:
    if storage == "redis":
        program()
    plan = make_plan(SEED, storage, SECONDS, without=without_of(storage))
    report = Run(plan, tmp_path / "run").carry_out()
    print(report)
    assert report.violations == []
    assert sum(report.faults.values()) >= 3
    assert report.starts >= report.accepted > 0
