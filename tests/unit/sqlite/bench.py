"""A database under the hand: verbs are run in steps of the test's own, on a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import apsw

from fluxmesh.clock import ManualClock
from fluxmesh.job import Job, Status
from fluxmesh.outcome import Transition
from fluxmesh.query import Page, Query, parse_query
from fluxmesh.storage.sqlite import exchange, liveness, reads
from fluxmesh.storage.sqlite.bells import Belfry
from fluxmesh.storage.sqlite.connection import connect, prepare_schema
from fluxmesh.storage.sqlite.enqueue import enqueue
from fluxmesh.storage.sqlite.sqltext import Statements
from fluxmesh.storage.sqlite.step import Shared, Step
from fluxmesh.storage.values import (
    ClaimedJob,
    ExchangeAnswer,
    ExchangeRequest,
    Registration,
    Settle,
    Settled,
    TaskSpec,
    Verdict,
    WorkerRef,
)
from fluxmesh.submission import prepare

LEASE_S = 6.0
BEAT_S = 2.0
T = TypeVar("T")


class Bench:
    """One namespace of one file: a writer's connection, a reader's connection, a manual clock."""

    def __init__(self, folder: Path, namespace: str = "fluxmesh") -> None:
        self.path = folder / "jobs.db"
        self.clock = ManualClock()
        self.sql = Statements(namespace)
        self.db = connect(self.path, durability="process", create=True)
        prepare_schema(self.db, self.sql, self.path)
        self.reader = connect(self.path, durability="process")
        self.belfry = Belfry(folder / "jobs.db-bells")
        self.shared = Shared(self.sql, self.clock, self.belfry, proof_of_death=True, lease_s=LEASE_S)
        self.rung: list[tuple[str, bytes]] = []
        self._requests = 0

    def close(self) -> None:
        self.reader.close()
        self.db.close()
        self.belfry.close()

    def run(self, verb: Callable[..., T], *args: Any) -> T:
        """A write verb in a transaction of its own. The rings it asked for are kept in `rung`."""
        with self.db:
            step = Step(self.db, self.shared)
            answer = verb(step, *args)
            self.rung += step.finish()
        return answer

    def read(self, verb: Callable[..., T], *args: Any) -> T:
        with self.reader:
            return verb(self.reader, self.sql, *args)

    def rows(self) -> dict[str, int]:
        """Rows of every table but <meta>."""
        names = [row[0] for row in self.db.execute("select name from sqlite_schema where type = 'table'")]
        kept = [name for name in names if not name.endswith(":meta")]
        return {
            name.partition(":")[2]: next(self.db.execute(f'select count(*) from "{name}"'))[0]
            for name in kept
        }

    def set(self, job_id: str, **columns: Any) -> None:
        """Overwrite columns past all verbs."""
        for name, value in columns.items():
            self.db.execute(f'update "{self.sql.namespace}:job" set {name} = ? where id = ?', (value, job_id))

    # -- jobs ------------------------------------------------------------------------------------------
    def put(self, task: str = "work", *args: Any, **fields: Any) -> str:
        job = prepare({"task": task, **fields}).job(args, {})
        (answer,) = self.run(enqueue, [job], 1_000_000)
        assert answer.verdict is Verdict.CREATED, answer
        return job.id

    def put_many(self, count: int, task: str = "work", **fields: Any) -> list[str]:
        template = prepare({"task": task, **fields})
        jobs = [template.job((index,), {}) for index in range(count)]
        self.run(enqueue, jobs, 1_000_000)
        return [job.id for job in jobs]

    def job(self, job_id: str) -> Job:
        job = self.read(reads.get, job_id)
        assert job is not None
        return job

    def status(self, job_id: str) -> Status:
        return self.job(job_id).status

    def find(self, q: str | Query = "", cursor: str | None = None, limit: int = 50) -> Page[Job]:
        query = parse_query(q) if isinstance(q, str) else q
        return self.read(reads.find, query, cursor, limit)

    def found(self, q: str | Query = "", limit: int = 50) -> list[str]:
        """Ids of all pages."""
        ids: list[str] = []
        cursor: str | None = None
        for _ in range(1_000):
            page = self.find(q, cursor, limit)
            ids += [job.id for job in page.items]
            cursor = page.next_cursor
            if cursor is None:
                return ids
        raise AssertionError("the cursor does not come to an end")

    # -- workers ---------------------------------------------------------------------------------------
    def worker(
        self,
        worker_id: str = "w1",
        *,
        tasks: tuple[TaskSpec | str, ...] = ("work",),
        queues: tuple[str, ...] = ("default",),
        bell: str | None = None,
        lock: str | None = None,
    ) -> WorkerRef:
        specs = tuple(TaskSpec(task) if isinstance(task, str) else task for task in tasks)
        registration = Registration(worker_id, queues, (0, 1, 2, 3), specs, 8, LEASE_S, BEAT_S, "host", 77)
        return WorkerRef(worker_id, self.run(liveness.register, registration, bell, lock))

    def exchange(self, worker: WorkerRef, **parts: Any) -> ExchangeAnswer:
        self._requests += 1
        return self.run(exchange.exchange, ExchangeRequest(worker, self._requests, **parts))

    def claim(self, worker: WorkerRef, slots: int = 1) -> list[ClaimedJob]:
        return list(self.exchange(worker, slots=slots).running)

    def hold(self, worker: WorkerRef, extra: int = 1) -> list[ClaimedJob]:
        return list(self.exchange(worker, extra=extra).held)

    def settle(self, worker: WorkerRef, job: ClaimedJob, transition: Transition) -> Settled:
        return self.exchange(worker, settle=(Settle(job.id, job.token, transition),)).settled[0]


def tables(db: apsw.Connection) -> set[str]:
    return {row[0] for row in db.execute("select name from sqlite_schema where type = 'table'")}
