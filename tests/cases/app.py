"""The tasks that the cases run in real worker processes. Every body tells the file of marks what it does.

A mark is one line, appended by one write to a file opened O_APPEND, so that it survives whatever happens
to the process afterwards. See marks.py for what stands in it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from fluxmesh import Context, Queue
from tests.cases.marks import GATE_ENV, MARKS_ENV, lives

queue = Queue()


def wait_at_gate() -> None:
    """A worker that stands by has imported everything, and begins when the case opens its gate."""
    gate = os.environ.get(GATE_ENV)
    if gate is None or "--describe" in sys.argv:
        return
    Path(f"{gate}.reached").touch()
    while not os.path.exists(gate):
        time.sleep(0.005)


wait_at_gate()
_marks = os.open(os.environ[MARKS_ENV], os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def mark(what: str, ctx: Context, note: str, **more: Any) -> None:
    line = {
        "what": what,
        "at": time.monotonic(),
        "job": ctx.job_id,
        "task": ctx.task,
        "note": note,
        "attempt": ctx.attempt,
        "token": ctx.token,
        "pid": os.getpid(),
        **more,
    }
    os.write(_marks, json.dumps(line).encode() + b"\n")


def overlapping(job_id: str) -> list[int]:
    """Processes in which an earlier run of this job has not ended and may still go on."""
    open_runs: dict[int, int] = {}
    size = os.fstat(_marks).st_size
    for text in os.pread(_marks, size, 0).split(b"\n"):
        if job_id.encode() not in text:
            continue
        line = json.loads(text)
        if line["what"] == "start":
            open_runs[line["token"]] = line["pid"]
        else:
            open_runs.pop(line["token"], None)
    return [pid for pid in open_runs.values() if lives(pid)]


class run_marked:  # noqa: N801 - reads as the verb that it is
    """`with run_marked(ctx, note):` start and end of a body, whatever ends it."""

    def __init__(self, ctx: Context, note: str) -> None:
        self._ctx = ctx
        self._note = note

    def __enter__(self) -> None:
        mark("start", self._ctx, self._note, beside=overlapping(self._ctx.job_id))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        mark("end", self._ctx, self._note, raised=None if kind is None else kind.__name__)


@queue.task(name="nap")
def nap(seconds: float, note: str = "", ctx: Context = None) -> str:
    """One call that nothing can interrupt."""
    with run_marked(ctx, note):
        time.sleep(seconds)
    return note


@queue.task(name="doze")
def doze(seconds: float, note: str = "", ctx: Context = None) -> str:
    """A body on a thread that can be stopped between two short calls."""
    with run_marked(ctx, note):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.02)
    return note


@queue.task(name="anap")
async def anap(seconds: float, note: str = "", ctx: Context = None) -> str:
    with run_marked(ctx, note):
        await asyncio.sleep(seconds)
    return note


@queue.task(name="tick")
async def tick(note: str = "", ctx: Context = None) -> str:
    """A job as short as a job can be, and still marked."""
    mark("start", ctx, note, beside=[])
    mark("end", ctx, note, raised=None)
    return note


@queue.task(name="brief")
async def brief(seconds: float, note: str = "", ctx: Context = None) -> str:
    """As long as it is told to be, and hardly longer: nobody looks who runs beside it."""
    mark("start", ctx, note, beside=[])
    await asyncio.sleep(seconds)
    mark("end", ctx, note, raised=None)
    return note


@queue.task(name="swallow")
async def swallow(data: str, note: str = "", ctx: Context = None) -> int:
    """Takes much, and gives little back."""
    with run_marked(ctx, note):
        return len(data)


@queue.task(name="pass on")
async def pass_on(delay_s: float, note: str = "", ctx: Context = None) -> str:
    """Produces a delayed job where it runs; the id of that."""
    with run_marked(ctx, f"{note}, produced"):
        later = await tick.options(delay=delay_s).enqueue(f"{note}, delayed")
    return later.id


@queue.task(name="fail")
async def fail(times: int, seconds: float = 0.0, note: str = "", ctx: Context = None) -> str:
    """Fails on its first attempts."""
    with run_marked(ctx, note):
        await asyncio.sleep(seconds)
        if ctx.attempt <= times:
            raise ValueError(f"attempt {ctx.attempt} of {times} that fail")
    return note


@queue.task(name="watch")
def watch(seconds: float, note: str = "", ctx: Context = None) -> str:
    """A body on a thread that looks at its cancelled flag."""
    with run_marked(ctx, note):
        until = time.monotonic() + seconds
        while not ctx.cancelled and time.monotonic() < until:
            time.sleep(0.02)
    return note


@queue.task(name="until")
async def until(path: str, note: str = "", ctx: Context = None) -> str:
    """Goes on until the case makes a file, and not for ever."""
    with run_marked(ctx, note):
        limit = time.monotonic() + 120
        while not os.path.exists(path):  # noqa: ASYNC240 - a look at one name
            if time.monotonic() > limit:
                raise TimeoutError(path)
            await asyncio.sleep(0.01)
    return note


@queue.task(name="few", max_concurrent=3)
async def few(path: str, note: str = "", ctx: Context = None) -> str:
    """`until`, of which three run at once."""
    with run_marked(ctx, note):
        limit = time.monotonic() + 120
        while not os.path.exists(path):  # noqa: ASYNC240 - a look at one name
            if time.monotonic() > limit:
                raise TimeoutError(path)
            await asyncio.sleep(0.01)
    return note


@queue.task(name="stick")
def stick(path: str, note: str = "", ctx: Context = None) -> str:
    """One call that nothing can interrupt, and that the case ends by opening the other end of a FIFO."""
    with run_marked(ctx, note), open(path, "rb") as fifo:
        fifo.read()
    return note


@queue.task(name="order")
async def order(amount: int, cur: str, ctx: Context = None) -> dict[str, Any]:
    with run_marked(ctx, cur):
        return {"amount": amount, "cur": cur}


# -- bodies that do not want to end (C16) ----------------------------------------------------------------
@queue.task(name="spin")
def spin(note: str = "", ctx: Context = None) -> None:
    with run_marked(ctx, note):
        while True:
            pass


@queue.task(name="deaf")
def deaf(seconds: float, note: str = "", ctx: Context = None) -> str:
    """Catches everything and keeps sleeping."""
    with run_marked(ctx, note):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                time.sleep(0.05)
            except BaseException:
                continue
    return note


@queue.task(name="adeaf")
async def adeaf(seconds: float, note: str = "", ctx: Context = None) -> str:
    """The same on the loop."""
    with run_marked(ctx, note):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                await asyncio.sleep(0.05)
            except BaseException:
                continue
    return note


# -- bodies that hold up more than themselves (C03) --------------------------------------------------------
_holding_the_interpreter = ctypes.PyDLL(None)


@queue.task(name="grip")
def grip(seconds: int, note: str = "", ctx: Context = None) -> str:
    """One call into C that holds the interpreter: no other thread of the process runs meanwhile."""
    with run_marked(ctx, note):
        _holding_the_interpreter.sleep(seconds)
    return note


@queue.task(name="agrip")
async def agrip(seconds: int, note: str = "", ctx: Context = None) -> str:
    """The same on the loop."""
    with run_marked(ctx, note):
        _holding_the_interpreter.sleep(seconds)
    return note


@queue.task(name="ablock")
async def ablock(seconds: float, note: str = "", ctx: Context = None) -> str:
    """A blocking call on the loop."""
    with run_marked(ctx, note):
        time.sleep(seconds)  # noqa: ASYNC251 - the fault at hand
    return note


@queue.task(name="aspin")
async def aspin(note: str = "", ctx: Context = None) -> None:
    with run_marked(ctx, note):
        while True:
            pass
