"""Cases of joining, leaving, restarts, partitions, names and clusters, in virtual time."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from fluxmesh.mesh.effects import Leave, UpdateMeta
from fluxmesh.mesh.messages import Address, Compare, Meta, Standing
from fluxmesh.mesh.timing import MS, TOMBSTONE_NS, S, Timing
from fluxmesh.testing.simnet import NobodyWatches
from fluxmesh.testing.simnet_network import LAN, WAN, Link
from fluxmesh.testing.simnet_node import SimNode
from fluxmesh.testing.simnet_run import unlike
from fluxmesh.testing.simnet_seal import NodeSeal, Sealing
from tests.sim.world import PORT, World

TIMING = Timing()
REDIAL_S = 30
SEEDS_S = 60


def test_d7_two_hundred_unclean_restarts_leave_one_row_an_id_and_empty_queues() -> None:
    world = World()
    world.eyes.keeps = False
    world.form(5)
    rng = Random(7)
    for _ in range(200):
        node = world.net.nodes[f"w{rng.randrange(5)}"]
        world.net.kill(node)
        world.run(0.2 + rng.random() * 2)
        world.start(int(node.name[1:]))
        world.run(rng.random())

    world.merges(2 * REDIAL_S)
    world.run(5)

    for node in world.net.living:
        counters = node.core.counters()
        assert len(node.core.members(node.now)) == 5
        assert counters["news_queued"] == 0
        assert counters["members_gone"] == 0
        assert node.armed <= 32
    assert sum(world.net.epochs.values()) == 205


@pytest.mark.parametrize("n", [150])
def test_d9_a_hundred_and_fifty_that_leave_and_restart_together_are_all_alive_again_in_ten_seconds(
    n: int,
) -> None:
    world = World(watch=NobodyWatches())
    world.seeds = tuple(f"10.0.0.{i}:{PORT}" for i in (1, 2, 3))
    nodes = world.form(n, within_s=30)
    for node in nodes:
        world.net.push(world.net.now + world.net.chance(S), node.command, Leave())
    world.run(TIMING.leave_ns / S + TIMING.linger_ns / S + 1.5)
    assert world.net.living == []

    for number in range(n):
        world.start(number)
    took = world.merges(10)

    assert all(node.me.epoch == 2 for node in world.net.living)
    print(f"D9: {n} nodes are one table {took:.2f} s after they started together")


def churn(world: World, seconds: float, rng: Random) -> int:
    """Nodes leave and come back, one at a time."""
    ends = world.now_s + seconds
    leaves = 0
    while world.now_s < ends:
        node = rng.choice(sorted(world.net.living, key=lambda one: one.name))
        node.command(Leave())
        leaves += 1
        world.run(8 + rng.random() * 10)
        held = world.standings(node.name)
        assert set(held.values()) == {Standing.LEFT}, f"at {world.now_s:.1f} s: {node.name} is {held}"
        assert node.gone
        world.start(int(node.name[1:]))
        world.run(rng.random() * 20)
    return leaves


@pytest.mark.parametrize(("n", "seed", "link"), [(3, 3, LAN), (9, 1, WAN), (9, 2, WAN)])
def test_d10_who_leaves_is_left_everywhere_and_dead_nowhere_in_ten_minutes_of_churn(
    n: int, seed: int, link: Link
) -> None:
    world = World(seed=seed, link=link)
    world.eyes.keeps = False
    world.form(n)

    leaves = churn(world, 600, Random(seed))

    assert world.emits("dead") == []
    print(f"D10: {leaves} leaves among {n}, no Dead, {len(world.emits('suspected'))} suspicions")


@pytest.mark.slow
def test_d10_who_leaves_is_left_everywhere_and_dead_nowhere_in_six_hours_of_churn() -> None:
    world = World(seed=10)
    world.eyes.keeps = False
    world.form(5)

    leaves = churn(world, 6 * 3_600, Random(10))

    assert world.emits("dead") == []
    print(f"D10: {leaves} leaves, no Dead in 6 h")


@pytest.mark.parametrize("minutes", [1, 10])
def test_d11_a_partition_that_outlived_the_dead_heals_unaided(minutes: int) -> None:
    world = World()
    nodes = world.form(8)
    world.part(nodes[:3])
    world.run(60 * minutes)
    assert set(world.standings("w7").values()) == {Standing.ALIVE, Standing.DEAD}
    world.net.network.heal()

    took = world.merges(2 * REDIAL_S + 5)

    print(f"D11: one table {took:.1f} s after a partition of {minutes} min")


def test_d12_islands_whose_seeds_name_themselves_too_merge() -> None:
    world = World()
    world.net.network.sides.update({"10.0.0.3": 1, "10.0.0.4": 1})
    first = (f"10.0.0.1:{PORT}", f"10.0.0.3:{PORT}")
    second = (f"10.0.0.3:{PORT}", f"10.0.0.1:{PORT}")
    for number, seeds in enumerate((first, first, second, second)):
        world.start(number, seeds=seeds)
    world.run(300)
    assert world.standings("w0") == {"w1": Standing.ALIVE, "w2": None, "w3": None}
    world.net.network.heal()

    took = world.merges(SEEDS_S * 1.1 + 5)

    print(f"D12: islands merged in {took:.1f} s")


def test_d13_seeds_that_are_alive_get_no_push_pull_whatever_their_address_looks_like() -> None:
    world = World()
    names = world.net.names
    names.tell("one.test", (Address("::ffff:10.0.0.1", PORT),), since_ns=0)
    names.tell("two.test", (Address("10.0.0.2", PORT), Address("::ffff:10.0.0.2", PORT)), since_ns=0)
    world.seeds = ("one.test", "two.test", f"10.0.0.1:{PORT}")
    nodes = world.form(5)
    began = world.now_s

    world.run(600)

    for node in nodes:
        compares = [
            one
            for one in world.eyes.called
            if one.node == node.name and one.at_s > began and isinstance(one.body, Compare)
        ]
        assert len(compares) <= 600 / (TIMING.push_pull_ns / S) + 1


@pytest.mark.parametrize("wrong", [(), (Address("10.77.0.1", PORT),)], ids=["empty", "stale"])
def test_d14_names_that_are_right_only_after_five_minutes_still_make_a_cluster(
    wrong: tuple[Address, ...],
) -> None:
    world = World()
    world.net.names.tell("mesh.test", wrong, since_ns=0)
    right = tuple(Address(f"10.0.0.{number + 1}", PORT) for number in range(4))
    world.net.names.tell("mesh.test", right, since_ns=300 * S)
    world.seeds = ("mesh.test",)
    for number in range(4):
        world.start(number)
    world.run(300)
    assert set(world.standings("w0").values()) == {None}

    took = world.merges(SEEDS_S * 1.1 + 5)

    print(f"D14: a cluster {took:.1f} s after the names were right")


@pytest.mark.parametrize(("what", "reason"), [("label", "wrong label"), ("key", "wrong key")])
def test_d15_an_address_that_another_cluster_takes_over_joins_nothing_and_is_counted(
    what: str, reason: str
) -> None:
    world = World()
    sealing = Sealing(seed=15)
    nodes = world.form(4, seal=lambda number: sealing.of(f"w{number}", 1))
    world.net.kill(nodes[3])
    seal = sealing.strange(what)
    stranger = world.start(99, name="other", host=nodes[3].address.host, realm="strange", seal=seal)

    world.run(180)

    assert [view.record.worker_id for view in stranger.core.members(stranger.now)] == ["other"]
    for node in nodes[:3]:
        assert world.row(node, "other") is None
        assert world.row(node, "w3").standing == Standing.DEAD  # type: ignore[union-attr]
    # The dead are dialled at their old address.
    assert set(seal.refused) == {reason}
    assert seal.refused[reason] > 0
    print(f"D15: refused {seal.refused}")


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "plain"])
def test_all_that_was_said_in_a_minute_said_once_more_changes_nothing(sealed: bool) -> None:
    world = World()
    sealing = Sealing(seed=16)
    world.net.captured = deque(maxlen=100_000)
    nodes = world.form(5, seal=(lambda number: sealing.of(f"w{number}", 1)) if sealed else None)
    world.net.kill(nodes[4])
    world.run(20)
    world.start(4, seal=sealing.of("w4", 2) if sealed else None)
    world.merges(5)
    world.run(35)
    overheard = list(world.net.captured)
    world.net.captured = None
    before = {node.name: [view.record for view in node.core.members(node.now)] for node in world.net.living}
    began = world.now_s

    for number, (source, to, data) in enumerate(overheard):
        world.net.push(world.net.now + number * MS, world.net.arrive, source, to, data)
    world.run(len(overheard) / 1_000 + 10)

    assert len(overheard) > 1_000
    after = {node.name: [view.record for view in node.core.members(node.now)] for node in world.net.living}
    assert after == before
    assert world.emits("suspected", "dead", "restarted", "refuted", "fenced", since_s=began) == []
    if sealed:
        # What was said to the dead one is heard by its next run for the first time.
        once = sum(to != nodes[4].address for _, to, _ in overheard)
        assert world.net.network.happened["unsealed"] >= once


def test_d16_an_id_that_returns_under_a_new_address_is_accepted_at_once() -> None:
    world = World()
    nodes = world.form(6)
    world.net.kill(nodes[4], host_too=True)
    moved = world.start(4, host="10.0.9.9")

    took = world.merges(3)

    assert all(world.row(node, "w4").host == "10.0.9.9" for node in world.net.living if node is not moved)  # type: ignore[union-attr]
    print(f"D16: known everywhere under its new address in {took:.2f} s")


def test_d17_of_two_runs_of_an_id_one_row_is_left_and_the_old_one_is_gone_at_once() -> None:
    world = World()
    nodes = world.form(5)
    world.net.kill(nodes[2])
    world.run(20)
    assert set(world.standings("w2").values()) == {Standing.DEAD}

    world.start(2)
    world.merges(3)

    for node in world.net.living:
        ids = [view.record.worker_id for view in node.core.members(node.now)]
        assert sorted(ids) == sorted(set(ids)) == ["w0", "w1", "w2", "w3", "w4"]
        assert world.row(node, "w2").epoch == 2  # type: ignore[union-attr]


def test_d18_an_epoch_that_is_higher_by_a_trillion_is_accepted() -> None:
    world = World()
    nodes = world.form(4)
    world.net.kill(nodes[1])
    world.net.epochs["w1"] += 10**12
    world.start(1)

    world.merges(3)

    assert {world.row(node, "w1").epoch for node in world.net.living} == {10**12 + 2}  # type: ignore[union-attr]


def test_d24_keys_rolled_through_a_fleet_with_half_a_minute_of_skew_lose_no_packet_and_no_node() -> None:
    world = World()
    sealing = Sealing(seed=24)
    old, new = sealing.key_of("old"), sealing.key_of("new")
    seals: dict[str, NodeSeal] = {}

    def seal(number: int) -> NodeSeal:
        seals[f"w{number}"] = sealing.of(f"w{number}", 1, keys=[old])
        return seals[f"w{number}"]

    nodes = world.form(6, seal=seal)
    began = world.now_s
    for keys in ([old, new], [new, old], [new]):
        for node in nodes:
            world.net.push(world.net.now + world.net.chance(30 * S), seals[node.name].use, keys)
        world.run(31)
    world.run(10)

    assert world.emits("dead", "suspected", since_s=began) == []
    assert {node.name: seals[node.name].refused for node in nodes} == {node.name: {} for node in nodes}


def test_a_second_holder_of_an_id_wins_by_its_epoch_and_the_first_is_told_to_stop() -> None:
    world = World()
    nodes = world.form(5)
    began = world.now_s
    world.start(3, host="10.0.9.9")
    world.run(2)

    fenced = world.emits("fenced")
    assert [one.node for one in fenced] == ["w3"]
    assert nodes[3].fenced
    world.net.kill(nodes[3])
    world.merges(5)
    assert fenced[0].at_s - began < 2


def test_a_mesh_of_one_waits_without_a_word_and_takes_in_whoever_comes() -> None:
    world = World()
    alone: SimNode = world.start(0, seeds=())
    world.run(120)
    assert alone.packets == 0
    for number in range(1, 4):
        world.start(number)
    assert world.merges(5) <= 5
    assert unlike(world.net) == ""


def test_a_tombstone_is_forgotten_after_a_day_and_nobody_rises_from_it() -> None:
    world = World(watch=NobodyWatches())
    nodes = world.form(4)
    world.net.kill(nodes[3], host_too=True)
    world.run(20)
    assert set(world.standings("w3").values()) == {Standing.DEAD}
    began = world.now_s
    for node in nodes[:3]:
        node.jump(TOMBSTONE_NS)

    world.run(90)

    assert set(world.standings("w3").values()) == {None}
    assert sorted(one.node for one in world.emits("forgotten")) == ["w0", "w1", "w2"]
    assert world.emits("suspected", "dead", "discovered", since_s=began) == []


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_new_particulars_of_a_node_are_known_everywhere_within_seconds(loss: float) -> None:
    world = World()
    nodes = world.form(8)
    world.net.network.loss = loss
    meta = Meta(queues=("default", "mail"), tiers=(0, 1), capacity=3, virtual_nodes=10)

    nodes[2].command(UpdateMeta(meta))

    def known() -> bool:
        return all(
            view.meta == meta
            for node in world.net.living
            for view in node.core.members(node.now)
            if view.record.worker_id == "w2"
        )

    began = world.now_s
    assert world.net.run(world.net.now + 10 * S, done=known)
    print(f"known everywhere in {world.now_s - began:.2f} s at {loss:.0%} loss")
