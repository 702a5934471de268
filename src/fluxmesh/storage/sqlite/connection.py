"""Opening a database file: what is refused, how it is set up, how its errors are told."""

from __future__ import annotations

import os
import random
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import apsw

from fluxmesh.clock import system_clock
from fluxmesh.errors import (
    InvalidOption,
    OutcomeUnknown,
    StorageDamaged,
    StorageError,
    StorageMissing,
    StorageRefused,
    StorageUnreachable,
    masked,
)
from fluxmesh.storage.registry import expanded
from fluxmesh.storage.sqlite.sqltext import Statements

APPLICATION_ID: Final = 0x464C584D  # "FLXM"
SCHEMA_VERSION: Final = 1
BUSY_S: Final = 5.0
_NETWORK_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "afs", "ceph"}
)
_MOUNTS: Final = Path("/proc/self/mountinfo")


def path_of(url: str) -> Path:
    """sqlite:///relative.db, sqlite:////absolute.db. Links are followed, as SQLite does with the log: whoever
    names a file through a link must find the same bells and locks beside it."""
    rest = url.removeprefix("sqlite://")
    if "?" in rest or "#" in rest:
        raise InvalidOption(
            "url", f"{masked(url)!r}: options after the file's name are not known", hint="sqlite:///tasks.db"
        )
    if not rest.startswith("/") or len(rest) < 2:
        raise InvalidOption(
            "url", f"{masked(url)!r} names no file", hint="sqlite:///tasks.db or sqlite:////var/lib/tasks.db"
        )
    name = unquote(rest[1:])
    if "\0" in name:
        raise InvalidOption(
            "url", f"{masked(url)!r}: a file's name cannot hold a zero byte", hint="sqlite:///tasks.db"
        )
    return Path(os.path.realpath(expanded(name)))


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds `path`; "" where the kernel does not tell."""
    try:
        text = _MOUNTS.read_text() if mounts is None else mounts
    except OSError:
        return ""
    best, kind = "", ""
    real = os.path.realpath(path.parent)
    for line in text.splitlines():
        before, found, after = line.partition(" - ")
        fields = before.split()
        if not found or len(fields) < 5:
            continue
        point = fields[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def refuse_network_file_system(path: Path, kind: str) -> None:
    if kind in _NETWORK_SYSTEMS:
        raise StorageRefused(
            f"{path} is on a network file system ({kind}), where SQLite's locks cannot be trusted",
            hint="put the file on a local disk",
        )


def told(error: Exception, path: Path, *, after_commit_began: bool = False) -> StorageError:
    """A driver's error as ours. Only an error of the commit itself leaves the outcome open."""
    text = str(error)
    if after_commit_began and isinstance(error, apsw.IOError):
        return OutcomeUnknown(f"{path}: {text} while committing", hint="repeat the call: it does no harm")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StorageUnreachable(
            f"{path} has been locked by another process for {BUSY_S:g} s",
            hint="find who holds it: `fluxmesh doctor`",
        )
    if isinstance(error, apsw.FullError):
        return StorageUnreachable(f"{path}: the disk is full", hint="free some space; nothing was stored")
    if isinstance(error, apsw.ReadOnlyError):
        hint = barred(path) or "check the owner and mode of file and folder"
        return StorageUnreachable(f"{path} cannot be written to", hint=hint)
    if isinstance(error, apsw.CantOpenError):
        hint = barred(path) or "check that the folder exists and may be written to"
        return StorageUnreachable(f"{path} cannot be opened", hint=hint)
    if isinstance(error, apsw.NotADBError | apsw.CorruptError):
        hint = "restore a copy of it, or move it away with the files beside it"
        if isinstance(error, apsw.NotADBError):
            hint += "; name another file if this was never FluxMesh's"
        return StorageDamaged(f"{path} is not a sound SQLite database: {text}", hint=hint)
    return StorageUnreachable(f"{path}: {text}", hint="see `fluxmesh doctor`")


def _patience(give_up: Callable[[], bool]) -> Callable[[int], bool]:
    """Wait for a lock in short random naps: SQLite's own 1-100 ms steps would starve the unlucky."""
    clock = system_clock()
    began = clock.mono_s()

    def wait(tries: int) -> bool:
        nonlocal began
        if tries == 0:
            began = clock.mono_s()
        elif give_up() or clock.mono_s() - began > BUSY_S:
            return False
        time.sleep(random.uniform(0.0001, 0.0005 if tries < 20 else 0.004))
        return True

    return wait


