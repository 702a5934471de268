"""A redis-server of the tests' own: on a free port, in a folder that is thrown away, ended by its pid."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

UP_S: Final = 10.0
PROGRAM_ENV: Final = "FLUXMESH_TEST_REDIS_PROGRAM"  # another server than the one on PATH


def program() -> str:
    """The server's path; the test is skipped where there is none."""
    named = os.environ.get(PROGRAM_ENV)
    if named:
        if shutil.which(named) is None:
            raise FileNotFoundError(f"{PROGRAM_ENV} names {named!r}, which is no program")
        return named
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        pytest.skip("no redis-server on this machine")
    return found


def free_port() -> int:
    """Below 55,536: the node of a cluster listens 10,000 higher as well."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_536:
            return port
    raise OSError("no free port")


class Server:
    def __init__(self, folder: Path, *options: str) -> None:
        self.redis = pytest.importorskip("redis", reason="the Redis backend needs the extra [redis]")
        self.port = free_port()
        self.folder = folder
        self.options = options
        self.start()

    def start(self) -> None:
        """Start it, also once more on the same port, and wait until it answers."""
        command = [program(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no", *self.options]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + UP_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), UP_S):
                    return
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    self.stop()
                    raise
                time.sleep(0.01)

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def client(self, database: int = 0):  # type: ignore[no-untyped-def]
        return self.redis.Redis(port=self.port, db=database)

    def version(self) -> str:
        with self.client() as client:
            return str(client.info("server")["redis_version"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(UP_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)  # one that a test has stopped cannot end
            self.process.terminate()
            self.process.wait(UP_S)


@pytest.fixture(scope="module", name="server")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests of a module that imports this; each leaves it running and set up as it was."""
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
