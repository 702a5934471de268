"""A database to work on, and one with a worker on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from fluxmesh.cli.main import entry
from tests.cli import harness


class Call(Protocol):
    """`harness.run` without the process: the same program, in this interpreter."""

    def __call__(self, *args: str, cwd: Path, env: Mapping[str, str] | None = None) -> harness.Done: ...


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """For tables of refusals, where a process each would take more time than it shows."""

    def told(*args: str, cwd: Path, env: Mapping[str, str] | None = None) -> harness.Done:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.chdir(cwd)
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            code = entry(args)
        return harness.Done(code, *capsys.readouterr())

    return told


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
