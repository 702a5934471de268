"""A core that seeks or gives work, and its peers, on a bench."""

from __future__ import annotations

from collections.abc import Sequence

from fluxmesh.mesh.effects import Call, Effect, Seek, Take, Took, UpdateLoad
from fluxmesh.mesh.messages import Flag, Frame, Load, NodeRef, Offer, Offered, Steal
from fluxmesh.mesh.timing import S
from tests.unit.mesh.driving import Bench, frame_of, of

READY = Flag.READY | Flag.STEALS
BATCH = 4
ABOVE = 6  # the default threshold and batch together
TASKS = (11, 12)


def job(number: int, token: int = 1) -> Offered:
    return Offered(f"{number:036}", token)


def jobs(*numbers: int) -> tuple[Offered, ...]:
    return tuple(job(number) for number in numbers)


def ref(number: int, epoch: int = 1) -> NodeRef:
    return NodeRef(f"peer-{number}", epoch)


class Shelf:
    """Holds what it is given, and remembers what it was asked and told."""

    def __init__(self, *held: Offered) -> None:
        self.held = list(held)
        self.asked: list[tuple[Steal, int, NodeRef]] = []
        self.told: list[tuple[tuple[Offered, ...], NodeRef]] = []

    def offer(self, wish: Steal, most: int, thief: NodeRef) -> Offer:
        self.asked.append((wish, most, thief))
        return Offer(tuple(self.held[:most]), max(0, len(self.held) - most))

    def taken(self, jobs: Sequence[Offered], thief: NodeRef) -> int:
        self.told.append((tuple(jobs), thief))
        gone = [one for one in jobs if one in self.held]
        self.held = [one for one in self.held if one not in gone]
        return len(gone)


class Hungry(Bench):
    """Idle, ready, and its `peers` have said for a second that they are ready and steal."""

    def __init__(
        self,
        peers: int = 2,
        *,
        want: int = 4,
        seed: int = 1,
        tasks: tuple[int, ...] = TASKS,
        shelf: Shelf | None = None,
        steals: bool = True,
        steal_rate_limit: float = 10.0,
    ) -> None:
        super().__init__(
            peers, seed=seed, tasks=tasks, shelf=shelf, steals=steals, steal_rate_limit=steal_rate_limit
        )
        self.counters = dict.fromkeys(range(1, peers + 1), 0)
        for number in self.counters:
            self.hint(number, 0)
        self.now += S
        self.tell()
        self.seek(want)

    def tell(self, *, flags: Flag = READY, stealable: int = 0, running: int = 0) -> list[Effect]:
        """Our own load."""
        load = Load(
            "", 0, 0, queued=stealable, running=running, capacity=8, stealable=stealable, flags=int(flags)
        )
        return self.do(self.core.command(UpdateLoad(load), self.now))

    def seek(self, want: int) -> list[Effect]:
        return self.do(self.core.command(Seek(want), self.now))

    def took(self, number: int, some: tuple[Offered, ...], got: tuple[Offered, ...]) -> list[Effect]:
        return self.do(self.core.command(Took(ref(number), some, got), self.now))

    def hint(
        self,
        number: int,
        stealable: int,
        *,
        by: int | None = None,
        flags: Flag = READY,
        age_ms: int = 0,
        epoch: int = 1,
    ) -> list[Effect]:
        """A new load of a peer, said by itself or `by` another."""
        self.counters[number] += 1
        load = Load(
            f"peer-{number}",
            epoch,
            self.counters[number],
            queued=stealable,
            running=8,
            capacity=8,
            stealable=stealable,
            flags=int(flags),
            age_ms=age_ms,
        )
        return self.hear(by or number, loads=[load], epoch=epoch if by is None else 1)

    def offered(self, call: Call, number: int, body: Frame | None) -> list[Effect]:
        """What peer `number` answers."""
        return self.answer(call, ref(number), body)

    def count(self, name: str) -> int:
        return self.core.counters().get(name, 0)


def requests(effects: list[Effect]) -> list[tuple[Call, Steal]]:
    calls = [(call, frame_of(call)) for call in of(effects, Call)]
    return [(call, body) for call, body in calls if isinstance(body, Steal)]


def the_request(effects: list[Effect]) -> Call:
    ((call, _),) = requests(effects)
    return call


def the_take(effects: list[Effect]) -> Take:
    (take,) = of(effects, Take)
    return take
