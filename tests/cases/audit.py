"""Every move of every job as its storage made it, in the order of its steps and by its own clock: seen from
behind, without a word of the storage's code.

In SQLite a trigger writes it down, inside the transaction that moves the job. A Redis server tells it to
whoever asks by MONITOR: what each script does, and when.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Final, Protocol

from msgspec import Struct

from tests.cases.backdoor import BackDoor, RedisDoor, SqliteDoor

READY: Final = 1
HELD: Final = 3
RUNNING: Final = 4
OWNED: Final = frozenset({HELD, RUNNING})
ENDED_FROM: Final = 5
SEEN_S: Final = 10.0


class Move(Struct, frozen=True):
    """A job is at `place` (see storage/sqlite/place.py) from `at_us` on. `epoch` and `worker`: its owner's,
    if it has one. Jobs that one exchange starts have its number as their `step`."""

    step: int
    at_us: int
    id: str
    place: int
    tier: int
    queue: str
    task: str
    token: int
    epoch: str = ""
    worker: str = ""


class Audit(Protocol):
    def moves(self) -> list[Move]:
        """All so far, the latest included."""
        ...

    def stop(self) -> None:
        """Leave no trace in the storage. `moves` goes on to answer."""
        ...


def audit_of(door: BackDoor) -> Audit:
    """Begins at once, on a storage that may be in use already: first it tells where every job is."""
    if isinstance(door, SqliteDoor):
        return SqliteAudit(door)
    assert isinstance(door, RedisDoor)
    return RedisAudit(door)


@contextlib.contextmanager
def audited(door: BackDoor) -> Iterator[Audit]:
    audit = audit_of(door)
    try:
        yield audit
    finally:
        audit.stop()


# -- SQLite ----------------------------------------------------------------------------------------------
_ROW: Final = """insert into <audit> (at_us, id, place, tier, queue, task, token, lane, worker, started_us)
    values (cast(unixepoch('subsec') * 1000000 as integer), new.id, new.place, new.tier, new.queue, new.task,
    new.token, new.lane, coalesce(new.worker_id, ''), coalesce(new.started_us, 0));"""
_TABLE: Final = """create table <audit> (n integer primary key, at_us integer, id text, place integer,
    tier integer, queue text, task text, token integer, lane text, worker text, started_us integer)"""
_SO_FAR: Final = """insert into <audit> (at_us, id, place, tier, queue, task, token, lane, worker, started_us)
    select cast(unixepoch('subsec') * 1000000 as integer), id, place, tier, queue, task, token, lane,
    coalesce(worker_id, ''), coalesce(started_us, 0) from <job> where place < 5 order by rid"""
_NEW: Final = f"create trigger <audit_new> after insert on <job> begin {_ROW} end"
_MOVED: Final = f"""create trigger <audit_moved> after update of place, lane, tier, token on <job>
    when new.place <> old.place or new.token <> old.token or new.tier <> old.tier begin {_ROW} end"""


class SqliteAudit:
    def __init__(self, door: SqliteDoor) -> None:
        self._door = door
        self._moves: list[Move] = []
        self._read = 0
        self._over = False
        for sql in (_TABLE, _NEW, _MOVED, _SO_FAR):
            door.direct(sql)

    def moves(self) -> list[Move]:
        if self._over:
            return self._moves
        for row in self._door.direct("select * from <audit> where n > ? order by n", self._read):
            n, at_us, job, place, tier, queue, task, token, lane, worker, started_us = row
            owned = place in OWNED
            self._moves.append(
                Move(
                    started_us if place == RUNNING else 0, at_us, job, place, tier, queue, task, token,
                    lane if owned else "", worker if owned else "",
                )
            )  # fmt: skip
            self._read = n
        return self._moves

    def stop(self) -> None:
        self.moves()
        self._over = True
        for sql in ("drop trigger <audit_new>", "drop trigger <audit_moved>", "drop table <audit>"):
            self._door.direct(sql)


# -- Redis -----------------------------------------------------------------------------------------------
_WORD: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_TOLD: Final = frozenset({"place", "tier", "queue", "task", "token", "lane", "worker_id", "started_us"})
_READ_BYTES: Final = 1 << 20
_PAUSE_S: Final = 0.05


class RedisAudit:
    """Goes on listening when the server is killed and comes back: what it did before anybody listened again
    is not known then."""

    def __init__(self, door: RedisDoor) -> None:
        self._door = door
        self._prefix = door.key("job", "").encode()
        self._heard = threading.Condition()
        self._word = b""
        self._moves: list[Move] = []
        self._jobs: dict[str, dict[bytes, bytes]] = {}
        self._step = 0
        self._over = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._listen, name="audit", daemon=True)
        self._thread.start()
        self._await_now()
        self._so_far()

    def _so_far(self) -> None:
        """Where every job is that has not moved since anybody listened."""
        records = self._door.records()
        with self._heard:
            for job, record in records.items():
                known = {name.encode(): value.encode() for name, value in record.items() if name in _TOLD}
                if job not in self._jobs and int(record["place"]) < ENDED_FROM:
                    self._jobs[job] = known
                    self._moves.insert(0, self._move(round(time.time() * 1e6), job, known))

    def _listen(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                self._hear(socket.create_connection(("127.0.0.1", self._door.server.port), SEEN_S))
            self._over.wait(_PAUSE_S)

    def _hear(self, link: socket.socket) -> None:
        with link:
            link.settimeout(None)
            self._socket = link
            link.sendall(b"MONITOR\r\n")
            rest = b""
            while data := link.recv(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\r\n")
                with self._heard:
                    for line in lines:
                        self._take(line)

    def moves(self) -> list[Move]:
        if not self._over.is_set():
            self._await_now()
        return list(self._moves)

    def _await_now(self) -> None:
        """Until it has told of a word that we have the server say. A server that is gone says no more."""
        word = uuid.uuid4().hex
        deadline = time.monotonic() + SEEN_S
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                self._door.ask("ECHO", word)
            with self._heard:
                if self._heard.wait_for(lambda: self._word == word.encode(), _PAUSE_S):
                    return
        raise TimeoutError("the server does not tell what it does")

    def _take(self, line: bytes) -> None:
        """+1700000000.000001 [0 lua] "HSET" "fluxmesh:jobs:…" "place" "4" …"""
        if b" lua] " not in line:
            self._step += 1
            if b'"ECHO"' in line:
                self._word = _WORD.findall(line)[1]
                self._heard.notify_all()
            return
        if b'"HSET" "' + self._prefix not in line:
            return
        at, _, database = line[1:].partition(b" [")
        if int(database.split(b" ", 1)[0]) != self._door.database:
            return
        words = _WORD.findall(line)
        job = words[1].removeprefix(self._prefix).decode()
        told = dict(zip(words[2::2], words[3::2], strict=False))
        known = self._jobs.setdefault(job, {})
        known |= told
        if b"place" in told or b"tier" in told or b"token" in told:
            self._moves.append(self._move(round(float(at) * 1e6), job, known))

    def _move(self, at_us: int, job: str, known: dict[bytes, bytes]) -> Move:
        place = int(known.get(b"place", b"0"))
        owned = place in OWNED
        return Move(
            self._step,
            at_us,
            job,
            place,
            int(known.get(b"tier", b"2")),
            known.get(b"queue", b"").decode(),
            known.get(b"task", b"").decode(),
            int(known.get(b"token", b"0")),
            known.get(b"lane", b"").decode() if owned else "",
            known.get(b"worker_id", b"").decode() if owned else "",
        )

    def stop(self) -> None:
        self.moves()
        self._over.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(SEEN_S)
