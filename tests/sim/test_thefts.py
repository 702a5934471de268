"""Seeds of stealing under faults against the promises about jobs, in virtual time."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from fluxmesh.cli import mesh_simulate
from fluxmesh.cli.parser import Parser
from fluxmesh.testing.simnet_points import every_point
from fluxmesh.testing.simnet_thefts import Stolen, draw_scheme, run_thefts
from tests.sim.mutants_of_stealing import MUTANTS

SEEDS = range(1, 31)
WORK_S = 5
STEALS_LEAST = 2_000
SHARE_HIT_LEAST = 0.6  # of the boundaries, in these few seeds; `make sim` asks for all


@pytest.fixture(scope="module")
def played() -> list[Stolen]:
    return [run_thefts(seed, work_s=WORK_S) for seed in SEEDS]


def test_no_seed_loses_a_job_doubles_one_or_starts_one_out_of_order(played: list[Stolen]) -> None:
    told = [one.told for one in played if one.problem]
    assert not told, "\n\n".join(told)


def test_there_were_thefts_and_something_went_wrong_at_nearly_every_boundary(played: list[Stolen]) -> None:
    hits: Counter[str] = Counter()
    for one in played:
        hits.update(one.hits)
    steals = sum(one.thefts for one in played)
    print(
        f"{steals} steals, {sum(one.moved for one in played)} jobs, {hits.total()} faults, {len(hits)} kinds"
    )
    assert steals >= STEALS_LEAST
    assert set(hits) <= set(every_point())
    assert len(hits) >= SHARE_HIT_LEAST * len(every_point())
    assert sum(one.deaths for one in played) >= 10
    assert sum(one.taken_held for one in played) > 0, "nothing was stolen by storage alone"


def test_schemes_hold_all_that_can_happen() -> None:
    schemes = [draw_scheme(seed) for seed in range(1, 101)]
    assert any(scheme.is_calm for scheme in schemes)
    assert any(scheme.mute for scheme in schemes)
    for name in ("share", "blows", "loss", "away", "slow", "drains", "stands", "liars"):
        assert any(getattr(scheme, name) for scheme in schemes), name
    assert any(not habits.steals for scheme in schemes for habits in scheme.habits)


def test_a_seed_of_stealing_is_the_same_every_time() -> None:
    for seed in (2, 6, 9):
        one, again = run_thefts(seed), run_thefts(seed)
        assert one == again
        assert one.thefts > 0
    assert run_thefts(2).hash != run_thefts(3).hash


# -- the command -----------------------------------------------------------------------------------------


def simulate(*words: str) -> int:
    parser = Parser(prog="fluxmesh mesh simulate")
    mesh_simulate.configure(parser)
    return mesh_simulate.run(parser.parse_args(words))


def test_many_steals_are_counted_with_the_faults_at_each_boundary(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--steals", "300") == 0
    out = capsys.readouterr().out
    lines = dict(line.split(": ") for line in out.splitlines() if line.count(": ") == 1 and line[0] != " ")
    assert int(lines["steals"]) >= 300
    assert lines["violations"] == "0"
    assert float(lines["seconds"]) > 0
    table = [line for line in out.splitlines() if line.startswith(every_point())]
    assert len(table) == len(every_point())
    assert sum(int(line.split()[-1].replace(",", "")) for line in table) == int(lines["faults"])


def test_a_theft_that_breaks_a_promise_exits_with_1_and_tells_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTANTS["a stolen job is started without begin"].apply(monkeypatch)
    assert simulate("--steals", "10", "--seeds", "1", "--json") == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["ok"] is False
    assert document["broken"][0]["rule"] == "start"
    assert "again: fluxmesh mesh simulate --steals 1 --seeds 1" in captured.err
    assert "the last events about" in captured.err
