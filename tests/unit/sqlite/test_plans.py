"""No read and no retention step looks at the whole job table: SQLite's own plans say so."""

from __future__ import annotations

import re

import pytest

from fluxmesh.storage.sqlite.sqltext import Statements
from tests.unit.sqlite.bench import Bench

JUDGED = sorted(name for name in Statements("n") if name.split(".")[0] in ("reads", "prune", "operate"))


def plan(bench: Bench, name: str) -> list[str]:
    text = bench.sql[name]
    values = [1] * text.count("?")
    return [row[3] for row in bench.db.execute(f"explain query plan {text}", values)]


def scans_of_jobs(steps: list[str]) -> list[str]:
    """Steps that walk <job>, in whatever order and by whatever index, from one end to the other."""
    return [step for step in steps if re.match(r"SCAN (j\b|\S*:job\b)", step)]


@pytest.mark.parametrize("name", JUDGED)
def test_a_statement_searches_jobs_and_never_scans_them(bench: Bench, name: str) -> None:
    assert scans_of_jobs(plan(bench, name)) == []


@pytest.mark.parametrize("name", [name for name in JUDGED if ".walk_" in name or name == "prune.doomed"])
def test_a_walk_is_in_the_order_of_its_index(bench: Bench, name: str) -> None:
    assert not [step for step in plan(bench, name) if "TEMP B-TREE" in step]


@pytest.mark.parametrize(
    "name", ["reads.walk_lane", "reads.walk_place", "reads.walk_queue", "reads.walk_task"]
)
def test_a_walk_goes_on_from_its_cursor_by_the_index(bench: Bench, name: str) -> None:
    (step,) = plan(bench, name)
    assert re.search(r"\(.*(<|rowid)", step), step


def test_counts_need_the_index_of_reasons_alone(bench: Bench) -> None:
    assert plan(bench, "reads.failed") == [
        "SEARCH fluxmesh:job USING COVERING INDEX fluxmesh:job_reason (reason=?)"
    ]


def test_the_judgement_knows_a_scan_when_it_sees_one(bench: Bench) -> None:
    steps = [
        row[3]
        for row in bench.db.execute('explain query plan select * from "fluxmesh:job" where message = 1')
    ]
    assert scans_of_jobs(steps) == ["SCAN fluxmesh:job"]
