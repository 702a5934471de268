"""Lines that several processes append to one file, each in one write, read back as values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Appender:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, value: Any) -> None:
        os.write(self._file, msgspec.json.encode(value) + b"\n")


def read(path: Path, kind: type[T]) -> list[T]:
    """Every whole line."""
    if not path.exists():
        return []
    data = path.read_bytes()
    decode = msgspec.json.Decoder(kind).decode
    return [decode(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
