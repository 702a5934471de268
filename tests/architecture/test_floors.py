"""The floors hold, and each contract that guards them is broken once on a small package made for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.gates import ROOT


def lint_imports(directory: Path, source: Path) -> tuple[int, str]:
    """Judges the package in `source` by the contracts in the directory's pyproject.toml."""
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_floors_hold() -> None:
    code, output = lint_imports(ROOT, ROOT / "src")
    assert code == 0, output


@pytest.mark.parametrize(
    ("importer", "line", "contract"),
    [
        ("job.py", "import fluxmesh.storage.base", "An upper floor"),
        ("task.py", "from fluxmesh import queue", "An upper floor"),
        ("cli/main.py", "import fluxmesh.testing", "An upper floor"),
        ("novelty.py", "", "An upper floor"),
        ("storage/base.py", "import fluxmesh.storage.registry", "Backends stand on the port"),
        ("storage/redis/backend.py", "import fluxmesh.storage.sqlite.backend", "Backends stand on the port"),
        ("queue.py", "from fluxmesh.storage.sqlite import backend", "No backend is imported"),
        ("queue.py", "import apsw", "Only the SQLite backend"),
        ("storage/base.py", "import sqlite3", "Only the SQLite backend"),
        ("cli/main.py", "from fluxmesh import Queue", "The facade"),
        ("mesh/swim.py", "import asyncio", "The core of the mesh"),
    ],
)
def test_a_broken_floor_is_found(tmp_path: Path, importer: str, line: str, contract: str) -> None:
    package = _small_package(tmp_path)
    (package / importer).write_text(line + "\n", encoding="utf-8")

    code, output = lint_imports(tmp_path, tmp_path)

    broken = re.findall(r"^(.*) BROKEN\b", output, flags=re.MULTILINE)
    assert code == 1, output
    assert any(name.startswith(contract) for name in broken), output


def test_the_small_package_is_sound(tmp_path: Path) -> None:
    _small_package(tmp_path)
    code, output = lint_imports(tmp_path, tmp_path)
    assert code == 0, output


def _small_package(directory: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", directory)
    package = directory / "fluxmesh"
    modules = {
        "__init__.py": "from fluxmesh.queue import Queue\n",
        "queue.py": "import fluxmesh.task\nQueue = object\n",
        "task.py": "import fluxmesh.storage.base\n",
        "job.py": "import fluxmesh.errors\n",
        "errors.py": "",
        "clock.py": "",
        "cli/__init__.py": "",
        "cli/main.py": "import fluxmesh.queue\n",
        "testing/__init__.py": "",
        "storage/__init__.py": "",
        "storage/base.py": "import fluxmesh.job\n",
        "storage/registry.py": "import fluxmesh.storage.base\n",
        "storage/sqlite/__init__.py": "import fluxmesh.storage.sqlite.backend\n",
        "storage/sqlite/backend.py": "import apsw\nimport fluxmesh.storage.base\n",
        "storage/redis/__init__.py": "",
        "storage/redis/backend.py": "",
        "mesh/__init__.py": "",
        **{f"mesh/{name}.py": "" for name in _core_of_the_mesh()},
    }
    for name, text in modules.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


def _core_of_the_mesh() -> list[str]:
    """Each of the modules that have to be pure is named, so each has to be there."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (contract,) = (one for one in told["tool"]["importlinter"]["contracts"] if one["id"] == "mesh-core")
    return [name.removeprefix("fluxmesh.mesh.") for name in contract["source_modules"]]
