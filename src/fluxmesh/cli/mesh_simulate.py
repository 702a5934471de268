"""fluxmesh mesh simulate: a mesh in virtual time: its membership under faults or measured, its thefts."""

from __future__ import annotations

import argparse
import itertools

from fluxmesh.cli import output
from fluxmesh.cli.parser import Options, Parser, count, json_option
from fluxmesh.clock import system_clock
from fluxmesh.mesh.timing import S
from fluxmesh.testing.mesh_figures import Figures
from fluxmesh.testing.mesh_model import model
from fluxmesh.testing.simnet_measure import measure
from fluxmesh.testing.simnet_report import histogram, points_hit, summary, theft_summary
from fluxmesh.testing.simnet_run import Outcome, run_seed
from fluxmesh.testing.simnet_thefts import LONG_S, Stolen, run_thefts

SUMMARY = "the mesh in virtual time: seeds of faults against its promises, thefts, or its figures at a size"
EXAMPLES = (
    "fluxmesh mesh simulate --seeds 1-100",
    "fluxmesh mesh simulate --seeds 17 --trace",
    "fluxmesh mesh simulate --measure 100 --kills 30 --json",
    "fluxmesh mesh simulate --model 10000",
    "fluxmesh mesh simulate --steals 100000",
)
SEEDS_MAX = 100_000
CORES_MAX = 2_000
SAID_EVERY = 100
MODEL_MAX = 100_000
STEALS_MAX = 10_000_000
ALL_HIT_FROM = 100_000  # of so many steals each boundary has met a fault, or something is wrong with the plan


def configure(parser: Parser) -> None:
    """The options of the verb; `run` is what it does."""
    parser.add_argument(
        "--seeds",
        type=_seeds,
        metavar="A-B",
        help="seeds of faults to play (default 1-20, unless one measures)",
    )
    parser.add_argument(
        "--nodes", type=count(3, 16), metavar="N", help="nodes of every seed (default: its own)"
    )
    parser.add_argument("--trace", action="store_true", help="print the plan of every seed")
    parser.add_argument(
        "--measure",
        type=count(2, CORES_MAX),
        action="append",
        metavar="N",
        help="measure N real cores; repeatable",
    )
    parser.add_argument(
        "--model",
        type=count(3, MODEL_MAX),
        action="append",
        metavar="N",
        help="a Monte-Carlo model of the formulas at N nodes, no real core; repeatable",
    )
    parser.add_argument(
        "--kills", type=count(1, 500), default=30, metavar="K", help="deaths of a measurement (default 30)"
    )
    parser.add_argument(
        "--loss",
        type=count(0, 60),
        default=0,
        metavar="PERCENT",
        help="datagrams lost while measuring (default 0)",
    )
    parser.add_argument(
        "--steals",
        type=count(1, STEALS_MAX),
        metavar="N",
        help="play seeds of stealing, from 1 or A on, until N steals or B, instead of seeds of membership",
    )
    json_option(parser)


def run(options: Options) -> int:
    """Exit code 0 if every promise was kept and every figure is where it should be, else 1."""
    measured = _measured(options)
    outcomes: list[Outcome] = []
    stolen: list[Stolen] = []
    seconds = 0.0
    if options.steals is not None:
        stolen, seconds = _stolen(options)
    elif options.seeds is not None or not measured:
        outcomes = _played(options)
    played: list[Outcome | Stolen] = [*outcomes, *stolen]
    broken = [one for one in played if one.problem]
    off = [line for figures in measured for line in figures.off()]
    hits = points_hit(stolen)
    if stolen and options.steals >= ALL_HIT_FROM:
        off += [f"nothing ever went wrong here: {point}" for point, times in hits.items() if not times]
    if options.json:
        output.json_document(
            {
                "ok": not broken and not off,
                "seeds": summary(outcomes) if outcomes else None,
                "stealing": {**theft_summary(stolen), "seconds": seconds, "faults_by_boundary": dict(hits)}
                if stolen
                else None,
                "figures": [figures.document() for figures in measured],
                "off": off,
                "broken": [{"seed": one.seed, "rule": one.rule, "told": one.told} for one in broken],
            }
        )
    else:
        _print(measured, outcomes)
        _print_stolen(stolen, seconds)
    for line in off:
        output.note(f"off: {line}")
    return 1 if broken or off else 0


