"""/api/v1/jobs over real HTTP: what is stored, what is answered, what is refused."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from fluxmesh.clock import ManualClock
from fluxmesh.codec import decode_options
from fluxmesh.config import Settings
from fluxmesh.ids import new_job_id
from fluxmesh.job import JobOptions
from fluxmesh.query import Query
from fluxmesh.storage.values import Retention
from fluxmesh.task import timeout_for
from tests.api.serving import Api, problem, served

JOBS = "/api/v1/jobs"
OLD_ID = "01000000-0000-7000-8000-000000000000"  # made in 2004
HTML = "<script>alert('x')</script>"


# -- submission ------------------------------------------------------------------------------------------


def test_a_job_is_stored_and_shown_as_it_is(api: Api) -> None:
    fields = {
        "task": "mail",
        "args": [1, "zwei", None],
        "kwargs": {"html": HTML},
        "queue": "post",
        "priority": "high",
        "max_retries": 1,
        "timeout_seconds": 2.5,
        "tags": ["a", "b"],
        "headers": {"traceparent": "00-1"},
        "idempotency_key": "as-it-is",
    }
    answer = api.client.post(JOBS, json=fields)

    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"{JOBS}/{job['id']}"
    assert {name: job[name] for name in fields} == fields | {"priority": 1}
    assert (job["status"], job["attempts"], job["error"]) == ("PENDING", 0, None)
    assert isinstance(job["created_at"], float)
    assert api.client.get(answer.headers["location"]).json() == job


def test_a_delay_and_a_point_in_time_schedule_it(api: Api) -> None:
    later = api.submit(delay_seconds=60)
    assert later["status"] == "SCHEDULED"
    assert later["scheduled_at"] == pytest.approx(later["created_at"] + 60, abs=0.001)
    assert api.submit(run_at="2090-01-31T08:00:00Z")["scheduled_at"] == 3789532800.0
    assert api.submit(run_at=3789532800)["status"] == "SCHEDULED"


def test_null_means_left_out(api: Api) -> None:
    job = api.submit(args=None, kwargs=None, queue=None, priority=None, tags=None, delay_seconds=None)
    assert (job["args"], job["kwargs"], job["queue"], job["priority"]) == ([], {}, "default", 2)


def test_a_field_that_nobody_reads_is_told_with_the_names_of_rest(api: Api) -> None:
    told = api.client.post("/api/v1/jobs", json={"task": "t", "arg": [1]})
    assert told.status_code == 422
    assert "did you mean 'args'" in told.text
    told = api.client.post("/api/v1/jobs", json={"task": "t", "colour": 1})
    assert "timeout_seconds" in told.text
    assert "kwargs" in told.text


def test_an_idempotency_key_answers_with_the_job_of_before(api: Api) -> None:
    first = api.client.post(JOBS, json={"task": "t", "args": [1], "idempotency_key": "again"})
    again = api.client.post(JOBS, json={"task": "t", "args": [1], "idempotency_key": "again"})

    assert (first.status_code, again.status_code) == (201, 200)
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["id"] == first.json()["id"]
    other = api.client.post(JOBS, json={"task": "t", "args": [2], "idempotency_key": "again"})
    assert problem(other, 409)["code"] == "idempotency_conflict"


def test_a_unique_key_answers_with_its_holder(api: Api) -> None:
    first = api.submit(unique_key="one")
    again = api.client.post(JOBS, json={"task": "t", "args": [9], "unique_key": "one"})
    assert again.status_code == 200
    assert "idempotent-replayed" not in again.headers
    assert (again.json()["id"], again.json()["deduplicated"]) == (first["id"], True)


def test_an_id_made_by_the_producer_is_kept_and_may_be_repeated(api: Api) -> None:
    own = new_job_id()
    assert api.submit(id=own)["id"] == own
    again = api.client.post(JOBS, json={"task": "t", "id": own})
    assert (again.status_code, again.json()["id"]) == (200, own)


def test_a_key_whose_job_is_pruned_still_answers(tmp_path: Path) -> None:
    clock = ManualClock()
    with served(tmp_path / "jobs.db", clock=clock) as api:
        job = api.submit(idempotency_key="kept")
        assert api.client.post(f"{JOBS}/{job['id']}/cancel").status_code == 200
        clock.advance(7_200)
        assert api.run(api.storage.prune(Retention(3_600, 3_600, 86_400), 100)).jobs == 1
        again = api.client.post(JOBS, json={"task": "t", "idempotency_key": "kept"})
        assert again.status_code == 200
        assert again.json() == {
            "id": job["id"],
            "status": "CANCELLED",
            "pruned": True,
            "deduplicated": True,
        }


def test_a_full_queue_is_told_with_a_time_to_try_again(tmp_path: Path) -> None:
    with served(tmp_path / "jobs.db", Settings(queue_cap=1)) as api:
        api.submit()
        refused = api.client.post(JOBS, json={"task": "t"})
        assert problem(refused, 429)["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("own", "of_task", "wanted_s"),
    [
        ({}, None, 60.0),
        ({}, 5.0, 5.0),
        ({"timeout_seconds": 7}, 5.0, 7.0),
        ({"timeout_seconds": 900}, None, 900.0),
    ],
)
def test_a_task_that_sets_no_timeout_gets_a_minute_through_rest(
    api: Api, own: dict[str, Any], of_task: float | None, wanted_s: float
) -> None:
    task = f"timed-{new_job_id()}"
    job = api.submit(task=task, queue=task, **own)
    _, claimed = api.start(task)
    assert claimed.id == job["id"]
    options = decode_options(claimed.options)
    assert timeout_for(options, JobOptions(timeout_seconds=of_task), Settings()) == wanted_s


# -- bulk --------------------------------------------------------------------------------------------------


def test_every_job_of_a_bulk_is_judged_for_itself(api: Api) -> None:
    api.submit(args=[1], idempotency_key="bulk")
    jobs: list[Any] = [
        {"task": "t"},
        {"task": "t", "priority": "urgent"},
        {"task": "t", "args": [2], "idempotency_key": "bulk"},
        {"task": "t", "args": [1], "idempotency_key": "bulk"},
        "no object",
        {"task": "t", "args": {"a": 1}},
    ]
    answer = api.client.post(f"{JOBS}/bulk", json={"jobs": jobs})

    assert answer.status_code == 200
    items = answer.json()["items"]
    assert [item["status"] for item in items] == [201, 422, 409, 200, 422, 422]
    assert [item.get("problem", {}).get("field") for item in items] == [
        None, "priority", None, None, "jobs", "args",
    ]  # fmt: skip
    assert items[3]["idempotent_replayed"] is True
    assert api.client.get(f"{JOBS}/{items[0]['job']['id']}").status_code == 200


def test_a_bulk_of_a_thousand_is_stored_and_one_more_is_refused(api: Api) -> None:
    jobs = [{"task": "thousand", "args": [n]} for n in range(1_000)]
    answer = api.client.post(f"{JOBS}/bulk", json={"jobs": jobs})
    assert {item["status"] for item in answer.json()["items"]} == {201}
    page = api.run(api.storage.find(Query(task="thousand"), limit=1_000))
    assert len(page.items) == 1_000
    problem(api.client.post(f"{JOBS}/bulk", json={"jobs": [*jobs, {"task": "t"}]}), 422, "jobs")


# -- one job -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["", "/history", "/wait"])
@pytest.mark.parametrize(
    ("job_id", "status"),
    [
        (new_job_id(), 404),
        (OLD_ID, 410),
        ("nonsense", 404),
        ("%00", 404),
        ("%FF%FE", 404),
        ("'; drop table jobs; --", 404),
        ("x" * 5_000, 404),
        (HTML.replace("/", "%2F"), 404),
    ],
)
def test_an_id_without_a_job(api: Api, job_id: str, status: int, verb: str) -> None:
    problem(api.client.get(f"{JOBS}/{job_id}{verb}"), status)


@pytest.mark.parametrize("verb", ["cancel", "retry", "reprioritise"])
@pytest.mark.parametrize(("job_id", "status"), [(new_job_id(), 404), (OLD_ID, 410), ("nonsense", 404)])
def test_a_verb_for_an_id_without_a_job(api: Api, job_id: str, status: int, verb: str) -> None:
    body = {"priority": 1} if verb == "reprioritise" else {}
    problem(api.client.post(f"{JOBS}/{job_id}/{verb}", json=body), status)


def test_a_waiting_job_is_cancelled_and_retried(api: Api) -> None:
    job = api.submit()
    cancelled = api.client.post(f"{JOBS}/{job['id']}/cancel")
    assert cancelled.status_code == 200
    assert cancelled.json() == {"job_id": job["id"], "status": "CANCELLED"}
    problem(api.client.post(f"{JOBS}/{job['id']}/cancel"), 409)

    retried = api.client.post(f"{JOBS}/{job['id']}/retry")
    assert retried.json() == {"job_id": job["id"], "status": "REPLAYED"}
    problem(api.client.post(f"{JOBS}/{job['id']}/retry"), 409)
    again = api.client.get(f"{JOBS}/{job['id']}").json()
    assert (again["status"], again["life"]) == ("PENDING", 2)


def test_a_running_job_is_told_to_stop(api: Api) -> None:
    task = f"running-{new_job_id()}"
    job = api.submit(task=task, queue=task)
    assert api.start(task)[1].id == job["id"]
    answer = api.client.post(f"{JOBS}/{job['id']}/cancel")
    assert answer.status_code == 202
    assert answer.json() == {"job_id": job["id"], "status": "RUNNING", "cancel_requested": True}


def test_a_job_is_moved_to_another_tier_until_it_has_ended(api: Api) -> None:
    job = api.submit()
    url = f"{JOBS}/{job['id']}/reprioritise"
    assert api.client.post(url, json={"priority": "critical"}).json() == {
        "job_id": job["id"],
        "status": "PENDING",
        "priority": 0,
    }
    problem(api.client.post(url, json={"priority": 4}), 422, "priority")
    problem(api.client.post(url, json={}), 422, "priority")
    problem(api.client.post(url, json={"priority": 1, "tier": 1}), 422, "tier")
    api.client.post(f"{JOBS}/{job['id']}/cancel")
    problem(api.client.post(url, json={"priority": 1}), 409)


def test_a_wait_ends_with_the_job(api: Api) -> None:
    job = api.submit()
    answers: list[httpx.Response] = []
    url = f"{JOBS}/{job['id']}/wait"
    waiter = threading.Thread(target=lambda: answers.append(api.client.get(url, params={"timeout": 25})))
    waiter.start()
    api.client.post(f"{JOBS}/{job['id']}/cancel")
    waiter.join(20)
    assert not waiter.is_alive()
    assert (answers[0].status_code, answers[0].json()["status"]) == (200, "CANCELLED")


def test_a_wait_whose_time_is_up_answers_with_the_job_as_it_is(api: Api) -> None:
    job = api.submit()
    answer = api.client.get(f"{JOBS}/{job['id']}/wait", params={"timeout": 0})
    assert (answer.status_code, answer.json()["status"]) == (202, "PENDING")


def until_waits(api: Api, count: int) -> None:
    until = time.monotonic() + 10
    while api.store.waits != count:
        assert time.monotonic() < until, api.store.waits
        time.sleep(0.005)


def test_a_wait_is_answered_when_the_server_stops(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    with served(tmp_path / "jobs.db") as api:
        url = f"{api.client.base_url}{JOBS}/{api.submit()['id']}/wait?timeout=60".replace("//api", "/api")
        waiter = threading.Thread(target=lambda: answers.append(httpx.get(url, timeout=30)))
        waiter.start()
        until_waits(api, 1)
    waiter.join(10)
    assert (answers[0].status_code, answers[0].json()["status"]) == (202, "PENDING")


def test_a_wait_of_somebody_who_hung_up_is_over(tmp_path: Path) -> None:
    with served(tmp_path / "jobs.db") as api:
        url = f"{JOBS}/{api.submit()['id']}/wait?timeout=60"
        with socket.create_connection(("127.0.0.1", api.client.base_url.port or 0)) as raw:
            raw.sendall(f"GET {url} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            until_waits(api, 1)
        until_waits(api, 0)


def test_the_history_tells_of_every_start(api: Api) -> None:
    job = api.submit()
    assert api.client.get(f"{JOBS}/{job['id']}/history").json() == {"items": [], "next_cursor": None}
    dead = api.dead_letter("told", HTML)
    page = api.client.get(f"{JOBS}/{dead}/history").json()
    [attempt] = page["items"]
    assert (attempt["attempt"], attempt["outcome"], attempt["worker_id"]) == (1, "failed", "told")
    assert attempt["error"]["message"] == HTML
    assert api.client.get(f"{JOBS}/{dead}").json()["error"] == {
        "type": "LuckError",
        "message": HTML,
        "frames": ["app.py:1 run"],
        "text": f"LuckError: {HTML}",
    }


# -- lists ---------------------------------------------------------------------------------------------------


def test_pages_follow_each_other_without_a_gap(api: Api) -> None:
    ids = [api.submit(task="paged", args=[n])["id"] for n in range(7)]
    seen: list[str] = []
    params: dict[str, Any] = {"q": "task:paged", "limit": 3}
    for size in (3, 3, 1):
        page = api.client.get(JOBS, params=params).json()
        assert len(page["items"]) == size
        assert page["partial"] is False
        seen += [job["id"] for job in page["items"]]
        params["cursor"] = page["next_cursor"]
    assert page["next_cursor"] is None
    assert seen == ids[::-1]


def test_a_page_of_large_jobs_ends_early_and_the_next_goes_on(api: Api) -> None:
    ids = [api.submit(task="large", args=["x" * 1_000_000])["id"] for _ in range(20)]
    seen: list[str] = []
    params: dict[str, Any] = {"q": "task:large", "limit": 1_000}
    sizes = []
    while "cursor" not in params or params["cursor"] is not None:
        answer = api.client.get(JOBS, params=params)
        sizes.append(len(answer.content))
        seen += [job["id"] for job in answer.json()["items"]]
        params["cursor"] = answer.json()["next_cursor"]
    assert seen == ids[::-1]
    assert max(sizes) < 24 << 20


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1_001}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"limit": ""}, "limit"),
        ({"limit": "9" * 5_000}, "limit"),
        ({"q": "colour:red"}, "q"),
        ({"q": "state:LOST"}, "q"),
        ({"q": "x" * 5_000}, "q"),
        ({"q": "state:PENDING state:PENDING"}, "q"),
        ({"q": "created>yesterday"}, "q"),
        ({"cursor": "junk"}, "cursor"),
        ({"cursor": ""}, "cursor"),
        ({"cursor": HTML}, "cursor"),
        ({"page": 2}, "page"),
        ([("limit", 1), ("limit", 2)], "limit"),
    ],
)
def test_a_list_refuses_what_it_cannot_read(api: Api, params: Any, field: str) -> None:
    problem(api.client.get(JOBS, params=params), 422, field)


def test_a_cursor_belongs_to_its_query(api: Api) -> None:
    for _ in range(2):
        api.submit(task="cursed")
    cursor = api.client.get(JOBS, params={"q": "task:cursed", "limit": 1}).json()["next_cursor"]
    other = api.client.get(JOBS, params={"q": "state:PENDING", "cursor": cursor})
    problem(other, 422, "cursor")


@pytest.mark.parametrize("timeout", ["-1", "61", "nan", "inf", "soon", ""])
def test_a_wait_is_bounded(api: Api, timeout: str) -> None:
    problem(api.client.get(f"{JOBS}/{new_job_id()}/wait", params={"timeout": timeout}), 422, "timeout")


# -- what a producer may get wrong ---------------------------------------------------------------------------


WRONG: list[tuple[Any, str]] = [
    ({}, "task"),
    ({"task": ""}, "task"),
    ({"task": 7}, "task"),
    ({"task": "t" * 201}, "task"),
    ({"task": "a\nb"}, "task"),
    ({"task": "t", "colour": "red"}, "colour"),
    ({"task": "t", "priorty": 1}, "priorty"),
    ({"task": "t", HTML: 1}, HTML),
    ({"task": "t", "\ud800": 1}, "\\ud800"),
    ({"task": "t", "args": {}}, "args"),
    ({"task": "t", "args": "ab"}, "args"),
    ({"task": "t", "kwargs": []}, "kwargs"),
    ({"task": "t", "args": [2**70]}, "args"),
    ({"task": "t", "args": ["\ud800"]}, "args"),
    ({"task": "t", "queue": "high"}, "queue"),
    ({"task": "t", "queue": "a:b"}, "queue"),
    ({"task": "t", "queue": 1}, "queue"),
    ({"task": "t", "priority": 4}, "priority"),
    ({"task": "t", "priority": -1}, "priority"),
    ({"task": "t", "priority": True}, "priority"),
    ({"task": "t", "priority": 1.5}, "priority"),
    ({"task": "t", "priority": "urgent"}, "priority"),
    ({"task": "t", "priority": HTML}, "priority"),
    ({"task": "t", "max_retries": -1}, "max_retries"),
    ({"task": "t", "max_retries": "3"}, "max_retries"),
    ({"task": "t", "max_retries": 10**30}, "max_retries"),
    ({"task": "t", "backoff_strategy": "random"}, "backoff_strategy"),
    ({"task": "t", "jitter": []}, "jitter"),
    ({"task": "t", "backoff_base_seconds": -1}, "backoff_base_seconds"),
    ({"task": "t", "timeout_seconds": 0}, "timeout_seconds"),
    ({"task": "t", "timeout_seconds": "1"}, "timeout_seconds"),
    ({"task": "t", "delay_seconds": -1}, "delay_seconds"),
    ({"task": "t", "delay_seconds": 10**20}, "delay_seconds"),
    ({"task": "t", "delay_seconds": 1, "run_at": 1}, "run_at"),
    ({"task": "t", "run_at": "tomorrow"}, "run_at"),
    ({"task": "t", "run_at": "2030-01-01T00:00:00"}, "run_at"),
    ({"task": "t", "run_at": 10**300}, "run_at"),
    ({"task": "t", "expires_in_seconds": 1, "delay_seconds": 2}, "expires_in_seconds"),
    ({"task": "t", "idempotency_key": ""}, "idempotency_key"),
    ({"task": "t", "unique_key": "k" * 201}, "unique_key"),
    ({"task": "t", "concurrency_limit": 1}, "concurrency_limit"),
    ({"task": "t", "concurrency_key": "k", "concurrency_limit": 0}, "concurrency_limit"),
    ({"task": "t", "tags": "a"}, "tags"),
    ({"task": "t", "tags": ""}, "tags"),
    ({"task": "t", "tags": {}}, "tags"),
    ({"task": "t", "tags": ["t"] * 100_000}, "tags"),
    ({"task": "t", "tags": [1]}, "tags"),
    ({"task": "t", "headers": []}, "headers"),
    ({"task": "t", "headers": {"a": 1}}, "headers"),
    ({"task": "t", "headers": {str(n): "x" for n in range(1_000)}}, "headers"),
    ({"task": "t", "headers": {"a": "x" * 100_000}}, "headers"),
    ({"task": "t", "id": "1"}, "id"),
    ({"task": "t", "id": 1}, "id"),
    ({"task": "t", "rate_limit": "1/s"}, "rate_limit"),
    ([], "body"),
    ("text", "body"),
    (None, "body"),
]


@pytest.mark.parametrize(
    ("body", "field"), WRONG, ids=lambda value: str(value)[:40].encode("ascii", "replace").decode()
)
def test_a_wrong_submission_is_refused_by_the_name_of_its_field(api: Api, body: Any, field: str) -> None:
    before = api.run(api.storage.counts()).total
    content = json.dumps(body)  # with escapes, as a lone surrogate has to be sent
    answer = api.client.post(JOBS, content=content, headers={"content-type": "application/json"})
    problem(answer, 422, field)
    assert api.run(api.storage.counts()).total == before


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"task": "t"} trailing', 400),
        (b"\xff\xfe{\x00", 400),
        (b'{"task": "t", "args": [NaN]}', 400),
        (b'{"task": "t", "args": [Infinity]}', 400),
        (b'{"task": "t", "args": [' + b"1" * 5_000 + b"]}", 400),
        (b'{"task": "t", "args": [1e999]}', 422),
        (b'{"task": "t", "args": ' + b"[" * 200 + b"]" * 200 + b"}", 413),
        (b"[" * 100_000, 413),
        (b'{"task": "t", "args": ["' + b"x" * (2 << 20) + b'"]}', 413),
        (b'{"task": "t", "args": ["' + b"x" * (8 << 20) + b'"]}', 413),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_body_that_cannot_be_taken(api: Api, content: bytes, status: int) -> None:
    problem(api.client.post(JOBS, content=content, headers={"content-type": "application/json"}), status)


def test_a_body_without_a_length_is_read_no_further_than_its_bound(api: Api) -> None:
    def endless() -> Any:
        for _ in range(1_000):
            yield b" " * 65_536

    try:
        answer = api.client.post(JOBS, content=endless(), headers={"content-type": "application/json"})
    except httpx.HTTPError:
        return  # refused while it was still being sent
    problem(answer, 413)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": ""},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
    ids=str,
)
def test_another_content_type_is_refused(api: Api, headers: dict[str, str]) -> None:
    answer = api.client.post(JOBS, content=b'{"task": "t"}', headers=headers)
    assert problem(answer, 415)["field"] in ("Content-Type", "Content-Encoding")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "jobs"),
        ({"jobs": {}}, "jobs"),
        ({"jobs": None}, "jobs"),
        ({"jobs": [], "queue": "q"}, "queue"),
    ],
)
def test_a_wrong_bulk_is_refused_as_a_whole(api: Api, body: Any, field: str) -> None:
    problem(api.client.post(f"{JOBS}/bulk", json=body), 422, field)


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_a_verb_that_takes_no_fields_refuses_them(api: Api, verb: str) -> None:
    job = api.submit()
    problem(api.client.post(f"{JOBS}/{job['id']}/{verb}", json={"force": True}), 422, "force")
    assert api.client.get(f"{JOBS}/{job['id']}").json()["status"] == "PENDING"


def test_unknown_routes_and_methods_are_problems(api: Api) -> None:
    assert "/docs" in problem(api.client.get("/"), 404)["hint"]
    problem(api.client.get("/api/v1/jobs/"), 404)
    wrong = api.client.delete(JOBS)
    problem(wrong, 405)
    assert wrong.headers["allow"]
