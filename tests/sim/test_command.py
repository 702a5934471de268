"""What `fluxmesh mesh simulate` prints and how it exits."""

from __future__ import annotations

import json

import pytest

from fluxmesh.cli import mesh_simulate
from fluxmesh.cli.parser import Parser
from tests.sim.mutants import MUTANTS


def simulate(*words: str) -> int:
    parser = Parser(prog="fluxmesh mesh simulate")
    mesh_simulate.configure(parser)
    return mesh_simulate.run(parser.parse_args(words))


def test_seeds_that_keep_every_promise_exit_with_0_and_show_which_faults_there_were(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate("--seeds", "1-3") == 0
    out = capsys.readouterr().out
    assert "FAULT" in out
    assert "seeds: 3" in out
    assert "failed: 0" in out
    assert "{" not in out
    table = out.splitlines()[1 : next(n for n, line in enumerate(out.splitlines()) if ": " in line)]
    assert table
    assert all(int(row.split()[-2]) > 0 for row in table), "a fault that no seed had"


def test_a_broken_promise_exits_with_1_and_tells_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTANTS["news sent without bound"].apply(monkeypatch)
    assert simulate("--seeds", "1", "--json") == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["ok"] is False
    assert document["broken"][0]["rule"] == "bounded news"
    assert "again: fluxmesh mesh simulate --seeds 1" in captured.err


def test_a_measurement_is_one_row_for_each_size_and_says_what_is_a_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate("--measure", "3", "--model", "10", "--kills", "40", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["figures"]
    assert [(row["nodes"], row["by"]) for row in rows] == [(3, "cores"), (10, "model")]
    assert rows[0]["kills"] == 40
    for row in rows:
        assert all(key.isidentifier() and key == key.lower() for key in row)
        assert all(
            isinstance(value, int | float) or value is None for key, value in row.items() if key != "by"
        )
        assert row["dead_p50_s"] <= row["dead_p99_s"]
    assert rows[1]["expected_p50_s"] == 2.9


@pytest.mark.parametrize("words", [("--seeds", "x"), ("--seeds", "5-3"), ("--nodes", "2"), ("--loss", "90")])
def test_what_is_out_of_range_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        simulate(*words)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err
