"""One API for all tests of a module that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.serving import Api, served


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with served(tmp_path_factory.mktemp("api") / "jobs.db") as running:
        yield running
