"""Which calls create a database file, and what is said of files and disks that cannot be used."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fluxmesh import Queue, StorageMissing, StorageRefused, StorageUnreachable


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_making_a_queue_creates_nothing(tmp_path: Path) -> None:
    Queue(db_path="tasks.db")
    Queue("sqlite:///tasks.db")
    Queue()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["db_path", "path", "url", "environment", "settings"])
def test_a_named_file_is_created_at_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "environment":
        monkeypatch.setenv("FLUXMESH_URL", "sqlite:///tasks.db")
    queues = {
        "db_path": lambda: Queue(db_path="tasks.db"),
        "path": lambda: Queue(db_path=tmp_path / "tasks.db"),
        "url": lambda: Queue("sqlite:///tasks.db"),
        "environment": lambda: Queue(),
        "settings": lambda: Queue(settings={"url": "sqlite:///tasks.db"}),
    }
    queue = queues[way]()
    queue.submit("t")
    assert (tmp_path / "tasks.db").is_file()
    queue.close()


def test_the_unnamed_file_is_not_created_by_a_producer(tmp_path: Path) -> None:
    queue = Queue()
    for verb in (lambda: queue.submit("t"), queue.counts, queue.list_workers):
        with pytest.raises(StorageMissing, match=r"no database .*fluxmesh\.db"):
            verb()
    assert list(tmp_path.iterdir()) == []


def test_the_unnamed_file_is_used_once_it_is_there(tmp_path: Path) -> None:
    named = Queue(db_path="fluxmesh.db")
    named.submit("t")
    unnamed = Queue()
    assert unnamed.counts().total == 1
    named.close()
    unnamed.close()


def test_a_queue_can_be_told_to_create_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageMissing, match=r"tasks\.db"):
        Queue(db_path="tasks.db", create=False).counts()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_program_is_refused_and_kept() -> None:
    with sqlite3.connect("other.db") as other:
        other.execute("create table precious (value)")
    other.close()
    before = Path("other.db").read_bytes()
    with pytest.raises(StorageRefused, match="another program") as caught:
        Queue(db_path="other.db").submit("t")
    assert caught.value.hint
    with sqlite3.connect("other.db") as other:
        assert other.execute("select name from sqlite_schema").fetchall() == [("precious",)]
    other.close()
    assert len(before) == len(Path("other.db").read_bytes())


def test_a_file_that_is_no_database_is_refused_and_kept() -> None:
    Path("notes.txt").write_text("my notes\n" * 500)
    with pytest.raises(StorageRefused, match="not a sound SQLite database"):
        Queue(db_path="notes.txt").submit("t")
    assert Path("notes.txt").read_text() == "my notes\n" * 500


def test_a_folder_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageUnreachable, match="is a folder"):
        Queue(db_path=tmp_path).submit("t")
    with pytest.raises(StorageUnreachable, match=r"nowhere does not exist \(create it first"):
        Queue(db_path="nowhere/tasks.db").submit("t")


def program(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


# Root may write everywhere, so the program goes on as a user who may not. That user may not be able to read
# the library's files either: one submission before makes sure that all of it is loaded.
READ_ONLY = """
import os, sys
from fluxmesh import Queue
warm = Queue(db_path="warm.db")
warm.submit("t")
warm.close()
os.chdir("/")
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    Queue(db_path=sys.argv[1]).submit("t")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_read_only_database_is_told_as_such() -> None:
    # Not below pytest's own folder, which other users cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="fluxmesh-read-only-"))
    try:
        queue = Queue(db_path=folder / "tasks.db")
        queue.submit("t")
        queue.close()
        (folder / "tasks.db").chmod(0o444)
        folder.chmod(0o555)
        done = program(READ_ONLY, str(folder / "tasks.db"))
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("StorageUnreachable")
    assert "tasks.db" in done.stdout
    assert "chmod" in done.stdout  # what to try


FULL = """
import resource, signal
from fluxmesh import Queue
queue = Queue(db_path="tasks.db")
task = queue.task_named("t")
kept = [task.delay("x" * 1000).id for _ in range(10)]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
refused = []
while not refused:
    try:
        kept.append(task.delay("x" * 100_000).id)
    except Exception as error:
        refused.append(error)
print(type(refused[0]).__name__, refused[0])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
kept.append(task.delay("after").id)
stored = queue.counts().total
assert stored >= len(kept), (stored, len(kept))
assert all(queue.get(job_id).id for job_id in kept)
print("all kept")
"""


def test_a_full_disk_is_told_and_nothing_accepted_is_lost() -> None:
    done = program(FULL)
    assert (done.returncode, done.stderr) == (0, "")
    first, last = done.stdout.strip().splitlines()
    assert first.startswith(("StorageUnreachable", "OutcomeUnknown"))
    assert "tasks.db" in first
    assert last == "all kept"


UNREADABLE = """
import os
from fluxmesh import Queue
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    print(Queue())
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "printed"),
    [
        (0o000, 0o755, "InvalidOption fluxmesh.toml: cannot be read: Permission denied"),
        (0o644, 0o000, "<Queue sqlite:///fluxmesh.db namespace='fluxmesh'>"),
    ],
)
def test_settings_that_may_not_be_read(file_mode: int, folder_mode: int, printed: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fluxmesh-unreadable-"))
    try:
        (folder / "fluxmesh.toml").write_text("")
        (folder / "fluxmesh.toml").chmod(file_mode)
        folder.chmod(folder_mode)
        done = program(f"import os; os.chdir({str(folder)!r})\n{UNREADABLE}")
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    assert (done.stderr, done.stdout.strip()) == ("", printed)
