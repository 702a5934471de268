"""A process that submits jobs as a program would, through the SDK. Prints one JSON object.

    python -m benchmarks.producer bulk    --count N
    python -m benchmarks.producer awaited --count N        one after the other, each awaited
    python -m benchmarks.producer delay   --count N        the same by the blocking call
    python -m benchmarks.producer open    --count N --rate R [--results] [--nap S] [--keys N]
    python -m benchmarks.producer burst   --count N --nap S
    python -m benchmarks.producer delayed --count N --from S --to S
    python -m benchmarks.producer tiers   --low N --critical N --nap S
    python -m benchmarks.producer hold    --count N --journal FILE

`open` is an open loop: job k is submitted at the k-th instant of a Poisson process of rate R (seeded, so
that each run has the same instants), whatever became of those before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from benchmarks.app import hold, nap, noop, queue
from benchmarks.shares import key_of
from fluxmesh.handle import JobHandle

RESULT_S: Final = 30.0
BACKLOG_S: Final = 0.05
Told = dict[str, Any]


def bulk(options: argparse.Namespace) -> Told:
    items = [(number,) for number in range(options.count)]
    queue.info()  # the storage is open before the clock starts
    began = time.perf_counter()
    handles = noop.map(items)
    return {"seconds": time.perf_counter() - began, "submitted": len(handles)}


def delay(options: argparse.Namespace) -> Told:
    queue.info()
    began = time.perf_counter()
    for number in range(options.count):
        noop.delay(number)
    return {"seconds": time.perf_counter() - began, "submitted": options.count}


async def awaited(options: argparse.Namespace) -> Told:
    await queue.aio.info()
    began = time.perf_counter()
    for number in range(options.count):
        await noop.enqueue(number)
    return {"seconds": time.perf_counter() - began, "submitted": options.count}


async def open_loop(options: argparse.Namespace) -> Told:
    await queue.aio.info()
    rng = random.Random(options.count)
    loop = asyncio.get_running_loop()
    late_ms: list[float] = []
    waiting: list[asyncio.Task[float]] = []
    due = loop.time()
    began = due
    for number in range(options.count):
        due += rng.expovariate(options.rate)
        await asyncio.sleep(max(0.0, due - loop.time()))
        late_ms.append((loop.time() - due) * 1e3)
        waiting.append(loop.create_task(_one(number, options)))
    result_ms = await asyncio.gather(*waiting)
    told = {"seconds": loop.time() - began, "submitted": options.count, "late_ms": max(late_ms)}
    return {**told, "result_ms": result_ms} if options.results else told


async def _one(number: int, options: argparse.Namespace) -> float:
    """Submit one job; the milliseconds until its result is here, if that is asked for."""
    began = time.perf_counter()
    job: JobHandle[int]
    if options.nap:
        job = await nap.enqueue(number, options.nap)
    elif options.keys:
        job = await noop.options(affinity_key=key_of(number, options.keys)).enqueue(number)
    else:
        job = await noop.enqueue(number)
    if options.results and await job.aio.result(timeout=RESULT_S) != number:
        raise SystemExit(f"job {job.id} has another result than {number}")
    return (time.perf_counter() - began) * 1e3


async def burst(options: argparse.Namespace) -> Told:
    await nap.enqueue_map([(number, options.nap) for number in range(options.count)])
    return {"submitted": options.count}


async def delayed(options: argparse.Namespace) -> Told:
    rng = random.Random(options.count)
    for number in range(options.count):
        await noop.options(delay=rng.uniform(options.least, options.most)).enqueue(number)
    return {"submitted": options.count}


async def tiers(options: argparse.Namespace) -> Told:
    low, critical = options.low, options.critical
    await nap.options(priority="low").enqueue_map([(number, options.nap) for number in range(low)])
    await asyncio.sleep(BACKLOG_S)  # let the worker start on them
    await nap.options(priority="critical").enqueue_map(
        [(number, options.nap) for number in range(low, low + critical)]
    )
    return {"submitted": low + critical}


async def holding(options: argparse.Namespace) -> Told:
    await hold.enqueue_map([(number, options.journal) for number in range(options.count)])
    return {"submitted": options.count}


MODES: Final[dict[str, Callable[[argparse.Namespace], Told | Coroutine[Any, Any, Told]]]] = {
    "bulk": bulk,
    "delay": delay,
    "awaited": awaited,
    "open": open_loop,
    "burst": burst,
    "delayed": delayed,
    "tiers": tiers,
    "hold": holding,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.producer")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--results", action="store_true")
    parser.add_argument("--nap", type=float, default=0.0)
    parser.add_argument("--from", dest="least", type=float, default=2.0)
    parser.add_argument("--to", dest="most", type=float, default=6.0)
    parser.add_argument("--low", type=int, default=0)
    parser.add_argument("--critical", type=int, default=0)
    parser.add_argument("--journal")
    parser.add_argument("--keys", type=int, default=0)
    options = parser.parse_args()
    answer = MODES[options.mode](options)
    told = asyncio.run(answer) if asyncio.iscoroutine(answer) else answer
    print(json.dumps(told))


if __name__ == "__main__":
    main()
