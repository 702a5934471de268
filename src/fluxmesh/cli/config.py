"""fluxmesh config show: every setting, its value, and where the value stands."""

from __future__ import annotations

from fluxmesh.cli import output
from fluxmesh.cli.parser import Options, Parser, add_verb, add_verbs, json_option
from fluxmesh.cli.session import described, overrides, refuse_memory, say_storage
from fluxmesh.config import NAMES, SECRETS, settings_with_sources


def configure(parser: Parser) -> None:
    verbs = add_verbs(parser)
    show = add_verb(
        verbs,
        "show",
        _show,
        "show the settings in force and where each stands",
        "fluxmesh config show",
        "FLUXMESH_LEASE_S=10 fluxmesh config show --json",
    )
    json_option(show)


def _show(options: Options) -> int:
    flags = overrides(options)
    settings, sources = settings_with_sources(flags)
    refuse_memory(settings.url)
    say_storage(settings)
    rows: list[tuple[str, object, str]] = []
    for name in NAMES:
        value = getattr(settings, name)
        if name == "url":
            value = described(value)
        if name in SECRETS and value is not None:
            value = "***"
        source = sources.get(name, "default")
        if flags.get(name) is not None:
            source = f"--{name.replace('_', '-')}"
        rows.append((name, value, source))
    if options.json:
        output.json_document({name: {"value": value, "source": source} for name, value, source in rows})
    else:
        table = [(name, "" if value is None else str(value), source) for name, value, source in rows]
        output.table(("SETTING", "VALUE", "SOURCE"), table)
    return 0
