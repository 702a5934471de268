"""The formatter, the rules and the type checker have nothing to say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.gates import ROOT


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["ruff", "format", "--check", "."], id="ruff-format"),
        pytest.param(["ruff", "check", "."], id="ruff-check"),
        pytest.param(["mypy"], id="mypy"),
    ],
)
def test_the_tool_is_content(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
