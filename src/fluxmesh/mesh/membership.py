"""What is believed of whom: each claim that is heard, its consequences, and our own answer to claims about
us."""

from __future__ import annotations

import random
from typing import Final, Protocol

from fluxmesh.mesh.addresses import host_refusal
from fluxmesh.mesh.detector import Suspicion
from fluxmesh.mesh.member import INCARNATION_MAX, Member, is_answerable, outranks, softened, with_standing
from fluxmesh.mesh.messages import Address, NodeRef, Record, Standing
from fluxmesh.mesh.voice import CORRECTIONS_MAX, Voice

_OUTDATED_MAX: Final = 8  # rows that are owed to one teller
GREETINGS_MAX: Final = 3  # pings out of turn to a node that has not answered us yet
# Of all of them. In a large fleet that starts together everybody would greet everybody, many times as often
# as it probes; whoever is not greeted at once is met in time.
GREETINGS_AT_ONCE: Final = 32
GREETINGS_A_PERIOD: Final = 2


class Watcher(Protocol):
    """Who has to know of changes of the table."""

    def described(self, member: Member, now: int) -> None:
        """The particulars of a living node may have changed."""

    def returned(self, member: Member, now: int) -> None:
        """One that was dead here lives after all: the two of us may have been in different islands."""

    def gone(self, ref: NodeRef) -> None:
        """This run is dead, has left, or was replaced."""


