"""Starting a command anew whenever a Python file below some folders changes."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fluxmesh.cli import output
from fluxmesh.cli.parser import Parser
from fluxmesh.errors import InvalidOption

LOOK_S: Final = 0.5
STOP_MOST_S: Final = 20.0
FILES_MOST: Final = 20_000
_PASSED_OVER: Final = frozenset({"node_modules", "__pycache__", "venv", "site-packages"})
# At the first run these are for whoever typed the command to mend. Later the changed code is to blame.
_FINAL_CODES: Final = (1, 2, 4)


def add_reload_options(parser: Parser, *, default: bool) -> None:
    group = parser.add_argument_group("following the code")
    group.add_argument(
        "--reload",
        action=argparse.BooleanOptionalAction,
        default=default,
        help=f"start anew when a *.py file changes ({'yes' if default else 'no'})",
    )
    group.add_argument(
        "--reload-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder whose files are looked at; may be repeated (the working directory)",
    )


def run_reloading(argv: Sequence[str], folders: Sequence[Path]) -> int:
    """This command with --no-reload, again and again. Answers its exit code once a signal ended it."""
    for folder in folders:
        if not folder.is_dir():
            raise InvalidOption("--reload-dir", f"{folder} is no folder", hint="name a folder with code")
    command = [sys.executable, "-m", "fluxmesh.cli", *argv, "--no-reload", "--stop-at-eof"]
    return asyncio.run(_Reloader(command, folders).run())


def stamps(folders: Sequence[Path]) -> dict[str, int]:
    """When each Python file below the folders was changed; hidden folders and packages are passed over."""
    found: dict[str, int] = {}
    for where, inner, files in (step for folder in folders for step in os.walk(folder)):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in _PASSED_OVER]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(where, name)
                try:
                    found[path] = os.stat(path).st_mtime_ns
                except OSError:
                    continue  # gone between the two looks
        if len(found) >= FILES_MOST:
            break
    return found


def _exit_code(code: int) -> int:
    """Ours, from that of a run. One that was told before it could hear ends by the signal itself."""
    if code >= 0:
        return code
    return 0 if code == -signal.SIGTERM else 128 - code


class _Reloader:
    """Keeps one run of the command. Its standard input is a pipe, so that it ends when we do."""

    def __init__(self, command: Sequence[str], folders: Sequence[Path]) -> None:
        self._command = command
        self._folders = folders
        self._told = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        from fluxmesh.worker.signals import StopSignals

        signals = StopSignals(self._stop, self._forward)
        signals.install()
        try:
            first = True
            while True:
                before = stamps(self._folders)
                code = await self._live(before)
                if code in _FINAL_CODES and first:
                    return code
                if code is not None and not self._told.is_set():
                    output.note("it ended; it is started again when a file changes")
                    await self._change(before)
                    code = None
                if self._told.is_set():
                    return 0 if code is None else _exit_code(code)
                output.note("a file changed: starting anew")
                first = False
        finally:
            signals.remove()

    async def _live(self, before: dict[str, int]) -> int | None:
        """One run, to the next change or signal. Its exit code; None if a change ended it."""
        # A session of its own: a terminal's Ctrl-C reaches it through us, once.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        ended = asyncio.ensure_future(process.wait())
        changed = asyncio.ensure_future(self._change(before))
        try:
            await asyncio.wait((ended, changed), return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not self._told.is_set():
                return ended.result()
            if not self._told.is_set():
                self._forward()
            await asyncio.wait((ended,), timeout=None if self._told.is_set() else STOP_MOST_S)
            if not ended.done():
                process.kill()
            code = await ended
            return code if self._told.is_set() else None
        finally:
            changed.cancel()
            if not ended.done():
                process.kill()
                await ended

    async def _change(self, before: dict[str, int]) -> None:
        """Returns when a file has changed, or we are told to end."""
        told = asyncio.ensure_future(self._told.wait())
        try:
            while not told.done() and stamps(self._folders) == before:
                await asyncio.wait((told,), timeout=LOOK_S)
        finally:
            told.cancel()

    def _stop(self) -> None:
        self._told.set()
        self._forward()

    def _forward(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
