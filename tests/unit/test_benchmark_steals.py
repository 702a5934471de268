"""What benchmarks of stealing and affinity make of what they saw, and where they refuse to make anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks.affinity_page import MARKS, origin, plot, rows, table, with_figures
from benchmarks.figures import CheckFailed
from benchmarks.marks import Crossing, Mark, beside_held, check_clocks, falls_idle, read_marks, starts_of
from benchmarks.measures.affinity import NAMES, WEIGHTS
from benchmarks.seen import Seen
from benchmarks.shares import LoadSums, drawn, falls, key_of, keys_of, load_bound, owners, shares
from benchmarks.team import taken
from fluxmesh.job import Outcome, Status


def job(number: int, worker: str, started_at: float = 100.0) -> Seen:
    return Seen(
        id=f"job-{number}",
        task="mark",
        number=number,
        result=number,
        priority=2,
        status=Status.COMPLETED,
        created_at=99.0,
        scheduled_at=None,
        started_at=started_at,
        completed_at=started_at + 1,
        worker_id=worker,
        outcomes=(Outcome.COMPLETED,),
    )


def began(number: int, at_s: float) -> Mark:
    return Mark(number, "start", at_s, 100.0 + at_s)


# -- from a surplus to a start -------------------------------------------------------------------------


def test_a_crossing_is_from_the_claim_to_the_first_body_on_the_other_worker() -> None:
    jobs = [job(0, "north"), job(1, "north", 100.03), job(2, "south", 100.005), job(3, "south", 100.02)]
    starts = starts_of([began(0, 0.001), began(1, 0.031), began(2, 0.007), began(3, 0.021)])
    crossing = beside_held(jobs, starts)
    assert crossing == Crossing(pytest.approx(0.007), True, 2, "north")  # type: ignore[arg-type]


def test_a_held_job_that_nobody_took_counts_for_as_long_as_it_was_held() -> None:
    jobs = [job(0, "north"), job(1, "north", 100.03), job(2, "north", 100.06)]
    starts = starts_of([began(0, 0.001), began(1, 0.031), began(2, 0.062)])
    crossing = beside_held(jobs, starts)
    assert crossing == Crossing(pytest.approx(0.062), False, 0, "north")  # type: ignore[arg-type]


def test_of_one_job_none_is_held() -> None:
    assert beside_held([job(0, "north")], starts_of([began(0, 0.0)])) is None


def test_who_falls_idle_waits_from_the_end_of_its_own_job() -> None:
    jobs = [job(0, "north"), *(job(number, "north") for number in range(2, 6)), job(6, "south")]
    starts = starts_of(
        [began(0, 0.0), *(began(number, 0.05 + number) for number in range(2, 6)), began(6, 0.048)]
    )
    gate = Mark(1, "end", 0.04, 100.04)
    crossing = falls_idle(jobs, starts, gate, "south", 4)
    assert crossing == Crossing(pytest.approx(0.008), True, 1, "north")  # type: ignore[arg-type]
    assert falls_idle(jobs, starts, gate, "south", 6) is None  # the victim had no surplus any more


def test_who_falls_idle_and_gets_nothing_counts_until_the_last_start_of_the_victim() -> None:
    jobs = [job(number, "north") for number in range(3)]
    starts = starts_of([began(0, 0.0), began(1, 0.1), began(2, 0.3)])
    crossing = falls_idle(jobs, starts, Mark(9, "end", 0.05, 100.05), "south", 2)
    assert crossing == Crossing(pytest.approx(0.25), False, 0, "north")  # type: ignore[arg-type]


def test_a_clock_that_is_set_meanwhile_spoils_the_figure() -> None:
    steady = [Mark(0, "start", 5.0, 105.0), Mark(0, "end", 6.0, 106.0005)]
    check_clocks(steady)
    with pytest.raises(CheckFailed, match="the clock was set"):
        check_clocks([*steady, Mark(1, "start", 7.0, 107.01)])


def test_half_a_line_of_a_journal_is_left_for_later(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    assert read_marks(journal) == []
    line = msgspec.json.encode(began(0, 1.0))
    journal.write_bytes(line + b"\n" + line[:9])
    assert read_marks(journal) == [began(0, 1.0)]


def test_both_ways_of_taking_are_counted() -> None:
    assert taken({"jobs_stolen_in": 3, "jobs_taken_held": 2, "jobs_stolen_out": 7}) == 5
    assert taken({}) == 0


# -- where keyed jobs ran ------------------------------------------------------------------------------


def test_hits_are_the_jobs_that_ran_on_the_owner_of_their_key() -> None:
    owner = owners(NAMES)
    keys = {number: key_of(number, 60) for number in range(60)}
    at_home = [job(number, str(owner(key))) for number, key in keys.items()]
    assert shares(at_home, keys, NAMES).hits == 1.0
    elsewhere = [job(number, "north") for number in keys]
    found = shares(elsewhere, keys, NAMES)
    assert found.hits == sum(owner(key) == "north" for key in keys.values()) / 60
    assert (found.busiest, found.idlest, found.jobs["south"]) == (4.0, 0.0, 0)
    with pytest.raises(CheckFailed, match="jobs ran on"):
        shares([job(0, "stranger")], keys, NAMES)


def test_no_worker_owns_more_keys_than_it_can_do_the_work_of() -> None:
    owner = owners(NAMES)
    owned = [sum(owner(key_of(number, 60)) == name for number in range(60)) for name in NAMES]
    assert max(owned) / 60 * 0.8 * len(NAMES) < 1


def test_keys_of_a_worker_are_all_its_own() -> None:
    owner = owners(NAMES)
    keys = keys_of("east", NAMES, 16)
    assert len(set(keys)) == 16
    assert {owner(key) for key in keys} == {"east"}
    with pytest.raises(CheckFailed, match="not 9999"):
        keys_of("east", NAMES, 9_999)


def test_a_hot_key_gets_its_part_and_the_same_seed_the_same_keys() -> None:
    even, hot = drawn(6_000, 60, hot=0.0, seed=1), drawn(6_000, 60, hot=0.5, seed=1)
    assert 60 < even.count("customer-0") < 150
    assert 2_850 < hot.count("customer-0") < 3_250
    assert hot == drawn(6_000, 60, hot=0.5, seed=1) != drawn(6_000, 60, hot=0.5, seed=2)


def test_a_rate_that_falls_anywhere_falls() -> None:
    assert falls([0.25, 0.5, 0.5, 0.9, 1.0]) == 0.0
    assert falls([0.25, 0.6, 0.5, 0.9, 0.8]) == pytest.approx(0.1)


def test_the_bound_on_loads_is_that_of_the_design() -> None:
    assert [load_bound(weight) for weight in (0.0, 0.2, 0.5, 0.9)] == [1.25, 1.25, 2.0, pytest.approx(10.0)]
    assert load_bound(1.0) == float("inf")


def test_loads_are_compared_over_the_time_in_which_there_was_any() -> None:
    sums = LoadSums(("north", "south"))
    sums.look({"north": 3.0, "south": 1.0})
    sums.look({"north": 0.0, "south": 0.0})
    sums.look({"north": 3.0})
    assert sums.over_mean() == {"north": pytest.approx(12 / 7), "south": pytest.approx(2 / 7)}
    assert LoadSums(("north",)).over_mean() == {"north": 0.0}


# -- the page ------------------------------------------------------------------------------------------


def lines(storage: str = "sqlite") -> list[dict[str, Any]]:
    told = {
        "waits_ms": {"p50": 210.0, "p95": 620.0},
        "idle_pick_up_ms": {"p50": 1.25},
        "hot_hit_rate": 0.5,
    }
    found: list[dict[str, Any]] = []
    for weight in WEIGHTS:
        one = {
            "storage": storage,
            "parameters": {"weight": weight, "bursts": 20},
            "load_before": 0.12,
            "revision": "abc",
        }
        found += [
            one
            | {
                "name": "affinity hit rate",
                "median": round(0.25 + 0.74 * weight, 3),
                "values": [round(0.25 + 0.74 * weight, 3)],
                "details": {"repetitions": [told]},
            },
            one | {"name": "affinity load", "median": 1.1, "values": [1.1], "details": {}},
            one | {"name": "affinity hot key", "median": 1.05, "values": [1.05], "details": {}},
        ]
    return found


def test_the_table_has_a_row_for_each_weight_and_storage() -> None:
    found = rows([*lines(), *lines("redis"), {"name": "drain", "storage": "redis"}])
    assert [(row.storage, row.weight) for row in found] == [
        (storage, weight) for storage in ("redis", "sqlite") for weight in WEIGHTS
    ]
    text = table(found)
    assert "| SQLite | 0.7 | 0.77 | 1.10 | 210 | 620 | 1.05 | 1.25 |" in text


def test_figures_say_where_they_come_from() -> None:
    told = [one | {"machine": {"cores": 2}} for one in (*lines(), *lines("redis"))]
    assert origin(told) == (
        "Redis: 2 cores, load 0.1 before, medians of 1 with 20 bursts, revision abc;"
        " SQLite: 2 cores, load 0.1 before, medians of 1 with 20 bursts, revision abc."
    )


def test_figures_that_are_not_all_there_make_no_page() -> None:
    with pytest.raises(CheckFailed, match="affinity load"):
        rows([one for one in lines() if one["name"] != "affinity load"])


def test_figures_go_between_their_marks_and_nowhere_else() -> None:
    page = f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n"
    assert with_figures(page, "new") == f"before\n{MARKS[0]}\nnew\n{MARKS[1]}\nafter\n"
    with pytest.raises(CheckFailed, match="marks"):
        with_figures("nothing", "new")


def test_the_plot_shows_every_point_and_both_schemes_of_colour() -> None:
    drawing = plot(rows([*lines(), *lines("redis")]))
    assert drawing.count("<circle") == 2 * len(WEIGHTS)
    assert "prefers-color-scheme: dark" in drawing
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
