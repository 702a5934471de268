"""A cluster: all keys of a namespace on one node, which is found, and found again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from fluxmesh.config import Settings
from fluxmesh.errors import StorageRefused, StorageUnreachable
from fluxmesh.events import Event
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Verdict
from tests.redis_fleet import Cluster
from tests.redis_server import Server
from tests.unit.redis.play import claim, play, put, register

SLOT = key_slot(b"fluxmesh")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), 3, shared_out=True)
    yield cluster
    cluster.stop()


def test_any_node_leads_to_the_one_that_has_the_keys(cluster: Cluster) -> None:
    async def scene(storage: Storage) -> None:
        assert (await put(storage)).verdict is Verdict.CREATED

    for node in cluster.nodes:
        play(node.url(), scene)
    with cluster.owner_of("{fluxmesh}").client() as client:
        names = client.keys("*")
        assert names
        assert all(name.startswith(b"{fluxmesh}:") for name in names)
        assert sum(b":jobs:" in name for name in names) == 3
    assert sum(_keys_of(node) for node in cluster.nodes) == len(names)


def _keys_of(node: Server) -> int:
    with node.client() as client:
        return int(client.dbsize())


def test_namespaces_are_spread_over_the_nodes(cluster: Cluster) -> None:
    async def scene(storage: Storage) -> None:
        await put(storage)

    for name in ("a", "b", "c", "d", "e", "f"):
        play(cluster.nodes[0].url(), scene, Settings(namespace=name))
    assert all(_keys_of(node) > 0 for node in cluster.nodes)


def test_workers_are_woken_and_events_heard(cluster: Cluster) -> None:
    async def scene(storage: Storage) -> None:
        worker = await register(storage)
        for request in itertools.count(1):
            if not (await claim(storage, worker, request)).running:
                break
        async with storage.subscribe(["news"]) as events:
            await put(storage)
            assert await storage.wait_for_work(worker, 10)
            await storage.publish(Event("news", b"x"))
            assert (await anext(events)).body == b"x"

    play(cluster.nodes[0].url(), scene)


def test_of_several_nodes_one_that_lives_is_asked(cluster: Cluster, tmp_path: Path) -> None:
    gone = Server(tmp_path)
    gone.stop()
    living = cluster.nodes[1].port
    play(f"redis://127.0.0.1:{gone.port},127.0.0.1:{living}/0", put)


def test_several_servers_that_are_no_cluster_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        with pytest.raises(StorageRefused, match="no cluster"):
            play(f"redis://127.0.0.1:{server.port},127.0.0.1:{server.port}/0", put)
    finally:
        server.stop()


def test_a_database_other_than_the_first_is_refused(cluster: Cluster) -> None:
    with pytest.raises(StorageRefused, match=r"SELECT|DB index"):
        play(cluster.nodes[0].url(1), put)


def test_a_slot_that_has_moved_is_followed(cluster: Cluster) -> None:
    first = cluster.owner_of("{fluxmesh}")
    second = next(node for node in cluster.nodes if node is not first)

    async def scene(storage: Storage) -> None:
        worker = await register(storage)
        await claim(storage, worker, 1)
        with first.client() as client:
            client.execute_command("FLUSHALL")  # an empty slot can be given away by a word
        cluster.give(SLOT, second)
        assert (await put(storage)).verdict is Verdict.CREATED
        assert cluster.owner_of("{fluxmesh}") is second
        # The subscriber moved as well: the bells of the new node are heard.
        worker = await register(storage, "w2")
        assert len((await claim(storage, worker, 1)).running) == 1
        await claim(storage, worker, 2)
        await storage.wait_for_work(worker, 1)
        await claim(storage, worker, 3)
        await put(storage)
        assert await storage.wait_for_work(worker, 10)

    play(first.url(), scene)


def test_while_a_slot_is_being_moved_nothing_is_done_by_halves(cluster: Cluster) -> None:
    """Half of the keys are elsewhere then: a script would not find them."""
    first = cluster.owner_of("{fluxmesh}")
    second = next(node for node in cluster.nodes if node is not first)

    async def scene(storage: Storage) -> None:
        total = (await storage.counts()).total
        before = _keys_of(second)
        with second.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", SLOT, "IMPORTING", cluster.id_of(first))
        with first.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", SLOT, "MIGRATING", cluster.id_of(second))
        with pytest.raises(StorageUnreachable, match="ASK"):
            await put(storage)
        with second.client() as client:
            assert client.dbsize() == before
        with first.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", SLOT, "STABLE")
        with second.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", SLOT, "STABLE")
        assert (await put(storage)).verdict is Verdict.CREATED
        assert (await storage.counts()).total == total + 1

    play(first.url(), scene)


def test_a_cluster_that_lacks_a_node_is_unreachable_and_not_refused(tmp_path: Path) -> None:
    server = Server(tmp_path, "--cluster-enabled", "yes")
    try:
        with pytest.raises(StorageUnreachable, match=f"nobody owns slot {SLOT}"):
            play(server.url(), put)
    finally:
        server.stop()
