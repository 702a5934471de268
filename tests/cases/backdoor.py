"""The back door to the storage of a lab: it is walked, robbed, spoilt and frozen past the storage's own code.

One small interface, two storages. What a method cannot do to a storage, no case may ask of it there.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import apsw

from fluxmesh.job import Status
from fluxmesh.storage.redis.keys import KEYS, key
from fluxmesh.storage.sqlite.place import STATUS
from tests.redis_server import Server

RUNNING: Final = 4
LOCKED_S: Final = 30


class BackDoor(Protocol):
    """One namespace of one storage."""

    storage: str  # "sqlite" or "redis"
    url: str
    namespace: str
    refusal: str  # what a producer is told while the storage is out of reach

    def beside(self, namespace: str) -> BackDoor:
        """Another namespace of the same storage."""
        ...

    def places(self) -> dict[Status, int]:
        """Jobs by status, counted one by one."""
        ...

    def rows(self) -> dict[str, int]:
        """How much of everything is stored for this namespace, by kind."""
        ...

    def disorder(self, namespaces: Iterable[str]) -> list[str]:
        """What of the storage does not fit together, or belongs to none of these namespaces."""
        ...

    def left_over(self) -> list[str]:
        """What there is still, of a namespace without jobs and workers, that grows with use."""
        ...

    def drop_worker(self, epoch: int) -> None:
        """The record of a worker is gone."""
        ...

    def drop_lease(self, epoch: int) -> None:
        """The lease of a worker's jobs is gone, and on one of them what tells of its claim."""
        ...

    def overwrite_payload(self, job_id: str, payload: bytes) -> None: ...

    def make_due(self, job_ids: Iterable[str], in_s: float) -> None:
        """Delayed jobs are due so soon, and nobody was rung."""
        ...

    def out_of_reach(self) -> AbstractContextManager[None]:
        """Nobody is answered meanwhile."""
        ...


# -- SQLite ----------------------------------------------------------------------------------------------
_TABLES_THAT_STAY: Final = frozenset({"meta"})  # sequences and totals, of a fixed number


