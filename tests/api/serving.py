"""An API on a free port: in a thread of this process, or as the command runs it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from fluxmesh.api.access import Access
from fluxmesh.api.server import ApiServer, listen
from fluxmesh.api.store import Store
from fluxmesh.clock import Clock, system_clock
from fluxmesh.config import Settings
from fluxmesh.job import JobError, Outcome, Status, fingerprint
from fluxmesh.outcome import Charge, Transition
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import (
    ClaimedJob,
    ExchangeRequest,
    Registration,
    Settle,
    Settled,
    TaskSpec,
    WorkerRef,
)
from tests.cli.harness import Running

T = TypeVar("T")
PATIENCE_S = 30.0


class Api:
    """A server in a thread, a client of it, and its storage for what no route can do."""

    def __init__(self, client: httpx.Client, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self.client = client
        self.store = store
        self._loop = loop

    @property
    def storage(self) -> Storage:
        return self.store.storage

    def run(self, verb: Coroutine[Any, Any, T]) -> T:
        """A verb of the storage, in the loop that it belongs to."""
        return asyncio.run_coroutine_threadsafe(verb, self._loop).result(PATIENCE_S)

    def start(self, task: str) -> tuple[WorkerRef, ClaimedJob]:
        """A worker of the test's own takes a job of this task from the queue of the same name."""
        registration = Registration(task, (task,), (0, 1, 2, 3), (TaskSpec(task),), 1, 60.0, 20.0)
        worker = WorkerRef(task, self.run(self.storage.register(registration)))
        [job] = self.run(self.storage.exchange(ExchangeRequest(worker, 1, slots=1))).running
        return worker, job

    def end(self, worker: WorkerRef, job: ClaimedJob, transition: Transition) -> None:
        settle = Settle(job.id, job.token, transition)
        answer = self.run(self.storage.exchange(ExchangeRequest(worker, 2, settle=(settle,))))
        assert answer.settled == (Settled.APPLIED,)

    def dead_letter(self, task: str, message: str = "no luck") -> str:
        """A job of this task that failed once and for all; its id."""
        job_id: str = self.submit(task=task, queue=task)["id"]
        worker, job = self.start(task)
        error = JobError("LuckError", message, ("app.py:1 run",), f"LuckError: {message}")
        charge, mark = Charge.ATTEMPT, fingerprint(task, error)
        end = Transition(
            Status.DEAD_LETTER, Outcome.FAILED, charge, error=error, reason="error", fingerprint=mark
        )
        self.end(worker, job, end)
        return job_id

    def submit(self, **fields: Any) -> dict[str, Any]:
        answer = self.client.post("/api/v1/jobs", json={"task": "t", **fields})
        assert answer.status_code == 201, answer.text
        document: dict[str, Any] = answer.json()
        return document


@contextmanager
def served(
    path: Path,
    settings: Settings | None = None,
    *,
    tokens: Sequence[str] = (),
    clock: Clock | None = None,
    behind: Callable[[Storage], Storage] = lambda storage: storage,
) -> Iterator[Api]:
    """`behind` puts something between the API and its storage."""
    chosen = settings or Settings()
    clock = clock or system_clock()

    async def open_it(inline: bool) -> Storage:
        return behind(
            await open_storage(f"sqlite:///{path}", chosen, create=True, clock=clock, inline=inline)
        )

    loop = asyncio.new_event_loop()
    started = threading.Event()
    made: list[tuple[Store, ApiServer]] = []

    async def serve() -> None:
        store = Store(open_storage=open_it, settings=chosen, clock=clock)
        await store.start()
        made.append((store, ApiServer(store, Access.of(tokens, loopback=True), grace_s=1)))
        started.set()
        await made[0][1].serve(listening)

    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        assert started.wait(PATIENCE_S)
        store, server = made[0]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
                yield Api(client, store, loop)
        finally:
            loop.call_soon_threadsafe(server.stop)
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
            loop.close()


def problem(answer: httpx.Response, status: int, field: str | None = None) -> dict[str, Any]:
    """The answer is a problem of this status that blames this field, and shows no code of ours."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert "Traceback" not in answer.text
    document: dict[str, Any] = answer.json()
    assert document["status"] == status
    assert document["type"] == f"urn:fluxmesh:problem:{document['code']}"
    assert document["detail"]
    assert document["title"]
    if field is not None:
        assert document["field"] == field, document
    return document


@contextmanager
def server_command(
    cwd: Path, *args: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple[Running, str]]:
    """`fluxmesh server` on a free port, and its URL."""
    with Running("server", "--port", "0", *args, cwd=cwd, env=env) as running:
        running.until("/docs")
        url = re.search(r"server: (http://\S+)", running.err)
        assert url, running.err
        yield running, url[1]
