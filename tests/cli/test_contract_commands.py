"""Section 3 of docs/contract.md, read from the page itself: every command and option of it is accepted."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from fluxmesh.cli.main import COMMANDS, build_parser

PAGE = (Path(__file__).parents[2] / "docs" / "contract.md").read_text("utf-8")
SECTION = PAGE.partition("\n## 3. CLI")[2].partition("\n## 4.")[0]
BLOCK, PROSE = SECTION.partition("```\n")[2].split("```\n", 1)
ID = "0190a3e4-5b6c-7d8e-9f01-23456789abcd"
# What a verb needs to be complete; the contract names the verbs alone.
NEEDED = {
    "submit": "--task t", "jobs show": ID, "jobs cancel": ID, "jobs retry": ID, "jobs wait": ID,
    "dlq replay": ID, "dlq discard": ID, "queues pause": "q", "queues resume": "q", "completion": "bash",
    "mesh owner": "tenant-7",
}  # fmt: skip
READS = (
    "jobs list", "jobs show", "jobs wait", "dlq list", "dlq groups", "queues list", "workers", "doctor",
    "config show", "submit", "schedules list", "schedules next", "mesh members", "mesh ring", "mesh owner",
)  # fmt: skip
# What later issues bring. A line that has become true fails the test until it is taken out here.
NOT_YET = {
    "schedules list", "schedules run", "schedules next", "schedules list --json", "schedules next --json",
}  # fmt: skip
VALUES = {
    "--token": "t", "--tiers": "high", "--id": "w", "--processes": "2", "--mesh-port": "7946",
    "--mesh-seeds": "a:7946", "--q": "state:PENDING", "--limit": "10",
}  # fmt: skip
EVERYWHERE = "--url sqlite:///x.db --log-level info --log-format text --log-format json"


def options_of(text: str) -> Iterator[str]:
    """Each option of a line with its value: `--port 8000`, `--standalone`, `--no-standalone`, `--token t`."""
    words = [word for part in shlex.split(re.sub(r"[\[\]](?=\s|-|$)", " ", text)) for word in [part]]
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        after = words[index + 1] if index + 1 < len(words) else "--"
        for option in word.split("/"):
            if after in ("…", "N"):
                yield f"{option} {VALUES[option]}"
            elif after.startswith("--"):
                yield option
            else:
                yield shlex.join([option, after])


def lines() -> Iterator[str]:
    """Every command and, after its command, every option that the section names."""
    *long, last = BLOCK.strip().splitlines()
    for line in long:
        noun, _, rest = line.partition(" ")
        yield noun
        rest = rest.partition("(")[0] if noun == "scheduler" else rest
        for option in options_of(rest):
            yield f"{noun} {option}"
    for part in last.split(" · "):
        noun, _, verbs = part.strip().partition(" ")
        if not verbs:
            yield noun
        for verb in re.sub(r"\[.*?\]", "", verbs).split("|") if verbs else ():
            yield f"{noun} {verb.strip()}"
        for inside in re.findall(r"(\w+) \[(.*?)\]", verbs):
            for option in options_of(inside[1]):
                yield f"{noun} {inside[0]} {option}"
    assert "`--log-level`, `--log-format text|json` everywhere. Every read has `--json`" in PROSE
    assert "`--builtins/--no-builtins`" in PROSE
    for noun in ("worker", "server", "dev"):
        yield from (f"{noun} --builtins", f"{noun} --no-builtins", f"{noun} --app module:queue")
    yield from (f"{read} --json" for read in READS)


LINES = list(dict.fromkeys(lines()))


def accepted(line: str) -> bool:
    words = shlex.split(line)
    command = next((key for key in NEEDED if line.startswith(key)), "")
    needed = [] if "--task" in words else shlex.split(NEEDED.get(command, ""))
    arguments = [*words, *needed, *EVERYWHERE.split()]
    try:
        with redirect_stderr(StringIO()):
            options = build_parser(arguments).parse_args(arguments)
    except (SystemExit, argparse.ArgumentError):
        return False
    assert callable(options.run)
    return True


def test_the_section_was_read_whole() -> None:
    assert len(LINES) > 60
    nouns = {line.split()[0] for line in LINES}
    assert nouns == set(COMMANDS) | {"schedules", "mesh"}
    assert {"server --reload", "server --no-standalone", "submit --wait", "jobs list --limit 10"} <= set(
        LINES
    )
    assert """submit --kwargs '{"items": ["a", "b"]}'""" in LINES
    assert "worker --queues critical,high,default,low" in LINES


@pytest.mark.parametrize("line", LINES)
def test_the_parser_accepts_what_the_contract_names(line: str) -> None:
    assert accepted(line) is (line not in NOT_YET), line


def test_what_is_not_yet_there_is_named_by_the_contract() -> None:
    assert set(LINES) >= NOT_YET
