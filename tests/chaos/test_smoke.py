"""Short chaos runs: one on each storage, and one with workers that steal from each other.

So that the harness stays sound. The long ones: `make chaos`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.chaos.__main__ import without_of
from tests.chaos.plan import Plan, make_mesh_plan, make_plan
from tests.chaos.run import Report, Run
from tests.redis_server import program

SECONDS = 15.0
SEED = 1
STOLEN = 5


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Report]]]:
    """All runs, side by side."""

    def carried_out(plan: Plan) -> Report:
        return Run(plan, tmp_path_factory.mktemp("chaos") / plan.storage).carry_out()

    plans = {
        "sqlite": make_plan(SEED, "sqlite", SECONDS, without=without_of("sqlite")),
        "redis": make_plan(SEED, "redis", SECONDS, without=without_of("redis")),
        "mesh": make_mesh_plan(SEED, "sqlite", SECONDS),
    }
    with ThreadPoolExecutor(len(plans)) as pool:
        yield {name: pool.submit(carried_out, plan) for name, plan in plans.items()}


@pytest.mark.parametrize("storage", ["sqlite", "redis"])
def test_a_short_run_violates_nothing(storage: str, reports: dict[str, Future[Report]]) -> None:
    if storage == "redis":
        program()  # skips where there is no server
    report = reports[storage].result()
    print(report)
    assert report.violations == []
    assert sum(report.faults.values()) >= 3
    assert report.starts >= report.accepted > 0


def test_a_short_run_of_workers_that_steal_violates_nothing(reports: dict[str, Future[Report]]) -> None:
    report = reports["mesh"].result()
    print(report)
    assert report.violations == []
    assert sum(report.faults.values()) >= 5
    assert report.jobs_stolen >= STOLEN
