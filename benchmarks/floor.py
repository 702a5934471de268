"""The floor: how fast bare storage calls are on this machine, with nothing of FluxMesh around them.

    python -m benchmarks.floor sqlite:PATH [--n 50000] [--batch 256]

A job needs these calls whatever runs it: it is written, taken by an owner, decoded, run, and its result is
written. Done with one table, one connection and one loop, they give the rates that every figure of
FluxMesh is set against. Prints one JSON object; deletes and makes anew the file that it is given.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

BULK: Final = 500  # jobs in one transaction of the bulk enqueue
SINGLES: Final = 4_000
TRIPS: Final = 2_000
OWNER: Final = "w"

# No column is "not null": an update of many rows that a constraint may stop opens a journal of its own each
# time, which costs more than taking a small batch does.
SCHEMA: Final = """
create table item (
  id text primary key, state integer, tier integer, arrival integer, body blob, token integer default 0,
  owner text, answer blob, made integer, begun integer, ended integer
) without rowid;
create index item_ready on item (tier, arrival) where state = 0
"""
WRITE: Final = "insert into item (id, state, tier, arrival, body, made) values (?, 0, 2, ?, ?, ?)"
TAKE: Final = (
    "update item set state = 1, owner = ?, token = token + 1, begun = ? where id in"
    " (select id from item where state = 0 order by tier, arrival limit ?) returning id, token, body"
)
FINISH: Final = (
    "update item set state = 2, owner = null, answer = ?, ended = ? where id = ? and owner = ? and token = ?"
)
LEFT: Final = "select count(*) from item where state <> 2 or answer is null"


class Envelope(msgspec.Struct, array_like=True):
    """What must be stored of a job, and no more."""

    id: str
    task: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tier: int = 2
    attempts: int = 0
    max_retries: int = 3
    timeout_s: float = 300.0


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Envelope).decode


async def nothing(value: Any) -> Any:
    return value


def fresh_id() -> str:
    """Milliseconds, then 80 random bits: sorted by creation as UUIDv7, in no order within a millisecond."""
    return (time.time_ns() // 1_000_000).to_bytes(6, "big").hex() + os.urandom(10).hex()


class Table:
    """One table of jobs in a fresh file; every method is one transaction."""

    def __init__(self, path: Path) -> None:
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        self.db = apsw.Connection(str(path))
        self.db.pragma("journal_mode", "wal")
        self.db.pragma("synchronous", "normal")
        self.db.execute(SCHEMA)
        self._arrivals = 0
        self._began = time.monotonic()

    def _now(self) -> int:
        """Seconds since the beginning: the smallest stamp that a row could do with."""
        return int(time.monotonic() - self._began)

    def write(self, numbers: Iterator[int] | range) -> int:
        rows = []
        for number in numbers:
            self._arrivals += 1
            job_id = fresh_id()
            body = _pack(Envelope(job_id, "nothing", (number,), {}))
            rows.append((job_id, self._arrivals, body, self._now()))
        self.db.execute("begin immediate")
        self.db.executemany(WRITE, rows)
        self.db.execute("commit")
        return len(rows)

    def take(self, batch: int) -> list[tuple[Any, ...]]:
        self.db.execute("begin immediate")
        rows = list(self.db.execute(TAKE, (OWNER, self._now(), batch)))
        self.db.execute("commit")
        return rows

    def finish(self, answers: list[tuple[str, int, bytes]]) -> None:
        at = self._now()
        self.db.execute("begin immediate")
        self.db.executemany(FINISH, [(answer, at, job_id, OWNER, token) for job_id, token, answer in answers])
        self.db.execute("commit")

    def left(self) -> int:
        return int(next(self.db.execute(LEFT))[0])


async def run(rows: list[tuple[Any, ...]]) -> list[tuple[str, int, bytes]]:
    """Decode and run each in a task of its own, as any worker has to."""
    jobs = [_unpack(body) for _, _, body in rows]
    tasks = [asyncio.ensure_future(nothing(*job.args, **job.kwargs)) for job in jobs]
    results = await asyncio.gather(*tasks)
    return [(job_id, token, _pack(result)) for (job_id, token, _), result in zip(rows, results, strict=True)]


def rate(count: int, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return count / (time.perf_counter() - began)


def bulk(table: Table, count: int) -> None:
    numbers = iter(range(count))
    while table.write(islice(numbers, BULK)):
        pass


def round_trip_us(table: Table) -> float:
    trips = []
    for _ in range(TRIPS):
        began = time.perf_counter()
        list(table.db.execute("select 1"))
        trips.append(time.perf_counter() - began)
    return statistics.median(trips) * 1e6


async def drain(table: Table, batch: int) -> float:
    done = 0
    began = time.perf_counter()
    while rows := table.take(batch):
        answers = await run(rows)
        table.finish(answers)
        done += len(answers)
    return done / (time.perf_counter() - began)


async def measure(path: Path, count: int, batch: int) -> dict[str, float]:
    table = Table(path)
    figures = {"bulk_enqueue": rate(count, lambda: bulk(table, count))}
    singles = [range(number, number + 1) for number in range(SINGLES)]
    figures["awaited_enqueue"] = rate(SINGLES, lambda: [table.write(single) for single in singles])
    figures["round_trip_us"] = round_trip_us(table)
    figures["drain"] = await drain(table, batch)
    left = table.left()
    table.db.close()
    if left:
        raise SystemExit(f"floor: {left:,} jobs have no result, so there are no figures")
    return figures


def checksum() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.floor", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("storage", help="sqlite:PATH")
    parser.add_argument("--n", type=int, default=50_000, help="jobs (50000)")
    parser.add_argument("--batch", type=int, default=256, help="jobs taken and finished at once (256)")
    options = parser.parse_args()
    scheme, _, path = options.storage.partition(":")
    if scheme != "sqlite" or not path:
        parser.error(f"{options.storage!r} is not sqlite:PATH")
    if options.n < 1 or options.batch < 1:
        parser.error("--n and --batch are at least 1")
    try:
        import uvloop

        loop = uvloop.__name__
        figures = uvloop.run(measure(Path(path), options.n, options.batch))
    except ImportError:
        loop = asyncio.__name__
        figures = asyncio.run(measure(Path(path), options.n, options.batch))
    told = {"storage": scheme, "n": options.n, "batch": options.batch, **figures, "loop": loop}
    json.dump({**told, "sha256": checksum()}, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
