"""Work that is there to be taken is told at once to a few who could take it."""

from __future__ import annotations

import random
from typing import Final

from fluxmesh.mesh.loads import is_idle, known_load
from fluxmesh.mesh.member import Member
from fluxmesh.mesh.messages import Load, NodeRef, Standing
from fluxmesh.mesh.timing import MS
from fluxmesh.mesh.voice import Voice

FANOUT: Final = 3
GAP_NS: Final = 50 * MS  # a surplus that trembles about the bound is not told at every step


class Surge:
    """Loads as they come, our own and others', and the moment in which one rises above `above`."""

    def __init__(self, *, voice: Voice, rng: random.Random, above: int) -> None:
        self.voice = voice
        self._rng = rng
        self._above = above
        self._sent_ns: int | None = None
        self._waits = False

    def update(self, load: Load, now: int, *, is_present: bool) -> None:
        """Our own load has changed."""
        before = self.voice.loads.own
        self.voice.loads.set_own(load, now)
        if is_present and (before is None or before.stealable <= self._above):
            self._send(now)

    def on_timer(self, now: int) -> None:
        self._waits = False
        self._send(now)

    def hear(self, load: Load, now: int, *, teller: NodeRef) -> None:
        """A load as it came with a packet of `teller`."""
        loads = self.voice.loads
        if load.worker_id == self.voice.me.worker_id:
            loads.outbid(load, now)
            return
        row = self.voice.table.rows.get(load.worker_id)
        if row is None:
            return
        was_above = row.load is not None and row.load.stealable > self._above
        is_own_word = load.worker_id == teller.worker_id
        is_new = loads.hear(load, row, now, is_own_word=is_own_word)
        if is_new and load.stealable > self._above and not was_above:
            self.voice.tell("surge", row.record, load=load)

    def _send(self, now: int) -> None:
        own = self.voice.loads.own
        if own is None or own.stealable <= self._above:
            return
        if self._sent_ns is not None and now - self._sent_ns < GAP_NS:
            if not self._waits:
                self._waits = True
                self.voice.arm(("surge", 0), self._sent_ns + GAP_NS)
            return
        self._sent_ns = now
        for member in self.voice.table.choose(self._rng, FANOUT, lambda row: _could_take(row, now)):
            self.voice.count("surges_sent")
            self.voice.surge(member, now)


def _could_take(row: Member, now: int) -> bool:
    load = known_load(row, now) if row.record.standing == Standing.ALIVE else None
    return load is not None and is_idle(load)
