"""fluxmesh jobs: reads and what they change."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxmesh.ids import new_job_id
from tests.cli.conftest import Call
from tests.cli.harness import listed, run, run_here, show, submit, wait_until

JOB_FIELDS = {
    "id", "task", "queue", "priority", "status", "args", "kwargs", "max_retries",
    "backoff_strategy", "backoff_base_seconds", "max_backoff_seconds", "jitter", "timeout_seconds",
    "idempotency_key", "unique_key", "affinity_key", "concurrency_key", "concurrency_limit", "tags",
    "headers", "attempts", "crashes", "snoozes", "interruptions", "life", "progress",
    "progress_message", "created_at", "scheduled_at", "started_at", "completed_at", "worker_id",
    "waiting_for", "result", "error",
}  # fmt: skip


@pytest.fixture(scope="module")
def failed(served: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of a dead letter."""
    folder = tmp_path_factory.mktemp("failed")
    job_id = submit(served, folder, "failing_task", "--args", '["no luck"]', "--max-retries", "0")
    assert run_here("jobs", "wait", job_id, "--url", served, cwd=folder).code == 10
    return job_id


def test_a_list_has_all_job_fields_and_a_cursor(url: str, tmp_path: Path) -> None:
    ids = [submit(url, tmp_path, "t", "--args", f"[{number}]") for number in range(3)]
    line = ("jobs", "list", "--url", url, "--json", "--limit", "2")

    first = run_here(*line, cwd=tmp_path).document
    second = run_here(*line, "--cursor", first["next_cursor"], cwd=tmp_path).document

    assert [job["id"] for job in first["items"] + second["items"]] == ids[::-1]
    assert second["next_cursor"] is None
    assert first["items"][0].keys() >= JOB_FIELDS
    assert [job["id"] for job in listed(url, tmp_path)] == ids[::-1]


def test_a_list_without_json_is_a_table_that_names_its_cursor(url: str, tmp_path: Path) -> None:
    ids = [submit(url, tmp_path, "some.task") for _ in range(2)]
    done = run_here("jobs", "list", "--url", url, "--limit", "1", cwd=tmp_path)
    header, row = done.out.splitlines()
    assert header.split()[:4] == ["ID", "STATUS", "TASK", "QUEUE"]
    assert row.split()[:4] == [ids[1], "PENDING", "some.task", "default"]
    assert "more: --cursor " in done.err


def test_a_query_picks_jobs(url: str, tmp_path: Path) -> None:
    mine = submit(url, tmp_path, "a", "--queue", "mail", "--tags", "red")
    submit(url, tmp_path, "a")
    for query in ("queue:mail", "tag:red", "task:a queue:mail state:PENDING"):
        assert [job["id"] for job in listed(url, tmp_path, query)] == [mine]
    assert listed(url, tmp_path, "task:b") == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--q", "colour:red"), "field:value"),
        (("--q", "stat:PENDING"), "did you mean 'state'?"),
        (("--q", "state:DONE"), "COMPLETED"),
        (("--q", "state:PENDING state:RUNNING"), "given twice"),
        (("--cursor", "junk"), "cursor"),
        (("--all", "--limit", "3"), "--limit"),
    ],
)
def test_a_bad_query_is_told(
    options: tuple[str, ...], word: str, url: str, tmp_path: Path, call: Call
) -> None:
    done = call("jobs", "list", "--url", url, *options, "--json", cwd=tmp_path)
    assert done.code == 2
    assert word in done.err
    assert "Traceback" not in done.err


def test_show_tells_the_error_with_its_stack(served: str, failed: str, tmp_path: Path) -> None:
    job = show(served, tmp_path, failed)
    assert job["error"]["message"] == "no luck"
    assert job["error"]["text"].startswith("Traceback")

    done = run_here("jobs", "show", failed, "--url", served, cwd=tmp_path)
    assert "status:" in done.out
    assert "DEAD_LETTER" in done.out
    assert "no luck" in done.out
    assert "in failing_task" in done.out


def test_history_has_one_entry_for_each_start(served: str, failed: str, tmp_path: Path) -> None:
    document = run_here("jobs", "history", failed, "--url", served, "--json", cwd=tmp_path).document
    (entry,) = document["items"]
    assert (entry["life"], entry["attempt"], entry["outcome"]) == (1, 1, "failed")
    assert entry["error"]["message"] == "no luck"
    table = run_here("jobs", "history", failed, "--url", served, cwd=tmp_path).out
    assert len(table.splitlines()) == 2


