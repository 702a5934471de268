"""The worker's end of the pipe to a body process: never blocks its loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

import msgspec

from fluxmesh.worker.isolated.frames import FromBody, FromWorker, Inflow, framed, from_body

_READ_BYTES: Final = 256 << 10
_READS: Final = 16  # in one turn of the loop


class Channel:
    """`on_message` hears of each message, `on_lost` once, if the other side has closed it or sends junk."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_message: Callable[[FromBody], None],
        on_lost: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._on_lost = on_lost
        self._inflow = Inflow()
        self._unsent = bytearray()  # bounded: one Start, and one Stop of each kind
        self._open = True
        self._reading = True
        loop.add_reader(sock.fileno(), self.read)

    def send(self, message: FromWorker) -> None:
        """Send it, now or when there is room. What goes to a process that is gone goes nowhere: its end is
        noticed by other means."""
        if not self._open:
            return
        if self._unsent:
            self._unsent += framed(message)
            return
        self._unsent += framed(message)
        self._write()
        if self._unsent:
            self._loop.add_writer(self._sock.fileno(), self._write_on)

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]

    def _write_on(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def read(self) -> None:
        """Take what is there."""
        for _ in range(_READS):
            if not self._reading:
                return
            try:
                data = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._stop_reading("it closed the pipe to its worker")
                return
            try:
                for message in self._inflow.take(data, from_body):
                    self._on_message(message)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                self._stop_reading(f"what it sent is not understood: {error}")

    def read_all(self) -> None:
        """After the end of the process: take what it has left. No more than the pipe holds."""
        for _ in range(_READS):
            self.read()

    def _stop_reading(self, why: str) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())
            self._on_lost(why)

    def close(self) -> None:
        """The end of the pipe tells the process to end. Idempotent."""
        if self._open:
            self._open = False
            if self._reading:
                self._reading = False
                self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # a copy that somebody has forked may hold it, too
            self._sock.close()
