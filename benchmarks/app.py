"""The tasks that are measured. Workers load it as `--app benchmarks.app:queue`, producers import it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import msgspec

from benchmarks.marks import Mark
from fluxmesh import Context, Queue

ISOLATION_ENV = "FLUXMESH_TEST_ISOLATION"
queue = Queue()  # its storage is named by FLUXMESH_URL


@queue.task(name="noop", isolation=os.environ.get(ISOLATION_ENV))
async def noop(number: int) -> int:
    """Nothing, so that all the time goes to what is around it."""
    return number


@queue.task(name="nap")
async def nap(number: int, seconds: float) -> int:
    await asyncio.sleep(seconds)
    return number


@queue.task(name="mark")
async def mark(number: int, seconds: float, journal: str) -> int:
    """Hold the slot for so long, and note by the clocks of this machine when that began and ended."""
    began = Mark(number, "start", time.monotonic(), time.time())
    _append(journal, msgspec.json.encode(began))
    await asyncio.sleep(seconds)
    _append(journal, msgspec.json.encode(Mark(number, "end", time.monotonic(), time.time())))
    return number


@queue.task(name="hold", timeout=300)
async def hold(number: int, journal: str, ctx: Context) -> int:
    """Hold the slot until the process is killed; a job that was started before ends at once.

    Both starts and ends go to the journal, by the body itself: what storage says is compared with it."""
    starts_before = sum(entry["job"] == ctx.job_id for entry in read_journal(Path(journal)))
    _note(journal, ctx.job_id, "start")
    if not starts_before:
        await asyncio.sleep(120)
    _note(journal, ctx.job_id, "end")
    return number


def _note(journal: str, job_id: str, event: str) -> None:
    entry = {"job": job_id, "event": event, "pid": os.getpid(), "at": time.time()}
    _append(journal, json.dumps(entry).encode())


def _append(journal: str, line: bytes) -> None:
    handle = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, line + b"\n")  # one write: lines of two processes never mix
    finally:
        os.close(handle)


def read_journal(journal: Path) -> list[dict[str, object]]:
    """What bodies have noted so far."""
    if not journal.exists():
        return []
    return [json.loads(line) for line in journal.read_text().splitlines()]
