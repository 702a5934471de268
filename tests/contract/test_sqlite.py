"""The contract suite, bound to SQLite: one file per test."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import apsw
import msgspec
import pytest

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import WorkerRef
from fluxmesh.testing.contract import *  # noqa: F403
from fluxmesh.testing.contract import Backend, CorruptField
from fluxmesh.testing.contract.machine import TestRandomVerbs as AllRandomVerbs
from fluxmesh.testing.contract.machine import play


class SqliteBackend(Backend):
    lease_clock: Literal["boot", "wall"] = "boot"
    kept_tables = {}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        self.path = folder / "contract.db"

    async def open(
        self, clock: Clock, *, namespace: str = "fluxmesh", settings: Settings | None = None
    ) -> Storage:
        settings = msgspec.structs.replace(settings or Settings(), namespace=namespace)
        return await open_storage(f"sqlite:///{self.path}", settings, create=True, clock=clock)

    def _do(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        db = apsw.Connection(str(self.path))
        try:
            db.set_busy_timeout(5_000)
            rows = list(db.execute(sql, values))
            assert not sql.startswith(("update", "delete")) or db.changes() == 1, sql
            return rows
        finally:
            db.close()

    def rows(self, namespace: str = "fluxmesh") -> dict[str, int]:
        tables = self._do(
            "select name from sqlite_schema where type = 'table' and name like ?", f"{namespace}:%"
        )
        return {
            str(name).partition(":")[2]: int(str(self._do(f'select count(*) from "{name}"')[0][0]))
            for (name,) in tables
        }

    def corrupt(self, job_id: str, field: CorruptField, blob: bytes, namespace: str = "fluxmesh") -> None:
        self._do(f'update "{namespace}:job" set {field} = ? where id = ?', blob, job_id)

    def forget_worker(self, worker: WorkerRef, namespace: str = "fluxmesh") -> None:
        self._do(f'delete from "{namespace}:worker" where epoch = ?', worker.epoch)


class TestRandomVerbs(AllRandomVerbs):
    """The first of them; all, and many more, are slow."""

    def test_random_verbs_agree_with_a_brute_force_walk_and_a_simple_model(self, backend: Backend) -> None:
        play(backend, examples=25, steps=60)


@pytest.fixture
def backend(tmp_path: Path) -> SqliteBackend:
    return SqliteBackend(tmp_path)
