"""memory://: a queue, its worker and its callers in one process, and nothing outside it."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from fluxmesh import Queue
from fluxmesh.config import Settings
from fluxmesh.errors import InvalidOption
from fluxmesh.storage.registry import open_storage

_names = itertools.count()


@pytest.fixture
def url() -> str:
    return f"memory://service{next(_names)}"


def test_jobs_submitted_from_any_thread_are_run_and_waited_for(url: str) -> None:
    queue = Queue(url)

    @queue.task()
    async def double(n: int) -> int:
        return 2 * n

    @queue.task()
    def triple(n: int) -> int:
        return 3 * n

    worker = queue.worker()
    worker.start()
    try:
        found: list[int] = []
        asking = threading.Thread(target=lambda: found.append(double.delay(4).result(timeout=20)))
        asking.start()
        jobs = triple.map([(n,) for n in range(20)])
        assert [job.result(timeout=20) for job in jobs] == [3 * n for n in range(20)]
        asking.join(20)
        assert found == [8]
        assert double.options(delay=0.05).delay(5).result(timeout=20) == 10
    finally:
        worker.stop()


def test_each_name_is_a_storage_of_its_own(url: str) -> None:
    one, same, other = Queue(url), Queue(url), Queue(f"{url}-other")

    async def total(at: str) -> int:
        storage = await open_storage(at, Settings(), create=False)
        try:
            return (await storage.counts()).total
        finally:
            await storage.close()

    for queue in (one, same):

        @queue.task(name="noop")
        def noop() -> None:
            pass

        noop.delay()
    assert asyncio.run(total(url)) == 2
    assert asyncio.run(total(other.url)) == 0


def test_a_path_is_no_name(url: str) -> None:
    with pytest.raises(InvalidOption, match="memory://name"):
        asyncio.run(open_storage(f"{url}/tasks.db", Settings(), create=True))
