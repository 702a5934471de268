"""webhook_delivery against a real server on this machine."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fluxmesh import webhook
from fluxmesh.clock import ManualClock, system_clock
from fluxmesh.config import Settings
from fluxmesh.job import Status
from fluxmesh.outcome import DeadLetter, RetryAfter
from fluxmesh.tasks import builtin_registry
from fluxmesh.webhook import WebhookFailed, addresses_of, deliver, signature, target_of
from tests.service.workshop import Workshop, workshop

SECRET = "whsec-7"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
BOUND_S = 15


class Server:
    """Answers each connection as it is told to, and keeps the request."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/hook?shop=1"
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(BOUND_S)
                try:
                    self.requests.append(_request(connection))
                    self._answer(connection)
                except (OSError, ValueError, KeyError):
                    pass  # the client has gone, or speaks TLS

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(BOUND_S)


def _request(connection: socket.socket) -> tuple[str, dict[str, str], bytes]:
    with connection.makefile("rb") as stream:
        first = stream.readline().decode().strip()
        headers: dict[str, str] = {}
        while line := stream.readline().decode().strip():
            name, _, value = line.partition(": ")
            headers[name] = value
        return first, headers, stream.read(int(headers["Content-Length"]))


@contextmanager
def serving(answer: bytes | Callable[[socket.socket], None]) -> Iterator[Server]:
    server = Server(answer if callable(answer) else lambda connection: connection.sendall(answer))
    try:
        yield server
    finally:
        server.close()


def delivered(url: str, payload: Any = None, *, secret: Any = SECRET, private: bool = True) -> dict[str, Any]:
    return deliver(url, payload, secret, job_id="j1", attempt=2, allow_private=private, clock=ManualClock())


def status(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {line}", "Content-Length: 0", *headers, "", ""]).encode()


def test_it_posts_signed_json() -> None:
    with serving(OK) as server:
        answer = delivered(server.url, {"order": 7, "name": "Zoë"})
    assert answer == {"status": 200, "response_bytes": 2}
    [(first, headers, body)] = server.requests
    assert first == "POST /hook?shop=1 HTTP/1.1"
    assert json.loads(body) == {"order": 7, "name": "Zoë"}
    assert headers["Content-Type"] == "application/json"
    assert headers["Host"] == f"127.0.0.1:{server.port}"
    assert (headers["X-FluxMesh-Delivery"], headers["X-FluxMesh-Attempt"]) == ("j1", "2")
    expected = hmac.new(SECRET.encode(), b"1700000000." + body, hashlib.sha256).hexdigest()
    assert headers["X-FluxMesh-Signature"] == f"t=1700000000,v1={expected}"
    assert signature("other", 1_700_000_000, body) != headers["X-FluxMesh-Signature"]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (status("204 No Content"), None, ""),
        (status("302 Found", "Location: http://127.0.0.1:1/"), DeadLetter, "redirects are not followed"),
        (status("400 Bad Request"), DeadLetter, "answered 400"),
        (status("410 Gone", "Retry-After: 5"), DeadLetter, "answered 410"),
        (status("429 Too Many Requests"), WebhookFailed, "answered 429"),
        (status("429 Too Many Requests", "Retry-After: 7"), RetryAfter, "try again in 7 s"),
        (status("503 Busy", "Retry-After: Tue, 14 Nov 2023 22:14:20 GMT"), RetryAfter, "try again in 60 s"),
        (status("503 Busy", "Retry-After: Tue, 14 Nov 2000 22:14:20 GMT"), RetryAfter, "try again in 0 s"),
        (status("503 Busy", f"Retry-After: {'9' * 400}"), RetryAfter, "try again in 86400 s"),
        (status("503 Busy", "Retry-After: soon"), WebhookFailed, "answered 503"),
        (status("503 Busy"), WebhookFailed, "answered 503"),
        (status("500 Oh"), WebhookFailed, "answered 500"),
        (status("700 Odd"), WebhookFailed, "answered 700"),
        (b"", WebhookFailed, "no answer"),
        (b"SSH-2.0-OpenSSH\r\n", WebhookFailed, "no answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", WebhookFailed, "no answer"),
    ],
)
def test_the_answer_decides_what_becomes_of_the_job(
    answer: bytes, kind: type[Exception] | None, message: str
) -> None:
    with serving(answer) as server:
        if kind is None:
            assert delivered(server.url)["status"] == 204
        else:
            with pytest.raises(kind) as caught:
                delivered(server.url)
            assert message in str(caught.value)
    assert len(server.requests) == 1  # it went nowhere else


