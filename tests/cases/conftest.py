"""A lab for each case; the lines of all cases at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.beside import _running, part_beside  # noqa: F401 - fixtures
from tests.cases.harness import Lab
from tests.cases.report import LINES
from tests.cases.workers import adopt_orphans


@pytest.fixture(scope="package", autouse=True)
def _adoptive_parent() -> Iterator[None]:
    adopt_orphans(yes=True)
    yield
    adopt_orphans(yes=False)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path / "lab") as lab:
        try:
            yield lab
        finally:
            lab.tell_logs()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LINES:
        terminalreporter.section("cases")
        for line in LINES:
            terminalreporter.line(line)
