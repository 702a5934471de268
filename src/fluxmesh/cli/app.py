"""Looking at an app from outside: a process of its own imports it and tells what its Queue says.

The supervisor must run no user code, yet it has to know on which storage the app's workers will work.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from fluxmesh.cli.parser import Options
from fluxmesh.cli.session import described
from fluxmesh.config import Settings
from fluxmesh.errors import AppImportFailed, InvalidOption
from fluxmesh.worker.child_process import REPORT_FLAG
from fluxmesh.worker.deaths import how_ended

IMPORT_MOST_S: Final = 300.0
_REPORT_MOST_BYTES: Final = 1 << 20


class AppReport(msgspec.Struct, frozen=True):
    """What a child that only describes its app writes to its report pipe."""

    url: str
    settings: dict[str, Any]


def describe_app(app: str, argv: Sequence[str], options: Options) -> tuple[Settings, str]:
    """The settings and the storage of the app's Queue. Raises what its import raised, or InvalidOption if
    --url names another storage than the app does."""
    code, text = _ask([*argv, "--app", app, "--describe"])
    if code in (2, 3):
        raise SystemExit(code)  # the child has said why
    try:
        report = msgspec.json.decode(text, type=AppReport)
    except msgspec.MsgspecError:
        raise AppImportFailed(
            f"--app {app}: the process that imported it ended without a word ({how_ended(code)})",
            hint=f"try `python -c 'import {app.partition(':')[0]}'`",
        ) from None
    flag = getattr(options, "url", None)
    if flag is not None and described(flag) != described(report.url):
        raise InvalidOption(
            "--url",
            f"{described(flag)} is not the storage that the app names, {described(report.url)}",
            hint="leave --url out, or write Queue() without a storage in the app",
        )
    return msgspec.convert(report.settings, Settings), report.url


def _ask(argv: Sequence[str]) -> tuple[int, bytes]:
    reader, writer = os.pipe()
    try:
        child = subprocess.Popen(
            [*argv, REPORT_FLAG, str(writer)], stdin=subprocess.DEVNULL, pass_fds=(writer,)
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        try:
            code = child.wait(IMPORT_MOST_S)
        except subprocess.TimeoutExpired:
            raise AppImportFailed(
                f"the app took more than {IMPORT_MOST_S:g} s to import", hint="do slow work in the tasks"
            ) from None
        finally:
            child.kill()
            child.wait()
        os.set_blocking(reader, False)  # a process that the app left behind may still hold the pipe
        return code, pipe.read(_REPORT_MOST_BYTES) or b""
