"""The threads that talk to SQLite: one writer with group commit, one reader, one checkpointer.

Calls that wait while a transaction is being committed share the next one: each but the first runs in a
savepoint, and nobody hears of success before the common commit. A transaction takes in calls for at most
GROUP_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import apsw

from fluxmesh.clock import Clock
from fluxmesh.errors import FluxMeshError, InvalidOption, StorageUnreachable
from fluxmesh.storage import forks
from fluxmesh.storage.sqlite.connection import connect, told
from fluxmesh.storage.sqlite.step import Shared, Step

GROUP_S: Final = 0.005
GROUP_MOST: Final = 64
CHECKPOINT_PAGES: Final = 2_000
RESTART_PAGES: Final = 16_000
T = TypeVar("T")
# Errors of the whole transaction, not of one verb in it.
_OF_ALL: Final = (apsw.FullError, apsw.IOError, apsw.CorruptError, apsw.BusyError)
Answer = tuple[asyncio.Future[Any], Any, BaseException | None]


class Call:
    """A verb to run, and the future that waits for its answer."""

    __slots__ = ("args", "future", "loop", "verb")

    def __init__(
        self,
        verb: Callable[..., Any],
        args: tuple[Any, ...],
        future: asyncio.Future[Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.verb = verb
        self.args = args
        self.future = future
        self.loop = loop


def _of_caller(error: Exception) -> Exception:
    """An id, a name or a query may come from anywhere, and may be no text: SQLite is not asked then."""
    if isinstance(error, UnicodeEncodeError):
        shown = error.object[:80].encode("utf-8", "backslashreplace").decode()
        return InvalidOption("text", f"{shown!r} is not valid Unicode (a lone surrogate)")
    return error


def _resolve(answers: list[Answer]) -> None:
    for future, value, error in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def deliver(loop: asyncio.AbstractEventLoop, answers: list[Answer]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
        loop.call_soon_threadsafe(_resolve, answers)


class Transactor:
    """Runs verbs in transactions, in whichever thread it is used (one only)."""

    def __init__(self, path: Path, shared: Shared, durability: str, give_up: Callable[[], bool]) -> None:
        self._path = path
        self._shared = shared
        self._durability = durability
        self._give_up = give_up
        self._db: apsw.Connection | None = None
        self.wal_pages = 0
        self.fork_lock = threading.Lock()
        forks.watch(self)

    def open(self) -> apsw.Connection:
        if self._db is None:
            self._db = connect(self._path, durability=self._durability, give_up=self._give_up)
            self._db.set_wal_hook(self._on_commit)
        return self._db

    def _on_commit(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self.wal_pages = pages
        return apsw.SQLITE_OK

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def run(self, first: Call, following: Iterable[Call] = ()) -> list[Answer]:
        """One transaction for a call and those that came meanwhile."""
        with self.fork_lock:
            return self._run(first, following)

    def _run(self, first: Call, following: Iterable[Call]) -> list[Answer]:
        answers: list[Answer] = []
        calls = [first]
        rings: list[tuple[str, bytes]] = []
        committing = False
        try:
            db = self.open()
            db.execute("begin immediate")
            answers.append(self._first(db, first, rings))
            for call in following:
                calls.append(call)
                answers.append(self._next(db, call, rings))
            committing = True
            db.execute("commit")
        except apsw.Error as error:
            self._rollback()
            problem = told(error, self._path, after_commit_began=committing)
            return [(call.future, None, problem) for call in calls]
        except FluxMeshError as error:
            return [(call.future, None, error) for call in calls]
        for bell, message in rings:
            self._shared.belfry.ring(bell, message)
        return answers

    def _first(self, db: apsw.Connection, call: Call, rings: list[tuple[str, bytes]]) -> Answer:
        """The usual case is a transaction of one call: it needs no savepoint, the transaction is its own."""
        try:
            return call.future, self._apply(db, call, rings), None
        except _OF_ALL:
            raise
        except Exception as error:
            # Whatever a verb raises belongs to its caller; those that follow start from a clean slate.
            db.execute("rollback")
            db.execute("begin immediate")
            rings.clear()
            return call.future, None, self._as_ours(error)

    def _next(self, db: apsw.Connection, call: Call, rings: list[tuple[str, bytes]]) -> Answer:
        value: Any = None
        problem: Exception | None = None
        try:
            with db:
                value = self._apply(db, call, rings)
        except _OF_ALL:
            raise
        except Exception as error:
            problem = self._as_ours(error)
        return call.future, value, problem

    def _apply(self, db: apsw.Connection, call: Call, rings: list[tuple[str, bytes]]) -> Any:
        step = Step(db, self._shared)
        value = call.verb(step, *call.args)
        rings.extend(step.finish())
        return value

    def _as_ours(self, error: Exception) -> Exception:
        return told(error, self._path) if isinstance(error, apsw.Error) else _of_caller(error)

    def _rollback(self) -> None:
        if self._db is not None and self._db.in_transaction:
            with contextlib.suppress(apsw.Error):
                self._db.execute("rollback")

    def restart_wal(self) -> None:
        """Begin the log file anew when it has grown large under unceasing writes."""
        with self.fork_lock, contextlib.suppress(apsw.Error):
            self.open().wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
        self.wal_pages = 0


class Worker(threading.Thread):
    """A daemon thread that takes calls from a queue until it is told to stop."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.stopping = False

    def put(self, call: Call) -> None:
        self._calls.put(call)

    def stop(self) -> None:
        """Let it finish what is queued, then end."""
        self.stopping = True
        self._calls.put(None)

    def refuse_rest(self) -> None:
        problem = StorageUnreachable("the storage has been closed", hint="open it again")
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    deliver(call.loop, [(call.future, None, problem)])


