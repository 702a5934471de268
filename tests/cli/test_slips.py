"""Slips of the first hour: each is told in a way that shows the way out."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.cli.harness import Running, make_database, run


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("worker", "--concurency", "3"), "hint: did you mean --concurrency? `fluxmesh worker --help` shows"),
        (("submit", "--task", "t", "--priorty=high"), "did you mean --priority? `fluxmesh submit --help`"),
        (("worker", "--mesh-sead", "localhost"), "did you mean --mesh-seeds? `fluxmesh worker --help`"),
        (("jobs", "list", "--limits", "3"), "did you mean --limit? `fluxmesh jobs list --help`"),
        (("job", "list"), "did you mean jobs? `fluxmesh --help`"),
        (("dlq", "lst"), "did you mean list? `fluxmesh dlq --help`"),
        (("workers", "--zzz"), "hint: `fluxmesh workers --help` shows"),
    ],
)
def test_a_mistyped_word_is_told_with_the_one_that_was_meant(
    words: tuple[str, ...], hint: str, tmp_path: Path, call: Call
) -> None:
    call(*words, cwd=tmp_path).refused(2, hint)


def test_a_path_where_a_url_is_wanted_is_shown_as_one(tmp_path: Path, call: Call) -> None:
    call("workers", "--url", "tasks.db", cwd=tmp_path).refused(2, "sqlite:///tasks.db")
    call("workers", "--url", "/var/tasks.db", cwd=tmp_path).refused(2, "sqlite:////var/tasks.db")


def test_a_missing_database_names_those_that_lie_beside_it(tmp_path: Path, call: Call) -> None:
    make_database(tmp_path / "tasks.db")
    (tmp_path / "notes.db").write_text("no database")
    done = call("jobs", "list", cwd=tmp_path)
    done.refused(4, "there is no database", "--url sqlite:///tasks.db")
    assert "notes.db" not in done.err


@pytest.mark.parametrize(
    ("app", "hint"),
    [
        ("app.py:queue", "hint: app:queue"),
        ("app:q", "hint: app:queue"),
        ("app:work", "hint: app:queue"),
        ("app", "hint: app:queue, if its Queue has that name"),
        ("other:queue", "hint: run it in the folder"),
    ],
)
def test_a_wrong_app_is_told_with_the_right_one(app: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        textwrap.dedent(
            """
            from fluxmesh import Queue

            queue = Queue(db_path="tasks.db")


            @queue.task
            def work() -> None: ...
            """
        )
    )
    run("worker", "--app", app, cwd=tmp_path).refused(3, hint)
    assert not (tmp_path / "tasks.db").exists()


QUEUE = 'from fluxmesh import Queue\n\nqueue = Queue(db_path="tasks.db")\n'


def test_an_app_that_runs_a_worker_while_it_is_imported_is_told_of_the_guard(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(f"{QUEUE}queue.run_worker()\n")
    done = run("worker", "--app", "app:queue", cwd=tmp_path)
    done.refused(3, "run_worker() is called while 'app' is imported", 'if __name__ == "__main__":')


def test_an_app_that_waits_while_it_is_imported_is_told_of_the_guard(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(f"{QUEUE}queue.submit('t').result()\n")
    with Running("worker", "--app", "app:queue", cwd=tmp_path) as worker:
        worker.until("--app app:queue: its import goes on after 5 s")
        worker.until('under `if __name__ == "__main__":`')
