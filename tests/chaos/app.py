"""The tasks of a chaos run. Every body writes what it does to a file that survives whatever happens next.

One line an event, appended by one write to a file opened O_APPEND: see fluxmesh.testing.history.Effect.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time

from fluxmesh import Context, DeadLetter, Queue, RetryAfter, Snooze
from fluxmesh.testing.history import DIES, RETURNED
from tests.chaos import mutants, skew
from tests.chaos.plan import EFFECTS_ENV, PAIR_LIMIT

mutants.apply_named()
skew.apply_named()
queue = Queue()
_file = os.open(os.environ[EFFECTS_ENV], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _worker_id() -> str:
    """The name that this process was given on its command line."""
    return sys.argv[sys.argv.index("--id") + 1] if "--id" in sys.argv else "?"


def tell(what: str, ctx: Context, how: str = "") -> None:
    line = {
        "what": what,
        "at_ns": time.monotonic_ns(),
        "job": ctx.job_id,
        "task": ctx.task,
        "token": ctx.token,
        "attempt": ctx.attempt,
        "life": ctx._job.life,  # no body has a use for it; the checker tells lives apart by it
        "pid": os.getpid(),
        "worker": _worker_id(),
        "how": how,
    }
    os.write(_file, json.dumps(line).encode() + b"\n")


class told:  # noqa: N801 - reads as the verb that it is
    """`with told(ctx):` start and end of a body, whatever ends it."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def __enter__(self) -> None:
        tell("start", self._ctx)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        tell("end", self._ctx, RETURNED if kind is None else kind.__name__)


def _rest(seconds: float) -> None:
    """A body that can be stopped between two short calls."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(0.02, left))


@queue.task(name="quick")
async def quick(seconds: float, ctx: Context = None) -> str:
    with told(ctx):
        await asyncio.sleep(seconds)
    return "quick"


@queue.task(name="sync")
def sync(seconds: float, ctx: Context = None) -> int:
    with told(ctx):
        _rest(seconds)
    return 1


@queue.task(name="deaf")
def deaf(seconds: float, ctx: Context = None) -> int:
    """One call that nothing can interrupt but the end of the process."""
    with told(ctx):
        time.sleep(seconds)
    return 1


@queue.task(name="long")
async def long(seconds: float, ctx: Context = None) -> str:
    with told(ctx):
        step = seconds / 5
        for part in range(5):
            ctx.progress(20 * part, "goes on")
            await asyncio.sleep(step)
    return "long"


@queue.task(name="pair", max_concurrent=PAIR_LIMIT)
async def pair(seconds: float, ctx: Context = None) -> None:
    with told(ctx):
        await asyncio.sleep(seconds)


@queue.task(name="retried")
async def retried(times: int, seconds: float, ctx: Context = None) -> str:
    """Fails on its first attempts."""
    with told(ctx):
        await asyncio.sleep(seconds)
        if ctx.attempt <= times:
            if times % 2:
                raise RetryAfter(0.2, "not yet")
            raise ValueError("not yet")
    return "retried"


@queue.task(name="doomed")
def doomed(seconds: float, ctx: Context = None) -> None:
    with told(ctx):
        _rest(seconds)
        raise DeadLetter("never")


@queue.task(name="snoozing")
async def snoozing(until_ns: int, ctx: Context = None) -> str:
    """Comes back until an instant of the machine's clock."""
    with told(ctx):
        if time.monotonic_ns() < until_ns:
            raise Snooze(0.4)
    return "snoozing"


@queue.task(name="poison")
def poison(ctx: Context = None) -> None:
    """Kills the process it runs in."""
    with told(ctx):
        tell("end", ctx, DIES)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)


# Bodies in killable children of the worker (isolation="process") belong here too, and into JOBS of plan.py.
