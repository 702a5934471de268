"""Opening a storage by its URL. Backends are named as texts, so that nothing here imports one.

A fork waits for an import under way: its child would find the module locked by a thread it does not have.
What else a fork waits for is in `forks`, imported here: a fork already begun does not learn of it from a
backend that is only then imported.
"""

from __future__ import annotations

# asyncio imports it at the first to_thread(): a child forked meanwhile would find half a module for ever.
import concurrent.futures.thread  # noqa: F401
import importlib
import os
import threading
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from fluxmesh.clock import Clock, system_clock
from fluxmesh.config import DEFAULT_DATABASE, Settings
from fluxmesh.errors import InvalidOption, StorageRefused, masked, shown
from fluxmesh.storage import forks  # noqa: F401
from fluxmesh.storage.base import Storage

BACKENDS: Final[Mapping[str, str]] = {
    "sqlite": "fluxmesh.storage.sqlite",
    "redis": "fluxmesh.storage.redis",
    "rediss": "fluxmesh.storage.redis",
    "redis+sentinel": "fluxmesh.storage.redis",
    "rediss+sentinel": "fluxmesh.storage.redis",
    "memory": "fluxmesh.storage.redis.memory",
}
_FORK_PATIENCE_S: Final = 10.0
_importing: Final = threading.RLock()
_taken: list[bool] = []


def resolved_url(url: str | None, db_path: str | Path | None = None) -> str:
    """The URL in force: `db_path` means a SQLite file; neither means fluxmesh.db in the working directory."""
    if url is not None and db_path is not None:
        raise InvalidOption("db_path", "given together with url", hint="give one of them")
    if db_path is not None:
        name = str(db_path)
        for sign in "%?#":  # which mean something in a URL, and nothing in a file's name
            name = name.replace(sign, f"%{ord(sign):02X}")
        return f"sqlite:///{name}"
    if url is None:
        return f"sqlite:///{DEFAULT_DATABASE}"
    scheme = _scheme_of(url)
    if not scheme and url and "://" not in url:
        what = "not a URL" if "@" in url else "a path and not a URL"
        raise InvalidOption("url", f"{masked(url)!r} is {what}", hint=f"write {_as_url(url)}")
    if scheme in BACKENDS and "://" not in url:
        raise InvalidOption("url", f"{masked(url)!r} lacks ://", hint=f"write {scheme}://…")
    if scheme not in BACKENDS:
        known = ", ".join(f"{name}://" for name in BACKENDS)
        raise InvalidOption("url", f"{masked(url)!r}: unknown storage {scheme!r}", hint=f"known: {known}")
    return url


def expanded(name: str) -> Path:
    """A file's name with the home folder that a leading ~ stands for. Raises InvalidOption."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # there is no such user, or no home
        hint = "write the folder's whole name, or ./~… for a file that begins so"
        raise InvalidOption("url", f"{shown(name)}: nobody's home folder is called so", hint=hint) from None


def _as_url(text: str) -> str:
    return "redis://:password@host:6379/0" if "@" in text else f"sqlite:///{text}"


def lives_on_loops(url: str) -> bool:
    """True if a storage of this kind is as good on one event loop as on another, and needs no thread."""
    return _scheme_of(url).startswith("redis")


def _scheme_of(url: str) -> str:
    try:
        return urlsplit(url).scheme
    except ValueError as error:  # brackets that hold no address
        raise InvalidOption("url", f"{masked(url)!r}: {error}", hint="redis://[::1]:6379/0") from None


def refuse_idle_promises(url: str, settings: Settings) -> None:
    """Refuse what a storage cannot do and a caller would rely on."""
    scheme = _scheme_of(url)
    if settings.durability == "power" and scheme != "sqlite":
        raise InvalidOption(
            "durability",
            f"'power' is a promise of SQLite; {scheme}:// keeps what its server was set up to keep",
            hint="leave it out, and look at docs/failures.md",
        )
    if settings.wait_replicas and not scheme.startswith("redis"):
        raise InvalidOption(
            "wait_replicas",
            f"{scheme}:// has no replicas that could be waited for",
            hint="leave it out, or use redis://",
        )


async def open_storage(
    url: str, settings: Settings, *, create: bool, clock: Clock | None = None, inline: bool = False
) -> Storage:
    """Open the storage that `url` names. `create` False: StorageMissing if it is not there.

    `inline`: verbs run in the calling thread; for a loop that does nothing else (a heartbeat thread).
    """
    refuse_idle_promises(url, settings)
    scheme = _scheme_of(url)
    try:
        with _importing:
            module = importlib.import_module(BACKENDS[scheme])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(__package__.partition(".")[0]):
            raise
        raise StorageRefused(
            f"{scheme}:// needs the package {error.name!r}",
            hint=f'pip install "fluxmesh[{"memory" if scheme == "memory" else "redis"}]"',
        ) from error
    opened: Awaitable[Storage] = module.open_backend(
        url, settings, create=create, clock=clock or system_clock(), inline=inline
    )
    return await opened


def _before_fork() -> None:
    _taken.append(_importing.acquire(timeout=_FORK_PATIENCE_S))


def _after_fork() -> None:
    if _taken.pop():
        _importing.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
