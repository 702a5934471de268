"""A hundred nodes on real sockets in one process and one loop: calm, and what that costs."""

from __future__ import annotations

import asyncio
import os
import random
import resource

import pytest

from fluxmesh.mesh.carrier import Carrier
from fluxmesh.mesh.effects import Emit, Join, UpdateLoad
from fluxmesh.mesh.messages import Address, Flag, Load, Meta, NodeRef, Standing
from fluxmesh.mesh.names import Names
from fluxmesh.mesh.options import MeshWorker, keygen
from fluxmesh.mesh.ports import bind_ports
from fluxmesh.mesh.seal import SALT_BYTES
from fluxmesh.mesh.swim import Swim
from tests.mesh.figures import keep
from tests.mesh.sockets import free_port, run

NODES = 100
KEY = keygen()
META = Meta(("default",), (0, 1, 2, 3), 8)


class Crowded:
    """One of many nodes that share a loop."""

    def __init__(self, number: int, port: int, seeds: tuple[str, ...]) -> None:
        self.worker_id = f"w{number:03}"
        self.events: list[tuple[float, Emit]] = []
        options = MeshWorker(port=port, seeds=seeds, encryption_key=KEY, bind_addr="127.0.0.1").resolved()
        rng = random.Random(number)
        loop = asyncio.get_running_loop()
        self.core = Swim(
            me=NodeRef(self.worker_id, number + 1),
            address=Address("127.0.0.1", port),
            meta=META,
            timing=options.timing(),
            seeds=options.seeds,
            rng=rng,
        )
        self.carrier = Carrier(
            self.core,
            bind_ports("127.0.0.1", port),
            envelope=options.envelope(label="crowd", salt=os.urandom(SALT_BYTES)),
            period_ns=options.timing().period_ns,
            default_port=port,
            names=Names(),
            rng=rng,
            tell=lambda _level, _event, _fields: None,
            on_take=lambda _: None,
            on_event=lambda event: self.events.append((loop.time(), event)),
        )

    async def start(self) -> None:
        await self.carrier.start()
        self.carrier.command(Join())
        load = Load(self.worker_id, self.core.me.epoch, 0, capacity=8, flags=int(Flag.READY))
        self.carrier.command(UpdateLoad(load))

    def living(self) -> int:
        members = self.core.members(self.carrier.now_ns())
        return sum(view.record.standing == Standing.ALIVE for view in members)

    def met(self, kinds: set[str], since: float) -> list[str]:
        return [event.kind for at, event in self.events if at >= since and event.kind in kinds]


async def crowd(calm_s: float, settle_s: float) -> list[dict[str, float]]:
    loop = asyncio.get_running_loop()
    first = free_port()
    ports = [first, *(free_port() for _ in range(NODES - 1))]
    nodes = [
        Crowded(n, port, (f"127.0.0.1:{first}", f"127.0.0.1:{ports[1]}")) for n, port in enumerate(ports)
    ]
    try:
        for node in nodes:
            await node.start()
            await asyncio.sleep(0.02)
        began = loop.time()
        while not all(node.living() == NODES for node in nodes):
            assert loop.time() - began < 60, sorted(node.living() for node in nodes)[:5]
            await asyncio.sleep(0.2)
        await asyncio.sleep(settle_s)
        since, before = loop.time(), [node.carrier.counters() for node in nodes]
        cpu_s = resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.sleep(calm_s)
        after = [node.carrier.counters() for node in nodes]
        used = resource.getrusage(resource.RUSAGE_SELF)
        took_s = loop.time() - since
        for node in nodes:
            assert not node.met({"suspected", "dead", "accused"}, since), node.worker_id
            assert node.living() == NODES
    finally:
        for node in nodes:
            await node.carrier.close()
    spent_s = used.ru_utime + used.ru_stime - cpu_s.ru_utime - cpu_s.ru_stime
    return [
        {
            "nodes": NODES,
            "packets_per_s": round((late["datagrams_sent"] - early["datagrams_sent"]) / took_s, 3),
            "bytes_per_s": round((late["bytes_sent"] - early["bytes_sent"]) / took_s, 1),
            "stream_bytes_per_s": round((late["stream_sent_bytes"] - early["stream_sent_bytes"]) / took_s, 1),
            "loop_lag_ms": late["loop_lag_last_minute_us"] / 1_000,
            "cpu_share": round(spent_s / took_s / NODES, 5),
        }
        for early, late in zip(before, after, strict=True)
    ]


def mean(lines: list[dict[str, float]], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)


@pytest.mark.slow
def test_a_hundred_nodes_are_calm_from_half_a_minute_after_the_last_join_on_and_say_little() -> None:
    lines: list[dict[str, float]] = []

    async def main() -> None:
        lines.extend(await crowd(calm_s=60, settle_s=30))

    run(main(), 240)
    keep("mesh-steady-100.jsonl", lines)
    assert mean(lines, "packets_per_s") <= 4.5
    assert mean(lines, "bytes_per_s") <= 2_500
    print({name: round(mean(lines, name), 4) for name in lines[0]})
    print(f"longest lateness of a timer: {max(line['loop_lag_ms'] for line in lines):.1f} ms")
