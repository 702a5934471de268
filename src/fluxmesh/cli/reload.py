"""Starting a command anew whenever a Python file below the working directory changes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fluxmesh.cli import output

FLAG: Final = "--reload"
LOOK_S: Final = 0.5
STOP_MOST_S: Final = 20.0
FILES_MOST: Final = 20_000
_PASSED_OVER: Final = frozenset({"node_modules", "__pycache__", "venv", "site-packages"})
_FINAL_CODES: Final = (2, 4)  # a changed file mends neither the arguments nor the storage


def run_reloading(argv: Sequence[str] | None = None) -> int:
    """This command without --reload, again and again. Answers its exit code once a signal ended it."""
    arguments = [word for word in (sys.argv[1:] if argv is None else argv) if word != FLAG]
    command = [sys.executable, "-m", "fluxmesh.cli", *arguments, "--stop-at-eof"]
    return asyncio.run(_Reloader(command, Path.cwd()).run())


def stamps(folder: Path) -> dict[str, int]:
    """When each Python file below the folder was changed; hidden folders and packages are passed over."""
    found: dict[str, int] = {}
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _PASSED_OVER]
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

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._told = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        from fluxmesh.worker.signals import StopSignals

        signals = StopSignals(self._stop, self._forward)
        signals.install()
        try:
            while True:
                before = stamps(self._folder)
                code = await self._live(before)
                if self._told.is_set() or code in _FINAL_CODES:
                    return _exit_code(code)
        finally:
            signals.remove()

    async def _live(self, before: dict[str, int]) -> int:
        """One run, to the next change. If it ends by itself, the change is waited for without it."""
        # A session of its own: a terminal's Ctrl-C reaches it through us, once.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        ended = asyncio.ensure_future(process.wait())
        told = asyncio.ensure_future(self._told.wait())
        try:
            said = False
            while not told.done() and not self._changed(before):
                await asyncio.wait(
                    (told, *(() if ended.done() else (ended,))),
                    timeout=LOOK_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if ended.done() and not told.done() and not said:
                    if ended.result() in _FINAL_CODES:
                        return ended.result()
                    said = True
                    output.note("it ended; it is started again when a file changes")
            if not told.done():
                output.note("a file changed: starting anew")
                self._forward()
            await self._end(ended)
            return ended.result()
        finally:
            told.cancel()
            if not ended.done():
                process.kill()
                await ended

    def _changed(self, before: dict[str, int]) -> bool:
        return stamps(self._folder) != before

    async def _end(self, ended: asyncio.Future[int]) -> None:
        await asyncio.wait((ended,), timeout=STOP_MOST_S if not self._told.is_set() else None)
        if not ended.done() and self._process is not None:
            self._process.kill()
            await ended

    def _stop(self) -> None:
        self._told.set()
        self._forward()

    def _forward(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
