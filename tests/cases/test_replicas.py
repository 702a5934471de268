"""C08: the script cache is lost, then the primary; a replica is promoted under producers and a worker."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest
from msgspec import Struct

from fluxmesh.config import ENV_PREFIX
from fluxmesh.errors import StorageError
from fluxmesh.ids import new_job_id
from fluxmesh.job import TERMINAL, Job, Status
from fluxmesh.queue import Queue
from tests.cases.harness import START_S, wait_until
from tests.cases.marks import MARKS_ENV, MarkFile
from tests.cases.report import Case
from tests.cases.workers import ROOT, Group, WorkerGroup
from tests.redis_fleet import Sentinel, primary, replica, sentinel_url
from tests.redis_server import Server

RATE: Final = 100  # jobs a second
BEFORE_S: Final = 3.0
AFTER_S: Final = 5.0
WINDOW_S: Final = 5.0
BEHIND_S: Final = 0.5
FRESH_S: Final = 1.0  # accepted so shortly before the death, a job may be lost with the primary
_READY_LOOK_S: Final = 0.05
_END_S: Final = 60.0
_LISTENS: Final = re.compile(r"^server: (http://\S+) ", re.MULTILINE)


class Submission(Struct, frozen=True):
    """`error` is what the caller was told; empty: the job was accepted."""

    id: str
    at: float
    error: str


class Producer:
    """Submits jobs at a rate, whatever becomes of the earlier ones, and notes every answer."""

    def __init__(self, queue: Queue) -> None:
        self.answers: list[Submission] = []
        self._queue = queue
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._produce()))
        self._thread.start()

    async def _produce(self) -> None:
        loop = asyncio.get_running_loop()
        started, made = loop.time(), 0
        under_way: set[asyncio.Task[None]] = set()
        while not self._over.is_set():
            await asyncio.sleep(max(0.0, started + made / RATE - loop.time()))
            made += 1
            task = asyncio.create_task(self._submit(new_job_id()))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    async def _submit(self, job_id: str) -> None:
        error = ""
        try:
            await self._queue.aio.submit("tick", ["c08"], id=job_id)
        except StorageError as caught:
            error = f"{type(caught).__name__}: {caught}"
        self.answers.append(Submission(job_id, time.monotonic(), error))

    @property
    def accepted(self) -> list[Submission]:
        return [one for one in list(self.answers) if not one.error]

    @property
    def refused(self) -> list[Submission]:
        return [one for one in list(self.answers) if one.error]

    def end(self) -> None:
        self._over.set()
        self._thread.join(_END_S)


class Readiness:
    """What /readyz of a server answers, looked at often."""

    def __init__(self, url: str) -> None:
        self.seen: list[tuple[float, int]] = []
        self.texts: set[str] = set()
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        with httpx.Client(timeout=10) as client:
            while not self._over.wait(_READY_LOOK_S):
                answer = client.get(f"{self._url}/readyz")
                self.seen.append((time.monotonic(), answer.status_code))
                self.texts.add(answer.text)

    def statuses(self, start: float, end: float) -> set[int]:
        return {status for at, status in self.seen if start <= at <= end}

    def end(self) -> None:
        self._over.set()
        self._thread.join(_END_S)


class Fleet:
    """A primary with replicas, a Sentinel, a worker and an API in front of them."""

    def __init__(self, folder: Path, stack: ExitStack, *, replicas: int, wait_replicas: int) -> None:
        self.folder = folder
        self.primary: Server = primary(folder / "primary")
        stack.callback(self.primary.stop)
        self.replicas = [replica(folder / f"replica{number}", self.primary) for number in range(replicas)]
        for one in self.replicas:
            stack.callback(one.stop)
        self.sentinel = Sentinel(folder / "sentinel", self.primary)
        stack.callback(self.sentinel.stop)
        self.sentinel.await_replicas(replicas)
        self.url = sentinel_url(self.sentinel)
        self.marks = MarkFile(folder / "marks.jsonl")
        self.queue = Queue(self.url, wait_replicas=wait_replicas)
        stack.callback(self.queue.close)
        env = self._env(wait_replicas)
        self.worker = WorkerGroup("w1", (), concurrency=8, env=env, folder=folder)
        stack.callback(self.worker.kill)
        argv = [sys.executable, "-m", "fluxmesh.cli", "server", "--no-standalone", "--port", "0"]
        self.api = Group(argv, env=env, folder=folder, log=folder / "api.log")
        stack.callback(self.api.kill)
        wait_until(
            lambda: [one.status for one in self.queue.list_workers()] == ["ready"], START_S, "a worker"
        )
        found = wait_until(lambda: _LISTENS.search(self.api.log.read_text()), START_S, "the API listens")
        self.ready = Readiness(found[1])
        stack.callback(self.ready.end)
        wait_until(lambda: 200 in self.ready.statuses(0, time.monotonic()), START_S, "the API is ready")

    def _has_worker(self) -> bool:
        return [one.status for one in self.queue.list_workers()] == ["ready"]

    def _env(self, wait_replicas: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        ours = {"FLUXMESH_URL": self.url, "FLUXMESH_WAIT_REPLICAS": str(wait_replicas)}
        path = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
        return {**kept, **ours, MARKS_ENV: str(self.marks.path), "PYTHONPATH": path}

    def records(self) -> dict[str, Job]:
        found: dict[str, Job] = {}
        cursor: str | None = None
        while True:
            page = self.queue.find("", cursor=cursor, limit=1_000)
            found.update((job.id, job) for job in page.items)
            cursor = page.next_cursor
            if cursor is None:
                return found

    def await_quiet(self) -> dict[str, Job]:
        """Every record, once all of them have ended."""

        def ended() -> dict[str, Job]:
            records = self.records()
            return records if all(job.status in TERMINAL for job in records.values()) else {}

        return wait_until(ended, _END_S, "all stored jobs have ended")

    def logs(self) -> str:
        return "".join(path.read_text("utf-8", "replace") for path in (self.worker.log, self.api.log))


@contextmanager
def fleet(folder: Path, *, replicas: int = 1, wait_replicas: int = 0) -> Iterator[Fleet]:
    with ExitStack() as stack:
        made = Fleet(folder, stack, replicas=replicas, wait_replicas=wait_replicas)
        try:
            yield made
        except BaseException:
            print(made.logs()[-6_000:])
            raise


def let_pass(seconds: float) -> None:
    """Time is what the scenario is about here: nothing can tell when enough of it has passed."""
    threading.Event().wait(seconds)


def fall_behind(one: Server) -> None:
    """A replica that gets nothing more: those on the same machine miss too little to be counted otherwise."""
    with one.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", 1)


def lose_scripts_and_primary(on: Fleet, *, clean: bool) -> tuple[Producer, float]:
    """The scenario up to its end: what the producer was told, and when the primary was gone."""
    producer = Producer(on.queue)
    try:
        let_pass(BEFORE_S)
        with on.primary.client() as client:
            client.script_flush()
        let_pass(BEFORE_S)
        if not clean:
            for one in on.replicas:
                fall_behind(one)
            let_pass(BEHIND_S)
        gone_at = time.monotonic()
        if clean:
            on.primary.stop()  # it waits itself until its replicas have all
        else:
            on.primary.kill()
        accepted_again = lambda: any(one.at > gone_at + 0.5 for one in producer.accepted)  # noqa: E731
        wait_until(accepted_again, _END_S, "jobs are accepted again")
        let_pass(AFTER_S)
    finally:
        producer.end()
    return producer, gone_at


def judge(case: Case, on: Fleet, producer: Producer, gone_at: float) -> list[Submission]:
    """Note what holds however the primary was lost. The accepted jobs that are lost."""
    records = on.await_quiet()
    errors = [one for one in producer.refused if one.at >= gone_at]
    last_error_at = max((one.at for one in errors), default=gone_at)
    case.equal("errors_before", [one.error for one in producer.refused if one.at < gone_at - 0.1], [])
    case.at_most("error_window_s", last_error_at - gone_at, WINDOW_S)
    told = " ".join([*(one.error for one in errors), on.logs(), *on.ready.texts])
    case.equal("noscript_surfaced", "NOSCRIPT" in told, expected=False)
    case.equal("unready_meanwhile", 503 in on.ready.statuses(gone_at, last_error_at + 1), expected=True)
    case.equal("ready_again", on.ready.seen[-1][1], 200)
    stored = Counter(job.status for job in records.values())
    case.equal("stored_jobs_completed", set(stored), {Status.COMPLETED})
    starts = Counter(mark.job for mark in on.marks.starts())
    again = [mark for mark in on.marks.starts() if starts[mark.job] > 1 and mark.at < gone_at - FRESH_S]
    case.equal("started_again_though_not_in_flight", len({mark.job for mark in again}), 0)
    case.at_most("errors_told", len(errors), RATE * WINDOW_S)
    return [one for one in producer.accepted if one.id not in records]


@pytest.mark.slow
def test_c08_a_primary_that_is_stopped_takes_no_job_with_it(tmp_path: Path) -> None:
    case = Case("C08", "redis", primary="stopped", rate=RATE, replicas=1)
    with fleet(tmp_path) as on:
        producer, gone_at = lose_scripts_and_primary(on, clean=True)
        lost = judge(case, on, producer, gone_at)
        case.equal("accepted_jobs_lost", len(lost), 0)
        case.close([])


@pytest.mark.slow
def test_c08_a_primary_that_is_killed_takes_only_the_last_second_with_it(tmp_path: Path) -> None:
    case = Case("C08", "redis", primary="killed", rate=RATE, replicas=1)
    with fleet(tmp_path) as on:
        producer, gone_at = lose_scripts_and_primary(on, clean=False)
        lost = judge(case, on, producer, gone_at)
        case.at_most("accepted_jobs_lost", len(lost), RATE * FRESH_S)
        case.equal("some_were_lost", bool(lost), expected=True)  # else the next test would show nothing
        case.equal("lost_though_older_than_a_second", [o.id for o in lost if o.at < gone_at - FRESH_S], [])
        case.close([])


@pytest.mark.slow
def test_c08_with_wait_replicas_no_accepted_job_is_lost(tmp_path: Path) -> None:
    case = Case("C08", "redis", primary="killed", rate=RATE, replicas=2, wait_replicas=1)
    with fleet(tmp_path, replicas=2, wait_replicas=1) as on:
        producer, gone_at = lose_scripts_and_primary(on, clean=False)
        lost = judge(case, on, producer, gone_at)
        case.equal("accepted_jobs_lost", len(lost), 0)
        case.close([])
