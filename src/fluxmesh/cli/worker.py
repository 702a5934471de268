"""fluxmesh worker: worker processes under a supervisor, which runs no user code."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from fluxmesh.cli.app import URL_VARIABLE, describe_app
from fluxmesh.cli.mesh_options import (
    KEY,
    KEY_VARIABLE,
    MESH_SETTINGS,
    add_mesh_options,
    idle_settings,
    mesh_flags,
    mesh_overrides,
)
from fluxmesh.cli.parser import Options, Parser, count, examples
from fluxmesh.cli.run import end_by_signal, end_with, on_end_of_file
from fluxmesh.cli.serving import Serving, add_serving_options, as_flags, serving_of
from fluxmesh.cli.session import announce, opener, overrides, refuse_memory, say_storage, settings_of
from fluxmesh.clock import system_clock
from fluxmesh.config import Settings
from fluxmesh.queue import default_worker_id
from fluxmesh.submission import checked_name
from fluxmesh.worker.child_process import ChildSpec
from fluxmesh.worker.deaths import EXIT_HURRIED, EXIT_STOPPED
from fluxmesh.worker.meshing import CHILD_FLAG, mesh_of

PROCESSES_MOST: Final = 256
_CHILD: Final = (sys.executable, "-m", "fluxmesh.cli.child")


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fluxmesh worker",
        "fluxmesh worker --app app:queue --concurrency 16 --processes 2",
        "fluxmesh worker --queues critical,high --reserve critical=1",
        "fluxmesh worker --mesh --mesh-encryption-key @mesh.key --mesh-seeds 10.0.0.7,10.0.0.8",
    )
    parser.set_defaults(run=_run)
    add_serving_options(parser)
    add_mesh_options(parser)
    group = parser.add_argument_group("who runs it")
    group.add_argument("--id", metavar="NAME", help="worker id (host, process id and four digits)")
    group.add_argument(
        "--processes", type=count(1, PROCESSES_MOST), metavar="N", help="worker processes, named ID.0, ID.1 …"
    )
    group.add_argument(
        "--stop-at-eof",
        action="store_true",
        help="also stop when standard input ends, for use under a program",
    )


def _run(options: Options) -> int:
    from fluxmesh.obs.log import configure as configure_logs

    end_by_signal(daemon=True)
    settings = settings_of(options, "concurrency", "grace_s", "app", *MESH_SETTINGS)
    serving = serving_of(options, settings.concurrency)
    worker_id = default_worker_id() if options.id is None else checked_name("--id", options.id, queue=True)
    if settings.app is not None:
        settings = settings_of_app(options, settings)
    say_storage(settings)
    names = child_ids(worker_id, options.processes)
    check_mesh(settings, len(names))
    announce(
        settings,
        f"worker {worker_id}: {serving.sentence}; {len(names)} x {settings.concurrency} jobs at once",
        event="worker serves",
        worker=worker_id,
        queues=serving.queues,
        tiers=serving.tiers,
        processes=len(names),
        concurrency=settings.concurrency,
        tier_names_as_queues=serving.by_names,
    )
    configure_logs(settings.log_level, settings.log_format)
    warn_without_mesh(options, settings)
    flags = child_flags(options, settings, serving)
    children = [
        ChildSpec(name, (*child_argv(name, flags), CHILD_FLAG, str(number)), child_environ(options))
        for number, name in enumerate(names)
    ]
    return asyncio.run(_supervise(settings, children, stop_at_eof=options.stop_at_eof))


def settings_of_app(options: Options, settings: Settings) -> Settings:
    """Those of the app's Queue, which stand above flags; the flags of this command's own above them."""
    argv = child_argv(None, common_flags(options))
    settings_of_queue, url = describe_app(settings.app or "", argv, child_environ(options), options)
    refuse_memory(url)
    own = {
        name: value for name in ("concurrency", "grace_s") if (value := getattr(options, name)) is not None
    }
    own |= mesh_overrides(options)
    return msgspec.structs.replace(settings_of_queue, url=url, app=settings.app, **own)


def check_mesh(settings: Settings, processes: int) -> None:
    """Raises InvalidOption now for what would keep a child from starting."""
    for number in (0, processes - 1):
        mesh_of(None, settings, child=number)


def warn_without_mesh(options: Options, settings: Settings) -> None:
    """Logs are to be configured before."""
    from fluxmesh.obs.log import get_logger

    if names := idle_settings(options, settings):
        get_logger("mesh").warning("has no effect without --mesh", given=", ".join(names))


def child_ids(worker_id: str, processes: int | None) -> list[str]:
    return [worker_id] if processes is None else [f"{worker_id}.{number}" for number in range(processes)]


def common_flags(options: Options) -> list[str]:
    """The flags of every command, for a child; `child_environ` has --url."""
    flags: list[str] = []
    for name, value in overrides(options).items():
        if value is not None and name != "url":
            flags += [f"--{name.replace('_', '-')}", value]
    return flags


def child_environ(options: Options) -> dict[str, str] | None:
    """With the URL, whose password everybody could read off the list of processes, and the key of the mesh.
    None: ours will do."""
    hidden = {URL_VARIABLE: overrides(options)["url"], KEY_VARIABLE: getattr(options, KEY, None)}
    told = {name: value for name, value in hidden.items() if value is not None}
    return {**os.environ, **told} if told else None


def child_flags(options: Options, settings: Settings, serving: Serving) -> list[str]:
    flags = [*common_flags(options), *as_flags(serving)]
    flags += ["--concurrency", str(settings.concurrency), "--grace", repr(settings.grace_s)]
    if settings.app is not None:
        flags += ["--app", settings.app]
    flags += mesh_flags(options)
    if options.builtins is not None:
        flags.append("--builtins" if options.builtins else "--no-builtins")
    return flags


def child_argv(worker_id: str | None, flags: Sequence[str]) -> tuple[str, ...]:
    return (*_CHILD, *(("--id", worker_id) if worker_id else ()), *flags)


async def _supervise(settings: Settings, children: Sequence[ChildSpec], *, stop_at_eof: bool) -> int:
    """Open the storage, so that it exists and is sound, then keep the children running."""
    from fluxmesh.worker.supervisor import Supervisor

    open_storage = opener(settings)
    storage = await open_storage(False)
    await storage.close()
    supervisor = Supervisor(
        children=children, open_storage=open_storage, settings=settings, clock=system_clock()
    )
    if stop_at_eof:
        on_end_of_file(0, supervisor.stop)
    code = await supervisor.run()
    if code in (EXIT_STOPPED, EXIT_HURRIED):
        end_with(code)
    return code
