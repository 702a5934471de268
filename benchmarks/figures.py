"""A figure: what was measured, how often, against which bound, on which machine. Pure but for `machine`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

ROOT: Final = Path(__file__).resolve().parents[1]
TOLERANCE: Final = 0.15  # of the floor, to the referee of the same run
SOUND: Final = "sound"


class CheckFailed(Exception):
    """What was measured did not do its work right, so there is no figure."""


class Bound(Struct, frozen=True):
    """What the figure should be. `of` says what is held to it: the median or the worst value of the
    repetitions, or the ratio of the median to the floor's figure."""

    limit: float
    at_most: bool = False
    of: Literal["median", "worst", "ratio to floor"] = "median"

    def text(self, unit: str) -> str:
        measured_in = "" if self.of == "ratio to floor" else f" {unit}"
        return f"{self.of} {'<=' if self.at_most else '>='} {self.limit:g}{measured_in}"

    def met_by(self, values: Sequence[float], floor: Floor | None = None) -> bool | None:
        """None where it takes a floor to tell, and there is none."""
        if self.of == "worst":
            value = max(values) if self.at_most else min(values)
        else:
            value = statistics.median(values)
        if self.of == "ratio to floor":
            if floor is None:
                return None
            value /= floor.median
        return value <= self.limit if self.at_most else value >= self.limit


class Floor(Struct, frozen=True):
    """Which figure of the floor the ratio is to, and its value in this run."""

    name: str
    median: float


class Figure(Struct, frozen=True, kw_only=True):
    """One measurement. `values` has one value for each repetition, none left out."""

    name: str
    unit: str
    values: list[float]
    parameters: dict[str, Any]
    bound: Bound | None = None
    floor: Floor | None = None
    details: dict[str, Any] = {}

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Run(Struct, frozen=True, kw_only=True):
    """What all lines of a run share."""

    storage: str
    started_at: str
    revision: str | None
    machine: dict[str, Any]
    configuration: dict[str, Any]
    floor_sha256: str

    @property
    def configuration_sha256(self) -> str:
        text = json.dumps(self.configuration, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def rounded(value: float) -> float:
    """Five significant digits: more would only pretend."""
    return float(f"{value:.5g}")


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: a value that was really seen."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and the longest."""
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: rounded(percentile(values, share)) for name, share in shares.items()}


def judged(ratios: Mapping[str, Sequence[float]]) -> str:
    """SOUND if each rate of the floor is close to the referee's, else why the figures are void.

    `ratios` are taken pair by pair, ours to the referee's run beside it."""
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    off = [f"{name} is {ratio:.2f} of the referee" for name, ratio in medians.items() if _is_off(ratio)]
    return "figures void: the floor's " + ", ".join(off) if off else SOUND


def _is_off(ratio: float) -> bool:
    return abs(ratio - 1) > TOLERANCE


def line(figure: Figure, run: Run, *, load: float, standing: str) -> dict[str, Any]:
    """The JSON line of a figure. `standing`: what the comparison of the floor with its referee came to."""
    told: dict[str, Any] = {
        "name": figure.name,
        "storage": run.storage,
        "parameters": figure.parameters,
        "values": [rounded(value) for value in figure.values],
        "median": rounded(figure.median),
        "unit": figure.unit,
        "floor": None,
        "ratio_to_floor": None,
        "bound": None,
        "bound_met": None,
        "figures": standing,
        "details": figure.details,
    }
    if figure.floor is not None:
        told["floor"] = {"name": figure.floor.name, "median": rounded(figure.floor.median)}
        told["ratio_to_floor"] = rounded(figure.median / figure.floor.median)
    if figure.bound is not None:
        told["bound"] = figure.bound.text(figure.unit)
        told["bound_met"] = figure.bound.met_by(figure.values, figure.floor)
    return told | _of_run(run, load)


def refused_line(name: str, reason: str, run: Run, *, load: float) -> dict[str, Any]:
    """The line of a measurement that has no figure."""
    return {"name": name, "storage": run.storage, "refused": reason} | _of_run(run, load)


def _of_run(run: Run, load: float) -> dict[str, Any]:
    return {
        "load_before": rounded(load),
        "machine": run.machine,
        "configuration_sha256": run.configuration_sha256,
        "floor_sha256": run.floor_sha256,
        "revision": run.revision,
        "run": run.started_at,
    }


def summary(told: dict[str, Any]) -> str:
    """The line in words, for who watches."""
    if "refused" in told:
        return f"{told['storage']}: {told['name']}: NO FIGURE, {told['refused']}"
    text = (
        f"{told['storage']}: {told['name']} {_words(told['parameters'])}: {told['median']:,g} {told['unit']}"
    )
    if told["ratio_to_floor"] is not None:
        text += f", {told['ratio_to_floor']:.2f} of the floor"
    if told["bound"] is not None:
        text += f", {told['bound']}: {_MET[told['bound_met']]}"
    return text


_MET: Final = {True: "met", False: "NOT MET", None: "not known without the floor"}


def _words(parameters: dict[str, Any]) -> str:
    return "(" + ", ".join(f"{name} {value}" for name, value in parameters.items()) + ")"


# -- this machine --------------------------------------------------------------------------------------


def machine(folder: Path, storage: Mapping[str, Any]) -> dict[str, Any]:
    """What the figures depend on and the program does not decide."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "file_system": _file_system(folder),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "msgspec": msgspec.__version__,
        **storage,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for text in info.read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _file_system(folder: Path) -> str:
    """The type of the file system, from the mount with the longest matching path; "" if it is not told."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return ""
    real = str(folder.resolve())
    best, kind = "", ""
    for text in mounts.read_text().splitlines():
        _, point, found, *_ = text.split(" ")
        if len(point) >= len(best) and (real + "/").startswith(point.rstrip("/") + "/"):
            best, kind = point, found
    return kind


def revision() -> str | None:
    """The commit, with "+" behind it if files differ from it; None outside a checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--", "src", "benchmarks") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.strip()
