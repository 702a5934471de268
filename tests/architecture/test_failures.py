"""docs/failures.md names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.architecture.gates import ROOT

PAGE = (ROOT / "docs" / "failures.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`((?:tests|src)/[\w/]+\.py)(?:::(\w+))?`", PAGE)))


def test_rows_name_tests() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_is_there(file: str, name: str) -> None:
    text = (ROOT / file).read_text("utf-8")
    assert not name or f"def {name}(" in text


def test_every_row_says_what_shows_it() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    shown = [
        row.rstrip(" |").rpartition("| ")[2] for row in rows if not row.startswith(("| failure", "| killed"))
    ]
    assert [cell for cell in shown if "::" not in cell and ".py`" not in cell and "no test" not in cell] == []
