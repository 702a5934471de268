"""Small messages pushed to whoever listens. Lossy by design: the storage's records are the truth."""

from __future__ import annotations

from typing import Final

import msgspec

from fluxmesh.errors import InvalidOption

MAX_EVENT_BYTES: Final = 8 << 10
MAX_TOPICS: Final = 32


class Event(msgspec.Struct, frozen=True, array_like=True):
    """`topic` is a name such as "jobs" or "workers"; `body` is opaque to storage."""

    topic: str
    body: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


def encode_event(event: Event) -> bytes:
    """Raises InvalidOption if the event is larger than MAX_EVENT_BYTES."""
    blob = _encode(event)
    if len(blob) > MAX_EVENT_BYTES:
        raise InvalidOption("event", f"{len(blob):,} bytes", hint=f"at most {MAX_EVENT_BYTES:,}")
    return blob


def decode_event(blob: bytes) -> Event | None:
    """None for junk: a datagram is not trusted."""
    try:
        return _decode(blob)
    except (msgspec.MsgspecError, RecursionError):
        return None
