"""The floor: how fast bare storage calls are on this machine, with nothing of FluxMesh around them.

    python -m benchmarks.floor sqlite:PATH            [--n 50000] [--batch 256]
    python -m benchmarks.floor redis://HOST:PORT/0    [--n 50000] [--batch 256]

A job needs these calls whatever runs it: it is written, taken by an owner, decoded, run, and its result is
written. Done with one table and one loop, they give the rates that every figure of FluxMesh is set
against. Prints one JSON object. A file is deleted and made anew; a Redis database has to be empty, and is
emptied at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

BULK: Final = 500  # jobs in one call of the bulk enqueue
SINGLES: Final = 4_000
TRIPS: Final = 2_000
KEPT_S: Final = 86_400  # a result is kept for so long
OWNER: Final = "w"

Written = tuple[str, bytes]  # id, body
Taken = tuple[str, int, bytes]  # id, token, body
Answer = tuple[str, int, bytes]  # id, token, result


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


def written(number: int) -> Written:
    job_id = fresh_id()
    return job_id, _pack(Envelope(job_id, "nothing", (number,), {}))


async def run(rows: Sequence[Taken]) -> list[Answer]:
    """Decode and run each in a task of its own, as any worker has to."""
    jobs = [_unpack(body) for _, _, body in rows]
    tasks = [asyncio.ensure_future(nothing(*job.args, **job.kwargs)) for job in jobs]
    results = await asyncio.gather(*tasks)
    return [(job_id, token, _pack(result)) for (job_id, token, _), result in zip(rows, results, strict=True)]


class Table(Protocol):
    """Jobs in a fresh storage. Every method but the last two is one call of it."""

    async def write(self, jobs: Sequence[Written]) -> None: ...
    async def take(self, batch: int) -> Sequence[Taken]: ...
    async def finish(self, answers: Sequence[Answer]) -> None: ...
    async def trip(self) -> object: ...
    async def drain(self, batch: int) -> int:
        """Take, run and finish all there is, in batches, as fast as this storage allows; how many."""

    async def close(self) -> int:
        """How many of all jobs have no result."""


# -- SQLite --------------------------------------------------------------------------------------------

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


class Rows:
    """One table in a fresh file, one connection."""

    def __init__(self, path: Path) -> None:
        import apsw

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

    async def write(self, jobs: Sequence[Written]) -> None:
        rows, at = [], self._now()
        for job_id, body in jobs:
            self._arrivals += 1
            rows.append((job_id, self._arrivals, body, at))
        self.db.execute("begin immediate")
        self.db.executemany(WRITE, rows)
        self.db.execute("commit")

    async def take(self, batch: int) -> Sequence[Taken]:
        self.db.execute("begin immediate")
        rows = list(self.db.execute(TAKE, (OWNER, self._now(), batch)))
        self.db.execute("commit")
        return rows

    async def finish(self, answers: Sequence[Answer]) -> None:
        at = self._now()
        self.db.execute("begin immediate")
        self.db.executemany(FINISH, [(answer, at, job_id, OWNER, token) for job_id, token, answer in answers])
        self.db.execute("commit")

    async def trip(self) -> object:
        return list(self.db.execute("select 1"))

    async def drain(self, batch: int) -> int:
        """In turn: calls block the loop, and there is one writer."""
        done = 0
        while rows := await self.take(batch):
            answers = await run(rows)
            await self.finish(answers)
            done += len(answers)
        return done

    async def close(self) -> int:
        left = int(next(self.db.execute(LEFT))[0])
        self.db.close()
        return left


# -- Redis ---------------------------------------------------------------------------------------------

# KEYS: ready, arrivals, the prefix of jobs. ARGV: id and body of each.
WRITE_SCRIPT: Final = """
local at, entries = redis.call('TIME')[1], {}
local arrival = redis.call('INCRBY', KEYS[2], #ARGV / 2) - #ARGV / 2
for i = 1, #ARGV, 2 do
  redis.call('HSET', KEYS[3] .. ARGV[i], 'state', 0, 'body', ARGV[i + 1], 'token', 0, 'made', at)
  entries[i], entries[i + 1] = arrival + (i + 1) / 2, ARGV[i]
end
redis.call('ZADD', KEYS[1], unpack(entries))
"""
# KEYS: ready, owned, the prefix of jobs. ARGV: owner, how many. Answers id, token and body of each.
TAKE_SCRIPT: Final = """
local at, rows, owned = redis.call('TIME')[1], {}, {}
local found = redis.call('ZPOPMIN', KEYS[1], ARGV[2])
for i = 1, #found, 2 do
  local id, job = found[i], KEYS[3] .. found[i]
  local fields = redis.call('HMGET', job, 'state', 'token', 'body')
  if fields[1] == '0' then
    local token, n = fields[2] + 1, #owned
    redis.call('HSET', job, 'state', 1, 'owner', ARGV[1], 'token', token, 'begun', at)
    owned[n + 1] = id
    rows[3 * n + 1], rows[3 * n + 2], rows[3 * n + 3] = id, token, fields[3]
  end
end
if #owned > 0 then
  redis.call('SADD', KEYS[2], unpack(owned))
end
return rows
"""
# KEYS: owned, the prefix of jobs. ARGV: owner, seconds to keep, then id, token and answer of each.
FINISH_SCRIPT: Final = """
local at, over = redis.call('TIME')[1], {}
for i = 3, #ARGV, 3 do
  local job = KEYS[2] .. ARGV[i]
  local held = redis.call('HMGET', job, 'owner', 'token')
  if held[1] == ARGV[1] and held[2] == ARGV[i + 1] then
    redis.call('HSET', job, 'state', 2, 'answer', ARGV[i + 2], 'ended', at)
    redis.call('EXPIRE', job, ARGV[2])
    over[#over + 1] = ARGV[i]
  end
end
if #over > 0 then
  redis.call('SREM', KEYS[1], unpack(over))
end
"""
READY: Final = "floor:ready"
ARRIVALS: Final = "floor:arrivals"
OWNED: Final = "floor:owned"
JOB: Final = "floor:job:"
LOOK: Final = 1_000


class Hashes:
    """A hash a job, a sorted set of those that wait; the driver's own client and its connections."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._ids: list[str] = []
        self._hashes: dict[str, str] = {}

    @classmethod
    async def connect(cls, url: str) -> Hashes:
        import redis.asyncio

        table = cls(redis.asyncio.Redis.from_url(url))
        if await table._client.dbsize():
            raise SystemExit("floor: this database holds keys; give an empty one")
        for text in (WRITE_SCRIPT, TAKE_SCRIPT, FINISH_SCRIPT):
            table._hashes[text] = await table._client.script_load(text)
        return table

    async def _run(self, text: str, keys: Sequence[str], *arguments: Any) -> Any:
        return await self._client.evalsha(self._hashes[text], len(keys), *keys, *arguments)

    async def write(self, jobs: Sequence[Written]) -> None:
        await self._run(WRITE_SCRIPT, (READY, ARRIVALS, JOB), *(part for job in jobs for part in job))
        self._ids += [job_id for job_id, _ in jobs]

    async def take(self, batch: int) -> Sequence[Taken]:
        flat = await self._run(TAKE_SCRIPT, (READY, OWNED, JOB), OWNER, batch)
        return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))

    async def finish(self, answers: Sequence[Answer]) -> None:
        flat = (part for answer in answers for part in answer)
        await self._run(FINISH_SCRIPT, (OWNED, JOB), OWNER, KEPT_S, *flat)

    async def trip(self) -> object:
        return await self._client.ping()

    async def drain(self, batch: int) -> int:
        """The server works while the loop does: it gives the next batch and stores the last one's results."""
        done = 0
        finishing: asyncio.Future[None] | None = None
        taking = asyncio.ensure_future(self.take(batch))
        while rows := await taking:
            taking = asyncio.ensure_future(self.take(batch))
            answers = await run(rows)
            if finishing is not None:
                await finishing
            finishing = asyncio.ensure_future(self.finish(answers))
            done += len(answers)
        if finishing is not None:
            await finishing
        return done

    async def close(self) -> int:
        left = 0
        for first in range(0, len(self._ids), LOOK):
            look = self._client.pipeline(transaction=False)
            for job_id in self._ids[first : first + LOOK]:
                look.hmget(JOB + job_id, "state", "answer")
            left += sum(state != b"2" or answer is None for state, answer in await look.execute())
        await self._client.flushdb()
        await self._client.aclose()
        return left


