"""The portal: blocking calls from any thread and beside any loop, forks, and a quiet end of the program."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import Queue, Status, StorageUnreachable, WouldDeadlock
from fluxmesh.calls import BoundTask
from fluxmesh.errors import FluxMeshError, OutcomeUnknown
from fluxmesh.ids import is_job_id
from fluxmesh.portal import current_portal, run
from fluxmesh.storage.base import REPEATS, Storage

BOUND_S = 60
FORKING = "ignore:This process:DeprecationWarning"  # 3.12 warns of a fork amid threads, which is tried here


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(db_path=tmp_path / "jobs.db")
    yield queue
    queue.close()


@pytest.fixture
def task(queue: Queue) -> BoundTask[..., Any]:
    return queue.task_named("t")


def program(directory: Path, body: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program that warns of nothing it should not; `queue` and `task` are made."""
    head = (
        "import asyncio, atexit, os, sys, threading, multiprocessing\n"
        "from fluxmesh import Queue\n"
        "queue = Queue(db_path='jobs.db')\n"
        "@queue.task(name='t')\n"
        "def task(number): return number\n"
    )
    (directory / "program.py").write_text(head + body)
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", FORKING, "program.py"],
        cwd=directory,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


def ended_quietly(done: subprocess.CompletedProcess[str], printed: str) -> bool:
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split() == printed.split()


def test_many_threads_submit_at_once(queue: Queue, task: BoundTask[..., Any]) -> None:
    ids: list[str] = []

    def submit() -> None:
        ids.extend(task.delay(index).id for index in range(20))

    threads = [threading.Thread(target=submit) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert len(set(ids)) == 320
    assert queue.counts().total == 320


def test_a_blocking_call_works_beside_a_running_loop(queue: Queue, task: BoundTask[..., Any]) -> None:
    async def main() -> None:
        job = task.delay(1)
        assert job.status is Status.PENDING
        assert job.cancel() == "cancelled"
        assert (await job.aio.read()).status is Status.CANCELLED

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_loops_come_and_go(queue: Queue, task: BoundTask[..., Any]) -> None:
    async def one() -> str:
        return (await task.enqueue()).id

    async def many() -> list[str]:
        return list(await asyncio.gather(*(one() for _ in range(50))))

    ids = [*asyncio.run(many()), *asyncio.run(many())]
    in_thread: list[str] = []
    thread = threading.Thread(target=lambda: in_thread.extend(asyncio.run(many())))
    thread.start()
    thread.join(BOUND_S)
    assert len({*ids, *in_thread}) == 150
    assert queue.counts().total == 150


def test_an_awaiting_caller_that_gives_up_stops_the_waiting(task: BoundTask[..., Any]) -> None:
    async def main() -> None:
        job = await task.enqueue()
        waiting = asyncio.create_task(job.aio.result())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_a_blocking_call_on_the_portals_own_thread_is_refused(task: BoundTask[..., Any]) -> None:
    async def inside() -> None:
        task.delay()

    with pytest.raises(WouldDeadlock, match=r"use \.aio"):
        run(inside())


def test_a_lost_answer_is_asked_for_again(queue: Queue) -> None:
    calls: list[int] = []

    async def answer() -> str:
        calls.append(1)
        if len(calls) <= REPEATS:
            raise OutcomeUnknown("the reply was lost")
        return "answer"

    assert run(queue._link.use(lambda _: answer())) == "answer"
    calls.clear()
    calls.extend([-1] * -REPEATS)

    async def never() -> None:
        calls.append(1)
        raise OutcomeUnknown("the reply was lost")

    with pytest.raises(OutcomeUnknown):
        run(queue._link.use(lambda _: never()))
    assert len(calls) == REPEATS + 1


@pytest.mark.parametrize("count", [1, 3])
def test_a_submission_whose_answer_is_lost_names_its_jobs(queue: Queue, count: int) -> None:
    async def enqueue(*_: object, **__: object) -> None:
        raise OutcomeUnknown("no reply", hint="repeat the call")

    storage = run(queue._link.use(_itself))
    storage.enqueue = enqueue  # type: ignore[method-assign,assignment]
    task = queue.task_named("t")
    with pytest.raises(OutcomeUnknown, match="may or may not be stored") as caught:
        task.delay() if count == 1 else task.map([()] * count)
    assert len(set(caught.value.ids)) == count
    assert all(map(is_job_id, caught.value.ids))
    assert caught.value.ids[0] in str(caught.value)


async def _itself(storage: Storage) -> Storage:
    return storage


def test_what_may_have_been_done_is_not_told_as_not_done(queue: Queue) -> None:
    """A storage that is frozen loses the first answer and cannot be reached for a second one."""
    failures: list[FluxMeshError] = [StorageUnreachable("it does not answer"), OutcomeUnknown("no reply")]

    async def fail() -> None:
        raise failures.pop()

    with pytest.raises(OutcomeUnknown, match="no reply"):
        run(queue._link.use(lambda _: fail()))
    failures.append(StorageUnreachable("nothing was sent"))
    with pytest.raises(StorageUnreachable, match="nothing was sent"):
        run(queue._link.use(lambda _: fail()))


def test_a_closed_queue_opens_anew(queue: Queue, task: BoundTask[..., Any]) -> None:
    task.delay()
    queue.close()
    queue.close()
    assert queue.counts().total == 1

    async def main() -> None:
        await queue.aio.close()
        assert (await queue.aio.counts()).total == 1

    asyncio.run(main())


def test_a_forgotten_queue_gives_its_storage_back(tmp_path: Path) -> None:
    async def tasks() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks()

    earlier = run(tasks())  # of other queues on the same loop; some never end
    before = len(current_portal()._storages)
    queue = Queue(db_path=tmp_path / "jobs.db")
    queue.submit("t")
    assert len(current_portal()._storages) == before + 1
    del queue
    gc.collect()

    async def given_back() -> int:
        closing = asyncio.all_tasks() - earlier - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*closing), BOUND_S)
        return len(current_portal()._storages)

    assert run(given_back()) == before


