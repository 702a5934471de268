"""What a worker's process writes down for whoever watches over it, in memory that both have mapped.

It can be read at any time: also while one call into C holds the interpreter, when no thread of the process
can say a word. Instants are those of the machine's monotonic clock, which is one for all of its processes.

The layout: a header, a fixed number of records of one running job each, then the worker's registration,
which a beat in its name has to carry. Whoever watches makes the file, empty; the worker gives it its size.

Nobody waits for anybody. A field of eight bytes is written at once; a record is read until two looks at it
agree, and its deadline, without which it says nothing, is written last. What a torn record could say is a
wrong job under a token that storage does not know: storage ignores it.

A job whose body waits for its turn may be taken back by whoever watches, as long as the process cannot do
that itself. Each side writes its own mark and then reads the other's (Dekker's way, with a fence between
the two), so that at least one of them sees that the other was there: a body is never entered that was taken
back."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from fluxmesh.clock import Clock
from fluxmesh.storage.values import Registration, WorkerRef

LEDGER_FLAG: Final = "--ledger-fd"
ID_BYTES: Final = 36  # of a UUID in text
RECORDS_PER_SLOT: Final = 4  # running, stuck (two a slot before the worker retires), and one to spare
RECORDS_MORE: Final = 8
MAX_BYTES: Final = 64 << 20
NONE: Final = 0  # where a run stands that is in no ledger

_MAGIC: Final = b"FXLEDG01"
_SIZES: Final = struct.Struct("=8sII")  # magic, records, bytes of the registration
_EPOCH_AT: Final = 16
_BEAT_AT: Final = 24
_TURN_AT: Final = 32
_PROBED_AT: Final = 40
_ANSWERED_AT: Final = 48
_BLOCKED_AT: Final = 56
_RECORDS_AT: Final = 128
_INT: Final = struct.Struct("=q")
_INSTANT: Final = struct.Struct("=d")
_TEXT: Final = struct.Struct(f"={ID_BYTES}s")
_RECORD: Final = struct.Struct(f"={ID_BYTES}sBBBxqd")  # id, waits, revoked, left, token, deadline
_WAITS: Final = ID_BYTES
_REVOKED: Final = ID_BYTES + 1
_LEFT: Final = ID_BYTES + 2
_HEADER: Final = struct.Struct(f"=qdddd{ID_BYTES}s")
_DEADLINE_IN_RECORD: Final = _RECORD.size - _INSTANT.size
_FREE: Final = (0.0,)
_LOOKS: Final = 4
_put_record: Final = _RECORD.pack_into
_put_instant: Final = _INSTANT.pack_into


class Entry(Struct, frozen=True):
    """A job at hand. `hard_s`: the instant from which on its body counts as unstoppable; `waits`: it was not
    entered; `at`: where this stands; `left`: its body has ended, and the loop has not heard of it yet."""

    id: str
    token: int
    hard_s: float
    waits: bool = False
    at: int = NONE
    left: bool = False


class Vitals(Struct, frozen=True):
    """Signs of life. `beat_s`: when the last good beat was sent; `turn_s`: when the watching thread turned
    last; `probed_s`, `answered_s`: when the loop was asked for a sign last, and when it last gave one;
    `blocked_by`: the job that it stands in, if the process could tell."""

    epoch: int
    beat_s: float
    turn_s: float
    probed_s: float
    answered_s: float
    blocked_by: str


def make_ledger_file() -> int:
    """A descriptor of an empty file without a name. A worker can make it larger and, on Linux, never smaller:
    a mapping of what is gone would kill its reader. Raises OSError."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # an old kernel, or one that is not allowed to
            return _sealed_memory()
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _sealed_memory() -> int:
    import fcntl

    fd = os.memfd_create("fluxmesh-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class Ledger:
    """The worker's side. `enter` and `strike` are called on its loop for every job; the rest, by whichever
    thread has something to tell."""

    def __init__(
        self, fd: int, registration: Registration, *, concurrency: int, hard_grace_s: float, clock: Clock
    ) -> None:
        """Give the file its size and write what stays. Raises OSError, ValueError."""
        blob = msgspec.msgpack.encode(registration)
        count = RECORDS_PER_SLOT * concurrency + RECORDS_MORE
        # After the records that are read comes one for all jobs too many.
        self._scrap_at = _RECORDS_AT + count * _RECORD.size
        blob_at = self._scrap_at + _RECORD.size
        size = blob_at + len(blob)
        if size > MAX_BYTES:
            raise ValueError(f"a ledger of {size:,} bytes; at most {MAX_BYTES:,}")
        os.ftruncate(fd, size)
        self._map: mmap.mmap | bytearray = mmap.mmap(fd, size)
        self._clock = clock
        self._hard_grace_s = hard_grace_s
        self._fence = threading.Lock()
        self._free = list(range(_RECORDS_AT, self._scrap_at, _RECORD.size))
        self._map[blob_at:size] = blob
        self._map[: _SIZES.size] = _SIZES.pack(_MAGIC, count, len(blob))

    def enter(self, job_id: str, token: int, soft_s: float, waits: int) -> int:
        """Note a job at hand, with the instant of its timeout; 1: its body waits for its turn on the loop.
        Where it stands, for `begin` and `strike`."""
        free = self._free
        at = free.pop() if free else self._scrap_at
        _put_record(self._map, at, job_id.encode(), waits, 0, 0, token, soft_s + self._hard_grace_s)
        return at

    def begin(self, at: int) -> bool:
        """Its body is about to be entered; False: it was taken back, and must not be."""
        shared = self._map
        shared[at + _WAITS] = 0
        # The processor must not read before it has written. (`with` takes twice as long.)
        self._fence.acquire()
        self._fence.release()
        return not shared[at + _REVOKED]

    def left(self, at: int) -> None:
        """Its body has ended on its thread: no time counts any more, however late the loop hears of it. On
        that thread, before the loop can strike it."""
        try:
            self._map[at + _LEFT] = 1
        except ValueError:
            pass  # the worker is over, just now

    def resumed(self, at: int) -> None:
        """The loop has heard of that, and what follows the body counts again."""
        self._map[at + _LEFT] = 0

    def strike(self, at: int) -> None:
        """Its body has ended, or never began."""
        _put_instant(self._map, at + _DEADLINE_IN_RECORD, 0.0)
        if at != self._scrap_at:
            self._free.append(at)

    def registered(self, epoch: int, sent_s: float) -> None:
        """From now on there is something to be kept."""
        _put_instant(self._map, _BEAT_AT, sent_s)
        _INT.pack_into(self._map, _EPOCH_AT, epoch)

    def beat(self, sent_s: float) -> None:
        """A beat sent then was good."""
        _put_instant(self._map, _BEAT_AT, sent_s)

    def turned(self) -> None:
        _put_instant(self._map, _TURN_AT, self._clock.mono_s())

    def probed(self) -> None:
        """The loop is asked for a sign."""
        _put_instant(self._map, _PROBED_AT, self._clock.mono_s())

    def answered(self) -> None:
        _put_instant(self._map, _ANSWERED_AT, self._clock.mono_s())

    def blocked(self, job_id: str) -> None:
        """The loop stands in this job; "": it turns, or nobody knows."""
        _TEXT.pack_into(self._map, _BLOCKED_AT, job_id.encode())

    def over(self) -> None:
        """Nothing of the worker is left that a lease would be kept for. What is still written goes nowhere:
        the worker's object may live on, and a mapping holds a descriptor."""
        shared = self._map
        _INT.pack_into(shared, _EPOCH_AT, 0)
        self._map = bytearray(len(shared))
        if isinstance(shared, mmap.mmap):
            shared.close()


class LedgerReader:
    """The side of whoever watches. It owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        self._fence = threading.Lock()
        self._records = 0
        self._registration: Registration | None = None

    def vitals(self) -> Vitals | None:
        """The signs of life now; None while there is no registered worker."""
        view = self._mapped()
        if view is None:
            return None
        epoch, beat_s, turn_s, probed_s, answered_s, blocked = _HEADER.unpack_from(view, _EPOCH_AT)
        if epoch == 0:
            return None
        return Vitals(epoch, beat_s, turn_s, probed_s, answered_s, _text(blocked))

    def entries(self) -> list[Entry]:
        """The jobs whose bodies run now. A record that is written all the time is left out."""
        view = self._mapped()
        if view is None:
            return []
        found = []
        for at in range(_RECORDS_AT, _RECORDS_AT + self._records * _RECORD.size, _RECORD.size):
            if _INSTANT.unpack_from(view, at + _DEADLINE_IN_RECORD) == _FREE:
                continue  # most are
            entry = _agreed(view, at)
            if entry is not None and entry.hard_s:
                found.append(entry)
        return found

    def revoke(self, entries: Iterable[Entry]) -> list[Entry]:
        """Take back those of these jobs that wait for their turn; which of them are not entered any more."""
        view = self._mapped()
        if view is None:
            return []
        marked = [entry for entry in entries if entry.waits]
        for entry in marked:
            view[entry.at + _REVOKED] = 1
        with self._fence:
            pass  # as in Ledger.begin
        return [entry for entry in marked if _agreed(view, entry.at) == entry]

    def registration(self) -> Registration | None:
        """What a beat in the worker's name carries."""
        if self._registration is None and self._mapped() is None:
            return None
        return self._registration

    def worker(self, epoch: int) -> WorkerRef:
        assert self._registration is not None
        return WorkerRef(self._registration.worker_id, epoch)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._map is not None:
            self._map.close()
            self._map = None

    def _mapped(self) -> mmap.mmap | None:
        if self._map is None and self.fd >= 0:
            size = os.fstat(self.fd).st_size
            if not _RECORDS_AT < size <= MAX_BYTES:
                return None
            view = mmap.mmap(self.fd, size)
            magic, records, blob_bytes = _SIZES.unpack_from(view)
            blob_at = _RECORDS_AT + (records + 1) * _RECORD.size
            if magic != _MAGIC or blob_at + blob_bytes > size:
                view.close()
                return None
            blob = view[blob_at : blob_at + blob_bytes]
            self._registration = msgspec.msgpack.decode(blob, type=Registration)
            self._records = records
            self._map = view
        return self._map


def _agreed(view: mmap.mmap, at: int) -> Entry | None:
    before = b""
    for _ in range(_LOOKS):
        now = view[at : at + _RECORD.size]
        if now == before:
            job_id, waits, _, left, token, hard_s = _RECORD.unpack(now)
            return Entry(_text(job_id), token, hard_s, bool(waits), at, bool(left))
        before = now
    return None


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")
