"""The benchmark is run for its lines, never for its times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.architecture.gates import ROOT


def run(folder: Path, *arguments: str, expect: int = 0) -> list[dict[str, Any]]:
    """The lines of a small run, which left nothing behind."""
    databases = folder / "databases"
    databases.mkdir()
    out = folder / "lines.jsonl"
    places = ["--folder", str(databases), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run_benchmark", "--quick", "--n", "200", *places, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("FLUXMESH_")},
    )
    assert done.returncode == expect, done.stderr
    assert out.read_text() == done.stdout
    assert list(databases.iterdir()) == []
    return [json.loads(text) for text in done.stdout.splitlines()]


def test_a_drain_is_told_beside_the_floor_of_its_run(tmp_path: Path) -> None:
    lines = run(tmp_path, "--only", "floor,drain")
    drains = [told for told in lines if told["name"] == "drain"]
    assert [told["parameters"]["concurrency"] for told in drains] == [8, 256]
    for told in drains:
        floor = f"drain at batch {told['parameters']['concurrency']}"
        assert told["floor"]["name"] == floor
        assert told["ratio_to_floor"] > 0
        assert told["figures"].startswith("not compared")
        assert told["bound"] == "median >= 10000 jobs/s"
    floors = [told for told in lines if told["name"].startswith("floor ")]
    assert len(floors) == 8
    assert len({told["configuration_sha256"] for told in lines}) == 1


def test_a_referee_far_from_the_floor_voids_every_figure(tmp_path: Path) -> None:
    referee = tmp_path / "referee.py"
    rates = {
        "drain": 1e9,
        "bulk_enqueue": 1e9,
        "awaited_enqueue": 1e9,
        "round_trip_us": 1.0,
        "sha256": "f" * 64,
    }
    referee.write_text(f"import json; print(json.dumps({rates!r}))")
    lines = run(tmp_path, "--only", "floor,bulk-enqueue", "--referee", str(referee))
    assert all(told["figures"].startswith("figures void: ") for told in lines)
    assert lines[0]["details"]["referee"]["sha256"] == "f" * 64


def test_a_referee_that_fails_leaves_no_figure(tmp_path: Path) -> None:
    referee = tmp_path / "referee.py"
    referee.write_text("raise SystemExit('out of order')")
    (told,) = run(tmp_path, "--only", "floor", "--referee", str(referee), expect=1)
    assert "out of order" in told["refused"]
    assert "median" not in told
