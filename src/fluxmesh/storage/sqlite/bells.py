"""Doorbells: unix datagram sockets beside the database file, by which processes wake each other.

A datagram is one byte of kind and, for some kinds, a body. A lost one costs time and nothing else: whoever
waits also looks every so often. Sockets are addressed through the folder's descriptor in /proc, so the length
of the database's path does not matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fluxmesh.ids import new_nonce

WORK: Final = b"w"
ENDED: Final = b"j"
NOTICE: Final = b"n"
EVENT: Final = b"e"
_MAX_DATAGRAM: Final = 16 << 10
_DRAIN_MOST: Final = 256


class Belfry:
    """The folder of bells of one database, as a sender sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd = -1
        self._socket: socket.socket | None = None

    def _address(self, name: str) -> str:
        if self._fd < 0:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}/{name}"

    def bind(self) -> tuple[socket.socket, str] | None:
        """A new bell and its name; None where there are no such sockets (waiting then means to look)."""
        if not hasattr(socket, "AF_UNIX") or not os.path.isdir("/proc/self/fd"):
            return None
        name = new_nonce()
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bell.setblocking(False)
            bell.bind(self._address(name))
        except OSError:
            bell.close()
            return None
        return bell, name

    def ring(self, name: str, message: bytes) -> bool:
        """Send without waiting. False: nobody is there any more, or its bell is full of rings already."""
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            self._socket.sendto(message, self._address(name))
        except (OSError, AttributeError):
            return False
        return True

    def is_abandoned(self, name: str) -> bool:
        """True only if the bell is there and no process hears it any more."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                probe.connect(self._address(name))
        except ConnectionRefusedError:
            return True
        except (OSError, AttributeError):
            return False
        return False

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Bell:
    """A bell of ours, heard in one event loop."""

    def __init__(
        self, belfry: Belfry, loop: asyncio.AbstractEventLoop, hear: Callable[[bytes, bytes], None]
    ) -> None:
        self._belfry = belfry
        self._loop = loop
        self._hear = hear
        self._socket: socket.socket | None = None
        self.name: str | None = None
        bound = belfry.bind()
        if bound is not None:
            self._socket, self.name = bound
            loop.add_reader(self._socket.fileno(), self._drain)

    def _drain(self) -> None:
        for _ in range(_DRAIN_MOST):
            if self._socket is None:
                return
            try:
                message = self._socket.recv(_MAX_DATAGRAM)
            except OSError:  # nothing left, or an error that the next ring will meet again
                return
            if message:
                self._hear(message[:1], message[1:])

    def close(self) -> None:
        if self._socket is None:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        if self.name is not None:
            self._belfry.remove(self.name)
