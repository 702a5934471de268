"""Who there is: the rule by which claims are ordered, and the table of rows that it keeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fluxmesh.mesh.detector import Suspicion
from fluxmesh.mesh.messages import Address, Load, NodeRef, Record, Standing
from fluxmesh.mesh.timing import MEMBERS_MAX, TOMBSTONE_NS

TOMBSTONES_MAX: Final = (
    4_096  # the oldest goes first; a fleet that restarts under new ids must not fill memory
)
# The highest that a subject may say of itself. What others say of it has to stay below: whoever is accused
# raises its incarnation by one, and nobody would believe an answer beyond the bound.
INCARNATION_MAX: Final = 1 << 62


def outranks(claim: Record, held: Record | None) -> bool:
    """The whole order of claims about one node: (epoch, incarnation, Alive < Suspect < Dead < Left); the
    higher wins, an equal one changes nothing. Who accuses is no part of it."""
    if held is None:
        return True
    return (claim.epoch, claim.incarnation, claim.standing) > (held.epoch, held.incarnation, held.standing)


def is_answerable(claim: Record) -> bool:
    """Whether its subject could outbid it. Alive at the bound may be an answer, and accuses nobody."""
    return claim.incarnation < INCARNATION_MAX or (
        claim.incarnation == INCARNATION_MAX and claim.standing == Standing.ALIVE
    )


def merge(held: Record | None, claim: Record) -> Record:
    """What is believed after a claim was heard: commutative, associative, idempotent in (epoch, incarnation,
    standing)."""
    return claim if held is None or outranks(claim, held) else held


def softened(claim: Record, teller: str) -> Record:
    """A Dead that comes by push-pull may be hours old, so its subject gets the time of a suspicion to say
    otherwise."""
    if claim.standing != Standing.DEAD:
        return claim
    return with_standing(claim, Standing.SUSPECT, claim.accuser or teller)


def with_standing(record: Record, standing: Standing, accuser: str) -> Record:
    """The same incarnation, seen otherwise."""
    return Record(
        record.worker_id,
        record.epoch,
        record.incarnation,
        int(standing),
        record.host,
        record.port,
        record.meta_hash,
        accuser,
    )


@dataclass(slots=True, eq=False)
class Member:
    """One row: what is believed of another node and what we know of it first-hand in its present run."""

    number: int  # names its timers
    record: Record
    since_ns: int
    ref: NodeRef
    address: Address
    answered: bool = False
    greetings: int = 0
    rtt_ns: int | None = None
    position: int = -1  # among the living, else -1
    owed: bool = False  # it holds something old of us: our own record goes with the next packet
    outdated: list[Member] | None = None  # rows of which it told something old: they go with the next packet
    corrected: int = 0  # how often this record was told for that reason
    behind: bool = False  # it speaks of a newer incarnation than we hold: tell it what we hold
    detour_ns: int | None = None  # when it was last told that it answers only round a corner
    notice_ns: int | None = None  # when it was last told something unasked
    suspicion: Suspicion | None = None
    load: Load | None = None
    word: int | None = None  # the counter of the load that its own latest packet brought
    born_ns: int = 0  # when that load was true
    ready_since_ns: int | None = None
    told_hash: int | None = None  # the particulars that were last told of
    dialled_ns: int = 0  # when it was last looked for while dead

    @property
    def is_living(self) -> bool:
        return self.record.standing <= Standing.SUSPECT

    def take(self, record: Record, now: int) -> None:
        """Adopt a record that outranks. Another run starts with nothing known first-hand."""
        if record.epoch != self.record.epoch:
            self.answered = self.owed = self.behind = False
            self.greetings = 0
            self.rtt_ns = self.load = self.word = self.ready_since_ns = self.told_hash = None
            self.detour_ns = self.outdated = None
        if record.standing != self.record.standing or record.epoch != self.record.epoch:
            self.since_ns = now
        if record.standing >= Standing.DEAD:
            self.load = self.ready_since_ns = None
        if record.host != self.record.host or record.port != self.record.port:
            self.address = record.address
        if record.epoch != self.record.epoch:
            self.ref = record.ref
        self.record = record
        self.corrected = 0


@dataclass(slots=True)
class Roll:
    """Members of whom each has its turn once before anybody has a second, by chance; a newcomer has it in
    what is left of the round. Every step costs the same however many they are; who is gone takes no room."""

    rows: list[Member] = field(default_factory=list)  # the first `due` have not had their turn
    due: int = 0
    _places: dict[int, int] = field(default_factory=dict)

    def add(self, member: Member) -> None:
        place = len(self.rows)
        self.rows.append(member)
        self._places[member.number] = place
        self._swap(place, self.due)
        self.due += 1

    def remove(self, member: Member) -> None:
        place = self._places.get(member.number)
        if place is None:
            return
        if place < self.due:
            self.due -= 1
            self._swap(place, self.due)
            place = self.due
        self._swap(place, len(self.rows) - 1)
        self.rows.pop()
        del self._places[member.number]
        if not self.rows:
            self._places.clear()  # an emptied dict keeps the room of its best days, a cleared one does not

    def pick(self, rng: random.Random) -> Member | None:
        """Whose turn it is; None when nobody is there."""
        if not self.rows:
            return None
        self.due = self.due or len(self.rows)
        self._swap(rng.randrange(self.due), self.due - 1)
        self.due -= 1
        return self.rows[self.due]

    def _swap(self, one: int, other: int) -> None:
        rows = self.rows
        rows[one], rows[other] = rows[other], rows[one]
        self._places[rows[one].number] = one
        self._places[rows[other].number] = other


@dataclass(slots=True)
class Table:
    """Every node but ourselves, one row an id. Orders are those of arrival, so that chance alone decides and
    the same input gives the same choice on every Python."""

    rows: dict[str, Member] = field(default_factory=dict)
    numbers: dict[int, Member] = field(default_factory=dict)
    living: list[Member] = field(default_factory=list)  # Alive and Suspect; the order means nothing
    tombs: dict[str, Member] = field(default_factory=dict)  # Dead and Left, the oldest first
    met: Roll = field(default_factory=Roll)  # the living that have answered us in this run
    unmet: Roll = field(default_factory=Roll)  # the other living: anybody may have made them up
    by_hash: dict[int, dict[int, Member]] = field(default_factory=dict)  # the living by what describes them
    next_number: int = 1

    @property
    def population(self) -> int:
        """How many live, with ourselves."""
        return len(self.living) + 1

    def find(self, ref: NodeRef) -> Member | None:
        """The row of this very run."""
        row = self.rows.get(ref.worker_id)
        return row if row is not None and row.record.epoch == ref.epoch else None

    def put(self, record: Record, now: int) -> Member | None:
        """Adopt a record that outranks what is held; None when there is no room for another node."""
        row = self.rows.get(record.worker_id)
        is_new_run = row is not None and row.record.epoch != record.epoch
        if row is None:
            if len(self.rows) >= MEMBERS_MAX and not self._make_room():
                return None
            row = Member(self.next_number, record, now, record.ref, record.address)
            self.next_number += 1
            self.rows[record.worker_id] = self.numbers[row.number] = row
        else:
            self._unlist_hash(row)
            if is_new_run:
                self._unroll(row)
            row.take(record, now)
        if row.is_living:
            self.by_hash.setdefault(record.meta_hash, {})[row.number] = row
            self.tombs.pop(record.worker_id, None)
            if row.position < 0:
                row.position = len(self.living)
                self.living.append(row)
                (self.met if row.answered else self.unmet).add(row)
            elif is_new_run:
                self.unmet.add(row)
        else:
            self._bury(row)
        return row

    def holders(self, meta_hash: int) -> list[Member]:
        """The living whose particulars have this hash."""
        return list(self.by_hash.get(meta_hash, {}).values())

    def expire(self, now: int) -> list[Member]:
        """Forget tombstones that are over."""
        gone = []
        for row in list(self.tombs.values()):
            if now - row.since_ns < TOMBSTONE_NS:
                break
            self._forget(row)
            gone.append(row)
        return gone

    def answered(self, row: Member) -> None:
        """It has answered us itself."""
        if not row.answered:
            row.answered = True
            if row.is_living:
                self.unmet.remove(row)
                self.met.add(row)

    def choose(
        self,
        rng: random.Random,
        count: int,
        fits: Callable[[Member], bool],
        *,
        among: list[Member] | None = None,
    ) -> list[Member]:
        """Up to `count` different rows of the living, or of those `among` them, that fit, by chance; fewer
        only if there are no more."""
        living = self.living if among is None else among
        if count <= 0:
            return []
        if len(living) > 8 * count:
            picked: list[Member] = []
            for _ in range(4 * count):
                row = living[rng.randrange(len(living))]
                if row not in picked and fits(row):
                    picked.append(row)
                    if len(picked) == count:
                        return picked
        fitting = [row for row in living if fits(row)]
        return fitting if len(fitting) <= count else rng.sample(fitting, count)

    def _bury(self, row: Member) -> None:
        if row.position >= 0:
            last = self.living.pop()
            if last is not row:
                self.living[row.position] = last
                last.position = row.position
            row.position = -1
            self._unroll(row)
        # Moved to the end: a run that died later is forgotten later.
        self.tombs.pop(row.record.worker_id, None)
        self.tombs[row.record.worker_id] = row
        if len(self.tombs) > TOMBSTONES_MAX:
            self._forget(next(iter(self.tombs.values())))

    def _unroll(self, row: Member) -> None:
        self.met.remove(row)
        self.unmet.remove(row)

    def _unlist_hash(self, row: Member) -> None:
        holders = self.by_hash.get(row.record.meta_hash)
        if holders is not None:
            holders.pop(row.number, None)
            if not holders:
                del self.by_hash[row.record.meta_hash]

    def _make_room(self) -> bool:
        if not self.tombs:
            return False
        self._forget(next(iter(self.tombs.values())))
        return True

    def _forget(self, row: Member) -> None:
        for mapping in (self.rows, self.tombs):
            mapping.pop(row.record.worker_id, None)
        self.numbers.pop(row.number, None)
