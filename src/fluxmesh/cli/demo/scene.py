"""Where the demo plays."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from fluxmesh.config import Settings


class Scene(Struct, frozen=True):
    """`folder` is the demo's own; the database may stand elsewhere."""

    settings: Settings
    url: str
    database: Path
    folder: Path
    queue: str
