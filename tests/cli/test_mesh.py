"""fluxmesh mesh, and the flags of the mesh on workers and servers."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from fluxmesh import peers
from fluxmesh.cli.main import build_parser
from fluxmesh.cli.mesh import STEAL_COUNTERS
from fluxmesh.cli.mesh_options import idle_settings, mesh_overrides
from fluxmesh.config import Settings, load_settings
from fluxmesh.mesh.options import MeshWorker, keygen
from fluxmesh.mesh.ring import Ring
from fluxmesh.storage.registry import open_storage
from fluxmesh.worker.meshing import mesh_of
from tests.cli.harness import Running, make_database, run, run_here
from tests.mesh.sockets import free_port
from tests.mesh.told import member, tell


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A folder with a database in which two workers have told of a mesh of three."""
    url = make_database(tmp_path / "fluxmesh.db")

    async def main() -> None:
        storage = await open_storage(url, Settings(proof_of_death=False), create=False)
        c = member("c", standing="suspect")
        await tell(
            storage,
            {"a": (member("a"), member("b"), c), "b": (member("a"), member("b"), member("c"))},
            {
                "a": {
                    "jobs_stolen_in": 4,
                    "steals_initiated": 9,
                    "steals_succeeded": 2,
                    "steals_failed": 1,
                    "steals_empty": 3,
                    "steals_lost": 2,
                    "steals_dropped": 1,
                    "buffered": 7,
                },
                "b": {"jobs_stolen_out": 4, "steal_requests": 3, "steals_refused": 1, "affinity_hits": 20},
            },
        )
        await storage.close()

    asyncio.run(main())
    return tmp_path


def test_members_are_listed_once_with_what_the_workers_see(told: Path) -> None:
    done = run_here("mesh", "members", cwd=told)
    assert done.code == 0
    header, *rows = done.out.splitlines()
    assert header.split()[:3] == ["WORKER", "EPOCH", "STATE"]
    assert [row.split()[0] for row in rows] == ["a", "b", "c"]
    assert "suspect 1" in rows[2]
    assert "alive 1" in rows[2]
    document = run_here("mesh", "members", "--json", cwd=told).document
    assert [item["worker_id"] for item in document["items"]] == ["a", "b"]
    assert [one["standing"] for one in document["items"][0]["members"]] == ["alive", "alive", "suspect"]


def test_members_may_be_listed_as_one_worker_sees_them(told: Path) -> None:
    done = run_here("mesh", "members", "--by", "b", cwd=told)
    assert "suspect" not in done.out
    run_here("mesh", "members", "--by", "z", cwd=told).refused(6, "worker z has told nothing of a mesh")


def test_what_is_held_stands_beside_each_member(told: Path) -> None:
    header, *rows = run_here("mesh", "members", cwd=told).out.splitlines()
    at = header.index("HELD") + len("HELD")
    assert [row[:at].split()[-1] for row in rows] == ["0", "0", "0"]


def test_who_took_how_many_jobs_from_others_is_listed_and_summed(told: Path) -> None:
    done = run_here("mesh", "steals", cwd=told)
    assert done.code == 0
    rows = [row.split() for row in done.out.splitlines()]
    assert rows[0][3:9] == ["STOLEN", "GIVEN", "ASKED", "GOT", "NOTHING", "FAILED"]
    assert rows[1] == ["a", "1", "7", "4", "0", "9", "2", "6", "1", "0", "0", "0", "0", "0"]
    assert rows[2][:1] + rows[2][2:] == ["b", "0", "0", "4", "0", "0", "0", "0", "3", "1", "0", "20", "0"]
    assert rows[3] == ["all", "7", "4", "4", "9", "2", "6", "1", "3", "1", "0", "20", "0"]
    document = run_here("mesh", "steals", "--json", cwd=told).document
    assert [item["worker_id"] for item in document["items"]] == ["a", "b"]
    assert document["items"][0]["counters"]["steals_succeeded"] == 2
    summed = peers.Totals(**document["totals"])  # every number of the row `all` is there
    by_column = [sum(getattr(summed, name) for name in names) for names in STEAL_COUNTERS]
    assert [str(number) for number in by_column] == rows[3][4:]
    assert (document["totals"]["jobs_stolen_in"], document["totals"]["jobs_stolen_out"]) == (4, 4)
    assert document["next_cursor"] is None