class Membership:
    """The table, the suspicions, and the one place where a claim becomes belief."""

    def __init__(self, *, voice: Voice, rng: random.Random, watcher: Watcher) -> None:
        self.voice = voice
        self.table = voice.table
        self.is_fenced = False
        self.ungreeted: dict[int, Member] = {}
        self.credit = GREETINGS_AT_ONCE
        self._rng = rng
        self._watcher = watcher

    # --- claims of others -------------------------------------------------------------------------------

    def hear(self, claim: Record, now: int, *, teller: Member | None = None) -> None:
        """News that came with a packet."""
        if not is_answerable(claim) or host_refusal(claim.host):
            self.voice.count("claims_unusable")
        elif claim.worker_id == self.voice.me.worker_id:
            self._answer(claim, now, teller)
        else:
            self._weigh(claim, self.table.rows.get(claim.worker_id), now, teller)

    def hear_exchanged(self, claim: Record, now: int, *, teller: str) -> None:
        """A record that came by push-pull: as old as its holder's table. The dead of others are suspects
        here, and of nobody we never heard of do we learn that way that he is dead."""
        row = self.table.rows.get(claim.worker_id)
        if row is None and claim.standing >= Standing.DEAD and claim.worker_id != self.voice.me.worker_id:
            return
        self.hear(softened(claim, teller), now)

    def suspect(self, member: Member, now: int) -> None:
        """Our own probe of it found no answer."""
        record = member.record
        self._weigh(with_standing(record, Standing.SUSPECT, self.voice.me.worker_id), member, now)

    def _weigh(self, claim: Record, row: Member | None, now: int, teller: Member | None = None) -> None:
        held = row.record if row is not None else None
        if row is None or held is None or outranks(claim, held):
            self._adopt(claim, row, now)
        elif row.suspicion is not None and _is_same_accusation(claim, held):
            self._confirm(claim, row, now)
        elif teller is not None and outranks(held, claim) and not (row.is_living and _is_alive(claim)):
            # An outdated Alive of a living node does no harm. Who still accuses one that said no, or believes
            # in one that is gone, acts on it.
            self.owe(teller, row)

    def owe(self, teller: Member, row: Member) -> None:
        """Our record of `row` goes to `teller` with the next packet, if it was not told often enough."""
        outdated = teller.outdated or []
        is_due = row is not teller and row.corrected < CORRECTIONS_MAX
        if is_due and row not in outdated and len(outdated) < _OUTDATED_MAX:
            teller.outdated = [*outdated, row]

    def _confirm(self, claim: Record, row: Member, now: int) -> None:
        """Another accuser of a suspect: the wait gets shorter, and others shall know, too."""
        suspicion = row.suspicion
        if suspicion is None or claim.accuser == claim.worker_id:
            return
        if suspicion.confirm(claim.accuser, timing=self.voice.timing):
            self.voice.news.put(claim)
            # That may have been over for a while; a timer is for what is to come.
            deadline = max(now, suspicion.deadline_ns(self.voice.timing))
            self.voice.arm(("suspicion", row.number), deadline)

    def _adopt(self, claim: Record, row: Member | None, now: int) -> None:
        before = row.record if row is not None else None
        member = self.table.put(claim, now)
        if member is None:
            self.voice.count("table_full")
            return
        if member.suspicion is not None:
            member.suspicion = None
            self.voice.disarm(("suspicion", member.number))
        self.voice.news.put(claim)
        self._tell_change(before, member)
        if before is not None and (claim.standing >= Standing.DEAD or before.epoch != claim.epoch):
            self._watcher.gone(before.ref)
        if claim.standing >= Standing.DEAD:
            self.ungreeted.pop(member.number, None)
            return
        if claim.standing == Standing.SUSPECT:
            self._start_suspicion(member, now)
        is_new_run = before is None or before.epoch != claim.epoch
        was_gone = before is not None and before.standing >= Standing.DEAD
        if not member.answered:
            self.greet_later(member)
        if was_gone and not is_new_run:
            self._watcher.returned(member, now)
        if member.told_hash != claim.meta_hash:
            self._watcher.described(member, now)

    def _tell_change(self, before: Record | None, member: Member) -> None:
        record, tell = member.record, self.voice.tell
        held = None if before is None else before.standing
        standing = record.standing
        if standing == held == Standing.ALIVE and before is not None and before.epoch == record.epoch:
            return
        if standing <= Standing.SUSPECT and before is None:
            tell("discovered", record)
        elif standing <= Standing.SUSPECT and before is not None and before.epoch != record.epoch:
            tell("restarted", record, text=f"run {before.epoch} was replaced")
        elif standing == Standing.ALIVE or (
            standing == Standing.SUSPECT and held is not None and held >= Standing.DEAD
        ):
            # The dead one as well that others suspect by now under a higher incarnation: its place is back.
            tell("refuted", record)
        if standing == Standing.SUSPECT:
            tell("suspected", record, text=f"accused by {record.accuser}")
        elif standing == Standing.LEFT and held is not None and held != Standing.LEFT:
            tell("left", record)
        elif standing == Standing.DEAD and held is not None and held <= Standing.SUSPECT:
            tell("dead", record, text=f"declared by {record.accuser}")

    # --- suspicions -------------------------------------------------------------------------------------

    def _start_suspicion(self, member: Member, now: int) -> None:
        accuser = member.record.accuser
        member.suspicion = Suspicion(
            now, self.table.population, [accuser], self._could_confirm(member, accuser)
        )
        deadline = member.suspicion.deadline_ns(self.voice.timing)
        self.voice.arm(("suspicion", member.number), deadline)

    def _could_confirm(self, member: Member, accuser: str) -> int:
        """How many could confirm a suspicion, with the suspect and us. The wait for news to spread grows with
        the logarithm of all who are listed: too long by little if most are made up, and never too short. But
        a confirmation is to be hoped for only from those who have answered us. And one that has answered
        neither any of our greetings nor our probe is not waited for longer than the news need."""
        if not member.answered and accuser == self.voice.me.worker_id:
            return 2
        return len(self.table.met.rows) - member.answered + 2

    def on_suspicion_timer(self, number: int, now: int) -> None:
        member = self.table.numbers.get(number)
        if member is None or member.suspicion is None:
            return
        deadline = member.suspicion.deadline_ns(self.voice.timing)
        if now < deadline:
            self.voice.arm(("suspicion", number), deadline)
            return
        dead = with_standing(member.record, Standing.DEAD, self.voice.me.worker_id)
        self._adopt(dead, member, now)
        # If it lives and only we do not hear it, it shall say so while others still do.
        self.voice.correct(member.address, member, now)

    def push_out(self, late_ns: int, now: int) -> None:
        """We stood still: everybody we suspect gets that time back."""
        for member in self.table.living:
            if member.suspicion is not None:
                member.suspicion.push_out(late_ns)
                deadline = max(now, member.suspicion.deadline_ns(self.voice.timing))
                self.voice.arm(("suspicion", member.number), deadline)

    def end_suspicions(self) -> None:
        for member in self.table.living:
            if member.suspicion is not None:
                member.suspicion = None
                self.voice.disarm(("suspicion", member.number))

    # --- greetings --------------------------------------------------------------------------------------

    def on_period(self) -> None:
        self.credit = min(self.credit + GREETINGS_A_PERIOD, GREETINGS_AT_ONCE)

    def greet_later(self, member: Member) -> None:
        if member.greetings < GREETINGS_MAX:
            self.ungreeted[member.number] = member

    def to_greet(self, count: int) -> list[Member]:
        """Some to be pinged out of turn, by chance: were it the oldest first, a fleet that starts together
        would tell all its news to the same few. Whoever was greeted often enough is left to the probes."""
        count = min(count, self.credit)
        waiting = list(self.ungreeted.values()) if count else []
        self.credit -= min(count, len(waiting))
        picked = waiting if len(waiting) <= count else self._rng.sample(waiting, count)
        for member in picked:
            member.greetings += 1
            if member.greetings >= GREETINGS_MAX:
                del self.ungreeted[member.number]
        return picked

    def answered(self, member: Member) -> None:
        """It has answered us itself."""
        self.table.answered(member)
        self.ungreeted.pop(member.number, None)
        if not self.ungreeted:
            self.ungreeted.clear()  # gives back the room that a whole fleet of newcomers took

    # --- ourselves --------------------------------------------------------------------------------------

    def _answer(self, claim: Record, now: int, teller: Member | None) -> None:
        """A claim about us. Only we raise our incarnation, and only above a claim that would win."""
        own = self.voice.record
        if claim.epoch > own.epoch:
            self.fence(claim)
        elif not outranks(claim, own):
            if claim.epoch != own.epoch or claim.incarnation != own.incarnation or claim.standing:
                self.voice.count("claims_about_us_outdated")
                _owe(teller)
        else:
            self._raise_above(claim.incarnation)
            _owe(teller)
            if claim.standing != Standing.ALIVE:
                # Whoever was slow to answer is slow to hear as well.
                self.voice.health.blame(1)
                word = Standing(claim.standing).name.lower()
                self.voice.tell("accused", claim, text=f"called {word} by {claim.accuser or 'itself'}")

    def meet_own_id(self, sender: NodeRef, incarnation: int, src: Address) -> None:
        """Somebody speaks under our id: ourselves by an echo, an older run, or the one that replaced us."""
        self.voice.count("met_our_own_id")
        if sender.epoch > self.voice.me.epoch:
            alive = int(Standing.ALIVE)
            self.fence(Record(sender.worker_id, sender.epoch, incarnation, alive, src.host, src.port, 0))

    def fence(self, claim: Record) -> None:
        if not self.is_fenced:
            self.is_fenced = True
            self.voice.tell("fenced", claim, text=f"run {claim.epoch} of this id is there")

    def _raise_above(self, incarnation: int) -> None:
        self._announce_at(incarnation + 1, self.voice.record.meta_hash)

    def describe(self, meta_hash: int) -> None:
        """Our particulars have changed."""
        own = self.voice.record
        if own.meta_hash != meta_hash:
            self._announce_at(own.incarnation + 1, meta_hash)

    def _announce_at(self, incarnation: int, meta_hash: int) -> None:
        own = self.voice.record
        at = min(incarnation, INCARNATION_MAX)  # beyond it nobody would listen
        self.announce(Record(own.worker_id, own.epoch, at, own.standing, own.host, own.port, meta_hash))

    def announce(self, record: Record) -> None:
        """From now on we say this of ourselves."""
        self.voice.record = record
        self.voice.news.put(record)


def _is_same_accusation(claim: Record, held: Record) -> bool:
    """Whether both suspect the same incarnation, so that only the accuser can be new."""
    return (
        claim.standing == held.standing == Standing.SUSPECT
        and claim.epoch == held.epoch
        and claim.incarnation == held.incarnation
    )


def _is_alive(claim: Record) -> bool:
    return claim.standing == Standing.ALIVE


def _owe(teller: Member | None) -> None:
    if teller is not None:
        teller.owed = True
