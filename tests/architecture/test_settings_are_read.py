"""A setting that nobody reads is a lie in the documentation."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import pytest

from fluxmesh.config import NAMES
from fluxmesh.mesh.options import NAMES as MESH_NAMES
from fluxmesh.mesh.options import SETTING_PREFIX

SOURCE = Path(__file__).parents[2] / "src" / "fluxmesh"


def attributes_read(source: str) -> set[str]:
    """Names that occur as `something.name` where something is called settings or ends in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        base = node.value
        owner = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        if owner.strip("_").endswith("settings"):
            found.add(node.attr)
    return found


@lru_cache(maxsize=1)
def read_outside_the_table() -> set[str]:
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.name != "config.py" or path.parent != SOURCE:
            found |= attributes_read(path.read_text(encoding="utf-8"))
    # The beat is read through the property that knows its default; MeshWorker reads its options in one loop.
    through = {"beat_s"} if "beat_every_s" in found else set()
    return found | through | {SETTING_PREFIX + name for name in MESH_NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_somebody_reads_the_setting(name: str) -> None:
    assert name in read_outside_the_table()


def test_the_search_finds_only_what_is_read() -> None:
    assert attributes_read("self._settings.lease_s\nother.grace_s\nsettings.reap_s = 1") == {"lease_s"}
