"""Measure FluxMesh on this machine: one JSON line a figure, on stdout and in a file.

    python -m benchmarks.run_benchmark
    python -m benchmarks.run_benchmark --only floor,drain --repeat 5
    python -m benchmarks.run_benchmark --quick --storage sqlite,redis

README.md tells how to read the lines. Exit code 0 if every measurement gave its figures, 1 if one was
refused because jobs were lost or results wrong, 2 for a mistake on the command line or a storage that is
not to be had. A bound that is not met is told and does not change the exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks import floor
from benchmarks.bench import Bench
from benchmarks.bounds import BOUNDS
from benchmarks.figures import ROOT, CheckFailed, Run, line, machine, refused_line, revision, summary
from benchmarks.grounds import Grounds, Unfit, grounds_of
from benchmarks.measures import FULL_ONLY, MEASURES
from fluxmesh.config import ENV_PREFIX
from fluxmesh.errors import FluxMeshError

REFEREE_ENV: Final = "FLUXMESH_TEST_REFEREE"
RESULTS: Final = ROOT / "benchmarks" / "results"
MANY: Final = 50_000
FEW: Final = 5_000
CONCURRENCIES: Final = (8, 64, 256)
T = TypeVar("T")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_benchmark", description=description)
    parser.add_argument(
        "--storage",
        metavar="NAME,…",
        help="what is measured: sqlite, redis or both (sqlite; redis with --url)",
    )
    parser.add_argument(
        "--url", metavar="redis://…", help="an empty database of a server, instead of servers of our own"
    )
    parser.add_argument("--n", type=_count, metavar="N", help=f"jobs of the throughput figures ({MANY})")
    parser.add_argument(
        "--concurrency",
        type=_counts,
        default=CONCURRENCIES,
        metavar="N,…",
        help=f"slots of the drain, and batches of the floor ({','.join(map(str, CONCURRENCIES))})",
    )
    parser.add_argument("--repeat", type=_count, metavar="N", help="repetitions of each (3)")
    parser.add_argument("--only", metavar="NAME,…", help="only these: " + ", ".join(MEASURES))
    parser.add_argument("--quick", action="store_true", help=f"{FEW} jobs, once: to see that it works")
    parser.add_argument(
        "--full", action="store_true", help="also what takes many minutes: affinity, depth, endurance"
    )
    parser.add_argument(
        "--referee", type=Path, metavar="FILE", help=f"the referee of the floor ({REFEREE_ENV})"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where lines go too (benchmarks/results/…)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where databases are put (temporary)")
    options = parser.parse_args(argv)
    options.chosen = _chosen(parser, options)
    options.storages = _storages(parser, options)
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder: {options.folder} is not a folder")
    if options.referee is not None and not options.referee.is_file():
        parser.error(f"--referee: there is no file {options.referee}")
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 1,000,000")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_count(part) for part in text.split(",")))


def _storages(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    if options.url is not None and not options.url.startswith(("redis://", "rediss://")):
        parser.error("--url: redis://HOST:PORT/DATABASE or rediss://…")
    named = options.storage or ("sqlite" if options.url is None else "redis")
    names = [name.strip() for name in named.split(",") if name.strip()]
    unknown = [name for name in names if name not in BOUNDS]
    if unknown or not names:
        parser.error(f"--storage: unknown {', '.join(unknown) or 'nothing'}; known: {', '.join(BOUNDS)}")
    if options.url is not None and "redis" not in names:
        parser.error("--url: a Redis server, and --storage names no redis")
    return [name for name in BOUNDS if name in names]


def _chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    if options.only is None:
        return [name for name in MEASURES if options.full or name not in FULL_ONLY]
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = [name for name in names if name not in MEASURES]
    if unknown or not names:
        parser.error(f"--only: unknown {', '.join(unknown) or 'nothing'}; known: {', '.join(MEASURES)}")
    return [name for name in MEASURES if name in names]


class Lines:
    """Where lines go: stdout and the file, each as soon as it is known."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self.refused = 0

    def write(self, told: dict[str, Any]) -> None:
        text = json.dumps(told, ensure_ascii=False)
        print(text, flush=True)
        self._file.write(text + "\n")
        self._file.flush()
        self.refused += "refused" in told
        say(summary(told))

    def close(self) -> None:
        self._file.close()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def measure(bench: Bench, run: Run, names: Sequence[str], lines: Lines) -> None:
    for name in names:
        load = os.getloadavg()[0]
        try:
            # All figures of a measurement, or none: a later check may spoil the earlier ones.
            figures = [figure async for figure in MEASURES[name](bench)]
        except (CheckFailed, FluxMeshError) as error:
            lines.write(refused_line(name, str(error), run, load=load))
            continue
        for figure in figures:
            lines.write(line(figure, run, load=load, standing=bench.standing))
        if name == "floor":
            say(f"the floor beside its referee: {bench.standing}")


def referee_of(options: argparse.Namespace) -> tuple[Path | None, str | None]:
    """Its path; or why there is none, which the lines tell."""
    if options.referee is not None:
        return options.referee.resolve(), None
    named = os.environ.get(REFEREE_ENV)
    if not named:
        return None, f"not compared: neither --referee nor {REFEREE_ENV} names it"
    if not Path(named).is_file():
        return None, f"not compared: {REFEREE_ENV} names no file"
    return Path(named).resolve(), None


def ran(work: Coroutine[Any, Any, T]) -> T:
    """Its answer. SIGTERM cancels it, as Ctrl-C does: what it has started is stopped."""

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    return asyncio.run(guarded())


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    ignored = [name for name in os.environ if name.startswith(ENV_PREFIX) and name != REFEREE_ENV]
    if ignored:
        say(f"defaults are what is measured; left aside: {', '.join(sorted(ignored))}")
    grounds = [grounds_of(name, options.url) for name in options.storages]
    try:
        facts = [ran(ground.check()) for ground in grounds]
        return measured(options, list(zip(grounds, facts, strict=True)))
    except Unfit as error:
        say(f"run_benchmark: {error}")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


def measured(options: argparse.Namespace, storages: Sequence[tuple[Grounds, dict[str, Any]]]) -> int:
    """The exit code. Each storage with what is told of it."""
    began = datetime.now(UTC)
    lines = Lines(options.out or RESULTS / f"{began:%Y-%m-%dT%H%M%SZ}.jsonl")
    folder = Path(tempfile.mkdtemp(prefix="fluxmesh-bench-", dir=options.folder))
    try:
        for grounds, facts in storages:
            bench = bench_of(options, grounds, folder)
            run = Run(
                storage=grounds.storage,
                started_at=began.isoformat(timespec="seconds"),
                revision=revision(),
                machine=machine(folder, facts),
                configuration=bench.configuration,
                floor_sha256=floor.checksum(),
            )
            ran(measure(bench, run, options.chosen, lines))
    finally:
        lines.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if lines.refused else 0


def bench_of(options: argparse.Namespace, grounds: Grounds, folder: Path) -> Bench:
    referee, note = referee_of(options)
    return Bench(
        grounds=grounds,
        folder=folder,
        n=options.n or (FEW if options.quick else MANY),
        repeat=options.repeat or (1 if options.quick else 3),
        quick=options.quick,
        full=options.full,
        concurrencies=options.concurrency,
        referee=referee,
        referee_note=note,
    )


if __name__ == "__main__":
    sys.exit(main())
