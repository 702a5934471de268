"""Settings: where each value comes from, who wins, and what is refused by name and place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluxmesh.config import ENV_PREFIX, NAMES, Settings, load_settings, settings_with_sources
from fluxmesh.errors import InvalidOption
from fluxmesh.mesh.options import NAMES as MESH_NAMES
from fluxmesh.mesh.options import NUMBERS, MeshWorker


def load(folder: Path, overrides: dict[str, Any] | None = None, **environ: str) -> Settings:
    return load_settings(overrides, environ=environ, folder=folder)


def own_file(folder: Path, text: str) -> None:
    (folder / "fluxmesh.toml").write_text(text, encoding="utf-8")


def project_file(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")


def test_the_defaults_are_those_of_the_contract(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert settings == Settings()
    expected = {
        "namespace": "fluxmesh", "lease_s": 6, "beat_s": None, "reap_s": 1, "grace_s": 8, "hard_grace_s": 1,
        "timeout_s": 300, "max_retries": 3, "max_crashes": 3, "max_snoozes": None, "max_interruptions": None,
        "result_ttl": 86_400, "dead_letter_ttl": 30 * 86_400, "idempotency_ttl": 86_400, "concurrency": 8,
        "payload_limit_bytes": 1 << 20, "result_limit_bytes": 1 << 20, "queue_cap": 1_000_000,
        "durability": "process",
    }  # fmt: skip
    assert {name: getattr(settings, name) for name in expected} == expected
    assert settings.beat_every_s == 2


def test_arguments_beat_the_environment_which_beats_files_which_beat_defaults(tmp_path: Path) -> None:
    assert load(tmp_path).concurrency == 8
    project_file(tmp_path, "[tool.fluxmesh]\nconcurrency = 1\n")
    assert load(tmp_path).concurrency == 1
    own_file(tmp_path, "concurrency = 2\n")
    assert load(tmp_path).concurrency == 2
    assert load(tmp_path, FLUXMESH_CONCURRENCY="3").concurrency == 3
    assert load(tmp_path, {"concurrency": 4}, FLUXMESH_CONCURRENCY="3").concurrency == 4
    assert load(tmp_path, {"concurrency": None}, FLUXMESH_CONCURRENCY="3").concurrency == 3


def test_each_value_knows_where_it_stands(tmp_path: Path) -> None:
    own_file(tmp_path, "concurrency = 2\nreap_s = 2\n")
    environ = {"FLUXMESH_REAP_S": "3", "HOME": "/x"}
    _, sources = settings_with_sources({"grace_s": 1.0}, environ=environ, folder=tmp_path)
    assert sources == {
        "concurrency": "fluxmesh.toml",
        "reap_s": "FLUXMESH_REAP_S",
        "grace_s": "the arguments",
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_can_be_given_in_the_environment(tmp_path: Path, name: str) -> None:
    values = {
        "url": "sqlite:///x.db", "namespace": "shop", "app": "shop:queue", "durability": "power",
        "on_lease_lost": "cancel", "proof_of_death": "no", "log_level": "debug", "log_format": "json",
        "beat_s": "1", "lease_s": "9", "payload_limit_bytes": "2048", "result_limit_bytes": "2048",
        "webhook_allow_private": "yes", "keeper": "no", "mesh": "yes", "mesh_optional": "yes",
        "mesh_steal": "no", "mesh_affinity_weight": "0.5", "mesh_protocol_period_ms": "200",
        "mesh_insecure": "yes", "mesh_port": "7000",
    }  # fmt: skip
    settings = load(tmp_path, **{ENV_PREFIX + name.upper(): values.get(name, "5")})
    assert getattr(settings, name) != getattr(Settings(), name)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("yes", True), ("On", True), ("FALSE", False), ("off", False), ("0", False)],
)
def test_a_switch_may_be_written_in_many_ways(tmp_path: Path, text: str, value: bool) -> None:
    assert load(tmp_path, FLUXMESH_PROOF_OF_DEATH=text).proof_of_death is value


def test_unset_options_stay_off(tmp_path: Path) -> None:
    assert load(tmp_path, FLUXMESH_MAX_SNOOZES="7").max_snoozes == 7
    assert load(tmp_path).max_snoozes is None


class TestUnknown:
    def test_in_the_environment(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidOption, match="environment") as caught:
            load(tmp_path, FLUXMESH_LEASE="5")
        assert caught.value.field == "FLUXMESH_LEASE"
        assert "fluxmesh_lease_s" in caught.value.hint.lower()

    @pytest.mark.parametrize(("name", "suggestion"), [("leases", "lease_s"), ("concurency", "concurrency")])
    def test_in_arguments_and_files(self, tmp_path: Path, name: str, suggestion: str) -> None:
        with pytest.raises(InvalidOption, match=f"did you mean '{suggestion}'"):
            load(tmp_path, {name: 1})
        own_file(tmp_path, f"{name} = 1\n")
        with pytest.raises(InvalidOption, match=r"fluxmesh\.toml.*" + suggestion):
            load(tmp_path)
        (tmp_path / "fluxmesh.toml").unlink()
        project_file(tmp_path, f"[tool.fluxmesh]\n{name} = 1\n")
        with pytest.raises(InvalidOption, match=r"pyproject\.toml.*" + suggestion):
            load(tmp_path)

    def test_what_resembles_nothing_gets_the_list_of_all(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidOption, match="config show"):
            load(tmp_path, {"zzz": 1})

    def test_the_suites_own_variables_are_no_settings(self, tmp_path: Path) -> None:
        assert load(tmp_path, FLUXMESH_TEST_CLOCK_OFFSETS="/x", OTHER="1") == Settings()


class TestBad:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("lease_s", "1.9"), ("lease_s", "nan"), ("lease_s", "inf"), ("lease_s", "soon"), ("lease_s", ""),
            ("grace_s", "nan"), ("grace_s", "-1"), ("timeout_s", "0"), ("timeout_s", "nan"),
            ("max_retries", "-1"), ("max_retries", "1.5"), ("max_crashes", "0"), ("concurrency", "0"),
            ("concurrency", "9" * 30),
            ("durability", "fast"), ("on_lease_lost", "stop"), ("proof_of_death", "perhaps"),
            ("log_level", "loud"), ("namespace", ""), ("namespace", "a b"), ("namespace", "-a"),
            ("namespace", "a" * 65),
            ("namespace", 'a"b'),
            ("payload_limit_bytes", "10"), ("scheduler_batch_size", "1001"),
            ("recycle_after_jobs", "-1"), ("recycle_above_mb", "much"),
        ],
    )  # fmt: skip
    def test_a_bad_value_is_refused_with_its_name_and_place(
        self, tmp_path: Path, name: str, value: str
    ) -> None:
        variable = ENV_PREFIX + name.upper()
        with pytest.raises(InvalidOption) as caught:
            load(tmp_path, **{variable: value})
        assert caught.value.field == name
        assert variable in str(caught.value) or name == "proof_of_death"
        with pytest.raises(InvalidOption):
            load(tmp_path, {name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("lease_s", float("nan")),
            ("lease_s", [1]),
            ("concurrency", True),
            ("url", 5),
            ("max_retries", 2.5),
        ],
    )
    def test_so_is_a_value_of_the_wrong_type(self, tmp_path: Path, name: str, value: object) -> None:
        with pytest.raises(InvalidOption) as caught:
            load(tmp_path, {name: value})
        assert caught.value.field == name

    def test_a_beat_must_fit_twice_into_a_lease(self, tmp_path: Path) -> None:
        assert load(tmp_path, {"lease_s": 6, "beat_s": 3}).beat_every_s == 3
        with pytest.raises(InvalidOption, match="half a lease"):
            load(tmp_path, {"lease_s": 6, "beat_s": 3.1})

    @pytest.mark.parametrize("text", ["concurrency = ", "= 5", "\x00"])
    def test_a_file_of_ours_that_is_no_toml_is_an_error(self, tmp_path: Path, text: str) -> None:
        own_file(tmp_path, text)
        with pytest.raises(InvalidOption, match="TOML"):
            load(tmp_path)

    def test_a_project_file_that_is_no_toml_is_not_ours_to_judge(self, tmp_path: Path) -> None:
        project_file(tmp_path, "= 5")
        assert load(tmp_path) == Settings()

    @pytest.mark.parametrize("text", ["[tool]\nfluxmesh = 5\n", "tool = 5\n", "[project]\nname = 'x'\n", ""])
    def test_a_project_file_without_a_table_of_ours_says_nothing_or_is_refused(
        self, tmp_path: Path, text: str
    ) -> None:
        project_file(tmp_path, text)
        if "fluxmesh" in text:
            with pytest.raises(InvalidOption, match="table"):
                load(tmp_path)
        else:
            assert load(tmp_path) == Settings()


def test_the_text_of_settings_tells_no_secret(tmp_path: Path) -> None:
    settings = load_settings(
        {"url": "redis://:hidden@h/0", "token": "hidden,too"}, environ={}, folder=tmp_path
    )
    assert "hidden" not in repr(settings)
    assert "url='redis://:***@h/0'" in str(settings)
    assert "lease_s=6.0" in repr(settings)
    with pytest.raises(InvalidOption) as caught:
        load_settings({"token": ["hidden"]}, environ={}, folder=tmp_path)
    assert "hidden" not in str(caught.value)


def test_settings_and_options_of_the_mesh_have_the_same_names_defaults_and_bounds(tmp_path: Path) -> None:
    """Two tables, because settings are read before the mesh is loaded; so a test compares them."""
    default = MeshWorker()
    for name in MESH_NAMES:
        setting, option = getattr(Settings(), f"mesh_{name}"), getattr(default, name)
        assert setting == option or (not setting and not option), name
    for name, (_, least, most) in NUMBERS.items():
        for good in (least, most):
            load(tmp_path, **{f"FLUXMESH_MESH_{name.upper()}": str(good)})
        for bad in (least - 1, most + 1):
            with pytest.raises(InvalidOption, match=f"mesh_{name}"):
                load(tmp_path, **{f"FLUXMESH_MESH_{name.upper()}": str(bad)})


def test_secrets_are_masked_wherever_settings_are_shown(tmp_path: Path) -> None:
    settings = load(tmp_path, FLUXMESH_MESH_ENCRYPTION_KEY="hidden-key", FLUXMESH_TOKEN="hidden-token")
    assert "hidden" not in repr(settings)
    with pytest.raises(InvalidOption) as refused:
        load(tmp_path, {"mesh_encryption_key": 7})
    assert "7" not in str(refused.value).replace("mesh_encryption_key", "")


def test_a_table_where_a_setting_belongs_is_told_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "fluxmesh.toml").write_text('[mesh]\nport = 7950\nencryption_key = "c2VjcmV0"\n')
    with pytest.raises(InvalidOption, match=r"mesh: is a table in fluxmesh\.toml") as refused:
        load_settings(environ={}, folder=tmp_path)
    assert "mesh_port = …" in refused.value.hint
    assert "c2VjcmV0" not in str(refused.value)
