"""Inside a body process: the thread that reads the pipe while a body runs on the main thread.

It stops the body when the worker says so, sends its progress, and ends the process when the worker is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import msgspec

from fluxmesh.context import Context
from fluxmesh.obs.log import get_logger
from fluxmesh.outcome import JobInterrupted, JobTimeout
from fluxmesh.worker.isolated.frames import (
    Ended,
    FromBody,
    Inflow,
    Start,
    Started,
    Stop,
    Told,
    framed,
    from_worker,
)
from fluxmesh.worker.threads import Interruption, ThreadCall

CLOSE_S: Final = 5.0  # to close resources once the worker wants this process to end
TELL_EVERY_S: Final = 0.05
_READ_BYTES: Final = 256 << 10
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_GONE: Final = 1
_log = get_logger("worker")
Handle = ThreadCall | asyncio.Task[Any]


def be_deaf(_number: int, _frame: FrameType | None) -> None:
    """What a process manager or a terminal sends to the whole group is for the worker to answer. A function,
    and not SIG_IGN: programs that the body starts would inherit that, and a blocking call would not end."""


def install_signals() -> None:
    """On the main thread. Cheap where they are in place."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not be_deaf:
            signal.signal(number, be_deaf)


class Control:
    """`deliver` takes each job, and None at the end; it is called on the control thread."""

    def __init__(self, sock: socket.socket, deliver: Callable[[Start | None], None]) -> None:
        self._sock = sock
        self._deliver = deliver
        self._sending = threading.Lock()
        self._inflow = Inflow()
        self._lock = threading.Lock()  # what follows is changed by both threads
        self._token = 0  # of the job that is here
        self._context: Context | None = None
        self._handle: Handle | None = None
        self._asked: list[Interruption] = []
        self._main = threading.main_thread().ident or 0
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def start(self) -> None:
        threading.Thread(target=self._serve, name="fluxmesh-control", daemon=True).start()

    # -- the main thread -----------------------------------------------------------------------------------
    def admit(self, context: Context) -> None:
        """The job's body is about to begin."""
        with self._lock:
            self._context = context
            if self._asked:
                context.mark_cancelled()
        self.send(Started(context.token))

    def enter(self, handle: Handle) -> None:
        """From now on this is what is stopped. What was asked before is asked of it now."""
        with self._lock:
            self._handle = handle
            for kind in self._asked:
                self._interrupt(handle, kind)

    def leave(self) -> None:
        """It has ended."""
        with self._lock:
            self._handle = None

    def finish(self, message: Ended) -> None:
        """Tell of the end of the job: the last that is said of it."""
        with self._lock:
            self._token = 0
            self._context = None
            self._asked.clear()
        self.send(message)

    def send(self, message: FromBody) -> None:
        try:
            with self._sending:
                self._sock.sendall(framed(message))
        except OSError:
            os._exit(_GONE)  # nobody is left to hear of it

    def notify(self, _context: Context) -> None:
        """There is progress to send. Any thread; never blocks."""
        wake = self._wake_w
        if wake >= 0:
            with contextlib.suppress(OSError):  # full: it is awake already
                os.write(wake, b"x")

    # -- the control thread --------------------------------------------------------------------------------
    def _serve(self) -> None:
        try:
            self._listen()
        except (OSError, ValueError) as error:  # a body has closed descriptors that are not its own
            what = f"{type(error).__name__}: {error}"
            _log.error("body process ends: it cannot hear its worker any more", pid=os.getpid(), error=what)
            os._exit(_GONE)

    def _listen(self) -> None:
        resting = False  # after a progress report, for a moment
        while True:
            heard: list[Any] = [self._sock] if resting else [self._sock, self._wake_r]
            ready, _, _ = select.select(heard, [], [], TELL_EVERY_S if resting else None)
            resting = resting and bool(ready)
            if self._wake_r in ready:
                os.read(self._wake_r, _READ_BYTES)
                self._tell_progress()
                resting = True
            if self._sock in ready and not self._read():
                return self._end()

    def _read(self) -> bool:
        """Take what the worker says. False: it is gone."""
        try:
            data = self._sock.recv(_READ_BYTES)
            for message in self._inflow.take(data, from_worker):
                if isinstance(message, Start):
                    with self._lock:
                        self._token = message.job.token
                    self._deliver(message)
                elif isinstance(message, Stop):
                    self._stop(message)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
            return False
        return bool(data)

    def _tell_progress(self) -> None:
        with self._lock:
            context = self._context
        latest = context.collect() if context is not None else None
        if context is not None and latest is not None:
            self.send(Told(context.token, latest[0], latest[1]))

    def _stop(self, message: Stop) -> None:
        with self._lock:
            if message.token != self._token:
                return
            kind: Interruption = JobTimeout if message.timeout else JobInterrupted
            self._asked.append(kind)
            if self._handle is not None:
                self._interrupt(self._handle, kind)
            # After the exception: a body that polls the flag shall not return before it comes.
            if self._context is not None:
                self._context.mark_cancelled()

    def _interrupt(self, handle: Handle, kind: Interruption) -> None:
        if isinstance(handle, asyncio.Task):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                handle.get_loop().call_soon_threadsafe(handle.cancel)
        elif handle.interrupt(kind) and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            # A call that blocks in the kernel ends with the signal, and meets the exception.
            signal.pthread_kill(self._main, signal.SIGTERM)

    def _end(self) -> None:
        """The worker has closed the pipe, or is gone."""
        with self._lock:
            busy = self._token != 0
        if busy:
            os._exit(_GONE)
        self._deliver(None)
        threading.Event().wait(CLOSE_S)
        os._exit(_GONE)

    def _leave_to_parent(self) -> None:
        """In a process that a body has forked: it has no part in this, and its signals are its own."""
        self._wake_w = -1
        with contextlib.suppress(OSError, ValueError):
            self._sock.close()
            for number in _SIGNALS:
                if signal.getsignal(number) is be_deaf:
                    signal.signal(number, signal.SIG_DFL)
