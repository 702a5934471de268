"""Looking at an app from outside: a process of its own imports it and tells what its Queue says.

The supervisor must run no user code, yet it has to know on which storage the app's workers will work.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from fluxmesh.cli import output
from fluxmesh.cli.parser import Options
from fluxmesh.cli.session import described
from fluxmesh.config import ENV_PREFIX, Settings
from fluxmesh.errors import AppImportFailed, InvalidOption
from fluxmesh.worker.child_process import REPORT_FLAG
from fluxmesh.worker.deaths import how_ended

URL_VARIABLE: Final = f"{ENV_PREFIX}URL"
IMPORT_MOST_S: Final = 300.0
IMPORT_SLOW_S: Final = 5.0
SLOW_HINT: Final = 'hint: what submits jobs or waits for them belongs under `if __name__ == "__main__":`'
_REPORT_MOST_BYTES: Final = 1 << 20


class AppReport(msgspec.Struct, frozen=True):
    """What a child that only describes its app writes to its report pipe."""

    url: str
    settings: dict[str, Any]


def describe_app(
    app: str, argv: Sequence[str], environ: Mapping[str, str] | None, options: Options
) -> tuple[Settings, str]:
    """The settings and the storage of the app's Queue. Raises what its import raised, or InvalidOption if
    --url or FLUXMESH_URL names another storage than the app does."""
    code, text = _ask(app, [*argv, "--app", app, "--describe"], environ)
    if code in (2, 3):
        raise SystemExit(code)  # the child has said why
    try:
        report = msgspec.json.decode(text, type=AppReport)
    except msgspec.MsgspecError:
        raise AppImportFailed(
            f"--app {app}: the process that imported it ended without a word ({how_ended(code)})",
            hint=f"try `python -c 'import {app.partition(':')[0]}'`",
        ) from None
    _refuse_another(options, report.url)
    return msgspec.convert(report.settings, Settings), report.url


def _refuse_another(options: Options, url: str) -> None:
    flag = getattr(options, "url", None)
    name, said = ("--url", flag) if flag is not None else (URL_VARIABLE, os.environ.get(URL_VARIABLE))
    if said is not None and described(said) != described(url):
        raise InvalidOption(
            name,
            f"{described(said)} is not the storage that the app names, {described(url)}",
            hint=f"leave {name} out, or write Queue() without a storage in the app",
        )


def _ask(app: str, argv: Sequence[str], environ: Mapping[str, str] | None) -> tuple[int, bytes]:
    reader, writer = os.pipe()
    try:
        child = subprocess.Popen(
            [*argv, REPORT_FLAG, str(writer)], stdin=subprocess.DEVNULL, pass_fds=(writer,), env=environ
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        try:
            code = _patiently(app, child)
        except subprocess.TimeoutExpired:
            raise AppImportFailed(
                f"--app {app}: its import took more than {IMPORT_MOST_S:g} s",
                hint="do slow work in the tasks",
            ) from None
        finally:
            child.kill()
            child.wait()
        os.set_blocking(reader, False)  # a process that the app left behind may still hold the pipe
        return code, pipe.read(_REPORT_MOST_BYTES) or b""


def _patiently(app: str, child: subprocess.Popen[bytes]) -> int:
    """Its exit code; a word on what holds it up, if it is not soon there."""
    try:
        return child.wait(IMPORT_SLOW_S)
    except subprocess.TimeoutExpired:
        output.note(output.safe(f"--app {app}: its import goes on after {IMPORT_SLOW_S:g} s"))
        output.note(SLOW_HINT)
        return child.wait(IMPORT_MOST_S - IMPORT_SLOW_S)
