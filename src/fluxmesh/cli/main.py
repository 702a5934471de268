"""The entry point: which commands there are, and the one that was asked for."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final

from fluxmesh.cli.parser import Parser, add_verbs, common_options, examples, sentence
from fluxmesh.cli.run import end_by_signal, guarded

# noun -> what it does. The module of a noun has its name; it is imported only when the noun is asked for.
COMMANDS: Final[dict[str, str]] = {
    "server": "answer over HTTP, with a worker of its own",
    "dev": "server and worker in one command, started anew whenever the code changes",
    "worker": "run jobs until told to stop",
    "scheduler": "make due jobs ready and take back the jobs of dead workers, without running any",
    "submit": "submit one job",
    "jobs": "list, show, cancel, retry or wait for jobs",
    "dlq": "list, group, replay or discard dead letters",
    "queues": "list, pause or resume queues",
    "workers": "list the workers",
    "mesh": "list the members of the mesh, what they take from each other, ring and owners; make keys",
    "doctor": "check this machine and the storage, with a hint for what is wrong",
    "config": "show the settings in force",
    "completion": "print the script by which a shell completes our commands",
    "demo": "watch the life of real jobs, in a few seconds",
}


class _Version(argparse.Action):
    """Prints the version. The package's metadata is read only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"fluxmesh {version('fluxmesh')}")
        parser.exit()


def build_parser(argv: Sequence[str]) -> Parser:
    """The parser for these arguments: every noun is known, those that occur in `argv` in full."""
    parser = Parser(
        prog="fluxmesh",
        description="Background jobs for Python services: strict priority, at least once.",
        epilog=examples(
            "fluxmesh demo",
            "fluxmesh worker --app app:queue --concurrency 16",
            'fluxmesh submit --task batch_process --kwargs \'{"items": ["a", "b"]}\' --wait',
            "fluxmesh jobs list --q state:DEAD_LETTER",
        ),
        parents=[common_options()],
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    nouns = add_verbs(parser)
    asked = set(argv)
    for name, summary in COMMANDS.items():
        if name not in asked:
            nouns.add_parser(name, help=summary, add_help=False)
            continue
        noun = nouns.add_parser(name, help=summary, description=sentence(summary), parents=[common_options()])
        importlib.import_module(f"fluxmesh.cli.{name}").configure(noun)
    return parser


def _dispatch(argv: Sequence[str]) -> int:
    end_by_signal()
    options = build_parser(argv).parse_args(argv)
    return int(options.run(options))


def entry(argv: Sequence[str] | None = None) -> int:
    """Run one command; the answer is the process's exit code. A caller that gives `argv` has its handlers of
    signals back; a process of our own keeps them to its end, or one more signal would change its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        return guarded(lambda: _dispatch(arguments))
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        return guarded(lambda: _dispatch(arguments))
    finally:
        for number, handler in before:
            signal.signal(number, handler)
