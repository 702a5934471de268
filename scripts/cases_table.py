"""Put the table of the cases into a page, from the lines that their tests have printed.

python scripts/cases_table.py LINES PAGE: replaces what stands between the two marks in PAGE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

BEGIN: Final = "<!-- cases: begin -->"
END: Final = "<!-- cases: end -->"
_HEAD: Final = "| case | storage | run with | measured (bound) | exact | load | passed |"
_RULE: Final = "| --- | --- | --- | --- | ---: | ---: | --- |"


def main() -> int:
    lines, page = Path(sys.argv[1]), Path(sys.argv[2])
    update(page, lines.read_text("utf-8"))
    return 0


def update(page: Path, lines: str) -> None:
    """Replace the table in the page; the rest of it stays as it is."""
    before, found, rest = page.read_text("utf-8").partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SystemExit(f"{page}: the marks {BEGIN} and {END} are not there")
    page.write_text(f"{before}{BEGIN}\n{table(lines)}\n{END}{after}", "utf-8")


def table(lines: str) -> str:
    rows = [json.loads(line) for line in lines.splitlines() if line.strip()]
    rows.sort(key=lambda row: (row["case"], row["storage"], str(row["parameters"])))
    return "\n".join([_HEAD, _RULE, *(_row(row) for row in rows)])


def _row(row: dict[str, Any]) -> str:
    figures, exact = [], 0
    for what, value in row["measured"].items():
        bound = row["bound"][what]
        if bound == f"= {json.dumps(value)}":
            exact += 1  # as it must be: only figures and surprises are worth a reader's time
        else:
            figures.append(f"{what} {value} ({bound})")
    cells = (
        f"{row['case']} {row['title']}",
        row["storage"],
        ", ".join(f"{name} {value}" for name, value in row["parameters"].items()),
        "; ".join(figures),
        str(exact),
        f"{row['load']:g}",
        "yes" if row["passed"] else "**no**",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(main())
