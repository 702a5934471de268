"""The tasks of app.py, some of them once more with bodies in processes of their own, and bodies that kill the
process they run in. An app of its own: its workers keep a body process ready, and the others shall not."""

from __future__ import annotations

import os
import signal
import time

from fluxmesh import Context
from tests.cases import app
from tests.cases.app import adeaf, anap, deaf, nap, queue, run_marked, spin, tick

for task in (nap, anap, deaf, adeaf, spin, tick):
    queue.task(name=f"{task.name}_apart", isolation="process")(task.definition.function)


@queue.task(name="blocking_apart", isolation="process")
async def blocking(seconds: float, note: str = "", ctx: Context = None) -> None:
    """One call that blocks the loop of a coroutine."""
    with run_marked(ctx, note):
        time.sleep(seconds)  # noqa: ASYNC251 - that is the point


@queue.task(name="ignoring_apart", isolation="process")
def ignoring(seconds: float, note: str = "", ctx: Context = None) -> None:
    """Ignores SIGTERM, and everything else."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deaf.definition.function(seconds, note, ctx)


@queue.task(name="hold_apart", isolation="process")
def hold(path: str, note: str = "", ctx: Context = None) -> str:
    """Goes on until the case makes a file, and not for ever."""
    with run_marked(ctx, note):
        limit = time.monotonic() + 120
        while not os.path.exists(path) and time.monotonic() < limit:
            time.sleep(0.01)
    return note


@queue.task(name="poison", isolation="process")
def poison(note: str = "", ctx: Context = None) -> None:
    with run_marked(ctx, note):
        os.kill(os.getpid(), signal.SIGKILL)


@queue.task(name="glutton", isolation="process", memory_limit_mb=200)
def glutton(note: str = "", ctx: Context = None) -> None:
    with run_marked(ctx, note):
        held = []
        while True:
            held.append(bytearray(1 << 20))


@queue.task(name="killer")
def killer(patience_s: float, company: int, note: str = "", ctx: Context = None) -> None:
    """Kills its process, with so many bodies in it if they come there in time."""
    with run_marked(ctx, note):
        limit = time.monotonic() + patience_s
        mine = f'"pid": {os.getpid()},'.encode()
        while time.monotonic() < limit:
            size = os.fstat(app._marks).st_size
            lines = os.pread(app._marks, size, 0).split(b"\n")
            if sum(b'"what": "start"' in line and mine in line for line in lines) >= company:
                break
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
