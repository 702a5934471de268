"""A body that forks: its copy ends, and the worker goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import warnings

import pytest

from tests.service.workshop import Workshop, workshop

LIMIT_S = 10.0


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        return os.fork()


def end_of(pid: int) -> int | None:
    """The exit status of a child; None for one that had to be killed."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def leave(how: str) -> str:
    if how == "exit":
        sys.exit(7)
    if how == "raise":
        sys.stderr = None  # what it prints is not looked at
        raise ValueError(how)
    return "copy"


@pytest.mark.parametrize(("how", "status"), [("return", 0), ("exit", 7), ("raise", 1)])
@pytest.mark.parametrize("task", ["sync", "coro"])
@workshop()
async def test_a_forked_copy_of_a_body_ends_with_it(shop: Workshop, task: str, how: str, status: int) -> None:
    @shop.task("sync", max_retries=0)
    def sync() -> object:
        pid = fork()
        return leave(how) if pid == 0 else end_of(pid)

    @shop.task("coro", max_retries=0)
    async def coro() -> object:
        pid = fork()
        return leave(how) if pid == 0 else await asyncio.to_thread(end_of, pid)

    await shop.worker()
    job = await shop.ended(await shop.put(task))
    assert job.result == status
