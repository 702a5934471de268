"""When news is told, and to whom: a few others each interval, for as long as there is some."""

from __future__ import annotations

import random

from fluxmesh.mesh.gossip import Circle
from fluxmesh.mesh.member import Member
from fluxmesh.mesh.membership import Membership
from fluxmesh.mesh.probe import Prober
from fluxmesh.mesh.voice import Voice


class Spreader:
    """The gossip timer: armed while there is news or somebody to greet."""

    def __init__(self, *, voice: Voice, membership: Membership, prober: Prober, rng: random.Random) -> None:
        self.voice = voice
        self.membership = membership
        self.prober = prober
        self._rng = rng
        self._circle = Circle(rng=rng)
        self._is_armed = False
        self._goes_on = False

    def on_timer(self, now: int, *, is_present: bool) -> None:
        """Greet those who have not answered us yet, and tell the news to a few others by chance."""
        self._is_armed = False
        self._goes_on = True
        fanout = self.voice.timing.gossip_fanout
        greeted = self.membership.to_greet(fanout) if is_present else []
        # All of one tick hear the same: in a small fleet that is everybody.
        queued = self.voice.queued()
        for member in greeted:
            self.prober.hello(member, now, queued=queued)
        for member in self._to_tell(fanout - len(greeted), greeted):
            if not len(self.voice.news):
                break
            self.voice.gossip(member, now, queued=queued)

    def _to_tell(self, count: int, greeted: list[Member]) -> list[Member]:
        """News is sent a bounded number of times: as few of them as can be to those who may be made up."""
        table = self.voice.table
        picked = self._circle.pick(table.met.rows, count, but=greeted)
        unmet = table.unmet.rows
        if len(picked) < count and unmet:
            picked += table.choose(
                self._rng, count - len(picked), lambda row: row not in greeted, among=unmet
            )
        return picked

    def settle(self, now: int, *, hears: bool, is_present: bool) -> None:
        """After each input. The first tick comes at a random place of its interval, so that a fleet does not
        speak in one voice."""
        if hears and not self._is_armed:
            self._arm(now, is_present=is_present)
        self._goes_on = False

    def _arm(self, now: int, *, is_present: bool) -> None:
        if not self.voice.table.living:
            if is_present:
                self.voice.news.clear()  # there is nobody to tell; whoever comes compares tables
            return
        if not (len(self.voice.news) or self.membership.ungreeted):
            return
        self._is_armed = True
        wait = self.voice.timing.gossip_ns
        if not self._goes_on:
            wait = int(self._rng.random() * wait)
        self.voice.arm(("gossip", 0), now + wait)