def test_without_a_mesh_nobody_has_taken_anything(tmp_path: Path) -> None:
    make_database(tmp_path / "fluxmesh.db")
    done = run_here("mesh", "steals", cwd=tmp_path)
    assert done.out.split()[0] == "WORKER"
    assert len(done.out.splitlines()) == 1
    assert "no worker has told of a mesh" in done.err
    document = run_here("mesh", "steals", "--json", cwd=tmp_path).document
    assert (document["items"], document["totals"]["workers"]) == ([], 0)


def test_ring_and_owner_agree(told: Path) -> None:
    document = run_here("mesh", "ring", "--json", cwd=told).document
    (ring,) = document["items"]
    assert (ring["queue"], ring["agreed"], ring["seen_by"]) == ("default", True, ["a", "b"])
    assert sum(one["share"] for one in ring["members"]) == 1.0
    assert run_here("mesh", "ring", cwd=told).out.count("150") == 3
    owner = run_here("mesh", "owner", "tenant-7", cwd=told).out.strip()
    assert owner in {"a", "b", "c"}
    document = run_here("mesh", "owner", "tenant-7", "--json", cwd=told).document
    assert (document["owner"], document["agreed"], document["slots"]) == (owner, True, 4_096)


def test_who_has_too_much_passes_its_keys_on_by_every_door(tmp_path: Path) -> None:
    url = make_database(tmp_path / "fluxmesh.db")
    members = tuple(member(name) for name in "abc")

    async def main() -> None:
        storage = await open_storage(url, Settings(proof_of_death=False), create=False)
        await tell(storage, {"a": members, "b": members}, over={"default": ("a",)})
        await storage.close()

    asyncio.run(main())
    ring = Ring(dict.fromkeys("abc", 150), frozenset("a"))
    keys = [f"tenant-{number}" for number in range(12)]
    for key in keys:
        assert run_here("mesh", "owner", key, cwd=tmp_path).out.strip() == ring.owner(key) != "a"
    document = run_here("mesh", "ring", "--json", cwd=tmp_path).document
    (told,) = document["items"]
    assert {one["worker_id"]: one["over"] for one in told["members"]} == {"a": True, "b": False, "c": False}
    assert {one["worker_id"]: one["share"] for one in told["members"]} == ring.shares()
    rows = run_here("mesh", "ring", cwd=tmp_path).out.splitlines()
    assert ["yes" in row for row in rows] == [False, True, False, False]


def views(folder: Path, told: dict[str, tuple[str, ...]]) -> Path:
    """A folder with a database in which these workers have told that they see these."""
    url = make_database(folder / "fluxmesh.db")

    async def main() -> None:
        storage = await open_storage(url, Settings(proof_of_death=False), create=False)
        await tell(storage, {name: tuple(member(one) for one in seen) for name, seen in told.items()})
        await storage.close()

    asyncio.run(main())
    return folder


@pytest.mark.parametrize("verb", ["members", "ring"])
def test_a_split_mesh_is_told_beside_the_lists(tmp_path: Path, told: Path, verb: str) -> None:
    folder = tmp_path / "split"
    folder.mkdir()
    views(folder, {"a": ("a",), "b": ("b", "c"), "c": ("b", "c")})
    for flags in ((), ("--json",)):
        done = run_here("mesh", verb, *flags, cwd=folder)
        assert done.code == 0
        assert "the views differ: a does not see b, c" in done.err
        assert "the views differ: b does not see a" in done.err
        assert "docs/mesh.md" in done.err
        assert "differ" not in done.out
    assert "differ" not in run_here("mesh", verb, cwd=told).err


@pytest.mark.parametrize("verb", ["members", "ring"])
def test_that_nobody_is_there_is_told_with_what_to_try(tmp_path: Path, told: Path, verb: str) -> None:
    make_database(tmp_path / "empty.db")
    done = run_here("mesh", verb, "--url", "sqlite:///empty.db", cwd=tmp_path)
    assert done.code == 0
    assert "no worker has told of a mesh" in done.err
    assert "hint: workers join with --mesh" in done.err
    assert "no worker has told" not in run_here("mesh", verb, cwd=told).err
    assert (
        "nobody is on a ring of the queue 'mail'" in run_here("mesh", "ring", "--queue", "mail", cwd=told).err
    )


