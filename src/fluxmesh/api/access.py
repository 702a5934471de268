"""Who may ask: bearer tokens, and no pages of other sites where there is no token.

Without a token the server listens on a loopback address only, and the browser on the same machine is what
is left to fear: a page of any site may send it requests. So a foreign Origin is refused there, and so is a
Host that is no loopback name, by which a page whose name was re-bound to 127.0.0.1 gives itself away.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from fluxmesh.api.problems import ForeignOrigin
from fluxmesh.errors import FluxMeshError, InvalidOption, NotAuthorised

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
TOKEN_MOST: Final = 1_000
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def is_loopback(host: str) -> bool:
    """True for localhost, names below it, and loopback addresses."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def checked_tokens(texts: Sequence[str]) -> tuple[str, ...]:
    """Bearer tokens as they may stand in a header. Raises InvalidOption, without showing one."""
    for text in texts:
        if not text or len(text) > TOKEN_MOST or not text.isascii() or not text.isprintable() or " " in text:
            raise InvalidOption(
                "token",
                "is not 1 to 1,000 printable ASCII characters without spaces",
                hint="make one with `openssl rand -hex 32`",
            )
    return tuple(dict.fromkeys(texts))


class Access(Struct, frozen=True):
    """The rule of one server. `tokens` are kept as digests; `loopback_only`: other Host names are refused."""

    digests: tuple[bytes, ...] = ()
    loopback_only: bool = False

    @classmethod
    def of(cls, tokens: Sequence[str], *, loopback: bool) -> Access:
        digests = tuple(_digest(token.encode()) for token in checked_tokens(tokens))
        return cls(digests, loopback_only=loopback and not digests)

    def refusal(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> FluxMeshError | None:
        """Why this request is not let in; None if it is. Takes the same time for every wrong token."""
        if path in OPEN_PATHS:
            return None
        if self.digests:
            if self.trusts(headers):
                return None
            return NotAuthorised(
                "this server wants a bearer token that it knows",
                hint="send the header `Authorization: Bearer <token>`",
            )
        host = headers.get(b"host", b"").decode("latin-1")
        # Every browser sends a Host; only HTTP/1.0 may leave it out.
        if self.loopback_only and b"host" in headers and not is_loopback(_name_of(host)):
            return ForeignOrigin(
                f"Host: {host[:80]!r} is no name of this machine's own",
                field="Host",
                hint="start the server with a token to be asked under other names",
            )
        origin = headers.get(b"origin")
        if origin is not None and method not in _SAFE_METHODS and not _same(origin.decode("latin-1"), host):
            return ForeignOrigin(
                f"Origin: {origin.decode('latin-1')[:80]!r} is another site",
                field="Origin",
                hint="start the server with a token to be asked by other sites' pages",
            )
        return None

    def trusts(self, headers: Mapping[bytes, bytes]) -> bool:
        """True: it presents a token that is known, or none is asked for."""
        return not self.digests or self._knows(headers.get(b"authorization", b""))

    def _knows(self, header: bytes) -> bool:
        scheme, _, token = header.partition(b" ")
        presented = _digest(token.strip())
        matches = [hmac.compare_digest(presented, digest) for digest in self.digests]
        return any(matches) and scheme.lower() == b"bearer"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _same(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False
