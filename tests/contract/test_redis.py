"""The contract suite, bound to Redis: one server for the run, one database per test."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal

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
from tests.redis_server import Server

DATABASES: Final = 16
_ELEMENTS: Final = {b"zset": "ZCARD", b"hash": "HLEN", b"set": "SCARD", b"list": "LLEN"}


class RedisBackend(Backend):
    lease_clock: Literal["boot", "wall"] = "wall"
    kept_tables = {  # noqa: RUF012
        "counters": "a fixed number of fields: sequences, totals, the fleet's last beat",
        "lock": "who keeps house, and until when",
    }

    def __init__(self, server: Server, database: int) -> None:
        self.url = server.url(database)
        self.client = server.client(database)
        self.client.flushdb()

    async def open(
        self, clock: Clock, *, namespace: str = "fluxmesh", settings: Settings | None = None
    ) -> Storage:
        settings = msgspec.structs.replace(settings or Settings(), namespace=namespace)
        return await open_storage(self.url, settings, create=True, clock=clock)

    def rows(self, namespace: str = "fluxmesh") -> dict[str, int]:
        found: Counter[str] = Counter()
        for name in self.client.scan_iter(f"{namespace}:*", count=1_000):
            kind = name.decode().split(":")[1]
            count = _ELEMENTS.get(self.client.type(name))
            is_record = kind in ("jobs", "worker", "idempotency")
            found[kind] += 1 if is_record or count is None else self.client.execute_command(count, name)
        return dict(found)

    def corrupt(self, job_id: str, field: CorruptField, blob: bytes, namespace: str = "fluxmesh") -> None:
        name = f"{namespace}:jobs:{job_id}"
        assert self.client.exists(name), name
        self.client.hset(name, field, blob)

    def forget_worker(self, worker: WorkerRef, namespace: str = "fluxmesh") -> None:
        assert self.client.delete(f"{namespace}:worker:{worker.epoch}") == 1
        self.client.hdel(f"{namespace}:workers", str(worker.epoch))


class TestRandomVerbs(AllRandomVerbs):
    """The first of them; all, and many more, are slow."""

    def test_random_verbs_agree_with_a_brute_force_walk_and_a_simple_model(self, backend: Backend) -> None:
        play(backend, examples=20, steps=60)


@pytest.fixture(scope="session")
def redis_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    told = f"redis-server {server.version()}, pid {server.process.pid}, port {server.port}"
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{told}")
    yield server
    server.stop()


_databases = itertools.count()


@pytest.fixture
def backend(redis_server: Server) -> Iterator[RedisBackend]:
    backend = RedisBackend(redis_server, next(_databases) % DATABASES)
    yield backend
    backend.client.close()
