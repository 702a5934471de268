"""One signed POST to a public address, and what its answer means for the job that made it.

The host is resolved here and the connection goes to the very address that was looked at, so a name cannot
mean a public address when it is judged and a private one when it is used. Redirects are not followed.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import io
import ipaddress
import socket
import ssl
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from fluxmesh.clock import US, Clock
from fluxmesh.errors import InvalidPayload, shown
from fluxmesh.outcome import DeadLetter, RetryAfter

SIGNATURE_HEADER: Final = "X-FluxMesh-Signature"
DELIVERY_HEADER: Final = "X-FluxMesh-Delivery"
ATTEMPT_HEADER: Final = "X-FluxMesh-Attempt"
TOTAL_S: Final = 30.0  # from the resolved name to the last byte that is read
CONNECT_S: Final = 10.0
MAX_ADDRESSES: Final = 4
MAX_URL_CHARS: Final = 8_192
MAX_ANSWER_BYTES: Final = 64 << 10  # of the answer's body; the rest is not read
MAX_RETRY_AFTER_S: Final = 86_400.0
ALLOW_HINT: Final = "webhook_allow_private allows it"
# Networks whose addresses carry an IPv4 address in their last 32 bits.
_CARRIERS: Final = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")))
_LOCAL_NAT64: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
_PORTS: Final = {"http": 80, "https": 443}
_UNQUOTED: Final = "/%:=&?~+!$,;'@()*[]"


class WebhookFailed(Exception):
    """The other side did not take it; another attempt may do."""


class Target(Struct, frozen=True):
    """A checked URL: `host` in ASCII without brackets, `path` with its query."""

    scheme: str
    host: str
    port: int
    path: str


class Answer(Struct, frozen=True):
    """What the other side said. `size`: bytes of its body that were read, MAX_ANSWER_BYTES at most."""

    status: int
    size: int
    retry_after: str | None = None


def signature(secret: str, timestamp_s: int, body: bytes) -> str:
    """The value of the signature header: `t=<epoch seconds>,v1=<hex>`, where v1 is HMAC-SHA256 with the
    secret over the text of t, a dot and the body. A receiver refuses a t that is too old."""
    signed = b"%d." % timestamp_s + body
    return f"t={timestamp_s},v1={hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()}"


def target_of(url: object) -> Target:
    """Raises DeadLetter for what is no http(s) URL: no retry would help."""
    if not isinstance(url, str) or len(url) > MAX_URL_CHARS:
        raise DeadLetter(f"url: {shown(url)} is no URL")
    if any(char.isspace() or not char.isprintable() for char in url):
        raise DeadLetter("url: it has white space or characters that cannot be printed")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        ascii_host = (host or "").encode("idna" if not (host or "").isascii() else "ascii").decode("ascii")
    except ValueError as error:  # of ports, brackets and names
        raise DeadLetter(f"url: {error}") from None
    if parts.scheme not in _PORTS or not ascii_host:
        raise DeadLetter(f"url: {shown(url)} is not http:// or https:// with a host")
    if parts.username is not None or parts.password is not None:
        raise DeadLetter("url: it holds a user name; the secret proves who sends")
    path = quote(parts.path or "/", safe=_UNQUOTED)
    if parts.query:
        path += "?" + quote(parts.query, safe=_UNQUOTED)
    return Target(parts.scheme, ascii_host, _PORTS[parts.scheme] if port is None else port, path)


def is_public(address: str) -> bool:
    """True for an address that belongs to the open internet, whatever notation hides it."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _LOCAL_NAT64 or ip.is_site_local:
            return False
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and any(ip in network for network in _CARRIERS):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def addresses_of(target: Target, *, allow_private: bool) -> list[tuple[socket.AddressFamily, Any]]:
    """Where the host lives. Raises WebhookFailed if nobody knows, DeadLetter if one of its addresses is not
    public and that is not allowed."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise WebhookFailed(f"the host {target.host!r} cannot be resolved: {error.strerror}") from None
    except UnicodeError:
        raise DeadLetter(f"url: {shown(target.host)} is no host name") from None
    for _, _, _, _, address in found:
        if not allow_private and not is_public(str(address[0])):
            raise DeadLetter(
                f"{target.host} is at {address[0]}, which is not a public address ({ALLOW_HINT})"
            )
    return [(family, address) for family, _, _, _, address in found[:MAX_ADDRESSES]]


class _Wire(io.RawIOBase):
    """A socket as http.client uses one, each step bounded by what is left of the whole time."""

    def __init__(self, sock: socket.socket, clock: Clock, deadline_s: float) -> None:
        super().__init__()
        self._sock = sock
        self._clock = clock
        self._deadline_s = deadline_s

    def arm(self, most_s: float = TOTAL_S) -> None:
        left_s = self._deadline_s - self._clock.mono_s()
        if left_s <= 0:
            raise TimeoutError(f"the answer was not complete after {TOTAL_S:g} s")
        self._sock.settimeout(min(left_s, most_s))

    def connect(self, address: Any) -> None:
        self.arm(CONNECT_S)
        self._sock.connect(address)

    def secure(self, context: ssl.SSLContext, host: str) -> None:
        self.arm(CONNECT_S)
        self._sock = context.wrap_socket(self._sock, server_hostname=host)

    def sendall(self, data: bytes) -> None:
        self.arm()
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.arm()
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        """Nothing: http.client closes the connection before it has read the answer."""

    def end(self) -> None:
        self._sock.close()


def _connected(target: Target, addresses: list[tuple[socket.AddressFamily, Any]], clock: Clock) -> _Wire:
    deadline_s = clock.mono_s() + TOTAL_S
    error: OSError | None = None
    for family, address in addresses:
        wire = _Wire(socket.socket(family, socket.SOCK_STREAM), clock, deadline_s)
        try:
            wire.connect(address)
            if target.scheme == "https":
                wire.secure(ssl.create_default_context(), target.host)
            return wire
        except OSError as failure:  # the next address may do
            error = failure
            wire.end()
        except BaseException:
            wire.end()
            raise
    raise WebhookFailed(f"no connection to {target.host}:{target.port}: {error}")


def post(
    target: Target,
    addresses: list[tuple[socket.AddressFamily, Any]],
    body: bytes,
    headers: dict[str, str],
    clock: Clock,
) -> Answer:
    """Raises WebhookFailed if there is no answer within the time."""
    wire = _connected(target, addresses, clock)
    try:
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.default_port = _PORTS[target.scheme]  # so that Host says no more than it must
        connection.sock = wire
        connection.request("POST", target.path, body, headers)
        response = connection.getresponse()
        return Answer(response.status, _read(response), response.getheader("Retry-After"))
    except (OSError, http.client.HTTPException) as error:
        what = f"{type(error).__name__}: {error}"
        raise WebhookFailed(f"no answer from {target.host}:{target.port}: {what}") from None
    finally:
        wire.end()


def _read(response: http.client.HTTPResponse) -> int:
    """Read the answer's body and tell its size. The status has said everything: where the body breaks off, or
    takes too long, it ends."""
    size = 0
    try:
        while size < MAX_ANSWER_BYTES and (part := response.read1(MAX_ANSWER_BYTES - size)):
            size += len(part)
    except (OSError, http.client.HTTPException):
        pass
    return size


def retry_after_s(text: str | None, now_s: float) -> float | None:
    """Seconds from a Retry-After header, a number or a date; None for none, or one that says nothing."""
    if text is None:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:12]), MAX_RETRY_AFTER_S)
    try:
        left_s = parsedate_to_datetime(text).timestamp() - now_s
    except (ValueError, OverflowError):
        return None
    return min(max(left_s, 0.0), MAX_RETRY_AFTER_S)


def judge(answer: Answer, now_s: float) -> None:
    """Return for 2xx; raise what the job shall end with for any other answer."""
    status = answer.status
    if 200 <= status < 300:
        return
    if status in (429, 503):
        wait_s = retry_after_s(answer.retry_after, now_s)
        if wait_s is not None:
            raise RetryAfter(wait_s, f"answered {status}, try again in {wait_s:g} s")
    if 300 <= status < 400:
        raise DeadLetter(f"answered {status}: redirects are not followed")
    if 400 <= status < 500 and status != 429:
        raise DeadLetter(f"answered {status}")
    raise WebhookFailed(f"answered {status}")


def deliver(
    url: object,
    payload: object,
    secret: object,
    *,
    job_id: str,
    attempt: int,
    allow_private: bool,
    clock: Clock,
) -> dict[str, Any]:
    """POST the payload as JSON, signed. Raises DeadLetter for what no retry would mend, RetryAfter when the
    other side names a time, WebhookFailed for the rest."""
    if not isinstance(secret, str) or not secret:
        raise DeadLetter("secret: it is empty or no text, so the delivery could not be proven")
    target = target_of(url)
    addresses = addresses_of(target, allow_private=allow_private)
    try:
        body = msgspec.json.encode(payload)
    except (TypeError, ValueError) as error:
        raise InvalidPayload(f"payload: {error}") from None
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "fluxmesh-webhook/1",
        "Connection": "close",
        SIGNATURE_HEADER: signature(secret, clock.wall_us() // US, body),
        DELIVERY_HEADER: job_id,
        ATTEMPT_HEADER: str(attempt),
    }
    answer = post(target, addresses, body, headers, clock)
    judge(answer, clock.wall_us() / US)
    return {"status": answer.status, "response_bytes": answer.size}
