"""The compose file of the examples sets what is really read, and would start what is really there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fluxmesh.config import NAMES, load_settings
from fluxmesh.mesh.options import MeshWorker, keygen

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "compose"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
yaml = pytest.importorskip("yaml")
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))
OURS = sorted(name for name, service in COMPOSE["services"].items() if "build" in service)
WANTED = re.compile(r"\$\{(\w+):\?[^}]+\}")


def environment_of(service: str) -> dict[str, str]:
    """As the containers get it, with the file .env filled in."""
    filled = {"FLUXMESH_TOKEN": "a-token", "FLUXMESH_MESH_ENCRYPTION_KEY": keygen()}
    raw = COMPOSE["services"][service]["environment"]
    return {name: WANTED.sub(lambda found: filled[found[1]], value) for name, value in raw.items()}


def words_of(service: str) -> list[str]:
    command: list[str] = COMPOSE["services"][service]["command"]
    return command[2].replace("exec ", "").split() if command[:2] == ["sh", "-c"] else command


def test_there_are_a_server_and_workers() -> None:
    assert OURS == ["server", "worker"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_name_of_a_setting_is_one(path: Path) -> None:
    for name in re.findall(r"FLUXMESH_[A-Z_]+", path.read_text("utf-8").replace("FLUXMESH_*", "")):
        assert name.removeprefix("FLUXMESH_").lower() in NAMES


@pytest.mark.parametrize("service", OURS)
def test_the_environment_of_a_service_is_read_whole(service: str, tmp_path: Path) -> None:
    environment = environment_of(service)
    assert all(isinstance(value, str) for value in environment.values())  # a bare true or 8 is no text
    read = load_settings(environ=environment, folder=tmp_path)
    for name, value in environment.items():
        found = getattr(read, name.removeprefix("FLUXMESH_").lower())
        assert str(found).lower() == value.lower() or float(found) == float(value)


def test_the_mesh_of_the_workers_would_start(tmp_path: Path) -> None:
    read = load_settings(environ=environment_of("worker"), folder=tmp_path)
    options = MeshWorker().resolved(read)
    assert read.mesh
    assert options.seeds == ("worker",)
    assert options.bind_host == "0.0.0.0"
    assert len(options.encryption_key) == 1
    ports = COMPOSE["services"]["worker"]["expose"]
    assert ports == [f"{options.port}/udp", f"{options.port + 1}/tcp"]


def test_docker_waits_longer_than_a_worker_takes_to_stop(tmp_path: Path) -> None:
    read = load_settings(environ=environment_of("worker"), folder=tmp_path)
    patience_s = int(COMPOSE["services"]["worker"]["stop_grace_period"].removesuffix("s"))
    assert patience_s > read.grace_s + read.hard_grace_s + 3.5


@pytest.mark.parametrize("service", OURS)
def test_commands_and_flags_exist(service: str) -> None:
    words = words_of(service)
    assert words[0] == "fluxmesh"
    section = (ROOT / "docs" / "cli.md").read_text("utf-8").partition(f"\n## {words[1]}\n")[2]
    section = section.partition("\n## ")[0]
    for flag in (word for word in words if word.startswith("--")):
        assert re.search(rf"`[^`]*{re.escape(flag)}\b", section), flag


def test_what_is_secret_is_not_in_the_file_and_must_be_given() -> None:
    for service in OURS:
        for name, value in COMPOSE["services"][service]["environment"].items():
            if name in {"FLUXMESH_TOKEN", "FLUXMESH_MESH_ENCRYPTION_KEY"}:
                assert WANTED.fullmatch(value)
    given = re.findall(r"^(\w+)=(.*)$", (FOLDER / ".env.example").read_text("utf-8"), re.MULTILINE)
    assert dict(given) == {"FLUXMESH_TOKEN": "", "FLUXMESH_MESH_ENCRYPTION_KEY": ""}


def test_the_image_is_built_of_what_is_there() -> None:
    text = (FOLDER / "Dockerfile").read_text("utf-8")
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split())
    (extras,) = re.findall(r"\.\[([\w,]+)\]", text)
    optional = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.optional-dependencies]")[2]
    assert all(re.search(rf"^{extra} = ", optional, re.MULTILINE) for extra in extras.split(","))
