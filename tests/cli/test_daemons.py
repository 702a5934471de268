"""fluxmesh worker and scheduler; signals; apps."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fluxmesh.worker.supervisor import SAME_MOMENT_S
from tests.cli.conftest import Call
from tests.cli.harness import (
    FLUXMESH,
    PATIENCE_S,
    Running,
    environment,
    make_database,
    run,
    run_here,
    show,
    submit,
    wait_until,
    worker,
)

APP = """
import os, time
from fluxmesh import Queue
queue = Queue({arguments})

@queue.task(name="pid")
def pid():
    return os.getpid()

@queue.task(name="stay")
def stay(seconds):
    time.sleep(seconds)
    return "stayed"
"""


# -- signals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_one_shot_command_ends_by_the_signals_code(
    number: signal.Signals, code: int, url: str, tmp_path: Path
) -> None:
    job_id = submit(url, tmp_path, "t")
    with Running("jobs", "wait", job_id, "--url", url, cwd=tmp_path) as running:
        running.until("PENDING")
        assert running.end(number) == code
        assert "Traceback" not in running.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("command", "ready"), [("worker", "worker ready"), ("scheduler", "scheduler started")]
)
def test_a_daemon_creates_its_database_and_ends_with_0_after_one_signal(
    command: str, ready: str, number: signal.Signals, tmp_path: Path
) -> None:
    with Running(command, cwd=tmp_path) as running:
        running.until(ready)
        assert running.end(number) == 0
        assert "Traceback" not in running.err
    assert (tmp_path / "fluxmesh.db").exists()
    assert f"storage: sqlite:///{tmp_path}/fluxmesh.db" in running.err


def test_a_second_signal_ends_a_worker_with_1_and_the_job_is_not_charged(tmp_path: Path) -> None:
    url = make_database(tmp_path / "jobs.db")
    with worker(url, tmp_path, "--grace", "60") as running:
        job_id = submit(url, tmp_path, "slow_task", "--args", "[60]")
        wait_until(url, tmp_path, job_id, "RUNNING")
        running.process.send_signal(signal.SIGTERM)
        running.until("draining")
        time.sleep(2 * SAME_MOMENT_S)  # sooner it would be the same telling
        assert running.end() == 1
    job = show(url, tmp_path, job_id)
    assert (job["status"], job["attempts"], job["crashes"]) == ("PENDING", 0, 0)


@pytest.mark.parametrize(
    ("command", "ready", "over"),
    [
        ("worker", "worker ready", "worker ended [supervisor]"),
        ("scheduler", "scheduler started", "scheduler stopped"),
    ],
)
def test_a_daemon_that_has_come_to_its_end_is_not_killed_by_a_late_signal(
    command: str, ready: str, over: str, tmp_path: Path
) -> None:
    with Running(command, cwd=tmp_path) as running:
        running.until(ready)
        running.process.send_signal(signal.SIGTERM)
        running.until(over)
        deadline = time.monotonic() + PATIENCE_S
        while running.process.poll() is None:
            assert time.monotonic() < deadline
            running.process.send_signal(signal.SIGTERM)
            time.sleep(0.002)  # without a rest it would do nothing but take signals
        assert running.process.returncode in (0, 1)  # 1: it was still in time to count as the second


def test_a_worker_under_a_program_ends_with_its_standard_input(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*FLUXMESH, "worker", "--stop-at-eof"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stdin is not None
        try:
            while "worker ready" not in process.stderr.readline():
                assert process.poll() is None
            process.stdin.close()
            assert process.wait(20) == 0
        finally:
            process.kill()


# -- worker --------------------------------------------------------------------------------------------


def test_tier_names_as_queues_mean_tiers_and_are_echoed(url: str, tmp_path: Path) -> None:
    with worker(url, tmp_path, "--queues", "critical,high", "--id", "w", "--concurrency", "3") as running:
        assert "worker w: tiers critical, high of queue default" in running.err
        assert "mean --tiers" in running.err
        (info,) = run_here("workers", "--url", url, "--json", cwd=tmp_path).document["items"]
        assert (info["worker_id"], info["queues"], info["tiers"]) == ("w", ["default"], [0, 1])
        assert info["capacity"] == 3
        assert running.end() == 0


def test_processes_have_ids_of_their_own_and_serve_the_queues_that_were_named(
    url: str, tmp_path: Path
) -> None:
    flags = ("--queues", "mail", "--queues", "default", "--tiers", "low,0", "--reserve", "critical=2")
    with worker(url, tmp_path, *flags, "--id", "w", "--processes", "2") as running:
        infos = run_here("workers", "--url", url, "--json", cwd=tmp_path).document["items"]
        assert sorted(info["worker_id"] for info in infos) == ["w.0", "w.1"]
        assert all((info["queues"], info["tiers"]) == (["mail", "default"], [0, 3]) for info in infos)
        assert "tiers critical, low of queues mail, default, 2 slots kept for critical" in running.err
        assert running.end() == 0
        assert run_here("workers", "--url", url, "--json", cwd=tmp_path).document["items"] == []


def test_logs_of_a_worker_are_json_lines_if_asked_for(url: str, tmp_path: Path) -> None:
    with worker(url, tmp_path, "--log-format", "json") as running:
        assert running.end() == 0
    events = [json.loads(line)["event"] for line in running.err.splitlines()]
    assert events[:2] == ["storage", "worker serves"]
    assert "worker ended" in events


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--queues", "critical,mail"), "is a tier"),
        (("--queues", "critical", "--tiers", "high"), "--tiers"),
        (("--queues", "a:b"), "colon"),
        (("--tiers", "urgent"), "--tiers"),
        (("--tiers", "4"), "--tiers"),
        (("--reserve", "critical"), "TIER=N"),
        (("--reserve", "critical=x"), "TIER=N"),
        (("--reserve", "mail=1"), "--reserve"),
        (("--reserve", "critical=8"), "8 of 8 slots"),
        (("--reserve", "critical=1,critical=2"), "twice"),
        (("--reserve", "critical=1", "--tiers", "low"), "not served"),
        (("--id", "a:b"), "--id"),
        (("--id", ""), "--id"),
    ],
)
def test_a_worker_that_cannot_be_is_refused(
    options: tuple[str, ...], word: str, tmp_path: Path, call: Call
) -> None:
    call("worker", *options, cwd=tmp_path).refused(2, word)
    assert list(tmp_path.iterdir()) == []


# -- apps ----------------------------------------------------------------------------------------------


def test_an_app_brings_its_tasks_and_its_storage(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP.format(arguments='db_path="tasks.db"'))
    url = f"sqlite:///{tmp_path}/tasks.db"
    with Running("worker", "--app", "app:queue", "--id", "w", cwd=tmp_path) as running:
        running.until("worker ready")
        assert f"storage: {url} " in running.err
        job_id = submit(url, tmp_path, "pid")
        assert run_here("jobs", "wait", job_id, "--url", url, cwd=tmp_path).code == 0
        (info,) = run_here("workers", "--url", url, "--json", cwd=tmp_path).document["items"]
        assert show(url, tmp_path, job_id)["result"] == info["pid"] != running.process.pid
        unknown = submit(url, tmp_path, "file_digest", "--args", '["app.py"]')
        assert run_here("jobs", "wait", unknown, "--url", url, "--timeout", "0.5", cwd=tmp_path).code == 124
        assert running.end() == 0
    assert not (tmp_path / "fluxmesh.db").exists()


def test_an_app_without_a_storage_takes_the_one_of_the_flag(url: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP.format(arguments=""))
    with worker(url, tmp_path, "--app", "app:queue", "--builtins") as running:
        for task, args in (("pid", "[]"), ("file_digest", '["/etc/hostname"]')):
            job_id = submit(url, tmp_path, task, "--args", args)
            assert run_here("jobs", "wait", job_id, "--url", url, cwd=tmp_path).code == 0
        (info,) = run_here("workers", "--url", url, "--json", cwd=tmp_path).document["items"]
        line = Path(f"/proc/{info['pid']}/cmdline").read_text()
        assert "fluxmesh.cli.child" in line
        assert "sqlite:" not in line  # nor a password
        assert running.end() == 0


@pytest.mark.parametrize("words", [("worker",), ("server", "--port", "0")], ids=" ".join)
@pytest.mark.parametrize("by", ["--url", "FLUXMESH_URL"])
def test_a_url_that_contradicts_the_app_is_refused(by: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP.format(arguments='db_path="tasks.db"'))
    line, env = [*words, "--app", "app:queue"], {}
    if by == "--url":
        line += [by, "sqlite:///other.db"]
    else:
        env[by] = "sqlite:///other.db"
    done = run(*line, cwd=tmp_path, env=env)
    done.refused(2, "tasks.db", "other.db", f"error: {by}: ", "hint: ")
    assert not list(tmp_path.glob("*.db"))


@pytest.mark.parametrize(
    ("source", "app", "word"),
    [
        ("raise RuntimeError('no config')", "app:queue", "no config"),
        ("1 +", "app:queue", "SyntaxError"),
        ("import not_installed_at_all", "app:queue", "not_installed_at_all"),
        ("raise SystemExit(7)", "app:queue", "SystemExit"),
        ("import os; os._exit(9)", "app:queue", "exit status 9"),
        ("import os; os.kill(os.getpid(), 11)", "app:queue", "SIGSEGV"),
        ("queue = 3", "app:queue", "int"),
        ("", "app:queue", "has no"),
        ("", "missing:queue", "missing"),
        ("", "app", "module:queue"),
        ("", ":", "module:queue"),
        (
            (
                "from fluxmesh import Queue\nqueue = Queue()\n@queue.task(name='a')\ndef f(): ...\n"
                "@queue.task(name='a')\ndef g(): ..."
            ),
            "app:queue",
            "already defined",
        ),
    ],
)
def test_an_app_that_cannot_be_imported_is_3(source: str, app: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(source)
    done = run("worker", "--app", app, cwd=tmp_path)
    done.refused(3, word, "hint: ")
    assert done.err.count("error: ") == 1
    assert not list(tmp_path.glob("*.db"))


def test_an_app_with_a_task_named_like_a_built_in_is_told(tmp_path: Path) -> None:
    source = "from fluxmesh import Queue\nqueue = Queue()\n@queue.task(name='file_digest')\ndef f(): ..."
    (tmp_path / "app.py").write_text(source)
    run("worker", "--app", "app:queue", "--builtins", cwd=tmp_path).refused(2, "already defined", "hint: ")


def test_a_body_that_reads_standard_input_finds_it_empty(url: str, tmp_path: Path) -> None:
    source = "import sys\nfrom fluxmesh import Queue\nqueue = Queue()\n"
    source += "@queue.task(name='read')\ndef read(): return sys.stdin.read()\n"
    (tmp_path / "app.py").write_text(source)
    with worker(url, tmp_path, "--app", "app:queue") as running:
        job_id = submit(url, tmp_path, "read")
        assert run_here("jobs", "wait", job_id, "--url", url, "--timeout", "20", cwd=tmp_path).out == '""\n'
        assert running.end() == 0


def test_children_end_when_their_supervisor_is_killed(url: str, tmp_path: Path) -> None:
    with worker(url, tmp_path, "--processes", "2") as running:
        infos = run_here("workers", "--url", url, "--json", cwd=tmp_path).document["items"]
        handles = [os.pidfd_open(info["pid"]) for info in infos]
        os.kill(running.process.pid, signal.SIGKILL)
        for handle in handles:
            assert select.select([handle], [], [], 20)[0]
            os.close(handle)
        assert run_here("workers", "--url", url, "--json", cwd=tmp_path).document["items"] == []


@pytest.mark.parametrize(
    ("words", "ready"),
    [(("worker",), "worker ready"), (("scheduler",), "scheduler started")],
    ids=["worker", "scheduler"],
)
def test_a_database_that_is_damaged_ends_a_daemon_with_4(
    words: tuple[str, ...], ready: str, tmp_path: Path
) -> None:
    url = make_database(tmp_path / "jobs.db")
    with Running(*words, "--url", url, cwd=tmp_path) as running:
        running.until(ready)
        for name in ("jobs.db", "jobs.db-wal"):
            if not (tmp_path / name).exists():
                continue
            with (tmp_path / name).open("r+b") as file:
                size = len(file.read())
                file.seek(100)
                file.write(b"\xa5" * (size - 100))
        assert running.wait() == 4
    assert "error: " in running.err
    assert "is not a sound SQLite database" in running.err
    assert "hint: restore a copy" in running.err
    assert "Traceback" not in running.err
    assert running.err.count("worker ready") <= 1
    told = run("doctor", "--url", url, cwd=tmp_path)
    assert told.code == 4
    assert "sound enough" not in told.out
    assert "restore a copy" in told.err
