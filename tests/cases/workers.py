"""Real worker processes: started in a session of their own, killed as a whole, and seen to be gone."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
APP: Final = "tests.cases.app:queue"
APART: Final = ("--app", "tests.cases.isolated_app:queue")  # flags of a worker that isolates bodies
_LISTENS: Final = re.compile(r"^server: (http://\S+) ", re.MULTILINE)
_GONE_S: Final = 10.0
_PR_SET_CHILD_SUBREAPER: Final = 36
_DIRECT: Final = (
    "import sys; from fluxmesh.obs.log import configure; from tests.cases.app import queue;"
    "configure('info', 'text');"
    "queue.run_worker(sys.argv[3:] or ['default'], worker_id=sys.argv[1], concurrency=int(sys.argv[2]))"
)


def adopt_orphans(*, yes: bool) -> None:
    """Become (or stop being) the parent of descendants whose parent dies, so that their ends are seen."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


class Group:
    """A process that leads a group of its own, and everything it started in it."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], folder: Path, log: Path) -> None:
        self.log = log
        with log.open("ab") as written:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                env=dict(env),
                cwd=folder,
                start_new_session=True,
            )
        self.pid: Final = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def tell(self, number: signal.Signals = signal.SIGTERM) -> None:
        """A signal to the leader alone, as a service manager sends it."""
        os.kill(self.pid, number)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, within_s: float) -> int:
        """The leader's exit status."""
        return self._process.wait(within_s)

    def kill(self) -> dict[int, int]:
        """`kill -9` of the whole group. The signal that ended each of its processes, by pid; 0 = none. One
        whose status its own parent took while dying is missing. None of the group is left."""
        ended: dict[int, int] = {}
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            ended[self.pid] = max(0, -self._process.wait(_GONE_S))
        else:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return ended
        return {**ended, **self._reap()}

    def _reap(self) -> dict[int, int]:
        """The rest of the group, orphaned and so adopted: none of it is left afterwards."""
        ended: dict[int, int] = {}
        deadline = time.monotonic() + _GONE_S
        while time.monotonic() < deadline:
            try:
                pid, status = os.waitpid(-self.pid, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                time.sleep(0.005)
                continue
            ended[pid] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return ended
        raise AssertionError(f"processes of group {self.pid} are left")


class WorkerGroup(Group):
    """`fluxmesh worker`: a supervisor and its children."""

    def __init__(
        self,
        worker_id: str,
        flags: Sequence[str],
        *,
        concurrency: int,
        env: Mapping[str, str],
        folder: Path,
    ) -> None:
        self.worker_id: Final = worker_id
        argv = [sys.executable, "-m", "fluxmesh.cli", "worker", "--app", APP, "--id", worker_id]
        argv += ["--concurrency", str(concurrency), *flags]
        super().__init__(argv, env=env, folder=folder, log=folder / f"{worker_id}.log")


class ApiServer(Group):
    """`fluxmesh server`, the API alone. `url` once it listens."""

    def __init__(self, name: str, *, env: Mapping[str, str], folder: Path) -> None:
        argv = [sys.executable, "-m", "fluxmesh.cli", "server", "--no-standalone", "--port", "0"]
        super().__init__(argv, env=env, folder=folder, log=folder / f"{name}.log")

    @property
    def url(self) -> str | None:
        found = _LISTENS.search(self.log.read_text("utf-8"))
        return found[1] if found else None


class DirectWorker(Group):
    """A program that calls `queue.run_worker()`: the process that runs the bodies is the test's own child."""

    def __init__(
        self,
        worker_id: str,
        queues: Sequence[str] = (),
        *,
        concurrency: int,
        env: Mapping[str, str],
        folder: Path,
    ) -> None:
        self.worker_id: Final = worker_id
        argv = [sys.executable, "-c", _DIRECT, worker_id, str(concurrency), *queues]
        super().__init__(argv, env=env, folder=folder, log=folder / f"{worker_id}.log")
