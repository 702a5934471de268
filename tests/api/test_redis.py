"""The API on Redis: the same routes, and a server that says what it knows of a storage that is frozen."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.serving import problem, server_command
from tests.cli.harness import PATIENCE_S
from tests.redis_server import Server


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    try:
        yield server
    finally:
        server.stop()


def test_jobs_of_redis_are_submitted_run_and_counted(redis_server: Server, tmp_path: Path) -> None:
    with server_command(tmp_path, "--url", redis_server.url()) as (running, url):
        api = f"{url}/api/v1"
        fields = {"task": "batch_process", "kwargs": {"items": ["a"]}, "idempotency_key": "k"}
        first, again = (httpx.post(f"{api}/jobs", json=fields) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 200)
        job_id = first.json()["id"]
        ended = httpx.get(f"{api}/jobs/{job_id}/wait", timeout=PATIENCE_S)
        assert (ended.status_code, ended.json()["status"]) == (200, "COMPLETED")
        failing = httpx.post(f"{api}/jobs", json={"task": "failing_task", "args": ["why"], "max_retries": 0})
        failed_id = failing.json()["id"]
        assert httpx.get(f"{api}/jobs/{failed_id}/wait", timeout=PATIENCE_S).status_code == 200
        [dead] = httpx.get(f"{api}/dlq").json()["items"]
        assert dead["id"] == failed_id
        numbers = httpx.get(f"{api}/metrics").json()
        counted = ("active_workers", "total_jobs", "completed_jobs", "failed_jobs", "dead_letter_jobs")
        assert [numbers[name] for name in counted] == [1, 2, 1, 1, 1]
        assert running.end() == 0
    assert not (tmp_path / "fluxmesh.db").exists()


def test_what_a_server_says_of_a_redis_whose_memory_is_full_and_of_a_frozen_one(
    redis_server: Server, tmp_path: Path
) -> None:
    """Unready within a second."""
    address = redis_server.url()
    let_in = {"authorization": "Bearer let-me-in"}
    job = {"task": "batch_process"}
    with server_command(tmp_path, "--no-standalone", "--token", "let-me-in", "--url", address) as (
        running,
        url,
    ):
        assert httpx.get(f"{url}/readyz").status_code == 200
        with redis_server.client() as client:
            client.config_set("maxmemory", 1)
            refused = problem(httpx.post(f"{url}/api/v1/jobs", json=job, headers=let_in), 503)
            assert refused["code"] == "storage_unreachable"
            assert "memory" in refused["detail"]
            client.config_set("maxmemory", 0)
        assert httpx.post(f"{url}/api/v1/jobs", json=job, headers=let_in).status_code == 201
        redis_server.process.send_signal(signal.SIGSTOP)
        answer = httpx.get(f"{url}/readyz", timeout=PATIENCE_S)
        assert problem(answer, 503)["code"] == "storage_unreachable"
        assert answer.elapsed.total_seconds() < 1
        assert answer.json()["detail"] == "the storage is not ready"  # why is told to those with a token
        told = httpx.get(f"{url}/readyz", headers=let_in, timeout=PATIENCE_S).json()
        assert "did not answer in" in told["detail"]
        assert httpx.get(f"{url}/healthz").status_code == 200
        redis_server.process.send_signal(signal.SIGCONT)
        assert httpx.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 200
        assert running.end() == 0