class TestDoctor:
    def findings(self, folder: Path, **env: str) -> dict[str, dict[str, str]]:
        done = run("doctor", "--json", cwd=folder, env={f"FLUXMESH_MESH{k}": v for k, v in env.items()})
        return {check["name"]: check for check in done.document["checks"]}

    def test_the_mesh_is_no_matter_where_it_is_off_and_nobody_is_in_one(self, tmp_path: Path) -> None:
        make_database(tmp_path / "fluxmesh.db")
        assert not {"mesh", "mesh views"} & self.findings(tmp_path).keys()

    def test_settings_that_would_do_and_views_that_agree_are_ok(self, tmp_path: Path) -> None:
        views(tmp_path, {"a": ("a", "b"), "b": ("a", "b")})
        port = free_port()
        checks = self.findings(tmp_path, **{"": "yes", "_PORT": str(port), "_SEEDS": "127.0.0.1"})
        assert (checks["mesh"]["status"], checks["mesh"]["message"]) == (
            "ok",
            f"UDP {port} and TCP {port + 1} of 127.0.0.1, 0 keys, 1 seed",
        )
        assert (checks["mesh views"]["status"], checks["mesh views"]["message"]) == ("ok", "2 workers agree")

    def test_what_would_keep_a_worker_out_of_the_mesh_is_told(self, tmp_path: Path) -> None:
        views(tmp_path, {"a": ("a",), "b": ("a", "b")})
        checks = self.findings(tmp_path, **{"": "yes", "_SEEDS": "10.0.0.7"})
        assert checks["mesh"]["status"] == "fail"
        assert "mesh keygen" in checks["mesh"]["hint"]
        assert checks["mesh views"]["status"] == "warn"
        assert checks["mesh views"]["message"] == "a does not see b"
        (tmp_path / "mesh.key").write_text(keygen())
        (tmp_path / "mesh.key").chmod(0o644)
        checks = self.findings(tmp_path, **{"": "yes", "_ENCRYPTION_KEY": "@mesh.key"})
        assert (checks["mesh"]["status"], checks["mesh"]["hint"]) == ("warn", "chmod 600 mesh.key")


def test_a_queue_that_no_mesh_serves_has_no_owner(told: Path) -> None:
    run_here("mesh", "owner", "k", "--queue", "mail", cwd=told).refused(
        6, "serves the queue 'mail'", "--mesh"
    )
    assert run_here("mesh", "ring", "--queue", "mail", "--json", cwd=told).document["items"] == []
    run_here("mesh", "owner", cwd=told).refused(2, "KEY")


def test_nobody_in_a_mesh_is_an_empty_list(tmp_path: Path) -> None:
    make_database(tmp_path / "fluxmesh.db")
    assert run_here("mesh", "members", "--json", cwd=tmp_path).document == {"items": [], "next_cursor": None}
    run_here("mesh", "members", "--url", "sqlite:///none.db", cwd=tmp_path).refused(4, "no database")


def test_keygen_makes_another_key_each_time_and_touches_no_storage(tmp_path: Path) -> None:
    keys = {
        run("mesh", "keygen", cwd=tmp_path).out.strip(),
        run_here("mesh", "keygen", cwd=tmp_path).out.strip(),
    }
    assert len(keys) == 2
    for key in keys:
        assert len(base64.b64decode(key, validate=True)) == 32
        assert MeshWorker(encryption_key=key).encryption_key == (key,)
    assert len(run_here("mesh", "keygen", "--json", cwd=tmp_path).document["key"]) == 44
    assert list(tmp_path.iterdir()) == []


