"""Bytes and values: arguments, results, options and histories, bounded on the way in and on the way out.

Payloads are msgpack and hold what JSON can hold: None, bool, 64-bit int, finite float, str, list, dict
with str keys. A tuple travels as a list. Anything else is refused with the place where it stands.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from fluxmesh.errors import InvalidPayload, PayloadTooLarge
from fluxmesh.job import HISTORY_KEPT, Attempt, JobError, JobOptions, Outcome

T = TypeVar("T")
MAX_PAYLOAD_BYTES: Final = 1 << 20
WARN_PAYLOAD_BYTES: Final = 64 << 10
MAX_DEPTH: Final = 100
_MIN_INT: Final = -(1 << 63)
_MAX_INT: Final = (1 << 64) - 1


def _no_extension(code: int, _data: memoryview) -> Any:
    raise msgspec.DecodeError(f"msgpack extension {code}: nothing that JSON can hold")


def _plain_of(value: object) -> object:
    """A subclass of a scalar (numpy.float64 is one of float) as the scalar it is."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be carried")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain_of).encode
_json_sorted = msgspec.json.Encoder(enc_hook=_plain_of, order="sorted").encode


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Raises msgspec.MsgspecError for any junk, however deeply it is nested."""
    decode = msgspec.msgpack.Decoder(kind, ext_hook=_no_extension).decode

    def call(blob: bytes) -> T:
        try:
            return decode(blob)
        except RecursionError as error:
            raise msgspec.DecodeError("nested too deeply") from error

    return call


_decode_payload = _decoder(tuple[list[Any], dict[str, Any]])
_decode_any: Callable[[bytes], Any] = _decoder(object)
_decode_options = _decoder(JobOptions)
_decode_error = _decoder(JobError)


def _refuse(value: object, where: str) -> InvalidPayload:
    kind = type(value).__name__
    hints = {
        "bytes": "send base64 text",
        "bytearray": "send base64 text",
        "set": "send a list",
        "frozenset": "send a list",
        "datetime": "send isoformat() text",
        "date": "send isoformat() text",
        "Decimal": "send str(value)",
        "UUID": "send str(value)",
    }
    hint = hints.get(kind, "send None, bool, int, float, str, list or dict")
    return InvalidPayload(f"{where}: a value of type {kind} cannot be carried", hint=hint)


def _check_scalar(value: object, where: str) -> None:
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return
    if isinstance(value, bool | str):
        return
    if isinstance(value, int):
        if not _MIN_INT <= value <= _MAX_INT:
            raise InvalidPayload(f"{where}: the integer has more than 64 bits", hint="send str(value)")
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidPayload(
                f"{where}: {value!r} is not a finite number", hint="JSON has no NaN or infinity"
            )
        return
    raise _refuse(value, where)


_SIMPLE: Final = frozenset({str, bool, type(None)})


def _check(root: object, what: str, limit: int) -> None:
    """Walk without recursion, so that a value of any depth is refused and not crashed on. No further than
    `limit` values, each of which takes a byte or more: a small one may hold the same list very many times."""
    stack: list[tuple[object, str, int]] = [(root, what, 1)]
    room = limit
    while stack:
        value, where, depth = stack.pop()
        if isinstance(value, dict):
            children: Any = value.items()
            if any(type(key) is not str for key in value):
                bad = next(key for key in value if type(key) is not str)
                raise InvalidPayload(f"{where}: the key {bad!r} is not text", hint="use str keys")
        elif isinstance(value, list | tuple):
            children = enumerate(value)
        else:
            _check_scalar(value, where)
            continue
        if depth > MAX_DEPTH:
            raise PayloadTooLarge(
                f"{what}: more than {MAX_DEPTH} levels deep", hint="flatten it, or store it and send its key"
            )
        room -= len(value)
        if room < 0:
            raise _too_large(what, f"more than {limit:,} values", limit)
        for key, child in children:
            if type(child) not in _SIMPLE:
                stack.append((child, f"{where}[{key!r}]" if depth < 4 else where, depth + 1))


def _encode_bounded(value: object, what: str, limit: int) -> bytes:
    try:
        blob = _encode(value)
    except UnicodeEncodeError as error:
        raise InvalidPayload(f"{what}: text that is not valid Unicode (a lone surrogate)") from error
    if len(blob) > limit:
        raise _too_large(what, f"{len(blob):,} bytes", limit)
    return blob


def _too_large(what: str, size: str, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"{what}: {size}, the limit is {limit:,} bytes", hint="store it elsewhere and send its key"
    )


def _plain(value: object) -> bool:
    """Cheap yes for the common case: a short flat sequence of plain scalars."""
    kind = type(value)
    return kind in _SIMPLE or (kind is int and _MIN_INT <= value <= _MAX_INT)  # type: ignore[operator]


def encode_payload(
    args: Sequence[object], kwargs: dict[str, object], *, limit: int = MAX_PAYLOAD_BYTES
) -> bytes:
    """Arguments as stored. Raises InvalidPayload or PayloadTooLarge and names the argument."""
    for index, value in enumerate(args):
        if not _plain(value):
            _check(value, f"args[{index}]", limit)
    if kwargs:
        _check(kwargs, "kwargs", limit)
    return _encode_bounded((args, kwargs), "the arguments", limit)


def decode_payload(blob: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Raises msgspec.MsgspecError for anything that is not a payload."""
    return _decode_payload(blob)


