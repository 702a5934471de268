"""Settings: one table of defaults, read from arguments, flags, environment and files, in this order.

arguments > flags > FLUXMESH_* > fluxmesh.toml or [tool.fluxmesh] of pyproject.toml > defaults. An unknown
key anywhere is an error with a suggestion.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, ParamSpec, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from fluxmesh.errors import InvalidOption, masked

ENV_PREFIX: Final = "FLUXMESH_"
TEST_PREFIX: Final = "FLUXMESH_TEST_"  # hooks of the test-suite; not settings
DEFAULT_DATABASE: Final = "fluxmesh.db"
BATCH_MAX: Final = 1_000

P = ParamSpec("P")
Seconds = Annotated[float, Meta(gt=0, le=10 * 366 * 86_400)]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting with its default. Seconds, bytes and counts; None = off or no cap."""

    url: str | None = None
    namespace: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "fluxmesh"
    app: str | None = None
    durability: Literal["process", "power"] = "process"
    wait_replicas: Annotated[int, Meta(ge=0, le=100)] = 0  # of Redis, that have a job before it is accepted
    lease_s: Annotated[float, Meta(ge=2, le=86_400)] = 6.0
    beat_s: Seconds | None = None  # None: a third of the lease
    reap_s: Annotated[float, Meta(ge=0.1, le=3_600)] = 1.0
    grace_s: Annotated[float, Meta(ge=0, le=86_400)] = 8.0
    hard_grace_s: Annotated[float, Meta(ge=0, le=3_600)] = 1.0
    retire_after_s: Annotated[float, Meta(ge=0, le=3_600)] = 30.0
    stall_limit_s: Annotated[float, Meta(ge=2, le=86_400)] = 300.0  # a process that gives no sign is given up
    keeper: bool = True  # a small process beside a worker inside a program keeps its lease
    timeout_s: Seconds = 300.0
    rest_timeout_s: Seconds = 60.0  # for a job submitted through REST whose task sets no timeout
    max_retries: Annotated[int, Meta(ge=0, le=1_000_000)] = 3
    max_crashes: Annotated[int, Meta(ge=1, le=1_000)] = 3
    max_snoozes: Annotated[int, Meta(ge=0)] | None = None
    max_interruptions: Annotated[int, Meta(ge=0)] | None = None
    result_ttl: Seconds = 86_400.0
    dead_letter_ttl: Seconds = 30 * 86_400.0
    idempotency_ttl: Seconds = 86_400.0
    queue_cap: Count = 1_000_000
    payload_limit_bytes: Annotated[int, Meta(ge=1_024, le=64 << 20)] = 1 << 20
    result_limit_bytes: Annotated[int, Meta(ge=1_024, le=64 << 20)] = 1 << 20
    concurrency: Annotated[int, Meta(ge=1, le=10_000)] = 8
    scheduler_batch_size: Annotated[int, Meta(ge=1, le=BATCH_MAX)] = BATCH_MAX
    on_lease_lost: Literal["continue", "cancel"] = "continue"
    recycle_after_jobs: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 1_000  # of a body process; 0 = never
    recycle_above_mb: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0  # of memory at a job's end; 0 = never
    proof_of_death: bool = True
    webhook_allow_private: bool = False  # webhook_delivery may POST to private and loopback addresses
    # The mesh: what each means, and its checks, stand in mesh/options.py.
    mesh: bool = False  # workers know each other
    mesh_optional: bool = False  # a worker whose mesh cannot be had runs without it
    mesh_port: Annotated[int, Meta(ge=1_024, le=65_534)] = 7_946  # UDP; TCP is one above; child i: + 2 i
    mesh_seeds: str | tuple[str, ...] = ""  # host or host:port, separated by commas
    mesh_steal: bool = True
    mesh_affinity_weight: Annotated[float, Meta(ge=0, le=1)] = 0.7
    mesh_local_buffer: Annotated[int, Meta(ge=0, le=10_000)] = 64
    mesh_steal_batch: Annotated[int, Meta(ge=1, le=BATCH_MAX)] = 4
    mesh_steal_threshold: Annotated[int, Meta(ge=0, le=10_000)] = 2
    mesh_virtual_nodes: Annotated[int, Meta(ge=1, le=1_000)] = 150
    mesh_bind_addr: str | None = None  # None: 0.0.0.0 with a key, 127.0.0.1 without
    mesh_advertise_addr: str | None = None
    mesh_encryption_key: str | tuple[str, ...] | None = None  # the first seals, all open
    mesh_steal_rate_limit: Annotated[float, Meta(ge=0, le=1_000_000)] = 10
    mesh_protocol_period_ms: Annotated[int, Meta(ge=50, le=60_000)] = 500
    mesh_indirect_ping_count: Annotated[int, Meta(ge=0, le=16)] = 3
    mesh_suspicion_multiplier: Annotated[int, Meta(ge=1, le=100)] = 4
    mesh_insecure: bool = False  # listen beyond this machine without a key
    token: str | None = None  # bearer tokens of the server, separated by commas
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    @property
    def beat_every_s(self) -> float:
        return self.lease_s / 3 if self.beat_s is None else self.beat_s

    def __repr__(self) -> str:
        values = ((name, _telling(name, getattr(self, name))) for name in self.__struct_fields__)
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in values)})"


def _telling(name: str, value: Any) -> Any:
    """A setting's value as it may be told to anybody."""
    if name in SECRETS and value is not None:
        return "***"
    return masked(value) if name == "url" and isinstance(value, str) else value


