"""Real workers on the network, with one SQLite file: one that was stopped for long does nothing that is
another's by now."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluxmesh.mesh.options import keygen
from tests.cli.harness import environment, run_here, submit
from tests.net.network import Host, Network

KEY = keygen()
LEASE = {"FLUXMESH_LEASE_S": "3", "FLUXMESH_MESH_ENCRYPTION_KEY": KEY}


class OnHost:
    """`fluxmesh worker` on one machine of the network."""

    def __init__(self, host: Host, worker_id: str, folder: Path, seeds: str) -> None:
        self.log = folder / f"{worker_id}.log"
        words = ("worker", "--id", worker_id, "--mesh", "--mesh-seeds", seeds, "--concurrency", "2")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", host.space, sys.executable, "-m", "fluxmesh.cli", *words],
                cwd=folder,
                env=environment(LEASE),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def pids(self) -> list[int]:
        """The supervisor and its child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [self.process.pid, *map(int, children.split())]

    def send(self, number: signal.Signals) -> None:
        for pid in self.pids():
            os.kill(pid, number)

    def told(self, words: str) -> int:
        return self.log.read_text("utf-8", "replace").count(words)

    def end(self) -> None:
        if self.process.poll() is None:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def eventually(holds: Callable[[], bool], bound_s: float = 60.0) -> None:
    end_s = time.monotonic() + bound_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.1)


@pytest.fixture
def pair(network: Network, tmp_path: Path) -> Iterator[tuple[OnHost, OnHost]]:
    hosts = network.hosts[:2]
    both = tuple(OnHost(host, f"w{n}", tmp_path, hosts[0].address) for n, host in enumerate(hosts))
    try:
        eventually(lambda: all(one.told("mesh joined") for one in both))
        yield both  # type: ignore[misc]
    finally:
        for one in both:
            one.end()


def job(url: str, folder: Path, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        run_here("jobs", "show", job_id, "--url", url, "--json", cwd=folder).out
    )
    return found


def test_a_worker_stopped_for_forty_seconds_is_dead_to_the_mesh_and_fenced_from_its_jobs(
    pair: tuple[OnHost, OnHost], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'fluxmesh.db'}"
    job_id = submit(url, tmp_path, "slow_task", "--kwargs", '{"duration": 20}')
    eventually(lambda: job(url, tmp_path, job_id)["status"] == "RUNNING")
    owner = job(url, tmp_path, job_id)["worker_id"]
    sleeper, other = pair if owner == "w0" else pair[::-1]
    sleeper.send(signal.SIGSTOP)
    stopped = time.monotonic()
    eventually(lambda: other.told("member dead") == 1, 10)
    print(f"dead to the other after {time.monotonic() - stopped:.1f} s")
    # Its lease lapses, the job is taken back and runs on the other one.
    eventually(lambda: job(url, tmp_path, job_id)["worker_id"] not in (None, owner), 30)
    time.sleep(max(0.0, 40 - (time.monotonic() - stopped)))
    sleeper.send(signal.SIGCONT)
    eventually(lambda: job(url, tmp_path, job_id)["status"] == "COMPLETED")
    done = job(url, tmp_path, job_id)
    assert done["worker_id"] != owner
    assert (done["attempts"], done["crashes"]) == (1, 1)
    assert (
        sleeper.told("lease may have lapsed") + sleeper.told("job lost") + sleeper.told("worker fenced") >= 1
    )
    eventually(lambda: other.told("member refuted") + other.told("peer restarted") >= 1)
    assert sleeper.told("member dead") == 0
