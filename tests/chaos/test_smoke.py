"""One short chaos run on each storage, so that the harness stays sound. The long ones: `make chaos`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.chaos.__main__ import without_of
from tests.chaos.plan import make_plan
from tests.chaos.run import Report, Run
from tests.redis_server import program

SECONDS = 15.0
SEED = 1


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Report]]]:
    """Both runs, side by side."""

    def carried_out(storage: str) -> Report:
        plan = make_plan(SEED, storage, SECONDS, without=without_of(storage))
        return Run(plan, tmp_path_factory.mktemp("chaos") / storage).carry_out()

    with ThreadPoolExecutor(2) as pool:
        yield {storage: pool.submit(carried_out, storage) for storage in ("sqlite", "redis")}


@pytest.mark.parametrize("storage", ["sqlite", "redis"])
def test_a_short_run_violates_nothing(storage: str, reports: dict[str, Future[Report]]) -> None:
    if storage == "redis":
        program()  # skips where there is no server
    report = reports[storage].result()
    print(report)
    assert report.violations == []
    assert sum(report.faults.values()) >= 3
    assert report.starts >= report.accepted > 0
