"""Measured figures: kept as JSON lines where FLUXMESH_TEST_MESH_FIGURES names a folder, else only judged."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER_ENV = "FLUXMESH_TEST_MESH_FIGURES"


class Detections:
    """How long each observer took to declare each death."""

    def __init__(self, *, nodes: int) -> None:
        self._nodes = nodes
        self.lines: list[dict[str, object]] = []
        self._seconds: list[float] = []

    def add(self, kill: int, victim: str, observer: str, seconds: float) -> None:
        self._seconds.append(seconds)
        self.lines.append(
            {
                "nodes": self._nodes,
                "kill": kill,
                "victim": victim,
                "observer": observer,
                "dead_after_s": round(seconds, 4),
            }
        )

    def __iter__(self) -> Iterable[Mapping[str, object]]:  # type: ignore[override]
        return iter(self.lines)

    @property
    def count(self) -> int:
        return len(self._seconds)

    @property
    def worst(self) -> float:
        return max(self._seconds)

    def quantile(self, share: float) -> float:
        ordered = sorted(self._seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def summary(self) -> str:
        return (
            f"N={self._nodes}: {self.count} detections, p50 {self.quantile(0.5):.2f} s,"
            f" p99 {self.quantile(0.99):.2f} s, worst {self.worst:.2f} s"
        )


def keep(name: str, lines: Iterable[Mapping[str, object]]) -> None:
    folder = os.environ.get(FOLDER_ENV)
    if folder is None:
        return
    machine = {"python": platform.python_version(), "cpus": os.cpu_count()}
    text = "".join(json.dumps({**line, **machine}) + "\n" for line in lines)
    Path(folder, name).write_text(text, encoding="utf-8")
