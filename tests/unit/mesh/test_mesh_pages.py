"""The two pages on the mesh say what there is: options, flags, reasons, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fluxmesh.mesh.options import NAMES, NUMBERS, MeshWorker
from fluxmesh.mesh.seal import KEYS_MAX, REPLAY_WINDOW, SALTS_MAX, Refusal
from fluxmesh.mesh.timing import DATAGRAM_MAX_BYTES, MEMBERS_MAX, META_MAX_BYTES

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = (DOCS / "mesh.md").read_text("utf-8")
SECURITY = (DOCS / "mesh-security.md").read_text("utf-8")
CLI = (DOCS / "cli.md").read_text("utf-8")
OPTIONS = GUIDE.partition("## Options")[2].partition("\n## ")[0]


def row_of(option: str) -> str:
    (row,) = (line for line in OPTIONS.splitlines() if line.startswith("|") and f"`{option}`" in line)
    return row


@pytest.mark.parametrize("option", NAMES)
def test_each_option_has_its_row(option: str) -> None:
    assert row_of(option)


@pytest.mark.parametrize("option", NUMBERS)
def test_the_default_of_a_number_is_told(option: str) -> None:
    names, default = row_of(option).split("|")[1:3]
    place = names.replace("`", "").replace(" ", "").split(",").index(option)
    assert float(default.split(",")[place]) == NUMBERS[option][0]


def test_each_flag_and_command_of_the_pages_exists() -> None:
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", GUIDE + SECURITY)):
        assert re.search(rf"`[^`\n]*{flag}\b", CLI), flag
    for verb in set(re.findall(r"fluxmesh (mesh [a-z]+)", GUIDE + SECURITY)):
        assert f"### {verb}\n" in CLI


@pytest.mark.parametrize("reason", [reason for reason in Refusal if reason is not Refusal.REFLECTED])
def test_each_reason_for_a_refusal_is_explained(reason: Refusal) -> None:
    table = SECURITY.partition("## Refusals")[2]
    assert f"`{reason.value.removeprefix('frame ')}`" in table


def test_the_bounds_that_are_told_are_those_in_force() -> None:
    assert f"{MEMBERS_MAX:,} members" in GUIDE
    assert f"{META_MAX_BYTES} bytes in all" in GUIDE
    assert f"at most {DATAGRAM_MAX_BYTES:,} bytes" in GUIDE
    assert f"the last {REPLAY_WINDOW:,} counters" in SECURITY
    assert f"{SALTS_MAX:,} other runs" in SECURITY.replace("\n", " ")
    assert KEYS_MAX == 4
    assert "Up to four keys" in SECURITY


def test_what_insecure_alone_does_is_told_as_it_is() -> None:
    assert MeshWorker(insecure=True).resolved().bind_host == "127.0.0.1"
    assert not MeshWorker(insecure=True, seeds="192.0.2.9").resolved().is_exposed
    assert "without a `bind_addr` the worker goes on listening at 127.0.0.1" in SECURITY


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDE + SECURITY):
        assert (DOCS / target).exists(), target
