"""Which part of the work is this worker's own: what the ring says, told to storage with the beats.

A change is told at once, but not more often than each NUDGE_GAP_S: when members come one after the other,
each of them changes everybody's share. What storage has lost, with the worker's row or a part of it, is told
again at once. Counters go with beats as well; one is sent for them when they have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from fluxmesh.clock import Clock
from fluxmesh.mesh.reports import REPORT_EVERY_S
from fluxmesh.storage.values import Affinity, AffinityPart, BeatAnswer, Standing

if TYPE_CHECKING:
    from fluxmesh.mesh.node import MeshNode

NUDGE_GAP_S: Final = 0.3
AGAIN_S: Final = 60.0  # a storage that was set back may have an older one
_NONE: Final = Affinity()


class Sharing:
    """`ask_storage` has a beat sent at once. `to_tell` and `told` are for the thread that beats, `look` for
    the one that watches."""

    def __init__(self, clock: Clock, ask_storage: Callable[[], None]) -> None:
        self._clock = clock
        self._ask_storage = ask_storage
        self._node: MeshNode | None = None
        self._told: Affinity = _NONE
        self._told_at_s = 0.0
        self._over = False
        self._lock = threading.Lock()
        self._nudged_s = -NUDGE_GAP_S
        self._timer: threading.Timer | None = None
        self._next_news_s = 0.0

    def join(self, node: MeshNode) -> None:
        self._node = node

    def close(self) -> None:
        """This worker has no part of its own any more."""
        with self._lock:
            self._over = True
            if self._timer is not None:
                self._timer.cancel()

    def changed(self) -> None:
        """The ring is another. Any thread; never waits."""
        with self._lock:
            if self._over or self._timer is not None:
                return
            rest_s = self._nudged_s + NUDGE_GAP_S - self._clock.mono_s()
            if rest_s > 0:
                self._timer = threading.Timer(rest_s, self._nudge)
                self._timer.daemon = True
                self._timer.start()
                return
            self._nudged_s = self._clock.mono_s()
        self._ask_storage()

    def _nudge(self) -> None:
        with self._lock:
            self._timer = None
            self._nudged_s = self._clock.mono_s()
        self._ask_storage()

    def look(self) -> None:
        """Have a beat sent if counters stand otherwise than storage was told; at most one each
        REPORT_EVERY_S, also while none is answered. To be called about twice a second."""
        node, now_s = self._node, self._clock.mono_s()
        if node is not None and now_s >= self._next_news_s and node.has_news(now_s):
            self._next_news_s = now_s + REPORT_EVERY_S
            self._ask_storage()

    def to_tell(self) -> Affinity | None:
        """What the next beat shall say; None: storage knows."""
        now = self._now()
        again = now != _NONE and self._clock.mono_s() - self._told_at_s >= AGAIN_S
        return now if again or now != self._told else None

    def told(self, affinity: Affinity | None, answer: BeatAnswer) -> None:
        """A beat has told it, and this is what storage says of the worker."""
        if answer.standing is not Standing.GOOD:
            self._told = _NONE
            return
        if affinity is not None:
            self._told = affinity
            self._told_at_s = self._clock.mono_s()
        if self._told.parts and not answer.has_affinity:
            self._told = (
                _NONE  # the next beat tells it, and without delay unless this one has done so in vain
            )
            if affinity is None:
                self._ask_storage()

    def _now(self) -> Affinity:
        if self._node is None or self._over or not self._node.running:
            return _NONE
        share = self._node.affinity()
        if not share.parts:
            return _NONE
        parts = [AffinityPart(part.queues, part.slots, part.tasks) for part in share.parts]
        return Affinity(share.weight, tuple(parts))
