"""House rules of every run: cheap tests first, no skips where CI is set, and HOME stays untouched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Cheapest first, so that a slip is seen in seconds. A directory not named here runs before the cases.
DIRECTORY_ORDER = (
    "unit",
    "architecture",
    "types",
    "contract",
    "service",
    "cli",
    "*",
    "stealing",
    "cases",
    "chaos",
)

TESTS = Path(__file__).parent
_skips: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)  # stable: the order inside a directory stays as it is


def _rank(item: pytest.Item) -> int:
    directory = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else "*"
    return DIRECTORY_ORDER.index(directory if directory in DIRECTORY_ORDER else "*")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skips.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skips.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    harmless = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if os.environ.get("CI") and _skips and session.exitstatus in harmless:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and _skips:
        terminalreporter.section("skipped, which fails a run where CI is set", red=True)
        for nodeid in _skips:
            terminalreporter.line(nodeid)


@pytest.fixture(scope="session", autouse=True)
def _empty_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """HOME is an empty directory for the tests and for every process they start."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        for name in [name for name in os.environ if name.startswith("XDG_")]:
            patch.delenv(name)
        yield home


@pytest.fixture(autouse=True)
def _home_stays_empty(_empty_home: Path) -> Iterator[None]:
    yield
    left = sorted(path.name for path in _empty_home.iterdir())
    assert not left, f"the test wrote to HOME: {left}"
