"""A worker's stock and its node: what the one has to say to the other. The worker's loop and the node's
thread meet here, and neither waits for the other.

The load is told twice a second in any case, by the thread that watches. It is told at once when others wait
for such news: a surplus has come up, or this worker has become idle, or is so no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from fluxmesh.clock import Clock
from fluxmesh.worker.slots import Slots

if TYPE_CHECKING:
    from fluxmesh.mesh.messages import Flag, NodeRef, Offered
    from fluxmesh.mesh.node import MeshNode
    from fluxmesh.worker.stock import Stock

TELL_GAP_S: Final = 0.005


class Trading:
    """Implements `holding.Trade`. `flags` is what the node is to say of the worker now. `receive` takes the
    jobs that a peer has offered, on the worker's loop."""

    def __init__(self, stock: Stock, slots: Slots, clock: Clock, flags: Callable[[], Flag]) -> None:
        self._stock = stock
        self._slots = slots
        self._clock = clock
        self._flags = flags
        self.receive: Callable[[NodeRef, tuple[Offered, ...]], None] | None = None
        self._node: MeshNode | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: tuple[bool, bool] = (False, True)  # surplus, idle
        self._told_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def join(self, node: MeshNode, loop: asyncio.AbstractEventLoop) -> None:
        """From now on this is the node; it knows nothing of what was told to another."""
        self._loop = loop
        self._node = node
        self._stock.neighbours = node
        self._stock.share_changed()
        if self._stock.want:
            node.seek(self._stock.want)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # -- on the worker's loop ------------------------------------------------------------------------
    def seek(self, want: int) -> None:
        if self._node is not None:
            self._node.seek(want)

    def took(self, peer: NodeRef, jobs: Sequence[Offered], got: Sequence[Offered]) -> None:
        if self._node is not None:
            self._node.took(peer, tuple(jobs), tuple(got))

    def changed(self) -> None:
        if self._node is None or self._state() == self._told or self._timer is not None:
            return
        rest_s = self._told_at_s + TELL_GAP_S - self._clock.mono_s()
        if rest_s <= 0:
            self.publish()
        elif self._loop is not None:
            self._timer = self._loop.call_later(rest_s, self._tell_now)

    def _tell_now(self) -> None:
        self._timer = None
        if self._state() != self._told:
            self.publish()

    def _state(self) -> tuple[bool, bool]:
        """What others wait for: a surplus worth asking for, and an idle hand."""
        rules, held = self._stock.rules, len(self._stock)
        surplus = self._stock.stealable()[0] > rules.steal_threshold + rules.steal_batch
        return surplus, not held and self._slots.free > 0

    # -- any thread ------------------------------------------------------------------------------------
    def publish(self) -> None:
        """Tell the node the load as it is now."""
        if self._node is None:
            return
        stock = self._stock
        self._told = self._state()
        self._told_at_s = self._clock.mono_s()
        stealable, best_tier = stock.stealable()
        self._node.publish(
            queued=len(stock),
            running=self._slots.occupied,
            stealable=stealable,
            best_tier=best_tier,
            run_ms=stock.run_ms,
            flags=self._flags(),
        )

    # -- on the node's thread ----------------------------------------------------------------------------
    def on_take(self, peer: NodeRef, jobs: tuple[Offered, ...]) -> None:
        if not self._post(lambda: self._receive(peer, jobs)):
            self.took(peer, jobs, ())

    def on_taken(self) -> None:
        """Others have taken something out of the stock."""
        self._post(self.changed)

    def _receive(self, peer: NodeRef, jobs: tuple[Offered, ...]) -> None:
        if self.receive is None:
            self.took(peer, jobs, ())
        else:
            self.receive(peer, jobs)

    def _post(self, call: Callable[[], None]) -> bool:
        """Have the worker's loop call this; False: it is closed."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return False
        return True
