"""The gates as pure functions over source text: each answers with what it found, one line a finding."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "fluxmesh"

MAX_SOURCE_LINES = 500
MAX_TEST_LINES = 800
MAX_FUNCTION_LINES = 70

CLOCK_NAMES = {
    "time": {
        "time",
        "time_ns",
        "monotonic",
        "monotonic_ns",
        "perf_counter",
        "perf_counter_ns",
        "process_time",
        "process_time_ns",
        "thread_time",
        "thread_time_ns",
        "clock_gettime",
        "clock_gettime_ns",
    },
    "datetime.datetime": {"now", "utcnow", "today"},
    "datetime.date": {"today"},
}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")


def python_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.py"))


def long_file(text: str, limit: int) -> list[str]:
    lines = len(text.splitlines())
    return [f"{lines} lines, at most {limit}"] if lines > limit else []


def long_functions(text: str, limit: int = MAX_FUNCTION_LINES) -> list[str]:
    """Length runs from `def` to the last line, docstring and nested functions included."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > limit:
                found.append(f"{node.lineno}: {node.name} has {lines} lines, at most {limit}")
    return found


def unfinished(text: str) -> list[str]:
    lines = enumerate(text.splitlines(), start=1)
    return [f"{number}: {match.group()}" for number, line in lines if (match := UNFINISHED.search(line))]


def clock_reads(text: str) -> list[str]:
    """Every mention of a function that reads a clock, called or handed on, under any import name.

    `loop.time()` is not one: the event loop is the clock of the services that run on it.
    """
    tree = ast.parse(text)
    names = dict(_imported_names(tree))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = _resolve(node.value, names), node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            owner, _, name = names.get(node.id, "").rpartition(".")
        else:
            continue
        if owner is not None and name in CLOCK_NAMES.get(owner, ()):
            found.append(f"{node.lineno}: {owner}.{name}")
    return found


def _imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Pairs of a local name and the dotted name it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _resolve(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, names)
        return f"{owner}.{node.attr}" if owner else None
    return None
