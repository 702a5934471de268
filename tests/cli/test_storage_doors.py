"""Every command, the storage it is pointed at (missing, read-only, foreign), and its streams."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.cli.harness import FLUXMESH, Running, environment, make_database, run, submit
from tests.redis_server import Server

ID = "0190a3e4-5b6c-7d8e-9f01-23456789abcd"
READS = [
    ("jobs", "list"),
    ("jobs", "show", ID),
    ("jobs", "history", ID),
    ("dlq", "list"),
    ("dlq", "groups"),
    ("queues", "list"),
    ("workers",),
]
ONE_SHOTS = [
    *READS,
    ("submit", "--task", "t"),
    ("submit", "--task", "t", "--wait"),
    ("jobs", "cancel", ID),
    ("jobs", "retry", ID),
    ("jobs", "wait", ID),
    ("dlq", "replay", "--all"),
    ("dlq", "discard", "--all"),
    ("queues", "pause", "q"),
    ("queues", "resume", "q"),
]


@pytest.mark.parametrize("words", ONE_SHOTS, ids=" ".join)
def test_a_missing_database_is_4_and_nothing_is_created(
    words: tuple[str, ...], tmp_path: Path, call: Call
) -> None:
    for where in ((), ("--url", "sqlite:///named.db")):
        done = call(*words, *where, cwd=tmp_path)
        done.refused(
            4, "there is no database", "fluxmesh.db" if not where else "named.db", "hint: ", "storage: "
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("worker",), ("scheduler",), ("demo",), *ONE_SHOTS[:8]], ids=" ".join)
def test_memory_is_refused_and_sqlite_named(words: tuple[str, ...], tmp_path: Path, call: Call) -> None:
    call(*words, "--url", "memory://", cwd=tmp_path).refused(2, "memory://", "sqlite:///")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "mongodb://localhost",
        "jobs.db",
        "sqlite://",
        "sqlite:///a.db?x=1",
        "",
        "://",
        "sqlite:///~nosuchuser/a.db",
    ],
)
def test_a_url_that_means_nothing_is_2(url: str, tmp_path: Path, call: Call) -> None:
    for words in (("jobs", "list"), ("worker",)):
        call(*words, "--url", url, cwd=tmp_path).refused(2, "url", "hint: ")
    assert list(tmp_path.iterdir()) == []


DAEMONS = [
    ("worker",),
    ("scheduler",),
    ("server", "--port", "0"),
    ("server", "--port", "0", "--no-standalone"),
    ("dev", "--port", "0", "--no-reload"),
]


@pytest.fixture(scope="module")
def shut_port() -> Iterator[int]:
    """Bound and not listening: nobody answers, and nobody else can begin to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture(scope="module")
