"""fluxmesh submit: what is stored, what is refused, what is waited for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fluxmesh.ids import new_job_id
from tests.cli.conftest import Call
from tests.cli.harness import listed, run, run_here, show, submit

NOWHERE = "sqlite:///nowhere.db"


def test_a_job_is_stored_and_its_id_is_the_only_data(url: str, tmp_path: Path) -> None:
    done = run_here("submit", "--url", url, "--task", "mail.send", cwd=tmp_path)

    assert done.code == 0
    assert len(done.out.splitlines()) == 1
    assert f"storage: {url}" in done.err
    job = show(url, tmp_path, done.out.strip())
    assert (job["task"], job["status"], job["queue"], job["priority"]) == (
        "mail.send",
        "PENDING",
        "default",
        2,
    )


def test_every_option_arrives(url: str, tmp_path: Path) -> None:
    options = {
        "--queue": "mail",
        "--priority": "critical",
        "--delay": "60",
        "--expires-in": "120.5",
        "--max-retries": "0",
        "--timeout": "2.5",
        "--backoff-strategy": "linear",
        "--backoff-base": "0.5",
        "--max-backoff": "9",
        "--jitter": "none",
        "--max-crashes": "2",
        "--idempotency-key": "key-1",
        "--unique-key": "key-2",
        "--affinity-key": "key-3",
        "--concurrency-key": "key-4",
        "--concurrency-limit": "3",
        "--id": new_job_id(),
    }
    given = [part for pair in options.items() for part in pair]
    given += ["--tags", "a,b", "--tags", "c", "--headers", "traceparent=00-1", "--headers", "x=y=z"]
    payload = ["--args", '[1, "zwei"]', "--kwargs", '{"drei": [3.5, null, true]}']

    done = run_here("submit", "--url", url, "--task", "t", *given, *payload, "--json", cwd=tmp_path)

    assert done.code == 0, done
    job = done.document
    expected = {
        "id": options["--id"],
        "queue": "mail",
        "priority": 0,
        "status": "SCHEDULED",
        "args": [1, "zwei"],
        "kwargs": {"drei": [3.5, None, True]},
        "max_retries": 0,
        "timeout_seconds": 2.5,
        "backoff_strategy": "linear",
        "backoff_base_seconds": 0.5,
        "max_backoff_seconds": 9.0,
        "jitter": "none",
        "max_crashes": 2,
        "idempotency_key": "key-1",
        "unique_key": "key-2",
        "affinity_key": "key-3",
        "concurrency_key": "key-4",
        "concurrency_limit": 3,
        "tags": ["a", "b", "c"],
        "headers": {"traceparent": "00-1", "x": "y=z"},
        "created": True,
        "deduplicated": False,
    }
    assert {name: job[name] for name in expected} == expected
    assert job["scheduled_at"] - job["created_at"] == pytest.approx(60)
    assert job["expires_at"] - job["created_at"] == pytest.approx(120.5)
    assert show(url, tmp_path, job["id"]).items() <= job.items()


def test_a_point_in_time_is_epoch_seconds_or_iso(url: str, tmp_path: Path) -> None:
    for text, instant in (("4102444800", 4_102_444_800), ("2100-01-01T01:00:00+01:00", 4_102_444_800)):
        job = show(url, tmp_path, submit(url, tmp_path, "t", "--run-at", text))
        assert (job["scheduled_at"], job["status"]) == (instant, "SCHEDULED")


def test_arguments_come_from_a_file_or_from_stdin(url: str, tmp_path: Path) -> None:
    (tmp_path / "kwargs.json").write_text('{"name": "Zoë"}', encoding="utf-8")
    line = ("submit", "--url", url, "--task", "t", "--args", "-", "--kwargs", "@kwargs.json", "--json")
    done = run(*line, cwd=tmp_path, stdin="[[1], 2]")
    assert (done.document["args"], done.document["kwargs"]) == ([[1], 2], {"name": "Zoë"})


def test_one_idempotency_key_is_one_job_and_another_payload_a_conflict(url: str, tmp_path: Path) -> None:
    line = ("submit", "--url", url, "--task", "t", "--idempotency-key", "k", "--json")
    first = run(*line, "--kwargs", '{"a": 1, "b": 2}', cwd=tmp_path)
    again = run(*line, "--kwargs", '{"b": 2, "a": 1}', cwd=tmp_path)
    other = run(*line, "--kwargs", '{"a": 1, "b": 3}', cwd=tmp_path)
    elsewhere = run_here(*line, "--kwargs", '{"a": 1}', "--namespace", "other", cwd=tmp_path)

    assert (first.document["created"], again.document["deduplicated"]) == (True, True)
    assert again.document["id"] == first.document["id"]
    assert "idempotency" in again.err
    other.refused(6, "another payload", "hint: ")
    assert elsewhere.document["created"] is True
    assert len(listed(url, tmp_path)) == 1


def test_a_unique_key_that_is_held_gives_its_holder(url: str, tmp_path: Path) -> None:
    first = submit(url, tmp_path, "t", "--unique-key", "k")
    again = run_here("submit", "--url", url, "--task", "t", "--unique-key", "k", "--json", cwd=tmp_path)
    assert (again.document["id"], again.document["deduplicated"]) == (first, True)


def test_a_full_queue_is_told(url: str, tmp_path: Path) -> None:
    cap = {"FLUXMESH_QUEUE_CAP": "1"}
    line = ("submit", "--url", url, "--task", "t")
    assert run(*line, cwd=tmp_path, env=cap).code == 0
    run(*line, cwd=tmp_path, env=cap).refused(1, "is full", "hint: ")


# -- bad input -----------------------------------------------------------------------------------------

DEEP = "[" * 10_000 + "]" * 10_000
BAD = {
    "negative retries": (("--max-retries", "-1"), "--max-retries"),
    "negative timeout": (("--timeout", "-1"), "--timeout"),
    "no time at all": (("--timeout", "0"), "--timeout"),
    "timeout NaN": (("--timeout", "nan"), "--timeout"),
    "delay NaN": (("--delay", "nan"), "--delay"),
    "negative delay": (("--delay", "-0.1"), "--delay"),
    "endless delay": (("--delay", "inf"), "--delay"),
    "delay and run-at": (("--delay", "1", "--run-at", "2030-01-01T00:00:00Z"), "--run-at"),
    "the year 30000": (("--run-at", "30000-01-01T00:00:00Z"), "--run-at"),
    "the year 30000 in seconds": (("--run-at", "884541340800"), "--run-at"),
    "a time without offset": (("--run-at", "2030-01-01T00:00:00"), "offset"),
    "run-at NaN": (("--run-at", "nan"), "--run-at"),
    "expiry before the delay": (("--delay", "5", "--expires-in", "5"), "--expires-in"),
    "an empty task name": (("--task", ""), "--task"),
    "a long task name": (("--task", "t" * 100_000), "100,000 characters"),
    "a task name with a newline": (("--task", "a\nb"), "--task"),
    "a queue named like a tier": (("--queue", "critical"), "name of a tier"),
    "an empty queue name": (("--queue", ""), "--queue"),
    "a queue with a colon": (("--queue", "a:b"), "--queue"),
    "no tier": (("--priority", "urgent"), "critical, high, default, low"),
    "tier 4": (("--priority", "4"), "--priority"),
    "tier minus one": (("--priority=-1",), "--priority"),
    "no strategy": (("--backoff-strategy", "random"), "exponential"),
    "a limit without a key": (("--concurrency-limit", "2"), "concurrency_key"),
    "no id": (("--id", "42"), "UUIDv7"),
    "no header": (("--headers", "x"), "K=V"),
    "args not JSON": (("--args", "[1,"), "not JSON"),
    "args an object": (("--args", "{}"), "JSON array"),
    "kwargs an array": (("--kwargs", "[]"), "JSON object"),
    "kwargs with NaN": (("--kwargs", '{"x": NaN}'), "NaN"),
    "kwargs with a huge number": (("--kwargs", '{"x": 1e999}'), "finite"),
    "more than 64 bits": (("--args", "[36893488147419103232]"), "64 bits"),
    "10,000 levels": (("--args", DEEP), "levels"),
    "102 levels": (("--args", "[" * 102 + "]" * 102), "levels"),
    "no such file": (("--args", "@nothing.json"), "No such file"),
    "a file without end": (("--args", "@/dev/zero"), "67,108,864"),
    "half a surrogate": (("--args", '["\\ud800"]'), "Unicode"),
    "wait-timeout alone": (("--wait-timeout", "3"), "--wait"),
    "stdin twice": (("--args", "-", "--kwargs", "-"), "stdin"),
}


@pytest.mark.parametrize(("options", "word"), BAD.values(), ids=BAD)
def test_bad_input_is_told_with_a_hint_and_stores_nothing(
    options: tuple[str, ...], word: str, url: str, tmp_path: Path, call: Call
) -> None:
    told = call("submit", "--url", url, "--task", "t", *options, cwd=tmp_path)

    told.refused(2, word)
    assert all(len(line) < 1_000 for line in told.err.splitlines())
    assert (
        call("jobs", "list", "--url", url, "--json", cwd=tmp_path).out == '{"items":[],"next_cursor":null}\n'
    )


def test_a_payload_of_one_byte_too_much_is_refused_and_one_that_fits_is_taken(
    url: str, tmp_path: Path
) -> None:
    # [["x…"], {}] costs: array 1, array 1, str 5, map 1
    most = (1 << 20) - 8
    file = tmp_path / "args.json"
    file.write_text(f'["{"x" * (most + 1)}"]')
    line = ("submit", "--url", url, "--task", "t", "--args", f"@{file}")
    run_here(*line, cwd=tmp_path).refused(2, "1,048,577 bytes", "1,048,576", "hint: ")
    file.write_text(f'["{"x" * most}"]')
    assert run_here(*line, cwd=tmp_path).code == 0


def test_bytes_that_are_no_text_are_refused(url: str, tmp_path: Path) -> None:
    run("submit", "--url", url, "--task", b"\xff\xfe", cwd=tmp_path).refused(2, "--task")


# -- waiting -------------------------------------------------------------------------------------------


def test_waiting_prints_the_result(served: str, tmp_path: Path) -> None:
    line = (
        "submit",
        "--url",
        served,
        "--task",
        "batch_process",
        "--kwargs",
        '{"items": ["a", "b"]}',
        "--wait",
    )
    done = run_here(*line, cwd=tmp_path)
    assert done.code == 0, done
    assert '"total":2' in done.out.splitlines()[1]
    assert "COMPLETED 100 %" in done.err

    document = run_here(*line, "--json", cwd=tmp_path).document
    assert (document["status"], document["result"]["processed_count"]) == ("COMPLETED", 2)
    assert (document["progress"], document["error"], document["created"]) == (100.0, None, True)


def test_a_job_that_fails_ends_the_wait_with_10(served: str, tmp_path: Path) -> None:
    line = (
        "submit",
        "--url",
        served,
        "--task",
        "failing_task",
        "--args",
        '["no luck"]',
        "--max-retries",
        "0",
    )
    done = run_here(*line, "--wait", "--json", cwd=tmp_path)
    assert done.code == 10
    job = done.document
    assert (job["status"], job["attempts"]) == ("DEAD_LETTER", 1)
    assert set(job["error"]) == {"type", "message", "frames", "text"}
    assert "no luck" in job["error"]["message"]
    assert "error: " in done.err
    assert f"jobs show {job['id']}" in done.err


def test_a_wait_that_is_too_long_ends_with_124_and_shows_the_job(url: str, tmp_path: Path) -> None:
    began = time.monotonic()
    line = ("submit", "--url", url, "--task", "t", "--wait", "--wait-timeout", "0.3", "--json")
    done = run_here(*line, cwd=tmp_path)
    assert done.code == 124
    assert done.document["status"] == "PENDING"
    assert "still PENDING" in done.err
    assert time.monotonic() - began < 10


def test_a_lonely_wait_says_that_no_worker_is_there(url: str, tmp_path: Path) -> None:
    done = run_here("submit", "--url", url, "--task", "t", "--wait", "--wait-timeout", "4.5", cwd=tmp_path)
    assert done.code == 124
    assert "no worker is alive; start one with `fluxmesh worker`" in done.err
