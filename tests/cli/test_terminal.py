"""What a terminal shows: bars and tables. In a pipe there are none (every other test)."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

from tests.cli.harness import FLUXMESH, environment, submit

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(*args: str, cwd: Path, temporary: Path | None = None) -> tuple[int, str]:
    """Exit code and everything that was written to the terminal."""
    ours, theirs = pty.openpty()
    terminal = environment({"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"})
    if temporary is not None:
        terminal["TMPDIR"] = str(temporary)
    with subprocess.Popen(
        [*FLUXMESH, *args], cwd=cwd, env=terminal, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                data = os.read(ours, 65_536)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            seen += data
        os.close(ours)
        return process.wait(30), seen.decode()


def test_a_wait_draws_a_bar(served: str, tmp_path: Path) -> None:
    code, seen = on_a_terminal(
        "submit", "--url", served, "--task", "slow_task", "--args", "[1]", "--wait", cwd=tmp_path
    )
    assert code == 0
    assert "━" in seen
    assert "\x1b[" in seen
    assert re.search(r"step \d+ of 20", ESCAPES.sub("", seen))
    assert "100%" in seen
    assert '{"duration":1' in seen


def test_a_list_is_drawn_as_a_table(url: str, tmp_path: Path) -> None:
    submit(url, tmp_path, "[red]some.task[/red]")
    code, seen = on_a_terminal("jobs", "list", "--url", url, cwd=tmp_path)
    assert code == 0
    assert "─" in seen
    plain = re.sub(r"\s", "", ESCAPES.sub("", seen))
    assert "[red]" in plain


def test_json_on_a_terminal_is_still_one_plain_document(url: str, tmp_path: Path) -> None:
    code, seen = on_a_terminal("jobs", "list", "--url", url, "--json", cwd=tmp_path)
    assert code == 0
    assert seen.replace("\r\n", "\n").endswith('{"items":[],"next_cursor":null}\n')
    assert "\x1b" not in seen


def test_the_demo_draws_bars_tables_and_a_stack_and_throws_its_database_away_if_told(tmp_path: Path) -> None:
    line = ("demo", "--no-keep", "--dir", str(Path(__file__).parent))
    code, seen = on_a_terminal(*line, cwd=tmp_path, temporary=tmp_path)
    assert code == 0
    plain = ESCAPES.sub("", seen)
    assert "━" in plain
    assert "MEDIAN WAIT" in plain
    assert "FileNotFoundError" in plain
    assert "demo --keep" in plain
    assert list(tmp_path.iterdir()) == []
