"""fluxmesh server as a process: it starts, takes jobs over HTTP, runs them beside itself, and ends."""

from __future__ import annotations

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from fluxmesh.worker.supervisor import SAME_MOMENT_S
from tests.api.serving import problem, server_command
from tests.cli.conftest import Call, call  # noqa: F401 - a fixture
from tests.cli.harness import PATIENCE_S, make_database, run


def wait_for_end(url: str, job_id: str) -> dict[str, object]:
    answer = httpx.get(f"{url}/api/v1/jobs/{job_id}/wait", params={"timeout": 30}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    job: dict[str, object] = answer.json()
    return job


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_makes_its_database_runs_a_job_and_ends_with_0(
    number: signal.Signals, tmp_path: Path
) -> None:
    with server_command(tmp_path) as (running, url):
        fields = {"task": "batch_process", "kwargs": {"items": ["a", "b"]}, "priority": "high"}
        job_id = httpx.post(f"{url}/api/v1/jobs", json=fields).json()["id"]
        job = wait_for_end(url, job_id)
        assert (job["status"], job["progress"]) == ("COMPLETED", 100)
        [worker] = httpx.get(f"{url}/api/v1/workers").json()["items"]
        assert worker["status"] == "ready"
        assert worker["pid"] != running.process.pid
        assert running.end(number) == 0
        assert "Traceback" not in running.err
    assert (tmp_path / "fluxmesh.db").exists()
    assert f"storage: sqlite:///{tmp_path}/fluxmesh.db" in running.err
    assert run("workers", "--json", cwd=tmp_path).document["items"] == []


def test_the_api_alone_runs_nothing_and_ends_with_0(tmp_path: Path) -> None:
    with server_command(tmp_path, "--no-standalone") as (running, url):
        job_id = httpx.post(f"{url}/api/v1/jobs", json={"task": "batch_process"}).json()["id"]
        assert httpx.get(f"{url}/api/v1/workers").json()["items"] == []
        assert httpx.get(f"{url}/api/v1/jobs/{job_id}").json()["status"] == "PENDING"
        assert "no worker" in running.err
        assert running.end() == 0


def test_a_second_signal_ends_a_server_with_1(tmp_path: Path) -> None:
    with server_command(tmp_path, "--grace", "60") as (running, url):
        fields = {"task": "slow_task", "args": [60]}
        job_id = httpx.post(f"{url}/api/v1/jobs", json=fields).json()["id"]
        until = time.monotonic() + PATIENCE_S
        while httpx.get(f"{url}/api/v1/jobs/{job_id}").json()["status"] != "RUNNING":
            assert time.monotonic() < until
        running.process.send_signal(signal.SIGTERM)
        running.until("draining")
        time.sleep(2 * SAME_MOMENT_S)  # sooner it would be the same telling
        began = time.monotonic()
        assert running.end() == 1
        assert time.monotonic() - began < 5
    job = run("jobs", "show", job_id, "--json", cwd=tmp_path).document
    assert (job["status"], job["attempts"], job["crashes"]) == ("PENDING", 0, 0)


def test_fifty_submissions_with_one_key_over_two_servers_store_one_job(tmp_path: Path) -> None:
    url = make_database(tmp_path / "jobs.db")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(server_command(tmp_path, "--no-standalone", "--url", url))[1]
            for _ in range(2)
        ]
        barrier = threading.Barrier(50)
        fields = {"task": "t", "args": [1], "idempotency_key": "order-7"}

        def submit(number: int) -> httpx.Response:
            barrier.wait(PATIENCE_S)
            return httpx.post(f"{servers[number % 2]}/api/v1/jobs", json=fields, timeout=PATIENCE_S)

        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(submit, range(50)))
    assert sorted(answer.status_code for answer in answers) == [200] * 49 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    replayed = [answer.headers.get("idempotent-replayed") for answer in answers]
    assert replayed.count("true") == 49


def test_a_token_is_asked_for_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_text("first-token\nsecond-token\n")
    with server_command(tmp_path, "--no-standalone", "--token", "@tokens.txt") as (running, url):
        problem(httpx.get(f"{url}/api/v1/jobs"), 401)
        for token in ("first-token", "second-token"):
            headers = {"authorization": f"Bearer {token}"}
            assert httpx.get(f"{url}/api/v1/jobs", headers=headers).status_code == 200
        assert running.end() == 0
        assert "-token" not in running.err


