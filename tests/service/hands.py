"""A worker by hand: claims and settles through the storage port, one job at a time, when a test says so."""

from __future__ import annotations

import random
from typing import Any

from fluxmesh.codec import encode_result
from fluxmesh.job import JobError, Outcome
from fluxmesh.outcome import End, decide
from fluxmesh.portal import run
from fluxmesh.queue import Queue
from fluxmesh.storage.values import ClaimedJob, ExchangeRequest, Registration, Settle, Settled, WorkerRef
from fluxmesh.task import policy_for


class Hands:
    """Serves one queue of a Queue's storage with all the tasks of its registry."""

    def __init__(self, queue: Queue, *, serves: str = "default") -> None:
        self._queue = queue
        tasks = tuple(definition.spec for definition in queue.registry)
        registration = Registration("hands", (serves,), (0, 1, 2, 3), tasks, 1, 60.0, 20.0)
        epoch = run(queue._link.use(lambda storage: storage.register(registration)))
        self.ref = WorkerRef("hands", epoch)
        self._requests = 0

    def claim(self) -> ClaimedJob:
        self._requests += 1
        request = ExchangeRequest(self.ref, self._requests, slots=1)
        answer = run(self._queue._link.use(lambda storage: storage.exchange(request)))
        [job] = answer.running
        return job

    def end(self, job: ClaimedJob, end: End) -> None:
        definition = self._queue.registry.get(job.task)
        assert definition is not None
        policy = policy_for(definition.spec.options, None, self._queue.settings)
        transition = decide(job.task, end, job.counters, policy, random.Random(1))
        self._requests += 1
        request = ExchangeRequest(self.ref, self._requests, settle=(Settle(job.id, job.token, transition),))
        answer = run(self._queue._link.use(lambda storage: storage.exchange(request)))
        assert answer.settled == (Settled.APPLIED,)

    def complete(self, result: Any = None) -> str:
        job = self.claim()
        self.end(job, End(Outcome.COMPLETED, result=encode_result(result)))
        return job.id

    def fail(self, message: str = "broken") -> str:
        job = self.claim()
        error = JobError("ValueError", message, ("app.py:7 body",), "trace")
        self.end(job, End(Outcome.FAILED, error=error))
        return job.id
