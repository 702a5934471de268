"""What happened in a simulated mesh, kept short, and a hash of all of it."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from xxhash import xxh3_64

from fluxmesh.mesh.messages import Message, Packet, Record, Standing, StreamFrame
from fluxmesh.mesh.timing import S

KEPT: Final = 4_000
SHOWN: Final = 40
LINE_MAX: Final = 200


class Violation(AssertionError):
    """A promise of the mesh was broken. `rule` is its short name; `about` are the worker ids it is about."""

    def __init__(self, rule: str, message: str, *, about: tuple[str, ...] = ()) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.about = about


class Trace:
    """The last `KEPT` events, and a running hash over every one of them.

    The same seed and the same code give the same hash, whatever the Python.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[int, str, str, Any]] = deque(maxlen=KEPT)
        self._hash = xxh3_64()
        self.count = 0

    def bytes_event(self, now_ns: int, who: str, what: str, data: bytes, detail: object) -> None:
        self.count += 1
        self._hash.update(b"%d %s %s " % (now_ns, who.encode(), what.encode()))
        self._hash.update(data)
        self._events.append((now_ns, who, what, detail))

    def event(self, now_ns: int, who: str, what: str, detail: object) -> None:
        """`detail` has a text that is the same on every Python."""
        self.count += 1
        self._hash.update(b"%d %s %s %s" % (now_ns, who.encode(), what.encode(), str(detail).encode()))
        self._events.append((now_ns, who, what, detail))

    @property
    def hash(self) -> str:
        return self._hash.hexdigest()

    def tell(self, about: tuple[str, ...] = (), *, most: int = SHOWN) -> str:
        """The last events that name all of `about` (one of it, if those are few), one a line, in seconds."""
        lines = [_line(event) for event in self._events]
        if about:
            both = [line for line in lines if all(name in line for name in about)]
            lines = (
                both if len(both) >= most // 4 else [line for line in lines if any(n in line for n in about)]
            )
        return "\n".join(lines[-most:])


def _line(event: tuple[int, str, str, Any]) -> str:
    now_ns, who, what, detail = event
    return f"{now_ns / S:10.4f} {who:>6} {what:<8} {_described(detail)}"[:LINE_MAX]


def _described(detail: Any) -> str:
    if not (isinstance(detail, tuple) and len(detail) == 2 and isinstance(detail[1], Packet | StreamFrame)):
        return str(detail)
    to, thing = detail
    if isinstance(thing, StreamFrame):
        body = thing.body
        records = " ".join(told(record) for record in getattr(body, "records", ()))
        return f"-> {to} {type(body).__name__} {records}"
    news = " ".join(told(record) for record in thing.news)
    return f"-> {to} {_message(thing.message)}{' news: ' if news else ''}{news}"


def _message(message: Message) -> str:
    parts = [type(message).__name__, str(getattr(message, "seq", ""))]
    target = getattr(message, "target", None)
    if target is not None:
        parts.append(f"of {target.worker_id}.{target.epoch}")
    about = getattr(message, "about", None)
    if about is not None:
        parts.append(f"about {told(about)}")
    return " ".join(part for part in parts if part)


def told(record: Record) -> str:
    """A record in a few characters, such as w3.1/2 SUSPECT by w1."""
    try:
        standing = Standing(record.standing).name
    except ValueError:
        standing = str(record.standing)
    by = f" by {record.accuser}" if record.accuser else ""
    return f"{record.worker_id}.{record.epoch}/{record.incarnation} {standing}{by}"
