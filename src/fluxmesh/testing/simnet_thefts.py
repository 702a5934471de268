"""One seed of stealing from start to end: a few workers get the work in bursts, the others take it from them,
and at every boundary of that something goes wrong. When all is healed every job must be done."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Final

from msgspec import Struct

from fluxmesh.mesh.timing import MS, S
from fluxmesh.testing.simnet_network import LINKS
from fluxmesh.testing.simnet_shop import Workshop
from fluxmesh.testing.simnet_store import Place
from fluxmesh.testing.simnet_trace import Violation
from fluxmesh.testing.simnet_workers import Habits

MEETS_NS: Final = 3 * S  # all have met all, and have been ready for a second
DONE_WITHIN_NS: Final = 60 * S
CALM_NS: Final = 12 * S  # three tries of a Taken, and the lists of two beats
QUICK_S: Final = 4  # of work, in a seed
LONG_S: Final = 20


class Scheme(Struct, frozen=True, kw_only=True):
    """What a seed does. `mute`: no datagram and no call of the mesh comes through, so that storage is all
    there is. `favourites` get the bursts."""

    seed: int
    nodes: int
    link: str
    work_ns: int
    habits: tuple[Habits, ...]
    favourites: tuple[int, ...]
    every_ns: int
    burst: tuple[int, int]
    tiers: tuple[int, ...]
    run_ns: tuple[int, int]
    share: float = 0.0
    blows: float = 0.0
    loss: float = 0.0
    mute: bool = False
    away: tuple[tuple[int, int], ...] = ()  # storage, from when on and how long
    slow: tuple[tuple[int, int], ...] = ()
    drains: tuple[tuple[int, int], ...] = ()  # when and who
    stands: tuple[tuple[int, int, int], ...] = ()  # whose loop stands, when, how long
    liars: tuple[tuple[int, int], ...] = ()  # who, and by how much its load is too large

    @property
    def is_calm(self) -> bool:
        """Nothing gets lost: counters have to be exact."""
        faults = self.share or self.blows or self.loss or self.mute or self.away
        return not (faults or self.drains or self.stands)

    def tell(self) -> str:
        return (
            f"seed {self.seed}: {self.nodes} workers, {self.link}, {self.work_ns / S:.0f} s of work,"
            f" bursts to {list(self.favourites)}, faults {self.share:.2f}, blows {self.blows:.3f},"
            f" loss {self.loss:.2f}{', no gossip' if self.mute else ''}, storage away {list(self.away)},"
            f" drains {list(self.drains)}, loops stand {list(self.stands)}, liars {list(self.liars)}"
        )


class Stolen(Struct, frozen=True, kw_only=True):
    """What became of a seed. `problem` is empty if every promise was kept."""

    seed: int
    rule: str
    problem: str
    told: str
    hash: str
    thefts: int  # transfers that gave something
    moved: int  # jobs, by transfer
    taken_held: int
    asks: int
    jobs: int
    deaths: int
    checks: int
    steps: int
    virtual_ns: int
    hits: dict[str, int]
    verbs: dict[str, int]
    done: frozenset[str]


def draw_scheme(seed: int, *, work_s: int = QUICK_S, workers: int | None = None) -> Scheme:
    """The scheme of a seed: the same for ever, as long as this function stays."""
    rng = Random(f"scheme of {seed}")
    drawn = rng.randint(3, 8)
    nodes = workers or drawn
    favourites = tuple(sorted(rng.sample(range(nodes), rng.choice((1, 1, 2)))))
    slots = [rng.randint(1, 2) if n in favourites else rng.randint(2, 6) for n in range(nodes)]
    apart, by_mesh_alone = rng.random() < 0.15, rng.random() < 0.6
    batch, rate = rng.choice((1, 1, 2, 4)), rng.choice((0.0, 0.0, 10.0))
    picky = nodes - 1 if rng.random() < 0.25 else -1  # runs but the low tiers
    habits = tuple(
        Habits(
            slots=slots[n],
            batch=batch,
            rate=rate,
            greedy=n in favourites,
            steals=not (apart and n == nodes - 1),
            takes_held=not by_mesh_alone,
            tiers=(2, 3) if n == picky and n not in favourites else (0, 1, 2, 3),
        )
        for n in range(nodes)
    )
    burst = (10, 40)
    mean_ms = rng.choice((20, 40, 80))
    each_ns = mean_ms * MS * sum(burst) // 2 // sum(slots)  # that a burst keeps all slots busy
    work_ns = work_s * S
    calm = rng.random() < 0.2
    faulty = not calm and rng.random() < 0.9

    def seldom(share: float) -> bool:
        return not calm and rng.random() < share

    def at() -> int:
        return MEETS_NS + rng.randrange(work_ns)

    windows = range(1 + work_s // 15)
    return Scheme(
        seed=seed,
        nodes=nodes,
        link=rng.choices(tuple(LINKS), weights=(30, 60, 10))[0],
        work_ns=work_ns,
        habits=habits,
        favourites=favourites,
        every_ns=max(100 * MS, int(each_ns * rng.uniform(1.2, 2.5))),
        burst=burst,
        tiers=rng.choice(((2,), (1, 2, 2, 2), (0, 1, 2, 3), (2, 3))),
        run_ns=(mean_ms * MS // 2, mean_ms * MS * 3 // 2),
        share=rng.choice((0.01, 0.04, 0.15)) if faulty else 0.0,
        blows=rng.choice((0.0, 0.003, 0.015)) if faulty else 0.0,
        loss=rng.choice((0.05, 0.2)) if seldom(0.25) else 0.0,
        mute=seldom(0.08),
        away=tuple((at(), rng.randrange(100 * MS, 5 * S)) for _ in windows) if seldom(0.25) else (),
        slow=tuple((at(), rng.randrange(100 * MS, 3 * S)) for _ in windows) if seldom(0.25) else (),
        drains=tuple((at(), rng.randrange(nodes)) for _ in windows) if seldom(0.4) else (),
        stands=tuple((at(), rng.randrange(nodes), rng.randrange(100 * MS, 2 * S)) for _ in windows)
        if rng.random() < 0.4
        else (),
        liars=((rng.randrange(nodes), rng.choice((-20, 20))),) if rng.random() < 0.25 else (),
    )


def run_thefts(seed: int, *, work_s: int = QUICK_S, workers: int | None = None) -> Stolen:
    return play(draw_scheme(seed, work_s=work_s, workers=workers))


def play(scheme: Scheme) -> Stolen:
    """Never raises for what core, buffer or storage do: a broken promise is in the answer."""
    shop = Workshop(
        seed=scheme.seed,
        nodes=scheme.nodes,
        habits=scheme.habits,
        link=scheme.link,
        share=scheme.share,
        blows=scheme.blows,
    )
    rule = problem = told = ""
    try:
        _play(shop, scheme)
    except Violation as violation:
        rule, problem = violation.rule, str(violation)
        told = (
            f"{scheme.tell()}\n{problem}\nat {shop.net.now / S:.4f} s; the last events about"
            f" {', '.join(violation.about)}:\n{shop.trace.tell(violation.about)}"
        )
    books = shop.books
    return Stolen(
        seed=scheme.seed,
        rule=rule,
        problem=problem,
        told=told,
        hash=shop.trace.hash,
        thefts=shop.thefts,
        moved=books.verbs["transfer"],
        taken_held=books.verbs["take_held"],
        asks=shop.onlooker.asks,
        jobs=len(books.accounts),
        deaths=shop.deaths,
        checks=books.checks,
        steps=shop.net.steps,
        virtual_ns=shop.net.now,
        hits=dict(shop.points.hit),
        verbs=dict(sorted(books.verbs.items())),
        done=frozenset(job for job, account in books.accounts.items() if account.place is Place.DONE),
    )


def _play(shop: Workshop, scheme: Scheme) -> None:
    net = shop.net
    rng = Random(f"bursts of {scheme.seed}")
    network = net.network
    if scheme.mute:
        network.sides.update({f"10.0.0.{number + 1}": number for number in range(scheme.nodes)})
    for number in range(scheme.nodes):
        net.push(net.chance(200 * MS), shop.start, number)
    for begin, length in scheme.away:
        net.push(begin, setattr, shop.line, "away_until_ns", begin + length)
    for begin, length in scheme.slow:
        net.push(begin, setattr, shop.line, "slow_until_ns", begin + length)
    for when, who in scheme.drains:
        net.push(when, _drain, shop, who)
    for when, who, length in scheme.stands:
        net.push(when, _stand, shop, who, length)
    net.run(MEETS_NS)
    network.loss = scheme.loss
    for who, by in scheme.liars:
        shop.workers[f"w{who}"].lies = by
    when = MEETS_NS
    while when < MEETS_NS + scheme.work_ns:
        net.push(when, _burst, shop, scheme, rng)
        when += int(scheme.every_ns * rng.uniform(0.5, 1.5))
    net.run(MEETS_NS + scheme.work_ns)
    shop.heal()
    finished(shop, exact=scheme.is_calm)


def _burst(shop: Workshop, scheme: Scheme, rng: Random) -> None:
    count = rng.randint(*scheme.burst)
    shop.submit(count, tiers=scheme.tiers, run_ns=scheme.run_ns, to=rng.choice(scheme.favourites))


def _drain(shop: Workshop, who: int) -> None:
    worker = shop.workers[f"w{who}"]
    if worker.node.alive:
        worker.later(0, worker.drain)


def _stand(shop: Workshop, who: int, length_ns: int) -> None:
    worker = shop.workers[f"w{who}"]
    if worker.node.alive:
        worker.later(0, worker.degrade, length_ns)


def finished(shop: Workshop, *, exact: bool) -> None:
    """From now on nothing goes wrong any more: all gets done, and all counts agree. `exact`: nothing did
    before either."""
    net, books = shop.net, shop.books
    if not net.run(net.now + DONE_WITHIN_NS, done=lambda: books.places[Place.DONE] == len(books.accounts)):
        raise Violation("all done", f"{DONE_WITHIN_NS / S:.0f} s after the last fault: {books.all_done()}")
    net.run(net.now + CALM_NS)
    wrong = books.all_done() or miscounted(shop, exact=exact)
    if wrong:
        raise Violation("counters" if not books.all_done() else "all done", wrong)
    books.walk()


def miscounted(shop: Workshop, *, exact: bool) -> str:
    """Where the counters of cores and shelves differ from what storage did; empty if nowhere."""
    books = shop.books
    total: Counter[str] = Counter()
    for worker in shop.runs:
        counters = worker.node.core.counters()
        stolen_in = counters.get("jobs_stolen_in", 0)
        total["in"] += stolen_in
        total["out"] += worker.shelf.stolen_out
        total["untold"] += counters.get("taken_untold", 0)
        if stolen_in != worker.told_got:
            return f"{worker.me} counts {stolen_in} jobs stolen in, it was told of {worker.told_got}"
        if stolen_in > books.moved_to[worker.me]:
            return f"{worker.me} counts {stolen_in} jobs stolen in, storage {books.moved_to[worker.me]}"
        if worker.shelf.stolen_out > books.moved_from[worker.me]:
            out = worker.shelf.stolen_out
            return f"{worker.me} counts {out} jobs stolen out, storage {books.moved_from[worker.me]}"
        succeeded, initiated = counters.get("steals_succeeded", 0), counters.get("steals_initiated", 0)
        if succeeded > initiated:
            return f"{worker.me} counts {succeeded} of {initiated} steals as successful"
    all_told = not total["untold"] and all(worker.node.alive for worker in shop.runs)
    if all_told and total["in"] != total["out"]:
        return f"jobs stolen in {total['in']}, out {total['out']}, and nobody is gone"
    if exact and total["in"] != books.moved_to.total():
        return f"jobs stolen in {total['in']}, storage moved {books.moved_to.total()}"
    return ""
