"""fluxmesh dlq: list, groups, replay, discard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import harness
from tests.cli.harness import listed, run_here, show, submit


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, str]]:
    """A database without a worker that holds dead letters a, b (of one kind) and c, and a cancelled job."""
    folder = tmp_path_factory.mktemp("letters")
    url = harness.make_database(folder / "jobs.db")
    ids = {}
    with harness.worker(url, folder):
        for name, task, args in (
            ("a", "failing_task", '["no luck 1"]'),
            ("b", "failing_task", '["no luck 2"]'),
            ("c", "file_digest", '["/nowhere"]'),
        ):
            ids[name] = submit(url, folder, task, "--args", args, "--max-retries", "0")
            assert run_here("jobs", "wait", ids[name], "--url", url, cwd=folder).code == 10
    ids["cancelled"] = submit(url, folder, "t")
    assert run_here("jobs", "cancel", ids["cancelled"], "--url", url, cwd=folder).code == 0
    return url, folder, ids


def test_the_list_has_dead_letters_only_newest_first(letters: tuple[str, Path, dict[str, str]]) -> None:
    url, folder, ids = letters
    document = run_here("dlq", "list", "--url", url, "--json", cwd=folder).document
    assert [job["id"] for job in document["items"]] == [ids["c"], ids["b"], ids["a"]]
    assert all(job["error"]["frames"] for job in document["items"])
    picked = run_here("dlq", "list", "--url", url, "--q", "task:file_digest", cwd=folder).out.splitlines()
    assert len(picked) == 2
    assert ids["c"] in picked[1]


def test_groups_count_failures_of_one_kind(letters: tuple[str, Path, dict[str, str]]) -> None:
    url, folder, ids = letters
    groups = run_here("dlq", "groups", "--url", url, "--json", cwd=folder).document["items"]
    assert sorted((group["task"], group["count"]) for group in groups) == [
        ("failing_task", 2),
        ("file_digest", 1),
    ]
    assert {group["example"] for group in groups} == {ids["b"], ids["c"]}
    assert "failing_task" in run_here("dlq", "groups", "--url", url, cwd=folder).out


def test_a_dry_run_changes_nothing(letters: tuple[str, Path, dict[str, str]]) -> None:
    url, folder, ids = letters
    done = run_here(
        "dlq", "replay", "--url", url, "--q", "task:failing_task", "--dry-run", "--json", cwd=folder
    )
    assert {item["job_id"] for item in done.document["items"]} == {ids["a"], ids["b"]}
    assert "2 would be replayed" in done.err
    assert len(listed(url, folder, "state:DEAD_LETTER")) == 3


@pytest.mark.parametrize(
    "choice", [(), ("--all", "--q", "task:x"), ("0190a3e4-5b6c-7d8e-9f01-23456789abcd", "--all")]
)
@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_exactly_one_choice_is_asked_for(
    verb: str, choice: tuple[str, ...], letters: tuple[str, Path, dict[str, str]]
) -> None:
    url, folder, _ = letters
    run_here("dlq", verb, "--url", url, *choice, cwd=folder).refused(2, "exactly one")


def test_only_dead_letters_are_touched(letters: tuple[str, Path, dict[str, str]]) -> None:
    url, folder, ids = letters
    for verb in ("replay", "discard"):
        run_here("dlq", verb, ids["cancelled"], "--url", url, cwd=folder).refused(
            6, "is no dead letter", "CANCELLED"
        )
        run_here("dlq", verb, "nothing", "--url", url, cwd=folder).refused(6, "no job")
    run_here("dlq", "list", "--url", url, "--q", "state:PENDING", cwd=folder).refused(2, "no dead letter")


def test_replay_and_discard_empty_the_list(letters: tuple[str, Path, dict[str, str]]) -> None:
    url, folder, ids = letters
    one = run_here("dlq", "replay", ids["a"], "--url", url, cwd=folder)
    assert (one.code, one.out) == (0, f"{ids['a']} REPLAYED\n")
    run_here("dlq", "replay", ids["a"], "--url", url, cwd=folder).refused(6, "is no dead letter")
    assert show(url, folder, ids["a"])["life"] == 2

    gone = run_here("dlq", "discard", "--url", url, "--q", "task:file_digest", cwd=folder)
    assert (gone.code, gone.out) == (0, f"{ids['c']} DISCARDED\n")
    assert run_here("jobs", "show", ids["c"], "--url", url, cwd=folder).code == 6

    rest = run_here("dlq", "replay", "--url", url, "--all", "--json", cwd=folder)
    assert rest.document == {"items": [{"job_id": ids["b"], "status": "REPLAYED"}]}
    assert run_here("dlq", "list", "--url", url, "--json", cwd=folder).document["items"] == []
