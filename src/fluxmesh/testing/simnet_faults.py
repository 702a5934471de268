"""What a seed does to a simulated mesh: a plan of faults, drawn before anything runs.

Three severities decide what may be asked for. `clean`: nobody who lives may be suspected. `mild`: at most
5 % of datagrams are lost, nodes come, go and crash; nobody who lives may be declared dead. `harsh`: anything;
what always holds must hold, and after the last fault the tables become one.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import Final

from msgspec import Struct

from fluxmesh.mesh.timing import MS, S
from fluxmesh.testing.simnet_network import LINKS

NODES_MIN: Final = 3
NODES_MAX: Final = 16
CHAOS_FROM_NS: Final = 6 * S
CHAOS_TO_NS: Final = 36 * S
SEALED_SHARE: Final = 0.12


class Severity(StrEnum):
    CLEAN = "clean"
    MILD = "mild"
    HARSH = "harsh"


class Kind(StrEnum):
    DOUBLED = "doubled datagrams"
    OVERTAKEN = "overtaken datagrams"
    PAIR_CUT = "pair cut"
    UDP_CUT = "pair cut for UDP"
    CLOCK_RATE = "clock rate"
    NO_NAMES = "names without answer"
    STALE_NAMES = "names with stale answers"
    JUNK = "junk and forgeries"
    REPLAYS = "replays"
    RESETS = "reset calls"
    LATE_JOIN = "late join"
    STRANGE_KEY = "peer with another key"
    STRANGE_LABEL = "peer with another label"
    LOSS = "loss up to 5 %"
    CRASH = "crash"
    RESTART = "restart with the same id"
    MOVE = "restart with a new address"
    LEAVE = "leave"
    REJOIN = "leave and return"
    HEAVY_LOSS = "loss up to 40 %"
    ONE_WAY_CUT = "one-way cut"
    UDP_BLOCKED = "node without UDP"
    PARTITION = "partition"
    ISLANDS = "islands at the start"
    SMALL_MTU = "small MTU"
    SUSPEND = "suspended process"
    STALL = "stalled loop"
    SLOW = "slow node"
    CLOCK_JUMP = "clock jump"
    SEND_ERRORS = "send errors"
    CLONE = "second holder of an id"
    WITNESS = "witnesses of a crash stall"
    LIAR = "member that lies"


CLEAN: Final = (
    Kind.DOUBLED,
    Kind.OVERTAKEN,
    Kind.PAIR_CUT,
    Kind.UDP_CUT,
    Kind.CLOCK_RATE,
    Kind.NO_NAMES,
    Kind.STALE_NAMES,
    Kind.JUNK,
    Kind.REPLAYS,
    Kind.RESETS,
    Kind.LATE_JOIN,
)
MILD: Final = (Kind.LOSS, Kind.CRASH, Kind.RESTART, Kind.MOVE, Kind.LEAVE, Kind.REJOIN)
HARSH: Final = (
    Kind.HEAVY_LOSS,
    Kind.ONE_WAY_CUT,
    Kind.UDP_BLOCKED,
    Kind.PARTITION,
    Kind.ISLANDS,
    Kind.SMALL_MTU,
    Kind.SUSPEND,
    Kind.STALL,
    Kind.SLOW,
    Kind.CLOCK_JUMP,
    Kind.SEND_ERRORS,
    Kind.CLONE,
    Kind.WITNESS,
    Kind.LIAR,
)
_FIRST: Final = (
    *HARSH,
    Kind.PARTITION,
    Kind.ISLANDS,
    Kind.SUSPEND,
    Kind.WITNESS,
)  # what does most comes more often
SEALED: Final = (Kind.STRANGE_KEY, Kind.STRANGE_LABEL)  # only where packets are sealed
_ALONE: Final = (Kind.PAIR_CUT, Kind.UDP_CUT)  # of a clean plan one of these: two may leave no detour
_NAMES: Final = (Kind.NO_NAMES, Kind.STALE_NAMES)


class Seeds(StrEnum):
    """Whom the nodes know at the start."""

    FIRST = "the first"
    TWO = "two"
    ALL = "all, itself among them"
    NAMES = "names"


class Act(Struct, frozen=True):
    """One fault: from when on, how long, which nodes (by number), how much of it."""

    kind: Kind
    at_ns: int
    length_ns: int
    who: tuple[int, ...]
    amount: float

    def tell(self) -> str:
        until = (self.at_ns + self.length_ns) / S
        return f"{self.at_ns / S:6.2f}-{until:5.2f} {self.kind} {list(self.who)} {self.amount:.2f}"


class Plan(Struct, frozen=True, kw_only=True):
    seed: int
    nodes: int
    link: str
    seeds: Seeds
    severity: Severity
    sealed: bool
    kinds: tuple[Kind, ...]
    acts: tuple[Act, ...]

    def tell(self) -> str:
        head = (
            f"seed {self.seed}: {self.nodes} nodes, {self.link}, seeds: {self.seeds}, {self.severity}"
            f"{', sealed' if self.sealed else ''}"
        )
        return "\n".join([head, *(f"  {act.tell()}" for act in self.acts)])


def draw(seed: int, *, nodes: int | None = None) -> Plan:
    """The plan of a seed: the same for ever, as long as this function stays."""
    rng = Random(f"plan of {seed}")
    count = nodes or rng.randint(NODES_MIN, NODES_MAX)
    severity = rng.choices(tuple(Severity), weights=(20, 35, 45))[0]
    sealed = rng.random() < SEALED_SHARE
    kinds = _kinds(rng, severity, count, sealed=sealed)
    named = any(kind in _NAMES for kind in kinds)
    seeds = Seeds.NAMES if named else rng.choice((Seeds.FIRST, Seeds.TWO, Seeds.ALL))
    if Kind.ISLANDS in kinds:
        seeds = Seeds.ALL
    acts = [act for kind in kinds for act in _acts(rng, kind, count, severity)]
    acts.sort(key=lambda act: (act.at_ns, act.kind, act.who))
    return Plan(
        seed=seed,
        nodes=count,
        link=rng.choices(tuple(LINKS), weights=(25, 55, 20))[0],
        seeds=seeds,
        severity=severity,
        sealed=sealed,
        kinds=kinds,
        acts=tuple(acts),
    )


def _kinds(rng: Random, severity: Severity, nodes: int, *, sealed: bool) -> tuple[Kind, ...]:
    pool = list(CLEAN)
    if severity is not Severity.CLEAN:
        pool += MILD
    if severity is Severity.HARSH:
        pool += HARSH
    if nodes < 4 and severity is Severity.CLEAN:
        pool = [kind for kind in pool if kind not in _ALONE]  # there is nobody who could help
    chosen = rng.sample(pool, rng.randint(1, 6))
    if severity is Severity.HARSH:
        chosen[0] = rng.choice(_FIRST)
    elif severity is Severity.MILD:
        chosen[0] = rng.choice(MILD)
        chosen = [kind for kind in chosen if kind not in _ALONE or nodes >= 6]
    elif sum(kind in _ALONE for kind in chosen) > 1:
        chosen.remove(Kind.UDP_CUT)
    if sealed:
        chosen.append(rng.choice(SEALED))
    return tuple(dict.fromkeys(chosen))


_LASTS_FOR_ALL: Final = frozenset(
    {
        Kind.DOUBLED,
        Kind.OVERTAKEN,
        Kind.LOSS,
        Kind.RESETS,
        Kind.CLOCK_RATE,
        Kind.NO_NAMES,
        Kind.STALE_NAMES,
        Kind.JUNK,
        Kind.REPLAYS,
        Kind.STRANGE_KEY,
        Kind.STRANGE_LABEL,
        Kind.HEAVY_LOSS,
    }
)
_ONCE: Final = _LASTS_FOR_ALL | {Kind.ISLANDS, Kind.PAIR_CUT, Kind.UDP_CUT, Kind.SMALL_MTU}


def _acts(rng: Random, kind: Kind, nodes: int, severity: Severity) -> list[Act]:
    times = 1 if kind in _ONCE else rng.randint(1, 3)
    return [_act(rng, kind, nodes, severity) for _ in range(times)]


def _act(rng: Random, kind: Kind, nodes: int, severity: Severity) -> Act:
    at = rng.randrange(CHAOS_FROM_NS, CHAOS_TO_NS - 4 * S)
    length = min(CHAOS_TO_NS - at, rng.choice((1, 3, 8, 20)) * S + rng.randrange(S))
    who: tuple[int, ...] = (rng.randrange(nodes),)
    amount = rng.random()
    match kind:
        case _ if kind in _LASTS_FOR_ALL:
            at, length = 0, CHAOS_TO_NS
        case Kind.ISLANDS:
            at, length = 0, rng.randrange(8 * S, CHAOS_TO_NS)
        case Kind.LATE_JOIN:
            who = (nodes + rng.randrange(3),)
        case Kind.PAIR_CUT | Kind.UDP_CUT | Kind.ONE_WAY_CUT:
            who = tuple(rng.sample(range(nodes), 2))
        case Kind.SUSPEND:
            length = min(CHAOS_TO_NS - at, rng.choice((1, 5, 15, 40)) * S)
        case Kind.PARTITION:
            at = rng.randrange(CHAOS_FROM_NS, 2 * CHAOS_FROM_NS)
            length = min(CHAOS_TO_NS - at, rng.choice((3, 12, 20, 28)) * S + rng.randrange(S))
        case Kind.WITNESS:
            at = rng.randrange(CHAOS_FROM_NS, CHAOS_TO_NS - 14 * S)
            length = rng.choice((1, 3, 8)) * S
            who = tuple(rng.sample(range(nodes), min(nodes, 3)))
        case Kind.STALL:
            length = rng.randrange(200 * MS, 2 * S)
        case Kind.CRASH | Kind.RESTART | Kind.MOVE | Kind.REJOIN:
            length = min(CHAOS_TO_NS - at, rng.choice((100 * MS, S, 5 * S, 12 * S)) + rng.randrange(S))
        case _:
            pass
    if kind in (Kind.PARTITION, Kind.ISLANDS):
        who = tuple(sorted(rng.sample(range(nodes), rng.randint(1, nodes - 1))))
    if severity is Severity.CLEAN and kind in _ALONE:
        at = max(at, CHAOS_FROM_NS + 6 * S)  # by then all know each other, so that there is a detour
        length = min(length, CHAOS_TO_NS - at)
    return Act(kind, at, length, who, amount)
