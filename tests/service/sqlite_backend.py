"""A SQLite file of one test, with its back door, for scenarios on the bench of the contract suite."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Literal

import apsw

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import WorkerRef
from fluxmesh.testing.contract.harness import NAMESPACE, Backend, CorruptField


class SqliteFile(Backend):
    lease_clock: Literal["boot", "wall"] = "boot"

    def __init__(self, path: Path) -> None:
        self._path = path

    async def open(
        self, clock: Clock, *, namespace: str = NAMESPACE, settings: Settings | None = None
    ) -> Storage:
        chosen = settings or Settings(namespace=namespace)
        return await open_storage(f"sqlite:///{self._path}", chosen, create=True, clock=clock)

    def rows(self, namespace: str = NAMESPACE) -> dict[str, int]:
        with closing(self._direct()) as db:
            names = [name for (name,) in db.execute("select name from sqlite_schema where type = 'table'")]
            own = [name for name in names if name.startswith(f"{namespace}:")]
            return {name: next(db.execute(f'select count(*) from "{name}"'))[0] for name in own}

    def corrupt(self, job_id: str, field: CorruptField, blob: bytes, namespace: str = NAMESPACE) -> None:
        with closing(self._direct()) as db:
            db.execute(f'update "{namespace}:job" set {field} = ? where id = ?', (blob, job_id))
            assert db.changes() == 1

    def forget_worker(self, worker: WorkerRef, namespace: str = NAMESPACE) -> None:
        with closing(self._direct()) as db:
            db.execute(f'delete from "{namespace}:worker" where epoch = ?', (worker.epoch,))
            assert db.changes() == 1

    def _direct(self) -> apsw.Connection:
        # The storage's own driver: a second SQLite library in one process would break the first one's locks.
        db = apsw.Connection(str(self._path))
        db.set_busy_timeout(5_000)
        return db
