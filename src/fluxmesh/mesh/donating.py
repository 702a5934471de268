"""What a thief is answered: whether anything, how much of what is held, and what it says it has taken.

Nothing is marked by an offer. What is remembered of it is bounded, and kept for two reasons: what nobody was
offered nobody can have taken, and two thieves that ask in the same instant shall not both be sent for the
same jobs, of which one would find nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from fluxmesh.mesh.messages import OFFERED_MAX, Flag, Frame, NodeRef, Noted, Nothing, Offer, Offered, Steal
from fluxmesh.mesh.shelf import Shelf
from fluxmesh.mesh.timing import MS, S
from fluxmesh.mesh.voice import Voice

THIEVES_MAX: Final = 1_024  # of whom rates are remembered
OFFERS_MAX: Final = 8_192  # jobs of which it is remembered who was offered them
OFFER_KEPT_NS: Final = 60 * S
OFFER_ALONE_NS: Final = 100 * MS  # a transfer takes a few milliseconds; so long a job is one thief's to try
RETRY_TRIED_MS: Final = 50  # where all there is was offered to others a moment ago
RETRY_SHUT_MS: Final = 1_000

_UNABLE: Final = ((Flag.DRAINING, "drains"), (Flag.DEGRADED, "stands still"))


@dataclass(slots=True)
class Allowance:
    """Requests that a thief may still make, as of an instant: one second's worth at the most."""

    left: float
    at_ns: int


