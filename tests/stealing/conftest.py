"""The labs of the cases, for what workers of a mesh do with each other's work."""

from __future__ import annotations

from tests.cases.conftest import (  # noqa: F401 - fixtures and hooks
    _adoptive_parent,
    _redis,
    _running,
    lab,
    opener,
    part_beside,
    pytest_configure,
    pytest_generate_tests,
    pytest_terminal_summary,
    site,
)
