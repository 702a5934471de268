"""fluxmesh scheduler: housekeeping in a process of its own."""

from __future__ import annotations

import asyncio

from fluxmesh.cli.parser import Options, Parser, examples, seconds
from fluxmesh.cli.run import end_by_signal, end_with
from fluxmesh.cli.session import opener, say_storage, settings_of
from fluxmesh.clock import system_clock


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fluxmesh scheduler", "fluxmesh scheduler --url sqlite:///tasks.db --interval 0.5"
    )
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--interval",
        type=seconds(0.01, 3_600),
        default=0.2,
        metavar="S",
        help="longest sleep while the next due time is unknown (0.2)",
    )


def _run(options: Options) -> int:
    from fluxmesh.obs.log import configure as configure_logs
    from fluxmesh.scheduler.runner import run_scheduler

    end_by_signal(daemon=True)
    settings = settings_of(options)
    say_storage(settings)
    configure_logs(settings.log_level, settings.log_format)
    code = asyncio.run(
        run_scheduler(
            open_storage=opener(settings),
            settings=settings,
            clock=system_clock(),
            interval_s=options.interval,
        )
    )
    end_with(code)
