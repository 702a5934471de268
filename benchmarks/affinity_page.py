"""The figures of `affinity` as a table and a plot in the documentation.

    python -m benchmarks.run_benchmark --storage sqlite,redis --only affinity --out FILE
    python -m benchmarks.affinity_page FILE      writes docs/affinity.svg, and the table into docs/affinity.md

The plot is written by hand: two lines need no library.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from benchmarks.figures import ROOT, CheckFailed

PAGE: Final = ROOT / "docs" / "affinity.md"
PLOT: Final = ROOT / "docs" / "affinity.svg"
MARKS: Final = ("<!-- figures: by benchmarks.affinity_page -->", "<!-- end of figures -->")
NAMES: Final = {"sqlite": "SQLite", "redis": "Redis"}
WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 56


class Row(Struct, frozen=True, kw_only=True):
    """One weight on one storage: medians of its repetitions."""

    storage: str
    weight: float
    hits: float
    load: float
    wait_p50_ms: float
    wait_p95_ms: float
    hot: float
    pick_up_ms: float


def rows(lines: Iterable[dict[str, Any]]) -> list[Row]:
    """By storage and weight. Raises CheckFailed where a figure of one is missing, or was refused."""
    found: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for told in lines:
        weight = told.get("parameters", {}).get("weight")
        if told["name"].startswith("affinity ") and weight is not None:
            found.setdefault((told["storage"], float(weight)), {})[told["name"]] = told
    made = []
    for (storage, weight), figures in sorted(found.items()):
        for name in ("affinity hit rate", "affinity load", "affinity hot key"):
            if name not in figures:
                raise CheckFailed(f"no figure {name} for {storage} at weight {weight:g}")
        runs = figures["affinity hit rate"]["details"]["repetitions"]
        made.append(
            Row(
                storage=storage,
                weight=weight,
                hits=figures["affinity hit rate"]["median"],
                load=figures["affinity load"]["median"],
                wait_p50_ms=statistics.median(run["waits_ms"]["p50"] for run in runs),
                wait_p95_ms=statistics.median(run["waits_ms"]["p95"] for run in runs),
                hot=figures["affinity hot key"]["median"],
                pick_up_ms=statistics.median(run["idle_pick_up_ms"]["p50"] for run in runs),
            )
        )
    if not made:
        raise CheckFailed("no figures of affinity")
    return made


def table(found: Sequence[Row]) -> str:
    head = (
        "| storage | weight | hit rate | busiest worker | wait p50, ms | wait p95, ms | hot key | idle, ms |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    lines += [
        f"| {NAMES[row.storage]} | {row.weight:g} | {row.hits:.2f} | {row.load:.2f} | {row.wait_p50_ms:.0f} |"
        f" {row.wait_p95_ms:.0f} | {row.hot:.2f} | {row.pick_up_ms:.2f} |"
        for row in found
    ]
    return "\n".join(lines)


def origin(lines: Iterable[dict[str, Any]]) -> str:
    """Where the figures come from: of each storage the machine, the load, the repetitions, the revision."""
    told = {}
    for one in lines:
        if one["name"] == "affinity hit rate":
            where = f"{one['machine']['cores']} cores, load {one['load_before']:.1f} before"
            many = f"medians of {len(one['values'])} with {one['parameters']['bursts']} bursts"
            how = f"{many}, revision {str(one['revision'])[:12]}"
            told[one["storage"]] = f"{NAMES[one['storage']]}: {where}, {how}"
    return "; ".join(told[storage] for storage in sorted(told)) + "."


def with_figures(page: str, figures: str) -> str:
    """The page with these figures between the marks, in place of those that are there."""
    before, opening, rest = page.partition(MARKS[0])
    _, closing, after = rest.partition(MARKS[1])
    if not opening or not closing:
        raise CheckFailed(f"the page has no marks {MARKS[0]} … {MARKS[1]}")
    return f"{before}{opening}\n{figures}\n{closing}{after}"


# -- the plot ------------------------------------------------------------------------------------------

_STYLE: Final = """
  text { font: 13px system-ui, sans-serif; fill: #333; }
  .grid { stroke: #ccc; stroke-width: 1; }
  .chance { stroke: #888; stroke-width: 1; stroke-dasharray: 4 4; }
  .sqlite { stroke: #0b62c4; fill: #0b62c4; }
  .redis { stroke: #b3261e; fill: #b3261e; }
  path { fill: none !important; stroke-width: 2; }
  path.redis { stroke-dasharray: 7 4; }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd; }
    .grid { stroke: #444; }
    .chance { stroke: #999; }
    .sqlite { stroke: #6cb6ff; fill: #6cb6ff; }
    .redis { stroke: #ff8a80; fill: #ff8a80; }
  }
"""


def _x(weight: float) -> float:
    return round(LEFT + weight * (WIDTH - LEFT - RIGHT), 1)


def _y(rate: float) -> float:
    return round(HEIGHT - BOTTOM - rate * (HEIGHT - TOP - BOTTOM), 1)


def plot(found: Sequence[Row]) -> str:
    """Hit rate by weight, a line for each storage. No background: it lies on the page's own."""
    title = "Part of jobs that ran on the owner of their key, by weight"
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
        f"<style>{_STYLE}</style>",
    ]
    for tenth in range(0, 11, 2):
        rate = tenth / 10
        parts += [
            f'<line class="grid" x1="{_x(0)}" y1="{_y(rate)}" x2="{_x(1)}" y2="{_y(rate)}"/>',
            f'<text x="{LEFT - 10}" y="{_y(rate) + 4}" text-anchor="end">{rate:g}</text>',
            f'<text x="{_x(rate)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{rate:g}</text>',
        ]
    parts += [
        f'<line class="chance" x1="{_x(0)}" y1="{_y(0.25)}" x2="{_x(1)}" y2="{_y(0.25)}"/>',
        f'<text x="{_x(1)}" y="{_y(0.25) - 6}" text-anchor="end">chance, 1 of 4 workers</text>',
        f'<text x="{_x(0.5)}" y="{HEIGHT - 12}" text-anchor="middle">affinity_weight</text>',
        f'<text x="{LEFT}" y="20">part of jobs that ran on the owner of their key</text>',
    ]
    for number, storage in enumerate(sorted({row.storage for row in found})):
        points = [(_x(row.weight), _y(row.hits)) for row in found if row.storage == storage]
        way = " L ".join(f"{x} {y}" for x, y in points)
        parts.append(f'<path class="{storage}" d="M {way}"/>')
        parts += [f'<circle class="{storage}" cx="{x}" cy="{y}" r="4"/>' for x, y in points]
        left = WIDTH - RIGHT - 80 * (2 - number)
        parts += [
            f'<rect class="{storage}" x="{left}" y="11" width="10" height="10"/>',
            f'<text x="{left + 16}" y="20">{NAMES[storage]}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: Sequence[str]) -> int:
    try:
        (path,) = arguments
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        found = rows(lines)
        page = with_figures(PAGE.read_text(encoding="utf-8"), f"{table(found)}\n\n{origin(lines)}")
    except (CheckFailed, OSError, ValueError) as error:
        print(f"affinity_page: {error}", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    PLOT.write_text(plot(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
