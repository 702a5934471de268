"""Who is let in: tokens, pages of other sites, headers without end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluxmesh.api.access import Access, checked_tokens, is_loopback
from fluxmesh.api.server import listen
from fluxmesh.errors import InvalidOption
from tests.api.serving import Api, problem, served

TOKEN = "0123456789abcdef0123456789abcdef"
OTHER = "another-one"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with served(tmp_path_factory.mktemp("guarded") / "jobs.db", tokens=(TOKEN, OTHER)) as running:
        yield running


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN[:-1]}e",
        f"Bearer {TOKEN}f",
        f"Bearer {TOKEN.upper()}",
        f"Bearer {TOKEN} {OTHER}",
        f"Bearer {TOKEN},{OTHER}",
        "Bearer \xff\xfe",
    ],
)
def test_a_token_that_is_not_quite_right_is_refused(guarded: Api, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for method, path in (("GET", "/api/v1/jobs"), ("POST", "/api/v1/jobs"), ("GET", "/no/such/route")):
        answer = guarded.client.request(method, path, headers=headers)  # type: ignore[arg-type]
        assert problem(answer, 401)["code"] == "not_authorised"
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert TOKEN not in answer.text


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {OTHER}", f"Bearer  {TOKEN}"])
def test_every_token_is_let_in(guarded: Api, header: str) -> None:
    assert guarded.client.get("/api/v1/jobs", headers={"authorization": header}).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/docs", "/openapi.json"])
def test_what_tells_of_no_job_wants_no_token(guarded: Api, path: str) -> None:
    assert guarded.client.get(path).status_code == 200


def test_a_wrong_token_is_compared_with_all_of_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    access = Access.of((TOKEN, OTHER), loopback=True)
    assert access.refusal("GET", "/", {b"authorization": f"Bearer {TOKEN}".encode()}) is None
    assert access.refusal("GET", "/", {b"authorization": b"Bearer x"}) is not None
    assert len(compared) == 4
    assert {len(side) for pair in compared for side in pair} == {32}


@pytest.mark.parametrize("token", ["", "a b", "a\n", "ä", "x" * 1_001])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        checked_tokens([token])
    assert refused.value.field == "token"


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("a.localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("", False),
    ],
)
def test_a_loopback_address_is_known(host: str, is_one: bool) -> None:
    assert is_loopback(host) is is_one


# -- without a token -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://["])
def test_a_page_of_another_site_changes_nothing(api: Api, origin: str) -> None:
    job = api.submit()
    answer = api.client.post(f"/api/v1/jobs/{job['id']}/cancel", headers={"origin": origin})
    problem(answer, 403, "Origin")
    assert api.client.get(f"/api/v1/jobs/{job['id']}").json()["status"] == "PENDING"


def test_a_page_of_the_server_itself_may_ask(api: Api) -> None:
    headers = {"origin": str(api.client.base_url).rstrip("/")}
    assert api.client.post("/api/v1/jobs", json={"task": "t"}, headers=headers).status_code == 201


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[", ""])
def test_a_name_that_was_bound_to_this_machine_by_others_is_refused(api: Api, host: str) -> None:
    problem(api.client.get("/api/v1/jobs", headers={"host": host}), 403, "Host")


def test_a_balancer_that_speaks_http_1_0_sees_the_health(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.client.base_url.port or 0)) as raw:
        raw.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b" 200 " in raw.recv(1_000)


def test_no_site_is_told_that_it_may_read(api: Api) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for answer in (
        api.client.get("/api/v1/jobs", headers=asked),
        api.client.options("/api/v1/jobs", headers=asked),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_answers_are_neither_sniffed_nor_kept(api: Api) -> None:
    for path in ("/api/v1/jobs", "/nothing"):
        answer = api.client.get(path)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


# -- bombs ---------------------------------------------------------------------------------------------------


def test_a_request_above_the_bound_is_told_to_come_again(tmp_path: Path) -> None:
    import asyncio

    from fluxmesh.api.gate import Gate

    async def ask() -> list[int]:
        inside = asyncio.Event()
        leave = asyncio.Event()

        async def app(_scope: object, _receive: object, send: object) -> None:
            inside.set()
            await leave.wait()

        gate = Gate(app, access=Access(), in_flight_most=1)
        statuses: list[int] = []

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(int(str(message["status"])))

        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        first = asyncio.create_task(gate(scope, None, send))  # type: ignore[arg-type]
        await inside.wait()
        await gate(scope, None, send)  # type: ignore[arg-type]
        leave.set()
        await first
        return statuses

    assert asyncio.run(ask()) == [503]


def test_waits_take_no_more_places_than_are_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluxmesh.api.store.WAITS_MOST", 0)
    with served(tmp_path / "jobs.db") as api:
        job = api.submit()
        answer = api.client.get(f"/api/v1/jobs/{job['id']}/wait")
        assert problem(answer, 503)["code"] == "too_busy"
        assert answer.headers["retry-after"] == "1"
        assert api.client.get(f"/api/v1/jobs/{job['id']}").status_code == 200


def test_answers_do_not_wait_for_acknowledgements() -> None:
    with listen("127.0.0.1", 0) as listening:
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
