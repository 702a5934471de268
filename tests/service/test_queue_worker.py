"""Workers started from Python: on a thread of the program, and in the foreground until a signal."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fluxmesh import (
    AppImportFailed,
    InvalidOption,
    MeshWorker,
    Queue,
    Status,
    StorageUnreachable,
    UsageError,
    WaitTimeout,
    WorkerFenced,
    WouldDeadlock,
)
from fluxmesh.queue import default_worker_id, load_app
from fluxmesh.worker.config import WorkerEnd

BOUND_S = 60


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(db_path=tmp_path / "jobs.db", settings={"lease_s": 3})
    yield queue
    queue.close()


def test_a_worker_that_has_ended_is_not_started_again(queue: Queue) -> None:
    worker = queue.worker(worker_id="w")
    assert repr(worker) == "<WorkerHandle w new>"
    worker.start()
    assert repr(worker) == "<WorkerHandle w started>"
    worker.stop()
    assert repr(worker) == "<WorkerHandle w ended>"
    with pytest.raises(UsageError, match="make a new one"):
        worker.start()


@pytest.mark.parametrize("given", [True, {"port": 7_946}, MeshWorker, "yes", 1, {}])
def test_a_part_in_the_mesh_is_a_mesh_worker_or_false(queue: Queue, given: Any) -> None:
    for verb in (queue.worker, queue.run_worker):
        with pytest.raises(InvalidOption, match="neither a MeshWorker nor False") as refused:
            verb(mesh=given)
        assert refused.value.field == "mesh"
        assert "MeshWorker(" in refused.value.hint


def test_an_unknown_option_is_told_by_the_verb_that_was_called(queue: Queue) -> None:
    with pytest.raises(TypeError, match=r"^worker\(\) got .* 'mesh_optionl'; did you mean mesh_optional"):
        queue.worker(mesh_optionl=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^run_worker\(\) got .* 'clock'"):
        queue.run_worker(clock=None)  # type: ignore[call-arg]


# -- on a thread -----------------------------------------------------------------------------------
def test_a_worker_runs_jobs_until_it_is_stopped(queue: Queue) -> None:
    @queue.task
    async def double(number: int) -> int:
        return 2 * number

    @queue.task
    def triple(number: int) -> int:
        return 3 * number

    worker = queue.worker(worker_id="w1", concurrency=2)
    worker.start()
    worker.start()
    assert double.delay(21).result(timeout=BOUND_S) == 42
    assert triple.delay(14).result(timeout=BOUND_S) == 42
    [listed] = queue.list_workers()
    assert (listed.worker_id, listed.capacity, listed.status) == ("w1", 2, "ready")
    with pytest.raises(WaitTimeout, match="'w1' still runs after 0 s"):
        worker.wait(timeout=0)

    worker.stop()
    worker.stop()

    assert worker.wait(timeout=BOUND_S) is WorkerEnd.STOPPED
    assert queue.list_workers() == []


def test_a_worker_is_driven_from_a_loop_too(queue: Queue) -> None:
    @queue.task
    async def double(number: int) -> int:
        return 2 * number

    async def main() -> None:
        worker = queue.worker()
        await worker.aio.start()
        assert await (await double.enqueue(21)) == 42
        with pytest.raises(WaitTimeout):
            await worker.aio.wait(0.01)
        await worker.aio.stop(0)
        assert await worker.aio.wait(BOUND_S) is WorkerEnd.STOPPED

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_a_worker_that_cannot_begin_says_why(tmp_path: Path) -> None:
    worker = Queue(db_path=tmp_path / "nowhere" / "jobs.db").worker()
    with pytest.raises(StorageUnreachable, match="does not exist"):
        worker.start()
    worker.stop()
    with pytest.raises(StorageUnreachable):
        worker.wait()


def test_a_worker_that_was_not_started_has_nothing_to_stop(queue: Queue) -> None:
    worker = queue.worker()
    worker.stop()
    worker.stop_now()
    assert worker.running_count == 0
    with pytest.raises(UsageError, match=r"was not started \(call start"):
        worker.wait()


def test_stopping_gives_running_bodies_their_grace(queue: Queue) -> None:
    entered, ending = threading.Event(), threading.Event()

    @queue.task
    def body() -> str:
        entered.set()
        assert ending.wait(BOUND_S)
        return "done"

    worker = queue.worker()
    worker.start()
    job = body.delay()
    assert entered.wait(BOUND_S)
    assert worker.running_count == 1
    stopping = threading.Thread(target=worker.stop, args=(BOUND_S,))
    stopping.start()
    ending.set()
    stopping.join(BOUND_S)
    assert job.result(timeout=0) == "done"


def test_a_job_that_is_cut_short_goes_back_uncharged(queue: Queue) -> None:
    entered = threading.Event()

    @queue.task
    async def body() -> None:
        entered.set()
        await asyncio.sleep(3_600)

    worker = queue.worker(grace_s=0)
    worker.start()
    job = body.delay()
    assert entered.wait(BOUND_S)
    worker.stop_now()
    assert worker.wait(BOUND_S) is WorkerEnd.HURRIED
    job.refresh()
    assert (job.record.status, job.record.attempts, job.record.interruptions) == (Status.PENDING, 0, 1)


def test_a_body_may_submit_but_not_wait(queue: Queue) -> None:
    @queue.task
    def child() -> None: ...

    @queue.task(max_retries=0)
    def parent(way: str) -> str:
        job = child.delay()
        if way == "async":
            asyncio.run(job.aio.result())
        else:
            job.result(timeout=BOUND_S)
        return "never"

    @queue.task(max_retries=0)
    async def async_parent() -> None:
        await (await child.enqueue())

    @queue.task
    async def submits_in_both_ways() -> int:
        return len({child.delay().id, (await child.enqueue()).id})

    worker = queue.worker()
    worker.start()
    for job in (parent.delay("blocking"), parent.delay("async"), async_parent.delay()):
        failed = job.aio.ended(BOUND_S)
        record = asyncio.run(failed)
        assert record.error is not None
        assert record.error.type.endswith(WouldDeadlock.__name__)
    assert submits_in_both_ways.delay().result(timeout=BOUND_S) == 2
    worker.stop()


def test_tier_names_mean_tiers_of_the_default_queue(queue: Queue) -> None:
    @queue.task
    def body() -> None: ...

    low = body.options(priority="low").delay()
    worker = queue.worker(["critical", "high", "default"])
    worker.start()
    [listed] = queue.list_workers()
    assert (listed.queues, listed.tiers) == (("default",), (0, 1, 2))
    body.delay().result(timeout=BOUND_S)
    assert low.status is Status.PENDING
    worker.stop()


def test_workers_of_one_program_have_ids_of_their_own() -> None:
    assert len({default_worker_id() for _ in range(20)}) > 1


def test_only_a_worker_creates_the_unnamed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    queue = Queue()
    worker = queue.worker()
    assert list(tmp_path.iterdir()) == []
    worker.start()
    assert queue.submit("t").status is Status.PENDING
    worker.stop()
    assert (tmp_path / "fluxmesh.db").exists()
    queue.close()


# -- in the foreground -----------------------------------------------------------------------------
def test_the_foreground_is_no_place_beside_a_loop(queue: Queue) -> None:
    async def main() -> None:
        queue.run_worker()

    with pytest.raises(UsageError, match="event loop runs in this thread"):
        asyncio.run(main())


def test_a_worker_in_another_thread_leaves_signals_alone(queue: Queue) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    ends: list[Any] = []

    @queue.task
    def body() -> None: ...

    thread = threading.Thread(target=lambda: ends.append(run_and_tell(queue, "w1")))
    thread.start()
    body.delay().result(timeout=BOUND_S)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    take_over = queue.worker(worker_id="w1")
    take_over.start()
    thread.join(BOUND_S)
    take_over.stop()
    assert [type(end) for end in ends] == [WorkerFenced]


def run_and_tell(queue: Queue, worker_id: str) -> Any:
    try:
        return queue.run_worker(worker_id=worker_id)
    except WorkerFenced as error:
        return error


RETIRING = """
import sys
from fluxmesh import Queue, WorkerRetired
settings = {"lease_s": 3, "hard_grace_s": 0.1, "retire_after_s": 0.2, "grace_s": 0}
queue = Queue(db_path="jobs.db", settings=settings)

