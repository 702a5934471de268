"""fluxmesh demo mesh: five regions on this machine, as far from each other as on the map."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Final

from fluxmesh.cli import output
from fluxmesh.cli.parser import Options, Parser, json_option, seconds
from fluxmesh.cli.run import run_async
from fluxmesh.config import Settings
from fluxmesh.errors import InvalidOption
from fluxmesh.storage.registry import resolved_url

SUMMARY: Final = "watch five regions of one mesh share their work, with kill -9 at the press of a key"
EXAMPLES: Final = ("fluxmesh demo mesh", "fluxmesh demo mesh --seconds 6 --json")
SECONDS: Final = 8.0  # of submissions; what is left is run to its end then
SECONDS_WATCHED: Final = 45.0  # on a terminal
SECONDS_MOST: Final = 600.0
NOT_OURS: Final = ("--url", "--namespace")


def configure(parser: Parser) -> None:
    parser.description = (
        "Five worker processes, named as regions, form a mesh of their own on this machine, with the delays"
        " of such distances between them. Most jobs belong to two of them. On a terminal: b is a burst,"
        " k kills a region (-9, it comes back), r brings it back at once, q ends it. Else one region is"
        " killed half-way. Exit code 1 if a job was lost or done twice."
    )
    parser.add_argument(
        "--seconds",
        type=seconds(1, SECONDS_MOST),
        metavar="S",
        help=f"how long jobs are submitted ({SECONDS:g}; on a terminal {SECONDS_WATCHED:g}, more by a key)",
    )
    parser.add_argument(
        "--steal",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take work from each other (yes); --no-steal for a comparison",
    )
    json_option(parser)
    for name in NOT_OURS:  # options of every command: not offered here, and refused with a reason
        parser.get_option(name).help = argparse.SUPPRESS


def run(options: Options) -> int:
    from fluxmesh.cli.demo_mesh import keyboard
    from fluxmesh.cli.demo_mesh.play import Plan, play
    from fluxmesh.cli.demo_mesh.screen import tell

    refuse_other_demo(options)
    watched = keyboard.is_there() and not options.json
    lasts_s = options.seconds or (SECONDS_WATCHED if watched else SECONDS)
    folder = Path(tempfile.mkdtemp(prefix="fluxmesh-demo-mesh-"))
    ended: list[bool] = []

    async def main() -> int:
        # Settings of the user's are for queues of the user's: this is the same everywhere.
        settings = Settings(url=resolved_url(None, folder / "demo.db"))
        plan = Plan(
            folder=folder,
            settings=settings,
            seconds=lasts_s,
            kills_at_s=None if watched else lasts_s / 2,
            interactive=watched,
            quiet=options.json,
            steal=options.steal,
        )
        summary = await play(plan)
        if options.json:
            output.json_document(summary)
        else:
            tell(summary)
        ended.append(summary.well)
        return 0 if summary.well else 1

    try:
        return run_async(main())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refuse_other_demo(options: Options) -> None:
    """What belongs to `fluxmesh demo` alone. This one makes a storage of its own and keeps nothing."""
    given = {
        "--url": getattr(options, "url", None),
        "--namespace": getattr(options, "namespace", None),
        "--db": options.db,
        "--dir": options.dir,
    }
    for name, value in given.items():
        if value is not None:
            raise InvalidOption(
                name,
                "has no meaning here: the demo of the mesh makes a storage of its own",
                hint="leave it out; `fluxmesh demo` takes it",
            )
