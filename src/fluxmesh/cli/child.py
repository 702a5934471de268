"""python -m fluxmesh.cli.child: one worker process, started by the supervisor of `fluxmesh worker`.

Its standard input is a pipe whose end of file means that the supervisor is gone. What it has to tell
goes as JSON lines to the descriptor of --report-fd, its signs of life into the file of --ledger-fd. Exit
codes: 0 stopped, 1 after a second signal, 75 a body could not be stopped, 76 its id was taken over or it
was declared dead; 2, 3, 4 as for every command."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import msgspec

from fluxmesh.bodies import source_of_app
from fluxmesh.cli.app import AppReport
from fluxmesh.cli.mesh_options import MESH_SETTINGS, add_mesh_options, mesh_overrides
from fluxmesh.cli.parser import Options, Parser, common_options
from fluxmesh.cli.run import end_by_signal, guarded, on_end_of_file
from fluxmesh.cli.serving import Serving, add_serving_options, serving_of
from fluxmesh.cli.session import opener, overrides, refuse_memory, settings_of
from fluxmesh.clock import system_clock
from fluxmesh.config import ENV_PREFIX, Settings
from fluxmesh.errors import StorageDamaged
from fluxmesh.task import TaskRegistry
from fluxmesh.worker.child_process import REPORT_FLAG
from fluxmesh.worker.deaths import EXIT_FENCED, EXIT_HURRIED, EXIT_RETIRED, EXIT_STOPPED
from fluxmesh.worker.isolated.source import BodySource
from fluxmesh.worker.ledger import LEDGER_FLAG
from fluxmesh.worker.meshing import CHILD_FLAG, mesh_of

_NO_FD: Final = -1
# A worker makes many small objects and few cycles: CPython's 700 allocations a look cost it a tenth of its
# speed.
GC_THRESHOLDS: Final = (20_000, 20, 20)


class Reports:
    """Lines to the supervisor. One that is gone is noticed by the end of standard input, not here."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        if fd != _NO_FD:
            os.set_inheritable(fd, False)

    def tell(self, report: Any) -> None:
        if self._fd != _NO_FD:
            try:
                os.write(self._fd, msgspec.json.encode(report) + b"\n")
            except OSError:
                pass


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m fluxmesh.cli.child", parents=[common_options()])
    add_serving_options(parser)
    parser.add_argument("--id", default="worker")
    parser.add_argument(REPORT_FLAG, type=int, default=_NO_FD)
    parser.add_argument(LEDGER_FLAG, type=int, default=_NO_FD)
    parser.add_argument(CHILD_FLAG, type=int, default=0)
    add_mesh_options(parser)
    parser.add_argument("--log-file", help="where standard error goes")
    parser.add_argument("--describe", action="store_true", help="only tell what the app's Queue says")
    return guarded(lambda: _run(parser.parse_args(argv)))


def _run(options: Options) -> int:
    from fluxmesh.obs.log import configure as configure_logs

    end_by_signal(daemon=True)
    if options.log_file is not None:
        _redirect(2, os.open(options.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    reports = Reports(options.report_fd)
    # A Queue() of the app reads the environment, and shall see this command's flags.
    for name, value in overrides(options).items():
        if value is not None:
            os.environ[ENV_PREFIX + name.upper()] = value
    settings = settings_of(options, "concurrency", "grace_s", "app", *MESH_SETTINGS)
    configure_logs(settings.log_level, settings.log_format)
    with_builtins = options.builtins if settings.app is not None else options.builtins is not False
    source = source_of_app(settings.app, builtins=bool(with_builtins))
    registry, settings = load(settings, options)
    if options.describe:
        fields = msgspec.to_builtins(settings)
        reports.tell(AppReport(url=settings.url or "", settings=fields))
        return EXIT_STOPPED
    serving = serving_of(options, settings.concurrency)
    stdin = _take_stdin()
    settle_memory()
    if options.ledger_fd != _NO_FD:
        os.set_inheritable(options.ledger_fd, False)
    code = run_fast(_serve(registry, settings, serving, source, options, reports, stdin))
    if code != EXIT_STOPPED:
        # A body that goes on in a thread would keep the interpreter from ending.
        sys.stdout.flush()
        os._exit(code)
    return code


def load(settings: Settings, options: Options) -> tuple[TaskRegistry, Settings]:
    """The tasks, and the settings with the storage that the app names. Raises AppImportFailed."""
    from fluxmesh.tasks import add_builtins, builtin_registry

    if settings.app is None:
        if options.builtins is False:
            return TaskRegistry(), settings
        return builtin_registry(settings), settings
    from fluxmesh.queue import load_app

    queue = load_app(settings.app)
    refuse_memory(queue.url)
    own = {
        name: value for name in ("concurrency", "grace_s") if (value := getattr(options, name)) is not None
    }
    own |= mesh_overrides(options)
    if options.builtins:
        add_builtins(queue.registry, queue.settings)
    return queue.registry, msgspec.structs.replace(queue.settings, url=queue.url, **own)


def settle_memory() -> None:
    """What is loaded by now stays; the collector need not look at it again, nor after every few jobs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def run_fast(main: Coroutine[Any, Any, int]) -> int:
    """On uvloop where it is installed (the extra `fast`), else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def _redirect(fd: int, to: int) -> None:
    os.dup2(to, fd)
    os.close(to)


def _take_stdin() -> int:
    """Standard input under another number; bodies that read theirs find it empty."""
    own = os.dup(0)
    _redirect(0, os.open(os.devnull, os.O_RDONLY))
    return own


async def _serve(
    registry: TaskRegistry,
    settings: Settings,
    serving: Serving,
    source: BodySource,
    options: Options,
    reports: Reports,
    stdin: int,
) -> int:
    from fluxmesh.worker.config import WorkerConfig, WorkerEnd
    from fluxmesh.worker.signals import StopSignals
    from fluxmesh.worker.worker import Worker

    config = WorkerConfig(
        worker_id=options.id,
        queues=serving.queues,
        tiers=serving.tiers,
        concurrency=settings.concurrency,
        reserve=serving.reserve,
        grace_s=settings.grace_s,
        on_lease_lost=settings.on_lease_lost,
        mesh=mesh_of(None, settings, child=options.mesh_child),
        mesh_optional=settings.mesh_optional,
    )
    worker = Worker(
        open_storage=opener(settings),
        registry=registry,
        settings=settings,
        config=config,
        clock=system_clock(),
        source=source,
    )
    if options.ledger_fd != _NO_FD:
        worker.write_ledger(options.ledger_fd)
        os.close(options.ledger_fd)
    worker.end_without(stdin, lambda: os._exit(EXIT_HURRIED))
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    def stop() -> None:
        if not stopping:
            stopping.append(loop.create_task(worker.stop()))

    signals = StopSignals(stop, worker.stop_now)
    signals.install()
    on_end_of_file(stdin, stop)
    try:
        await worker.start()
        reports.tell({"epoch": worker.epoch})
        reports.tell({"ready": True})
        end = await worker.wait()
        reports.tell({"ended": True, "left_running": worker.left_running})
    except StorageDamaged:
        reports.tell({"hopeless": True})
        raise
    finally:
        loop.remove_reader(stdin)
    code = {
        WorkerEnd.STOPPED: EXIT_STOPPED,
        WorkerEnd.HURRIED: EXIT_HURRIED,
        WorkerEnd.RETIRED: EXIT_RETIRED,
        WorkerEnd.FENCED: EXIT_FENCED,
    }[end]
    signals.end_with(code)
    if worker.left_running:
        # The end of the loop would wait for an async body that swallows its cancellation.
        sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
