"""fluxmesh mesh simulate: the membership of a mesh in virtual time, under faults or measured."""

from __future__ import annotations

import argparse

from fluxmesh.cli import output
from fluxmesh.cli.parser import Options, Parser, count, json_option
from fluxmesh.clock import system_clock
from fluxmesh.mesh.timing import S
from fluxmesh.testing.mesh_figures import Figures
from fluxmesh.testing.mesh_model import model
from fluxmesh.testing.simnet_measure import measure
from fluxmesh.testing.simnet_report import histogram, summary
from fluxmesh.testing.simnet_run import Outcome, run_seed

SUMMARY = "the mesh in virtual time: seeds of faults against its promises, or its figures at a size"
EXAMPLES = (
    "fluxmesh mesh simulate --seeds 1-100",
    "fluxmesh mesh simulate --seeds 17 --trace",
    "fluxmesh mesh simulate --measure 100 --kills 30 --json",
    "fluxmesh mesh simulate --model 10000",
)
SEEDS_MAX = 100_000
CORES_MAX = 2_000
SAID_EVERY = 100
MODEL_MAX = 100_000


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
    json_option(parser)


def run(options: Options) -> int:
    """Exit code 0 if every promise was kept and every figure is where it should be, else 1."""
    measured = _measured(options)
    outcomes: list[Outcome] = []
    if options.seeds is not None or not measured:
        outcomes = _played(options)
    broken = [outcome for outcome in outcomes if outcome.problem]
    off = [line for figures in measured for line in figures.off()]
    if options.json:
        output.json_document(
            {
                "ok": not broken and not off,
                "seeds": summary(outcomes) if outcomes else None,
                "figures": [figures.document() for figures in measured],
                "off": off,
                "broken": [{"seed": one.seed, "rule": one.rule, "told": one.told} for one in broken],
            }
        )
    else:
        _print(measured, outcomes)
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


def _print(measured: list[Figures], outcomes: list[Outcome]) -> None:
    if measured:
        rows = [figures.row() for figures in measured]
        columns = tuple(rows[0])
        output.table(columns, [tuple(row.values()) for row in rows], right=columns[:1] + columns[2:])
    if outcomes:
        output.table(("FAULT", "SEEDS", "FAILED"), histogram(outcomes), right=("SEEDS", "FAILED"))
        for name, value in summary(outcomes).items():
            if isinstance(value, dict):
                value = ", ".join(f"{what} ({number})" for what, number in value.items()) or "none"
            output.line(f"{name.replace('_', ' ')}: {value}")


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is neither a seed nor A-B") from None
    if not 0 <= low <= high < low + SEEDS_MAX:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: 0 <= A <= B, at most {SEEDS_MAX:,} seeds")
    return range(low, high + 1)