def connect(
    path: Path, *, durability: str, create: bool = False, give_up: Callable[[], bool] = lambda: False
) -> apsw.Connection:
    """A connection in WAL mode that never checkpoints by itself."""
    flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if create else 0)
    try:
        db = apsw.Connection(str(path), flags=flags, statementcachesize=400)
        db.set_busy_handler(_patience(give_up))
        db.pragma("journal_mode", "wal")
        db.pragma("synchronous", "full" if durability == "power" else "normal")
        db.wal_autocheckpoint(0)
        # Plans must not depend on bound values: otherwise SQLite (built with STAT4) prepares any statement
        # with ORDER BY or a bound LIMIT anew at each use, which costs ten times what running it does.
        db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        db.pragma("temp_store", 2)
        db.pragma("cache_size", -16_000)
    except apsw.Error as error:
        raise told(error, path) from error
    return db


def barred(path: Path) -> str:
    """What of the modes of file and folders keeps this process out, and what to do; "" if nothing does."""
    as_owner = "or run this as its owner"
    for folder in reversed(path.parents):
        if os.path.isdir(folder) and not os.access(folder, os.X_OK):
            return f"this user may not enter the folder {folder}: chmod or chown it, {as_owner}"
    if os.path.isfile(path) and not os.access(path, os.R_OK | os.W_OK):
        return f"the file's own mode keeps this user out: chmod u+rw or chown {path}, {as_owner}"
    if os.path.isdir(path.parent) and not os.access(path.parent, os.W_OK):
        return (
            f"SQLite keeps files beside the database, and this user may not write to the folder "
            f"{path.parent}: chmod or chown it, {as_owner}"
        )
    return ""


def _seen(path: Path) -> os.stat_result | None:
    """None: it is not there."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageUnreachable(
            f"{path} cannot be opened: {error.strerror}", hint=barred(path) or "name another file"
        ) from None


def check_present(path: Path, *, create: bool) -> None:
    """StorageMissing unless the file is there or may be created; the network is refused either way."""
    refuse_network_file_system(path, file_system(path))
    there = _seen(path)
    if there is not None and stat.S_ISDIR(there.st_mode):
        raise StorageUnreachable(f"{path} is a folder", hint="name a file in it")
    if create:
        folder = _seen(path.parent)
        if folder is None or not stat.S_ISDIR(folder.st_mode):
            raise StorageUnreachable(f"the folder {path.parent} does not exist", hint="create it first")
    elif there is None or not there.st_size:
        # SQLite would make a database of an empty file, and who only reads must make none.
        what = "there is no database" if there is None else "no database yet, but an empty file:"
        raise StorageMissing(
            f"{what} {path}", hint="start a worker there, or name another with --url or FLUXMESH_URL"
        )


def prepare_schema(db: apsw.Connection, sql: Statements, path: Path) -> None:
    """Create the namespace's tables where they are missing. Refuses a foreign or newer schema."""
    try:
        if _ready(db, sql, path):
            return
        db.execute("begin immediate")
        try:
            if not _ready(db, sql, path):
                db.execute(f"pragma application_id = {APPLICATION_ID}")
                db.execute(f"pragma user_version = {SCHEMA_VERSION}")
                if f"{sql.namespace}:job" not in _tables(db):
                    db.execute(sql["schema.tables"])
                    db.execute(sql["schema.first_values"])
                if not _has_slot(db, sql):
                    db.execute(sql["schema.add_slot"])
                db.execute(sql["schema.later_tables"])
            db.execute("commit")
        except BaseException:
            if db.in_transaction:
                db.execute("rollback")
            raise
    except apsw.Error as error:
        raise told(error, path) from error


def _ready(db: apsw.Connection, sql: Statements, path: Path) -> bool:
    owner = db.pragma("application_id")
    version = db.pragma("user_version")
    tables = _tables(db)
    if owner != APPLICATION_ID:
        if owner or version or tables:
            raise StorageRefused(
                f"{path} is a database of another program", hint="name a file of its own for FluxMesh"
            )
        return False
    if version != SCHEMA_VERSION:
        raise StorageRefused(
            f"{path} has schema {version}, this program knows {SCHEMA_VERSION}",
            hint="update FluxMesh on this machine" if version > SCHEMA_VERSION else "name another file",
        )
    return {f"{sql.namespace}:{name}" for name in ("job", "mesh", "affinity")} <= tables and _has_slot(
        db, sql
    )


def _has_slot(db: apsw.Connection, sql: Statements) -> bool:
    return next(db.execute(sql["schema.has_slot"], (f"{sql.namespace}:job",)), None) is not None


def _tables(db: apsw.Connection) -> set[str]:
    return {row[0] for row in db.execute("select name from sqlite_schema where type = 'table'")}