class Writer(Worker):
    """The one writer of a process."""

    def __init__(self, transactor: Transactor, clock: Clock, checkpointer: Checkpointer) -> None:
        super().__init__("fluxmesh-sqlite-writer")
        self._transactor = transactor
        self._clock = clock
        self._checkpointer = checkpointer
        self._ended = False

    def run(self) -> None:
        while not self._ended:
            call = self._calls.get()
            if call is None:
                break
            answers = self._transactor.run(call, self._following())
            deliver(call.loop, answers)
            if self._transactor.wal_pages > RESTART_PAGES:
                self._transactor.restart_wal()
            elif self._transactor.wal_pages > CHECKPOINT_PAGES:
                self._checkpointer.due.set()
        self._transactor.close()
        self.refuse_rest()

    def _following(self) -> Iterable[Call]:
        began = self._clock.mono_s()
        for _ in range(GROUP_MOST):
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is None:
                self._ended = True
                return
            yield call
            if self._clock.mono_s() - began > GROUP_S:
                return


class Reader(Worker):
    """Runs reads, each in one short read transaction on a connection of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__("fluxmesh-sqlite-reader")
        self._path = path
        self._db: apsw.Connection | None = None
        self.fork_lock = threading.Lock()
        forks.watch(self)

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            deliver(call.loop, [self.read(call)])
        self.close()
        self.refuse_rest()

    def read(self, call: Call) -> Answer:
        with self.fork_lock:
            return self._read(call)

    def _read(self, call: Call) -> Answer:
        try:
            if self._db is None:
                self._db = connect(self._path, durability="process", give_up=lambda: self.stopping)
            self._db.execute("begin")
            try:
                return call.future, call.verb(self._db, *call.args), None
            finally:
                if self._db.in_transaction:  # an error may have ended it, and is what shall be told
                    self._db.execute("commit")
        except apsw.Error as error:
            return call.future, None, told(error, self._path)
        except Exception as error:
            return call.future, None, _of_caller(error)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


class Checkpointer(threading.Thread):
    """Moves the log into the database beside the writer; started when there is something to move."""

    def __init__(self, path: Path, durability: str) -> None:
        super().__init__(name="fluxmesh-sqlite-checkpointer", daemon=True)
        self._path = path
        self._durability = durability
        self._db: apsw.Connection | None = None
        self.due = threading.Event()
        self.stopping = False
        self.fork_lock = threading.Lock()
        forks.watch(self)

    def run(self) -> None:
        while True:
            self.due.wait()
            self.due.clear()
            if self.stopping:
                break
            # SQLite's own lock lets one process checkpoint at a time; the others simply go on.
            with self.fork_lock, contextlib.suppress(apsw.Error, FluxMeshError):
                if self._db is None:
                    self._db = connect(self._path, durability=self._durability, give_up=lambda: self.stopping)
                self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        self.close()

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def stop(self) -> None:
        self.stopping = True
        self.due.set()
