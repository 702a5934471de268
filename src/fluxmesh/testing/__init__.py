"""For tests of programs that use FluxMesh, and of storages for it. Names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fluxmesh.clock import ManualClock
    from fluxmesh.testing.driven import DrivenWorker, on_storage_of_its_own

__all__ = ["DrivenWorker", "ManualClock", "on_storage_of_its_own"]

_HOMES = {
    "DrivenWorker": "fluxmesh.testing.driven",
    "ManualClock": "fluxmesh.clock",
    "on_storage_of_its_own": "fluxmesh.testing.driven",
}


def __getattr__(name: str) -> Any:
    """PEP 562: the pytest plugin is loaded by every test run, also by those that do not use it."""
    if name not in __all__:
        raise AttributeError(f"module 'fluxmesh.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
