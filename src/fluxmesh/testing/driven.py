"""The real worker, run when a test says so and until there is nothing left to run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from os import PathLike, fspath
from typing import Any, Final

from fluxmesh.clock import Clock
from fluxmesh.errors import WaitTimeout
from fluxmesh.queue import Queue
from fluxmesh.running import WorkerHandle, worker_maker
from fluxmesh.storage.registry import resolved_url
from fluxmesh.worker.observe import Claimed, JobSettled, JobsReleased, JobStarted, WorkerEvent

TIMEOUT_S: Final = 30.0


class DrivenWorker:
    """Runs the jobs of a Queue: the same worker as in production, on a thread, without a sleep.

    Between two runs there is no worker, so a manual clock may be moved as far as a test likes."""

    def __init__(self, queue: Queue, *, concurrency: int = 4) -> None:
        self.queue = queue
        self._concurrency = concurrency

    def run_until_idle(self, *queues: str, timeout: float = TIMEOUT_S) -> int:
        """Run what is ready in these queues (default: "default"), and what becomes ready meanwhile, until
        the worker finds nothing more. How many runs ended: a job that was retried at once counts twice.

        Jobs that are not due stay: move the clock and call this again. Raises WaitTimeout if there is no
        end after `timeout` real seconds, and what made the worker fail."""
        watch = _Watch()
        make, worker_id = worker_maker(
            self.queue,
            queues or ("default",),
            clock=self.queue._clock,
            create=self.queue._create,
            observer=watch.hear,
            concurrency=self._concurrency,
            grace_s=0.0,
            mesh=False,
        )
        handle = WorkerHandle(make, worker_id)
        handle.start()
        try:
            either: list[Future[Any]] = [watch.idle, handle._ended]
            done, _ = wait(either, timeout, FIRST_COMPLETED)
        finally:
            handle.stop(0.0)
        if not done:
            raise WaitTimeout(
                f"jobs still run or come after {timeout:g} s",
                hint="does one wait for something, or submit itself?",
            )
        handle.wait(timeout)  # raises what made it fail
        return watch.ended


class _Watch:
    """Hears the worker and knows when it is idle: a claim found nothing, and all that began has been settled.

    Storage settles before it claims, so a claim that finds nothing has looked after the last end."""

    def __init__(self) -> None:
        self.idle: Future[None] = Future()
        self.ended = 0
        self._open: set[str] = set()
        self._lock = threading.Lock()

    def hear(self, event: WorkerEvent) -> None:
        with self._lock:
            match event:
                case JobStarted(job_id=job_id):
                    self._open.add(job_id)
                case JobSettled(job_id=job_id):
                    self._open.discard(job_id)
                    self.ended += 1
                case JobsReleased(job_ids=job_ids):
                    self._open.difference_update(job_ids)
                case Claimed(got=0):
                    if not self._open and not self.idle.done():
                        self.idle.set_result(None)
                case _:
                    pass


@contextmanager
def on_storage_of_its_own(queue: Queue, db_path: str | PathLike[str], clock: Clock) -> Iterator[Queue]:
    """Inside the context, an application's own Queue and its tasks use this file and clock."""
    link = queue._link
    kept = (queue.url, queue._clock, link.url, link.clock, link.create)
    queue.close()
    queue.url = link.url = resolved_url(None, fspath(db_path))
    queue._clock = link.clock = clock
    link.create = True
    try:
        yield queue
    finally:
        queue.close()
        queue.url, queue._clock, link.url, link.clock, link.create = kept
