"""Write docs/rest.md and docs/cli.md from the code: the OpenAPI document and the parsers of the commands.

python scripts/reference.py [--check]: with --check nothing is written, and an old page makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from fluxmesh.api.access import Access
from fluxmesh.api.app import create_app
from fluxmesh.api.store import Store
from fluxmesh.cli.main import COMMANDS, build_parser
from fluxmesh.cli.parser import common_options
from fluxmesh.clock import system_clock
from fluxmesh.config import Settings
from fluxmesh.storage.base import Storage

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
_REST_HEAD: Final = """\
# REST

Made from the OpenAPI document by `python scripts/reference.py`; a test compares them. A running server shows
the same at `/docs`, and for machines at `/openapi.json`. Start one with `fluxmesh server`; Python programs
may ask it through `fluxmesh.client`.
"""
_CLI_HEAD: Final = """\
# The command line

Made from the parsers of the commands by `python scripts/reference.py`; a test compares them.
`fluxmesh COMMAND --help` shows the same. Data go to standard output, everything else to standard error.
"""
_OF_PAGES: Final = ("items", "next_cursor", "partial")
EVERY_ROUTE: Final = ("401", "403", "408", "422", "500", "503")
_EXIT_CODES: Final = """\
## Exit codes

| code | meaning |
| ---: | --- |
| 0 | done; a daemon: stopped by one signal |
| 1 | failed; a daemon: hurried by a second signal, or its `--id` was taken over by another |
| 2 | wrong usage |
| 3 | the app cannot be imported |
| 4 | the storage is missing or cannot be reached, or a file of it may not be read or written |
| 5 | not authorised: Redis refuses the login, or what this user may do there |
| 6 | no such job, or its state does not allow it; in a mesh, no such worker or ring |
| 10 | the job that was waited for did not complete |
| 124 | the wait took too long |
| 130, 143 | interrupted, terminated |
"""
_EVERYWHERE: Final = frozenset(
    {"--help", *(a.option_strings[-1] for a in common_options()._actions if a.option_strings)}
)


def rest_page() -> str:
    """Every route with its parameters, body and answers, and the schemas they speak of."""
    document = create_app(
        Store(open_storage=_none, settings=Settings(), clock=system_clock()), Access()
    ).openapi()
    parts = [_REST_HEAD, document["info"]["description"], "", *_everywhere(document), ""]
    for tag, routes in _by_tag(document).items():
        parts += [f"## {tag[:1].upper()}{tag[1:]}", ""]
        for method, path, operation in routes:
            parts += _route(method, path, operation)
    parts += ["## Schemas", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += [f"### {name}", "", *_schema(schema), ""]
    return "\n".join(parts).rstrip() + "\n"


async def _none(_inline: bool) -> Storage:  # noqa: FBT001 - the signature is the store's
    raise AssertionError("the reference opens no storage")


def _by_tag(document: Mapping[str, Any]) -> dict[str, list[tuple[str, str, Any]]]:
    tags: dict[str, list[tuple[str, str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tags.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    return tags


def _everywhere(document: Mapping[str, Any]) -> Iterator[str]:
    answers = document["paths"]["/healthz"]["get"]["responses"]
    yield from ("Any route may refuse so, by a [Problem](#problem):", "")
    yield from _table(
        ("status", "meaning"), [(status, answers[status]["description"]) for status in EVERY_ROUTE]
    )


def _route(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"### {method} {path}", "", f"{operation['summary']}.")
    if "description" in operation:
        yield from ("", operation["description"])
    parameters = operation.get("parameters", ())
    if parameters:
        rows = [
            (f"`{one['name']}`", one["in"], _bounds(one["schema"]), one.get("description", ""))
            for one in parameters
        ]
        yield from ("", *_table(("parameter", "in", "value", ""), rows))
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield from ("", f"Body: {_kind(content['schema'])}")
        for title, example in content.get("examples", {}).items():
            yield from ("", f"Example, {title}:", "", "```json", _json(example["value"]), "```")
    rows = [
        (
            status,
            answer["description"],
            ", ".join(_kind(c["schema"]) for c in answer.get("content", {}).values()),
        )
        for status, answer in operation["responses"].items()
        if status not in EVERY_ROUTE
    ]
    yield from ("", *_table(("status", "meaning", "body"), rows), "")


def _schema(schema: Mapping[str, Any]) -> Iterator[str]:
    if "description" in schema:
        yield from (" ".join(str(schema["description"]).split()), "")
    properties = schema.get("properties")
    if not properties:
        yield _kind(schema, named=False)
        return
    required = frozenset(schema.get("required", ()))
    rows = [
        (f"`{name}`", _bounds(one), "yes" if name in required else "", _told(one))
        for name, one in properties.items()
    ]
    yield from _table(("field", "value", "always", ""), rows)


def _told(schema: Mapping[str, Any]) -> str:
    found = (one["description"] for one in (schema, *schema.get("anyOf", ())) if "description" in one)
    return str(next(found, ""))


def _kind(schema: Mapping[str, Any], *, named: bool = True) -> str:
    """The type of a value, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{one}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{_json(schema['const'])}`"
    kind = schema.get("type", "any JSON")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    listed = schema.get("properties", {}).get("items")
    return _page_kind(schema["properties"]) if named and listed else str(kind)


def _page_kind(properties: Mapping[str, Any]) -> str:
    more = [f"`{name}` {_kind(one)}" for name, one in properties.items() if name not in _OF_PAGES]
    return ", with ".join([f"page of {_kind(properties['items']['items'])}", *more])


def _bounds(schema: Mapping[str, Any]) -> str:
    found = [_kind(schema)]
    for one in (schema, *schema.get("anyOf", ())):
        for key, word in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("maximum", "<="),
            ("maxLength", "length <="),
        ):
            if key in one:
                found.append(f"{word} {one[key]:,}")
    if "default" in schema:
        found.append(f"default `{_json(schema['default'])}`")
    return ", ".join(found)


def cli_page() -> str:
    """Every command and verb with its usage, arguments and examples."""
    parts = [
        _CLI_HEAD,
        "## Options of all commands",
        "",
        *_arguments(common_options(), everywhere=True),
        "",
        _EXIT_CODES,
    ]
    for noun, parser in _verbs(build_parser(tuple(COMMANDS))):
        parts += [f"## {noun}", "", *_description(parser)]
        below = list(_verbs(parser))
        if not below or parser.get_default("run") is not None:
            parts += _leaf(noun, parser)
        for verb, leaf in below:
            parts += [f"### {noun} {verb}", "", *_description(leaf), *_leaf(f"{noun} {verb}", leaf)]
    return "\n".join(parts).rstrip() + "\n"


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _description(parser: argparse.ArgumentParser) -> Iterator[str]:
    lines = (parser.description or "").splitlines()
    yield from lines[:1]
    yield ""
    if len(lines) > 1:
        yield from ("```", *lines[1:], "```", "")


def _leaf(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    usage = " ".join(
        [f"fluxmesh {command} [OPTION …]", *(_used(a) for a in parser._actions if _is_argument(a))]
    )
    yield from (f"`{usage}`", "", *_arguments(parser), "", *_examples(parser))


def _is_argument(action: argparse.Action) -> bool:
    return not action.option_strings and not isinstance(action, argparse._SubParsersAction)


def _used(action: argparse.Action) -> str:
    """An argument without a flag, as a usage line has it."""
    value = _value(action)
    return {"+": f"{value} [{value} …]", "*": f"[{value} …]"}.get(str(action.nargs), value)


def _arguments(parser: argparse.ArgumentParser, *, everywhere: bool = False) -> Iterator[str]:
    rows = []
    for action in parser._actions:
        known = bool(action.option_strings) and action.option_strings[-1] in _EVERYWHERE
        if (
            action.help == argparse.SUPPRESS
            or isinstance(action, argparse._SubParsersAction)
            or known != everywhere
        ):
            continue
        rows.append((f"`{_written(action)}`", _help(action)))
    if rows:
        yield from _table(("argument", ""), rows)


def _value(action: argparse.Action) -> str:
    value = action.metavar or (
        f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
    )
    return " ".join(value) if isinstance(value, tuple) else value


def _written(action: argparse.Action) -> str:
    value = _value(action)
    if not action.option_strings:
        return f"{value} …" if action.nargs in ("*", "+") else value
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def _help(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default, "prog": "fluxmesh"}
    return f"{text} (required)" if action.option_strings and action.required else text


def _examples(parser: argparse.ArgumentParser) -> Iterator[str]:
    lines = [line.strip() for line in (parser.epilog or "").splitlines()[1:]]
    if lines:
        yield from ("```sh", *lines, "```", "")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield _row(head)
    yield _row(("---",) * len(head))
    for row in rows:
        yield _row(row)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


PAGES: Final = {"rest.md": rest_page, "cli.md": cli_page}


def main() -> int:
    check = "--check" in sys.argv[1:]
    old = [name for name, make in PAGES.items() if not _holds(DOCS / name, make())]
    for name in old:
        if not check:
            (DOCS / name).write_text(PAGES[name](), "utf-8")
        print(f"{name}: {'old' if check else 'written'}")
    return 1 if check and old else 0


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text("utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
