"""One child process of a supervisor, with what is between them: two pipes and a ledger.

* Its standard input never carries a byte: its end of file tells the child that the supervisor is gone.
* `--report-fd N` (appended to its arguments) takes JSON lines from the child: {"epoch": 17} when it has
  registered, {"ready": true} when it takes jobs, {"ended": true, "left_running": N} when its worker has come
  to its end, but for so many bodies, which end with the process, {"hopeless": true} when it ends by what no
  other child would fare better with.
* `--ledger-fd N` (appended too) is a file that the child writes its signs of life into (ledger.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from fluxmesh.obs.log import Logger
from fluxmesh.worker.ledger import LEDGER_FLAG, LedgerReader, make_ledger_file

if sys.platform == "linux":
    import fcntl

REPORT_FLAG: Final = "--report-fd"
MAX_LINE_BYTES: Final = 16 << 10
_READ_BYTES: Final = 64 << 10


class ChildSpec(Struct, frozen=True):
    """How to start a child. `env` None: the supervisor's own environment."""

    worker_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str] | None = None


class Report(Struct, frozen=True):
    """One line of a child. Fields that this version does not know are left for later ones."""

    epoch: int | None = None
    ready: bool = False
    ended: bool = False
    left_running: int = 0
    hopeless: bool = False


_decode = msgspec.json.Decoder(Report).decode


class ChildProcess:
    """A running child. `epoch`, `ready`, `ended`, `left_running`, `hopeless` are what it has reported; final
    once `wait` is over."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        *,
        stdin_fds: tuple[int, int],
        report_fd: int,
        ledger: LedgerReader,
        log: Logger,
        on_ready: Callable[[], object],
    ) -> None:
        self.pid = process.pid
        self.ledger = ledger
        self.epoch: int | None = None
        self.ready = False
        self.ended = False
        self.left_running = 0
        self.hopeless = False
        self._process = process
        self._stdin_fds = stdin_fds  # its own end, and ours
        self._dies_with_us = False
        self._report_fd = report_fd
        self._log = log
        self._on_ready = on_ready
        self._pending = bytearray()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(report_fd, False)
        self._loop.add_reader(report_fd, self._read)

    @classmethod
    async def spawn(cls, spec: ChildSpec, *, log: Logger, on_ready: Callable[[], object]) -> ChildProcess:
        """Start it, in this process's group. Raises OSError; then nothing was started."""
        ledger = LedgerReader(make_ledger_file())
        child_stdin, stdin_fd = os.pipe()
        report_fd, child_report = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                *(LEDGER_FLAG, str(ledger.fd)),
                *(REPORT_FLAG, str(child_report)),
                stdin=child_stdin,
                pass_fds=(child_report, ledger.fd),
                env=None if spec.env is None else dict(spec.env),
            )
        except BaseException:
            _close(child_stdin, stdin_fd, report_fd)
            ledger.close()
            raise
        finally:
            _close(child_report)
        return cls(
            process,
            stdin_fds=(child_stdin, stdin_fd),
            report_fd=report_fd,
            ledger=ledger,
            log=log,
            on_ready=on_ready,
        )

    def send(self, number: signal.Signals) -> None:
        """Signal it, unless it has ended."""
        if self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                pass  # it ended a moment ago; `wait` will tell

    def die_with_us(self, *, yes: bool) -> None:
        """While this holds, the kernel kills the child at the death of this process: for one that could not
        notice it, whose lease nobody would keep. Only on Linux.

        The end of its standard input is one open file here and there, so its owner and signal (fcntl(2),
        F_SETOWN and F_SETSIG) can be set from here, and the kernel sends it when the last writer is gone:
        we."""
        if yes == self._dies_with_us or sys.platform != "linux" or self._process.returncode is not None:
            return
        self._dies_with_us = yes
        read_fd = self._stdin_fds[0]
        flags = fcntl.fcntl(read_fd, fcntl.F_GETFL)
        if yes:
            fcntl.fcntl(read_fd, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(read_fd, fcntl.F_SETOWN, self.pid)
            fcntl.fcntl(read_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
        else:
            fcntl.fcntl(read_fd, fcntl.F_SETFL, flags & ~os.O_ASYNC)

    async def wait(self) -> int:
        """Its exit status, or minus the signal that killed it. Takes what it reported last, then closes
        the pipes: a grandchild may hold on to its ends, and is not waited for. The ledger is left to be
        closed."""
        try:
            code = await self._process.wait()
            self._read()
            return code
        finally:
            self._loop.remove_reader(self._report_fd)
            _close(self._report_fd, *self._stdin_fds)

    def _read(self) -> None:
        try:
            data = os.read(self._report_fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._log.warning("report pipe failed", error=str(error))
            data = b""
        if not data:
            self._loop.remove_reader(self._report_fd)
            return
        self._pending += data
        *lines, rest = self._pending.split(b"\n")
        self._pending = rest if len(rest) <= MAX_LINE_BYTES else bytearray()
        for line in lines:
            self._take(bytes(line))

    def _take(self, line: bytes) -> None:
        try:
            report = _decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._log.warning("report not understood", error=str(error), line=repr(line[:200]))
            return
        if report.epoch is not None:
            self.epoch = report.epoch
        if report.ready and not self.ready:
            self.ready = True
            self._on_ready()
        self.ended = self.ended or report.ended
        self.hopeless = self.hopeless or report.hopeless
        self.left_running = report.left_running or self.left_running


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
