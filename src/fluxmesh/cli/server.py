"""fluxmesh server: the REST API, with a worker in a process of its own unless told otherwise."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from fluxmesh.cli.mesh_options import MESH_SETTINGS, add_mesh_options, refuse_without_worker
from fluxmesh.cli.parser import Options, Parser, count, examples
from fluxmesh.cli.reload import add_reload_options, run_reloading
from fluxmesh.cli.run import end_by_signal, on_end_of_file
from fluxmesh.cli.serving import add_serving_options, serving_of
from fluxmesh.cli.session import announce, opener, say_storage, settings_of
from fluxmesh.cli.worker import (
    check_mesh,
    child_argv,
    child_environ,
    child_flags,
    settings_of_app,
    warn_without_mesh,
)
from fluxmesh.clock import system_clock
from fluxmesh.config import Settings
from fluxmesh.errors import FluxMeshError, InvalidOption
from fluxmesh.queue import default_worker_id
from fluxmesh.submission import checked_name
from fluxmesh.worker.child_process import ChildSpec

if TYPE_CHECKING:
    from fluxmesh.api.access import Access
    from fluxmesh.api.server import ApiServer
    from fluxmesh.worker.supervisor import Supervisor

TOKEN_FILE_MOST: Final = 64 << 10
_OF_WORKER: Final = ("queues", "tiers", "concurrency", "reserve", "builtins", "id")


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        "fluxmesh server",
        "fluxmesh server --host 0.0.0.0 --token @token.txt --app app:queue",
        "fluxmesh server --no-standalone --port 8001",
    )
    add_options(parser, reload=False)
    parser.add_argument(
        "--standalone",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run a worker too, in a process of its own (yes)",
    )


def add_options(parser: Parser, *, reload: bool) -> None:
    """What `server` and `dev` both take; whether they watch the code if nothing is said."""
    parser.set_defaults(run=_run)
    group = parser.add_argument_group("where it listens")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address (127.0.0.1)")
    group.add_argument(
        "--port", type=count(0, 65_535), default=8_000, metavar="N", help="port, 0 = a free one (8000)"
    )
    group.add_argument(
        "--token",
        action="append",
        metavar="TEXT",
        help="bearer token that is let in, or @FILE with one a line; may be repeated (FLUXMESH_TOKEN)",
    )
    group.add_argument("--insecure", action="store_true", help="listen beyond this machine without a token")
    group.add_argument("--stop-at-eof", action="store_true", help="also stop when standard input ends")
    add_serving_options(parser)
    add_mesh_options(parser)
    group = parser.add_argument_group("who runs it")
    group.add_argument("--id", metavar="NAME", help="worker id (host, process id and four digits)")
    add_reload_options(parser, default=reload)


class _Plan(Struct, frozen=True):
    """What shall run. `children` is empty for the API alone."""

    settings: Settings
    access: Access
    children: tuple[ChildSpec, ...]
    stop_at_eof: bool


def _run(options: Options) -> int:
    from fluxmesh.obs.log import configure as configure_logs

    if options.reload:
        return run_reloading(sys.argv[1:], options.reload_dir or [Path()])
    end_by_signal(daemon=True)
    settings = settings_of(options, "concurrency", "grace_s", "app", *MESH_SETTINGS)
    access = _access(options, settings)
    children = _children(options, settings)
    if settings.app is not None:
        settings = settings_of_app(options, settings)
    if children:
        check_mesh(settings, len(children))
    from fluxmesh.api.server import listen

    say_storage(settings)
    configure_logs(settings.log_level, settings.log_format)
    if children:
        warn_without_mesh(options, settings)
    with listen(options.host, options.port) as listening:
        plan = _Plan(settings, access, children, options.stop_at_eof)
        return asyncio.run(_serve(plan, listening))


def _access(options: Options, settings: Settings) -> Access:
    """Raises InvalidOption for a wide bind without a token."""
    try:
        from fluxmesh.api.access import Access, is_loopback
    except ImportError as error:
        raise FluxMeshError(
            f"the server needs packages that are not installed: {error.name}",
            hint="pip install 'fluxmesh[server]'",
        ) from None
    tokens = [token for text in options.token or () for token in _tokens(text)]
    if not tokens and settings.token is not None:
        tokens = settings.token.split(",")
    loopback = is_loopback(options.host)
    if not (tokens or loopback or options.insecure):
        raise InvalidOption(
            "--host",
            f"{options.host} can be reached from other machines, and no token is asked for",
            hint="give --token, or --host 127.0.0.1, or --insecure if the network is yours alone",
        )
    return Access.of(tokens, loopback=loopback)


def _tokens(text: str) -> list[str]:
    """The token itself, or those of @FILE, which nobody else can read off the list of processes."""
    if not text.startswith("@"):
        return [text]
    try:
        with Path(text[1:]).open(encoding="utf-8") as file:
            tokens = file.read(TOKEN_FILE_MOST).split()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InvalidOption("--token", f"{text[1:200]}: {why}", hint="@FILE names a file of tokens") from None
    if not tokens:
        raise InvalidOption("--token", f"{text[1:200]} holds no token", hint="one token a line")
    return tokens


def _children(options: Options, settings: Settings) -> tuple[ChildSpec, ...]:
    if not options.standalone:
        for name in _OF_WORKER:
            if getattr(options, name) is not None:
                raise InvalidOption(
                    f"--{name}", "given together with --no-standalone", hint="it is for the worker"
                )
        refuse_without_worker(options)
        return ()
    serving = serving_of(options, settings.concurrency)
    name = default_worker_id() if options.id is None else checked_name("--id", options.id, queue=True)
    argv = child_argv(name, child_flags(options, settings, serving))
    return (ChildSpec(name, argv, child_environ(options)),)


async def _serve(plan: _Plan, listening: socket.socket) -> int:
    """The API in this loop, the worker beside it; each ends when the other does."""
    from fluxmesh.api.server import ApiServer
    from fluxmesh.api.store import Store
    from fluxmesh.worker.supervisor import Supervisor

    clock = system_clock()
    open_storage = opener(plan.settings)
    store = Store(open_storage=open_storage, settings=plan.settings, clock=clock)
    await store.start()
    try:
        server = ApiServer(store, plan.access, grace_s=plan.settings.grace_s)
        supervisor = None
        if plan.children:
            supervisor = Supervisor(
                children=plan.children, open_storage=open_storage, settings=plan.settings, clock=clock
            )
        _say_listening(plan, listening)
        return await _Daemon(server, supervisor).run(listening, stop_at_eof=plan.stop_at_eof)
    finally:
        await store.close()


def _say_listening(plan: _Plan, listening: socket.socket) -> None:
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    token = "a token is asked for" if plan.access.digests else "no token is asked for"
    worker = f"worker {plan.children[0].worker_id}" if plan.children else "no worker"
    announce(
        plan.settings,
        f"server: {url} (routes at {url}/docs; {token}; {worker})",
        event="server listens",
        url=url,
        token=bool(plan.access.digests),
        worker=plan.children[0].worker_id if plan.children else None,
    )


class _Daemon:
    """The API and its worker as one daemon: 0 after the first signal, 1 after the second."""

    def __init__(self, server: ApiServer, supervisor: Supervisor | None) -> None:
        self._server = server
        self._supervisor = supervisor
        self._told = False
        self._hurried = False

    async def run(self, listening: socket.socket, *, stop_at_eof: bool) -> int:
        from fluxmesh.worker.signals import StopSignals
        from fluxmesh.worker.supervisor import SAME_MOMENT_S

        signals = StopSignals(self._stop, self._hurry, gap_s=SAME_MOMENT_S)
        signals.install()
        if stop_at_eof:
            on_end_of_file(0, self._stop)
        worker = asyncio.create_task(self._work())
        try:
            await self._server.serve(listening)
        finally:
            self._stop()
            code = max(await worker, int(self._hurried))
        signals.end_with(code)
        return code

    async def _work(self) -> int:
        """The supervisor to its end, which is the API's too."""
        if self._supervisor is None:
            return 0
        try:
            return await self._supervisor.run(take_signals=False)
        finally:
            self._server.stop()

    def _stop(self) -> None:
        if not self._told:
            self._told = True
            self._server.stop()
            if self._supervisor is not None:
                self._supervisor.stop()

    def _hurry(self) -> None:
        self._stop()
        self._hurried = True
        self._server.hurry()
        if self._supervisor is not None:
            self._supervisor.stop()
