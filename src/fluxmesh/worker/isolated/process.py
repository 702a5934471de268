"""One body process as its worker sees it: started, spoken to, weighed, killed, and seen to be gone."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from fluxmesh.obs.log import get_logger
from fluxmesh.worker.deaths import how_ended
from fluxmesh.worker.isolated.channel import Channel
from fluxmesh.worker.isolated.frames import (
    Broken,
    Ended,
    FromBody,
    FromWorker,
    Hello,
    Ready,
    Started,
    Told,
)
from fluxmesh.worker.isolated.source import BodySource

START_S: Final = 60.0  # to import the application
CLOSE_S: Final = 6.0  # to close resources, when it is told to end; it bounds that itself, a little tighter
PIPE_GONE_S: Final = 1.0  # a process that ends closes its pipe first
KILL_S: Final = 5.0  # for the kernel to end a killed process; longer only if a device does not answer
_POLL_S: Final = 0.02  # where the kernel has no descriptor for a process
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4_096
MB: Final = 1 << 20
_log = get_logger("worker")


class Listener(Protocol):
    """Who runs a job in a body process. Called on the loop."""

    token: int

    def on_started(self) -> None: ...
    def on_told(self, pct: float, message: str | None) -> None: ...
    def on_ended(self, ended: Ended) -> None: ...
    def on_death(self, how: str) -> None: ...


class BodyProcess:
    """`ready` becomes None once its tasks are loaded, else what hindered that; `gone`, how it ended in words.
    Everything here is called on the loop, in the thread that may not end before the process does: the kernel
    kills it then."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: BodySource,
        hello: Hello,
        on_gone: Callable[[BodyProcess], None],
    ) -> None:
        """Start it. Raises OSError; then nothing was started."""
        self.jobs = 0
        self.began: Final = loop.time()
        self.ready: asyncio.Future[str | None] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()
        self._loop = loop
        self._on_gone = on_gone
        self._listener: Listener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._why: str | None = None  # in words, where the exit status alone would mislead
        ours, theirs = socket.socketpair()
        try:
            argv = [*source.argv, str(theirs.fileno()), str(os.getpid())]
            self._popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid: Final = self._popen.pid
        self._channel = Channel(loop, ours, self._heard, self._lost)
        self._watch()
        self._channel.send(hello)

    def __repr__(self) -> str:
        return f"<BodyProcess {self.pid}>"

    @property
    def lives(self) -> bool:
        return not self.gone.done()

    # -- work ------------------------------------------------------------------------------------------
    def run(self, listener: Listener, message: FromWorker) -> None:
        """Hand it a job. The listener hears of it until it has ended, or the process has."""
        self._listener = listener
        self.jobs += 1
        self._channel.send(message)

    def send(self, message: FromWorker) -> None:
        self._channel.send(message)

    def _heard(self, message: FromBody) -> None:
        listener = self._listener
        match message:
            case Ready():
                self._be(None)
            case Broken(what=what):
                self._be(what)
            case Started(token=token) if listener is not None and listener.token == token:
                listener.on_started()
            case Told(token=token) if listener is not None and listener.token == token:
                listener.on_told(message.pct, message.message)
            case Ended(token=token) if listener is not None and listener.token == token:
                self._listener = None
                listener.on_ended(message)
            case _:
                pass  # of a job that is over

    def _be(self, hindrance: str | None) -> None:
        if not self.ready.done():
            self.ready.set_result(hindrance)

    def _lost(self, why: str) -> None:
        """Without the pipe it is of no more use; most often it is just ending."""

        def end() -> None:
            if self.lives:
                self._why = self._why or why
                self.kill()

        self._loop.call_later(PIPE_GONE_S, end)

    def rss_bytes(self) -> int | None:
        """Its resident memory; None where the kernel does not tell."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
        except (OSError, ValueError, IndexError):
            return None

    # -- its end -----------------------------------------------------------------------------------------
    def kill(self, why: str | None = None) -> None:
        """SIGKILL, unless it has ended. `why`: said of its end instead of the signal."""
        if self.lives:
            self._why = why or self._why
            self._popen.kill()

    async def close(self) -> None:
        """Have it close what it has and end; kill it if it does not. Returns when it is gone, or KILL_S after
        it was killed."""
        self._channel.close()
        await asyncio.wait((self.gone,), timeout=CLOSE_S)
        await self.end()

    async def end(self) -> bool:
        """Kill it and wait for that. False: the kernel could not end it in KILL_S."""
        self.kill()
        await asyncio.wait((self.gone,), timeout=KILL_S)
        return not self.lives

    def _watch(self) -> None:
        self._pidfd = -1
        if hasattr(os, "pidfd_open"):
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except OSError:  # an old kernel, or no descriptor left
                pass
        if self._pidfd >= 0:
            self._loop.add_reader(self._pidfd, self._look)
        else:
            self._timer = self._loop.call_later(_POLL_S, self._look)

    def _look(self) -> None:
        code = self._popen.poll()
        if code is None:
            if self._pidfd < 0:
                self._timer = self._loop.call_later(_POLL_S, self._look)
            return
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._channel.read_all()  # it may have ended its job before it died
        self._channel.close()
        how = self._why or how_ended(code)
        self.gone.set_result(how)
        self._be(how)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_death(how)
        self._on_gone(self)
