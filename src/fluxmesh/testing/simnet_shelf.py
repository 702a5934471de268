"""The jobs that a simulated worker holds: the real buffer, and what its core and its thieves see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from fluxmesh.mesh.buffer import HOPS_MAX, Buffer, Held, offered
from fluxmesh.mesh.messages import NodeRef, Offer, Offered, Steal
from fluxmesh.testing.simnet_store import Given

Owns = Callable[[NodeRef, int], bool]  # whether a job of this slot belongs to that worker


class ModelShelf:
    """A `shelf.Shelf`. What is on its way to its start is no part of the buffer, and is never offered."""

    def __init__(self, *, most: int, now: Callable[[], int], owns: Owns) -> None:
        self.me: NodeRef | None = None
        self.stolen_out = 0
        self._now = now
        self._owns = owns
        self._jobs: dict[str, Given] = {}
        self._starting: dict[str, Given] = {}
        self._counted: set[Offered] = set()
        self.buffer: Final = Buffer(most, self._is_own)

    def _is_own(self, held: Held) -> bool:
        return self.me is not None and held.slot is not None and self._owns(self.me, held.slot)

    # -- for the worker ----------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        return len(self.buffer)

    def room(self) -> int:
        return self.buffer.room

    def add(self, jobs: Iterable[Given]) -> list[Given]:
        """Those that do not fit come back."""
        over = []
        for job in jobs:
            held = Held(job.id, job.token, "default", job.tier, "task", job.seq, job.hops, self._now())
            if self.buffer.put(held):
                self._jobs[job.id] = job
            else:
                over.append(job)
        return over

    def hot(self, count: int) -> tuple[Given, ...]:
        """The next to begin; they leave the buffer."""
        chosen = tuple(self._drop(held) for held in self.buffer.hot(count))
        for job in chosen:
            self._starting[job.id] = job
        return chosen

    def begun(self, jobs: Iterable[Given]) -> None:
        """It is known what became of them."""
        for job in jobs:
            if self._starting.get(job.id) is job:
                del self._starting[job.id]

    def clear(self) -> list[Given]:
        return [self._drop(held) for held in list(self.buffer.held.values())]

    def older_than(self, instant_ns: int) -> list[Given]:
        return [self._drop(held) for held in self.buffer.older_than(instant_ns)]

    def lost(self, jobs: Iterable[Offered]) -> None:
        """Storage says that they are not ours any more."""
        for item in jobs:
            if self.buffer.remove(item.id, item.token) is not None:
                del self._jobs[item.id]

    def all(self) -> list[Given]:
        return [*self._jobs.values(), *self._starting.values()]

    def _drop(self, held: Held) -> Given:
        self.buffer.remove(held.id, held.token)
        return self._jobs.pop(held.id)

    @property
    def stealable(self) -> tuple[int, int]:
        """How many may change hands, and the best tier of them."""
        return self.buffer.stealable(own_too=True)

    def movable(self) -> list[Held]:
        return [held for held in self.buffer.held.values() if held.hops < HOPS_MAX]

    # -- for the core ------------------------------------------------------------------------------------

    def offer(self, wish: Steal, most: int, thief: NodeRef) -> Offer:
        chosen = self.choose(wish, most, thief)
        surplus = self.stealable[0] - len(chosen)
        return Offer(tuple(Offered(held.id, held.token) for held in chosen), max(0, surplus))

    def choose(self, wish: Steal, most: int, thief: NodeRef) -> list[Held]:
        return offered(
            self.buffer.held.values(),
            most,
            can_run=lambda held: held.tier in wish.tiers,
            is_thiefs=lambda held: held.slot is not None and self._owns(thief, held.slot),
            is_own=self._is_own,
            own_too=True,
        )

    def taken(self, jobs: Sequence[Offered], thief: NodeRef) -> int:
        count = 0
        for item in jobs:
            if item in self._counted:
                continue
            self._counted.add(item)
            count += 1
            if self.buffer.remove(item.id, item.token) is not None:
                del self._jobs[item.id]
        self.stolen_out += count
        return count
