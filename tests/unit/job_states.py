"""docs/job-states.md is made from the one table of transitions: `python -m tests.unit.job_states`."""

from __future__ import annotations

from pathlib import Path

from fluxmesh.job import TERMINAL, TRANSITIONS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "job-states.md"
_HEAD = """\
# The states of a job

Made from `TRANSITIONS` in `src/fluxmesh/job.py` by `python -m tests.unit.job_states`; a test compares them.
A job is always in exactly one state. Nothing but these moves happens to it.
"""


def _diagram() -> list[str]:
    lines = [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> SCHEDULED: submit with a delay",
        "    [*] --> PENDING: submit",
    ]
    for before, moves in TRANSITIONS.items():
        lines += [f"    {before} --> {after}" for after in moves]
    lines += [f"    {status} --> [*]" for status in TRANSITIONS if status in TERMINAL]
    return [*lines, "```"]


def _table() -> list[str]:
    lines = ["| from | to | by |", "|---|---|---|"]
    for before, moves in TRANSITIONS.items():
        lines += [f"| {before} | {after} | {reason} |" for after, reason in moves.items()]
        if not moves:
            lines.append(f"| {before} | | nothing: it is over |")
    return lines


def render() -> str:
    return "\n".join([_HEAD, *_diagram(), "", *_table(), ""])


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(render(), encoding="utf-8")
