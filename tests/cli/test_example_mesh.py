"""The example of warm work in a mesh is run as its page says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.gates import ROOT
from tests.cli.harness import Running, environment, run
from tests.mesh.sockets import free_port

EXAMPLE = ROOT / "examples" / "mesh"


def test_reports_of_tenants_meet_warm_processes(tmp_path: Path) -> None:
    for name in ("app.py", "order.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    page = (EXAMPLE / "README.md").read_text("utf-8")
    (line,) = re.findall(r"^fluxmesh (worker .*) &$", page, re.MULTILINE)
    with Running(*line.split(), "--mesh-port", str(free_port(6)), "--id", "w", cwd=tmp_path) as workers:
        workers.until("mesh joined", times=2)
        done = subprocess.run(
            [sys.executable, "order.py"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told = re.fullmatch(r"240 reports, (\d+) of them cold; by process: \[(.*)\]\n", done.stdout)
        assert told, done.stdout
        assert 12 <= int(told[1]) < 36  # which it is if each process loads every tenant
        assert sum(int(count) for count in told[2].split(", ")) == 240
        owner = run("mesh", "owner", "tenant-7", "--url", "sqlite:///reports.db", cwd=tmp_path)
        assert owner.out.strip() in {"w.0", "w.1", "w.2"}


@pytest.mark.parametrize("name", ["app.py", "order.py"])
def test_its_programs_are_shown_on_its_page(name: str) -> None:
    assert name.removesuffix(".py") in (EXAMPLE / "README.md").read_text("utf-8")
