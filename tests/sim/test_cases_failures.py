"""Cases of failure detection and of bad news, in virtual time."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from random import Random

import pytest
from msgspec import msgpack

from fluxmesh.mesh.messages import Nack, Ping, PingReq, Record, Standing
from fluxmesh.mesh.timing import DATAGRAM_MAX_BYTES, MS, SEAL_BYTES, S, Timing
from fluxmesh.testing.simnet import NobodyWatches
from fluxmesh.testing.simnet_acts import tampered
from fluxmesh.testing.simnet_network import Via
from tests.sim.world import World, record_of

TIMING = Timing()
SMIN_S = TIMING.suspicion_min_ns(3) / S


def test_d1_a_node_without_udp_is_kept_alive_over_tcp_for_ten_minutes_with_one_warning_each() -> None:
    world = World()
    nodes = world.form(5)
    world.cut(nodes[2], [node for node in nodes if node is not nodes[2]], Via.UDP)
    began = world.now_s

    world.run(600)

    assert world.emits("suspected", "dead", since_s=began) == []
    warned = Counter((one.node, one.record and one.record.worker_id) for one in world.emits("probe_resolved"))
    assert {pair for pair in warned if pair[1] == "w2"} == {(f"w{i}", "w2") for i in (0, 1, 3, 4)}
    assert set(warned.values()) == {1}
    print(f"D1: 600 s, 0 suspicions, {len(warned)} warnings")


def test_d2_who_is_said_to_live_at_no_address_is_not_believed_in_and_nobody_else_is_suspected() -> None:
    world = World()
    nodes = world.form(4)
    began = world.now_s
    for host in ("0.0.0.0", "::", "224.0.0.1", "255.255.255.255"):
        world.forge(
            nodes[1], nodes[0], news=[record_of(nodes[3], Standing.ALIVE, worker_id="bad", host=host)]
        )

    world.run(60)

    assert world.emits("suspected", "dead", since_s=began) == []
    assert all(world.row(node, "bad") is None for node in nodes)
    counters = nodes[1].core.counters()
    assert sum(value for name, value in counters.items() if "refused" in name or "unusable" in name) >= 4


@pytest.mark.parametrize("n", [4, 8, 16])
def test_d3_nobody_is_suspected_while_a_helper_can_still_answer(n: int) -> None:
    world = World()
    nodes = world.form(n)
    world.cut(nodes[0], [nodes[1]], Via.BOTH)
    began = world.now_s

    world.run(120)

    detours = [
        one for one in world.eyes.sent if isinstance(one.packet.message, PingReq) and one.at_s >= began
    ]
    assert detours
    assert world.emits("suspected", since_s=began) == []


def test_d4_of_three_nodes_the_only_helper_is_always_asked_and_says_no_exactly_once() -> None:
    world = World()
    nodes = world.form(3)
    began = world.now_s
    world.cut(nodes[0], [nodes[1]], Via.BOTH)
    world.run(300)
    assert world.emits("suspected", since_s=began) == []

    killed_at = world.now_s
    world.net.kill(nodes[1], host_too=True)
    world.run(1.9)

    asked = [
        one.packet.message.seq  # type: ignore[union-attr]
        for one in world.eyes.sent
        if one.node == "w0" and one.at_s >= killed_at and isinstance(one.packet.message, PingReq)
    ]
    said_no = Counter(
        one.packet.message.seq
        for one in world.eyes.sent
        if one.node == "w2" and one.at_s >= killed_at and isinstance(one.packet.message, Nack)
    )
    assert asked
    assert {seq: said_no[seq] for seq in asked[:-1]} == dict.fromkeys(asked[:-1], 1)


def test_d5_a_send_that_fails_at_once_is_a_probe_without_answer_and_the_host_is_dead_in_time() -> None:
    world = World()
    nodes = world.form(5)
    world.net.kill(nodes[4], host_too=True)
    world.net.network.unreachable.add(nodes[4].address.host)
    began = world.now_s
    round_s = 4 * TIMING.period_ns / S

    world.run(round_s + TIMING.period_ns / S + TIMING.suspicion_ns(5, 0) / S)

    assert set(world.standings("w4").values()) == {Standing.DEAD}
    first = min(one.at_s for one in world.emits("dead", about="w4"))
    assert first - began <= round_s + 0.5 + SMIN_S + 1.0
    assert world.net.network.happened["send error"] > 0


def test_d6_two_that_hold_each_other_for_dead_tell_it_once_a_period_and_never_in_answer() -> None:
    world = World()
    nodes = world.form(2)
    world.part([nodes[0]])
    world.run(60)
    assert world.standings("w0") == {"w1": Standing.DEAD}
    assert world.standings("w1") == {"w0": Standing.DEAD}
    before = {node.name: node.core.counters().get("notices_sent", 0) for node in nodes}
    world.net.network.heal()
    healed_at = world.now_s

    took = world.merges(65)
    world.run(10)

    for node in nodes:
        notices = node.core.counters().get("notices_sent", 0) - before[node.name]
        assert notices <= (world.now_s - healed_at) / (TIMING.period_ns / S)
        assert notices <= 4
    after = [one for one in world.eyes.sent if one.at_s >= healed_at + took]
    assert len(after) <= 2 * 4.5 * (world.now_s - healed_at - took) + 8


def test_d8_two_different_leave_records_of_one_node_are_quiet_within_a_minute() -> None:
    world = World(watch=NobodyWatches())
    nodes = world.form(6)
    world.net.kill(nodes[5], host_too=True)
    for incarnation, to in ((0, nodes[0]), (1, nodes[1]), (0, nodes[2]), (2, nodes[3])):
        world.forge(to, nodes[4], news=[record_of(nodes[5], Standing.LEFT, incarnation=incarnation)])

    world.run(60)

    assert set(world.standings("w5").values()) == {Standing.LEFT}
    assert [node.core.counters()["news_queued"] for node in nodes[:5]] == [0] * 5
    before = sum(node.packets for node in nodes[:5])
    world.run(30)
    assert (sum(node.packets for node in nodes[:5]) - before) / 30 / 5 <= 4.1


def test_d19_a_single_overloaded_node_gets_no_healthy_one_declared_dead_and_floods_nobody() -> None:
    world = World(most_nodes=100)
    world.eyes.keeps = False
    nodes = world.form(60, within_s=40)
    began = world.now_s
    nodes[7].lag_ns = 2_500 * MS
    before = {node.name: node.packets for node in nodes}

    world.run(60)

    assert world.emits("dead", since_s=began) == []
    at_healthy_pairs = [
        one
        for one in world.emits("suspected", since_s=began)
        if one.record is not None and one.record.worker_id != "w7" and one.record.accuser not in ("w7", "")
    ]
    assert at_healthy_pairs == []
    worst = max((node.packets - before[node.name]) / 60 for node in nodes)
    assert worst <= 9.0
    suspicions = len(world.emits("suspected", since_s=began))
    print(f"D19: worst node sends {worst:.1f} packets/s, {suspicions} suspicions")


def test_d20_a_stall_shorter_than_the_shortest_suspicion_kills_nobody() -> None:
    for seed in range(5):
        world = World(seed=seed)
        nodes = world.form(5)
        began = world.now_s
        nodes[1].freeze(int((SMIN_S - 0.1) * S))
        world.run(20)
        assert world.emits("dead", since_s=began) == []
        world.merges(5)


def test_d20_who_was_stopped_for_forty_seconds_wakes_up_accusing_nobody_and_comes_back() -> None:
    world = World()
    nodes = world.form(5)
    nodes[1].freeze(40 * S)
    world.run(39)
    assert set(world.standings("w1").values()) == {Standing.DEAD}
    woke_at = world.now_s + 1

    world.run(1)
    took = world.merges(35)

    assert [one for one in world.emits("dead", since_s=woke_at) if one.node == "w1"] == []
    others = [one for one in world.emits("suspected", "dead", since_s=woke_at) if one.record is not None]
    assert {one.record.worker_id for one in others if one.record is not None} <= {"w1"}
    print(f"D20: one table {took:.2f} s after 40 s of standing still")


def truncated(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data))]


def test_d21_a_storm_of_junk_raises_nothing_changes_no_table_and_takes_no_memory() -> None:
    world = World()
    nodes = world.form(3)
    good = [msgpack.encode(one.packet) for one in world.eyes.sent[-50:]]
    rng = Random(21)
    target = nodes[0]
    before = world.standings("w0")
    for data in good:  # the counters of what is refused exist by then
        target.core.on_packet(nodes[1].address, tampered(data, rng), target.now)
    tracemalloc.start()
    held = tracemalloc.get_traced_memory()[0]
    for _ in range(2_000):
        data = rng.choice(
            (
                rng.randbytes(rng.randrange(1_400)),
                b"\xdd\xff\xff\xff\xff" + rng.randbytes(8),
                b"\x95\x01\xdb\xff\xff\xff\xff",
                b"\x91" * 1_200,
                truncated(rng.choice(good), rng),
            )
        )
        assert target.core.on_packet(nodes[1].address, data, target.now) == []
    grown = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    assert grown < 64 << 10
    assert target.core.counters()["members_living"] == 2
    assert world.standings("w0") == before


def test_d22_more_than_255_changes_at_once_reach_everybody_in_datagrams_that_fit() -> None:
    class Sizes(NobodyWatches):
        worst = 0

        def sends(self, node: object, effect: object) -> None:
            self.worst = max(self.worst, len(effect.data))  # type: ignore[attr-defined]

    sizes = Sizes()
    world = World(watch=sizes)
    nodes = world.form(4)
    others = [
        Record(f"x{number}", 1, 0, int(Standing.LEFT), f"10.5.{number >> 8}.{number & 255}", 7946, 0)
        for number in range(300)
    ]
    for first in range(0, 300, 15):
        world.forge(nodes[0], nodes[3], news=others[first : first + 15])

    world.run(10)

    for node in nodes:
        assert sum(view.record.worker_id.startswith("x") for view in node.core.members(node.now)) == 300
    assert sizes.worst <= DATAGRAM_MAX_BYTES - SEAL_BYTES


def test_d26_the_next_word_to_a_falsely_suspected_node_tells_it_and_brings_its_refutation() -> None:
    waits = []
    for seed in range(20):
        world = World(seed=seed)
        nodes = world.form(3)
        accused = nodes[1]
        world.forge(nodes[0], nodes[2], news=[record_of(accused, Standing.SUSPECT, accuser="w9")])
        accused_at = world.now_s
        world.run(2)

        first = next(
            one
            for one in world.eyes.sent
            if one.at_s >= accused_at and one.node == "w0" and one.to == accused.address
        )
        refuted = [one for one in world.emits("refuted", about="w1", since_s=accused_at) if one.node == "w0"]
        assert [one.record and one.record.incarnation for one in refuted] == [1]
        if refuted[0].at_s <= first.at_s:
            continue  # the third was faster
        message = first.packet.message
        told = [message.about] if isinstance(message, Ping) else first.packet.news
        about = [Standing(record.standing) for record in told if record and record.worker_id == "w1"]
        assert about == [Standing.SUSPECT]
        waits.append(refuted[0].at_s - first.at_s)
        assert waits[-1] <= 0.025  # a round trip
    assert len(waits) >= 10
    print(f"D26: refuted at most {max(waits) * 1_000:.1f} ms after the next word to it")
