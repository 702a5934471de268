"""The statements of this backend, read from sql/*.sql and bound to one namespace.

A file holds statements, each after a line `-- :name <what>`; they are looked up as "file.what".
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources

_NAME = re.compile(r"^-- :name (\w+)\s*$", re.MULTILINE)
_TABLE = re.compile(r"<([a-z_]+)>")


@lru_cache(maxsize=1)
def _texts() -> dict[str, str]:
    texts: dict[str, str] = {}
    for entry in sorted(resources.files(__package__).joinpath("sql").iterdir(), key=lambda item: item.name):
        stem, _, suffix = entry.name.rpartition(".")
        if suffix != "sql":
            continue
        parts = _NAME.split(entry.read_text(encoding="utf-8"))
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            texts[f"{stem}.{name}"] = re.sub(r"^\s*--.*\n", "", text, flags=re.MULTILINE).strip()
    return texts


class Statements(dict[str, str]):
    """Every statement by name, for one namespace. A missing name is a KeyError at first use."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace
        for name, text in _texts().items():
            self[name] = _TABLE.sub(lambda match: f'"{namespace}:{match[1]}"', text)
