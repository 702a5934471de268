"""Somebody in the mesh says that a newer run of a worker is there: what storage says of it counts."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluxmesh import MeshWorker, Queue
from fluxmesh.mesh.messages import PROTOCOL, Gossip, NodeRef, Packet, Record, Standing
from fluxmesh.mesh.node import MeshNode
from fluxmesh.mesh.seal import Plain
from fluxmesh.mesh.wire import encode_packet
from fluxmesh.running import WorkerHandle
from fluxmesh.worker import meshing
from fluxmesh.worker.config import WorkerEnd
from tests.mesh.nodes import Host, eventually, hosts
from tests.mesh.sockets import free_port
from tests.service.log_tap import tapped

ANY_EPOCH = 1 << 62


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    # No beat comes by itself while a test lasts.
    queue = Queue(db_path=tmp_path / "jobs.db", settings={"lease_s": 60, "beat_s": 20, "keeper": False})
    yield queue
    queue.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshing, "REJOIN_FIRST_S", 0.3)


def forge(port: int, sender: NodeRef, *news: Record) -> None:
    data, *_ = encode_packet(Packet(PROTOCOL, sender, 0, Gossip()), list(news), [], 1_160)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(Plain(label="fluxmesh").seal(data), ("127.0.0.1", port))


def joined(queue: Queue, *seeds: str) -> WorkerHandle:
    mesh = MeshWorker(port=free_port(), seeds=list(seeds), protocol_period_ms=200)
    worker = queue.worker(worker_id="w1", concurrency=2, mesh=mesh, grace_s=3.0)
    worker.start()
    return worker


def node_of(worker: WorkerHandle) -> MeshNode:
    assert worker.mesh is not None
    return worker.mesh


@pytest.mark.parametrize("way", ["sender", "record"])
def test_a_forged_claim_of_its_id_ends_no_worker_and_it_is_a_member_again_after_a_while(
    queue: Queue, way: str, soon: None
) -> None:
    @queue.task
    def double(number: int) -> int:
        return 2 * number

    peer = Host("peer")
    with hosts(peer), tapped() as tap:
        worker = joined(queue, peer.seed)
        eventually(lambda: peer.standing_of("w1") is Standing.ALIVE)
        eventually(lambda: node_of(worker)._core is not None)
        core = node_of(worker)._core
        assert core is not None
        core.voice.counts["jobs_stolen_in"] = 3
        first, port, epoch = node_of(worker), node_of(worker).address.port, worker_epoch(queue)
        if way == "sender":
            forge(port, NodeRef("w1", ANY_EPOCH))
        else:
            record = Record("w1", ANY_EPOCH, 0, int(Standing.ALIVE), "127.0.0.1", 7_946, 1)
            forge(port, NodeRef("evil", 1), record)
        eventually(lambda: bool(tap.found("worker goes on without the mesh")))
        (line,) = tap.found("worker goes on without the mesh", level="error")
        assert (line["claimed_epoch"], line["epoch"]) == (ANY_EPOCH, epoch)
        assert line["claimed_from"].startswith("127.0.0.1:")
        assert "storage knows no newer run" in line["hint"]
        assert not first.running
        assert double.delay(4).result(timeout=20) == 8
        eventually(lambda: node_of(worker) is not first and node_of(worker).running)
        assert (node_of(worker).me, node_of(worker).address) == (first.me, first.address)
        eventually(lambda: peer.standing_of("w1") is Standing.ALIVE and "peer" in seen_by(worker))
        assert not tap.found("worker fenced")
        assert node_of(worker).metrics()["jobs_stolen_in"] == 3, "one worker, whatever became of its node"
        worker.stop()
        assert worker.wait(10) is WorkerEnd.STOPPED
        assert peer.standing_of("w1") is Standing.LEFT


def seen_by(worker: WorkerHandle) -> set[str]:
    return {view.record.worker_id for view in node_of(worker).members()}


def worker_epoch(queue: Queue) -> int:
    (info,) = queue.list_workers()
    return info.epoch


def test_a_worker_of_a_storage_made_anew_works_while_others_remember_a_higher_epoch(
    queue: Queue, soon: None
) -> None:
    @queue.task
    def double(number: int) -> int:
        return 2 * number

    Host.epochs["w1"] = 57
    peer = Host("peer")
    before = Host("w1", seeds=[peer.seed])
    with hosts(peer), tapped() as tap:
        with hosts(before):
            eventually(lambda: peer.sees(before))
            before.node.leave()
        worker = joined(queue, peer.seed)
        eventually(lambda: len(tap.found("worker goes on without the mesh")) == 2)
        first, second = tap.found("worker goes on without the mesh")
        assert (first["claimed_epoch"], first["epoch"]) == (58, 1)
        assert (first["again_in_s"], second["again_in_s"]) == (0.3, 0.6)
        assert double.delay(4).result(timeout=20) == 8
        began = time.monotonic()
        worker.stop()
        assert time.monotonic() - began < 2  # nothing is left to say goodbye
        assert worker.wait(1) is WorkerEnd.STOPPED


def test_a_worker_that_is_fenced_indeed_ends_at_once_and_is_called_neither_suspect_nor_dead(
    queue: Queue,
) -> None:
    peer = Host("peer")
    with hosts(peer):
        older = joined(queue, peer.seed)
        eventually(lambda: peer.standing_of("w1") is Standing.ALIVE)
        newer = joined(queue, peer.seed)
        began = time.monotonic()
        assert older.wait(10) is WorkerEnd.FENCED
        assert time.monotonic() - began < 2
        eventually(lambda: peer.standing_of("w1") is Standing.ALIVE)
        assert not {"suspected", "dead"} & set(peer.told.kinds("w1"))
        newer.stop()
