"""The benchmark is run for its lines, never for its times."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gauge import Gauge
from benchmarks.grounds import Unfit, grounds_of
from tests import redis_server
from tests.architecture.gates import ROOT
from tests.redis_server import shared_server  # noqa: F401 - a fixture


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLUXMESH_")}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.run_benchmark", "--quick", "--n", "200", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=kept | environment,
    )


def run(folder: Path, *arguments: str, expect: int = 0) -> list[dict[str, Any]]:
    """The lines of a small run, which left nothing behind."""
    databases = folder / "databases"
    databases.mkdir()
    out = folder / "lines.jsonl"
    done = bench("--folder", str(databases), "--out", str(out), *arguments)
    assert done.returncode == expect, done.stderr
    assert out.read_text() == done.stdout
    assert list(databases.iterdir()) == []
    return [json.loads(text) for text in done.stdout.splitlines()]


def test_a_drain_is_told_beside_the_floor_of_its_run(tmp_path: Path) -> None:
    lines = run(tmp_path, "--only", "floor,drain", "--concurrency", "8,256")
    drains = [told for told in lines if told["name"] == "drain"]
    assert [told["parameters"]["concurrency"] for told in drains] == [8, 256]
    for told in drains:
        floor = f"drain at batch {told['parameters']['concurrency']}"
        assert told["floor"]["name"] == floor
        assert told["ratio_to_floor"] > 0
        assert told["figures"].startswith("not compared")
        assert told["bound"] == "median >= 10000 jobs/s"
    floors = [told for told in lines if told["name"].startswith("floor ")]
    assert len(floors) == 8
    assert len({told["configuration_sha256"] for told in lines}) == 1


def test_a_referee_far_from_the_floor_voids_every_figure(tmp_path: Path) -> None:
    referee = tmp_path / "referee.py"
    rates = {
        "drain": 1e9,
        "bulk_enqueue": 1e9,
        "awaited_enqueue": 1e9,
        "round_trip_us": 1.0,
        "sha256": "f" * 64,
    }
    referee.write_text(f"import json; print(json.dumps({rates!r}))")
    lines = run(tmp_path, "--only", "floor,bulk-enqueue", "--concurrency", "8", "--referee", str(referee))
    assert all(told["figures"].startswith("figures void: ") for told in lines)
    assert lines[0]["details"]["referee"]["sha256"] == "f" * 64


def test_a_referee_that_fails_leaves_no_figure(tmp_path: Path) -> None:
    referee = tmp_path / "referee.py"
    referee.write_text("raise SystemExit('out of order')")
    (told,) = run(tmp_path, "--only", "floor", "--referee", str(referee), expect=1)
    assert "out of order" in told["refused"]
    assert "median" not in told


# -- Redis ---------------------------------------------------------------------------------------------


def test_a_drain_on_redis_runs_on_a_server_of_its_own_and_tells_what_it_cost(tmp_path: Path) -> None:
    redis_server.program()
    lines = run(
        tmp_path, "--storage", "redis", "--only", "floor,drain,awaited-enqueue", "--concurrency", "64"
    )
    (drain,) = [told for told in lines if told["name"] == "drain"]
    assert drain["storage"] == "redis"
    assert (drain["parameters"]["concurrency"], drain["parameters"]["floor_batch"]) == (64, 64)
    assert drain["floor"]["name"] == "drain at batch 64"
    assert drain["ratio_to_floor"] > 0
    assert drain["bound"] == "median >= 15000 jobs/s"
    assert (drain["machine"]["save"], drain["machine"]["appendonly"]) == ("", "no")
    (cost,) = drain["details"]["cost"]
    # 200 jobs may be over at the first look.
    assert cost is None or cost["server_cpu_s_per_1000_jobs"] >= 0
    (awaited,) = [told for told in lines if told["name"] == "awaited enqueue"]
    assert awaited["bound"] == "ratio to floor >= 0.5"
    assert awaited["bound_met"] is (awaited["ratio_to_floor"] >= 0.5)


def test_commands_that_clients_sent_are_counted_and_those_of_scripts_are_not(
    server: redis_server.Server,
) -> None:
    async def count() -> None:
        with server.client() as one, server.client() as other:
            one.ping()  # connected: its HELLO would be counted, and rightly
            digest = other.script_load("redis.call('SET', 'a', 1) return redis.call('INCR', 'a')")

            async def send() -> None:
                for _ in range(5):
                    other.evalsha(digest, 0)
                other.get("a")
                one.echo("x")

            aio = server.redis.asyncio.Redis(port=server.port)
            before = await Gauge(aio).spent()
            heard = await Gauge(aio).heard(send())
            after = await Gauge(aio).spent()
            await aio.aclose()
            assert heard.by_name == {"EVALSHA": 5, "GET": 1, "ECHO": 1}
            assert (heard.sent, heard.inside_scripts) == (7, 10)
            assert after.scripts - before.scripts == 5
            assert after.scripts_s > before.scripts_s

    asyncio.run(count())


def test_a_database_that_holds_keys_is_refused_and_left_alone(server: redis_server.Server) -> None:
    with server.client(3) as client:
        client.set("precious", 1)
        with pytest.raises(Unfit, match="holds 1 keys"):
            asyncio.run(grounds_of("redis", server.url(3)).check())
        assert client.get("precious") == b"1"


def test_a_server_that_is_named_is_used_and_its_database_left_empty(
    server: redis_server.Server, tmp_path: Path
) -> None:
    (told,) = run(tmp_path, "--url", server.url(4), "--only", "bulk-enqueue")
    assert (told["storage"], told["machine"]["server"]) == ("redis", server.url(4))
    assert told["median"] > 0
    with server.client(4) as client:
        assert client.dbsize() == 0
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] >= 1


def test_without_a_program_of_a_server_nothing_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "lines"
    done = bench("--storage", "redis", "--out", str(out), PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "redis-server" in done.stderr
    assert "PATH" in done.stderr
    assert not out.exists()


def test_a_server_that_does_not_answer_is_told_without_its_password() -> None:
    port = redis_server.free_port()
    with pytest.raises(Unfit, match=f"127.0.0.1:{port}") as refused:
        asyncio.run(grounds_of("redis", f"redis://:secret@127.0.0.1:{port}/0").check())
    assert "secret" not in str(refused.value)
