"""What each node carries: a table in which the last word of its subject wins, and the freshest of it to pass
on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from fluxmesh.mesh.member import Member
from fluxmesh.mesh.messages import Flag, Load, NodeRef
from fluxmesh.mesh.timing import LOAD_STALE_MS, MS, READY_AFTER_NS

OTHERS_MAX: Final = 8  # told beside our own, if there is room
_KEPT: Final = 2 * OTHERS_MAX
COUNTER_MAX: Final = 1 << 62  # a thousand new loads a second do not reach it
# No node makes so many loads between two packets of its own: what claims more was not made by its subject.
LEAP_MAX: Final = 1 << 20
# Plain numbers, because this is done for each load, and members of an enumeration are many times as slow.
_READY: Final = int(Flag.READY)
_READY_OR_NOT: Final = int(Flag.READY | Flag.DRAINING | Flag.DEGRADED)
_STEALS: Final = int(Flag.STEALS)


def says_ready(load: Load) -> bool:
    """Says that it is, and neither that it drains nor that it stands still."""
    return load.flags & _READY_OR_NOT == _READY


def is_idle(load: Load) -> bool:
    """Known to have a free slot, nothing to fill it with, and a hand to take."""
    free = load.running < load.capacity and not load.queued
    return free and says_ready(load) and bool(load.flags & _STEALS)


def aged(load: Load, age_ms: int) -> Load:
    return Load(
        load.worker_id,
        load.epoch,
        load.counter,
        load.queued,
        load.running,
        load.capacity,
        load.stealable,
        load.best_tier,
        load.run_ms,
        load.flags,
        age_ms,
    )


def known_load(member: Member, now: int) -> Load | None:
    """The load of a member with its age as of now; None when it is too old to say anything."""
    load = member.load
    if load is None:
        return None
    age_ms = max(0, now - member.born_ns) // MS
    return aged(load, age_ms) if age_ms <= LOAD_STALE_MS else None


def is_eligible(member: Member, now: int) -> bool:
    """Whether a member has its place in the ring: it lives, has answered us itself in this run, and has said
    for a second that it is ready. A load that is old does not take the place away, a word does."""
    ready = member.ready_since_ns
    return member.is_living and member.answered and ready is not None and now - ready >= READY_AFTER_NS


@dataclass(slots=True)
class Loads:
    """The loads of others stand in their rows; this knows our own and which of the others are freshest."""

    me: NodeRef
    own: Load | None = None
    own_born_ns: int = 0
    counter: int = 0
    recent: list[tuple[int, int, Member]] = field(default_factory=list)  # (born, number), the oldest first

    def set_own(self, load: Load, now: int) -> None:
        self.counter += 1
        self.own = Load(
            self.me.worker_id,
            self.me.epoch,
            self.counter,
            load.queued,
            load.running,
            load.capacity,
            load.stealable,
            load.best_tier,
            load.run_ms,
            load.flags,
        )
        self.own_born_ns = now

    def renew(self, now: int) -> None:
        """What has not changed is still true, and only a new counter says so: were the age of an equal one
        believed, each hop would make it younger by the time it travelled."""
        if self.own is not None:
            self.set_own(self.own, now)

    def hear(self, load: Load, member: Member, now: int, *, is_own_word: bool = False) -> bool:
        """Adopt `load` if it is newer than what is held of this run, and tell whether it was. What its
        subject says itself (`is_own_word`) is held against its own words only, and replaces what others
        said of it: else one lie with a high counter would mute it for good."""
        if load.epoch != member.record.epoch or not member.is_living or load.counter > COUNTER_MAX:
            return False
        if not (_is_next_word(load, member) if is_own_word else _is_newer_hearsay(load, member)):
            return False
        born_ns = now - load.age_ms * MS
        member.load, member.born_ns = load, born_ns
        if not says_ready(load):
            member.ready_since_ns = None
        elif member.ready_since_ns is None:
            member.ready_since_ns = now
        self._keep(born_ns, member)
        return True

    def outbid(self, claim: Load, now: int) -> None:
        """Others pass on a load under our name that we have not made yet. Ours has to count more than it;
        unless it leaps so far that whoever heard us does not believe it anyway."""
        own = self.own
        if own is not None and claim.epoch == own.epoch and 0 < claim.counter - own.counter <= LEAP_MAX:
            self.counter = claim.counter
            self.set_own(own, now)

    def to_tell(self, peer: Member, now: int) -> list[Load]:
        """Our own first, then the freshest of the others, each with its age."""
        told = []
        if self.own is not None:
            told.append(aged(self.own, (now - self.own_born_ns) // MS))
            oldest = now - LOAD_STALE_MS * MS
            for born_ns, _, member in reversed(self.recent):
                if born_ns < oldest or len(told) > OTHERS_MAX:
                    break
                if member is not peer and member.load is not None and member.born_ns == born_ns:
                    told.append(aged(member.load, max(0, now - born_ns) // MS))
        return told

    def _keep(self, born_ns: int, member: Member) -> None:
        recent = self.recent
        for index, kept in enumerate(recent):
            if kept[2] is member:
                del recent[index]
                break
        index = len(recent)
        while index and recent[index - 1][0] > born_ns:
            index -= 1
        recent.insert(index, (born_ns, member.number, member))
        if len(recent) > _KEPT:
            del recent[0]


def _is_next_word(load: Load, member: Member) -> bool:
    """Whether the subject says something new. A packet that was overtaken says less than the last word, but
    not so much less that the last word must have been a forgery."""
    word, held = member.word, member.load
    if word is not None and word - LEAP_MAX <= load.counter <= word:
        return False
    member.word = load.counter
    # What hearsay brought already keeps the age it had there.
    return held is None or held.counter != load.counter or aged(held, 0) != aged(load, 0)


def _is_newer_hearsay(load: Load, member: Member) -> bool:
    word, held = member.word, member.load
    if word is not None and load.counter > word + LEAP_MAX:
        return False
    return held is None or load.counter > held.counter
