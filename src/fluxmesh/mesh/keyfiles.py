"""Keys of the mesh in files: @FILE wherever a key may stand."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Final

from fluxmesh.errors import InvalidOption, shown

KEYGEN_HINT: Final = (
    "make a key with `fluxmesh mesh keygen` and give it to all workers as mesh_encryption_key"
)
FILE_MOST_BYTES: Final = 4 << 10


def given_keys(texts: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The keys with those of each @FILE in its place, and the files that everybody on this machine may read.
    Raises InvalidOption."""
    keys: list[str] = []
    files_open = []
    for text in texts:
        if not text.startswith("@"):
            keys.append(text)
            continue
        found, is_open = read_keys(text[1:])
        keys += found
        if is_open:
            files_open.append(text[1:])
    return keys, tuple(files_open)


def read_keys(path: str) -> tuple[list[str], bool]:
    """The keys of a file, separated by commas or white space, and whether everybody may read it. Raises
    InvalidOption, which shows the name of the file and nothing that stands in it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(FILE_MOST_BYTES).decode()
    except OSError as error:
        raise _refused(path, error.strerror or "cannot be read") from None
    except ValueError:
        raise _refused(path, "is no file of UTF-8 text") from None
    keys = text.replace(",", " ").split()
    if not keys:
        raise _refused(path, "holds no key")
    return keys, stat.S_ISREG(mode) and bool(mode & stat.S_IROTH)


def _refused(path: str, why: str) -> InvalidOption:
    return InvalidOption("mesh_encryption_key", f"{shown(path)}: {why}", hint=f"@FILE; {KEYGEN_HINT}")
