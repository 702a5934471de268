"""On Redis each loop of a program has a storage of its own, that ends with the loop and warns of nothing."""

from __future__ import annotations

import asyncio
import functools
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import Queue, portal
from tests.redis_server import Server, shared_server  # noqa: F401 - a fixture

BOUND_S = 60


@pytest.fixture
def queue(server: Server) -> Iterator[Queue]:
    with server.client() as client:
        client.flushdb()
    queue = Queue(server.url())
    yield queue
    queue.close()


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def call(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return call


def clients(server: Server) -> int:
    """Connections of others than this very question."""
    with server.client() as client:
        return len(client.client_list()) - 1


async def fewer_clients(server: Server, most: int) -> None:
    """The server hears of a hang-up a little later."""
    async with asyncio.timeout(BOUND_S):
        while clients(server) > most:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def program(directory: Path, url: str, body: str) -> str:
    """What a program printed in which every warning is an error; it must end well and say nothing else."""
    head = (
        "import asyncio, os\nfrom fluxmesh import Queue, portal\n"
        f"queue = Queue({url!r})\ntask = queue.task_named('t')\n"
    )
    (directory / "program.py").write_text(head + body)
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_loops_one_after_another_need_no_other_thread_and_leave_nothing(
    server: Server, tmp_path: Path
) -> None:
    body = (
        "for n in range(3):\n    asyncio.run(task.enqueue(n))\n"
        "print(portal._portal, len(queue._link._openings))\n"
        "loop = asyncio.new_event_loop()\n"
        "loop.run_until_complete(task.enqueue(9))\n"
        "loop.run_until_complete(loop.shutdown_asyncgens())\nloop.close()\n"
        "print(queue.counts().total)\n"
    )
    with server.client() as client:
        client.flushdb()
    assert program(tmp_path, server.url(), body).split() == ["None", "0", "4"]


def test_a_fork_on_a_loop_has_a_storage_of_its_own(server: Server, tmp_path: Path) -> None:
    body = (
        "async def main():\n"
        "    await task.enqueue(1)\n"
        "    await asyncio.gather(*(task.enqueue(n) for n in range(20)))\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            asyncio._set_running_loop(None)\n"
        "            asyncio.run(task.enqueue(2))\n"
        "            os._exit(0)\n"
        "        finally:\n"
        "            os._exit(1)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "    await task.enqueue(3)\n"
        "    print((await queue.aio.counts()).total)\n"
        "asyncio.run(main())\n"
    )
    with server.client() as client:
        client.flushdb()
    assert program(tmp_path, server.url(), body).split() == ["23"]


@on_a_loop
async def test_a_loop_asks_on_connections_of_its_own_and_blocking_calls_on_the_portal(queue: Queue) -> None:
    task = queue.task_named("t")
    await task.enqueue(1)
    assert list(queue._link._openings) == [asyncio.get_running_loop()]
    await asyncio.to_thread(task.delay, 2)
    assert set(queue._link._openings) == {asyncio.get_running_loop(), portal.current_portal().loop}
    assert (await queue.aio.counts()).total == 2


@on_a_loop
async def test_close_ends_the_storage_of_this_loop_and_the_next_use_opens_it_anew(
    queue: Queue, server: Server
) -> None:
    before = clients(server)
    await queue.task_named("t").enqueue(1)
    assert clients(server) > before
    await queue.aio.close()
    assert not queue._link._openings
    await fewer_clients(server, before)
    await queue.task_named("t").enqueue(1)
    assert (await queue.aio.counts()).total == 2


def test_a_close_elsewhere_ends_the_storage_of_a_running_loop(queue: Queue) -> None:
    task = queue.task_named("t")
    enqueued, closed = threading.Event(), threading.Event()

    async def other() -> bool:
        await task.enqueue(1)
        enqueued.set()
        await asyncio.to_thread(closed.wait, BOUND_S)
        while queue._link._openings:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await task.enqueue(2)
        return True

    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(other())))
    thread.start()
    assert enqueued.wait(BOUND_S)
    queue.close()
    closed.set()
    thread.join(BOUND_S)
    assert answers == [True]
    assert queue.counts().total == 2


@on_a_loop
async def test_a_forgotten_queue_lets_go_of_its_connections(server: Server) -> None:
    before = clients(server)
    queue = Queue(server.url())
    await queue.task_named("t").enqueue(1)
    assert clients(server) > before
    del queue
    gc.collect()
    await fewer_clients(server, before)


@on_a_loop
async def test_a_storage_that_could_not_be_opened_is_opened_by_the_next_who_asks(
    tmp_path: Path, server: Server
) -> None:
    own = Server(tmp_path)
    own.stop()
    queue = Queue(own.url())
    with pytest.raises(Exception, match="running"):
        await queue.task_named("t").enqueue(1)
    own.start()
    try:
        await queue.task_named("t").enqueue(1)
        await queue.aio.close()
    finally:
        own.stop()
