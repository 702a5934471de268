"""What a verb says and hears, without sockets: a plan yields requests and pauses and is sent replies.

Verbs are written once as plans. The faces only carry them out: one blocks, the other awaits.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Final, TypeAlias, TypeVar

from msgspec import Struct

from fluxmesh.client.problems import PLAINLY_REFUSED, error_of, lost_error
from fluxmesh.errors import FluxMeshError

T = TypeVar("T")
PAUSE_S: Final = 0.1
PAUSE_MOST_S: Final = 5.0
PASSING: Final = frozenset({502, 503, 504})


class Ask(Struct, frozen=True):
    """One request. `repeatable`: doing it twice is as good as once. `extra_s`: the server may take so much
    longer than a request usually may."""

    method: str
    path: str
    query: dict[str, str] = {}
    body: bytes | None = None
    repeatable: bool = True
    extra_s: float = 0.0


class Pause(Struct, frozen=True):
    seconds: float


class Reply(Struct, frozen=True):
    """What came back, read whole. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Lost(Struct, frozen=True):
    """Nothing came back. `sent` False: the server cannot have seen the request."""

    sent: bool
    why: str


Step: TypeAlias = Ask | Pause
Heard: TypeAlias = Reply | Lost | None
Plan: TypeAlias = Generator[Step, Heard, T]


def asked(ask: Ask, where: str, retries: int) -> Plan[Reply]:
    """The reply to a request that the server granted, after at most `retries` repetitions.

    Repeated is what the server cannot have done: it was never sent, or plainly refused for the moment; and,
    if the request is repeatable, what got no answer. Raises the error that the server's problem tells."""
    pause_s = PAUSE_S
    for left in range(retries, -1, -1):
        heard = yield ask
        error: FluxMeshError
        again = ask.repeatable
        wanted_s = 0.0
        match heard:
            case Reply(status=status) if 200 <= status < 300:
                return heard
            case Reply():
                error = error_of(heard.status, heard.body, where, repeatable=ask.repeatable)
                again = heard.status in PASSING and (again or error.code in PLAINLY_REFUSED)
                wanted_s = _retry_after_s(heard.headers)
            case Lost():
                error = lost_error(heard.why, where, maybe_done=heard.sent and not _is_read(ask))
                again = again or not heard.sent
            case None:
                raise AssertionError("a request was answered with nothing")
        if left == 0 or not again:
            raise error
        yield Pause(min(PAUSE_MOST_S, max(pause_s, wanted_s)))
        pause_s *= 2
    raise AssertionError("unreachable: the last round returns or raises")


def _is_read(ask: Ask) -> bool:
    return ask.method == "GET"


def _retry_after_s(headers: Mapping[str, str]) -> float:
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0