def frozen_port() -> Iterator[int]:
    """The kernel takes connections, as for a server that is stopped; nobody ever says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as mute:
        yield mute.getsockname()[1]


@pytest.mark.parametrize("words", [*ONE_SHOTS, *DAEMONS, ("demo",), ("doctor",)], ids=" ".join)
@pytest.mark.parametrize("frozen", [False, True], ids=["shut", "frozen"])
def test_a_redis_that_does_not_answer_is_4_and_its_password_is_not_told(
    words: tuple[str, ...],
    frozen: bool,
    shut_port: int,
    frozen_port: int,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fluxmesh.storage.redis.backend.OPEN_S", 0.05)
    url = f"redis://:secret@127.0.0.1:{frozen_port if frozen else shut_port}/0"
    answer = call(*words, "--url", url, cwd=tmp_path)
    assert answer.code == 4
    assert "redis://:***@127.0.0.1" in answer.err
    assert "hint: " in answer.err
    assert "secret" not in answer.err + answer.out
    assert "Traceback" not in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_redis_ends_a_command_within_five_seconds(frozen_port: int, tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{frozen_port}/0"
    run("jobs", "list", "--url", url, cwd=tmp_path).refused(4, "did not answer in 3 s")


def test_a_redis_that_refuses_the_login_is_5(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = Server(tmp_path_factory.mktemp("redis"), "--requirepass", "right")
    try:
        for word in ("", ":wrong@"):
            url = f"redis://{word}127.0.0.1:{server.port}/0"
            done = run("jobs", "list", "--url", url, cwd=tmp_path)
            done.refused(5, f"127.0.0.1:{server.port}", "password of the URL")
            assert "wrong@" not in done.err
    finally:
        server.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("worker",), ("scheduler",)], ids=" ".join)
def test_a_daemon_cannot_create_a_database_in_a_folder_that_is_not_there(
    words: tuple[str, ...], tmp_path: Path, call: Call
) -> None:
    call(*words, "--url", "sqlite:///no/where.db", cwd=tmp_path).refused(4, "does not exist")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("jobs", "list"), ("submit", "--task", "t"), ("worker",)], ids=" ".join)
def test_a_foreign_file_is_refused_and_left_as_it_is(
    words: tuple[str, ...], tmp_path: Path, call: Call
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("these are notes, and no database at all\n" * 100)
    call(*words, "--url", f"sqlite:///{text}", cwd=tmp_path).refused(4, "notes.txt", "hint: ")
    assert text.read_text().startswith("these are notes")

    other = tmp_path / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("create table mine (x)")
    connection.commit()
    connection.close()
    call(*words, "--url", f"sqlite:///{other}", cwd=tmp_path).refused(4, "another program", "hint: ")
    call(*words, "--url", f"sqlite:///{tmp_path}", cwd=tmp_path).refused(4, "is a folder", "hint: ")


def test_a_read_only_database_takes_no_job(tmp_path: Path) -> None:
    url = make_database(tmp_path / "jobs.db")
    (tmp_path / "jobs.db").chmod(0o444)
    for words in (("submit", "--task", "t"), ("queues", "pause", "q"), ("worker",)):
        run(*words, "--url", url, cwd=tmp_path, powerless=True).refused(4, "jobs.db", "hint: ")


@pytest.mark.parametrize("words", [("jobs", "list"), *DAEMONS[:3], ("demo",), ("doctor",)], ids=" ".join)
def test_a_folder_that_may_not_be_entered_is_4(words: tuple[str, ...], tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    url = make_database(locked / "jobs.db")
    locked.chmod(0)
    try:
        done = run(*words, "--url", url, cwd=tmp_path, powerless=True)
    finally:
        locked.chmod(0o700)
    assert done.code == 4, done
    assert "Traceback" not in done.err
    assert "Permission denied" in done.out + done.err
    assert f"may not enter the folder {locked}" in done.err


def test_a_file_whose_own_mode_forbids_it_is_told_as_such(tmp_path: Path) -> None:
    url = make_database(tmp_path / "jobs.db")
    (tmp_path / "jobs.db").chmod(0)
    run("worker", "--url", url, cwd=tmp_path, powerless=True).refused(4, "file's own mode", "chmod u+rw")


def test_who_only_reads_makes_no_database_of_an_empty_file(tmp_path: Path, call: Call) -> None:
    empty = tmp_path / "empty.db"
    empty.touch()
    for words in ONE_SHOTS:
        call(*words, "--url", f"sqlite:///{empty}", cwd=tmp_path).refused(4, "an empty file", "hint: ")
    assert call("doctor", "--url", f"sqlite:///{empty}", cwd=tmp_path).code == 4
    assert empty.stat().st_size == 0
    assert list(tmp_path.iterdir()) == [empty]
    with Running("scheduler", "--url", f"sqlite:///{empty}", cwd=tmp_path) as running:
        running.until("scheduler started")
        assert running.end() == 0
    assert call("jobs", "list", "--url", f"sqlite:///{empty}", cwd=tmp_path).code == 0


# -- streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", READS, ids=" ".join)
def test_every_read_has_one_json_document_on_stdout(
    words: tuple[str, ...], url: str, tmp_path: Path, call: Call
) -> None:
    job_id = submit(url, tmp_path, "t")
    line = [job_id if word == ID else word for word in words]
    done = call(*line, "--url", url, "--json", "--log-format", "json", cwd=tmp_path)
    assert done.code == 0, done
    assert isinstance(done.document, dict)
    assert done.out.count("\n") == 1
    (storage,) = [json.loads(line) for line in done.err.splitlines()]
    assert storage == {
        "event": "storage",
        "level": "info",
        "logger": "cli",
        "url": url,
        "namespace": "fluxmesh",
    }


def test_the_environment_names_the_storage_and_a_flag_beats_it(url: str, tmp_path: Path) -> None:
    job_id = submit(url, tmp_path, "t")
    told = run("jobs", "list", cwd=tmp_path, env={"FLUXMESH_URL": url})
    assert job_id in told.out
    told = run("jobs", "list", "--url", url, cwd=tmp_path, env={"FLUXMESH_URL": "sqlite:///other.db"})
    assert job_id in told.out


def test_the_default_is_fluxmesh_db_in_the_working_directory(tmp_path: Path) -> None:
    make_database(tmp_path / "fluxmesh.db")
    done = run("jobs", "list", cwd=tmp_path)
    assert done.code == 0
    assert done.err == f"storage: sqlite:///{tmp_path}/fluxmesh.db (namespace fluxmesh)\n"


def test_a_closed_pipe_is_no_error(url: str, tmp_path: Path) -> None:
    submit(url, tmp_path, "t")
    for words in (["jobs", "list"], ["jobs", "list", "--json"], ["--help"], ["config", "show"]):
        reader, writer = os.pipe()
        os.close(reader)
        line = [*words, "--url", url] if words != ["--help"] else words
        done = subprocess.run(
            [*FLUXMESH, *line],
            cwd=tmp_path,
            env=environment(),
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=30,
        )
        os.close(writer)
        assert done.returncode == 0
        assert b"Traceback" not in done.stderr
        assert b"Broken" not in done.stderr


@pytest.mark.parametrize("line", [("jobs", "list"), ("jobs", "list", "--json"), ("--help",)], ids=" ".join)
def test_output_that_cannot_be_written_is_told(line: tuple[str, ...], url: str, tmp_path: Path) -> None:
    submit(url, tmp_path, "t")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*FLUXMESH, *line, "--url", url],
            cwd=tmp_path,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
        )
    assert done.returncode == 1
    assert b"error: the output cannot be written" in done.stderr
    assert b"Traceback" not in done.stderr


def test_data_is_utf_8_in_a_locale_that_is_not(url: str, tmp_path: Path) -> None:
    submit(url, tmp_path, "t", "--tags", "größe")
    poor = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    assert run("jobs", "list", "--url", url, "--json", cwd=tmp_path, env=poor).document["items"][0][
        "tags"
    ] == ["größe"]
    job_id = run("jobs", "list", "--url", url, cwd=tmp_path, env=poor).out.split()[8]
    assert "gr\\xf6\\xdfe" in run("jobs", "show", job_id, "--url", url, cwd=tmp_path, env=poor).out
