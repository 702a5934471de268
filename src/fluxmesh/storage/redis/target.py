"""What a URL of this backend names: servers, or Sentinels and a service, with the options of a connection.

| URL | means |
|---|---|
| redis://[user:password@]host[:6379][/db] | one server; of a cluster, any of its nodes |
| redis://host,host2[:port] | the same, several nodes of one cluster: the first that answers is asked |
| redis+sentinel://[user:password@]host[:26379],host2/service[/db] | the primary that Sentinels know |
| rediss://, rediss+sentinel:// | the same over TLS |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from msgspec import Struct
from redis.asyncio.connection import URL_QUERY_ARGUMENT_PARSERS

from fluxmesh.errors import InvalidOption, masked

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
_EXAMPLE: Final = "redis://host:6379/0"
_SENTINEL_EXAMPLE: Final = "redis+sentinel://host:26379,host2:26379/service/0"
_ESCAPED: Final = "in a password, %40 is @, %2F is /, %3F is ?, %23 is #"
_LONGEST_S: Final = 3_600.0
_TLS_OPTIONS: Final = tuple(
    f"ssl_{name}"
    for name in (
        "ca_certs",
        "ca_path",
        "ca_data",
        "certfile",
        "keyfile",
        "password",
        "cert_reqs",
        "check_hostname",
        "ciphers",
    )
)
Address = tuple[str, int]


class Target(Struct, frozen=True):
    """`options` are those of a connection to a server, `asking` those of one to a Sentinel (with its own
    user and password); `shown` is the URL as it may be told."""

    shown: str
    hosts: tuple[Address, ...]
    service: str | None
    tls: bool
    most: int | None
    options: Mapping[str, Any]
    asking: Mapping[str, Any]


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 < value <= _LONGEST_S):
        raise ValueError(text)
    return value


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


OPTIONS: Final[Mapping[str, Callable[[str], object]]] = {
    "db": _whole,
    "username": str,
    "password": str,
    "client_name": str,
    "socket_timeout": _seconds,
    "socket_connect_timeout": _seconds,
    "max_connections": _whole,
    "sentinel_username": str,
    "sentinel_password": str,
    **{name: URL_QUERY_ARGUMENT_PARSERS.get(name, str) for name in _TLS_OPTIONS},
}


def parse_target(url: str) -> Target:
    """Raises InvalidOption, which says what is wrong with the URL without a password of it."""
    shown = masked(url)
    parts = urlsplit(url)
    tls, by_sentinel = parts.scheme.startswith("rediss"), parts.scheme.endswith("+sentinel")
    example = _SENTINEL_EXAMPLE if by_sentinel else _EXAMPLE
    if parts.fragment or "@" in parts.path or ("@" not in parts.netloc and "@" in parts.query):
        raise InvalidOption("url", f"{shown!r} is not clear", hint=f"{example}; {_ESCAPED}")
    found = _options(parts, shown, tls=tls, by_sentinel=by_sentinel)
    service, database = _path(parts.path, shown, by_sentinel=by_sentinel, example=example)
    if database is not None and found.setdefault("db", database) != database:
        raise InvalidOption("url", f"{shown!r} names two databases", hint=example)
    user, _, hosts = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    for option, value in (("username", unquote(name)), ("password", unquote(password))):
        if value:
            found[option] = value
    asking = {option: value for option, value in found.items() if option.startswith("ssl_")}
    for option in ("username", "password"):
        if f"sentinel_{option}" in found:
            asking[option] = found.pop(f"sentinel_{option}")
    most: int | None = found.pop("max_connections", None)
    if most == 0:
        raise InvalidOption("url", f"{shown!r}: max_connections=0", hint="leave it out, or 1 and more")
    port = SENTINEL_PORT if by_sentinel else PORT
    addresses = tuple(_address(host, port, shown, example) for host in hosts.split(","))
    return Target(shown, addresses, service, tls, most, found, asking)


def _path(path: str, shown: str, *, by_sentinel: bool, example: str) -> tuple[str | None, int | None]:
    """The service and the database that a path names."""
    words = [unquote(word) for word in path.strip("/").split("/") if word]
    service = words.pop(0) if by_sentinel and words else None
    if by_sentinel and service is None:
        raise InvalidOption("url", f"{shown!r} names no service", hint=example)
    if len(words) > 1 or any(not (word.isascii() and word.isdigit()) for word in words):
        raise InvalidOption("url", f"{shown!r}: a database is a number", hint=example)
    return service, int(words[0]) if words else None


def _address(text: str, port: int, shown: str, example: str) -> Address:
    host, rest = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
    elif ":" in text:
        host, _, rest = text.partition(":")
        rest = f":{rest}"
    if rest and not (rest[0] == ":" and rest[1:].isascii() and rest[1:].isdigit() and int(rest[1:]) < 65_536):
        raise InvalidOption("url", f"{shown!r} has no port", hint=f"{example}; {_ESCAPED}")
    return (unquote(host) or "localhost", int(rest[1:]) if rest else port)


def _options(parts: SplitResult, shown: str, *, tls: bool, by_sentinel: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in OPTIONS:
            known = ", ".join(OPTIONS)
            raise InvalidOption("url", f"{shown!r}: there is no option {name!r}", hint=f"known: {known}")
        if name.startswith("ssl_") and not tls:
            raise InvalidOption("url", f"{shown!r}: {name} is of TLS", hint="rediss://")
        if name.startswith("sentinel_") and not by_sentinel:
            raise InvalidOption("url", f"{shown!r}: {name} is of Sentinel", hint=_SENTINEL_EXAMPLE)
        try:
            found[name] = OPTIONS[name](text)
        except ValueError:
            raise InvalidOption("url", f"{shown!r}: {name} is not right", hint="see docs/redis.md") from None
    return found
