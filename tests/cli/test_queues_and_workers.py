"""fluxmesh queues, workers, doctor, config show."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from fluxmesh.config import NAMES
from tests.cli.conftest import Call
from tests.cli.harness import PATIENCE_S, make_database, run, run_here, show, submit
from tests.redis_server import Server

WORKER_FIELDS = {
    "worker_id", "epoch", "hostname", "pid", "queues", "status", "capacity", "running", "last_heartbeat",
}  # fmt: skip


def test_queues_are_listed_with_what_waits(url: str, tmp_path: Path) -> None:
    assert run_here("queues", "list", "--url", url, "--json", cwd=tmp_path).document["items"] == []
    submit(url, tmp_path, "t", "--queue", "mail", "--priority", "high")
    submit(url, tmp_path, "t", "--queue", "mail", "--delay", "60")

    (queue,) = run_here("queues", "list", "--url", url, "--json", cwd=tmp_path).document["items"]

    assert queue["queue"] == "mail"
    assert queue["queued"] == {"critical": 0, "high": 1, "default": 0, "low": 0}
    assert (queue["scheduled"], queue["running"], queue["paused"]) == (1, 0, False)
    assert "mail" in run_here("queues", "list", "--url", url, cwd=tmp_path).out


def test_a_queue_is_paused_and_resumed(url: str, tmp_path: Path) -> None:
    for verb, state in (("pause", "paused"), ("resume", "open")):
        done = run_here("queues", verb, "mail", "--url", url, cwd=tmp_path)
        assert (done.code, done.out) == (0, f"mail {state}\n")
        again = run_here("queues", verb, "mail", "--url", url, "--json", cwd=tmp_path)
        assert again.document == {"queue": "mail", "paused": verb == "pause", "changed": False}
    run_here("queues", "pause", "high", "--url", url, cwd=tmp_path).refused(2, "name of a tier")


def test_workers_are_listed(served: str, tmp_path: Path) -> None:
    (worker,) = run_here("workers", "--url", served, "--json", cwd=tmp_path).document["items"]
    assert worker.keys() >= WORKER_FIELDS
    assert (worker["status"], worker["capacity"], worker["queues"]) == ("ready", 4, ["default"])
    assert worker["hostname"] == socket.gethostname()
    assert worker["worker_id"] in run_here("workers", "--url", served, cwd=tmp_path).out


# -- doctor --------------------------------------------------------------------------------------------


def findings(
    url: str, cwd: Path, *, powerless: bool = False, env: Mapping[str, str] | None = None
) -> tuple[int, dict[str, dict[str, str]]]:
    done = run("doctor", "--url", url, "--json", cwd=cwd, powerless=powerless, env=env)
    assert "Traceback" not in done.err
    document = done.document
    assert document["ok"] is all(check["status"] != "fail" for check in document["checks"])
    assert all(check["hint"] for check in document["checks"] if check["status"] != "ok")
    return done.code, {check["name"]: check for check in document["checks"]}


def test_doctor_finds_a_served_database_well(served: str, tmp_path: Path) -> None:
    code, checks = findings(served, tmp_path)
    assert code == 0
    for name in ("python", "clock", "permissions", "schema", "sqlite", "doorbells", "workers", "beats"):
        assert checks[name]["status"] == "ok", checks[name]
    assert {"file system", "free space"} <= checks.keys()


def test_doctor_finds_a_job_whose_task_no_worker_has(served: str, tmp_path: Path) -> None:
    job_id = submit(served, tmp_path, "nobody.has_it")
    until = time.monotonic() + PATIENCE_S
    while show(served, tmp_path, job_id)["waiting_for"] is None:
        assert time.monotonic() < until
    _, checks = findings(served, tmp_path)
    assert checks["queues"]["status"] == "warn"
    assert "nobody.has_it" in checks["queues"]["message"]


def test_doctor_finds_jobs_in_a_queue_that_no_worker_serves(served: str, tmp_path: Path) -> None:
    submit(served, tmp_path, "file_digest", "--queue", "mail")
    done = run_here("doctor", "--url", served, cwd=tmp_path)
    assert done.code == 0
    assert "no worker serves: mail" in done.out
    assert "hint: queues: start one: `fluxmesh worker --queues mail`" in done.err


def test_doctor_finds_jobs_in_a_paused_queue(url: str, tmp_path: Path) -> None:
    submit(url, tmp_path, "t", "--queue", "mail")
    run_here("queues", "pause", "mail", "--url", url, cwd=tmp_path)
    assert "`fluxmesh queues resume mail`" in run_here("doctor", "--url", url, cwd=tmp_path).err


def test_doctor_counts_one_job_as_one(url: str, tmp_path: Path) -> None:
    submit(url, tmp_path, "t")
    assert findings(url, tmp_path)[1]["workers"]["message"] == "0 alive, 1 job waits"


def test_doctor_tells_what_a_redis_keeps(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    server = Server(tmp_path_factory.mktemp("redis"))
    try:
        code, checks = findings(server.url(), tmp_path, env={"FLUXMESH_WAIT_REPLICAS": "1"})
        assert code == 0
        assert checks["kept jobs"]["status"] == "warn"
        assert "a restart of the server loses every job" in checks["kept jobs"]["message"]
        assert "appendonly yes" in checks["kept jobs"]["hint"]
        assert checks["replicas"]["status"] == "warn"
        assert "0 connected, wait_replicas is 1" in checks["replicas"]["message"]
        assert not {"schema", "file system", "permissions"} & checks.keys()
        with server.client() as client:
            client.config_set("save", "3600 1")
            _, checks = findings(server.url(), tmp_path)
            assert (checks["kept jobs"]["status"], "replicas" in checks) == ("ok", False)
            client.config_set("save", "")
            client.config_set("appendonly", "yes")
            assert "append-only" in findings(server.url(), tmp_path)[1]["kept jobs"]["message"]
    finally:
        server.stop()


def test_doctor_warns_where_nobody_works(url: str, tmp_path: Path) -> None:
    code, checks = findings(url, tmp_path)
    assert (code, checks["workers"]["status"]) == (0, "warn")
    told = run_here("doctor", "--url", url, cwd=tmp_path)
    assert "hint: workers: start one" in told.err


def test_doctor_fails_on_a_missing_database_and_makes_none(tmp_path: Path) -> None:
    code, checks = findings("sqlite:///nothing.db", tmp_path)
    assert (code, checks["storage"]["status"]) == (4, "fail")
    assert list(tmp_path.iterdir()) == []


def test_doctor_fails_on_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    url = make_database(tmp_path / "jobs.db")
    (tmp_path / "jobs.db").chmod(0o444)
    code, checks = findings(url, tmp_path, powerless=True)
    assert code in (1, 4)
    assert checks["permissions"]["status"] == "fail"


def test_doctor_refuses_another_programs_file(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text(
        "not a database, but a longer text than a header of one would be " * 30
    )
    code, checks = findings("sqlite:///notes.db", tmp_path)
    assert (code, checks["storage"]["status"]) == (4, "fail")


# -- config --------------------------------------------------------------------------------------------


def test_config_shows_every_setting_and_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "fluxmesh.toml").write_text('lease_s = 9\nreap_s = 2.5\nnamespace = "file"\n')
    done = run("config", "show", "--json", "--namespace", "flag", cwd=tmp_path, env={"FLUXMESH_LEASE_S": "7"})
    shown = done.document
    assert tuple(shown) == NAMES
    assert shown["lease_s"] == {"value": 7.0, "source": "FLUXMESH_LEASE_S"}
    assert shown["reap_s"] == {"value": 2.5, "source": "fluxmesh.toml"}
    assert shown["namespace"] == {"value": "flag", "source": "--namespace"}
    assert shown["concurrency"] == {"value": 8, "source": "default"}
    assert shown["url"] == {"value": f"sqlite:///{tmp_path}/fluxmesh.db", "source": "default"}
    assert f"storage: sqlite:///{tmp_path}/fluxmesh.db (namespace flag)" in done.err
    assert "FLUXMESH_LEASE_S" in run("config", "show", cwd=tmp_path, env={"FLUXMESH_LEASE_S": "7"}).out
    assert [path.name for path in tmp_path.iterdir()] == ["fluxmesh.toml"]


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ({"FLUXMESH_LEESE_S": "3"}, "did you mean 'FLUXMESH_LEASE_S'?"),
        ({"FLUXMESH_LEASE_S": "soon"}, "FLUXMESH_LEASE_S"),
        ({"FLUXMESH_LEASE_S": "nan"}, "lease_s"),
        ({"FLUXMESH_URL": "memory://"}, "SQLite"),
        ({"FLUXMESH_URL": "mysql://x"}, "unknown storage"),
        ({"FLUXMESH_NAMESPACE": "a:b"}, "namespace"),
        ({"FLUXMESH_LOG_FORMAT": "xml"}, "log_format"),
    ],
)
@pytest.mark.parametrize(
    "words", [("config", "show"), ("jobs", "list"), ("worker",), ("doctor",)], ids=" ".join
)
def test_a_bad_setting_is_told_by_every_command(
    words: tuple[str, ...], env: dict[str, str], word: str, tmp_path: Path, call: Call
) -> None:
    call(*words, cwd=tmp_path, env=env).refused(2, word, "hint: " if "LEESE" in str(env) else "error: ")
    assert list(tmp_path.iterdir()) == []
