"""Work that is there to be taken is told at once to a few who could take it, and so is one who would.

Loads ride on other packets, some of which are a second apart. What must not wait for them is a surplus beside
an idle worker: whichever of the two comes last tells it.
"""

from __future__ import annotations

import random
from typing import Final

from fluxmesh.mesh.loads import is_idle, known_load
from fluxmesh.mesh.member import Member
from fluxmesh.mesh.messages import Flag, Load, NodeRef, Standing
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
        self._told_idle = False
        self._told_idle_ns: int | None = None

    def update(self, load: Load, now: int, *, is_present: bool) -> None:
        """Our own load has changed."""
        before = self.voice.loads.own
        self.voice.loads.set_own(load, now)
        if is_present and (before is None or before.stealable <= self._above):
            self._send(now)

    def on_timer(self, now: int) -> None:
        self._waits = False
        self._send(now)

    def seeks(self, now: int, *, is_hungry: bool, is_busy: bool) -> None:
        """Our own wish for work, or our load, has changed. Who becomes idle and finds nobody to ask says so
        to a few who may have something."""
        own = self.voice.loads.own
        if own is None or not is_hungry or not is_idle(own):
            self._told_idle = False
            return
        if self._told_idle or is_busy:
            return
        if self._told_idle_ns is not None and now - self._told_idle_ns < GAP_NS:
            self.voice.arm(("idle", 0), self._told_idle_ns + GAP_NS)
            return
        self._told_idle, self._told_idle_ns = True, now
        for member in self.voice.table.choose(self._rng, FANOUT, _could_give):
            self.voice.count("idleness_told")
            self.voice.surge(member, now)

    def hear(self, load: Load, now: int, *, teller: NodeRef) -> Member | None:
        """A load as it came with a packet of `teller`. The member that it is news of."""
        loads = self.voice.loads
        if load.worker_id == self.voice.me.worker_id:
            loads.outbid(load, now)
            return None
        row = self.voice.table.rows.get(load.worker_id)
        if row is None:
            return None
        could_take = _could_take(row, now)
        was_above = row.load is not None and row.load.stealable > self._above
        is_own_word = load.worker_id == teller.worker_id
        is_new = loads.hear(load, row, now, is_own_word=is_own_word)
        if is_new and load.stealable > self._above and not was_above:
            self.voice.tell("surge", row.record, load=load)
        if is_new and is_own_word and not could_take and _could_take(row, now):
            self._answer_idle(row, now)
        return row if is_new else None

    def _answer_idle(self, row: Member, now: int) -> None:
        """It says that it is idle now: it learns of our surplus, if it may have heard nothing of it."""
        own = self.voice.loads.own
        if own is not None and own.stealable > self._above:
            self.voice.count("surges_sent")
            self.voice.surge(row, now)

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


def _could_give(row: Member) -> bool:
    load = row.load
    return row.record.standing == Standing.ALIVE and load is not None and bool(load.flags & Flag.STEALS)
