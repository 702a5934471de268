"""python -m tests.chaos: chaos runs, one line each; the mutants with --mutants. Exit code 1: a violation."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from tests.cases.workers import ROOT
from tests.chaos.mutants import MUTANTS
from tests.chaos.plan import STORAGES, Plan, make_mesh_plan, make_plan
from tests.chaos.run import Report, Run

SEEDS: Final = "1-4"
SECONDS: Final = 60.0
MORE_SEEDS: Final = 100
MUTANT_SECONDS: Final = 20.0
MUTANT_SEEDS: Final = 5
LINES: Final = ROOT / "build" / "chaos.jsonl"
_SHOWN: Final = 6


def seeds_of(text: str) -> list[int]:
    """1-4,9 as numbers."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def runs_of(text: str, steals: int) -> Iterable[int]:
    """The seeds; with a number of steals to be come to, as many more as it takes."""
    seeds = seeds_of(text)
    return [*seeds, *range(seeds[-1] + 1, seeds[-1] + 1 + MORE_SEEDS)] if steals else seeds


def carried_out(
    seed: int, storage: str, seconds: float, folder: Path, mutant: str = "", *, mesh: bool = False
) -> Report:
    """One run. Its folder stays if something was violated."""
    if mesh or (mutant and MUTANTS[mutant].mesh):
        return carried(make_mesh_plan(seed, storage, seconds), folder, mutant)
    favours = MUTANTS[mutant].favours if mutant else ()
    busy = bool(mutant) and MUTANTS[mutant].busy
    plan = make_plan(seed, storage, seconds, favours=favours, without=without_of(storage), busy=busy)
    return carried(plan, folder, mutant)


def carried(plan: Plan, folder: Path, mutant: str) -> Report:
    name = "-".join(filter(None, (plan.storage, str(plan.seed), "mesh" if plan.mesh else "", mutant)))
    place = folder / f"{name}-{int(time.time())}"
    report = Run(plan, place, mutant=mutant).carry_out()
    LINES.parent.mkdir(exist_ok=True)
    with LINES.open("ab") as lines:
        lines.write(msgspec.json.encode(report) + b"\n")
    if report.passed or mutant:
        shutil.rmtree(place, ignore_errors=True)
    return report


def without_of(storage: str) -> tuple[str, ...]:
    """Kinds of faults that are not to be had: a disk of one's own, to be filled, takes root."""
    return ("storage_full",) if storage == "sqlite" and os.geteuid() != 0 else ()


def tell(report: Report) -> None:
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(report.faults.items()))
    verdict = "0 violations" if report.passed else f"{len(report.violations)} VIOLATIONS, see {report.folder}"
    print(
        f"seed {report.seed} {report.storage} ({report.plan}): {report.jobs} jobs, {report.starts} starts,"
        f" {report.reruns} re-runs, {report.replayed} replayed,"
        f" {sum(report.faults.values())} faults ({faults}), {report.rolled_back} rolled back,"
        f" {report.excused_overlaps} excused overlaps, {report.took_s:g} s {report.phases}: {verdict}",
        flush=True,
    )
    if report.jobs_stolen:
        print(f"    {report.jobs_stolen} jobs stolen by the mesh, {report.jobs_taken_held} by take_held")
    if report.not_done:
        print(f"    did not come about: {report.not_done}")
    for violation in report.violations[:_SHOWN]:
        print(f"    {violation}")
    if len(report.violations) > _SHOWN:
        print(f"    and {len(report.violations) - _SHOWN} more")


def sum_up(reports: Iterable[Report]) -> None:
    for storage in STORAGES:
        of_it = [report for report in reports if report.storage == storage]
        if not of_it:
            continue
        faults: Counter[str] = Counter()
        for report in of_it:
            faults.update(report.faults)
        bad = [report.seed for report in of_it if not report.passed]
        print(
            f"{storage}: {len(of_it)} runs, {sum(report.jobs for report in of_it)} jobs,"
            f" {sum(report.starts for report in of_it)} starts,"
            f" {sum(report.reruns for report in of_it)} re-runs,"
            f" {faults.total()} faults {dict(sorted(faults.items()))}, violations in seeds {bad or 'none'}"
        )
        if stolen := sum(report.jobs_stolen for report in of_it):
            taken = sum(report.jobs_taken_held for report in of_it)
            print(f"    {stolen} jobs stolen by the mesh, {taken} by take_held")


def try_mutants(names: Iterable[str], storage: str | None, seconds: float, folder: Path) -> bool:
    """Run each until it is caught. True: all were."""
    rows, good = [], True
    for name in names:
        mutant = MUTANTS[name]
        where = storage or mutant.storage
        caught: Report | None = None
        for seed in range(1, MUTANT_SEEDS + 1):
            report = carried_out(seed, where, seconds, folder, name)
            if not report.passed:
                caught = report
                break
        good = good and caught is not None
        rules = (
            Counter(one.partition(" of job")[0].partition(":")[0] for one in caught.violations)
            if caught
            else {}
        )
        by = ", ".join(f"{rule} x{count}" for rule, count in Counter(rules).most_common(4))
        seed_text = f"seed {caught.seed}" if caught else f"NOT CAUGHT in {MUTANT_SEEDS} seeds"
        rows.append(f"{name:28} {where:9} {seed_text:12} {by}")
        print(rows[-1], flush=True)
    print("\nmutants\n" + "\n".join(rows))
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seeds", default=SEEDS, help="such as 1-20 or 3,7")
    parser.add_argument("--storage", default="", help="sqlite, redis, replicas; several with commas")
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--mesh", action="store_true", help="workers in a mesh that steal from each other")
    parser.add_argument(
        "--steals", type=int, default=0, help="further seeds in a mesh, until so many jobs were stolen"
    )
    parser.add_argument("--mutants", nargs="*", metavar="NAME", help="instead: all of them, or those named")
    parser.add_argument("--folder", type=Path, help="where runs leave their evidence")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a run under way ends what it has started
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fluxmesh-chaos-"))
    if options.mutants is not None:
        names = options.mutants or list(MUTANTS)
        seconds = options.seconds or MUTANT_SECONDS
        return 0 if try_mutants(names, options.storage or None, seconds, folder) else 1
    reports = []
    for storage in options.storage.split(",") if options.storage else ("sqlite", "redis"):
        seconds, stolen = options.seconds or SECONDS, 0
        for seed in runs_of(options.seeds, options.steals):
            reports.append(
                carried_out(seed, storage, seconds, folder, mesh=options.mesh or options.steals > 0)
            )
            tell(reports[-1])
            stolen += reports[-1].jobs_stolen
            if 0 < options.steals <= stolen:
                break
    sum_up(reports)
    return 0 if all(report.passed for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