class TestBadInput:
    SHORT = base64.b64encode(bytes(31)).decode()

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (("--mesh-encryption-key", "no base64!"), ("mesh_encryption_key", "not base64", "mesh keygen")),
            (("--mesh-encryption-key", SHORT), ("mesh_encryption_key", "31 bytes")),
            (("--mesh-encryption-key", "@missing"), ("missing", "No such file")),
            (("--mesh-port", "80"), ("--mesh-port", "80")),
            (("--mesh-seeds", "10.0.0.7"), ("mesh_encryption_key", "10.0.0.7", "mesh keygen")),
            (("--mesh-bind-addr", "0.0.0.0"), ("mesh_bind_addr", "0.0.0.0")),
            (("--mesh-advertise-addr", "0.0.0.0"), ("mesh_advertise_addr", "0.0.0.0")),
            (("--mesh-seeds", "a:b:c"), ("mesh_seeds",)),
            (("--mesh-prot", "80"), ("--mesh-prot", "did you mean --mesh-port")),
            (("--mesh-port", "65532", "--processes", "3"), ("mesh_port", "65,536")),
        ],
        ids=lambda value: value[0] if isinstance(value, tuple) else None,
    )
    @pytest.mark.parametrize("noun", ["worker", "server"])
    def test_a_bad_option_ends_the_command_before_anything_is_made(
        self, tmp_path: Path, noun: str, flags: tuple[str, ...], words: tuple[str, ...]
    ) -> None:
        if noun == "server" and "--processes" in flags:
            return
        done = run_here(noun, "--mesh", *flags, cwd=tmp_path)
        done.refused(2, *words)
        assert self.SHORT not in done.err
        assert list(tmp_path.iterdir()) == []

    def test_the_same_from_the_environment(self, tmp_path: Path) -> None:
        env = {"FLUXMESH_MESH": "yes", "FLUXMESH_MESH_ENCRYPTION_KEY": "short"}
        done = run("worker", cwd=tmp_path, env=env)
        done.refused(2, "mesh_encryption_key")
        assert "short" not in done.err
        env = {"FLUXMESH_MESH": "yes", "FLUXMESH_MESH_ADVERTISE_ADDR": "224.0.0.1"}
        run("worker", cwd=tmp_path, env=env).refused(2, "mesh_advertise_addr", "multicast")

    def test_d27_a_taken_port_ends_the_worker_with_2_and_nobody_hears_of_it(self, tmp_path: Path) -> None:
        port = free_port()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("127.0.0.1", port))
            done = run("worker", "--mesh", "--mesh-port", str(port), "--id", "w", cwd=tmp_path)
        assert done.code == 2, done
        assert f"UDP port {port} of 127.0.0.1 is taken" in done.err
        assert f"--mesh-port {port + 2}" in done.err
        assert run_here("workers", "--json", cwd=tmp_path).document["items"] == []

    def test_a_server_without_a_worker_takes_no_options_of_the_mesh(self, tmp_path: Path) -> None:
        done = run_here("server", "--no-standalone", "--mesh-port", "7946", cwd=tmp_path)
        done.refused(2, "--mesh-port", "--no-standalone")


def test_the_key_is_shown_nowhere(tmp_path: Path) -> None:
    key = keygen()
    (tmp_path / "mesh.key").write_text(key + "\n")
    done = run("config", "show", cwd=tmp_path, env={"FLUXMESH_MESH_ENCRYPTION_KEY": key})
    assert done.code == 0
    assert key not in done.out + done.err
    assert "***" in done.out
    assert key not in repr(Settings(mesh_encryption_key=key))
    port = free_port()
    flags = ("--mesh", "--mesh-port", str(port), "--mesh-bind-addr", "127.0.0.1", "--id", "w")
    with Running("worker", *flags, "--mesh-encryption-key", "@mesh.key", cwd=tmp_path) as worker:
        worker.until("worker ready")
        worker.until("sealed=True")
        for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert key not in cmdline.read_text()
            except OSError:
                pass
        assert worker.end() == 0
        assert key not in worker.err


