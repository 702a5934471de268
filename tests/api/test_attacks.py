"""What strangers send: broken framing, requests without end, forged ids and cursors, markup everywhere.

Nothing of it may be answered with 5xx, show code of ours, or leave the server worse than it was.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Sequence

import httpx
import pytest

from fluxmesh.ids import new_job_id
from tests.api.serving import Api, problem

JOBS = "/api/v1/jobs"
HTML = "<script>alert('x')</script>"
HEAD = b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def exchange(api: Api, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send the pieces on one connection and read until the server closes it."""
    with socket.create_connection(("127.0.0.1", api.client.base_url.port or 0), 15) as raw:
        with contextlib.suppress(ConnectionError):  # it may hang up while we are sending
            for piece in pieces:
                raw.sendall(piece)
                time.sleep(pause_s)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := raw.recv(65_536):
                answer += data
        return answer


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


# -- framing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "statuses"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n", (400,)),
        (b"GET /api/v1/jobs HTTP/1.1\r\n\r\n", (400,)),
        (b"GET /api/v1/jobs HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", (400,)),
        (b"GET /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nx: a\x00b\r\n\r\n", (400,)),
        (b"GET /api/v1/jobs/\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", (400,)),
        (b"GET /api/v1/jobs/\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n", (400,)),
        (HEAD + b"Content-Length: -1\r\n\r\n{}", (400,)),
        (HEAD + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n{}", (400,)),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", (400,)),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", (400,)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n", (400,)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 1_000_000 + b"\r\n{}\r\n0\r\n\r\n", (400,)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 200_000 + b"\r\n", (400,)),
        (HEAD + b"x-bomb: " + b"x" * 1_000_000 + b"\r\n\r\n", (400,)),
        (HEAD + b"".join(b"x%d: y\r\n" % n for n in range(100_000)) + b"\r\n", (400,)),
        (HEAD + b"Content-Length: 1073741824\r\nConnection: close\r\n\r\n{", (413,)),
    ],
    ids=range(16),
)
def test_what_is_no_request_is_a_problem_and_the_connection_ends(
    api: Api, request_: bytes, statuses: Sequence[int]
) -> None:
    began = time.monotonic()
    status, headers, body = parsed(exchange(api, request_))
    assert time.monotonic() - began < 10
    assert status in statuses
    assert headers["content-type"] == "application/problem+json"
    assert headers["x-content-type-options"] == "nosniff"
    assert json.loads(body)["status"] == status
    assert b"Traceback" not in body
    assert api.client.get("/healthz").status_code == 200


def test_a_body_of_two_lengths_smuggles_no_second_request(api: Api) -> None:
    total = api.client.get("/api/v1/metrics").json()["total_jobs"]
    inner = b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    inner += b'Content-Length: 12\r\n\r\n{"task":"t"}'
    outer = HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    answer = exchange(api, outer + inner)
    assert parsed(answer)[0] == 400
    assert answer.count(b"HTTP/1.1") == 1
    assert api.client.get("/api/v1/metrics").json()["total_jobs"] == total


def test_a_head_that_does_not_come_to_its_end_is_given_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluxmesh.api.wire.HEAD_MOST_S", 0.3)
    assert exchange(api, b"") == b""
    assert (
        exchange(api, b"GET /healthz HTTP/1.1\r\n", b"Host: localhost\r\n", b"x: y\r\n", pause_s=0.15) == b""
    )
    whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    # The second request of a connection that is kept has no more time than the first.
    assert exchange(api, whole, b"GET /hea").count(b"HTTP/1.1 200") == 1


def test_a_body_that_does_not_come_is_given_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluxmesh.api.bodies.READ_MOST_S", 0.3)
    monkeypatch.setattr("fluxmesh.api.wire.HEAD_MOST_S", 0.2)
    for more in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n{"):
        status, _, body = parsed(exchange(api, HEAD + more))
        assert status == 408
        assert json.loads(body)["field"] == "body"
    refused = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"1000000\r\n" + b" " * (1 << 24) + b"\r\n")
    assert parsed(exchange(api, refused, b"1\r\n"))[0] == 413  # and what follows is not read for ever


# -- methods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/healthz", "/readyz", JOBS, "/docs", "/openapi.json"])
def test_head_is_get_without_a_body(api: Api, path: str) -> None:
    asked = api.client.head(path)
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-type"] == api.client.get(path).headers["content-type"]


def test_a_method_that_a_route_has_not_is_told_those_it_has(api: Api) -> None:
    for method in ("DELETE", "OPTIONS", "PATCH", "TRACE", "X" * 1_000):
        answer = api.client.request(method, JOBS)
        problem(answer, 405)
        assert answer.headers["allow"] == "GET, HEAD, POST"
    asked = api.client.head(f"{JOBS}/{new_job_id()}/cancel")
    assert (asked.status_code, asked.headers["allow"]) == (405, "POST")


# -- ids, cursors, queries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job_id",
    ["%00", "a%00b", "%2F", "..%2F..%2Fetc%2Fpasswd", "%F0%9F%A6%8A", "%ED%A0%80", "%C0%AF", "%0d%0aX:%20y",
     "*", "%25", "x" * 20_000, new_job_id().upper()],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_an_id_that_is_none_is_unknown_to_every_route(api: Api, job_id: str) -> None:
    asked = [api.client.get(f"{JOBS}/{job_id}{verb}") for verb in ("", "/history", "/wait?timeout=0")]
    for verb, body in (("cancel", {}), ("retry", {}), ("reprioritise", {"priority": 1})):
        asked.append(api.client.post(f"{JOBS}/{job_id}/{verb}", json=body))
    asked += [api.client.post(f"/api/v1/dlq/{job_id}/{verb}") for verb in ("replay", "discard")]
    for answer in asked:
        problem(answer, 404)


