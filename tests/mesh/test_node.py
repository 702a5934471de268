"""Nodes over real sockets: they find each other, notice deaths, say goodbye, refuse strangers."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from fluxmesh.errors import FluxMeshError, InvalidOption
from fluxmesh.mesh.delays import Weather
from fluxmesh.mesh.messages import PROTOCOL, Flag, NodeRef, Packet, Ping, Standing
from fluxmesh.mesh.options import keygen
from fluxmesh.mesh.ports import bind_ports
from fluxmesh.mesh.seal import Plain
from fluxmesh.mesh.view import decode_report
from fluxmesh.mesh.wire import encode_packet
from tests.mesh.nodes import READY, Host, all_see_all, eventually, hosts
from tests.mesh.sockets import free_port


def test_three_nodes_find_each_other_by_one_seed_and_agree_on_the_ring() -> None:
    one = Host("one")
    two, three = Host("two", seeds=[one.seed]), Host("three", seeds=[one.seed])
    group = [one, two, three]
    with hosts(*group):
        eventually(lambda: all_see_all(group))
        everybody = {"one", "two", "three"}
        eventually(lambda: all(host.node.snapshot.in_ring == everybody for host in group))
        keys = [f"key-{number}" for number in range(300)]
        owners = [[host.node.preferred_worker(key) for key in keys] for host in group]
        assert owners[0] == owners[1] == owners[2]
        assert set(owners[0]) == everybody
        for host in group:
            owned = sum(host.node.is_affinity_owner(key) for key in keys)
            assert owned == owners[0].count(host.worker_id)
            info = host.node.cluster_info()
            assert (info["peer_count"], info["total_capacity"]) == (2, 12)
        assert one.told.words()[0] == "gossip listening"
        assert {"peer discovered", "mesh joined"} <= set(two.told.words())


def test_rings_are_by_queue() -> None:
    one = Host("one", queues=("a", "b"))
    two = Host("two", queues=("b", "c"), seeds=[one.seed])
    with hosts(one, two):
        eventually(lambda: all(len(host.node.snapshot.in_ring) == 2 for host in (one, two)))
        rings = {queue: set(ring.members) for queue, ring in one.node.snapshot.rings.items()}
        assert rings == {"a": {"one"}, "b": {"one", "two"}, "c": {"two"}}
        assert one.node.preferred_worker("key") == "one"
        assert one.node.preferred_worker("key", queue="c") == "two"
        assert one.node.preferred_worker("key", queue="nobody's") is None
        for asks in (one.node.preferred_worker, one.node.is_affinity_owner):
            for field, given in (("key", {"key": 5}), ("queue", {"key": "k", "queue": b"a"})):
                with pytest.raises(InvalidOption, match="must be a text") as refused:
                    asks(**given)
                assert refused.value.field == field


def test_a_node_says_who_it_is_where_and_how_many_it_knows() -> None:
    one = Host("one")
    assert repr(one.node) == f"<MeshNode one.{one.node.me.epoch} at 127.0.0.1:{one.port}, 0 peers>"
    two = Host("two", seeds=[one.seed])
    with hosts(one, two):
        eventually(lambda: all_see_all([one, two]))
        assert repr(two.node).endswith(", 1 peer>")


def test_a_node_that_falls_silent_is_suspected_and_then_dead_and_leaves_the_ring() -> None:
    one = Host("one")
    two, three = Host("two", seeds=[one.seed]), Host("three", seeds=[one.seed])
    with hosts(one, two, three):
        eventually(lambda: all(len(host.node.snapshot.in_ring) == 3 for host in (one, two, three)))
        three.node.close_now()
        assert not three.node.running
        for host in (one, two):
            host.told.wait(lambda host=host: "dead" in host.told.kinds("three"))
            assert host.told.kinds("three")[-2:] == ["suspected", "dead"]
            eventually(lambda host=host: host.node.snapshot.in_ring == {"one", "two"})
        assert {"member suspected", "member dead"} <= set(one.told.words())


def test_d10_who_leaves_is_left_everywhere_and_suspected_nowhere() -> None:
    one = Host("one")
    group = [one, *(Host(f"n{number}", seeds=[one.seed]) for number in range(4))]
    with hosts(*group):
        eventually(lambda: all_see_all(group))
        leaver = group.pop()
        leaver.node.leave()
        leaver.node.leave()
        assert not leaver.node.running
        assert "leave sent" in leaver.told.words()
        for host in group:
            assert host.standing_of(leaver.worker_id) is Standing.LEFT
            kinds = host.told.kinds(leaver.worker_id)
            assert kinds[-1] == "left"
            assert not {"suspected", "dead"} & set(kinds)
        # Nor later: what was probed when it left must not end in an accusation.
        time.sleep(1.5)
        assert all(host.told.kinds(leaver.worker_id)[-1] == "left" for host in group)


def test_leave_may_be_called_by_many_threads_at_once_and_by_a_node_that_never_started() -> None:
    never = Host("never")
    never.node.leave()
    never.node.start()
    assert not never.node.running
    one = Host("one").start()
    threads = [threading.Thread(target=one.node.leave) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not one.node.running
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", one.port))


@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.002, 0.01])
def test_a_node_may_be_told_to_go_at_any_instant_of_its_start(delay_s: float) -> None:
    one = Host("one")
    starting = threading.Thread(target=one.node.start)
    starting.start()
    time.sleep(delay_s)
    one.node.close_after(0.0)
    starting.join(10)
    assert not starting.is_alive()
    eventually(lambda: not one.node.running)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", one.port))


def test_a_load_that_was_told_before_the_start_is_heard_by_others() -> None:
    one = Host("one")
    two = Host("two", seeds=[one.seed])
    two.node.publish(queued=0, running=3, flags=READY)
    with hosts(one):
        try:
            two.node.start()
            two.node.publish(queued=0, running=3, flags=READY)  # nothing new
            eventually(lambda: [v.load.running for v in one.node.members() if v.load] == [3])
            eventually(lambda: two.node.snapshot.in_ring == one.node.snapshot.in_ring == {"one", "two"})
        finally:
            two.node.close_now()


@pytest.mark.parametrize("lacking", ["thread", "loop", "server"])
def test_a_start_for_which_this_machine_lacks_something_says_so_and_leaves_the_ports_free(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def no_loop() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, "Too many open files")

    async def no_server(*_args: object, **_options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    one = Host("one")
    with monkeypatch.context() as short:
        if lacking == "thread":
            short.setattr(threading.Thread, "start", no_thread)
        elif lacking == "loop":
            short.setattr(asyncio, "new_event_loop", no_loop)
        else:
            short.setattr(asyncio, "start_server", no_server)
        with pytest.raises(FluxMeshError, match=r"(?s)did not start: .*ulimit -n"):
            one.node.start()
    assert not one.node.running
    one.node.leave()
    bind_ports("127.0.0.1", one.port).close()


def test_d16_the_same_id_on_another_port_is_accepted_at_once_under_its_higher_epoch() -> None:
    one = Host("one")
    two = Host("two", seeds=[one.seed])
    with hosts(one, two):
        eventually(lambda: all_see_all([one, two]))
        two.node.close_now()
        again = Host("two", seeds=[one.seed])
        with hosts(again):
            eventually(lambda: any(view.record.port == again.port for view in one.node.members()))
            assert [view.record.epoch for view in one.node.members()] == [again.node.me.epoch]
            assert "restarted" in one.told.kinds("two")
            assert "dead" not in one.told.kinds("two")


def test_of_two_live_holders_of_an_id_the_older_run_is_fenced_and_falls_silent() -> None:
    fenced = threading.Event()
    one = Host("one")
    older = Host("twin", seeds=[one.seed], on_fenced=lambda _: fenced.set())
    newer = Host("twin", seeds=[one.seed])
    with hosts(one, older):
        eventually(lambda: one.sees(older))
        with hosts(newer):
            assert fenced.wait(10)
            assert "mesh fenced" in older.told.words()
            eventually(lambda: not older.node.running)
            assert older.node.members() == ()
            eventually(lambda: one.sees(newer))
            assert newer.standing_of("one") is Standing.ALIVE
            assert "fenced" not in newer.told.kinds()


def test_d12_two_islands_merge_when_one_learns_of_a_member_of_the_other() -> None:
    a1 = Host("a1")
    a2 = Host("a2", seeds=[a1.seed])
    b1 = Host("b1")
    b2 = Host("b2", seeds=[b1.seed, a2.seed])
    with hosts(a1, a2):
        eventually(lambda: all_see_all([a1, a2]))
        with hosts(b1, b2):
            eventually(lambda: all_see_all([a1, a2, b1, b2]))


def test_d14_names_that_resolve_only_later_are_asked_for_until_they_do() -> None:
    asked: list[float] = []
    begun_s = time.monotonic()

    def lookup(_host: str) -> Sequence[str]:
        asked.append(time.monotonic() - begun_s)
        return ["127.0.0.1"] if asked[-1] > 2.5 else []

    one = Host("one")
    two = Host("two", seeds=[f"localhost:{one.port}"], lookup=lookup)
    with hosts(one, two):
        eventually(lambda: all_see_all([one, two]))
        assert len(asked) >= 3
        assert 2.5 <= time.monotonic() - begun_s < 8


def test_nodes_in_bad_weather_find_each_other_and_declare_nobody_dead() -> None:
    weather = Weather(loss=0.3, double=0.1, delay_ms=10, jitter_ms=20)
    one = Host("one", weather=weather)
    group = [one, *(Host(f"n{number}", seeds=[one.seed], weather=weather) for number in range(3))]
    with hosts(*group):
        eventually(lambda: all_see_all(group))
        time.sleep(4)  # twenty periods
        assert not any("dead" in host.told.kinds() for host in group)
        eventually(lambda: all_see_all(group))
        sent = sum(host.node.metrics()["packets_sent"] for host in group)
        left = sum(host.node.metrics()["datagrams_sent"] for host in group)
        assert 0.6 * sent < left < 0.95 * sent  # of what is said 0.7 * 1.1 is put on the wire


class TestStrangers:
    def test_d15_a_wrong_key_and_a_wrong_label_are_refused_loudly_and_change_nothing(self) -> None:
        key = keygen()
        one = Host("one", encryption_key=key)
        two = Host("two", encryption_key=key, seeds=[one.seed])
        wrong_key = Host("wrong-key", encryption_key=keygen(), seeds=[one.seed])
        wrong_label = Host("wrong-label", encryption_key=key, label="another", seeds=[one.seed])
        no_key = Host("no-key", seeds=[one.seed])
        with hosts(one, two, wrong_key, wrong_label, no_key):
            eventually(lambda: all_see_all([one, two]))

            def refusals(host: Host) -> set[object]:
                return {
                    fields["why"] for _, word, fields in list(host.told.lines) if word == "packet refused"
                }

            wanted = {"wrong key", "wrong label", "plaintext where a key is needed"}
            one.told.wait(lambda: wanted <= refusals(one))
            assert all(level == "warning" for level, word, _ in one.told.lines if word == "packet refused")
            for stranger in (wrong_key, wrong_label, no_key):
                stranger.told.wait(lambda stranger=stranger: bool(refusals(stranger)))
                assert not stranger.node.members()
            assert {view.record.worker_id for view in one.node.members()} == {"two"}
            eventually(lambda: one.node.metrics().get("refused_wrong_key", 0) > 0)

    def test_a_member_of_another_version_is_not_understood_and_the_log_says_so(self) -> None:
        one = Host("one")
        two = Host("two", seeds=[one.seed])
        ping = Packet(2, NodeRef("later", 1), 0, Ping(1, NodeRef("one", 1)))
        data, _, _ = encode_packet(ping, [], [], 1_000)
        with hosts(one, two), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            eventually(lambda: all_see_all([one, two]))
            sock.settimeout(0.3)
            sock.sendto(Plain(label="fluxmesh").seal(data), ("127.0.0.1", one.port))
            with pytest.raises(TimeoutError):
                sock.recv(2_000)
            eventually(lambda: one.told.words().count("packet refused") == 1)
            (fields,) = [fields for _, word, fields in one.told.lines if word == "packet refused"]
            assert fields["why"] == "protocol version"
            assert one.node.metrics()["packets_refused_protocol_version"] == 1
            assert {view.record.worker_id for view in one.node.members()} == {"two"}

    def test_replies_to_strangers_are_not_larger_than_what_they_asked(self) -> None:
        one = Host("one").start()
        ping = Packet(PROTOCOL, NodeRef("stranger", 1), 0, Ping(1, one.node.me))
        data, _, _ = encode_packet(ping, [], [], 1_000)
        sealed = Plain(label="fluxmesh").seal(data)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(2)
            sock.sendto(sealed, ("127.0.0.1", one.port))
            assert len(sock.recv(2_000)) <= len(sealed)
        assert one.node.members() == ()
        one.node.close_now()

    def test_d21_noise_is_dropped_and_counted_and_harms_nobody(self) -> None:
        one = Host("one")
        two = Host("two", seeds=[one.seed])
        with hosts(one, two):
            eventually(lambda: all_see_all([one, two]))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                for number in range(2_000):
                    noise = bytes([number % 256]) * (number % 1_400)
                    sock.sendto(noise, ("127.0.0.1", one.port))
                sock.sendto(b"\xf0" + b"\xff" * 2_000, ("127.0.0.1", one.port))
            eventually(lambda: sum(v for k, v in one.node.metrics().items() if "refused" in k) > 1_000)
            assert all_see_all([one, two])
            assert "dead" not in one.told.kinds() + two.told.kinds()
            # A flood of one kind fills no log: one line a minute for each reason and host.
            assert one.told.words().count("packet refused") < 12


class TestLoad:
    def test_a_load_reaches_the_others_and_the_report(self) -> None:
        one = Host("one")
        two = Host("two", seeds=[one.seed])
        with hosts(one, two):
            eventually(lambda: all_see_all([one, two]))
            two.node.publish(queued=3, running=2, flags=READY)

            def load_at_one() -> tuple[int, int] | None:
                (view,) = one.node.members()
                return (view.load.queued, view.load.running) if view.load else None

            eventually(lambda: load_at_one() == (3, 2))
            assert one.node.cluster_info()["total_load"] == 5
            (row,) = [row for row in report_of(one).members if row.worker_id == "two"]
            assert (row.queued, row.running, row.standing) == (3, 2, "alive")

    def test_who_drains_leaves_the_ring_at_once_and_who_is_degraded_keeps_its_place(self) -> None:
        one = Host("one")
        two = Host("two", seeds=[one.seed])
        with hosts(one, two):
            eventually(lambda: len(one.node.snapshot.in_ring) == 2)
            two.node.publish(queued=0, running=1, flags=Flag.DEGRADED)
            eventually(lambda: "degraded" in flags_at(one, "two"))
            assert one.node.snapshot.in_ring == {"one", "two"}
            two.node.publish(queued=0, running=1, flags=Flag.DRAINING)
            eventually(lambda: one.node.snapshot.in_ring == {"one"})
            assert two.node.snapshot.in_ring == {"one"}

    def test_a_report_is_given_again_only_if_it_has_changed_or_was_not_told(self) -> None:
        one = Host("one")
        with hosts(one):
            eventually(lambda: one.node.snapshot.in_ring == {"one"})
            first = one.node.report(100.0)
            assert first is not None
            assert one.node.report(101.0) == first
            one.node.reported(first, 101.0)
            assert one.node.report(103.0) is None
            assert one.node.report(105.0) is None
            one.node.publish(queued=0, running=3, flags=READY)
            eventually(lambda: one.node.snapshot.me[0].load.running == 3)
            assert one.node.report(115.9) is None  # nothing but a number
            numbers = one.node.report(116.1)
            assert numbers is not None
            one.node.reported(numbers, 116.1)
            two = Host("two", seeds=[one.seed])
            with hosts(two):
                eventually(lambda: one.sees(two))
                assert one.node.report(119.0) is None
                changed = one.node.report(119.2)
                assert changed is not None
                one.node.reported(changed, 119.2)
        assert one.node.report(200.0) == b""
        one.node.reported(b"", 200.0)
        assert one.node.report(300.0) is None


def report_of(host: Host):  # type: ignore[no-untyped-def]
    data = host.node.report(1e9)
    assert data is not None
    report = decode_report(data)
    assert report is not None
    assert msgspec.json.encode(report) == data
    return report


def flags_at(host: Host, worker_id: str) -> Sequence[str]:
    return next(row.flags for row in report_of(host).members if row.worker_id == worker_id)


def test_d27_a_taken_port_is_said_before_anything_is_announced() -> None:
    port = free_port()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", port))
        with pytest.raises(ValueError, match=rf"mesh_port: UDP port {port} of 127\.0\.0\.1 is taken"):
            Host("one", port=port)


def test_the_log_names_a_seed_that_is_not_reached_and_where_a_node_listens() -> None:
    silent = free_port()
    seeds = ["nowhere.invalid", f"127.0.0.1:{silent}"]
    one = Host("one", seeds=seeds, lookup=lambda host: [], encryption_key=keygen(), bind_addr="127.0.0.1")
    with hosts(one):
        one.told.wait(lambda: one.told.words().count("seed not reached") == 2)
    (listening,) = (fields for _, event, fields in one.told.lines if event == "gossip listening")
    assert (listening["bind"], listening["told"], listening["port"]) == (
        "127.0.0.1",
        f"127.0.0.1:{one.port}",
        one.port,
    )
    page = (Path(__file__).parents[2] / "docs" / "mesh.md").read_text("utf-8")
    for name in one.node.cluster_info():
        assert f"`{name}`" in page
    starts = [start.rstrip("…") for start in re.findall(r"`([a-z_]+…?)`", page)]
    metrics = one.node.metrics()
    table = page.partition("`worker.mesh.metrics()`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(names) > 40
    assert names - metrics.keys() == set()
    for name in metrics:
        assert any(name == start or (start[-1] == "_" and name.startswith(start)) for start in starts), name
    failed = {f["seed"]: (level, f) for level, event, f in one.told.lines if event == "seed not reached"}
    assert {level for level, _ in failed.values()} == {"warning"}
    assert failed["nowhere.invalid"][1]["why"] == "no address is found for it"
    assert failed[f"127.0.0.1:{silent}"][1]["why"] == f"no answer from 127.0.0.1 port {silent}"
    assert all("next_try_s" in fields for _, fields in failed.values())


def test_the_first_process_of_the_same_worker_is_no_seed_that_somebody_has_mistyped() -> None:
    silent = f"127.0.0.1:{free_port()}"
    one = Host("one", seeds=[silent])
    object.__setattr__(one.options, "sibling_seed", silent)
    with hosts(one):
        one.told.wait(lambda: "seed not reached" in one.told.words())
    assert [level for level, event, _ in one.told.lines if event == "seed not reached"] == ["debug"]
