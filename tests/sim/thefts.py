"""Scenes of stealing: workers that know each other, work that one of them holds, and what becomes of it.

A scene that is played for many seeds answers what is broken, and nothing if all is well.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from fluxmesh.mesh.timing import MS, S
from fluxmesh.testing.simnet_network import Via
from fluxmesh.testing.simnet_points import Points
from fluxmesh.testing.simnet_shop import Workshop
from fluxmesh.testing.simnet_thefts import MEETS_NS
from fluxmesh.testing.simnet_trace import Violation
from fluxmesh.testing.simnet_workers import Habits, SimWorker

LONG = (60 * S, 60 * S)
DEBIT_S = 1.0
SPREAD = 1.5
SPREAD_WITHIN_NS = 2 * S


def shop_of(
    slots: Sequence[int],
    *,
    seed: int = 1,
    greedy: Sequence[int] = (0,),
    points: Points | None = None,
    takes_held: bool = True,
) -> Workshop:
    """Workers w0, w1 ... with so many slots each, who have met. `greedy` ones hold all that they can get."""
    habits = [
        Habits(slots=one, greedy=number in greedy, takes_held=takes_held) for number, one in enumerate(slots)
    ]
    shop = Workshop(seed=seed, nodes=len(slots), habits=habits)
    if points is not None:
        shop.points = points
        shop.line.points = points
    for number in range(len(slots)):
        shop.start(number)
    shop.net.run(MEETS_NS)
    return shop


def goes_on(shop: Workshop, seconds: float) -> None:
    shop.net.run(shop.net.now + int(seconds * S))


def moved_to(shop: Workshop, worker: SimWorker) -> int:
    return shop.books.moved_to[worker.me]


def until_moved(shop: Workshop, worker: SimWorker, within_s: float) -> float | None:
    """How long it takes until something moves to this worker; None: longer than that."""
    began, before = shop.net.now, moved_to(shop, worker)
    moved = shop.net.run(
        began + int(within_s * S), done=lambda: moved_to(shop, worker) > before, look_ns=5 * MS
    )
    return (shop.net.now - began) / S if moved else None


def one_thief_takes_half(seed: int) -> str:
    """D31: 72 jobs at one of four, who has 8 slots; each of the others has room for all of them, and
    only the mesh to get them by."""
    shop = shop_of([8, 64, 64, 64], seed=seed, takes_held=False)
    for name in ("w1", "w2", "w3"):
        shop.workers[name].degrade(20 * MS)  # else one that just looks for work has it from storage
    shop.submit(72, tiers=(2,), run_ns=LONG, to=0)
    shop.net.run(shop.net.now + SPREAD_WITHIN_NS)
    loads = [len(worker.bodies) + worker.shelf.held for worker in shop.workers.values()]
    spread = max(loads) / mean(loads)
    return "" if spread <= SPREAD else f"after 2 s loads are {loads}: the largest is {spread:.2f} of the mean"


def who_stands_still_asks(seed: int) -> str:
    """D32: work is in reach of one whose loop stands; the onlooker hears whether it asks for it."""
    shop = shop_of([1, 8], seed=seed)
    shop.workers["w1"].degrade(S)
    goes_on(shop, 0.05)
    shop.submit(40, tiers=(2,), run_ns=LONG, to=0)
    try:
        goes_on(shop, 0.8)
    except Violation as violation:
        return str(violation)
    return "" if not moved_to(shop, shop.workers["w1"]) else "it has taken something"


class FirstTransferLost(Points):
    """Nothing goes wrong but that the first transfer never reaches storage."""

    def __init__(self) -> None:
        super().__init__(rng=None, share=0.0, blows=0.0)  # type: ignore[arg-type]  # nothing is drawn
        self.lost = 0

    def in_storage(self, verb: str) -> str:
        if verb != "transfer" or self.lost:
            return ""
        self.lost += 1
        return "request lost"


def debit_is_undone(seed: int) -> str:
    """D34: what one was asked for it still has, its load does not change, nothing of it is heard any more."""
    points = FirstTransferLost()
    shop = shop_of([1, 8], seed=seed, points=points)
    victim, thief = shop.workers["w0"], shop.workers["w1"]
    shop.submit(10, tiers=(2,), run_ns=LONG, to=0)
    if not shop.net.run(shop.net.now + 2 * S, done=lambda: points.lost == 1, look_ns=MS):
        return "nobody was asked"
    hosts = victim.node.address.host, thief.node.address.host
    shop.net.network.cuts.update({hosts: Via.UDP, hosts[::-1]: Via.UDP})
    asks, asked_ns = shop.onlooker.asks, shop.onlooker.last_ask_ns
    again = shop.net.run(shop.net.now + 3 * S, done=lambda: shop.onlooker.asks > asks, look_ns=MS)
    waited = (shop.onlooker.last_ask_ns - asked_ns) / S
    if not again:
        return "3 s later the thief still believes that the victim has less"
    return "" if waited <= DEBIT_S + 0.15 else f"asked again after {waited:.2f} s"