def test_a_path_that_climbs_leads_nowhere(api: Api) -> None:
    for path in ("/../../etc/passwd", f"{JOBS}/..%2f..%2f..%2fmetrics", "//api/v1/jobs", f"{JOBS}//"):
        problem(api.client.get(str(api.client.base_url).rstrip("/") + path), 404)


def test_a_forged_cursor_is_refused_or_shows_jobs_of_the_query(api: Api) -> None:
    for _ in range(3):
        api.submit(task="forged")
    own = {"q": "task:forged", "limit": 1}
    cursor: str = api.client.get(JOBS, params=own).json()["next_cursor"]
    forged = {cursor[:n] + mark + cursor[n + 1 :] for n in range(len(cursor)) for mark in "A9_"} - {cursor}
    forged |= {cursor[:-1], cursor[1:], cursor * 2, cursor.swapcase(), "=", "\0", "null", "-1", "A" * 5_000}
    forged |= {"eyJhIjpbXX0", "WzFlOTk5LCJ4Il0", "W1tbW1tbW1tbW1tbW1tdXV1dXV1dXV1dXV1d"}
    for one in sorted(forged):
        answer = api.client.get(JOBS, params={**own, "cursor": one})
        if answer.status_code == 200:
            assert {job["task"] for job in answer.json()["items"]} <= {"forged"}
        else:
            problem(answer, 422, "cursor")
    for path, q in ((JOBS, "task:other"), (JOBS, ""), ("/api/v1/dlq", "task:forged")):
        problem(api.client.get(path, params={"q": q, "cursor": cursor}), 422, "cursor")


@pytest.mark.parametrize(
    "q", ["created>1e400", "created>nan", "created<", "created>" + "9" * 400, "state:", ":", "::", "a:b:c",
          "created>0001-01-01T00:00:00+23:59", "task"],
)  # fmt: skip
def test_a_query_that_says_nothing_is_refused(api: Api, q: str) -> None:
    for path in (JOBS, "/api/v1/dlq"):
        problem(api.client.get(path, params={"q": q}), 422, "q")


# -- bodies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"task": "a", "task": "b"}', "task"),
        ('{"task": "t", "kwargs": {"a": 1, "b": 2, "a": 3}}', "a"),
        ('{"task": "t", "delay_seconds": 1e400}', "delay_seconds"),
        ('{"task": "t", "args": [18446744073709551616]}', "args"),
        ('{"task": "t", "kwargs": {"\\ud800": 1}}', "args"),
        ('{"task": "\\udfff"}', "task"),
        ('{"task": "a\\u0000b"}', "task"),
        ('{"task": "a\\u202eb"}', "task"),
        ('{"task": "t", "run_at": "9999-12-31T23:59:59-23:59"}', "run_at"),
        ('{"task": "t", "run_at": "2030-01-01T00:00:00+99:99"}', "run_at"),
        ('{"task": "t", "": 1}', ""),
    ],
)
def test_a_field_that_cannot_be_is_refused_by_its_name(api: Api, body: str, field: str) -> None:
    answer = api.client.post(JOBS, content=body, headers={"content-type": "application/json"})
    problem(answer, 422, field)


def test_many_fields_with_one_twice_are_refused_as_fast_as_few(api: Api) -> None:
    names = [f'"{number}":0' for number in range(200_000)]
    body = "{" + ",".join([*names, names[-1]]) + "}"
    began = time.monotonic()
    answer = api.client.post(JOBS, content=body, headers={"content-type": "application/json"})
    problem(answer, 422, "199999")
    assert time.monotonic() - began < 10  # by comparing all with all it would take minutes


def test_two_content_types_are_no_content_type(api: Api) -> None:
    headers = [("content-type", "application/json"), ("content-type", "text/plain")]
    answer = api.client.post(JOBS, content=b'{"task":"t"}', headers=headers)
    problem(answer, 415, "Content-Type")


# -- markup --------------------------------------------------------------------------------------------------


def test_markup_is_data_in_every_answer(api: Api) -> None:
    fields = {
        "task": HTML, "queue": "<b>", "tags": [HTML], "kwargs": {HTML: HTML}, "headers": {HTML: HTML},
        "idempotency_key": HTML, "unique_key": HTML, "affinity_key": HTML, "concurrency_key": HTML,
    }  # fmt: skip
    job_id = api.submit(**fields)["id"]
    answers: list[httpx.Response] = [
        api.client.get(f"{JOBS}/{job_id}"),
        api.client.get(JOBS),
        api.client.get("/api/v1/queues"),
        api.client.get("/api/v1/metrics"),
        api.client.get(JOBS, params={"q": HTML}),
        api.client.get(f"/{HTML}"),
        api.client.get(f"/docs?{HTML}"),
        api.client.post(JOBS, json={"task": "t", HTML: 1}),
        api.client.post(JOBS, content=HTML, headers={"content-type": "application/json"}),
        api.client.post(JOBS, content=HTML, headers={"content-type": "text/html"}),
        api.client.get(JOBS, headers={"host": HTML}),
    ]
    for answer in answers:
        assert answer.status_code < 500
        assert answer.headers["content-type"] in ("application/json", "application/problem+json")
        assert answer.headers["x-content-type-options"] == "nosniff"
        answer.json()
    page = api.client.get("/docs")
    assert HTML not in page.text
    assert "script-src" not in page.headers["content-security-policy"]
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
