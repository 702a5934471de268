"""The program's side of its keeper: starts it, hands it its orders, listens to what it says, and starts
another when it is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from fluxmesh.clock import system_clock
from fluxmesh.config import Settings
from fluxmesh.obs.log import get_logger
from fluxmesh.worker.deaths import STABLE_AFTER_S, how_ended, restart_delay_s
from fluxmesh.worker.ledger import LEDGER_FLAG, LedgerReader, make_ledger_file

if TYPE_CHECKING:
    from fluxmesh.worker.worker import Worker

_log = get_logger("worker")
READY: Final = "ready"  # the first line that it says
START_AFTER_S: Final = 0.5  # no lease is so short that it would be needed sooner
LINE_MOST_BYTES: Final = 2_000
LINES_MOST: Final = 100  # that it may say in its life; the rest is dropped


class KeeperProcess:
    """A keeper of one worker, and after its death another, for as long as the worker lives. Whatever hinders
    it is logged and harms nobody: the worker's own beats are what its jobs rely on, as long as a body lets
    them be sent.

    `begin` before the worker starts, `start` after it, `close` when it has ended; no call waits.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        self._orders: Final = {"pid": os.getpid(), "url": url, "settings": settings}
        self._ledger_fd = -1
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, worker: Worker) -> None:
        """Let the worker write what the keeper reads."""
        try:
            self._ledger_fd = make_ledger_file()
            worker.write_ledger(self._ledger_fd)
        except (OSError, ValueError) as error:
            _log.warning("no keeper: its ledger cannot be made", error=str(error))
            self._close_ledger()

    def start(self) -> None:
        """Start the process, on a thread: nothing waits for it. A worker that ends at once has none."""
        if self._ledger_fd >= 0:
            threading.Thread(target=self._live, name="fluxmesh-keeper", daemon=True).start()

    def close(self) -> None:
        """Tell it to go."""
        with self._lock:
            self._closed.set()
            self._close_ledger()
            if self._process is not None:
                _close_input(self._process)

    def _live(self) -> None:
        failures, delay_s, clock = 0, START_AFTER_S, system_clock()
        while not self._closed.wait(delay_s):
            began_s = clock.mono_s()
            try:
                how = self._live_once()
            except OSError as error:
                how = str(error)
            if how is None:
                break
            failures = failures_after(failures, clock.mono_s() - began_s)
            delay_s = restart_delay_s(failures)
            if not self._closed.is_set():
                _log.warning("no keeper: another will be started", why=how, delay_s=delay_s)
        with self._lock:
            self._close_ledger()

    def _worker_lives(self) -> bool:
        """A worker is registered before it has a keeper, so that one that is not has ended."""
        ledger = LedgerReader(os.dup(self._ledger_fd))
        try:
            return ledger.vitals() is not None
        finally:
            ledger.close()

    def _live_once(self) -> str | None:
        """One process from its start to its end. How it ended before its time; None: there is nothing more to
        be done. Raises OSError if it cannot be started."""
        with self._lock:
            if self._closed.is_set() or not self._worker_lives():
                return None
            process = self._process = self._spawn()
        self._listen(process)
        code = process.wait()
        with self._lock:
            self._process = None
            _close_input(process)
        return how_ended(code) if code else None

    def _spawn(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fluxmesh.worker.keeper", LEDGER_FLAG, str(self._ledger_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(self._ledger_fd,),
            env=_environ(),
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which its status will tell
            process.stdin.write(msgspec.json.encode(self._orders) + b"\n")
            process.stdin.flush()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Until it has said everything, which is when it has ended."""
        assert process.stderr is not None
        with process.stderr as said:
            lines = 0
            while line := said.readline(LINE_MOST_BYTES):
                lines += 1
                text = line.decode("utf-8", "replace").rstrip()
                if lines == 1 and text == READY:
                    _log.info("keeper ready", pid=process.pid)
                elif lines <= LINES_MOST:
                    _log.warning("the keeper says", line=text)

    def _close_ledger(self) -> None:
        fd, self._ledger_fd = self._ledger_fd, -1
        if fd >= 0:
            os.close(fd)


def failures_after(failures: int, lived_s: float) -> int:
    """Short lives running, after one more life: a long one starts the back-off anew."""
    return 1 if lived_s >= STABLE_AFTER_S else failures + 1


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # what it was never told
            process.stdin.close()


def _environ() -> Mapping[str, str]:
    """Ours, with what we import from: a program may have been started with a path of its own."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