def _measured(options: Options) -> list[Figures]:
    loss = options.loss / 100
    found = []
    for n in options.measure or ():
        output.note(f"measuring {n} cores")
        found.append(measure(n, kills=options.kills, loss=loss))
    return found + [model(n, loss=loss) for n in options.model or ()]


def _played(options: Options) -> list[Outcome]:
    clock = system_clock()
    outcomes: list[Outcome] = []
    for seed in options.seeds or range(1, 21):
        if outcomes and len(outcomes) % SAID_EVERY == 0:
            output.note(f"{len(outcomes)} seeds, {sum(bool(one.problem) for one in outcomes)} failed")
        began = clock.mono_s()
        outcome = run_seed(seed, nodes=options.nodes)
        outcomes.append(outcome)
        if outcome.problem:
            output.note(outcome.told)
            output.note(f"again: fluxmesh mesh simulate --seeds {seed}")
        elif options.trace:
            kinds = ", ".join(outcome.kinds)
            output.note(
                f"seed {seed}: {outcome.nodes} nodes, {outcome.severity}: {kinds}; {outcome.steps} events,"
                f" {outcome.virtual_ns / S:.0f} s in {clock.mono_s() - began:.2f} s, hash {outcome.hash}"
            )
    return outcomes


def _stolen(options: Options) -> tuple[list[Stolen], float]:
    """Seeds of stealing, and the seconds that they took."""
    clock = system_clock()
    began = clock.mono_s()
    played: list[Stolen] = []
    steals = 0
    for seed in options.seeds or itertools.count(1):
        one = run_thefts(seed, work_s=LONG_S, workers=options.nodes)
        played.append(one)
        steals += one.thefts
        if one.problem:
            output.note(one.told)
            output.note(f"again: fluxmesh mesh simulate --steals 1 --seeds {seed}")
        elif options.trace:
            output.note(
                f"seed {seed}: {one.thefts} steals, {one.jobs} jobs, {one.steps} events, hash {one.hash}"
            )
        if len(played) % SAID_EVERY == 0:
            output.note(
                f"{len(played)} seeds, {steals} steals, {sum(bool(one.problem) for one in played)} failed"
            )
        if steals >= options.steals:
            break
    return played, round(clock.mono_s() - began, 1)


def _print_stolen(stolen: list[Stolen], seconds: float) -> None:
    if not stolen:
        return
    rows = [(point, f"{times:,}") for point, times in points_hit(stolen).items()]
    output.table(("BOUNDARY AND FAULT", "TIMES"), rows, right=("TIMES",))
    _print_totals({**theft_summary(stolen), "seconds": seconds})


def _print_totals(totals: dict[str, object]) -> None:
    for name, value in totals.items():
        if isinstance(value, dict):
            value = ", ".join(f"{what} ({number})" for what, number in value.items()) or "none"
        output.line(f"{name.replace('_', ' ')}: {value}")


def _print(measured: list[Figures], outcomes: list[Outcome]) -> None:
    if measured:
        rows = [figures.row() for figures in measured]
        columns = tuple(rows[0])
        output.table(columns, [tuple(row.values()) for row in rows], right=columns[:1] + columns[2:])
    if outcomes:
        output.table(("FAULT", "SEEDS", "FAILED"), histogram(outcomes), right=("SEEDS", "FAILED"))
        _print_totals(summary(outcomes))


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is neither a seed nor A-B") from None
    if not 0 <= low <= high < low + SEEDS_MAX:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: 0 <= A <= B, at most {SEEDS_MAX:,} seeds")
    return range(low, high + 1)