# -- measuring -----------------------------------------------------------------------------------------


async def rate(count: int, work: Awaitable[object]) -> float:
    began = time.perf_counter()
    await work
    return count / (time.perf_counter() - began)


async def bulk(table: Table, count: int) -> None:
    for first in range(0, count, BULK):
        await table.write([written(number) for number in range(first, min(first + BULK, count))])


async def singles(table: Table, count: int) -> None:
    for number in range(count):
        await table.write([written(number)])


async def round_trip_us(table: Table, count: int) -> float:
    trips = []
    for _ in range(count):
        began = time.perf_counter()
        await table.trip()
        trips.append(time.perf_counter() - began)
    return statistics.median(trips) * 1e6


async def measure(opened: Callable[[], Awaitable[Table]], count: int, batch: int) -> dict[str, float]:
    table = await opened()
    few = min(SINGLES, count)
    figures = {
        "bulk_enqueue": await rate(count, bulk(table, count)),
        "awaited_enqueue": await rate(few, singles(table, few)),
        "round_trip_us": await round_trip_us(table, min(TRIPS, count)),
    }
    began = time.perf_counter()
    done = await table.drain(batch)
    figures["drain"] = done / (time.perf_counter() - began)
    if left := await table.close():
        raise SystemExit(f"floor: {left:,} jobs have no result, so there are no figures")
    return figures


def checksum() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.floor", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("storage", help="sqlite:PATH or redis://HOST:PORT/DATABASE")
    parser.add_argument("--n", type=int, default=50_000, help="jobs (50000)")
    parser.add_argument("--batch", type=int, default=256, help="jobs taken and finished at once (256)")
    options = parser.parse_args()
    if options.n < 1 or options.batch < 1:
        parser.error("--n and --batch are at least 1")
    opened = opener(options.storage)
    if opened is None:
        parser.error(f"{options.storage!r} is neither sqlite:PATH nor redis://HOST:PORT/DATABASE")
    run_loop: Callable[..., Any] = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop

        run_loop = uvloop.run
    figures = run_loop(measure(opened, options.n, options.batch))
    told = {"storage": urlsplit(options.storage).scheme, "n": options.n, "batch": options.batch, **figures}
    json.dump({**told, "loop": run_loop.__module__, "sha256": checksum()}, sys.stdout)
    sys.stdout.write("\n")


def opener(storage: str) -> Callable[[], Awaitable[Table]] | None:
    """What opens the storage of this name; None if it is no name of one."""
    scheme, _, rest = storage.partition(":")
    if scheme in ("redis", "rediss") and rest.startswith("//"):
        return lambda: Hashes.connect(storage)
    if scheme != "sqlite" or not rest:
        return None

    async def rows() -> Table:
        return Rows(Path(rest))

    return rows


if __name__ == "__main__":
    main()
