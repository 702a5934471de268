"""Whom an idle worker asks for work, when, and for how much.

A thief has a wish (`Seek`) that stands until the next one. While it does, and nothing is under way, one peer
is asked at a time: at once when somebody's surplus becomes known, else every 100 ms. Of two peers, drawn by
chance in proportion to what they are said to have, the larger one is asked: always the largest would draw
everybody to it by loads that are old by then. What is offered goes to storage (`Take`), which alone decides;
what storage gave (`Took`) is told to the victim, so that its counts are as exact as ours.

Everything that is remembered of a peer is of one run, bounded, and gone with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from fluxmesh.mesh.donating import Donor
from fluxmesh.mesh.effects import Take
from fluxmesh.mesh.loads import is_eligible, says_ready
from fluxmesh.mesh.member import Member
from fluxmesh.mesh.messages import (
    OFFERED_MAX,
    TASKS_MAX,
    Flag,
    Frame,
    NodeRef,
    Noted,
    Nothing,
    Offer,
    Offered,
    Standing,
    Steal,
    Taken,
)
from fluxmesh.mesh.particulars import Particulars
from fluxmesh.mesh.timing import LOAD_STALE_MS, MS, S
from fluxmesh.mesh.voice import Pending, Voice

TICK_NS: Final = 100 * MS
CONNECT_NS: Final = 500 * MS
REPLY_NS: Final = 2 * S  # or four round trips, if those take longer
PAUSE_FIRST_NS: Final = 50 * MS
PAUSE_MOST_NS: Final = 2 * S
SHUT_MOST_NS: Final = 10 * S  # that a peer may ask to be left alone for
DEBIT_NS: Final = S  # a hint that was reduced here stands as it was told after that (Ray's issue 12711)
GAVE_NS: Final = S  # a peer that was given some of our jobs is not asked for so long
TAKE_NS: Final = 10 * S  # for a Take whose shell never says what became of it
TOLD_TRIES: Final = 3  # of a Taken
TOLD_AGAIN_NS: Final = 200 * MS
TOLD_MAX: Final = 16  # on their way
PEERS_MAX: Final = 256  # of whom something is remembered
HINTS_MAX: Final = 1_024  # peers with a known surplus

_STEALS: Final = int(Flag.STEALS)
_UNABLE: Final = int(Flag.DRAINING | Flag.DEGRADED)


@dataclass(slots=True)
class Peer:
    """What this node made of its own dealings with one run of another."""

    debit: int = 0  # taken off what the load with this number says
    debit_of: int = -1
    debit_until_ns: int = 0
    fruitless: int = 0  # requests in a row
    pause_until_ns: int = 0  # for that reason; its own fresh word ends it
    heard_until_ns: int = 0  # but not before that: one that lies all the time would keep storage busy
    shut_until_ns: int = 0  # as it said itself


@dataclass(slots=True)
class Asking:
    """The request under way, or what it has brought and storage is to transfer."""

    ref: NodeRef
    want: int
    call: int  # 0: answered
    jobs: tuple[Offered, ...] = ()


@dataclass(slots=True)
class Telling:
    """A Taken until it is noted."""

    pending: Pending
    jobs: tuple[Offered, ...]
    timeout_ns: int
    tries: int = 0
    due_ns: int = 0
    is_open: bool = False


class Thief:
    """`above`: who has no more than so many is not asked; `tasks`: hashes of the names of ours."""

    def __init__(
        self,
        *,
        voice: Voice,
        particulars: Particulars,
        donor: Donor,
        rng: random.Random,
        tasks: tuple[int, ...],
        steals: bool,
        above: int,
        batch: int,
    ) -> None:
        self.voice = voice
        self.is_present = False
        self._particulars = particulars
        self._donor = donor
        self._rng = rng
        self._tasks = tasks if len(tasks) <= TASKS_MAX else ()
        self._steals = steals
        self._above = above
        self._batch = min(batch, OFFERED_MAX)
        self._wish = 0
        self._busy: Asking | None = None
        self._is_armed = False
        self._hints: dict[int, Member] = {}
        self._peers: dict[NodeRef, Peer] = {}
        self._tellings: dict[int, Telling] = {}
        self._next_telling = 1

    # --- the wish -----------------------------------------------------------------------------------------

    @property
    def wish(self) -> int:
        """So many jobs are wanted now: none by one who drains, stands still or does not steal."""
        own = self.voice.loads.own
        if not (self._steals and self.is_present) or own is None:
            return 0
        return self._wish if own.flags & _STEALS and not own.flags & _UNABLE else 0

    @property
    def is_busy(self) -> bool:
        return self._busy is not None

    @property
    def remembered(self) -> int:
        return len(self._peers)

    def seek(self, want: int) -> None:
        self._wish = max(0, want)

    def hint(self, member: Member, now: int, *, is_own_word: bool) -> bool:
        """A new load of this member; whether it is one to look at."""
        load = member.load
        if load is None or load.stealable <= self._above:
            self._hints.pop(member.number, None)
            return False
        if member.number not in self._hints and len(self._hints) >= HINTS_MAX:
            del self._hints[next(iter(self._hints))]
        self._hints[member.number] = member
        peer = self._peers.get(member.ref) if is_own_word else None
        if peer is not None and now >= peer.heard_until_ns:
            peer.fruitless = peer.pause_until_ns = 0
            peer.heard_until_ns = now + PAUSE_FIRST_NS
        return True

    def forget(self, ref: NodeRef) -> None:
        """This run is gone. An answer of it that is still to come meets nobody."""
        self._peers.pop(ref, None)
        if self._busy is not None and self._busy.ref == ref and self._busy.call:
            self._busy = None
            self.voice.count("steals_failed")

    def leave(self) -> None:
        self.is_present = False
        self._disarm()

    def on_timer(self, now: int) -> None:
        self._is_armed = False
        self.look(now)

    def look(self, now: int) -> None:
        """Ask somebody, if there is a wish, nothing under way, and one worth it."""
        if self._busy is None and self._hints and self.wish:
            self._ask_one(now)
        if self._busy is None and self._hints and self.wish:
            if not self._is_armed:
                self._is_armed = True
                self.voice.arm(("steal", 0), now + int(TICK_NS * (0.75 + 0.5 * self._rng.random())))
        else:
            self._disarm()  # where nobody has a surplus there is nothing to look for until a hint comes

    def _disarm(self) -> None:
        if self._is_armed:
            self._is_armed = False
            self.voice.disarm(("steal", 0))

    # --- the choice ---------------------------------------------------------------------------------------

    def _ask_one(self, now: int) -> None:
        found = self._candidates(now)
        if not found:
            return
        member, surplus = self._choose(found)
        want = min(self.wish, self._batch, max(1, surplus // 2))
        meta = self._particulars.own
        patience_ns = max(REPLY_NS, 4 * (member.rtt_ns or 0))
        pending = Pending("steal", member.address, ref=member.ref, number=want)
        body = Steal(want, meta.queues, meta.tiers, self._tasks)
        call = self.voice.call(body, pending, CONNECT_NS + patience_ns)
        if call is None:
            return
        self._busy = Asking(member.ref, want, call)
        self._debit(member, want, now)
        self.voice.count("steals_initiated")

    def _candidates(self, now: int) -> list[tuple[Member, int]]:
        """Who may be asked, with the surplus that it is believed to have."""
        found = []
        oldest_ns = now - LOAD_STALE_MS * MS
        queues = set(self._particulars.own.queues)
        for number, member in list(self._hints.items()):
            load = member.load
            if load is None or member.born_ns < oldest_ns or not member.is_living:
                del self._hints[number]
                continue
            if member.record.standing != Standing.ALIVE or not is_eligible(member, now):
                continue
            if not (load.flags & _STEALS and says_ready(load)):
                continue
            meta = self._particulars.of(member.record)
            if meta is not None and queues.isdisjoint(meta.queues):
                continue
            surplus = self._surplus(member, now)
            if surplus > self._above and not self._donor.took_lately(member.ref, now, GAVE_NS):
                found.append((member, surplus))
        return found

    def _surplus(self, member: Member, now: int) -> int:
        """As told, less what we ourselves have asked for since; 0 of one that is to be left alone."""
        load, peer = member.load, self._peers.get(member.ref)
        if load is None:
            return 0
        if peer is None:
            return load.stealable
        if now < peer.pause_until_ns or now < peer.shut_until_ns:
            return 0
        is_debited = peer.debit_of == load.counter and now < peer.debit_until_ns
        return load.stealable - peer.debit if is_debited else load.stealable

    def _choose(self, found: list[tuple[Member, int]]) -> tuple[Member, int]:
        first = self._draw(found)
        if len(found) == 1:
            return first
        second = self._draw([one for one in found if one is not first])
        return second if second[1] > first[1] else first

    def _draw(self, found: list[tuple[Member, int]]) -> tuple[Member, int]:
        at = self._rng.randrange(sum(surplus for _, surplus in found))
        for one in found:
            at -= one[1]
            if at < 0:
                return one
        return found[-1]

    def _debit(self, member: Member, amount: int, now: int) -> None:
        load, peer = member.load, self._peer(member.ref)
        if load is not None:
            peer.debit, peer.debit_of, peer.debit_until_ns = amount, load.counter, now + DEBIT_NS

    def _peer(self, ref: NodeRef) -> Peer:
        peer = self._peers.pop(ref, None) or Peer()
        self._peers[ref] = peer
        if len(self._peers) > PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        return peer

    # --- the answer ---------------------------------------------------------------------------------------

    def on_answer(self, call: int, body: Frame | None, sender: NodeRef | None, now: int) -> None:
        busy = self._busy
        if busy is None or busy.call != call:
            self.voice.count("steals_late")
            return
        self._busy = None
        if body is None or sender != busy.ref:
            self._failed(busy.ref, now, "" if body is None else "another run")
        elif isinstance(body, Offer):
            self._offered(busy, body, now)
        elif isinstance(body, Nothing):
            self._nothing(busy.ref, body, now)
        else:
            self._failed(busy.ref, now, "no offer")
        self.look(now)

    def _offered(self, busy: Asking, offer: Offer, now: int) -> None:
        jobs = offer.jobs
        if len(jobs) > busy.want or len({job.id for job in jobs}) < len(jobs):
            self._failed(busy.ref, now, "not as asked")
            return
        self._is_left(busy.ref, offer.surplus, now)
        if not jobs:
            self.voice.count("steals_empty")
            self._fruitless(busy.ref, now)
            return
        jobs = jobs[: self.wish]  # it may have become less, or none: whoever drains takes nothing
        if not jobs:
            self.voice.count("steals_dropped")
            return
        self._busy = Asking(busy.ref, busy.want, 0, jobs)
        self.voice.arm(("take", 0), now + TAKE_NS)
        self.voice.put(Take(busy.ref, jobs))

    def _nothing(self, ref: NodeRef, body: Nothing, now: int) -> None:
        self.voice.count("steals_empty")
        self._fruitless(ref, now)
        self._peer(ref).shut_until_ns = now + min(body.retry_ms * MS, SHUT_MOST_NS)
        self._is_left(ref, body.surplus, now)

    def _is_left(self, ref: NodeRef, surplus: int, now: int) -> None:
        """What it says now counts until its next load."""
        member = self.voice.table.find(ref)
        if member is not None and member.load is not None:
            self._debit(member, member.load.stealable - surplus, now)

    def _fruitless(self, ref: NodeRef, now: int) -> None:
        """It had nothing, or another was faster."""
        peer = self._peer(ref)
        longest_ns = min(PAUSE_FIRST_NS << min(peer.fruitless, 16), PAUSE_MOST_NS)
        peer.fruitless += 1
        peer.pause_until_ns = now + int(longest_ns * (0.5 + 0.5 * self._rng.random()))

    def _failed(self, ref: NodeRef, now: int, why: str) -> None:
        """Nobody is there, or not who should be. That is tried again when it says something, or the longest
        pause is over: one that died without a word costs one connection."""
        self.voice.count("steals_failed")
        if why:
            self.voice.count("steals_wrong")
        peer = self._peer(ref)
        peer.fruitless += 1
        peer.pause_until_ns = now + int(PAUSE_MOST_NS * (0.75 + 0.25 * self._rng.random()))

    # --- what storage gave --------------------------------------------------------------------------------

    def on_take_timer(self, now: int) -> None:
        """The shell never said. What it may have got it has; we go on."""
        if self._busy is not None and self._busy.jobs:
            self._busy = None
            self.voice.count("steals_failed")
            self.voice.count("steals_unresolved")
        self.look(now)

    def took(self, ref: NodeRef, jobs: tuple[Offered, ...], got: tuple[Offered, ...], now: int) -> None:
        if self._busy is not None and (self._busy.ref, self._busy.jobs) == (ref, jobs):
            self._busy = None
            self.voice.disarm(("take", 0))
        got = tuple(job for job in got if job in jobs)
        if got:
            self.voice.count("steals_succeeded")
            self.voice.count("jobs_stolen_in", len(got))
            self._wish = max(0, self._wish - len(got))
            self._peer(ref).fruitless = 0
            member = self.voice.table.rows.get(ref.worker_id)
            self.voice.tell("stole", None if member is None else member.record, jobs=len(got))
            self._tell(ref, got, now)
        else:
            self.voice.count("steals_lost")
            self._fruitless(ref, now)
        self.look(now)

    def _tell(self, ref: NodeRef, jobs: tuple[Offered, ...], now: int) -> None:
        member = self.voice.table.rows.get(ref.worker_id)
        if member is None or member.ref != ref:
            self.voice.count("taken_untold")  # another run: it holds nothing of that any more
            return
        if len(self._tellings) >= TOLD_MAX:
            self.voice.count("taken_untold")
            return
        number = self._next_telling
        self._next_telling += 1
        pending = Pending("taken", member.address, ref=ref, number=number)
        patience_ns = max(REPLY_NS, 4 * (member.rtt_ns or 0))
        self._tellings[number] = Telling(pending, jobs, CONNECT_NS + patience_ns)
        self._send(number, now)

    def _send(self, number: int, now: int) -> None:
        telling = self._tellings[number]
        telling.tries += 1
        telling.is_open = (
            self.voice.call(Taken(telling.jobs), telling.pending, telling.timeout_ns) is not None
        )
        if not telling.is_open:
            self._again(number, now)

    def _again(self, number: int, now: int) -> None:
        telling = self._tellings[number]
        telling.is_open = False
        if telling.tries >= TOLD_TRIES:
            del self._tellings[number]
            self.voice.count("taken_untold")
            return
        telling.due_ns = now + TOLD_AGAIN_NS
        self.voice.arm(("taken", number), telling.due_ns)

    def on_told_timer(self, number: int, now: int) -> None:
        telling = self._tellings.get(number)
        if telling is not None and not telling.is_open:
            self._send(number, now)

    def on_noted(self, pending: Pending, body: Frame | None, sender: NodeRef | None, now: int) -> None:
        telling = self._tellings.get(pending.number)
        if telling is None:
            return
        if isinstance(body, Noted) and sender == pending.ref:
            del self._tellings[pending.number]
        elif sender is not None and sender != pending.ref:
            del self._tellings[pending.number]
            self.voice.count("taken_untold")
        else:
            self._again(pending.number, now)
