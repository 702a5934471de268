"""Members that a liar made up cost the others little: a death is found nearly as soon as without them."""

from __future__ import annotations

import pytest

from fluxmesh.mesh.messages import PROTOCOL, Address, Gossip, NodeRef, Packet, Record, Standing
from fluxmesh.mesh.timing import S, Timing
from fluxmesh.mesh.voice import BUDGET_BYTES
from fluxmesh.mesh.wire import encode_packet
from fluxmesh.testing.simnet import Simnet
from fluxmesh.testing.simnet_node import SimNode, Spec

MADE_UP = 1_000
LIAR = Address("10.9.9.9", 7946)


def lie(net: Simnet, to: Address) -> None:
    head = Packet(PROTOCOL, NodeRef("liar", 1), 0, Gossip())
    for start in range(0, MADE_UP, 20):
        records = [
            Record(f"nobody-{k}", 1, 0, int(Standing.ALIVE), "10.8.0.1", 2_000 + k, 7)
            for k in range(start, start + 20)
        ]
        data, told, _ = encode_packet(head, records, (), BUDGET_BYTES)
        assert told == len(records)
        net.arrive(LIAR, to, data)


def standing_at(witness: SimNode, name: str) -> Standing:
    (view,) = [v for v in witness.core.members(witness.now) if v.record.worker_id == name]
    return Standing(view.record.standing)


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("after_s", [1, 30])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_made_up_members_delay_the_detection_of_a_death_by_seconds(
    n: int, after_s: int, seed: int
) -> None:
    net, timing = Simnet(seed=seed), Timing()
    nodes = [net.start(Spec(name=f"w{i}", host=f"10.0.0.{i}", seeds=("10.0.0.0:7946",))) for i in range(n)]
    net.run(15 * S)
    for node in nodes:
        lie(net, node.spec.address)
    net.run(net.now + after_s * S)
    victim, *others = nodes
    net.kill(victim)
    killed_at = net.now
    # Its turn in the round of those who are known, every fourth probe taken away, and the shortest suspicion
    # among a thousand if all others confirm it.
    bound = 2 * n * timing.period_ns + timing.suspicion_ns(MADE_UP + n, 0, known=n)
    while any(standing_at(node, victim.name) is not Standing.DEAD for node in others):
        net.run(net.now + S // 4)
        assert net.now - killed_at <= bound, (net.now - killed_at) / S
    print(n, after_s, seed, (net.now - killed_at) / S)
    assert all(standing_at(node, other.name) is Standing.ALIVE for node in others for other in others)
