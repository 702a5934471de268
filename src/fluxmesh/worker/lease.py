"""Until when this worker may trust that its jobs are its own."""

from __future__ import annotations

import math

from fluxmesh.clock import Clock


class Lease:
    """The local deadline: when the last good beat was sent, plus a lease, less one beat.

    Counted from the sending, so storage cannot have counted from earlier; one beat short, so that this
    worker falls silent before anybody else may act. Written by the beat thread, read by all.
    """

    def __init__(self, clock: Clock, *, lease_s: float, beat_s: float) -> None:
        self._clock = clock
        self._trusted_s = lease_s - beat_s
        self._until_s = -math.inf

    def renewed(self, sent_s: float) -> None:
        """A beat (or the registration) sent at this monotonic instant was good."""
        self._until_s = sent_s + self._trusted_s

    @property
    def until_s(self) -> float:
        """The monotonic instant, which every process of this machine reads alike."""
        return self._until_s

    def holds(self) -> bool:
        """True: jobs may be claimed and begun."""
        return self._clock.mono_s() < self._until_s

    def left_s(self) -> float:
        """Seconds for which it still holds; negative: since when it does not."""
        return self._until_s - self._clock.mono_s()
