"""Bytes and messages: what is written, and everything that is refused on the way in.

Packets and frames are msgpack arrays. Decoding answers the value or the reason of its refusal, one of a few
fixed texts, so that they can be counted; whatever the bytes are it raises nothing, and it reserves no memory
by a length that the bytes only claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import msgspec
import xxhash

from fluxmesh.mesh.addresses import KEPT, host_refusal
from fluxmesh.mesh.messages import (
    NEWS_MAX,
    PROTOCOL,
    AckRelay,
    Digests,
    Exchange,
    Load,
    Meta,
    MetaGet,
    MetaIs,
    Nothing,
    Offer,
    Offered,
    Packet,
    Ping,
    PingReq,
    Record,
    Records,
    Refused,
    Steal,
    StreamFrame,
    Taken,
    TcpAck,
    TcpPing,
)
from fluxmesh.mesh.timing import DATAGRAM_MAX_BYTES, FRAME_MAX_BYTES, META_MAX_BYTES

TOO_LARGE: Final = "too large"
MALFORMED: Final = "malformed"
VERSION: Final = "protocol version"
OUT_OF_BOUNDS: Final = "out of bounds"
BAD_NAME: Final = "name"
BAD_META: Final = "particulars"
BAD_JOBS: Final = "jobs"

NAME_MAX_BYTES: Final = 200  # of UTF-8: two names, a record and a load still fit into one datagram
_GUESSED_BYTES: Final = 64  # of a piece of news
_LEAST_BYTES: Final = 12  # of any
_ARRAY_HEADS: Final = tuple(
    bytes((0x90 | length,)) if length < 16 else b"\xdc" + length.to_bytes(2, "big")
    for length in range(NEWS_MAX + 1)
)
_FORBIDDEN: Final = frozenset("{}:")

Thing = TypeVar("Thing", Packet, StreamFrame)

_encoder: Final = msgspec.msgpack.Encoder()
_encode: Final = _encoder.encode
_packet_of: Final = msgspec.msgpack.Decoder(Packet).decode
_WITH_TARGET: Final = frozenset({Ping, PingReq, AckRelay})
_frame_of: Final = msgspec.msgpack.Decoder(StreamFrame).decode


# Texts that were found good: most are met again and again, and a set answers faster than any check.
_good_names: Final[set[str]] = set()
_good_hosts: Final[set[str]] = set()


def name_refusal(name: str) -> str:
    """Why `name` is no name of a worker or queue in the mesh, or ""."""
    if name in _good_names:
        return ""
    if not name or len(name.encode("utf-8", "replace")) > NAME_MAX_BYTES:
        return f"not 1 to {NAME_MAX_BYTES} bytes"
    if not name.isprintable():
        return "characters that cannot be printed"
    if not _FORBIDDEN.isdisjoint(name):
        return "a brace or a colon"
    _keep(_good_names, name)
    return ""


def _keep(good: set[str], text: str) -> None:
    if len(good) >= KEPT:
        good.clear()
    good.add(text)


# --- packets --------------------------------------------------------------------------------------------


def encode_packet(
    packet: Packet, news: Sequence[Record], loads: Sequence[Load], budget_bytes: int
) -> tuple[bytes, int, int]:
    """`packet` (whose own news and loads are empty) with as many of `news` and `loads`, from their start, as
    fit into `budget_bytes`; and how many of each those are.

    The first load is the sender's own: it has its place before any news, the others take what news leaves.
    The head and its message are never cut: within the bounds of names they take less than a datagram.
    """
    head = _encode(packet)[:-2]  # the last two bytes are the two empty arrays
    room = budget_bytes - len(head) - 2
    own = _encode(loads[0]) if loads else b""
    if len(own) > room:
        own = b""
    told_bytes, told, room = _fitting(news, room - len(own))
    if not own:
        return b"".join((head, _ARRAY_HEADS[told], told_bytes, _ARRAY_HEADS[0])), told, 0
    others, more = b"", 0
    if room >= _LEAST_BYTES and len(loads) > 1:
        others, more, _ = _fitting(loads[1:], room, taken=1)
    carried = 1 + more
    return b"".join((head, _ARRAY_HEADS[told], told_bytes, _ARRAY_HEADS[carried], own, others)), told, carried


def _fitting(items: Sequence[Record | Load], room: int, *, taken: int = 0) -> tuple[bytes, int, int]:
    """The encoded items, from the first, that fit beside `taken` others; how many; the room that is left.

    As many at a time as will probably fit, by the size of those before: one by one takes twice as long.
    """
    count, most, size = 0, min(len(items), NEWS_MAX - taken), _GUESSED_BYTES
    data = b""
    left = room
    while count < most and left >= _LEAST_BYTES:
        more = min(most - count, left // size or 1)
        blob = _encode(items[count : count + more])[1 if more < 16 else 3 :]
        if len(blob) + _longer_head(taken + count + more) <= left:
            data = data + blob if data else blob
            count += more
            left -= len(blob)
            size = len(blob) // more + 1
        elif more == 1:
            break
        else:
            size = max(size, (len(blob) + 2) // more) + 1  # so the next try is for fewer
    return data, count, left - _longer_head(taken + count)


def _longer_head(length: int) -> int:
    """Bytes by which the head of an array of so many is longer than that of an empty one."""
    return 0 if length < 16 else 2


def decode_packet(data: bytes) -> Packet | str:
    """The packet, or why it is refused. Never raises."""
    if len(data) > DATAGRAM_MAX_BYTES:
        return TOO_LARGE
    try:
        packet = _packet_of(data)
    except msgspec.ValidationError:
        return _head_refusal(data) or OUT_OF_BOUNDS
    except Exception:  # truncated, nested too deeply, not UTF-8: the bytes are a stranger's
        return _head_refusal(data) or MALFORMED
    if packet.version != PROTOCOL:
        return VERSION
    return _packet_refusal(packet) or packet


def _head_refusal(data: bytes) -> str:
    """Another version may look otherwise in every other way. So it stands in the second byte, of an array of
    less than 16 items."""
    if len(data) < 2 or data[0] & 0xF0 != 0x90 or data[1] > 0x7F:
        return MALFORMED
    return "" if data[1] == PROTOCOL else VERSION


def _packet_refusal(packet: Packet) -> str:
    sender = packet.sender.worker_id
    if sender not in _good_names and name_refusal(sender):
        return BAD_NAME
    if type(packet.message) in _WITH_TARGET and (refusal := _target_refusal(packet.message)):
        return refusal
    for load in packet.loads:
        if name_refusal(load.worker_id):
            return BAD_NAME
    return _records_refusal(packet.news)


def _target_refusal(message: object) -> str:
    match message:
        case Ping(target=target, about=about) | TcpPing(target=target, about=about):
            refusal = _records_refusal((about,)) if about is not None else ""
        case PingReq(target=target, host=host):
            refusal = host_refusal(host)
        case AckRelay(target=target) | MetaGet(target=target) | TcpAck(target=target):
            refusal = ""
        case MetaIs(target=target, meta=meta):
            refusal = meta_refusal(meta) and BAD_META
        case _:
            return ""
    return refusal or (name_refusal(target.worker_id) and BAD_NAME)


def _records_refusal(records: Iterable[Record]) -> str:
    names, hosts = _good_names, _good_hosts
    for record in records:
        if record.worker_id not in names and name_refusal(record.worker_id):
            return BAD_NAME
        if record.accuser and record.accuser not in names and name_refusal(record.accuser):
            return BAD_NAME
        if record.host not in hosts:
            if refusal := host_refusal(record.host):
                return refusal
            _keep(hosts, record.host)
    return ""


# --- frames ---------------------------------------------------------------------------------------------


def encode_frame(frame: StreamFrame) -> bytes:
    """The frame as it is; who fills one keeps it within FRAME_MAX_BYTES."""
    return _encode(frame)


def decode_frame(data: bytes) -> StreamFrame | str:
    """The frame, or why it is refused. Never raises."""
    if len(data) > FRAME_MAX_BYTES:
        return TOO_LARGE
    try:
        frame = _frame_of(data)
    except msgspec.ValidationError:
        return _head_refusal(data) or OUT_OF_BOUNDS
    except Exception:  # as above
        return _head_refusal(data) or MALFORMED
    if frame.version != PROTOCOL:
        return VERSION
    return _frame_refusal(frame) or frame


def _frame_refusal(frame: StreamFrame) -> str:
    if name_refusal(frame.sender.worker_id):
        return BAD_NAME
    match frame.body:
        case Digests(digests=digests):
            return BAD_NAME if any(name_refusal(one.worker_id) for one in digests) else ""
        case Exchange(records=records, want=want, metas=metas):
            refusal = BAD_NAME if any(map(name_refusal, want)) else ""
            return refusal or _metas_refusal(metas) or _records_refusal(records)
        case Records(records=records, metas=metas):
            return _metas_refusal(metas) or _records_refusal(records)
        case Offer(jobs=jobs) | Taken(jobs=jobs):
            return _jobs_refusal(jobs)
        case Steal(queues=queues):
            return BAD_NAME if any(map(name_refusal, queues)) else ""
        case Refused(reason=reason) | Nothing(reason=reason):
            return "" if reason.isprintable() else BAD_NAME
        case body:
            return _target_refusal(body)


def _jobs_refusal(jobs: Sequence[Offered]) -> str:
    """Each once, by an id that can be one."""
    if not all(job.id.isascii() and job.id.isprintable() for job in jobs):
        return BAD_NAME
    return "" if len({job.id for job in jobs}) == len(jobs) else BAD_JOBS


def _metas_refusal(metas: list[Meta]) -> str:
    return BAD_META if any(map(meta_refusal, metas)) else ""


# --- particulars ----------------------------------------------------------------------------------------


def encode_meta(meta: Meta) -> bytes:
    return _encode(meta)


def meta_hash(meta: Meta) -> int:
    """xxh3_64 of the encoded particulars: 64 bits, without a sign."""
    return xxhash.xxh3_64_intdigest(encode_meta(meta))


def meta_refusal(meta: Meta) -> str:
    """Why nobody would take these particulars, or ""."""
    if any(map(name_refusal, meta.queues)):
        return "the name of a queue"
    if not meta.version.isprintable():
        return "the version"
    size = len(encode_meta(meta))
    return "" if size <= META_MAX_BYTES else f"{size:,} bytes, of which {META_MAX_BYTES} are allowed"
