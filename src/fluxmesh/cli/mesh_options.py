"""What the command line says of the mesh: one flag for every option of MeshWorker."""

from __future__ import annotations

import argparse
import os
from typing import Any, Final

from fluxmesh.cli.parser import Options, Parser, comma_list, count
from fluxmesh.config import ENV_PREFIX, NAMES, Settings
from fluxmesh.errors import InvalidOption
from fluxmesh.mesh.keyfiles import read_keys

MESH_SETTINGS: Final = tuple(name for name in NAMES if name == "mesh" or name.startswith("mesh_"))
KEY: Final = "mesh_encryption_key"
KEY_VARIABLE: Final = ENV_PREFIX + KEY.upper()
_SWITCHES: Final = {
    "mesh": "be a node of the mesh: workers that know each other (no)",
    "mesh_steal": "take work from others and give it (yes)",
    "mesh_insecure": "permit to listen beyond this machine without a key (no)",
    "mesh_optional": "run without the mesh if it cannot be had (no)",
}
_NUMBERS: Final[dict[str, tuple[int, int, str]]] = {
    "mesh_port": (1_024, 65_534, "UDP port, TCP one above; process i of several: + 2 i (7946)"),
    "mesh_local_buffer": (0, 10_000, "most jobs held and not started (64)"),
    "mesh_steal_batch": (1, 1_000, "most jobs of one steal (4)"),
    "mesh_steal_threshold": (0, 10_000, "ask others when no more than so many are held (2)"),
    "mesh_virtual_nodes": (1, 1_000, "points on the ring (150)"),
    "mesh_protocol_period_ms": (50, 60_000, "time between two probes (500)"),
    "mesh_indirect_ping_count": (0, 16, "others asked to probe a silent member (3)"),
    "mesh_suspicion_multiplier": (1, 100, "patience with a suspect (4)"),
}
_SHARES: Final[dict[str, tuple[float, float, str]]] = {
    "mesh_affinity_weight": (0, 1, "0: work goes anywhere, 1: strictly where its key belongs (0.7)"),
    "mesh_steal_rate_limit": (0, 1_000_000, "steal requests per peer and second, 0 = any (10)"),
}
_TEXTS: Final = {
    "mesh_bind_addr": ("ADDRESS", "where to listen (0.0.0.0 with a key, 127.0.0.1 without)"),
    "mesh_advertise_addr": ("ADDRESS", "where others reach it: IP, name or host:port (found out)"),
}


def flag_of(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def add_mesh_options(parser: Parser) -> None:
    group = parser.add_argument_group("mesh (each is also a setting: FLUXMESH_MESH_PORT …)")
    for name, text in _SWITCHES.items():
        group.add_argument(
            flag_of(name), dest=name, action=argparse.BooleanOptionalAction, default=None, help=text
        )
    group.add_argument(
        "--mesh-seeds", type=comma_list, metavar="A,B", help="workers to join by: host or host:port"
    )
    for name, (low, high, text) in _NUMBERS.items():
        group.add_argument(flag_of(name), dest=name, type=count(low, high), metavar="N", help=text)
    for name, (least, most, text) in _SHARES.items():
        group.add_argument(flag_of(name), dest=name, type=_number(least, most), metavar="X", help=text)
    for name, (metavar, text) in _TEXTS.items():
        group.add_argument(flag_of(name), dest=name, metavar=metavar, help=text)
    group.add_argument(
        "--mesh-encryption-key",
        type=_keys,
        metavar="KEYS",
        help="base64 keys, or @FILE, several with commas; the first seals, all open",
    )


def _number(least: float, most: float) -> Any:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:80]} is out of range, {least:g} to {most:,.0f}")
        return value

    return number


def _keys(text: str) -> str:
    """As it was given: every process reads @FILE by itself. What can be read only once, such as a pipe, is
    read now. No message shows a key."""
    if not text.startswith("@") or os.path.isfile(text[1:]) or not os.path.exists(text[1:]):
        return text
    try:
        return ",".join(read_keys(text[1:])[0])
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(error.message.partition(": ")[2]) from None


def mesh_overrides(options: Options) -> dict[str, Any]:
    """The settings that flags were given for."""
    return {name: value for name in MESH_SETTINGS if (value := getattr(options, name, None)) is not None}


def mesh_flags(options: Options) -> list[str]:
    """The same for a child's command line, the key apart."""
    flags: list[str] = []
    for name, value in mesh_overrides(options).items():
        if isinstance(value, bool):
            flags.append(flag_of(name) if value else flag_of(name).replace("--", "--no-", 1))
        elif name != KEY:
            flags += [flag_of(name), ",".join(value) if isinstance(value, tuple) else str(value)]
    return flags


def idle_settings(options: Options, settings: Settings) -> list[str]:
    """What is set for a mesh, other than by default, while the worker is in none: flags, and settings by
    their names. None if the mesh was switched off on purpose, by a flag."""
    if settings.mesh or getattr(options, "mesh", None) is False:
        return []
    default = Settings()
    return [
        name if getattr(options, name, None) is None else flag_of(name)
        for name in MESH_SETTINGS
        if getattr(settings, name) != getattr(default, name)
    ]


def refuse_without_worker(options: Options) -> None:
    """Options of the mesh for a command that runs no worker. Raises InvalidOption."""
    for name in mesh_overrides(options):
        raise InvalidOption(flag_of(name), "given together with --no-standalone", hint="it is for the worker")
