"""Workers in the mesh, from Python: they join, publish, report, leave, and never run half."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fluxmesh import InvalidOption, MeshWorker, Queue
from fluxmesh.mesh.messages import Flag, Standing
from fluxmesh.mesh.node import MeshNode
from fluxmesh.mesh.view import NodeReport, decode_report
from fluxmesh.portal import run as run_async
from fluxmesh.running import WorkerHandle
from fluxmesh.worker.config import WorkerEnd
from tests.mesh.nodes import eventually
from tests.mesh.sockets import free_port
from tests.service.log_tap import tapped


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(db_path=tmp_path / "jobs.db", settings={"lease_s": 3, "keeper": False})
    yield queue
    queue.close()


@contextmanager
def working(queue: Queue, *names: str, seeds: tuple[str, ...] = ()) -> Iterator[list[WorkerHandle]]:
    """Workers of these names in one mesh, the first one its seed."""
    made: list[WorkerHandle] = []
    try:
        for name in names:
            port = free_port()
            seeds = seeds or (f"127.0.0.1:{port}",)
            mesh = MeshWorker(port=port, seeds=list(seeds), protocol_period_ms=200)
            made.append(queue.worker(worker_id=name, concurrency=2, mesh=mesh, grace_s=3.0))
            made[-1].start()
        yield made
    finally:
        for worker in made:
            worker.stop(0.0)


def node_of(worker: WorkerHandle) -> MeshNode:
    assert worker.mesh is not None
    return worker.mesh


def reports(queue: Queue) -> dict[str, NodeReport]:
    """What storage was told."""
    views = run_async(queue._link.use(lambda storage: storage.mesh_views()))
    told = {view.worker_id: decode_report(view.view) for view in views}
    return {name: report for name, report in told.items() if report is not None}


def standing_at(worker: WorkerHandle, name: str) -> Standing | None:
    for view in node_of(worker).members():
        if view.record.worker_id == name:
            return Standing(view.record.standing)
    return None


def flags_at(worker: WorkerHandle, name: str) -> Flag:
    for view in node_of(worker).members():
        if view.record.worker_id == name and view.load is not None:
            return Flag(view.load.flags)
    return Flag(0)


def test_workers_are_nodes_under_the_epochs_of_storage_and_tell_it_what_they_see(queue: Queue) -> None:
    with working(queue, "w1", "w2") as (one, two):
        assert isinstance(one.mesh, MeshNode)
        eventually(lambda: node_of(one).snapshot.in_ring == node_of(two).snapshot.in_ring == {"w1", "w2"})
        epochs = {info.worker_id: info.epoch for info in queue.list_workers()}
        assert {node.me.worker_id: node.me.epoch for node in (node_of(one), node_of(two))} == epochs

        def both_told() -> bool:
            told = reports(queue)
            return set(told) == {"w1", "w2"} and all(
                {member.worker_id for member in report.members if member.in_ring} == {"w1", "w2"}
                for report in told.values()
            )

        eventually(both_told)
        two.stop()
        assert standing_at(one, "w2") is Standing.LEFT
        assert node_of(one).snapshot.in_ring == {"w1"}
        assert set(reports(queue)) == {"w1"}
    assert reports(queue) == {}


def test_the_load_says_how_many_jobs_run(queue: Queue) -> None:
    hold = threading.Event()

    @queue.task
    def wait() -> None:
        hold.wait(20)

    with working(queue, "w1", "w2") as (one, two):
        eventually(lambda: flags_at(one, "w2") & Flag.READY != 0)
        wait.delay()
        wait.delay()
        eventually(lambda: node_of(one).cluster_info()["total_load"] == 2)
        eventually(lambda: node_of(two).cluster_info()["total_load"] == 2)
        hold.set()
        eventually(lambda: node_of(one).cluster_info()["total_load"] == 0)


def test_d20_a_worker_whose_loop_stands_still_is_alive_and_degraded_and_claims_nothing(queue: Queue) -> None:
    release = threading.Event()

    @queue.task(name="block")
    async def block() -> None:
        release.wait(20)  # in the loop, where no body should

    with working(queue, "w1", "w2") as (one, two):
        eventually(lambda: flags_at(one, "w2") & flags_at(two, "w1") & Flag.READY != 0)
        block.delay()
        eventually(lambda: one.running_count + two.running_count == 1)
        blocked, other = (one, two) if one.running_count else (two, one)
        name = blocked.worker_id
        eventually(lambda: flags_at(other, name) & Flag.DEGRADED != 0)
        began = time.monotonic()
        while time.monotonic() - began < 3.0:
            assert standing_at(other, name) is Standing.ALIVE
            assert not flags_at(other, name) & Flag.READY
            time.sleep(0.05)
        assert name in node_of(other).snapshot.in_ring
        release.set()
        eventually(lambda: flags_at(other, name) == Flag.READY | Flag.STEALS)


def test_of_two_live_workers_of_one_id_the_older_is_fenced_by_the_mesh_without_waiting_for_a_beat(
    tmp_path: Path,
) -> None:
    settings = {"lease_s": 60, "beat_s": 20, "keeper": False}  # no beat comes in time
    queue = Queue(db_path=tmp_path / "jobs.db", settings=settings)
    with working(queue, "first", "twin") as (_, older):
        port = node_of(older).address.port
        with working(queue, "twin", seeds=(f"127.0.0.1:{port}",)) as (newer,):
            assert older.wait(10) is WorkerEnd.FENCED
            assert newer.running_count == 0
            assert node_of(newer).running
    queue.close()


class TestWhatKeepsAWorkerFromStarting:
    def test_d27_a_taken_port_registers_nothing_and_announces_nothing(self, queue: Queue) -> None:
        with working(queue, "w1") as (one,):
            port = free_port()
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
                other.bind(("127.0.0.1", port))
                seeds = [f"127.0.0.1:{node_of(one).address.port}"]
                worker = queue.worker(worker_id="w2", mesh=MeshWorker(port=port, seeds=seeds))
                with pytest.raises(InvalidOption, match=f"UDP port {port} of 127.0.0.1 is taken"):
                    worker.start()
            assert [info.worker_id for info in queue.list_workers()] == ["w1"]
            assert worker.mesh is None
            assert node_of(one).members() == ()

    def test_run_worker_raises_it_as_well(self, queue: Queue) -> None:
        port = free_port()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
            other.bind(("127.0.0.1", port + 1))
            other.listen()
            with pytest.raises(InvalidOption, match=f"TCP port {port + 1}"):
                queue.run_worker(mesh=MeshWorker(port=port))

    def test_with_an_optional_mesh_it_is_an_error_in_the_log_and_the_worker_works(self, queue: Queue) -> None:
        @queue.task
        def double(number: int) -> int:
            return 2 * number

        port = free_port()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other, tapped() as tap:
            other.bind(("127.0.0.1", port))
            worker = queue.worker(worker_id="w1", mesh=MeshWorker(port=port), mesh_optional=True)
            worker.start()
            assert double.delay(4).result(timeout=20) == 8
            assert worker.mesh is None
            worker.stop()
            (line,) = tap.found("worker runs without the mesh", level="error")
            assert f"port {port}" in line["error"]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"seeds": ["10.1.2.3"]}, r"mesh_encryption_key.*fluxmesh mesh keygen"),
            ({"bind_addr": "0.0.0.0"}, r"mesh_bind_addr.*0\.0\.0\.0 can be reached"),
        ],
    )
    def test_what_options_allow_only_together_is_refused_before_anything_is_made(
        self, queue: Queue, options: dict[str, object], said: str
    ) -> None:
        with pytest.raises(InvalidOption, match=said):
            queue.worker(mesh=MeshWorker(**options))  # type: ignore[arg-type]

    def test_no_address_to_be_reached_at_is_said_and_the_ports_are_free_again(self, queue: Queue) -> None:
        port = free_port()
        key = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
        mesh = MeshWorker(port=port, encryption_key=key, bind_addr="127.0.0.1", seeds=["192.0.2.1"])
        with pytest.raises(InvalidOption, match=r"listens at 127\.0\.0\.1 only"):
            queue.worker(worker_id="w", mesh=mesh).start()
        assert queue.list_workers() == []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind(("127.0.0.1", port))


class TestSettings:
    def test_a_worker_is_in_the_mesh_if_the_settings_say_so_and_false_overrules_them(
        self, tmp_path: Path
    ) -> None:
        port = free_port()
        queue = Queue(
            db_path=tmp_path / "jobs.db",
            settings={"mesh": True, "mesh_port": port, "mesh_virtual_nodes": 7, "keeper": False},
        )
        worker = queue.worker(worker_id="w")
        worker.start()
        assert node_of(worker).address.port == port
        eventually(lambda: node_of(worker).snapshot.in_ring == {"w"})
        assert node_of(worker).snapshot.rings["default"].members == {"w": 7}
        worker.stop()
        other = queue.worker(worker_id="w", mesh=False)
        other.start()
        assert other.mesh is None
        other.stop()
        queue.close()

    def test_options_that_were_not_given_are_settings(self, tmp_path: Path) -> None:
        port = free_port()
        queue = Queue(db_path=tmp_path / "jobs.db", settings={"mesh_port": port, "keeper": False})
        worker = queue.worker(worker_id="w", mesh=MeshWorker(virtual_nodes=9))
        worker.start()
        assert node_of(worker).address.port == port
        worker.stop()
        queue.close()


def test_the_log_tells_what_the_node_meets(queue: Queue) -> None:
    with tapped("info") as tap, working(queue, "w1", "w2") as (one, two):
        eventually(lambda: standing_at(one, "w2") is Standing.ALIVE)
        node_of(two).close_now()
        eventually(lambda: standing_at(one, "w2") is Standing.DEAD)
        for event in (
            "gossip listening",
            "peer discovered",
            "mesh joined",
            "member suspected",
            "member dead",
        ):
            assert tap.found(event, logger="mesh"), event
        one.stop()
        eventually(lambda: bool(tap.found("leave sent")))


def test_bad_weather_can_be_ordered_for_a_worker(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUXMESH_TEST_MESH_WEATHER", "loss=1")
    with working(queue, "w1", "w2") as (one, two):
        # Streams lose nothing: they find each other by TCP, and are kept alive by it.
        eventually(lambda: standing_at(one, "w2") is standing_at(two, "w1") is Standing.ALIVE)
        eventually(lambda: node_of(one).metrics().get("probes_by_tcp", 0) > 0)
        assert node_of(one).metrics()["datagrams_sent"] == 0


def test_the_end_of_a_program_hurries_the_goodbye(queue: Queue) -> None:
    with working(queue, "w1", "w2") as (one, two):
        eventually(lambda: standing_at(one, "w2") is Standing.ALIVE)
        began = time.monotonic()
        two.stop_now()
        two.wait(5)
        assert time.monotonic() - began < 3
        eventually(lambda: standing_at(one, "w2") is Standing.LEFT)