@queue.task(timeout=0.1, max_retries=0)
def stubborn():
    while True:
        try:
            sys.stdin.read()
        except BaseException:
            pass

stubborn.delay()
try:
    queue.run_worker()
except WorkerRetired as error:
    print(error, flush=True)
"""


def test_a_body_that_cannot_be_stopped_retires_the_worker(tmp_path: Path) -> None:
    """In a process of its own: what the body holds is given back only with the process."""
    done = subprocess.run(
        [sys.executable, "-c", RETIRING],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert "body of a job could not be stopped" in done.stdout, done.stderr


PROGRAM = """
import asyncio, sys
from fluxmesh import Queue
queue = Queue(db_path="jobs.db", settings={"lease_s": 3})

@queue.task(name="quick")
def quick():
    return "done"

@queue.task(name="slow")
async def slow(ctx=None):
    ctx.progress(1)
    print("entered", flush=True)
    await asyncio.sleep(600)

end = queue.run_worker(grace_s=float(sys.argv[1]))
print(end.name)
"""


@contextmanager
def worker_program(directory: Path, grace_s: float) -> Iterator[subprocess.Popen[str]]:
    (directory / "program.py").write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, "-W", "error", "program.py", str(grace_s)],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(queue: Queue, tmp_path: Path, number: signal.Signals) -> None:
    job = queue.submit("slow")
    with worker_program(tmp_path, 0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "entered\n"
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=BOUND_S)
    assert (process.returncode, stdout, stderr) == (0, "STOPPED\n", "")
    assert (job.refresh(), job.record.status, job.record.attempts)[1:] == (Status.PENDING, 0)
    assert queue.list_workers() == []


def test_the_second_signal_hurries(queue: Queue, tmp_path: Path) -> None:
    """C17: the grace of an hour is over at once, with the same promises."""
    job = queue.submit("slow")
    with worker_program(tmp_path, 3_600) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "entered\n"
        process.send_signal(signal.SIGTERM)
        while queue.list_workers()[0].status == "ready":
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=BOUND_S)
    assert (process.returncode, stdout, stderr) == (0, "HURRIED\n", "")
    assert (job.status, job.record.attempts) == (Status.PENDING, 0)


def test_a_program_that_ends_takes_its_worker_with_it(tmp_path: Path, queue: Queue) -> None:
    program = PROGRAM.split("end = ")[0] + (
        "queue.worker(worker_id='w1').start()\n"
        "print(queue.submit('quick').result(timeout=60))\n"
        "queue.submit('slow')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[0] == "done"
    [slow] = queue.find("task:slow").items
    assert (slow.status, slow.attempts) == (Status.PENDING, 0)


# -- an application's queue ------------------------------------------------------------------------
APP = """
from fluxmesh import Queue
class Jobs: queue = Queue(db_path="jobs.db")
queue = Jobs.queue
number = 7
"""


@pytest.fixture
def _app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "shop_app_of_this_test.py").write_text(APP)
    (tmp_path / "broken_app_of_this_test.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / "exiting_app_of_this_test.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield
    for name in [name for name in sys.modules if name.endswith("_app_of_this_test")]:
        del sys.modules[name]


@pytest.mark.usefixtures("_app")
def test_an_application_is_loaded_by_its_name() -> None:
    queue = load_app("shop_app_of_this_test:queue")
    assert isinstance(queue, Queue)
    assert load_app("shop_app_of_this_test:Jobs.queue") is queue


@pytest.mark.usefixtures("_app")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shop_app_of_this_test", "is not module:queue"),
        (":queue", "is not module:queue"),
        ("shop_app_of_this_test:", "is not module:queue"),
        ("shop_app_of_this_test:other", "has no 'other'"),
        ("shop_app_of_this_test:number", "is of type int and not a Queue"),
        ("nowhere_at_all:queue", "No module named 'nowhere_at_all' (run it in the folder"),
        ("broken_app_of_this_test:queue", "cannot be imported: JSONDecodeError: Expecting property name"),
        ("exiting_app_of_this_test:queue", "cannot be imported: SystemExit: 9"),
        ("a b:queue", "cannot be imported"),
        ("..x:queue", "cannot be imported"),
    ],
)
def test_an_application_that_cannot_be_loaded_is_told_so(text: str, message: str) -> None:
    with pytest.raises(AppImportFailed) as caught:
        load_app(text)
    assert message in str(caught.value)
    assert caught.value.exit_code == 3