def test_a_token_may_come_from_the_environment(tmp_path: Path) -> None:
    env = {"FLUXMESH_TOKEN": "secret,other"}
    with server_command(tmp_path, env=env) as (running, url):
        problem(httpx.get(f"{url}/api/v1/jobs"), 401)
        headers = {"authorization": "Bearer other"}
        fields = {"task": "batch_process", "kwargs": {"items": []}}
        job_id = httpx.post(f"{url}/api/v1/jobs", json=fields, headers=headers).json()["id"]
        wait_url = f"{url}/api/v1/jobs/{job_id}/wait"
        assert httpx.get(wait_url, headers=headers, timeout=PATIENCE_S).json()["status"] == "COMPLETED"
        assert running.end() == 0
        assert "secret" not in running.err
    shown = run("config", "show", "--json", cwd=tmp_path, env={"FLUXMESH_TOKEN": "secret"})
    assert shown.document["token"]["value"] == "***"
    assert "secret" not in shown.out


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run("server", "--no-standalone", "--port", port, cwd=tmp_path).refused(1, port, "--port 0")


def test_an_app_that_cannot_be_imported_ends_the_server_with_3(tmp_path: Path) -> None:
    run("server", "--port", "0", "--app", "nothing:queue", cwd=tmp_path).refused(3, "nothing")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--host", "0.0.0.0"), 2, ("0.0.0.0", "--token", "--insecure")),
        (("--host", "::"), 2, ("--insecure",)),
        (("--host", "example.org"), 2, ("--insecure",)),
        (("--host", ""), 2, ("--insecure",)),
        (("--token", ""), 2, ("token",)),
        (("--token", "two words"), 2, ("token",)),
        (("--token", "@missing.txt"), 2, ("missing.txt",)),
        (("--no-standalone", "--concurrency", "4"), 2, ("--no-standalone",)),
        (("--no-standalone", "--id", "w"), 2, ("--no-standalone",)),
        (("--queues", "high,mail"), 2, ("queues",)),
        (("--url", "memory://"), 2, ("memory",)),
        (("--url", "sqlite:////no/such/folder/x.db"), 4, ("/no/such/folder",)),
    ],
    ids=str,
)
def test_a_server_that_cannot_be_is_refused(
    args: tuple[str, ...],
    code: int,
    words: tuple[str, ...],
    call: Call,  # noqa: F811
    tmp_path: Path,
) -> None:
    call("server", "--port", "0", *args, cwd=tmp_path).refused(code, *words)
    assert not (tmp_path / "fluxmesh.db").exists()


def test_a_wide_bind_goes_with_a_token_or_on_demand(tmp_path: Path) -> None:
    for args in (("--token", "t"), ("--insecure",)):
        with server_command(tmp_path, "--no-standalone", "--host", "0.0.0.0", *args) as (running, url):
            port = url.rpartition(":")[2]
            headers = {"authorization": "Bearer t"}
            assert httpx.get(f"http://127.0.0.1:{port}/api/v1/jobs", headers=headers).status_code == 200
            assert running.end() == 0


def test_a_changed_file_starts_the_server_anew(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("from fluxmesh import Queue\nqueue = Queue()\n")
    with server_command(tmp_path, "--no-standalone", "--reload") as (running, url):
        assert httpx.get(f"{url}/healthz").status_code == 200
        (tmp_path / "new.py").write_text("x = 1\n")
        running.until("/docs", times=2)
        assert "a file changed" in running.err
        assert running.end() == 0


def test_where_a_server_cannot_listen_is_told_by_what_would_mend_it(tmp_path: Path, call: Call) -> None:  # noqa: F811
    elsewhere = ("--host", "192.0.2.1", "--insecure")  # RFC 5737: nobody has it
    call("server", "--no-standalone", *elsewhere, cwd=tmp_path).refused(1, "cannot listen", "hint: --host")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        call("server", "--port", port, cwd=tmp_path).refused(1, "cannot listen", "hint: another --port")
