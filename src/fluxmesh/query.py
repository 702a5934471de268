"""The query language of lists, and cursors.

A query is space-separated `field:value` (and `created>t`, `created<t`, epoch seconds); every part must
hold. A cursor continues one list and belongs to the query it came from.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
import math
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from fluxmesh.clock import US
from fluxmesh.errors import InvalidOption
from fluxmesh.job import Status
from fluxmesh.submission import checked_name

SCAN_CAP: Final = 10_000
PAGE_MAX: Final = 1_000
PAGE_DEFAULT: Final = 50
_FIELDS: Final = ("state", "queue", "task", "tag", "worker", "created")
_HINT: Final = "fields: state, queue, task, tag, worker, created>, created<"
_MAX_TEXT: Final = 4_000
T = TypeVar("T")


class Query(Struct, frozen=True):
    """None = not asked for. `created_after_us` and `created_before_us` are exclusive bounds."""

    state: Status | None = None
    queue: str | None = None
    task: str | None = None
    tag: str | None = None
    worker: str | None = None
    created_after_us: int | None = None
    created_before_us: int | None = None

    @property
    def digest(self) -> str:
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=6).hexdigest()


class Page(Struct, Generic[T], frozen=True):
    """`partial` is True when the scan stopped at SCAN_CAP rows before the page was full."""

    items: tuple[T, ...]
    next_cursor: str | None = None
    partial: bool = False


def _instant_us(text: str) -> int:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or abs(seconds) > 1e12:
        raise InvalidOption(
            "q",
            f"created: {text[:40]!r} is not epoch seconds",
            hint="such as 1767225600, as `date +%s -d 2026-01-01` prints them",
        )
    return int(seconds * US)


def parse_query(text: str) -> Query:
    """Raises InvalidOption for an unknown field, a bad value or a field given twice."""
    if len(text) > _MAX_TEXT:
        raise InvalidOption("q", f"{len(text):,} characters long", hint=f"at most {_MAX_TEXT:,}")
    found: dict[str, object] = {}
    for part in text.split():
        name, value = _split(part)
        if not value:
            raise InvalidOption("q", f"{part[:80]!r} has no value", hint=_HINT)
        parsed: object = value
        if name.startswith("created_"):
            parsed = _instant_us(value)
        elif name == "state":
            parsed = _state(value)
        else:
            checked_name("q", value)
        if name in found:
            raise InvalidOption("q", f"{name} is given twice", hint="every part must hold, so one would do")
        found[name] = parsed
    return Query(**found)  # type: ignore[arg-type]


def _split(part: str) -> tuple[str, str]:
    for sign, name in ((">", "created_after_us"), ("<", "created_before_us")):
        head, found, tail = part.partition(sign)
        if found and head == "created":
            return name, tail
    name, found, value = part.partition(":")
    if found and name in _FIELDS and name != "created":
        return name, value
    close = difflib.get_close_matches(name, _FIELDS, n=1)
    hint = f"did you mean {close[0]!r}? {_HINT}" if close and close[0] != name else _HINT
    raise InvalidOption("q", f"{part[:80]!r} is not field:value", hint=hint)


def _state(value: str) -> Status:
    try:
        return Status(value.upper())
    except ValueError:
        names = ", ".join(status.value for status in Status)
        raise InvalidOption("q", f"{value[:80]!r} is not a state", hint=names) from None


def encode_cursor(query: Query, place: tuple[int | str, ...]) -> str:
    """An opaque text; `place` is where the next page starts, in the backend's own terms."""
    raw = msgspec.json.encode([query.digest, *place])
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decode_cursor(query: Query, cursor: str) -> tuple[int | str, ...]:
    """Raises InvalidOption for junk and for a cursor of another query."""
    hint = "use next_cursor of the page before, with the same q"
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        digest, *place = msgspec.json.decode(raw, type=list[int | str])
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise InvalidOption("cursor", f"{cursor[:40]!r} is not a cursor", hint=hint) from None
    if digest != query.digest:
        raise InvalidOption("cursor", "it belongs to another query", hint=hint)
    return tuple(place)


def checked_limit(limit: int) -> int:
    if isinstance(limit, bool) or not 1 <= limit <= PAGE_MAX:
        raise InvalidOption("limit", f"{limit!r} is out of range", hint=f"1 to {PAGE_MAX:,}")
    return limit
