"""The two pages on the mesh say what there is: options, flags, reasons, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fluxmesh.cli.mesh import MEMBERS
from fluxmesh.config import load_settings
from fluxmesh.mesh.advertise import find_address
from fluxmesh.mesh.messages import Address
from fluxmesh.mesh.options import NAMES, NUMBERS, MeshWorker, keygen
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


@pytest.mark.parametrize("column", MEMBERS)
def test_each_column_of_the_members_is_explained(column: str) -> None:
    table = GUIDE.partition("The columns of `fluxmesh mesh members`")[2].partition("In Python")[0]
    assert f"`{column}`" in table


def test_each_counter_of_the_core_is_in_the_list() -> None:
    table = GUIDE.partition("`worker.mesh.metrics()`")[2].partition("\n## ")[0]
    known = re.findall(r"`([a-z_]+)(…?)`", table)
    source = DOCS.parent / "src" / "fluxmesh" / "mesh"
    text = "".join(path.read_text("utf-8") for path in source.glob("*.py"))
    counted = re.findall(r'\.count\(f?"([a-z_]+)', text)
    assert len(counted) > 15
    for name in counted:
        assert any(name.startswith(word) if more else name == word for word, more in known), name


def test_the_example_on_one_machine_has_ports_of_its_own_for_each_worker() -> None:
    (block,) = (one for one in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL) if "--id three" in one)
    assert "umask 077" in block
    exported = dict(re.findall(r"(FLUXMESH_\w+)=(\S+)", block)) | {"FLUXMESH_MESH_ENCRYPTION_KEY": keygen()}
    ports = [int(port) for port in re.findall(r"--mesh-port (\d+)", block)]
    assert ports == [7_946, 7_948, 7_950]
    for port in ports:
        settings = load_settings({"mesh_port": port}, environ=exported)
        assert settings.mesh
        assert find_address(MeshWorker().resolved(settings)) == Address("127.0.0.1", port)


def test_no_page_has_a_place_left_to_fill() -> None:
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]
    assert len(pages) > 10
    for page in pages:
        assert not re.search(r"@[A-Z][A-Z_]+@|\bTODO\b|\bTBD\b|\bFIXME\b", page.read_text("utf-8")), page.name


def test_concepts_and_the_tutorial_lead_to_the_mesh() -> None:
    for name, words in (("concepts.md", "## The mesh"), ("tutorial.md", "`mesh=MeshWorker(port=7948)`")):
        text = (DOCS / name).read_text("utf-8")
        assert words in text
        assert "(mesh.md)" in text
