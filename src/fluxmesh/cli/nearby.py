"""Databases beside the one that is missing: whoever forgot to name theirs is shown its name."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Final
from urllib.parse import quote

_MOST_LOOKED_AT: Final = 100
_MOST_NAMED: Final = 3
_MARK_AT: Final = 68  # the application id in the header of a SQLite file (its file format, 1.3)
_MARK: Final = b"FLXM"


def databases_in(folder: Path) -> list[str]:
    """URLs of some databases of ours in this folder, as one would write them there."""
    try:
        candidates = sorted(islice(folder.glob("*.db"), _MOST_LOOKED_AT))
        return [f"sqlite:///{quote(path.name)}" for path in candidates if _is_ours(path)][:_MOST_NAMED]
    except OSError:
        return []


def _is_ours(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            file.seek(_MARK_AT)
            # One that has not been checkpointed yet has its mark in the log, and a folder of bells beside it.
            return file.read(len(_MARK)) == _MARK or path.with_name(f"{path.name}-bells").is_dir()
    except OSError:
        return False
