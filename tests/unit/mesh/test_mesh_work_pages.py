"""What the page on the mesh says of the buffer, of stealing and of affinity is what is in force."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxmesh.cli.mesh import STEAL_COUNTERS, STEALS
from fluxmesh.mesh import buffer, roster, stealing
from fluxmesh.mesh.options import NUMBERS
from fluxmesh.mesh.timing import LOAD_STALE_MS, MS, S
from fluxmesh.storage import values
from fluxmesh.worker.stock import HELD_MOST_S

GUIDE = (Path(__file__).parents[3] / "docs" / "mesh.md").read_text("utf-8")


def section(name: str) -> str:
    """Its text in one line."""
    return " ".join(GUIDE.partition(f"\n## {name}\n")[2].partition("\n## ")[0].split())


BUFFER, STEALING, AFFINITY, TUNING = map(section, ("The buffer", "Stealing", "Affinity", "Tuning"))
LOCAL_BUFFER = int(NUMBERS["local_buffer"][0])


def test_how_much_is_held() -> None:
    assert "`concurrency * ceil(0.1 s / run time)`" in BUFFER
    assert buffer.wanted(8, 0.04, LOCAL_BUFFER) == 8 * 3
    assert "taken for 1 s until five runs are known" in BUFFER
    times = buffer.RunTimes()
    for _ in range(4):
        times.note(0.001)
    assert times.run_s == 1.0
    times.note(0.001)
    assert times.run_s == pytest.approx(0.001)
    assert buffer.wanted(8, 1.0, LOCAL_BUFFER) == 8
    assert "no more than `concurrency`" in BUFFER
    assert "the middle one of the last nine: four slow ones among them change nothing" in BUFFER
    for run_s in [0.001] * 8 + [1.0] * 4:
        times.note(run_s)
    assert times.run_s == 0.001
    assert "from the fifth run on" in BUFFER
    times.note(1.0)
    assert times.run_s == 1.0


def test_when_it_pays_to_hold() -> None:
    assert (
        "shorter than an exchange with the storage (the middle one of the last nine exchanges, and 1 ms)"
        in BUFFER
    )
    assert [buffer.pays(run_s, 0.005, 0.0) for run_s in (0.0059, 0.0061)] == [False, True]
    assert "nothing has ended or was started here for the time of an exchange" in BUFFER
    assert [buffer.pays(0.0, 0.005, quiet_s) for quiet_s in (0.0059, 0.0061)] == [False, True]


def test_how_much_one_claim_holds() -> None:
    assert "16 for one alone, 5 for each of three equal ones" in BUFFER
    assert [buffer.extra_of_claim(LOCAL_BUFFER, 1 / workers) for workers in (1, 3)] == [16, 5]
    assert "a quarter of what should be in it is missing" in BUFFER
    assert (buffer.worth_asking(15, 64), buffer.worth_asking(16, 64)) == (False, True)
    assert "from 16 equal ones on it is one job" in TUNING
    assert [buffer.extra_of_claim(LOCAL_BUFFER, 1 / workers) for workers in (8, 16, 64)] == [2, 1, 1]
    assert "raise `local_buffer` to 8 for each worker (two jobs a claim)" in TUNING
    assert buffer.extra_of_claim(8 * 64, 1 / 64) == 2


def test_how_long_a_job_is_held() -> None:
    assert f"held for {HELD_MOST_S:g} s is given back" in BUFFER
    assert f"held for {values.HELD_TAKEABLE_AFTER_S * 1_000:g} ms" in STEALING


def test_whom_a_thief_asks_and_how_often() -> None:
    assert f"said within {LOAD_STALE_MS / 1_000:g} s what it has" in STEALING
    assert "more than `steal_threshold + steal_batch`" in STEALING
    assert stealing.PAUSE_FIRST_NS == 50 * MS
    assert stealing.PAUSE_MOST_NS == 2 * S
    assert "for 50 ms, 100 ms … 2 s" in STEALING
    assert stealing.GAVE_NS == S
    assert "within the last second" in STEALING
    assert values.MAX_HOPS == 2
    assert "changes hands at most twice" in STEALING


def test_what_the_weight_does() -> None:
    assert f"`1 + {values.AFFINITY_WINDOW} * weight` candidates" in AFFINITY
    assert f"the job's first {values.STRICT_S:g} s" in AFFINITY
    assert f"waited for {values.NOBODYS_AFTER_S:g} s counts as its own" in AFFINITY
    assert "1.25 up to weight 0.2, 2 at 0.5, 3.3 at 0.7, 10 at 0.9, no bound at 1" in AFFINITY
    bounds = [roster.bound_of(weight) for weight in (0.2, 0.5, 0.7, 0.9, 1.0)]
    assert [bound and round(bound, 1 if bound > 1.3 else 2) for bound in bounds] == [1.25, 2, 3.3, 10, None]
    assert roster.RELEASE_AT == 0.8
    assert "four fifths" in AFFINITY


def test_each_column_of_the_steals_is_explained_and_has_a_counter() -> None:
    table = GUIDE.partition("The columns of `fluxmesh mesh steals`")[2].partition("In Python")[0]
    assert [column for column in STEALS if f"`{column}`" not in table] == []
    assert len(STEALS) - STEALS.index("ASKED") == len(STEAL_COUNTERS)
    counters = GUIDE.partition("`worker.mesh.metrics()`")[2].partition("\n## ")[0]
    assert [name for names in STEAL_COUNTERS for name in names if f"`{name}`" not in counters] == []