class SqliteDoor:
    storage: Final = "sqlite"
    refusal: Final = "locked"

    def __init__(self, path: Path, namespace: str = "fluxmesh") -> None:
        self.path = path
        self.url = f"sqlite:///{path}"
        self.namespace = namespace

    def beside(self, namespace: str) -> SqliteDoor:
        return SqliteDoor(self.path, namespace)

    def direct(self, sql: str, *bindings: Any) -> list[tuple[Any, ...]]:
        """SQL on the file itself, table names in the form <job>."""
        text = re.sub(r"<(\w+)>", rf'"{self.namespace}:\1"', sql)
        # The storage's own driver: a second SQLite library in this process would break its locks.
        with closing(apsw.Connection(str(self.path))) as db:
            db.set_busy_timeout(10_000)
            return list(db.execute(text, bindings))

    def places(self) -> dict[Status, int]:
        walked: dict[Status, int] = {}
        for place, rows in self.direct("select place, count(*) from <job> group by place"):
            walked[STATUS[place]] = walked.get(STATUS[place], 0) + rows
        return walked

    def rows(self) -> dict[str, int]:
        prefix = f"{self.namespace}:"
        names = [name for (name,) in self.direct("select name from sqlite_schema where type = 'table'")]
        return {
            name: self.direct(f'select count(*) from "{name}"')[0][0]
            for name in names
            if name.startswith(prefix)
        }

    def disorder(self, namespaces: Iterable[str]) -> list[str]:
        known = tuple(f"{namespace}:" for namespace in namespaces)
        names = self.direct(
            "select name from sqlite_schema where type = 'table' and name not like 'sqlite\\_%' escape '\\'"
        )
        strange = [f"a table of no namespace: {name}" for (name,) in names if not name.startswith(known)]
        [(verdict,)] = self.direct("pragma quick_check(1)")
        return strange + ([] if verdict == "ok" else [str(verdict)])

    def left_over(self) -> list[str]:
        return [
            f"{n} rows of {name}"
            for name, n in self.rows().items()
            if n and name.partition(":")[2] not in _TABLES_THAT_STAY
        ]

    def drop_worker(self, epoch: int) -> None:
        self.direct("delete from <worker> where epoch = ?", epoch)

    def drop_lease(self, epoch: int) -> None:
        """In this storage the lease of a job is a stamp on its owner's row, and what remains of a claim is
        when the job was taken. So losing one job's lease record means: no stamp on the row, and on one job
        none of the claim."""
        self.direct("update <worker> set beat_at_us = 0 where epoch = ?", epoch)
        self.direct(
            "update <job> set pos = 0, worker_id = null where rid ="
            " (select min(rid) from <job> where place = 4 and lane = ?)",
            str(epoch),
        )

    def overwrite_payload(self, job_id: str, payload: bytes) -> None:
        self.direct("update <job> set payload = ? where id = ?", payload, job_id)

    def make_due(self, job_ids: Iterable[str], in_s: float) -> None:
        due_us = round((time.time() + in_s) * 1e6)
        for job_id in job_ids:
            self.direct("update <job> set pos = ?, due_us = ? where id = ?", due_us, due_us, job_id)

    @contextmanager
    def out_of_reach(self) -> Iterator[None]:
        """The database is locked by another process."""
        program = Path(__file__).with_name("locker.py")
        with subprocess.Popen(
            [sys.executable, program, self.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as helper:
            assert helper.stdin is not None
            assert helper.stdout is not None
            try:
                assert helper.stdout.readline() == "locked\n"
                yield
            finally:
                helper.stdin.close()
                helper.wait(LOCKED_S)


# -- Redis -----------------------------------------------------------------------------------------------
_CHUNK: Final = 1_000
_SIZES: Final = {b"zset": "ZCARD", b"hash": "HLEN", b"set": "SCARD", b"list": "LLEN"}
_RECORDS: Final = frozenset({"jobs", "worker", "idempotency"})
_KINDS: Final = frozenset(template.partition(":")[0] for template in KEYS.values())
_ENDED: Final = {5: "COMPLETED", 7: "CANCELLED", 8: "EXPIRED"}
# At one instant: a worker that idles makes and drops keys too.
_ALL_KEYS: Final = """
local found, cursor = {}, '0'
repeat
  local answer = redis.call('SCAN', cursor, 'COUNT', 1000)
  cursor = answer[1]
  for _, name in ipairs(answer[2]) do
    found[#found + 1] = name
  end
until cursor == '0'
return {redis.call('DBSIZE'), found}
"""
# Of a fixed size, whatever has passed through.
_STAYS: Final = frozenset({"counters", "lock"})


class RedisDoor:
    """`url`: where the lab's processes find the server, if not at its own port (behind a proxy, say)."""

    storage: Final = "redis"
    refusal: Final = "no answer"

    def __init__(
        self, server: Server, database: int = 0, namespace: str = "fluxmesh", *, url: str | None = None
    ) -> None:
        self.server = server
        self.database = database
        self.namespace = namespace
        self.url = url or server.url(database)

    def beside(self, namespace: str) -> RedisDoor:
        return RedisDoor(self.server, self.database, namespace, url=self.url)

    def key(self, name: str, *parts: object) -> str:
        return key(f"{self.namespace}:", name, *parts)

    def ask(self, *command: Any) -> Any:
        with self.server.client(self.database) as client:
            return client.execute_command(*command)

    def ask_all(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Answers of many commands."""
        answers: list[Any] = []
        rest = iter(commands)
        with self.server.client(self.database) as client:
            while some := list(itertools.islice(rest, _CHUNK)):
                with client.pipeline(transaction=False) as pipe:
                    for command in some:
                        pipe.execute_command(*command)
                    answers += pipe.execute()
        return answers

    def keys(self, pattern: str = "*") -> list[str]:
        """By SCAN, each once."""
        with self.server.client(self.database) as client:
            return sorted({name.decode() for name in client.scan_iter(pattern, count=_CHUNK)})

    def records(self) -> dict[str, dict[str, str]]:
        """What says of each job where it is, from its hash."""
        names = self.keys(self.key("job", "*"))
        wanted = ("place", "queue", "tier", "lane", "worker_id", "task", "unique_key")
        rows = self.ask_all(("HMGET", name, *wanted) for name in names)
        return {
            name.rpartition(":")[2]: {
                field: value.decode() for field, value in zip(wanted, row, strict=True) if value is not None
            }
            for name, row in zip(names, rows, strict=True)
            if any(row)  # else it was deleted just now
        }

    def places(self) -> dict[Status, int]:
        return dict(Counter(STATUS[int(record["place"])] for record in self.records().values()))

    def rows(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        names = self.keys(f"{self.namespace}:*")
        types = self.ask_all(("TYPE", name) for name in names)
        sizes = {
            name: _SIZES[kind]
            for name, kind in zip(names, types, strict=True)
            if kind in _SIZES and name.split(":")[1] not in _RECORDS
        }
        counted = dict(zip(sizes, self.ask_all((size, name) for name, size in sizes.items()), strict=True))
        for name in names:
            found[name.split(":")[1]] += counted.get(name, 1)
        return dict(found)

    def disorder(self, namespaces: Iterable[str]) -> list[str]:
        size, found_names = self.ask("EVAL", _ALL_KEYS, 0)
        names = sorted({name.decode() for name in found_names})
        found = [] if size == len(names) else [f"SCAN finds {len(names)} keys, DBSIZE tells {size}"]
        known = tuple(f"{namespace}:" for namespace in namespaces)
        found += [f"a key of no namespace: {name}" for name in names if not name.startswith(known)]
        mine = [name for name in names if name.startswith(f"{self.namespace}:")]
        found += [f"a key of no kind: {name}" for name in mine if name.split(":")[1] not in _KINDS]
        return found + self._misplaced(mine)

    def _misplaced(self, names: list[str]) -> list[str]:
        """Sets that hold other jobs than those whose records say so."""
        records = self.records()
        told: defaultdict[str, set[str]] = defaultdict(set)
        for job_id, record in records.items():
            for name in self._sets_of(record):
                told[name].add(job_id)
        walked_kinds = {"delayed", "queue", "parked", "in_flight", "held", "ended", "dlq", "all", "by"}
        walked = [name for name in names if name.split(":")[1] in walked_kinds]
        members = self.ask_all(("ZRANGE", name, 0, -1) for name in walked)
        found = []
        for name, ids in zip(walked, members, strict=True):
            inside = {member.decode() for member in ids}
            if name.startswith(self.key("by_tag", "")):
                if strange := inside - set(records):
                    found.append(f"{name} names {len(strange)} jobs that there are not")
            elif inside != told.pop(name, set()):
                found.append(f"{name} holds other jobs than the records tell")
        found += [f"{name} is missing, the records tell of {len(ids)} jobs" for name, ids in told.items()]
        locks = [name for name in names if name.split(":")[1] == "unique"]
        for name, holder in zip(locks, self.ask_all(("GET", name) for name in locks), strict=True):
            record = records.get(holder.decode())
            if record is None or int(record["place"]) >= 5:
                found.append(f"{name} is held by a job that is over or gone")
        return found

    def _sets_of(self, record: dict[str, str]) -> list[str]:
        place, tier, queue = int(record["place"]), record["tier"], record["queue"]
        sets = [self.key("all"), self.key("by_queue", queue), self.key("by_task", record["task"])]
        if place == 0:
            sets.append(self.key("delayed", tier))
        elif place == 1:
            sets.append(self.key("ready", queue, tier))
        elif place == 2:
            sets.append(self.key("parked", record["lane"]))
        elif place in (3, RUNNING):
            sets.append(self.key("in_flight", record.get("worker_id", ""), record["lane"]))
            sets += [self.key("held")] if place == 3 else []
        else:
            sets.append(self.key("dlq") if place == 6 else self.key("ended", _ENDED[place]))
        return sets

    def left_over(self) -> list[str]:
        return [name for name in self.keys(f"{self.namespace}:*") if name.split(":")[1] not in _STAYS]

    def drop_worker(self, epoch: int) -> None:
        assert self.ask("DEL", self.key("worker", epoch)) == 1
        self.ask("HDEL", self.key("workers"), epoch)

    def drop_lease(self, epoch: int) -> None:
        """The lease is a stamp on its owner's record here too, and what remains of a claim is when the job
        was taken: a score in the owner's set, and a field. The stamp goes last: without it the jobs may be
        taken back at once."""
        owner = self.ask("HGET", self.key("workers"), epoch).decode()
        jobs = self.key("in_flight", owner, epoch)
        first = self.ask("ZRANGE", jobs, 0, 0)[0]
        self.ask("ZADD", jobs, 0, first)
        self.ask("HDEL", self.key("job", first.decode()), "started_us")
        self.ask("HSET", self.key("worker", epoch), "beat_at_us", 0)

    def overwrite_payload(self, job_id: str, payload: bytes) -> None:
        self.ask("HSET", self.key("job", job_id), "payload", payload)

    def make_due(self, job_ids: Iterable[str], in_s: float) -> None:
        seconds, micros = map(int, self.ask("TIME"))
        due_us = seconds * 1_000_000 + micros + round(in_s * 1e6)
        records = {job_id: self.key("job", job_id) for job_id in job_ids}
        tiers = self.ask_all(("HGET", name, "tier") for name in records.values())
        for (job_id, name), tier in zip(records.items(), tiers, strict=True):
            self.ask("ZADD", self.key("delayed", tier.decode()), due_us, job_id)
            self.ask("HSET", name, "due_us", due_us)

    @contextmanager
    def out_of_reach(self) -> Iterator[None]:
        """The server is frozen: it is connected to, and says nothing."""
        os.kill(self.server.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.server.process.pid, signal.SIGCONT)


Opener = Callable[[Path, str | None], BackDoor]
"""Makes an empty storage for a lab in that folder, of that namespace if one is named."""


def open_sqlite(folder: Path, namespace: str | None) -> BackDoor:
    return SqliteDoor(folder / "jobs.db", namespace or "fluxmesh")


class RedisOpener:
    """A database of its own for each lab; and as channels are the server's, not the database's, a namespace
    of its own as well."""

    def __init__(self, server: Server, databases: int = 16) -> None:
        self._server = server
        self._databases = databases
        self._next = itertools.count()

    def __call__(self, folder: Path, namespace: str | None) -> BackDoor:
        number = next(self._next)
        assert number < self._databases, "the server has no database left"
        return RedisDoor(self._server, number, namespace or f"lab-{number}")
