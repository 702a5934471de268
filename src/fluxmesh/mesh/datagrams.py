"""The UDP socket of a node: batches in, single datagrams out, and no error that would end it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Final

from fluxmesh.mesh.messages import Address

RECEIVE_BUFFER_BYTES: Final = 4 << 20
_READ_BYTES: Final = 2_048  # more than the largest datagram; what is longer is cut, and then refused
BATCH: Final = 64  # datagrams taken before the loop may do something else
DRAIN_MOST: Final = 8_192  # taken at once after a stall: what a socket of that buffer can hold of small ones,
DRAIN_S: Final = 0.05  # and for so long, here and after each wake: whoever floods us must not stop our timers
_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 1.0
_MAPPED: Final = "::ffff:"


class Datagrams:
    """Reads a bound, non-blocking socket on a loop. `on_datagram(source, data)` must not raise.

    A receive error is counted and the reading goes on; while errors follow each other it pauses, 10 ms
    doubled up to 1 s, so that a socket which is broken for a while costs no processor.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_datagram: Callable[[Address, bytes], None],
        on_error: Callable[[OSError], None],
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._on_datagram = on_datagram
        self._on_error = on_error
        self._dual = sock.family == socket.AF_INET6
        self._errors_running = 0
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self.received = 0
        self.received_bytes = 0
        self.sent = 0
        self.sent_bytes = 0
        self.receive_errors = 0
        self.send_errors = 0
        self.unsent = 0  # because the kernel's buffer was full: lost, as on the way

    def start(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._readable)

    def send(self, to: Address, data: bytes) -> bool:
        """False: it failed at once, here, and will not arrive."""
        host = to.host
        if self._dual and ":" not in host:
            host = _MAPPED + host
        try:
            self._sock.sendto(data, (host, to.port))
        except (BlockingIOError, InterruptedError):
            self.unsent += 1
            return True
        except (OSError, ValueError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOBUFS:
                self.unsent += 1
                return True
            self.send_errors += 1
            return False
        self.sent += 1
        self.sent_bytes += len(data)
        return True

    def drain(self, most: int = DRAIN_MOST) -> int:
        """Hand over what has come, at most so many and for DRAIN_S; how many it was. The rest is read when
        the loop has done what else is due."""
        until_s = self._loop.time() + DRAIN_S
        for taken in range(most):
            if self._closed or (taken and self._loop.time() >= until_s):
                return taken
            try:
                data, source = self._sock.recvfrom(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return taken
            except OSError as error:
                self._failed(error)
                return taken
            self._errors_running = 0
            self.received += 1
            self.received_bytes += len(data)
            host = source[0]
            if self._dual and host.startswith(_MAPPED):
                host = host.removeprefix(_MAPPED)
            self._on_datagram(Address(host, source[1]), data)
        return most

    def close(self) -> None:
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        with contextlib.suppress(OSError, ValueError):
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def _readable(self) -> None:
        self.drain(BATCH)

    def _failed(self, error: OSError) -> None:
        self.receive_errors += 1
        self._errors_running += 1
        self._on_error(error)
        if self._errors_running > 1 and self._pause is None and not self._closed:
            self._loop.remove_reader(self._sock.fileno())
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._errors_running - 2, 16))
            self._pause = self._loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if not self._closed:
            self.start()