def test_processes_of_one_worker_have_two_ports_each_and_form_a_mesh_that_a_server_shows(
    tmp_path: Path,
) -> None:
    port = free_port(4)
    seeds = f"127.0.0.1:{port}"
    flags = ("--mesh", "--mesh-port", str(port), "--mesh-seeds", seeds, "--id", "w", "--processes", "2")
    with Running("worker", *flags, cwd=tmp_path) as worker:
        worker.until("worker ready", times=2)
        worker.until(f"port={port} ")
        worker.until(f"port={port + 2} ")
        worker.until("mesh joined")
        both = {"w.0", "w.1"}
        while True:  # bounded by the patience of the command below
            items = run_here("mesh", "members", "--json", cwd=tmp_path).document["items"]
            if len(items) == 2 and all(
                {one["worker_id"] for one in item["members"] if one["in_ring"]} == both for item in items
            ):
                break
            assert worker.process.poll() is None
        assert run_here("mesh", "owner", "k", cwd=tmp_path).out.strip() in both
        assert worker.end() == 0
        assert "member suspected" not in worker.err
        assert "member left" in worker.err
    assert run_here("mesh", "members", "--json", cwd=tmp_path).document["items"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_every_kind_of_stop_says_goodbye(tmp_path: Path, number: signal.Signals) -> None:
    port = free_port(4)
    seeds = f"127.0.0.1:{port}"
    first = ("--mesh", "--mesh-port", str(port), "--id", "stays")
    with Running("worker", *first, cwd=tmp_path) as stays:
        stays.until("worker ready")
        second = ("--mesh", "--mesh-port", str(port + 2), "--mesh-seeds", seeds, "--id", "goes")
        with Running("worker", *second, cwd=tmp_path) as goes:
            goes.until("mesh joined")
            assert goes.end(number) == 0
        stays.until("member left")
        assert stays.end() == 0
        assert "suspected" not in stays.err


def test_the_worker_of_a_server_is_a_node_too(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--mesh", "--mesh-port", str(port), "--id", "embedded", "--port", "0")
    with Running("server", *flags, cwd=tmp_path) as server:
        server.until("gossip listening")
        server.until("worker ready")
        assert server.end() == 0
        assert "leave sent" in server.err


def test_options_of_the_mesh_without_the_mesh_are_told(tmp_path: Path) -> None:
    env = {"FLUXMESH_MESH_SEEDS": "10.0.0.7"}
    with Running("worker", "--mesh-port", "7980", "--id", "w", cwd=tmp_path, env=env) as worker:
        worker.until("has no effect without --mesh")
        worker.until("worker ready")
        assert worker.end() == 0
        (line,) = (line for line in worker.err.splitlines() if "has no effect" in line)
        assert "--mesh-port, mesh_seeds" in line


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ([], {}, []),
        (["--mesh-port", "7980"], {}, ["--mesh-port"]),
        ([], {"FLUXMESH_MESH_SEEDS": "a,b"}, ["mesh_seeds"]),
        (["--mesh-port", "7946"], {}, []),  # as it would be without
        (["--mesh", "--mesh-port", "7980"], {}, []),
        (["--no-mesh"], {"FLUXMESH_MESH": "yes", "FLUXMESH_MESH_SEEDS": "a"}, []),  # meant so
    ],
)
def test_only_what_differs_from_its_default_and_was_not_switched_off_has_no_effect(
    flags: list[str], environ: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    words = ["worker", *flags]
    options = build_parser(words).parse_args(words)
    settings = load_settings(mesh_overrides(options), environ=environ, folder=tmp_path)
    assert idle_settings(options, settings) == expected


@pytest.mark.parametrize("command", ["worker", "server"])
def test_the_examples_of_the_help_are_good_options(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mesh.key").write_text(keygen())
    shown = run_here(command, "--help", cwd=tmp_path).out
    examples = [line.split()[1:] for line in shown.splitlines() if line.strip().startswith("fluxmesh ")]
    assert examples
    for words in examples:
        options = build_parser(words).parse_args(words)
        mesh_of(None, load_settings(mesh_overrides(options), environ={}, folder=tmp_path))


def test_a_key_file_that_everybody_may_read_is_a_warning_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "mesh.key").write_text(keygen())
    (tmp_path / "mesh.key").chmod(0o644)
    flags = ("--mesh-port", str(free_port()), "--mesh-bind-addr", "127.0.0.1", "--id", "w")
    with Running("worker", "--mesh", *flags, "--mesh-encryption-key", "@mesh.key", cwd=tmp_path) as worker:
        worker.until("everybody may read the key of the mesh")
        worker.until("chmod 600 mesh.key")
        worker.until("worker ready")
        assert worker.end() == 0


def test_keys_that_can_be_read_only_once_are_read_for_all_processes(tmp_path: Path) -> None:
    key, pipe = keygen(), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(f"{key}\n",))
    writer.start()
    words = ["worker", "--mesh-encryption-key", f"@{pipe}"]
    options = build_parser(words).parse_args(words)
    writer.join(timeout=10)
    assert options.mesh_encryption_key == key
