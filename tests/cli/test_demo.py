"""fluxmesh demo, end to end and on odd input."""

from __future__ import annotations

import hashlib
import os
import select
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from fluxmesh.cli.demo.cast import make_cast
from fluxmesh.cli.demo.figures import place_of, tier_figures
from fluxmesh.cli.demo.files import OWN_SOURCES, gather
from fluxmesh.config import Settings
from fluxmesh.job import Job, Status
from tests.cli.harness import FLUXMESH, Done, environment, listed, make_database, run, run_here


def demo(tmp_path: Path, *args: str, powerless: bool = False) -> Done:
    """A demo whose temporary folder is below the test's own."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    line = ("demo", *args)
    return run(*line, cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")}, powerless=powerless, timeout=120)


def processes_below(folder: Path) -> list[str]:
    """Command lines that name the folder: worker processes of a demo there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line and "fluxmesh.cli" in line:
                found.append(line)
    return found


def sums(paths: list[Path]) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_the_demo_shows_a_jobs_life_and_another_process_reads_true_results(tmp_path: Path) -> None:
    done = demo(tmp_path)

    assert done.code == 0, done
    assert "Traceback (most recent call last)" in done.out  # the dead letter's stack
    assert "FileNotFoundError" in done.out
    for words in (
        "urgent",
        "flaky     completed at attempt 3",
        "replayed  completed in life 2",
        "What to try next",
    ):
        assert words in done.out
    for tier in ("critical", "high", "default", "low"):
        assert f"\n{tier} " in done.out
    assert processes_below(tmp_path) == []
    (database,) = (tmp_path / "tmp").glob("fluxmesh-demo-*/demo.db")
    assert f"database  {database}" in done.out

    url = f"sqlite:///{database}"
    jobs = [
        job for job in listed(url, tmp_path, "task:file_digest") if Path(job["args"][0]).name != "late.txt"
    ]
    sources = [path for path in OWN_SOURCES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {job["args"][0]: job["result"]["sha256"] for job in jobs} == sums(sources)
    assert all(job["status"] == "COMPLETED" for job in listed(url, tmp_path))
    assert len({job["worker_id"] for job in jobs}) == 2
    assert run_here("workers", "--url", url, "--json", cwd=tmp_path).document["items"] == []


def test_the_commands_to_try_next_work(tmp_path: Path) -> None:
    done = demo(tmp_path, "--dir", str(OWN_SOURCES / "cli"))
    commands = done.out.partition("What to try next")[2].strip().splitlines()
    assert len(commands) == 6
    for command in commands:
        words = shlex.split(command)
        if words[-1] == "&" or "--wait" in words:  # the worker, and the job it would run
            continue
        ended = subprocess.run(
            words, cwd=tmp_path, env=environment(), capture_output=True, timeout=30, check=False
        )
        assert ended.returncode == 0, command
    assert list((tmp_path / "tmp").iterdir()) == []  # the last one was rm -r


def odd_folder(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A folder with all that may lie about, and the files in it that can be read."""
    folder = tmp_path / "odd"
    (folder / "sub folder").mkdir(parents=True)
    good = {
        "empty": b"",
        "binary": os.urandom(3_000_000),
        "sub folder/größe.txt": "zwölf Boxkämpfer\n".encode(),
        "new\nline": b"x",
        "[red]markup": b"y",
        "-rf": b"z",
        "x.database": b"not the database",
    }
    for name, data in good.items():
        (folder / name).write_bytes(data)
    (folder / "link").symlink_to("empty")
    (folder / "broken").symlink_to("nowhere")
    (folder / "circle").symlink_to(".")
    os.mkfifo(folder / "pipe")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")).write_bytes(b"unspeakable")
    (folder / "secret").write_bytes(b"secret")
    (folder / "secret").chmod(0)
    (folder / "locked").mkdir()
    (folder / "locked").chmod(0)
    return folder, [*(folder / name for name in good), folder / "link"]


def test_odd_files_are_digested_or_left_out_with_a_note(tmp_path: Path) -> None:
    folder, good = odd_folder(tmp_path)
    database = folder / "x.data"
    make_database(database)

    done = demo(tmp_path, "--dir", "odd", "--db", "odd/x.data", powerless=True)

    assert done.code == 0, done
    for words in (
        "broken: No such file",
        "pipe: not a regular file",
        "its name is not UTF-8",
        "secret: Permission",
    ):
        assert words in done.out
    assert "locked: Permission" in done.out
    jobs = listed(f"sqlite:///{database}", tmp_path, "task:file_digest")
    results = {job["args"][0]: job["result"]["sha256"] for job in jobs if "late.txt" not in job["args"][0]}
    assert results == sums(good)
    assert list((tmp_path / "tmp").iterdir()) == []  # a named database is kept, the rest is not


def test_a_file_that_opens_but_cannot_be_read_is_told_as_missing(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "good").write_text("good")
    (tmp_path / "files" / "memory").symlink_to("/proc/self/mem")
    done = demo(tmp_path, "--dir", str(tmp_path / "files"))
    assert done.code == 1
    assert "OSError: [Errno 5]" in done.out
    assert f"missing   {tmp_path / 'files' / 'memory'} (its job failed)" in done.out
    assert "did it change" not in done.out


def test_a_kept_database_takes_a_second_demo(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one").write_text("1")
    for _ in range(2):
        done = demo(tmp_path, "--dir", "files", "--url", "sqlite:///kept.db", "--namespace", "demo.1")
        assert done.code == 0, done
        assert "checked   1 of 1 sha256" in done.out
        assert "--namespace demo.1" in done.out
    queues = {job["queue"] for job in listed("sqlite:///kept.db", tmp_path, "", "--namespace", "demo.1")}
    assert len(queues) == 2


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (("--dir", "nowhere"), 2, "does not exist"),
        (("--dir", "a file"), 2, "is not a folder"),
        (("--dir", "empty"), 2, "no file"),
        (("--db", "a.db", "--url", "sqlite:///b.db"), 2, "--url"),
    ],
)
def test_a_demo_of_nothing_is_refused(options: tuple[str, ...], code: int, word: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("x")
    demo(tmp_path, *options).refused(code, word, "hint: ")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_database_that_cannot_be_is_4(tmp_path: Path) -> None:
    for name, word in (("no/where.db", "does not exist"), (".", "is a folder")):
        done = demo(tmp_path, "--db", name)
        assert done.code == 4
        assert word in done.err
        assert "Traceback" not in done.err
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=str
)
def test_an_interrupted_demo_leaves_no_process_behind(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [*FLUXMESH, "demo"],
        cwd=tmp_path,
        env=environment({"TMPDIR": str(tmp_path / "tmp")}),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            pids: list[str] = []
            while not pids:
                line = process.stdout.readline()
                assert line
                if line.startswith("workers "):
                    pids = line.partition(":")[2].split(", ")
            handles = [os.pidfd_open(int(pid)) for pid in pids]
            process.send_signal(number)
            assert process.wait(30) == code
        finally:
            process.kill()
        for handle in handles:
            assert _ended(handle)
            os.close(handle)
    if number is not signal.SIGKILL:
        assert list((tmp_path / "tmp").iterdir()) == []


def _ended(handle: int) -> bool:
    return bool(select.select([handle], [], [], 20)[0])


# -- pure parts ----------------------------------------------------------------------------------------


def test_files_come_in_a_stable_order_and_the_sources_without_byte_code() -> None:
    found = gather(None, leave_out=Path("/nowhere.db"))
    assert found == gather(None, leave_out=Path("/nowhere.db"))
    assert str(OWN_SOURCES / "job.py") in found.files
    assert not any(".pyc" in path for path in found.files)


def test_the_cast_spreads_files_over_the_tiers_and_ends_with_the_urgent_one() -> None:
    cast = make_cast([f"/f{number}" for number in range(6)], "/late", "q", Settings())
    assert [job.tier for job in cast.jobs[:6]] == [0, 1, 2, 3, 0, 1]
    assert (cast.jobs[-1].id, cast.jobs[-1].tier) == (cast.urgent, 0)
    assert sum(cast.by_tier) == len(cast.jobs) == 10
    assert all(job.queue == "q" for job in cast.jobs)


def test_a_place_counts_ties_in_the_order_of_submission() -> None:
    place = place_of("d", ["a", "b", "c", "d", "e"], {"a": 1.0, "b": 2.0, "c": 9.0, "d": 2.0, "e": 2.0})
    assert (place.submitted, place.started, place.overtaken) == (4, 3, 1)


def test_waits_are_those_of_files_that_were_started() -> None:
    cast = make_cast(["/a", "/b"], "/late", "q", Settings())
    job = Job(
        id="1", task="t", queue="q", priority=0, status=Status.COMPLETED, created_at=1.0, started_at=1.5
    )
    waiting = Job(id="2", task="t", queue="q", priority=0, status=Status.PENDING, created_at=1.0)
    urgent = Job(id=cast.urgent, task="t", queue="q", priority=0, status=Status.COMPLETED, started_at=99.0)
    critical, high, *_ = tier_figures([job, waiting, urgent], cast)
    assert (critical.jobs, critical.completed, critical.wait_median_s, critical.wait_most_s) == (
        2,
        1,
        0.5,
        0.5,
    )
    assert (high.jobs, high.wait_median_s) == (0, None)


def test_make_hands_its_folder_to_the_demo() -> None:
    makefile = (OWN_SOURCES.parents[1] / "Makefile").read_text()
    assert '-m fluxmesh.cli demo $(if $(DIR),--dir "$(DIR)")' in makefile
