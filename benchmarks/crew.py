"""Processes of a benchmark: each is started for one measurement and stopped by its pid at the end of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.figures import CheckFailed

STOP_S: Final = 20.0  # more than the grace and hard grace of a worker by default
APP: Final = "benchmarks.app:queue"
Environment = Mapping[str, str]


async def run_module(
    module: str, *arguments: str, environment: Environment, folder: Path, within_s: float
) -> bytes:
    """Run `python -m module` to its end; what it printed. Raises CheckFailed if it fails or takes longer."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        cwd=folder,
    )
    return await output_of(process, module, within_s)


async def output_of(process: asyncio.subprocess.Process, what: str, within_s: float) -> bytes:
    """Wait for a process with pipes to end, and kill it where that is not to be."""
    try:
        out, err = await asyncio.wait_for(process.communicate(), within_s)
    except TimeoutError:
        raise CheckFailed(f"{what} has not ended within {within_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise CheckFailed(f"{what} ended with {process.returncode}: {err.decode(errors='replace')[-600:]}")
    return out


class WorkerProcess:
    """`fluxmesh worker` as a user starts it: a supervisor and its children, with default settings but for
    what is said here. It also ends when this process does, by the end of its standard input."""

    def __init__(
        self,
        folder: Path,
        environment: Environment,
        *,
        worker_id: str = "bench",
        concurrency: int = 8,
        processes: int | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.worker_id = worker_id
        self._folder = folder
        self._environment = environment
        self._log = folder / f"{worker_id}.log"
        self._flags = ["--app", APP, "--id", worker_id, "--concurrency", str(concurrency)]
        self._flags += ["--log-format", "json", "--stop-at-eof"]
        if processes is not None:
            self._flags += ["--processes", str(processes)]
        self._flags += flags
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        with _opened_for_append(self._log) as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "fluxmesh.cli",
                "worker",
                *self._flags,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
            )

    def check_alive(self) -> None:
        if self._process is None or self._process.returncode is not None:
            code = None if self._process is None else self._process.returncode
            raise CheckFailed(f"worker {self.worker_id} has ended with {code}: {self.said()}")

    async def stop(self, *, failing: bool = False) -> None:
        """Let it drain. Raises CheckFailed if it does not end with 0, unless something failed already."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.kill()  # its children see the end of their standard input
                await process.wait()
        if process.returncode != 0 and not failing:
            raise CheckFailed(f"worker {self.worker_id} ended with {process.returncode}: {self.said()}")

    def said(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-600:] if self._log.exists() else ""


@contextlib.contextmanager
def _opened_for_append(path: Path) -> Any:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


class OwnerProcess:
    """benchmarks.owner: owns jobs until it is killed."""

    def __init__(self, folder: Path, environment: Environment, url: str, count: int) -> None:
        self._folder = folder
        self._environment = environment
        self._arguments = (url, str(count))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> tuple[int, int]:
        """How many jobs it owns, and its epoch."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.owner",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            cwd=self._folder,
        )
        assert self._process.stdout is not None
        text = await asyncio.wait_for(self._process.stdout.readline(), STOP_S)
        owned, epoch = map(int, text.split() or (0, 0))
        return owned, epoch

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def working(worker: WorkerProcess) -> AsyncIterator[WorkerProcess]:
    """A worker that is stopped at the end, and has to end well if nothing else failed."""
    failing = True
    try:
        await worker.start()
        yield worker
        failing = False
    finally:
        await worker.stop(failing=failing)


# -- processes as the kernel sees them -----------------------------------------------------------------


class Usage(msgspec.Struct, frozen=True):
    """CPU seconds of a process tree so far, ended children included, and its members."""

    cpu_s: float
    pids: tuple[int, ...]


def usage_of_tree(root: int) -> Usage:
    """What a process and all below it have used. Raises CheckFailed where the kernel does not tell."""
    if not Path("/proc/self/stat").exists():
        raise CheckFailed("this system has no /proc, from which the time of a process tree is read")
    stats = {pid: fields for pid in _pids() if (fields := _stat(pid)) is not None}
    if root not in stats:
        raise CheckFailed(f"process {root} has ended")
    tree = [root]
    for parent in tree:  # grows while it is walked
        tree += [pid for pid, fields in stats.items() if int(fields[1]) == parent]
    ticks = sum(int(stats[pid][field]) for pid in tree for field in (11, 12, 13, 14))
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), tuple(tree))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/pid/stat from the third (state) on; the name before them may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def is_gone(pid: int) -> bool:
    """True for a process that has ended, though its parent may not have heard of it yet."""
    fields = _stat(pid)
    return fields is None or fields[0] in "ZX"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
