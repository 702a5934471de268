"""The rules of tests/conftest.py are tried on small suites of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.gates import ROOT


def run_suite(directory: Path, source: str, **environment: str) -> tuple[int, str]:
    (directory / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (directory / "test_it.py").write_text(source, encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=directory,
        # No plugin has a part in these rules, and to load them all takes seconds.
        env={**inherited, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


SKIPS = {
    "in the body": "import pytest\ndef test_a(): pytest.skip('no')\n",
    "by a mark": "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n",
    "whole module": "import pytest\npytest.importorskip('no_such_module')\n",
}


@pytest.mark.parametrize("source", SKIPS.values(), ids=SKIPS.keys())
def test_a_skip_fails_the_run_where_ci_is_set(tmp_path: Path, source: str) -> None:
    source += "\ndef test_b(): pass\n"
    code, output = run_suite(tmp_path, source, CI="true")
    assert code == 1, output
    assert "skipped, which fails a run where CI is set" in output


def test_a_skip_is_only_told_elsewhere(tmp_path: Path) -> None:
    code, output = run_suite(tmp_path, SKIPS["in the body"] + "def test_b(): pass\n")
    assert code == 0, output


def test_a_run_without_skips_passes_where_ci_is_set(tmp_path: Path) -> None:
    source = "import pytest\ndef test_a(): pass\n@pytest.mark.xfail(strict=True)\ndef test_b(): assert 0\n"
    code, output = run_suite(tmp_path, source, CI="true")
    assert code == 0, output


def test_a_test_that_writes_to_home_fails(tmp_path: Path) -> None:
    source = "from pathlib import Path\ndef test_a(): (Path.home() / 'left.txt').write_text('x')\n"
    code, output = run_suite(tmp_path, source)
    assert code == 1, output
    assert "the test wrote to HOME: ['left.txt']" in output