def test_control_characters_of_data_never_reach_the_terminal(served: str, tmp_path: Path) -> None:
    evil = '["\\u001b[2J\\u0007 evil"]'
    job_id = submit(served, tmp_path, "failing_task", "--args", evil, "--max-retries", "0")
    run_here("jobs", "wait", job_id, "--url", served, cwd=tmp_path)
    for words in (("list",), ("show", job_id), ("history", job_id), ("wait", job_id)):
        done = run_here("jobs", *words, "--url", served, cwd=tmp_path)
        assert "\x1b" not in done.out + done.err
        assert "\x07" not in done.out + done.err
    assert show(served, tmp_path, job_id)["args"] == ["\x1b[2J\x07 evil"]


def test_wait_ends_with_the_job(served: str, tmp_path: Path) -> None:
    job_id = submit(served, tmp_path, "slow_task", "--args", "[0.3]")
    done = run_here("jobs", "wait", job_id, "--url", served, "--json", cwd=tmp_path)
    assert (done.code, done.document["status"]) == (0, "COMPLETED")


def test_wait_gives_up_in_time(url: str, tmp_path: Path) -> None:
    job_id = submit(url, tmp_path, "t")
    done = run_here("jobs", "wait", job_id, "--url", url, "--timeout", "0.2", "--json", cwd=tmp_path)
    assert (done.code, done.document["id"]) == (124, job_id)


def test_cancel_is_done_once(url: str, tmp_path: Path) -> None:
    job_id = submit(url, tmp_path, "t")
    done = run_here("jobs", "cancel", job_id, "--url", url, "--json", cwd=tmp_path)
    assert (done.code, done.document) == (0, {"items": [{"job_id": job_id, "status": "CANCELLED"}]})
    run_here("jobs", "cancel", job_id, "--url", url, cwd=tmp_path).refused(6, "has ended already")
    waited = run_here("jobs", "wait", job_id, "--url", url, cwd=tmp_path)
    assert (waited.code, "was cancelled" in waited.err) == (10, True)


def test_a_running_job_is_asked_to_stop(served: str, tmp_path: Path) -> None:
    job_id = submit(served, tmp_path, "slow_task", "--args", "[60]")
    wait_until(served, tmp_path, job_id, "RUNNING")
    done = run_here("jobs", "cancel", job_id, "--url", served, cwd=tmp_path)
    assert (done.code, done.out) == (0, f"{job_id} RUNNING cancel requested\n")
    assert run_here("jobs", "wait", job_id, "--url", served, "--timeout", "20", cwd=tmp_path).code == 10
    assert show(served, tmp_path, job_id)["status"] == "CANCELLED"


def test_one_unknown_id_spoils_the_exit_code_and_not_the_rest(url: str, tmp_path: Path) -> None:
    known, unknown = submit(url, tmp_path, "t"), new_job_id()
    done = run_here("jobs", "cancel", unknown, known, "--url", url, cwd=tmp_path)
    assert (done.code, done.out) == (6, f"{known} CANCELLED\n")
    assert unknown in done.err


def test_retry_starts_a_new_life_of_what_ended_without_success(url: str, tmp_path: Path) -> None:
    job_id = submit(url, tmp_path, "t")
    run_here("jobs", "retry", job_id, "--url", url, cwd=tmp_path).refused(6, "cannot be retried")
    run_here("jobs", "cancel", job_id, "--url", url, cwd=tmp_path)
    done = run_here("jobs", "retry", job_id, "--url", url, cwd=tmp_path)
    assert (done.code, done.out) == (0, f"{job_id} REPLAYED\n")
    job = show(url, tmp_path, job_id)
    assert (job["status"], job["life"]) == ("PENDING", 2)


@pytest.mark.parametrize("verb", ["show", "history", "cancel", "retry", "wait"])
@pytest.mark.parametrize("job_id", ["0190a3e4-5b6c-7d8e-9f01-23456789abcd", "no id", ""])
def test_an_unknown_job_is_6(verb: str, job_id: str, url: str, tmp_path: Path, call: Call) -> None:
    call("jobs", verb, job_id, "--url", url, cwd=tmp_path).refused(6, "no job", "hint: ")


@pytest.mark.parametrize("verb", ["show", "history", "cancel", "retry", "wait"])
def test_an_id_that_is_no_text_is_told_and_not_traced(url: str, tmp_path: Path, verb: str) -> None:
    done = run("jobs", verb, "a\udcffb", "--url", url, cwd=tmp_path)
    assert done.code == 2
    assert "Unicode" in done.err
    assert "Traceback" not in done.err
