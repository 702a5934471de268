"""Timers by purpose, as a core arms them: one heap, and one instant at which its carrier has to look."""

from __future__ import annotations

import heapq
from typing import Final

from fluxmesh.mesh.effects import Timer

_SLACK: Final = 64  # entries that were moved or disarmed and may lie in the heap before it is built anew


class Timers:
    """Arming a timer that is armed moves it. Not thread-safe; all instants in nanoseconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Timer]] = []
        self._armed: dict[Timer, tuple[int, int]] = {}  # when, and the number of the entry that counts
        self._number = 0

    def __len__(self) -> int:
        return len(self._armed)

    def arm(self, timer: Timer, at_ns: int) -> None:
        self._number += 1
        self._armed[timer] = (at_ns, self._number)
        heapq.heappush(self._heap, (at_ns, self._number, timer))
        if len(self._heap) > 2 * len(self._armed) + _SLACK:
            self._heap = [(at, number, one) for one, (at, number) in self._armed.items()]
            heapq.heapify(self._heap)

    def disarm(self, timer: Timer) -> None:
        self._armed.pop(timer, None)

    def next_ns(self) -> int | None:
        """When the first of them is due; None: nothing is armed."""
        while self._heap:
            at_ns, number, timer = self._heap[0]
            if self._armed.get(timer) == (at_ns, number):
                return at_ns
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now_ns: int) -> Timer | None:
        """The first that is due, disarmed; None: none is."""
        at_ns = self.next_ns()
        if at_ns is None or at_ns > now_ns:
            return None
        timer = heapq.heappop(self._heap)[2]
        del self._armed[timer]
        return timer
