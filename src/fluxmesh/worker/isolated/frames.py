"""What a worker and a body process tell each other: msgpack behind its length, never a pickle.

Worker: Hello once, then for each job Start and perhaps Stop; the end of the pipe means: end. Body process:
Ready or Broken once, then for each job Started, any number of Told, Ended. Everything about a job carries
its token, so that what comes late meets no other job.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from fluxmesh.config import Settings
from fluxmesh.outcome import End
from fluxmesh.storage.values import ClaimedJob
from fluxmesh.worker.ending import Raised

FRAME_MAX_BYTES: Final = 80 << 20  # above the greatest payload and result that settings allow
_LENGTH_BYTES: Final = 4
T = TypeVar("T")


class Hello(Struct, frozen=True, tag=True):
    """`spec`: how the tasks are found. `log`: level and format, if the worker writes its own log."""

    spec: bytes
    name: str
    settings: Settings
    log: tuple[str, str] | None = None


class Start(Struct, frozen=True, tag=True):
    """Run this job. `address_space_bytes`: a bound that the process sets itself, where nobody can watch.
    `begin_by_s`: the monotonic instant, the same in every process, after which it may be another's."""

    job: ClaimedJob
    address_space_bytes: int | None = None
    begin_by_s: float | None = None


class Stop(Struct, frozen=True, tag=True):
    """Raise JobTimeout (`timeout`) or JobInterrupted in the body of this token."""

    token: int
    timeout: bool


class Ready(Struct, frozen=True, tag=True):
    """The tasks are loaded."""


class Broken(Struct, frozen=True, tag=True):
    """The tasks cannot be loaded, and the process ends."""

    what: str


class Started(Struct, frozen=True, tag=True):
    """From here on the end of the process is a crash of the job."""

    token: int


class Told(Struct, frozen=True, tag=True):
    """The body's progress."""

    token: int
    pct: float
    message: str | None


class Ended(Struct, frozen=True, tag=True):
    """The body has ended: with its result as it is stored, or it raised, which the worker has to judge."""

    token: int
    end: End | None = None
    raised: Raised | None = None
    told: tuple[float, str | None] | None = None


FromWorker = Hello | Start | Stop
FromBody = Ready | Broken | Started | Told | Ended
_encode = msgspec.msgpack.Encoder().encode
from_worker: Final = msgspec.msgpack.Decoder(FromWorker)
from_body: Final = msgspec.msgpack.Decoder(FromBody)


def framed(message: FromWorker | FromBody) -> bytes:
    """The message as it goes through the pipe."""
    blob = _encode(message)
    return len(blob).to_bytes(_LENGTH_BYTES, "big") + blob


class Inflow:
    """Bytes on one side, whole messages on the other."""

    def __init__(self) -> None:
        self._held = bytearray()

    def take(self, data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> Iterator[T]:
        """The messages that are whole now. Raises msgspec.MsgspecError for what is none."""
        held = self._held
        held += data
        while len(held) >= _LENGTH_BYTES:
            size = int.from_bytes(held[:_LENGTH_BYTES], "big")
            if size > FRAME_MAX_BYTES:
                raise msgspec.DecodeError(f"a message of {size:,} bytes")
            if len(held) < _LENGTH_BYTES + size:
                return
            blob = bytes(held[_LENGTH_BYTES : _LENGTH_BYTES + size])
            del held[: _LENGTH_BYTES + size]
            yield decoder.decode(blob)
