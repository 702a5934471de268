"""From options to an open storage: the settings in force, the line that names the storage, the opening."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from fluxmesh.cli import output
from fluxmesh.cli.nearby import databases_in
from fluxmesh.cli.parser import Options
from fluxmesh.cli.run import run_async
from fluxmesh.config import Settings, load_settings
from fluxmesh.errors import InvalidOption, StorageMissing, masked
from fluxmesh.storage.base import Storage
from fluxmesh.storage.registry import expanded, open_storage, resolved_url

CLOSE_WITHIN_S: Final = 5.0
COMMON: Final = ("url", "namespace", "log_level", "log_format")


def overrides(options: Options, *more: str) -> dict[str, Any]:
    """What the flags say about settings; None where a flag was not given."""
    return {name: getattr(options, name, None) for name in (*COMMON, *more)}


def settings_of(options: Options, *more: str) -> Settings:
    """The settings in force for a command. Raises InvalidOption; refuses memory://."""
    settings = load_settings(overrides(options, *more))
    refuse_memory(settings.url)
    resolved_url(settings.url)
    return settings


def refuse_memory(url: str | None) -> None:
    if url is not None and url.partition(":")[0].lower() == "memory":
        raise InvalidOption(
            "url",
            "memory:// lives inside one Python process, where no command can reach it",
            hint="use SQLite, for example --url sqlite:///fluxmesh.db",
        )


def described(url: str | None) -> str:
    """The storage as a URL that means the same from every folder, without its password."""
    full = resolved_url(url)
    scheme, _, rest = full.partition("://")
    if scheme == "sqlite" and rest.startswith("/"):
        return f"sqlite:///{expanded(unquote(rest[1:])).absolute()}"
    return masked(full)


def say_storage(settings: Settings, url: str | None = None) -> None:
    """Tell on stderr which storage this command works on."""
    where = described(url or settings.url)
    announce(
        settings,
        f"storage: {where} (namespace {settings.namespace})",
        event="storage",
        url=where,
        namespace=settings.namespace,
    )


def announce(settings: Settings, text: str, *, event: str, **fields: object) -> None:
    """A line on stderr that no log level hides: a sentence, or an event where logs are JSON."""
    if settings.log_format == "json":
        output.note(output.encoded({"event": event, "level": "info", "logger": "cli", **fields}).decode())
    else:
        output.note(output.safe(text))


@asynccontextmanager
async def storage_of(settings: Settings, *, create: bool = False) -> AsyncIterator[Storage]:
    """The storage of these settings, closed at the end. Only daemons and the demo may create it."""
    try:
        storage = await open_storage(resolved_url(settings.url), settings, create=create)
    except StorageMissing as error:
        found = databases_in(Path.cwd())
        if not found:
            raise
        raise StorageMissing(
            error.message, hint=f"here is: {', '.join(found)}; try --url {found[0]}"
        ) from None
    try:
        yield storage
    finally:
        # What the command did is done: a close that hangs must not turn it into a failure.
        with suppress(TimeoutError):
            await asyncio.wait_for(storage.close(), CLOSE_WITHIN_S)


def opener(settings: Settings, url: str | None = None) -> Callable[[bool], Awaitable[Storage]]:
    """How a daemon opens its storage: called with whether it shall work inside the calling thread."""

    async def open_it(inline: bool) -> Storage:  # noqa: FBT001 - the worker's own interface
        return await open_storage(resolved_url(url or settings.url), settings, create=True, inline=inline)

    return open_it


def with_storage(options: Options, command: Callable[[Storage, Settings], Awaitable[int]]) -> int:
    """Run a one-shot command on the storage that its options name, which must exist."""
    settings = settings_of(options)
    say_storage(settings)

    async def main() -> int:
        async with storage_of(settings) as storage:
            return await command(storage, settings)

    return run_async(main())
