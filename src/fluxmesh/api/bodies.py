"""Bodies of requests: read no further than their bound, as JSON objects of known fields."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Collection, Iterable
from typing import Any, Final, NoReturn

from starlette.requests import Request

from fluxmesh.api.problems import MalformedBody, RequestTooSlow, UnsupportedMediaType
from fluxmesh.errors import InvalidOption, PayloadTooLarge, shown

READ_MOST_S: Final = 30.0
SMALL_BYTES: Final = 64 << 10
BULK_BYTES: Final = 16 << 20
_JSON: Final = "application/json"
_HINT: Final = "send one JSON object"


def submission_bytes(payload_limit_bytes: int) -> int:
    """The most bytes of one submission: JSON may need several times what the payload takes in storage."""
    return 4 * payload_limit_bytes + SMALL_BYTES


async def read_object(request: Request, most: int, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object of a body; {} for no body at all if it is `optional`.

    Raises UnsupportedMediaType, MalformedBody, PayloadTooLarge, RequestTooSlow or InvalidOption."""
    data = await _read(request, most)
    if not data and optional:
        return {}
    _check_type(request)
    value = _parsed(data)
    if not isinstance(value, dict):
        raise InvalidOption("body", f"{shown(value)} is not an object", hint=_HINT)
    return value


def check_known(fields: Iterable[str], known: Collection[str]) -> None:
    """Raises InvalidOption for a field that nobody reads, with a suggestion."""
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            names = f"known: {', '.join(known)}" if known else "it takes none"
            raise InvalidOption(
                name[:80], "unknown field", hint=f"did you mean {close[0]!r}?" if close else names
            )


def _check_type(request: Request) -> None:
    given = ", ".join(request.headers.getlist("content-type"))
    essence, _, parameters = given.partition(";")
    charset = parameters.replace(" ", "").replace('"', "").lower()
    if essence.strip().lower() != _JSON or charset not in ("", "charset=utf-8"):
        raise UnsupportedMediaType(
            f"Content-Type: {given[:80]!r} is not {_JSON}", field="Content-Type", hint="send JSON in UTF-8"
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMediaType(
            f"Content-Encoding: {encoding[:80]!r} is not understood",
            field="Content-Encoding",
            hint="send the body as it is",
        )


async def _read(request: Request, most: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(READ_MOST_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise RequestTooSlow(f"the body did not come in {READ_MOST_S:g} s", field="body") from None
    return b"".join(parts)


def _too_large(most: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body has more than {most:,} bytes", hint="send less at once")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """RFC 8259 leaves open which of two values counts: whoever sends both is asked what is meant."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidOption(name[:80], "given twice", hint="give it once")
            seen.add(name)
    return fields


def _parsed(data: bytes) -> Any:
    """Every number is kept exactly, or refused later; msgspec would round integers of many digits."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_fields)
    except InvalidOption:
        raise
    except RecursionError:
        raise PayloadTooLarge("the body is nested too deeply", hint="at most 100 levels") from None
    except ValueError as error:
        raise MalformedBody(f"the body is not JSON: {error}", field="body", hint=_HINT) from None
