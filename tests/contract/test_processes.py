"""Eight processes on one file, under the real clock."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fluxmesh.config import Settings
from fluxmesh.job import Status
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import open_storage
from fluxmesh.submission import prepare

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 8
JOBS = 2_000
BOUND_S = 60
T = TypeVar("T")


def with_storage(url: str, act: Callable[[Storage], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        storage = await open_storage(url, Settings(), create=True)
        try:
            return await act(storage)
        finally:
            await storage.close()

    return asyncio.run(run())


def all_at_once(what: str, url: str, arguments: list[str]) -> list[Any]:
    """Start one child for each argument, let them go when all are ready, and collect what they print."""
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.contract.children", what, url, argument],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for argument in arguments
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = [json.loads(child.communicate(timeout=BOUND_S)[0]) for child in children]
        assert [child.returncode for child in children] == [0] * len(children)
        return answers
    finally:
        for child in children:
            child.kill()
            child.communicate()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shared.db'}"


def test_eight_processes_that_claim_at_once_never_share_a_job(url: str) -> None:
    async def fill(storage: Storage) -> list[str]:
        template = prepare({"task": "work"})
        jobs = [template.job((n,), {}) for n in range(JOBS)]
        for start in range(0, JOBS, 1_000):
            await storage.enqueue(jobs[start : start + 1_000], queue_cap=JOBS)
        return [job.id for job in jobs]

    async def states(storage: Storage) -> tuple[dict[Status, int], int]:
        counts = await storage.counts()
        return {status: n for status, n in counts.by_status.items() if n}, counts.stale_settles

    made = with_storage(url, fill)
    answers = all_at_once("claim_all", url, [f"w{n}" for n in range(PROCESSES)])
    given = [job_id for answer in answers for job_id in answer["given"]]
    assert sorted(given) == sorted(made)
    assert {answer["stale"] for answer in answers} == {0}
    assert with_storage(url, states) == ({Status.COMPLETED: JOBS}, 0)


def test_eight_processes_that_enqueue_one_key_at_once_make_one_job(url: str) -> None:
    async def total(storage: Storage) -> int:
        return (await storage.counts()).total

    assert with_storage(url, total) == 0
    keys = {"unique_key": "order-881", "idempotency_key": "order-882"}
    answers = all_at_once("enqueue_each", url, [json.dumps(keys)] * PROCESSES)
    for of_key in zip(*answers, strict=True):
        assert sorted(verdict for verdict, _ in of_key) == ["created"] + ["existing"] * (PROCESSES - 1)
        assert len({job_id for _, job_id in of_key}) == 1
    assert with_storage(url, total) == len(keys)
