"""The pytest plugin: a manual clock, a queue on a temporary file, and the real worker without a sleep.

Loaded by every test run on a machine where FluxMesh is installed: it imports nothing before a fixture is
asked for. See docs/testing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fluxmesh.clock import ManualClock
    from fluxmesh.queue import Queue
    from fluxmesh.testing.driven import DrivenWorker


@pytest.fixture
def fluxmesh_clock() -> ManualClock:
    """A clock that moves only when told to: `fluxmesh_clock.advance(60)`."""
    from fluxmesh.clock import ManualClock

    return ManualClock()


@pytest.fixture
def fluxmesh_queue(tmp_path: Path, fluxmesh_clock: ManualClock) -> Iterator[Queue]:
    """A Queue on a temporary SQLite file, whose time is that of `fluxmesh_clock`."""
    from fluxmesh.queue import Queue

    queue = Queue(db_path=tmp_path / "fluxmesh.db", clock=fluxmesh_clock)
    yield queue
    queue.close()


@pytest.fixture
def fluxmesh_worker(fluxmesh_queue: Queue) -> DrivenWorker:
    """Runs the jobs of `fluxmesh_queue`: `fluxmesh_worker.run_until_idle()`."""
    from fluxmesh.testing.driven import DrivenWorker

    return DrivenWorker(fluxmesh_queue)


@pytest.fixture
def fluxmesh_use(tmp_path: Path, fluxmesh_clock: ManualClock) -> Iterator[Callable[[Queue], DrivenWorker]]:
    """`worker = fluxmesh_use(queue)`: for this test an application's own Queue is on a temporary file and on
    `fluxmesh_clock`, and `worker` runs its jobs."""
    from fluxmesh.testing.driven import DrivenWorker, on_storage_of_its_own

    with ExitStack() as stack:

        def use(queue: Queue) -> DrivenWorker:
            path = tmp_path / f"fluxmesh-{id(queue)}.db"
            return DrivenWorker(stack.enter_context(on_storage_of_its_own(queue, path, fluxmesh_clock)))

        yield use
