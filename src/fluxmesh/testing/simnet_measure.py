"""Figures of real cores in virtual time: how soon a death is known, how news spreads, what that costs."""

from __future__ import annotations

from random import Random
from typing import Final

from msgspec import Struct

from fluxmesh.mesh.effects import Emit
from fluxmesh.mesh.membership import GREETINGS_A_PERIOD
from fluxmesh.mesh.swim import Swim
from fluxmesh.mesh.timing import S, Timing
from fluxmesh.testing.mesh_figures import Figures
from fluxmesh.testing.simnet import Simnet
from fluxmesh.testing.simnet_network import LAN, Link
from fluxmesh.testing.simnet_node import MakeCore, SimNode, Spec

SETTLE_NS: Final = 10 * S
STEADY_NS: Final = 20 * S
SMALL: Final = 32  # up to here one is killed at a time, and comes back
APART_NS: Final = 1 * S  # else: so far apart
WAIT_NS: Final = 40 * S  # for a death to be known everywhere


class _Death(Struct):
    node: SimNode
    at_ns: int
    suspected: dict[str, int]
    dead: dict[str, int]


class Meter:
    """Listens to what cores tell and sorts it by the deaths that were made."""

    def __init__(self, net: Simnet, *, one_by_one: bool) -> None:
        self.net = net
        self.one_by_one = one_by_one
        self.deaths: dict[tuple[str, int], _Death] = {}
        self.false_dead = 0
        self.false_suspects = 0
        net.on_emit.append(self.hear)

    def kill(self, node: SimNode) -> None:
        self.deaths[node.name, node.me.epoch] = _Death(node, self.net.now, {}, {})
        self.net.kill(node, host_too=True)

    def all_known(self) -> bool:
        """Whether every death that was made is known to all who live now, unless they came later."""
        last = list(self.deaths.values())[-1:] if self.one_by_one else self.deaths.values()
        living = [node.name for node in self.net.living]
        return all(name in death.dead for death in last for name in living)

    def hear(self, node: SimNode, emit: Emit) -> None:
        record = emit.record
        if record is None or emit.kind not in ("suspected", "dead"):
            return
        death = self.deaths.get((record.worker_id, record.epoch))
        if death is None:
            if emit.kind == "dead":
                self.false_dead += 1
            else:
                self.false_suspects += 1
        elif emit.kind == "suspected":
            death.suspected.setdefault(node.name, self.net.now)
        else:
            death.dead.setdefault(node.name, self.net.now)


def measure(
    n: int,
    *,
    kills: int = 30,
    seed: int = 1,
    link: Link = LAN,
    loss: float = 0.0,
    timing: Timing | None = None,
    make_core: MakeCore = Swim,
) -> Figures:
    """`n` real cores join, stand still, and lose `kills` of themselves: in a small mesh one after the other,
    each of which comes back; in a large one a second apart, for good."""
    timing = timing or Timing()
    if n > SMALL:
        kills = min(kills, n // 2)
    net = Simnet(seed=seed, link=link, timing=timing, make_core=make_core)
    rng = Random(f"measure {n} {seed}")
    meter = Meter(net, one_by_one=n <= SMALL)
    specs = [
        Spec(
            name=f"w{i}",
            host=f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}",
            seeds=("10.0.0.0:7946", "10.0.0.1:7946"),
        )
        for i in range(n)
    ]
    ramp = max(2 * S, n * S // 50)
    for spec in specs:
        net.push(net.chance(ramp), _begin, net, spec)
    # After a start together everybody greets everybody, but not all at once.
    net.run(ramp + SETTLE_NS + n * timing.period_ns // GREETINGS_A_PERIOD)
    net.network.loss = loss
    packets, sent_bytes = _steady(net)
    if n <= SMALL:
        _one_by_one(net, meter, rng, kills)
    else:
        _apart(net, meter, rng, kills)
    deaths = list(meter.deaths.values())
    witnesses = {node.name for node in net.living} if n > SMALL else set()
    known = [death for death in deaths if death.dead]
    everywhere = [
        max(death.dead.values()) - death.at_ns
        for death in known
        if len(death.dead) >= (len(witnesses) or n - 1)
    ]
    return Figures(
        nodes=n,
        by="cores",
        loss=loss,
        kills=len(deaths),
        dead_ns=sorted(min(death.dead.values()) - death.at_ns for death in known),
        spread_ns=sorted(max(d.suspected.values()) - min(d.suspected.values()) for d in known if d.suspected),
        everywhere_ns=sorted(everywhere),
        packets_per_s=packets,
        bytes_per_s=sent_bytes,
        false_dead=meter.false_dead,
        false_suspects=meter.false_suspects,
        missed=len(deaths) - len(everywhere),
    )


def _begin(net: Simnet, spec: Spec) -> None:
    net.start(spec).publish(queued=1, running=4)


def _steady(net: Simnet) -> tuple[float, float]:
    """Packets and bytes, sealed, that a node sends in a second, the mean over all."""
    living = net.living
    before = sum(node.packets for node in living), sum(node.sent_bytes for node in living)
    net.run(net.now + STEADY_NS)
    seconds = STEADY_NS / S * len(living)
    packets = sum(node.packets for node in living) - before[0]
    sent_bytes = sum(node.sent_bytes for node in living) - before[1]
    return packets / seconds, sent_bytes / seconds


def _one_by_one(net: Simnet, meter: Meter, rng: Random, kills: int) -> None:
    for _ in range(kills):
        net.run(net.now + 6 * S + int(rng.random() * 4 * S))
        node = rng.choice(sorted(net.living, key=lambda one: one.name))
        meter.kill(node)
        net.run(net.now + WAIT_NS, done=meter.all_known)
        _begin(net, node.spec)


def _apart(net: Simnet, meter: Meter, rng: Random, kills: int) -> None:
    for node in rng.sample(sorted(net.living, key=lambda one: one.name), kills):
        meter.kill(node)
        net.run(net.now + APART_NS)
    net.run(net.now + WAIT_NS, done=meter.all_known)
