"""Single keys of a terminal, while nothing is echoed; as it was before at the end, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator


def is_there() -> bool:
    """Whether somebody sits before this program: keys come from a terminal and the picture goes to one."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()


@contextlib.contextmanager
def keys(act: Callable[[str], None]) -> Iterator[None]:
    """`act` hears of each key, on the running loop. A signal key is still one."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    loop = asyncio.get_running_loop()

    def readable() -> None:
        try:
            data = os.read(terminal, 64)
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(terminal)
        for key in data.decode("ascii", "ignore"):
            act(key.lower())

    tty.setcbreak(terminal)
    loop.add_reader(terminal, readable)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
