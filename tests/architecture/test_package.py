"""What `import fluxmesh` loads, and what the wheel carries."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.architecture.gates import ROOT, SRC

WEB = {"aiohttp", "fastapi", "flask", "httpx", "jinja2", "pydantic", "starlette", "uvicorn"}
LATE = {"apsw", "rich", "rich_argparse"}  # loaded by a backend or a command, when it is asked for


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after the statement, beyond its own."""
    code = f"import sys; before = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_import_fluxmesh_loads_no_web_framework_no_driver_and_no_terminal() -> None:
    loaded = loaded_by("import fluxmesh; fluxmesh.Queue")
    assert "fluxmesh" in loaded
    assert loaded & (WEB | LATE) == set()


def test_a_module_that_is_loaded_is_seen() -> None:
    assert loaded_by("import fluxmesh, rich.console") & LATE == {"rich"}


def test_the_wheel_carries_every_module_the_sql_and_the_type_marker(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    carried = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())

    kinds = ("*.py", "*.sql", "py.typed")
    wanted = {path.relative_to(SRC.parent).as_posix() for kind in kinds for path in SRC.rglob(kind)}
    assert wanted - carried == set()
    assert "fluxmesh/py.typed" in carried
    assert any(name.endswith(".sql") for name in carried)
