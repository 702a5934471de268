"""docs/rest.md and docs/cli.md are what the code says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from fluxmesh.cli.main import COMMANDS
from tests.architecture.gates import ROOT

SCRIPT = ROOT / "scripts" / "reference.py"
REST = (ROOT / "docs" / "rest.md").read_text("utf-8")
CLI = (ROOT / "docs" / "cli.md").read_text("utf-8")


def test_the_pages_are_as_they_would_be_made_now() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"run `python scripts/reference.py`: {done.stdout}{done.stderr}"


def test_a_page_that_differs_is_found() -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import reference;"
        " sys.exit(reference._holds(Path(sys.argv[2]), reference.cli_page() + 'x'))"
    )
    page = ROOT / "docs" / "cli.md"
    done = subprocess.run([sys.executable, "-c", code, SCRIPT.parent, page], timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("noun", COMMANDS)
def test_every_command_is_on_its_page(noun: str) -> None:
    assert f"\n## {noun}\n" in CLI


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("jobs show", "ID"),
        ("jobs history", "ID"),
        ("jobs cancel", "ID [ID …]"),
        ("jobs retry", "ID [ID …]"),
        ("jobs wait", "ID"),
        ("dlq replay", "[ID …]"),
        ("dlq discard", "[ID …]"),
        ("queues pause", "QUEUE"),
        ("queues resume", "QUEUE"),
        ("completion", "{bash,zsh,fish}"),
    ],
)
def test_what_a_command_takes_without_a_flag_is_in_its_usage_and_told(command: str, usage: str) -> None:
    section = CLI.partition(f"# {command}\n")[2].partition("\n#")[0]
    assert f"`fluxmesh {command} [OPTION …] {usage}`" in section
    word = usage.strip("[]").partition(" ")[0]
    assert re.search(rf"^\| `{re.escape(word)}.*` \| \w", section, re.MULTILINE), section


@pytest.mark.parametrize("route", ["POST /api/v1/jobs", "GET /api/v1/jobs/{job_id}/wait", "GET /readyz"])
def test_routes_are_on_their_page(route: str) -> None:
    assert f"\n### {route}\n" in REST


def test_every_link_of_the_page_leads_somewhere() -> None:
    heads = {line.lstrip("# ").lower() for line in REST.splitlines() if line.startswith("#")}
    wanted = {part.partition(")")[0] for part in REST.split("](#")[1:]}
    assert wanted - heads == set()
