"""Keys in files: @FILE at every door, in place of a key."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fluxmesh.config import Settings, load_settings
from fluxmesh.errors import InvalidOption
from fluxmesh.mesh.options import MeshWorker, keygen

OLD, NEW = keygen(), keygen()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mesh.key"
    path.touch(mode=0o600)
    path.write_text(f"{OLD}\n")
    return path


def test_a_file_stands_for_the_key_in_it_at_every_door(file: Path, tmp_path: Path) -> None:
    assert MeshWorker(encryption_key=f"@{file}").encryption_key == (OLD,)
    by_environment = load_settings(environ={"FLUXMESH_MESH_ENCRYPTION_KEY": f"@{file}"}, folder=tmp_path)
    assert MeshWorker().resolved(by_environment).encryption_key == (OLD,)
    (tmp_path / "fluxmesh.toml").write_text(f'mesh_encryption_key = "@{file}"')
    by_file = load_settings(environ={}, folder=tmp_path)
    assert MeshWorker().resolved(by_file, child=1).encryption_key == (OLD,)
    assert pickle.loads(pickle.dumps(MeshWorker(encryption_key=f"@{file}"))).encryption_key == (OLD,)


@pytest.mark.parametrize("between", [",", "\n", " ,\n", "  "])
def test_keys_for_rolling_stand_in_lines_or_with_commas(file: Path, between: str) -> None:
    file.write_text(f"{NEW}{between}{OLD}\n")
    assert MeshWorker(encryption_key=f"@{file}").encryption_key == (NEW, OLD)


def test_files_and_keys_may_be_mixed(file: Path) -> None:
    assert MeshWorker(encryption_key=f"{NEW},@{file}").encryption_key == (NEW, OLD)
    assert MeshWorker(encryption_key=[f"@{file}", NEW]).encryption_key == (OLD, NEW)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "holds no key"),
        (b"\xff\xfe", "no file of UTF-8 text"),
        (b"c2hvcnQ=", "base64 of 5 bytes"),
        (b"\n".join(keygen().encode() for _ in range(5)), "5 keys, at most 4"),
    ],
)
def test_a_file_without_keys_is_refused_and_nothing_of_it_is_shown(
    file: Path, content: bytes | None, words: str
) -> None:
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidOption, match=words) as refused:
        MeshWorker(encryption_key=f"@{file}")
    assert refused.value.field == "mesh_encryption_key"
    assert refused.value.hint
    assert "c2hvcnQ" not in str(refused.value)


@pytest.mark.parametrize("name", ["@", "@\0", "@/", "@\ud800"])
def test_a_name_that_is_no_file_is_refused_too(name: str) -> None:
    with pytest.raises(InvalidOption):
        MeshWorker(encryption_key=name)


def test_a_file_that_everybody_may_read_is_remembered_for_a_warning(file: Path) -> None:
    settings = Settings(mesh_encryption_key=f"@{file}")
    assert MeshWorker().resolved(settings).key_files_open == ()
    file.chmod(0o644)
    assert MeshWorker().resolved(settings).key_files_open == (str(file),)
