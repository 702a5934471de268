"""What the hashes in records stand for. A hash names its Meta, so one answer serves every node that has it,
and whoever has it may be asked."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from fluxmesh.mesh.member import Member
from fluxmesh.mesh.messages import Frame, Meta, MetaGet, MetaIs, NodeRef, Record, Refused
from fluxmesh.mesh.timing import METAS_MAX, MS, S
from fluxmesh.mesh.voice import Pending, Voice
from fluxmesh.mesh.wire import meta_hash

TRIES_MAX: Final = 6  # then not before the next sweep
WANTED_MAX: Final = 1_024
SPARE_MAX: Final = 256  # known ones that nobody has any more, until the next sweep
_AT_ONCE: Final = 4
_FIRST_WAIT_NS: Final = 500 * MS  # a fleet that hears of a new hash does not ask all at once
_TIMEOUT_NS: Final = 3 * S


@dataclass(slots=True)
class Want:
    due_ns: int
    tries: int = 0
    is_asked: bool = False


class Particulars:
    """The metas that are known and those that are looked for."""

    def __init__(self, *, voice: Voice, rng: random.Random, meta: Meta) -> None:
        self.voice = voice
        self.own = meta
        self._known: dict[int, Meta] = {meta_hash(meta): meta}
        self._wanted: dict[int, Want] = {}
        self._rng = rng

    def of(self, record: Record) -> Meta | None:
        return self._known.get(record.meta_hash)

    def set_own(self, meta: Meta) -> int:
        self.own = meta
        digest = meta_hash(meta)
        self._keep(digest, meta)
        return digest

    def described(self, member: Member, now: int) -> None:
        """A living node has (or still has) these particulars: say what they are, or find out."""
        digest = member.record.meta_hash
        meta = self._known.get(digest)
        if meta is not None:
            if member.told_hash != digest:
                member.told_hash = digest
                self.voice.tell("meta", member.record, meta=meta)
        elif digest not in self._wanted and len(self._wanted) < WANTED_MAX:
            due = now + int(self._rng.random() * _FIRST_WAIT_NS)
            self._wanted[digest] = Want(due)
            self.voice.arm(("meta", 0), min(want.due_ns for want in self._wanted.values()))

    def learn(self, metas: list[Meta], now: int) -> None:
        """Metas that came with records. Kept only if somebody who lives has them."""
        for meta in metas:
            digest = meta_hash(meta)
            if digest in self._known:
                continue
            holders = self.voice.table.holders(digest)
            if holders:
                self._keep(digest, meta)
                self._wanted.pop(digest, None)
            for row in holders:
                self.described(row, now)

    def _keep(self, digest: int, meta: Meta) -> None:
        """Between two sweeps a liar could change its hash without end."""
        if len(self._known) > len(self.voice.table.by_hash) + SPARE_MAX:
            self._forget_unused()
        self._known[digest] = meta

    def among(self, records: list[Record]) -> list[Meta]:
        """The known metas of these records, each once, as many as a frame may carry."""
        picked: dict[int, Meta] = {}
        for record in records:
            meta = self._known.get(record.meta_hash)
            if meta is not None:
                picked[record.meta_hash] = meta
                if len(picked) == METAS_MAX:
                    break
        return list(picked.values())

    def on_timer(self, now: int) -> None:
        """Ask for what is due."""
        busy = sum(want.is_asked for want in self._wanted.values())
        for digest, want in list(self._wanted.items()):
            if want.is_asked or want.due_ns > now:
                continue
            if busy >= _AT_ONCE:
                want.due_ns = now + 100 * MS
                continue
            self._ask(digest, want)
            busy += want.is_asked
        waiting = [want.due_ns for want in self._wanted.values() if not want.is_asked]
        if waiting:
            self.voice.arm(("meta", 0), max(now + MS, min(waiting)))

    def _ask(self, digest: int, want: Want) -> None:
        holders = self.voice.table.holders(digest)
        if not holders or want.tries >= TRIES_MAX:
            del self._wanted[digest]
            if holders:
                self.voice.count("metas_not_found")
            return
        row = holders[self._rng.randrange(len(holders))]
        want.tries += 1
        pending = Pending("meta", row.address, ref=row.ref, number=digest)
        want.is_asked = self.voice.call(MetaGet(row.ref), pending, _TIMEOUT_NS) is not None
        if not want.is_asked:
            want.due_ns += S

    def on_reply(self, pending: Pending, body: Frame | None, now: int) -> None:
        want = self._wanted.get(pending.number)
        if isinstance(body, MetaIs):
            self.learn([body.meta], now)
        if want is not None and pending.number in self._wanted:
            want.is_asked = False
            want.due_ns = now + (S << (want.tries - 1))
            self.voice.arm(("meta", 0), want.due_ns)

    def answer(self, target: NodeRef) -> Frame:
        if target == self.voice.me:
            return MetaIs(target, self.own)
        row = self.voice.table.find(target)
        meta = self.of(row.record) if row is not None else None
        return Refused("unknown particulars") if meta is None else MetaIs(target, meta)

    def sweep(self, now: int) -> None:
        """Forget what nobody has any more, and look again for what was not found."""
        self._forget_unused()
        for row in self.voice.table.living:
            if row.record.meta_hash not in self._known:
                self.described(row, now)

    def _forget_unused(self) -> None:
        used, own = self.voice.table.by_hash, self.voice.record.meta_hash
        for digest in [digest for digest in self._known if digest not in used and digest != own]:
            del self._known[digest]
