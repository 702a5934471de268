"""A storage that is frozen: what a server says of it, and when."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fluxmesh.storage.base import Storage
from fluxmesh.storage.sqlite import connection
from fluxmesh.testing.contract.faulty import FaultyStorage
from tests.api.serving import problem, served

JOBS = "/api/v1/jobs"


LOCK = """
import sqlite3, sys
sqlite3.connect(sys.argv[1], isolation_level=None).execute("begin exclusive")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process keeps the file locked."""
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            yield
        finally:
            holder.kill()


def test_a_file_that_another_process_keeps_locked_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fluxmesh.storage.sqlite.connection.BUSY_S", 1.2)
    with served(tmp_path / "jobs.db") as api:
        job_id = api.submit()["id"]
        assert api.client.get("/readyz").status_code == 200
        with locked(tmp_path / "jobs.db"):
            answer = api.client.get("/readyz")
            assert problem(answer, 503)["code"] == "storage_unreachable"
            assert answer.elapsed.total_seconds() < 1
            refused = api.client.post(JOBS, json={"task": "t"})
            assert "locked by another process" in problem(refused, 503)["detail"]
            assert api.client.get(f"{JOBS}/{job_id}").json()["status"] == "PENDING"
        assert api.client.post(JOBS, json={"task": "t"}).status_code == 201
        assert api.client.get("/readyz").status_code == 200
        gc.collect()
    assert "never retrieved" not in caplog.text


class Hanging(FaultyStorage):
    """A storage whose verb in `hangs` never answers, but does what it was asked."""

    hangs = ""
    asked = 0

    def __getattr__(self, verb: str) -> Any:
        real = super().__getattr__(verb)
        if verb != self.hangs:
            return real

        async def never(*args: Any, **options: Any) -> None:
            self.asked += 1
            await real(*args, **options)
            await asyncio.Event().wait()

        return never


@pytest.mark.parametrize("hangs", ["enqueue", "get"])
@pytest.mark.parametrize("path", ["", "/bulk"])
def test_a_submission_is_answered_within_the_bound_of_one_call(
    hangs: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxmesh.api.store.CALL_MOST_S", 0.5)
    made: list[Hanging] = []

    def behind(storage: Storage) -> Storage:
        made.append(Hanging(storage))
        return made[0].as_storage()

    with served(tmp_path / "jobs.db", behind=behind) as api:
        made[0].hangs = hangs
        body = {"task": "t"} if not path else {"jobs": [{"task": "t"}]}
        answer = api.client.post(f"{JOBS}{path}", json=body)
        told = problem(answer, 503)
        assert told["code"] == "outcome_unknown"
        assert answer.elapsed.total_seconds() < 1
        assert made[0].asked == 1
        made[0].hangs = ""
        [named] = re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", told["detail"])
        assert api.client.get(f"{JOBS}/{named}").json()["status"] == "PENDING"


def test_a_job_that_is_stored_and_cannot_be_read_is_not_told_as_unreachable(tmp_path: Path) -> None:
    made: list[FaultyStorage] = []

    def behind(storage: Storage) -> Storage:
        made.append(FaultyStorage(storage))
        return made[0].as_storage()

    with served(tmp_path / "jobs.db", behind=behind) as api:
        made[0].refuse("get")
        told = problem(api.client.post(JOBS, json={"task": "t"}), 503)
        assert told["code"] == "outcome_unknown"
        job_id = told["hint"].rpartition("/")[2]
        assert job_id in told["detail"]
        assert api.client.get(f"{JOBS}/{job_id}").json()["status"] == "PENDING"


def test_the_wait_for_a_lock_is_measured_by_the_clock_and_not_by_its_naps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nap = time.sleep
    monkeypatch.setattr(connection.time, "sleep", lambda _: nap(0.05))  # as on a machine that is busy
    monkeypatch.setattr(connection, "BUSY_S", 0.1)
    wait = connection._patience(lambda: False)
    naps = 0
    while wait(naps):
        naps += 1
    assert naps < 10
