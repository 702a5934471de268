"""fluxmesh demo: the life of real jobs on a database made for the purpose."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from fluxmesh.cli import demo_mesh, output
from fluxmesh.cli.demo.files import Found, gather
from fluxmesh.cli.demo.scene import Scene
from fluxmesh.cli.demo.stage import heading, say
from fluxmesh.cli.parser import Options, Parser, add_verb, examples
from fluxmesh.cli.run import run_async
from fluxmesh.cli.session import described, overrides, refuse_memory, say_storage
from fluxmesh.config import load_settings
from fluxmesh.errors import InvalidOption
from fluxmesh.ids import new_nonce
from fluxmesh.storage.registry import resolved_url

SKIPPED_SHOWN: Final = 10


def configure(parser: Parser) -> None:
    parser.description = (
        "Two worker processes compute a digest of every file below a folder, on four tiers; beside them "
        "a flaky, a failing, a delayed and an urgent job. The failing one is mended and replayed."
    )
    parser.epilog = examples(
        "fluxmesh demo", "fluxmesh demo --dir ~/photos --db photos.db", "make demo DIR=/usr/share/doc"
    )
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--dir", metavar="DIR", help="work on the files below DIR (the project's own sources)"
    )
    parser.add_argument(
        "--db", metavar="PATH", help="database file, created if missing and kept (a temporary one)"
    )
    parser.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the temporary database for a look at it afterwards (yes)",
    )
    more = parser.add_subparsers(title="another demo", metavar="mesh", required=False, prog=parser.prog)
    demo_mesh.configure(add_verb(more, "mesh", demo_mesh.run, demo_mesh.SUMMARY, *demo_mesh.EXAMPLES))


def _run(options: Options) -> int:
    from fluxmesh.cli.demo.play import play

    with _scene(options) as (scene, ended):
        found = gather(options.dir, leave_out=scene.database)
        say_storage(scene.settings)
        _say_what_is_played(scene, found)
        code = run_async(play(scene, found))
        if code in (0, 1):
            ended.append(code)
            _say_what_to_try(scene, kept=options.keep or _named(options) is not None)
        return code


def _named(options: Options) -> str | None:
    """The storage that the flags name. FLUXMESH_URL is left alone: a demo has no business there."""
    url: str | None = getattr(options, "url", None)
    if options.db is not None and url is not None:
        raise InvalidOption("--db", "given together with --url", hint="give one of them")
    refuse_memory(url)
    return f"sqlite:///{Path(options.db).absolute()}" if options.db is not None else url


@contextlib.contextmanager
def _scene(options: Options) -> Iterator[tuple[Scene, list[int]]]:
    """The scene, and a list that holds the exit code once the demo has come to its end."""
    named = _named(options)
    folder = Path(tempfile.mkdtemp(prefix="fluxmesh-demo-"))
    temporary = named is None
    url = described(named or resolved_url(None, folder / "demo.db"))
    database = Path(url.removeprefix("sqlite:///"))
    ended: list[int] = []
    try:
        settings = load_settings({**overrides(options), "url": url})
        settings = msgspec.structs.replace(settings, app=None)
        # A database that was there before may have a queue of that name with something else in it.
        queue = f"demo-{new_nonce()[:4]}" if os.path.exists(database) else "demo"
        yield Scene(settings, url, database, folder, queue), ended
    finally:
        if not (ended and temporary and options.keep):
            shutil.rmtree(folder, ignore_errors=True)


def _say_what_is_played(scene: Scene, found: Found) -> None:
    heading("Background jobs, from submission to replay")
    say(f"database  {scene.database}")
    say(f"files     {len(found.files):,} below {found.folder}")
    for path, why in found.skipped[:SKIPPED_SHOWN]:
        say(f"skipped   {path.encode('utf-8', 'backslashreplace').decode()}: {why}")
    if len(found.skipped) > SKIPPED_SHOWN:
        say(f"skipped   {len(found.skipped) - SKIPPED_SHOWN:,} more")


def program() -> str:
    """How this very program is called from here, for commands to copy."""
    beside = Path(sys.executable).with_name("fluxmesh")
    on_path = shutil.which("fluxmesh")
    if on_path is not None and Path(on_path).resolve() == beside.resolve():
        return "fluxmesh"
    if not beside.exists():
        return f"{shlex.quote(sys.executable)} -m fluxmesh.cli"
    with contextlib.suppress(ValueError):
        return shlex.quote(str(beside.relative_to(Path.cwd())))
    return shlex.quote(str(beside))


def _say_what_to_try(scene: Scene, *, kept: bool) -> None:
    heading("What to try next")
    call = program()
    if not kept:
        say(f"{call} demo --keep       the same, and the database stays")
        say(f"{call} worker            workers of your own, on fluxmesh.db in this folder")
        return
    flags = f"--url {shlex.quote(scene.url)}"
    if scene.settings.namespace != "fluxmesh":
        flags += f" --namespace {shlex.quote(scene.settings.namespace)}"
    say(f"{call} jobs list {flags} --limit 5")
    say(f"{call} jobs list {flags} --q 'task:file_digest queue:{scene.queue}' --all --json")
    say(f"{call} worker {flags} &")
    say(f"{call} submit {flags} --task heavy_computation --args '[3000000]' --wait")
    say(f"{call} doctor {flags}")
    if scene.database.parent == scene.folder:
        say(f"rm -r {shlex.quote(str(scene.folder))}")
    output.flush()
