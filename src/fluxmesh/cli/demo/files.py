"""Which files the demo works on: every regular file below a folder that can be read and named."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from fluxmesh.errors import InvalidOption

MOST_FILES: Final = 100_000
OWN_SOURCES: Final = Path(__file__).resolve().parents[2]


class Found(Struct, frozen=True):
    """`files` are absolute paths in a stable order; `skipped` says of each other entry why."""

    folder: str
    files: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]


def gather(folder: str | None, *, leave_out: Path) -> Found:
    """Files under `folder`, or of the project's own sources. `leave_out` is the demo's own database, with
    what SQLite keeps beside it. Raises InvalidOption if there is nothing to work on."""
    root = os.path.abspath(OWN_SOURCES if folder is None else folder)
    if not os.path.isdir(root):
        what = "is not a folder" if os.path.lexists(root) else "does not exist"
        raise InvalidOption("--dir", f"{root!r} {what}", hint="name a folder with some files in it")
    if not _speakable(root):
        raise InvalidOption("--dir", f"the name {root!r} is not UTF-8", hint="name another folder")
    files: list[str] = []
    skipped: list[tuple[str, str]] = []
    for path in _walk(root, skipped, sources=folder is None):
        if _belongs_to(path, leave_out):
            continue
        why = _objection(path)
        if why:
            skipped.append((path, why))
        else:
            files.append(path)
        if len(files) > MOST_FILES:
            raise InvalidOption("--dir", f"more than {MOST_FILES:,} files", hint="name a smaller folder")
    if not files:
        raise InvalidOption(
            "--dir", f"no file below {root!r} can be read", hint="name a folder with some files"
        )
    return Found(root, tuple(files), tuple(skipped))


def _walk(root: str, skipped: list[tuple[str, str]], *, sources: bool) -> Iterator[str]:
    def note(error: OSError) -> None:
        skipped.append((str(error.filename), error.strerror or "cannot be listed"))

    for folder, names, files in os.walk(root, onerror=note):
        names.sort()
        if sources and "__pycache__" in names:
            names.remove("__pycache__")  # no sources, and written to while the workers start
        yield from (os.path.join(folder, name) for name in sorted(files))


def _belongs_to(path: str, database: Path) -> bool:
    """True for the database file and for what stands beside it under its name."""
    if os.path.dirname(path) == f"{database}-bells":
        return True
    return path in {f"{database}{suffix}" for suffix in ("", "-wal", "-shm", "-journal")}


def _speakable(path: str) -> bool:
    """False for a name with bytes that are no UTF-8: no job can carry it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _objection(path: str) -> str:
    """Why no job can read this file; empty if one can."""
    if not _speakable(path):
        return "its name is not UTF-8"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "not a regular file"
        # Opened, not asked about: access() judges by the real user and by no security module.
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or "cannot be read"
    return ""
