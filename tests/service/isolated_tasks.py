"""Bodies for processes of their own. They tell by lines in a file, which survive the process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fluxmesh.context import Context, current_run
from fluxmesh.outcome import DeadLetter, RetryAfter, Snooze
from fluxmesh.resources import Scope, define_resource
from fluxmesh.task import TaskRegistry, define

if "ISOLATED_BROKEN" in os.environ and "fluxmesh.bodies" in sys.orig_argv:
    raise RuntimeError("this module is broken")
FOR_EVER_S = 600.0
OWN = {"isolation": "process"}


def lives(pid: int) -> bool:
    """True while a process may run code: it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def told(path: str) -> list[list[str]]:
    """The lines so far, each split at its blanks."""
    if not os.path.exists(path):
        return []
    return [line.split() for line in Path(path).read_text().splitlines()]


def tell(path: str, *words: object) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


@contextmanager
def marked(path: str, ctx: Context) -> Iterator[None]:
    """Start and end of a body. A start names the processes in which an earlier one may still go on."""
    runs = {line[1]: int(line[2]) for line in told(path) if line[0] == "start"}
    for line in told(path):
        if line[0] == "end":
            runs.pop(line[1], None)
    beside = [pid for pid in runs.values() if lives(pid)]
    tell(path, "start", ctx.token, os.getpid(), time.monotonic(), *beside)
    ctx.progress(1)
    try:
        yield
    finally:
        tell(path, "end", ctx.token)


# -- bodies that go on (C16) -----------------------------------------------------------------------------
def blocked(path: str, ctx: Context) -> None:
    with marked(path, ctx):
        time.sleep(FOR_EVER_S)


def swallows(path: str, ctx: Context) -> None:
    with marked(path, ctx):
        while True:
            try:
                time.sleep(0.05)
            except BaseException:
                pass


def spins(path: str, ctx: Context) -> None:
    with marked(path, ctx):
        while True:
            pass


async def blocks_its_loop(path: str, ctx: Context) -> None:
    with marked(path, ctx):
        time.sleep(FOR_EVER_S)  # noqa: ASYNC251 - that is the point


async def waits(path: str, ctx: Context) -> None:
    with marked(path, ctx):
        await asyncio.sleep(FOR_EVER_S)


def ignores_sigterm(path: str, ctx: Context) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with marked(path, ctx):
        while True:
            try:
                time.sleep(0.05)
            except BaseException:
                pass


def gives_sigterm_back(path: str, ctx: Context) -> str:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with marked(path, ctx):
        while not ctx.cancelled:
            time.sleep(0.01)
    return "saw the flag"


def in_c_for_ever(path: str, ctx: Context) -> None:
    """Holds the interpreter's lock: the thread that hears of stops does not run either."""
    with marked(path, ctx):
        ctypes.PyDLL(None).sleep(int(FOR_EVER_S))


def until(path: str, door: str, ctx: Context) -> str:
    """Goes on until the test makes a file, and not for ever."""
    with marked(path, ctx):
        for _ in range(6_000):
            if os.path.exists(door):
                return "done"
            time.sleep(0.01)
    return "never"


# -- bodies that end their process -----------------------------------------------------------------------
def dies(path: str, how: str, ctx: Context) -> None:
    with marked(path, ctx):
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segfault":
            ctypes.string_at(0)
        else:
            os._exit(int(how))


def eats(path: str, ctx: Context) -> None:
    with marked(path, ctx):
        held = []
        while True:
            held.append(bytearray(1 << 20))


def bites(path: str, door: str, ctx: Context) -> None:
    """Kills the process that it shares with others: the worker's own, if it is not isolated."""
    with marked(path, ctx):
        while not os.path.exists(door):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def closes_everything(path: str, ctx: Context) -> None:
    """As programs do that want to become daemons."""
    with marked(path, ctx):
        time.sleep(0.02)  # its progress has been sent, and the thread that did so rests for a moment
        os.closerange(3, 256)
        time.sleep(FOR_EVER_S)