class Rates:
    """`per_s` requests of each thief, in bursts of as many; 0: any number. Bounded: who is not remembered has
    its whole allowance."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._burst = max(1.0, per_s)
        self._of: OrderedDict[str, Allowance] = OrderedDict()

    def wait_ms(self, worker_id: str, now: int) -> int:
        """0: this request is within the rate, and counted. Else when to come again."""
        if not self._per_s:
            return 0
        known = self._of.pop(worker_id, None) or Allowance(self._burst, now)
        known.left = min(self._burst, known.left + (now - known.at_ns) / S * self._per_s)
        known.at_ns = now
        self._of[worker_id] = known
        if len(self._of) > THIEVES_MAX:
            self._of.popitem(last=False)
        if known.left < 1.0:
            return int((1.0 - known.left) / self._per_s * 1_000) + 1
        known.left -= 1.0
        return 0


@dataclass(slots=True)
class Offers:
    """What one thief was offered, and when last."""

    at_ns: int
    jobs: dict[Offered, int] = field(default_factory=dict)  # -> when


class Donor:
    """The victim's side. `steals`: takes part; `batch`: most jobs of one offer."""

    def __init__(self, *, voice: Voice, shelf: Shelf, steals: bool, batch: int, rate_per_s: float) -> None:
        self.voice = voice
        self._shelf = shelf
        self._steals = steals
        self._batch = min(batch, OFFERED_MAX)
        self._rates = Rates(rate_per_s)
        self._offers: OrderedDict[NodeRef, Offers] = OrderedDict()
        self._offered = 0  # jobs in all of them
        self._alone: OrderedDict[Offered, tuple[int, NodeRef]] = OrderedDict()

    @property
    def remembered(self) -> int:
        """Jobs of which it is known who was offered them."""
        return self._offered

    # --- a request ----------------------------------------------------------------------------------------

    def answer(self, wish: Steal, thief: NodeRef, now: int, *, is_present: bool) -> Frame:
        self.voice.count("steal_requests")
        member = self.voice.table.find(thief)
        if member is None or not member.is_living:
            return self._refuse("unknown", RETRY_SHUT_MS)
        if not self._steals:
            return self._refuse("does not steal", RETRY_SHUT_MS)
        if not is_present:
            return self._refuse("leaves", RETRY_SHUT_MS)
        own = self.voice.loads.own
        flags = 0 if own is None else own.flags
        for flag, reason in _UNABLE:
            if flags & flag:
                return self._refuse(reason, RETRY_SHUT_MS)
        if not flags & Flag.STEALS:
            return self._refuse("does not steal", RETRY_SHUT_MS)
        if wait_ms := self._rates.wait_ms(thief.worker_id, now):
            return self._refuse("rate", wait_ms)
        return self._offer(wish, thief, now)

    def _refuse(self, reason: str, retry_ms: int, surplus: int = 0) -> Nothing:
        self.voice.count("steals_refused")
        self.voice.count(f"steals_refused_{reason}")
        return Nothing(reason, retry_ms, surplus)

    def _offer(self, wish: Steal, thief: NodeRef, now: int) -> Frame:
        """At most what is asked for, a batch, and half of what is there."""
        self._forget_old(now)
        most = min(wish.want, self._batch)
        found = self._shelf.offer(wish, min(most + len(self._alone), OFFERED_MAX), thief)
        # Nor is the same thief offered them again: its next request may overtake its word of what it took.
        fresh = [job for job in found.jobs if job not in self._alone]
        there = len(fresh) + found.surplus
        jobs = tuple(fresh[: min(most, max(1, there // 2))])
        surplus = there - len(jobs)
        if not jobs:
            is_tried = len(fresh) < len(found.jobs)
            return self._refuse("nothing", RETRY_TRIED_MS if is_tried else 0, surplus)
        self._remember(jobs, thief, now)
        self.voice.count("jobs_offered", len(jobs))
        return Offer(jobs, surplus)

    def took_lately(self, thief: NodeRef, now: int, within_ns: int) -> bool:
        """Whether it was offered jobs in that time: who has just been given some is not asked for some."""
        known = self._offers.get(thief)
        return known is not None and now - known.at_ns < within_ns

    # --- what became of it --------------------------------------------------------------------------------

    def taken(self, jobs: tuple[Offered, ...], thief: NodeRef, now: int) -> Noted:
        known = self._offers.get(thief)
        asked = () if known is None else tuple(job for job in jobs if job in known.jobs)
        if len(asked) < len(jobs):
            self.voice.count("taken_unasked", len(jobs) - len(asked))  # or told twice: then it was counted
        if known is not None and asked:
            for job in asked:
                del known.jobs[job]
                self._alone.pop(job, None)
            self._offered -= len(asked)
            count = self._shelf.taken(asked, thief)
            self.voice.count("jobs_stolen_out", count)
            if count:
                member = self.voice.table.rows.get(thief.worker_id)
                self.voice.tell("gave", None if member is None else member.record, jobs=count)
        return Noted()

    # --- what is remembered -------------------------------------------------------------------------------

    def forget(self, thief: NodeRef) -> None:
        """It is gone, or another run has its place. What it took it may still tell of: that is kept for its
        time."""
        for job in [job for job, (_, whose) in self._alone.items() if whose == thief]:
            del self._alone[job]

    def _remember(self, jobs: tuple[Offered, ...], thief: NodeRef, now: int) -> None:
        known = self._offers.pop(thief, None) or Offers(now)
        self._offers[thief] = known  # the last one offered to stands at the end
        known.at_ns = now
        for job in jobs:
            self._offered += job not in known.jobs
            known.jobs[job] = now
            self._alone.pop(job, None)
            self._alone[job] = (now, thief)
        while self._offered > OFFERS_MAX and len(self._offers) > 1:
            self._drop_first()
        while self._offered > OFFERS_MAX:  # all of one thief: its oldest
            del known.jobs[next(iter(known.jobs))]
            self._offered -= 1

    def _forget_old(self, now: int) -> None:
        while self._alone:
            at_ns, _ = next(iter(self._alone.values()))
            if now - at_ns < OFFER_ALONE_NS:
                break
            self._alone.popitem(last=False)
        while self._offers:
            first = next(iter(self._offers.values()))
            if now - first.at_ns < OFFER_KEPT_NS:
                break
            self._drop_first()

    def _drop_first(self) -> None:
        _, dropped = self._offers.popitem(last=False)
        self._offered -= len(dropped.jobs)
