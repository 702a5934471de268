"""The contract suite, bound to Redis: one server for the run, one database per test."""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
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

redis = pytest.importorskip("redis", reason="the Redis backend needs the extra [redis]")

UP_S: Final = 10.0
DATABASES: Final = 16
_ELEMENTS: Final = {b"zset": "ZCARD", b"hash": "HLEN", b"set": "SCARD", b"list": "LLEN"}


class Server:
    """A redis-server of our own."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        with (folder / "redis.log").open("wb") as log:
            self.process = subprocess.Popen([*command, "--dir", str(folder)], stdout=log, stderr=log)
        client = self.client(0)
        deadline = time.monotonic() + UP_S
        while True:
            try:
                self.version = client.info("server")["redis_version"]
                break
            except redis.exceptions.ConnectionError:
                if time.monotonic() > deadline:
                    self.stop()
                    raise
                time.sleep(0.01)
        client.close()

    def client(self, database: int) -> redis.Redis:
        return redis.Redis(port=self.port, db=database)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(UP_S)


class RedisBackend(Backend):
    lease_clock: Literal["boot", "wall"] = "wall"
    kept_tables = {  # noqa: RUF012
        "counters": "a fixed number of fields: sequences, totals, the fleet's last beat",
        "lock": "who keeps house, and until when",
    }

    def __init__(self, server: Server, database: int) -> None:
        self.url = f"redis://127.0.0.1:{server.port}/{database}"
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


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server on this machine")
    server = Server(program, tmp_path_factory.mktemp("redis"))
    print(f"redis-server {server.version}, pid {server.process.pid}, port {server.port}")
    yield server
    server.stop()


_databases = itertools.count()


@pytest.fixture
def backend(redis_server: Server) -> Iterator[RedisBackend]:
    backend = RedisBackend(redis_server, next(_databases) % DATABASES)
    yield backend
    backend.client.close()