def test_an_opening_that_failed_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    queue = Queue(db_path=folder / "jobs.db")
    with pytest.raises(StorageUnreachable, match="does not exist"):
        queue.submit("t")
    folder.mkdir()
    queue.submit("t")
    assert queue.counts().total == 1
    queue.close()


def test_a_forked_child_submits_on_its_own(tmp_path: Path) -> None:
    done = program(
        tmp_path,
        """
first = task.delay(1)
pid = os.fork()
if pid == 0:
    assert first.status == 'PENDING'
    task.map([(n,) for n in range(2_000)])
    asyncio.run(task.enqueue(2))
    print(queue.counts().total, flush=True)
    sys.exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
task.delay(3)
print(queue.counts().total)
""",
    )
    assert ended_quietly(done, "2002 2003")


def test_a_child_forked_amid_calls_is_not_held_up_by_them(tmp_path: Path) -> None:
    """Other threads of the parent may hold the portal's locks at the instant of the fork."""
    done = program(
        tmp_path,
        """
task.delay(0)
ending = threading.Event()
def busy():
    while not ending.is_set():
        task.delay(1)
threads = [threading.Thread(target=busy) for _ in range(4)]
for thread in threads: thread.start()
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        task.delay(2)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
ending.set()
for thread in threads: thread.join()
print(len(queue.find('task:t', limit=1000).items) > 14)
""",
        FLUXMESH_LOG_LEVEL="error",
    )
    assert ended_quietly(done, "True")


def test_a_child_forked_while_the_parent_first_opens_its_storage_is_not_held_up(tmp_path: Path) -> None:
    """Another thread was importing the backend, whose lock on the module is never given back in the child,
    and has gone on to open the file while the fork was being prepared."""
    done = program(
        tmp_path,
        """
import signal, time
importing, inside = threading.Event(), threading.Event()
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == 'fluxmesh.storage.sqlite.backend':
            from fluxmesh.storage.sqlite import connection
            connect = connection.connect
            def slowly(*args, **options):
                inside.set()
                time.sleep(0.3)
                return connect(*args, **options)
            connection.connect = slowly
            importing.set()
            time.sleep(0.3)
sys.meta_path.insert(0, Slow())
other = threading.Thread(target=task.delay, args=(1,))
other.start()
assert importing.wait(20)
os.register_at_fork(before=lambda: inside.wait(20))
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    task.delay(2)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
other.join()
print(queue.counts().total)
""",
    )
    assert ended_quietly(done, "2")


def test_a_child_that_ends_leaves_the_parents_portal_alone(tmp_path: Path) -> None:
    """Closing what it inherited would unregister the parent's sockets from their common poll set."""
    done = program(
        tmp_path,
        """
def child():
    task.delay(1)
task.delay(0)
for _ in range(3):
    process = multiprocessing.get_context('fork').Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert task.delay(2).status == 'PENDING'
async def main():
    await asyncio.gather(*(task.enqueue(3) for _ in range(20)))
asyncio.run(main())
print(queue.counts().total)
""",
    )
    assert ended_quietly(done, "27")


def test_a_body_may_fork_and_its_child_may_submit(tmp_path: Path) -> None:
    """The worker's connections are as little the child's as the portal's are."""
    done = program(
        tmp_path,
        """
@queue.task(name='forks')
def forks(rounds):
    for _ in range(rounds):
        pid = os.fork()
        if pid == 0:
            try:
                task.map([(n,) for n in range(10)])
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
    return rounds
worker = queue.worker(concurrency=4)
worker.start()
jobs = [forks.delay(3) for _ in range(4)]
print(*[job.result(timeout=60) for job in jobs])
deadline = [job.result(timeout=60) for job in task.map([(n,) for n in range(50)])]
worker.stop()
print(queue.counts().total)
""",
    )
    assert ended_quietly(done, f"3 3 3 3 {4 + 4 * 3 * 10 + 50}")


def test_a_program_that_never_closes_ends_quietly(tmp_path: Path) -> None:
    assert ended_quietly(program(tmp_path, "print(task.delay(1).status)\n"), "PENDING")


def test_a_program_ends_while_a_thread_waits_for_a_result(tmp_path: Path) -> None:
    done = program(
        tmp_path,
        """
job = task.delay(1)
began = threading.Event()
def wait():
    began.set()
    try:
        job.result()
    except Exception:
        pass
threading.Thread(target=wait, daemon=True).start()
began.wait()
print('over')
""",
    )
    assert ended_quietly(done, "over")


def test_a_call_after_the_end_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    done = program(
        tmp_path,
        """
def late():
    try:
        task.delay(2)
    except Exception as error:
        print(type(error).__name__)
atexit.register(late)
task.delay(1)
atexit.register(lambda: print(task.delay(3).status))
""",
    )
    # Exit handlers run last in, first out: the second was registered after the portal's own.
    assert ended_quietly(done, "PENDING StorageUnreachable")


def test_an_interrupt_ends_a_blocking_wait(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from fluxmesh import Queue\n"
        "job = Queue(db_path='jobs.db').submit('t')\n"
        "print('waiting', flush=True)\n"
        "job.result()\n"
    )
    with subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=BOUND_S)
    assert process.returncode in (-signal.SIGINT, 130)
    assert stderr.rstrip().endswith("KeyboardInterrupt")