def test_of_a_long_answer_no_more_is_read_than_is_kept() -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:  # until the other side hangs up
            connection.sendall(b"x" * 65_536)

    with serving(endless) as server:
        assert delivered(server.url) == {"status": 200, "response_bytes": webhook.MAX_ANSWER_BYTES}


def test_once_the_status_is_there_a_body_that_breaks_off_changes_nothing() -> None:
    with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok") as server:
        assert delivered(server.url) == {"status": 200, "response_bytes": 2}


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_drips_is_given_up(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "TOTAL_S", 0.3)
    hung_up = threading.Event()

    def dripping(connection: socket.socket) -> None:
        connection.sendall(begun)
        connection.settimeout(0.05)
        while True:
            try:
                if not connection.recv(1):
                    break
            except TimeoutError:
                connection.sendall(b"x")  # never silent for long
            except OSError:
                break
        hung_up.set()

    with serving(dripping) as server:
        if begun.endswith(b"\r\n\r\n"):
            assert post_now(server.url)["status"] == 200
        else:
            with pytest.raises(WebhookFailed, match="no answer"):
                post_now(server.url)
        assert hung_up.wait(BOUND_S)


def post_now(url: str) -> dict[str, Any]:
    return deliver(url, 1, SECRET, job_id="j", attempt=1, allow_private=True, clock=system_clock())


def test_a_port_where_nobody_listens_is_a_failure_to_try_again() -> None:
    with serving(OK) as server:
        url = server.url
    with pytest.raises(WebhookFailed, match=r"no connection to 127\.0\.0\.1"):
        delivered(url)


def test_a_server_without_tls_gets_nothing_of_what_was_meant_for_https(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "CONNECT_S", 0.5)  # a handshake that nobody answers
    told: list[bytes] = []

    def listen(connection: socket.socket) -> None:
        told.append(b"a whole request")

    with serving(listen) as server, pytest.raises(WebhookFailed, match="no connection to"):
        delivered(server.url.replace("http:", "https:"), {"order": 7})
    assert told == []
    assert server.requests == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "127.1", "[::1]"])
def test_a_loopback_address_is_refused_however_it_is_written(host: str) -> None:
    refused = pytest.raises(DeadLetter, match=r"not a public address \(webhook_allow_private allows it\)")
    with serving(OK) as server, refused:
        delivered(f"http://{host}:{server.port}/", private=False)
    assert server.requests == []


def test_a_name_that_means_one_private_address_among_public_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answers(host: str, port: int, **_: Any) -> list[Any]:
        found = ("93.184.216.34", "10.0.0.8")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    target = target_of("https://shop.example/")
    with pytest.raises(DeadLetter, match=r"shop\.example is at 10\.0\.0\.8"):
        addresses_of(target, allow_private=False)
    assert [address for _, address in addresses_of(target, allow_private=True)] == [
        ("93.184.216.34", 443),
        ("10.0.0.8", 443),
    ]


@pytest.mark.parametrize("secret", ["", None, 7])
def test_nothing_is_sent_without_a_secret(secret: Any) -> None:
    with serving(OK) as server, pytest.raises(DeadLetter, match="secret"):
        delivered(server.url, secret=secret)
    assert server.requests == []


@pytest.mark.parametrize("allowed", [True, False])
def test_the_task_obeys_its_setting(tmp_path: Any, allowed: bool) -> None:
    @workshop(webhook_allow_private=allowed)
    async def play(shop: Workshop) -> None:
        shop.registry = builtin_registry(shop.settings)
        await shop.worker()
        with serving(OK) as server:
            job_id = await shop.put("webhook_delivery", server.url, {"order": 7}, SECRET)
            job = await shop.ended(job_id)
            await asyncio.sleep(0)
        if allowed:
            assert job.result == {"status": 200, "response_bytes": 2}
            assert server.requests[0][1]["X-FluxMesh-Delivery"] == job_id
        else:
            assert job.status is Status.DEAD_LETTER
            assert "not a public address" in (job.reason or "")
            assert server.requests == []

    play(tmp_path)


def test_private_addresses_are_refused_unless_a_setting_says_otherwise() -> None:
    assert Settings().webhook_allow_private is False
