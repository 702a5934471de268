"""fluxmesh mesh, and the flags of the mesh on workers and servers."""

from __future__ import annotations

import asyncio
import base64
import signal
import socket
from pathlib import Path

import pytest

from fluxmesh.config import Settings
from fluxmesh.mesh.options import MeshWorker, keygen
from fluxmesh.storage.registry import open_storage
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
            storage, {"a": (member("a"), member("b"), c), "b": (member("a"), member("b"), member("c"))}
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