def payload_hash(task: str, args: Sequence[object], kwargs: dict[str, object]) -> bytes:
    """16 bytes that are equal for equal (task, args, kwargs), whatever the order of dict keys."""
    return hashlib.blake2b(_json_sorted([task, args, kwargs]), digest_size=16).digest()


def encode_result(value: object, *, limit: int = MAX_PAYLOAD_BYTES) -> bytes:
    """A result as stored. Raises InvalidPayload or PayloadTooLarge."""
    if not _plain(value):
        _check(value, "result", limit)
    return _encode_bounded(value, "the result", limit)


def decode_result(blob: bytes | None) -> Any:
    return None if blob is None else _decode_any(blob)


_NO_OPTIONS: Final = JobOptions()
_options_seen: dict[bytes, JobOptions] = {}
_OPTIONS_SEEN_MAX: Final = 256


def encode_options(options: JobOptions) -> bytes | None:
    """Options as stored; None for a submission that leaves everything to its task."""
    return None if options == _NO_OPTIONS else _encode(options)


def decode_options(blob: bytes | None) -> JobOptions:
    """Raises msgspec.MsgspecError for junk. Equal blobs give one shared value (most jobs share few)."""
    if blob is None:
        return _NO_OPTIONS
    known = _options_seen.get(blob)
    if known is None:
        known = _decode_options(blob)
        if len(_options_seen) >= _OPTIONS_SEEN_MAX:
            _options_seen.clear()
        _options_seen[blob] = known
    return known


def encode_error(error: JobError) -> bytes:
    return _encode(error)


def decode_error(blob: bytes | None) -> JobError | None:
    return None if blob is None else _decode_error(blob)


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A history entry as stored: times in microseconds."""

    life: int
    attempt: int
    started_us: int | None
    ended_us: int
    worker_id: str
    outcome: str
    error: JobError | None = None


_decode_entry = _decoder(_Entry)
_decode_raw_entries = _decoder(list[msgspec.Raw])


def append_history(
    blob: bytes | None,
    *,
    life: int,
    attempt: int,
    started_us: int | None,
    ended_us: int,
    worker_id: str,
    outcome: str,
    error: JobError | None,
) -> bytes:
    """The stored history with one more entry, the oldest dropped past HISTORY_KEPT.

    A history that cannot be read is begun anew: it must not keep a job, and its whole batch, from ending.
    """
    entry = _Entry(life, attempt, started_us, ended_us, worker_id, outcome, error)
    if not blob:
        return _encode((entry,))
    entries: list[Any] = []
    with contextlib.suppress(msgspec.MsgspecError):
        entries += _decode_raw_entries(blob)
    entries.append(entry)
    return _encode(entries[-HISTORY_KEPT:])


def decode_history(blob: bytes | None) -> list[Attempt]:
    """Oldest first. An entry that cannot be read is left out. Raises msgspec.MsgspecError for junk."""
    entries = []
    for raw in _decode_raw_entries(blob) if blob else ():
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            entries.append(_attempt_of(_decode_entry(raw)))
    return entries


def _attempt_of(entry: _Entry) -> Attempt:
    return Attempt(
        life=entry.life,
        attempt=entry.attempt,
        started_at=None if entry.started_us is None else entry.started_us / 1e6,
        ended_at=entry.ended_us / 1e6,
        worker_id=entry.worker_id,
        outcome=Outcome(entry.outcome),
        error=entry.error,
    )
