"""Nodes in processes of their own on loopback: deaths, goodbyes, restarts, names, islands, keys."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence

import pytest

from fluxmesh.mesh.options import keygen
from tests.mesh.figures import Detections, keep
from tests.mesh.peer import Orders
from tests.mesh.processes import Peer, met, running
from tests.mesh.sockets import free_port


def group_of(number: int, *, letter: str = "w", **more: object) -> list[Peer]:
    """Peers of which each has the first two as seeds."""
    ports = [free_port() for _ in range(number)]
    seeds = tuple(f"127.0.0.1:{port}" for port in ports[:2])
    return [
        Peer(Orders(worker_id=f"{letter}{n}", epoch=1, port=port, seeds=seeds, **more))  # type: ignore[arg-type]
        for n, port in enumerate(ports)
    ]


def deaths(number: int, kills: int, seed: int = 1) -> Detections:
    """Kill one after the other, each time another; each is started anew under its id."""
    rng = random.Random(seed)
    group = group_of(number)
    found = Detections(nodes=number)
    with running(*group):
        met(group)
        for kill in range(kills):
            victim = group[kill % number]
            others = [peer for peer in group if peer is not victim]
            time.sleep(rng.uniform(0, 1))  # so that kills fall anywhere in the round
            at = victim.kill()
            for peer in others:
                event = peer.first("dead", victim.worker_id, at)
                found.add(kill, victim.worker_id, peer.worker_id, event["at"] - at)
            victim.start()
            met(group)
            for peer in group:
                assert not [one for one in peer.events("dead", since=at) if one["who"] != victim.worker_id]
    return found


@pytest.mark.parametrize(("number", "p50_s", "worst_s"), [(3, 3.3, 5.0), (10, 3.5, 6.0)])
@pytest.mark.slow
def test_thirty_deaths_are_noticed_by_all_others_in_time(number: int, p50_s: float, worst_s: float) -> None:
    found = deaths(number, 30)
    keep(f"mesh-deaths-{number}.jsonl", found)
    assert found.count == 30 * (number - 1)
    assert found.quantile(0.5) <= p50_s, found.summary()
    assert found.worst <= worst_s, found.summary()


def test_a_death_among_three_is_noticed_by_both_others_in_time() -> None:
    found = deaths(3, 2)
    assert found.count == 4
    assert found.worst <= 8.0, found.summary()  # beside the rest of the suite; 5 s in the slow test


def test_d10_a_goodbye_makes_nobody_suspicious_and_the_same_id_may_come_back() -> None:
    group = group_of(4)
    with running(*group):
        met(group)
        leaver, others = group[3], group[:3]
        leaver.ask("leave")
        for peer in others:
            assert peer.members()[leaver.worker_id] == "left"
        leaver.end()
        leaver.start()
        met(group)
        for peer in others:
            assert not peer.events("suspected")
            assert not peer.events("dead")


def test_d16_an_id_that_was_killed_is_taken_back_at_once_under_its_next_epoch_on_another_port() -> None:
    group = group_of(3)
    with running(*group):
        met(group)
        victim = group[2]
        at = victim.kill()
        victim.start(port=free_port())
        for peer in group[:2]:
            assert peer.first("restarted", victim.worker_id, at)["epoch"] == 2
        met(group)
        assert time.monotonic() - at < 5
        assert not any(peer.events("dead") for peer in group)


@pytest.mark.slow
def test_d14_names_that_resolve_after_ten_seconds_only_bring_the_group_together_then() -> None:
    port, other = free_port(), free_port()
    names = {"worker-0.jobs": "127.0.0.1", "worker-1.jobs": "127.0.0.1"}
    seeds = (f"worker-0.jobs:{port}", f"worker-1.jobs:{other}")
    key = keygen()  # names may be of other machines
    group = [
        Peer(
            Orders(
                worker_id=f"w{n}", epoch=1, port=own, seeds=seeds, names=names, names_after_s=10.0,
                options={"encryption_key": key},
            )
        )
        for n, own in enumerate((port, other))
    ]  # fmt: skip
    began = time.monotonic()
    with running(*group):
        time.sleep(9.5)
        assert [peer.members() for peer in group] == [{}, {}]
        met(group)
        assert 10.0 <= time.monotonic() - began < 10.0 + 10.0


def test_d12_two_islands_merge_when_a_node_of_one_names_itself_and_a_node_of_the_other() -> None:
    a, b = group_of(3), group_of(3, letter="b")
    with running(*a, *b):
        met(a)
        met(b)
        b[2].kill()
        b[2].start(seeds=(b[2].seed, b[0].seed, a[1].seed))
        met([*a, *b])


def test_d15_a_wrong_key_and_a_wrong_label_are_refused_by_name_on_both_sides() -> None:
    key = keygen()
    group = group_of(2, options={"encryption_key": key})
    seeds = (group[0].seed,)
    strangers = [
        Peer(
            Orders(
                worker_id="k", epoch=1, port=free_port(), seeds=seeds, options={"encryption_key": keygen()}
            )
        ),
        Peer(
            Orders(
                worker_id="l",
                epoch=1,
                port=free_port(),
                seeds=seeds,
                label="x",
                options={"encryption_key": key},
            )
        ),
    ]
    with running(*group, *strangers):
        met(group)
        for peer, why in zip(strangers, ("wrong key", "wrong label"), strict=True):
            for one in (peer, group[0]):
                one.wait(lambda one=one, why=why: why in refusals(one), why=why)
            assert peer.members() == {}
        assert set(group[0].members()) == {"w1"}


def refusals(peer: Peer) -> list[object]:
    return [one["fields"]["why"] for one in list(peer.said) if one.get("word") == "packet refused"]


@pytest.mark.parametrize("number", [3])
def test_d23_d24_keys_are_changed_by_rolling_the_list_with_no_packet_dropped(number: int) -> None:
    """Each node is started anew with the next list, one after the other, three times through the group."""
    old, new = keygen(), keygen()
    group = group_of(number, options={"encryption_key": [old]})
    with running(*group):
        met(group)
        for keys in ([old, new], [new, old], [new]):
            for peer in group:
                peer.ask("leave")
                peer.end()
                peer.start(options={"encryption_key": keys})
                met(group)
                for one in group:
                    drops = {
                        name: n for name, n in one.metrics().items() if name.startswith("refused_") and n
                    }
                    assert not drops, (one.worker_id, keys == [new], drops)
                    assert not one.events("dead")
                    assert not one.events("suspected")


def test_a_node_stopped_for_a_second_is_neither_dead_nor_does_it_accuse_anybody() -> None:
    group = group_of(3)
    with running(*group):
        met(group)
        time.sleep(1)
        sleeper = group[1]
        sleeper.send(signal.SIGSTOP)
        time.sleep(1.0)
        sleeper.send(signal.SIGCONT)
        sleeper.wait(lambda: any(one.get("word") == "mesh stood still" for one in sleeper.said))
        time.sleep(5)
        for peer in group:
            assert not peer.events("dead")
            assert set(peer.members().values()) == {"alive"}
        assert not sleeper.events("suspected")


def no_flaps_in(group: Sequence[Peer], calm_s: float) -> None:
    since = time.monotonic()
    time.sleep(calm_s)
    for peer in group:
        for kind in ("suspected", "dead", "accused"):
            assert not peer.events(kind, since=since)


@pytest.mark.parametrize("number", [13, 30])
@pytest.mark.slow
def test_a_larger_group_is_calm_from_half_a_minute_after_the_last_join_on(number: int) -> None:
    group = group_of(number)
    with running(*group):
        met(group, 60)
        time.sleep(30)
        before = [peer.metrics() for peer in group]
        no_flaps_in(group, 60)
        after = [peer.metrics() for peer in group]
        keep(f"mesh-steady-{number}.jsonl", figures_between(before, after, 60, number))


def figures_between(
    before: Sequence[dict[str, int]], after: Sequence[dict[str, int]], over_s: float, nodes: int
) -> list[dict[str, float]]:
    """Traffic a node and second, and the longest lateness of a timer in the last minute."""
    return [
        {
            "nodes": nodes,
            "packets_per_s": round((late["datagrams_sent"] - early["datagrams_sent"]) / over_s, 3),
            "bytes_per_s": round((late["bytes_sent"] - early["bytes_sent"]) / over_s, 1),
            "loop_lag_ms": late["loop_lag_last_minute_us"] / 1_000,
        }
        for early, late in zip(before, after, strict=True)
    ]


def test_a_group_on_ipv6_addresses_is_a_group_like_any_other() -> None:
    ports = [free_port() for _ in range(3)]
    seeds = (f"[::1]:{ports[0]}",)
    group = [
        Peer(
            Orders(
                worker_id=f"w{n}", epoch=1, host="::1", port=port, seeds=seeds, options={"bind_addr": "::1"}
            )
        )
        for n, port in enumerate(ports)
    ]
    with running(*group):
        met(group)
        at = group[2].kill()
        for peer in group[:2]:
            peer.first("dead", "w2", at)
        assert all(peer.metrics()["send_errors"] == 0 for peer in group[:2])