SECRETS: Final = frozenset({"token", "mesh_encryption_key"})
NAMES: Final = tuple(Settings.__struct_fields__)
_BOOLS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _unknown(where: str, name: str, known: tuple[str, ...]) -> InvalidOption:
    lowered = [one.lower() for one in known]
    close = [near for near in known if near.lower() in difflib.get_close_matches(name.lower(), lowered, n=1)]
    hint = f"did you mean {close[0]!r}?" if close else "`fluxmesh config show` lists every setting"
    return InvalidOption(name, f"unknown setting in {where}", hint=hint)


def _from_env(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, text in environ.items():
        if not key.startswith(ENV_PREFIX) or key.startswith(TEST_PREFIX):
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        if name not in NAMES:
            raise _unknown("the environment", key, tuple(ENV_PREFIX + n.upper() for n in NAMES))
        found[name] = text
    return found


def _from_file(folder: Path) -> tuple[dict[str, Any], str]:
    own = folder / "fluxmesh.toml"
    project = folder / "pyproject.toml"
    for path in (own, project):
        if not os.path.isfile(path):  # False, too, in a folder that may not be looked into
            continue
        try:
            data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            if path == project:
                continue
            raise InvalidOption(path.name, f"cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            if path == project:
                continue  # not ours to judge; its owner hears of it from other tools
            raise InvalidOption(path.name, f"is not valid TOML: {error}") from None
        tools = data.get("tool")
        table: object = data if path == own else tools.get("fluxmesh", {}) if isinstance(tools, dict) else {}
        if not isinstance(table, dict):
            raise InvalidOption(path.name, "tool.fluxmesh is not a table", hint="[tool.fluxmesh]")
        for name in table:
            if name not in NAMES:
                raise _unknown(path.name, name, NAMES)
        if table or path == own:
            return dict(table), path.name
    return {}, ""


def _coerced(name: str, value: Any, source: str) -> Any:
    if isinstance(value, str) and Settings.__annotations__[name] in ("bool", bool):
        if value.lower() not in _BOOLS:
            told = f"{value!r} from {source} is not yes or no"
            raise InvalidOption(name, told, hint="yes, true, on, 1; no, false, off, 0")
        return _BOOLS[value.lower()]
    return value


def load_settings(
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """The settings in force. `overrides` (arguments, flags) with value None are left out.

    Raises InvalidOption with the name of the setting, where it stands and what would do.
    """
    return settings_with_sources(overrides, environ=environ, folder=folder)[0]


def settings_with_sources(
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> tuple[Settings, dict[str, str]]:
    """The same, and for each setting that is not at its default where its value stands."""
    values, where = _from_file(Path.cwd() if folder is None else folder)
    sources = dict.fromkeys(values, where)
    for name, value in _from_env(os.environ if environ is None else environ).items():
        values[name] = value
        sources[name] = ENV_PREFIX + name.upper()
    for name, value in (overrides or {}).items():
        if name not in NAMES:
            raise _unknown("the arguments", name, NAMES)
        if value is not None:
            values[name] = value
            sources[name] = "the arguments"
    settings = Settings()
    for name, value in values.items():
        settings = msgspec.structs.replace(
            settings, **{name: _convert(name, _coerced(name, value, sources[name]), sources[name])}
        )
    return _checked_together(settings), sources


def _convert(name: str, value: Any, source: str) -> Any:
    if isinstance(value, dict):
        # What stands in it is not shown: it may be a key.
        inner = [f"{name}_{key}" for key in value if f"{name}_{key}" in NAMES]
        hint = f"no table: write {inner[0]} = … beside the others" if inner else _what_would_do(name)
        raise InvalidOption(name, f"is a table in {source}", hint=hint)
    try:
        # strict=False reads numbers out of environment texts; a wrong type still fails.
        return getattr(msgspec.convert({name: value}, Settings, strict=False), name)
    except msgspec.ValidationError as error:
        message = str(error).replace("`", "'").split(" - at ")[0]
        told = f"{_telling(name, value)!r} from {source}"
        raise InvalidOption(name, f"{told}: {message}", hint=_what_would_do(name)) from None


def _what_would_do(name: str) -> str:
    """The values that a setting takes, in words. Only for a message: working it out is slow."""
    note = get_type_hints(Settings, include_extras=True)[name]
    for part in (note, *get_args(note)):
        if get_origin(part) is Literal:
            return " or ".join(str(choice) for choice in get_args(part))
        for meta in (item for item in get_args(part) if isinstance(item, Meta)):
            low = meta.ge if meta.ge is not None else meta.gt
            if low is None:
                return "letters, digits, dots and dashes, at most 64, the first a letter or a digit"
            above = "more than " if meta.ge is None else ""
            return f"{above}{low:,}" + (" or more" if meta.le is None else f" to {meta.le:,}")
    return "see `fluxmesh config show`"


def telling_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """A constructor whose TypeError for an unknown argument says which one may have been meant."""
    names = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
                meant = f"settings={{{name!r}: …}}" if name in NAMES else "".join(close)
                hint = f"; did you mean {meant}?" if meant else ""
                raise TypeError(f"unexpected argument {name!r}{hint}")
        init(*args, **kwargs)

    return told


def _checked_together(settings: Settings) -> Settings:
    if settings.beat_every_s > settings.lease_s / 2:
        raise InvalidOption(
            "beat_s",
            f"{settings.beat_every_s:g} s is more than half a lease of {settings.lease_s:g} s",
            hint="leave it out: a third of the lease",
        )
    return settings
