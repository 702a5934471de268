"""The demo's workers: `fluxmesh worker --processes 2`, as anybody would start it, in a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from fluxmesh.config import ENV_PREFIX, TEST_PREFIX
from fluxmesh.errors import FluxMeshError
from fluxmesh.storage.base import Storage

PROCESSES: Final = 2
CONCURRENCY: Final = 4
READY_MOST_S: Final = 30.0
STOP_MOST_S: Final = 15.0
_LOOK_S: Final = 0.05
_LOG_TAIL: Final = 2_000


class Crew:
    """The running worker command. Its standard input is a pipe: when the demo dies, the workers end too."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    def check(self) -> None:
        """Raises FluxMeshError if the command has ended."""
        if self._process.returncode is not None:
            raise FluxMeshError(
                f"the workers ended early, exit {self._process.returncode}: {self.last_words()}",
                hint="`fluxmesh doctor` may tell why",
            )

    def last_words(self) -> str:
        try:
            return self._log.read_text("utf-8", "replace")[-_LOG_TAIL:].strip()
        except OSError:
            return ""

    async def wait_until_ready(self, storage: Storage) -> list[int]:
        """Process ids of the workers once all have registered."""
        for _ in range(round(READY_MOST_S / _LOOK_S)):
            self.check()
            fleet = await storage.fleet()
            mine = [worker.pid for worker in fleet if worker.worker_id.startswith(f"{self.name}.")]
            if len(mine) == PROCESSES:
                return mine
            await asyncio.sleep(_LOOK_S)
        raise FluxMeshError(
            f"the workers did not come up in {READY_MOST_S:g} s: {self.last_words()}",
            hint="is this machine busy?",
        )

    async def stop(self) -> None:
        """One SIGTERM, as a service manager would; all processes are gone afterwards."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_MOST_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()


@contextlib.asynccontextmanager
async def crew(url: str, namespace: str, queue: str, name: str, folder: Path) -> AsyncIterator[Crew]:
    """The workers, started; stopped at the end whatever happens."""
    argv = [sys.executable, "-m", "fluxmesh.cli", "worker", "--namespace", namespace]
    argv += ["--queues", queue, "--processes", str(PROCESSES), "--concurrency", str(CONCURRENCY)]
    argv += ["--id", name, "--builtins", "--stop-at-eof"]
    ours = {key: value for key, value in os.environ.items() if not _is_setting(key)}
    ours[f"{ENV_PREFIX}URL"] = url  # it may hold a password, which everybody can read off a command line
    log = folder / "workers.log"
    with log.open("wb") as written:
        # The folder is the demo's own, so that no fluxmesh.toml of the user's steers these workers.
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=written,
            stderr=written,
            cwd=folder,
            env=ours,
            start_new_session=True,
        )
    running = Crew(process, name, log)
    try:
        yield running
    finally:
        await asyncio.shield(running.stop())


def _is_setting(key: str) -> bool:
    return key.startswith(ENV_PREFIX) and not key.startswith(TEST_PREFIX)
