"""What URLs of Redis name, and what is said of those that name nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fluxmesh.errors import InvalidOption, masked
from fluxmesh.storage.redis.target import OPTIONS, parse_target
from fluxmesh.storage.registry import BACKENDS, resolved_url


@pytest.mark.parametrize(
    ("url", "hosts", "service", "options"),
    [
        ("redis://", [("localhost", 6379)], None, {}),
        ("redis://h", [("h", 6379)], None, {}),
        ("redis://h:7000/3", [("h", 7000)], None, {"db": 3}),
        ("redis://h?db=3", [("h", 6379)], None, {"db": 3}),
        ("redis://[::1]:7000/0", [("::1", 7000)], None, {"db": 0}),
        ("redis://:p%40ss@h", [("h", 6379)], None, {"password": "p@ss"}),
        ("redis://me:p@h", [("h", 6379)], None, {"username": "me", "password": "p"}),
        ("redis://h?username=me&password=p", [("h", 6379)], None, {"username": "me", "password": "p"}),
        ("redis://a:1,b,[::1]:3/0", [("a", 1), ("b", 6379), ("::1", 3)], None, {"db": 0}),
        ("redis+sentinel://a,b:1/jobs", [("a", 26379), ("b", 1)], "jobs", {}),
        ("redis+sentinel://:p@a/jobs/2", [("a", 26379)], "jobs", {"db": 2, "password": "p"}),
        ("rediss://h?ssl_ca_certs=%2Fca.pem", [("h", 6379)], None, {"ssl_ca_certs": "/ca.pem"}),
        ("rediss://h?ssl_check_hostname=false", [("h", 6379)], None, {"ssl_check_hostname": False}),
        ("redis://h?socket_timeout=2.5", [("h", 6379)], None, {"socket_timeout": 2.5}),
    ],
)
def test_a_url_names(
    url: str, hosts: list[tuple[str, int]], service: str | None, options: dict[str, object]
) -> None:
    target = parse_target(url)
    assert (list(target.hosts), target.service, dict(target.options)) == (hosts, service, options)
    assert target.tls is url.startswith("rediss")


def test_sentinels_have_a_password_of_their_own_and_no_database() -> None:
    target = parse_target("rediss+sentinel://:server@a/jobs/2?sentinel_password=theirs&ssl_ca_certs=/ca.pem")
    assert target.asking == {"password": "theirs", "ssl_ca_certs": "/ca.pem"}
    assert target.options == {"password": "server", "db": 2, "ssl_ca_certs": "/ca.pem"}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://h/jobs", "a database is a number"),
        ("redis://h/0/1", "a database is a number"),
        ("redis://h/1?db=2", "two databases"),
        ("redis://h:port", "no port"),
        ("redis://h:70000", "no port"),
        ("redis://h?colour=red", "no option 'colour'"),
        ("redis://h?decode_responses=true", "no option 'decode_responses'"),
        ("redis://h?socket_timeout=0", "socket_timeout"),
        ("redis://h?socket_timeout=nan", "socket_timeout"),
        ("redis://h?max_connections=0", "max_connections"),
        ("redis://h?ssl_ca_certs=/ca.pem", "TLS"),
        ("redis://h?sentinel_password=p", "Sentinel"),
        ("redis+sentinel://h:26379", "no service"),
        ("redis+sentinel://h/jobs/x", "a database is a number"),
    ],
)
def test_a_url_that_is_not_right_is_told(url: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=said) as caught:
        parse_target(url)
    assert caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hidden@h:6379/0",
        "redis://me:hidden@h",
        "redis://:hid/hidden@h:6379/0",
        "redis://:hid?hidden#@h",
        "redis://:hid@hidden@h",
        "redis://h/0?password=hidden",
        "redis+sentinel://:hidden@a,b/jobs?sentinel_password=hidden&db=1",
        "rediss://h?ssl_password=hidden&ssl_keyfile=/k.pem",
        "redis://h?passwort=hidden",
        "redis://h?db=1&Pass=hidden&client_name=me",
        "redis:/:hidden@h/0",
        "redis::hidden@h/0",
        "redis//:hidden@h/0",
        "me:hidden@h:6379/0",
        ":hidden@h:6379",
    ],
)
def test_no_message_tells_a_password(url: str) -> None:
    assert "hidden" not in masked(url)
    told = ""
    try:
        told = parse_target(resolved_url(url)).shown
    except InvalidOption as error:
        told = str(error)
    assert "***" in told
    assert "hidden" not in told


def test_what_is_no_password_stays() -> None:
    options = "&".join(f"{name}=x" for name in OPTIONS if "password" not in name)
    for url in (f"rediss://me@[::1]:6379,b/jobs/0?{options}", "sqlite:///a/b@c.db", "redis://h:1/0"):
        assert masked(url) == url


@pytest.mark.parametrize("url", ["redis://:s3cr@t/x@host/0", "redis://:s3cr/t@host/0", "redis://:s#@host"])
def test_signs_of_a_password_that_have_to_be_escaped_are_named(url: str) -> None:
    with pytest.raises(InvalidOption, match="%40 is @, %2F is /"):
        parse_target(url)


@pytest.mark.parametrize("url", ["redis://[::1", "redis://a]b"])
def test_brackets_that_hold_no_address_are_told(url: str) -> None:
    with pytest.raises(InvalidOption, match="url"):
        resolved_url(url)


def test_the_page_on_redis_lists_every_option() -> None:
    page = (Path(__file__).parents[3] / "docs" / "redis.md").read_text("utf-8")
    table = page.partition("| option")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(OPTIONS)


def test_every_form_is_a_storage_by_name() -> None:
    for scheme in ("redis", "rediss", "redis+sentinel", "rediss+sentinel"):
        assert BACKENDS[scheme] == "fluxmesh.storage.redis"
        assert resolved_url(f"{scheme}://h/jobs").startswith(scheme)
