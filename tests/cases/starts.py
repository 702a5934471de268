"""What the moves of a storage tell of starts: whether one passed over a better job; who held what how long.

Pure. A start passes over a job if that was ready, of a higher tier, and its worker could have run it, at the
instant of the exchange that started the other, and the exchange started it not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from tests.cases.audit import HELD, OWNED, READY, RUNNING, Move


class Runs(Struct, frozen=True):
    """What a worker can run: of these jobs' tasks all."""

    queues: frozenset[str]
    tiers: frozenset[int]


class Below(Struct, frozen=True):
    """A job was started while this better one was ready, or held by the same worker."""

    started: str
    tier: int
    better: str
    better_tier: int
    worker: str


class Starts(Struct, frozen=True):
    """`two_tiers`: starts at whose instant jobs of two or more tiers were ready for their worker. `stolen`:
    of jobs that had changed their owner while held. `below_ready` must be empty; `below_own` are starts of a
    worker that held something better itself, `below_stolen` those where that had come from another owner, and
    may have been on its way when the exchange began."""

    starts: int
    two_tiers: int
    stolen: int
    below_ready: tuple[Below, ...]
    below_own: tuple[Below, ...]
    below_stolen: tuple[Below, ...]


class _Places:
    """Where every job is."""

    def __init__(self) -> None:
        self._last: dict[str, Move] = {}
        self._at: dict[tuple[int, str, str, int], set[str]] = defaultdict(set)  # place, epoch, queue, tier
        self.queues: set[str] = set()

    @staticmethod
    def _key(move: Move) -> tuple[int, str, str, int]:
        return move.place, move.epoch, move.queue, move.tier

    def take(self, move: Move) -> None:
        before = self._last.get(move.id)
        if before is not None:
            self._at[self._key(before)].discard(move.id)
        self._last[move.id] = move
        self._at[self._key(move)].add(move.id)
        self.queues.add(move.queue)

    def of(self, place: int, epoch: str, runs: Runs) -> dict[int, frozenset[str]]:
        """Ids by tier of what is there and the worker can run; tiers without any are left out."""
        found: dict[int, frozenset[str]] = {}
        for tier in sorted(runs.tiers):
            ids = [self._at.get((place, epoch, queue, tier), ()) for queue in self.queues & runs.queues]
            merged: frozenset[str] = frozenset().union(*ids)
            if merged:
                found[tier] = merged
        return found


def starts_of(moves: Sequence[Move], runs: Mapping[str, Runs]) -> Starts:
    """`runs` by epoch; starts of others are left out."""
    exchanges, stolen, hopped = _exchanges(moves)
    places = _Places()
    count = two_tiers = 0
    below_ready: list[Below] = []
    below_own: list[Below] = []
    below_stolen: list[Below] = []
    for move in moves:
        started = exchanges.pop((move.epoch, move.step), None) if move.place == RUNNING else None
        of = runs.get(move.epoch)
        if started and of is not None:  # the first of its exchange: here its places are as it found them
            ready = places.of(READY, "", of)
            count += len(started)
            two_tiers += len(started) if len(ready) >= 2 else 0
            below_ready += _passed_over(started, ready)
            for below in _passed_over(started, places.of(HELD, move.epoch, of)):
                (below_stolen if (below.better, move.epoch) in hopped else below_own).append(below)
        places.take(move)
    return Starts(count, two_tiers, stolen, tuple(below_ready), tuple(below_own), tuple(below_stolen))


def _exchanges(
    moves: Iterable[Move],
) -> tuple[dict[tuple[str, int], list[Move]], int, set[tuple[str, str]]]:
    """What each exchange started, by (epoch, step); how many of all had come straight from another owner, who
    had held it; and which have ever come so to whom, by (id, epoch)."""
    found: dict[tuple[str, int], list[Move]] = defaultdict(list)
    last: dict[str, Move] = {}
    hopped: set[tuple[str, str]] = set()
    tokens: set[tuple[str, int]] = set()
    stolen = 0
    for move in moves:
        before = last.get(move.id)
        last[move.id] = move
        if before is not None and before.place == HELD and move.place in OWNED and before.epoch != move.epoch:
            hopped.add((move.id, move.epoch))
            tokens.add((move.id, move.token))
        is_new = before is None or (before.place, before.token) != (RUNNING, move.token)
        if move.place == RUNNING and is_new:
            found[move.epoch, move.step].append(move)
            stolen += (move.id, move.token) in tokens
    return found, stolen, hopped


def _passed_over(started: Sequence[Move], others: Mapping[int, frozenset[str]]) -> Iterator[Below]:
    ids = {move.id for move in started}
    for move in started:
        for tier, better in others.items():
            if tier < move.tier and (left := better - ids):
                yield Below(move.id, move.tier, min(left), tier, move.worker)
                break


class Stay(Struct, frozen=True):
    """A job was with an owner for so long; until_us None: it still is."""

    id: str
    worker: str
    epoch: str
    token: int
    place: int
    from_us: int
    until_us: int | None

    def length_s(self, now_us: int) -> float:
        return ((now_us if self.until_us is None else self.until_us) - self.from_us) / 1e6


def stays(moves: Iterable[Move]) -> list[Stay]:
    """Every stretch in which a job was held, or running, under one owner and token."""
    found: list[Stay] = []
    open_at: dict[str, Move] = {}
    for move in moves:
        before = open_at.get(move.id)
        if before is not None and (before.place, before.token) == (move.place, move.token):
            continue
        if before is not None:
            found.append(_stay(before, move.at_us))
            del open_at[move.id]
        if move.place in OWNED:
            open_at[move.id] = move
    return found + [_stay(move, None) for move in open_at.values()]


def _stay(move: Move, until_us: int | None) -> Stay:
    return Stay(move.id, move.worker, move.epoch, move.token, move.place, move.at_us, until_us)


class Thefts(Struct, frozen=True):
    """Jobs that a worker made its own while another held them: `stolen` to hold them itself, as by the mesh;
    `taken_held` to start them at once, as without one."""

    stolen: int
    taken_held: int


def thefts(moves: Iterable[Move]) -> Thefts:
    last: dict[str, Move] = {}
    stolen = taken = 0
    for move in moves:
        before = last.get(move.id)
        last[move.id] = move
        if before is not None and before.place == HELD and move.epoch and before.epoch != move.epoch:
            stolen += move.place == HELD
            taken += move.place == RUNNING
    return Thefts(stolen, taken)


def doubly_owned(moves: Iterable[Move]) -> list[str]:
    """Tokens that the storage gave to two owners, in words."""
    owner: dict[tuple[str, int], str] = {}
    return [
        f"job {move.id}: token {move.token} of two owners"
        for move in moves
        if move.place in OWNED and owner.setdefault((move.id, move.token), move.epoch) != move.epoch
    ]
