"""Around every command: errors become lines and an exit code, signals end it, a closed pipe is no error."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, NoReturn

from fluxmesh.cli import output
from fluxmesh.errors import FluxMeshError


def end_by_signal(*, daemon: bool = False) -> None:
    """A command ends with 130 or 143 on a signal; a daemon, which is told to stop by one, with 0."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0 if daemon else 128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def end_with(code: int) -> NoReturn:
    """End this process now. In the interpreter's own end signals have their default again: a daemon that is
    told twice would seem to die of the second; and on a busy machine that end takes its time."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def guarded(command: Callable[[], int]) -> int:
    """Run a command and answer with its exit code; only a mistake of ours leaves a traceback."""
    try:
        try:
            code = command()
        except FluxMeshError as error:
            output.tell_error(error.message, error.hint)
            code = error.exit_code
        except KeyboardInterrupt:  # an interrupt inside asyncio's own runner
            code = 128 + signal.SIGINT
        except SystemExit as ending:  # argparse, and SIGTERM
            code = ending.code if isinstance(ending.code, int) else 0
        output.flush()
    except output.OutputFailed as failure:
        _let_go_of_stdout()
        if failure.reader_gone:
            return 0
        output.tell_error(f"the output cannot be written: {failure.why}", "look where stdout goes")
        return 1
    return code


def _let_go_of_stdout() -> None:
    """What is still buffered goes nowhere, so that the interpreter's own flush meets no closed pipe."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_async(main: Coroutine[Any, Any, int]) -> int:
    """Run a one-shot command's coroutine. A signal cancels it, so that it can close what it opened."""
    with asyncio.Runner() as runner:
        return runner.run(_until_signalled(main))


async def _until_signalled(main: Coroutine[Any, Any, int]) -> int:
    task = asyncio.ensure_future(main)
    got: list[int] = []

    def end(number: int) -> None:
        got.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        on_signal(number, end)
    try:
        return await task
    except asyncio.CancelledError:
        if not got:
            raise
        return 128 + got[0]


def on_signal(number: signal.Signals, act: Callable[[int], None]) -> None:
    """Call `act(number)` in the running loop whenever the signal comes."""
    loop = asyncio.get_running_loop()
    if sys.platform == "win32":
        signal.signal(number, lambda got, _frame: loop.call_soon_threadsafe(act, got) and None)
    else:
        loop.add_signal_handler(number, act, int(number))


def on_end_of_file(fd: int, act: Callable[[], object]) -> None:
    """Call `act()` in the running loop when whoever holds the other end of a pipe is gone."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        try:
            data = os.read(fd, 4_096)
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(fd)
            act()

    try:
        loop.add_reader(fd, readable)
    except OSError:
        pass  # a plain file or /dev/null has no other end
