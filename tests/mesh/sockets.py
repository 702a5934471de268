"""Loopback ports, and a bound around everything that is awaited."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

BOUND_S = 20.0
_reserved = os.open(Path(tempfile.gettempdir(), "fluxmesh-test-ports"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
_picking = threading.Lock()
_next_port = 20_000 + os.getpid() * 37 % 10_000


def run(main: Coroutine[Any, Any, None], bound_s: float = BOUND_S) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(bound_s):
            await main

    asyncio.run(bounded())


async def until(holds: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    """Look until it holds: for what another thread or process does, which gives no sign."""
    async with asyncio.timeout(bound_s):
        while not holds():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


def free_port(ports: int = 2) -> int:
    """The first of so many neighbouring ports that nobody has, UDP and TCP, below those that the kernel gives
    to connections. They are this process's until its end, however late they are bound: other runs of tests
    on this machine are given others."""
    global _next_port
    with _picking:
        while True:
            _next_port = 20_000 + (_next_port + ports - 20_000) % 10_000
            if all(_reserve(_next_port + more) and _is_free(_next_port + more) for more in range(ports)):
                return _next_port


def _reserve(port: int) -> bool:
    """A byte of a file stands for a port; False: another process has locked it."""
    try:
        fcntl.lockf(_reserved, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(socket.AF_INET, kind) as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True
