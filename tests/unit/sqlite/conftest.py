from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sqlite.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()
