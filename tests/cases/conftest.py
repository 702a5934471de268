"""A lab for each case, on each storage; the lines of all cases at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.backdoor import Opener, RedisOpener, open_sqlite
from tests.cases.beside import _running, part_beside  # noqa: F401 - fixtures
from tests.cases.harness import Lab, Site
from tests.cases.report import LINES
from tests.cases.workers import adopt_orphans
from tests.redis_server import Server

DATABASES = 500


@pytest.fixture(scope="package", autouse=True)
def _adoptive_parent() -> Iterator[None]:
    adopt_orphans(yes=True)
    yield
    adopt_orphans(yes=False)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only(*storages): a case that means nothing on other storages")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case on every storage: `make cases`. Without those that are slow, as `make test` runs them, it is
    SQLite and what only Redis can tell."""
    if "storage" not in metafunc.fixturenames:
        return
    only = metafunc.definition.get_closest_marker("only")
    storages = ("sqlite", "redis") if only is None else only.args
    slow = [pytest.mark.slow] if only is None else []
    chosen = [pytest.param(name, marks=slow if name == "redis" else []) for name in storages]
    metafunc.parametrize("storage", chosen, scope="module")


@pytest.fixture(scope="package")
def _redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisOpener]:
    server = Server(tmp_path_factory.mktemp("redis"), "--databases", str(DATABASES))
    yield RedisOpener(server, DATABASES)
    server.stop()


@pytest.fixture(scope="module")
def opener(storage: str, request: pytest.FixtureRequest) -> Opener:
    """Makes the storages of labs."""
    return open_sqlite if storage == "sqlite" else request.getfixturevalue("_redis")


@pytest.fixture
def site(tmp_path: Path, opener: Opener) -> Site:
    return Site(tmp_path, opener)


@pytest.fixture
def lab(site: Site) -> Iterator[Lab]:
    with site.lab() as lab:
        try:
            yield lab
        finally:
            lab.tell_logs()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LINES:
        terminalreporter.section("cases")
        for line in LINES:
            terminalreporter.line(line)
        LINES.clear()  # tests/stealing has this hook as well
