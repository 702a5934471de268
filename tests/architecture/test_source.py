"""Sizes, clocks and loose ends of the source, read as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tests.architecture import gates


def findings(paths: Iterable[Path], gate: Callable[[str], list[str]]) -> list[str]:
    return [
        f"{path.relative_to(gates.ROOT)}: {finding}"
        for path in paths
        for finding in gate(path.read_text(encoding="utf-8"))
    ]


def test_there_is_source_to_judge() -> None:
    assert len(gates.python_files(gates.SRC)) > 1


def test_a_source_file_has_at_most_500_lines() -> None:
    paths = [*gates.python_files(gates.SRC), *gates.SRC.rglob("*.sql")]
    assert findings(paths, lambda text: gates.long_file(text, gates.MAX_SOURCE_LINES)) == []


def test_a_test_file_has_at_most_800_lines() -> None:
    paths = gates.python_files(gates.ROOT / "tests")
    assert findings(paths, lambda text: gates.long_file(text, gates.MAX_TEST_LINES)) == []


def test_a_function_has_at_most_70_lines() -> None:
    assert findings(gates.python_files(gates.SRC), gates.long_functions) == []


def test_only_clock_py_reads_the_clock() -> None:
    paths = [path for path in gates.python_files(gates.SRC) if path != gates.SRC / "clock.py"]
    assert findings(paths, gates.clock_reads) == []


def test_nothing_in_the_source_is_left_for_later() -> None:
    paths = [*gates.python_files(gates.SRC), *gates.SRC.rglob("*.sql")]
    assert findings(paths, gates.unfinished) == []
