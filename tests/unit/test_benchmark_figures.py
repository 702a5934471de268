"""A benchmark judges what was read back: these show that it can say no."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.figures import SOUND, Bound, CheckFailed, Figure, Floor, Run, judged, line, percentile
from benchmarks.gauge import Spent
from benchmarks.seen import Seen, check_all_completed, inversions, lateness_ms, span_s
from benchmarks.toll import Reading, cost
from fluxmesh.job import Outcome, Status

RUN = Run(
    storage="sqlite",
    started_at="2030-01-01T00:00:00+00:00",
    revision=None,
    machine={},
    configuration={"n": 3},
    floor_sha256="",
)


def job(number: int, **changes: Any) -> Seen:
    fields: dict[str, Any] = {
        "id": f"job-{number}",
        "task": "noop",
        "number": number,
        "result": number,
        "priority": 2,
        "status": Status.COMPLETED,
        "created_at": 10.0,
        "scheduled_at": None,
        "started_at": 11.0 + number,
        "completed_at": 12.0 + number,
        "worker_id": "w",
        "outcomes": (Outcome.COMPLETED,),
    }
    return Seen(**(fields | changes))


def test_jobs_that_all_completed_once_pass() -> None:
    check_all_completed([job(1), job(0), job(2)], range(3))


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        pytest.param([job(0), job(1)], "1 jobs are lost", id="lost"),
        pytest.param([job(0), job(1), job(2), job(2)], "1 are too many", id="double"),
        pytest.param([job(0), job(1), job(2, status=Status.RUNNING)], "is RUNNING", id="running"),
        pytest.param([job(0), job(1), job(2, result=3)], "the result 3", id="wrong"),
        pytest.param([job(0), job(1, result=True), job(2)], "the result True", id="equal-but-another"),
        pytest.param([job(0), job(1), job(2, outcomes=())], "the history", id="no-history"),
        pytest.param(
            [job(0), job(1), job(2, outcomes=(Outcome.COMPLETED, Outcome.COMPLETED))], "history", id="twice"
        ),
        pytest.param(
            [job(0), job(1), job(2, outcomes=(Outcome.CRASHED, Outcome.COMPLETED))], "2 times", id="crashed"
        ),
        pytest.param([job(0), job(1), job(2, completed_at=None)], "no stamps", id="no-stamp"),
    ],
)
def test_anything_else_is_refused(seen: list[Seen], says: str) -> None:
    with pytest.raises(CheckFailed, match=says):
        check_all_completed(seen, range(3))


def test_a_crash_before_the_end_is_allowed_where_processes_are_killed() -> None:
    check_all_completed([job(0, outcomes=(Outcome.CRASHED, Outcome.COMPLETED))], range(1), crashes=1)


def test_the_span_is_from_the_first_start_to_the_last_end() -> None:
    assert span_s([job(2), job(0), job(1)]) == pytest.approx(3.0)


def test_a_job_that_began_before_it_was_due_has_no_lateness() -> None:
    assert lateness_ms([job(0, scheduled_at=10.5)]) == pytest.approx([500.0])
    with pytest.raises(CheckFailed, match="before it was due"):
        lateness_ms([job(0, scheduled_at=11.5)])


def test_an_inversion_is_a_start_while_an_urgent_job_waited() -> None:
    urgent = job(0, created_at=10.0, started_at=12.0)
    before, during, after = (job(n, started_at=at) for n, at in ((1, 9.0), (2, 11.0), (3, 13.0)))
    assert inversions([urgent], [before, after]) == 0
    assert inversions([urgent], [before, during, after]) == 1


def test_a_floor_more_than_15_percent_from_its_referee_voids_the_figures() -> None:
    assert judged({"drain": [0.86, 0.9, 2.0], "bulk": [1.1, 1.14]}) == SOUND
    assert judged({"drain": [0.84, 0.84, 1.0]}) == "figures void: the floor's drain is 0.84 of the referee"
    assert "bulk is 1.16" in judged({"drain": [1.0], "bulk": [1.16]})


def test_a_bound_holds_the_median_or_the_worst() -> None:
    values = [1.0, 2.0, 9.0]
    assert Bound(2.0, at_most=True).met_by(values)
    assert not Bound(2.0, at_most=True, of="worst").met_by(values)
    assert Bound(2.0).met_by(values)
    assert not Bound(2.0, of="worst").met_by(values)


def test_a_bound_on_the_ratio_is_not_known_without_a_floor() -> None:
    bound = Bound(0.5, of="ratio to floor")
    assert bound.text("jobs/s") == "ratio to floor >= 0.5"
    assert bound.met_by([49.0, 50.0, 90.0], Floor("awaited_enqueue", 100.0)) is True
    assert bound.met_by([49.0, 49.0, 90.0], Floor("awaited_enqueue", 100.0)) is False
    assert bound.met_by([49.0, 50.0, 90.0]) is None


def test_the_cost_of_jobs_is_what_was_spent_between_two_looks_less_the_looks() -> None:
    first = Reading(1_000, 2.0, Spent(cpu_s=1.0, commands=0, scripts=500, scripts_s=3.0))
    last = Reading(5_000, 2.4, Spent(cpu_s=1.2, commands=0, scripts=1_504, scripts_s=3.5))
    told = cost(first, last, looks=4)
    assert told["jobs"] == 4_000
    assert told["worker_cpu_s_per_1000_jobs"] == pytest.approx(0.1)
    assert told["server_cpu_s_per_1000_jobs"] == pytest.approx(0.05)
    assert told["evalsha_calls_per_job"] == pytest.approx(0.25)
    assert told["evalsha_usec_per_call"] == pytest.approx(500.0)
    assert told["evalsha_usec_per_job"] == pytest.approx(125.0)
    without_server = cost(Reading(1_000, 2.0, None), Reading(5_000, 2.4, None), looks=4)
    assert without_server == {"jobs": 4_000, "worker_cpu_s_per_1000_jobs": pytest.approx(0.1)}


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.99) == 7.0


def test_a_line_tells_ratio_bound_and_standing() -> None:
    figure = Figure(
        name="drain",
        unit="jobs/s",
        values=[30.0, 10.0, 20.0],
        parameters={"n": 3},
        bound=Bound(25),
        floor=Floor("drain at batch 8", 80.0),
    )
    told = line(figure, RUN, load=0.5, standing=SOUND)
    assert (told["median"], told["ratio_to_floor"], told["values"]) == (20.0, 0.25, [30.0, 10.0, 20.0])
    assert (told["bound"], told["bound_met"]) == ("median >= 25 jobs/s", False)
    assert (told["figures"], told["load_before"]) == (SOUND, 0.5)
