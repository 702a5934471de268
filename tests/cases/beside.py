"""Cases that mostly wait are run side by side: those of one module and storage start together at the first of
them.

Each is a test of its own all the same, with its own folder, its own result and its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest

from tests.cases.backdoor import Opener
from tests.cases.harness import Site

Part = Callable[[Site], None]
Test = TypeVar("Test", bound=Callable[..., object])
_parts: dict[tuple[str, str], Part] = {}


def beside(part: Part) -> Callable[[Callable[[], None]], None]:
    """Make a test of a function that takes an empty site."""
    _parts[part.__module__, part.__name__] = part

    def test(part_beside: Callable[[], None]) -> None:
        part_beside()

    test.__name__ = part.__name__
    test.__qualname__ = part.__qualname__
    test.__doc__ = part.__doc__
    return test


@pytest.fixture(scope="module")
def _running(
    request: pytest.FixtureRequest, opener: Opener, storage: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """The parts of this module and storage that were selected, started."""
    module = request.module.__name__
    chosen = {
        name: part
        for item in request.session.items
        if getattr(item, "module", None) is request.module
        and item.callspec.params["storage"] == storage
        and (part := _parts.get((module, name := item.originalname))) is not None
    }
    with ThreadPoolExecutor(max(1, len(chosen))) as pool:
        yield {
            name: pool.submit(part, Site(tmp_path_factory.mktemp("beside"), opener))
            for name, part in chosen.items()
        }


@pytest.fixture
def part_beside(request: pytest.FixtureRequest, _running: dict[str, Future[None]]) -> Callable[[], None]:
    return _running[request.node.originalname].result