def leaves_a_thread() -> int:
    """One that the interpreter waits for at its end."""
    threading.Thread(target=time.sleep, args=(FOR_EVER_S,)).start()
    return os.getpid()


# -- bodies that talk ------------------------------------------------------------------------------------
def tells(ctx: Context) -> dict[str, Any]:
    """What a body can know of where it is."""
    ctx.progress(50, "half way")
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "current": current_run.get() is ctx,
        "loop": asyncio.run(asyncio.sleep(0, "its own")),
        "attempt": ctx.attempt,
        "stdin": os.readlink("/proc/self/fd/0"),
        "fds": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in _open_fds()),
    }


def _open_fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


async def tells_async(ctx: Context) -> list[Any]:
    await asyncio.sleep(0)
    return [os.getpid(), current_run.get() is ctx]


def steps(path: str, ctx: Context) -> str:
    ctx.progress(30, "first")
    while not os.path.exists(path):
        time.sleep(0.01)
    ctx.progress(90, "last")
    return "done"


def large(size: int) -> str:
    return "x" * size


_kept: list[bytearray] = []


def grows(megabytes: int) -> None:
    _kept.append(bytearray(b"x") * (megabytes << 20))


def odd() -> object:
    return object()


def chained() -> None:
    try:
        inner()
    except ZeroDivisionError as error:
        raise ValueError("no such rate") from error


def inner() -> float:
    return 1 / 0


def says(what: str) -> None:
    if what == "snooze":
        raise Snooze(3_600)
    if what == "retry":
        raise RetryAfter(3_600, "not yet")
    raise DeadLetter("of no use")


def leaves() -> None:
    raise SystemExit(3)


async def leaves_async() -> None:
    raise SystemExit(3)


def forks(path: str) -> str:
    """The copy goes on as the body did, and must not answer for it."""
    pid = os.fork()
    if pid == 0:
        return "the copy"
    _, status = os.waitpid(pid, 0)
    tell(path, "copy", os.waitstatus_to_exitcode(status))
    return "the body"


def signals_of_children() -> list[str]:
    """What a program that the body starts does about SIGTERM and SIGINT."""
    code = (
        "import signal; print(signal.getsignal(15) == signal.SIG_DFL, signal.getsignal(2) != signal.SIG_IGN)"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


# -- resources ---------------------------------------------------------------------------------------------
def journal() -> Iterator[str]:
    path = os.environ["ISOLATED_JOURNAL"]
    tell(path, "built", os.getpid())
    yield path
    tell(path, "closed", os.getpid())


async def session(journal: str) -> AsyncIterator[str]:
    tell(journal, "opened", os.getpid())
    yield "session"
    tell(journal, "left", os.getpid())


def takes(journal: str, session: str) -> list[Any]:
    return [session, os.getpid()]


async def takes_async(session: str) -> list[Any]:
    return [session, os.getpid()]


def hangs_on_to_it(journal: str) -> None:
    time.sleep(FOR_EVER_S)


PLAIN = (bites, until)
BODIES = (
    *(blocked, swallows, spins, blocks_its_loop, waits, ignores_sigterm, gives_sigterm_back, in_c_for_ever),
    *(dies, tells, tells_async, steps, large, grows, odd, chained, says, leaves, leaves_async, forks),
    *(closes_everything, leaves_a_thread, signals_of_children, takes, takes_async, hangs_on_to_it),
)


def registry_of_tasks() -> TaskRegistry:
    registry = TaskRegistry()
    for function in BODIES:
        registry.add(define(function, function.__name__, OWN))
    for function in PLAIN:
        registry.add(define(function, function.__name__, {}))
    registry.add(define(eats, "eats", {**OWN, "memory_limit_mb": 200}))
    registry.add(define(tells_async, "tells_within", {**OWN, "memory_limit_mb": 200}))
    registry.add(define(until, "until_apart", OWN))
    registry.add(define(waits, "careful", {**OWN, "on_lease_lost": "cancel"}))
    registry.resources.add(define_resource(journal))
    registry.resources.add(define_resource(session, scope=Scope.TASK))
    return registry
