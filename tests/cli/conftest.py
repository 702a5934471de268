"""A database to work on, and one with a worker on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import harness


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An empty database that no worker looks at."""
    return harness.make_database(tmp_path / "jobs.db")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database whose jobs are run, by one worker for all tests of a module."""
    folder = tmp_path_factory.mktemp("served")
    url = harness.make_database(folder / "jobs.db")
    with harness.worker(url, folder, "--concurrency", "4") as running:
        yield url
        assert running.end() == 0
