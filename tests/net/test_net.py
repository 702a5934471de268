"""Five nodes on a network that is cut, lossy, narrow; and nodes that are stopped for a while."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from fluxmesh.mesh.options import keygen
from tests.mesh.processes import Peer, met, running
from tests.net.network import PORT, Host, Network

KEY = keygen()
SEALED = {"encryption_key": KEY}


def peers_on(hosts: Sequence[Host], **more: object) -> list[Peer]:
    seeds = tuple(host.address for host in hosts[:2])
    return [host.peer(f"w{number}", seeds=seeds, options=SEALED, **more) for number, host in enumerate(hosts)]


@pytest.fixture
def group(network: Network) -> Iterator[list[Peer]]:
    made = peers_on(network.hosts[:5])
    with running(*made):
        met(made)
        time.sleep(1)
        yield made


def events(group: Sequence[Peer], kind: str, since: float) -> list[tuple[str, str]]:
    """Who met such an event, and about whom."""
    return [(peer.worker_id, one["who"]) for peer in group for one in peer.events(kind, since=since)]


def all_alive(peer: Peer, number: int = 4) -> bool:
    return list(peer.members().values()) == ["alive"] * number


def test_a_partition_of_twenty_seconds_is_healed_unaided(network: Network, group: list[Peer]) -> None:
    one, other = group[:2], group[2:]
    network.split(network.hosts[:2], network.hosts[2:5])
    time.sleep(20)
    for side, gone in ((one, other), (other, one)):
        for peer in side:
            seen = peer.members()
            assert {seen[lost.worker_id] for lost in gone} == {"dead"}
            assert {seen[kept.worker_id] for kept in side if kept is not peer} == {"alive"}
    network.heal()
    healed_at = time.monotonic()
    met(group, 75)  # the dead are dialled anew every 30 s
    print(f"healed after {time.monotonic() - healed_at:.1f} s")
    since = time.monotonic()
    time.sleep(10)
    assert not events(group, "dead", since)


def test_a_one_way_cut_between_two_kills_nobody(network: Network, group: list[Peer]) -> None:
    since = time.monotonic()
    network.hosts[0].drop_from([network.hosts[1]])
    time.sleep(30)
    assert not events(group, "dead", since)
    assert all(all_alive(peer) for peer in group)


def test_d1_a_host_whose_udp_is_blocked_lives_on_by_tcp_without_flapping(
    network: Network, group: list[Peer]
) -> None:
    since = time.monotonic()
    network.hosts[0].drop(f"udp dport {PORT}")
    time.sleep(60)
    assert not events(group, "dead", since)
    assert all(all_alive(peer) for peer in group)
    for peer in group[1:]:
        assert (
            len(peer.events("probe_resolved", "w0", since)) <= 2
        )  # one word in ten minutes, not one a round
        assert len(peer.events("suspected", "w0", since)) == 0


def test_thirty_percent_of_loss_for_five_minutes_kill_nobody(network: Network, group: list[Peer]) -> None:
    since = time.monotonic()
    for host in network.hosts[:5]:
        host.drop("numgen random mod 100 < 30")
    time.sleep(300)
    assert not events(group, "dead", since)
    print(f"suspicions, all refuted: {len(events(group, 'suspected', since))}")
    network.heal()
    met(group)
    healed_at = time.monotonic()
    time.sleep(15)
    assert not events(group, "suspected", healed_at + 5)


def test_a_path_of_1280_bytes_carries_everything(network: Network) -> None:
    network.set_mtu(1_280)
    # Names of such a length that packets are as full as they become.
    hosts = network.hosts[:6]
    seeds = (hosts[0].address,)
    made = [host.peer(f"w{number}" * 60, seeds=seeds, options=SEALED) for number, host in enumerate(hosts)]
    with running(*made):
        met(made)
        since = time.monotonic()
        time.sleep(10)
        assert not events(made, "suspected", since)
        for peer in made:
            told = peer.metrics()
            assert (told["send_errors"], told["unsent"]) == (0, 0)
        for host in hosts:
            fragments = [
                line for line in host.run("cat", "/proc/net/snmp").splitlines() if line.startswith("Ip:")
            ]
            names, values = (line.split()[1:] for line in fragments)
            assert dict(zip(names, values, strict=True))["FragCreates"] == "0"


def test_a_stop_of_one_second_is_harmless(network: Network, group: list[Peer]) -> None:
    since = time.monotonic()
    group[1].send(signal.SIGSTOP)
    time.sleep(1)
    group[1].send(signal.SIGCONT)
    time.sleep(8)
    assert not events(group, "dead", since)
    assert not events([group[1]], "suspected", since)
    assert all(all_alive(peer) for peer in group)


@pytest.mark.parametrize("seconds", [5, 40])
def test_who_was_stopped_for_long_is_dead_to_others_accuses_nobody_and_comes_back_by_itself(
    network: Network, group: list[Peer], seconds: int
) -> None:
    since = time.monotonic()
    sleeper, others = group[1], [peer for number, peer in enumerate(group) if number != 1]
    sleeper.send(signal.SIGSTOP)
    time.sleep(seconds)
    if seconds > 10:
        assert {peer.members()["w1"] for peer in others} == {"dead"}
    assert {who for _, who in events(others, "dead", since)} <= {"w1"}
    woken_at = sleeper.send(signal.SIGCONT)
    met(group, 75)
    print(f"alive to all again after {time.monotonic() - woken_at:.1f} s")
    assert not events([sleeper], "dead", since)
    assert not events([sleeper], "suspected", since)
    assert {who for _, who in events(others, "suspected", since)} <= {"w1"}


def test_d16_the_same_id_may_come_back_from_another_address(network: Network, group: list[Peer]) -> None:
    group[4].kill()
    at = time.monotonic()
    again = network.hosts[5].peer("w4", seeds=group[4].orders.seeds, options=SEALED)
    with running():
        again.start(epoch=2)
        try:
            for peer in group[:4]:
                assert peer.first("restarted", "w4", at)["epoch"] == 2
            met([*group[:4], again])
            assert time.monotonic() - at < 10
        finally:
            again.end()


def test_d15_two_meshes_of_different_labels_on_one_network_stay_two(network: Network) -> None:
    hosts = network.hosts
    seeds = tuple(host.address for host in hosts)
    made = [
        host.peer(f"w{number}", seeds=seeds, options=SEALED, label="red" if number % 2 else "blue")
        for number, host in enumerate(hosts)
    ]
    red, blue = made[1::2], made[::2]
    with running(*made):
        met(red)
        met(blue)
        for group in (red, blue):
            for peer in group:
                assert set(peer.members()) == {other.worker_id for other in group if other is not peer}
            assert sum(peer.metrics().get("refused_wrong_label", 0) for peer in group) > 0


def test_d14_names_of_seeds_are_looked_up_until_they_resolve(network: Network) -> None:
    hosts = network.hosts[:3]
    for host in hosts:
        host.knows({})
    made = [
        host.peer(f"w{number}", seeds=("worker-0.jobs.internal", "worker-1.jobs.internal"), options=SEALED)
        for number, host in enumerate(hosts)
    ]
    with running(*made):
        time.sleep(10)
        assert [peer.members() for peer in made] == [{}, {}, {}]
        names = {f"worker-{number}.jobs.internal": host.address for number, host in enumerate(hosts)}
        for host in hosts:
            host.knows(names)
        at = time.monotonic()
        met(made)
        print(f"together {time.monotonic() - at:.1f} s after the names resolved")
