"""Two nodes make their tables equal: hash first, then digests, then records.

Only the living are compared. What is dead here is told to whoever still lists it as living, and to nobody
else: otherwise tombstones would be handed on for ever, each holder starting their time anew.
"""

from __future__ import annotations

import random
from typing import Final, TypeVar

import msgspec
import xxhash

from fluxmesh.mesh.member import outranks
from fluxmesh.mesh.membership import Membership
from fluxmesh.mesh.messages import (
    Address,
    Compare,
    Digest,
    Digests,
    Exchange,
    Frame,
    NodeRef,
    Record,
    Records,
    Same,
    Standing,
)
from fluxmesh.mesh.particulars import Particulars
from fluxmesh.mesh.timing import FRAME_MAX_BYTES, S
from fluxmesh.mesh.voice import Pending, Voice

COMPARE_TIMEOUT_NS: Final = 3 * S
EXCHANGE_TIMEOUT_NS: Final = 5 * S
_SPARE_BYTES: Final = 1_024  # of a frame, for its head
_encode: Final = msgspec.msgpack.Encoder().encode

Item = TypeVar("Item", Digest, Record, str)


def hash_of(digests: list[Digest]) -> int:
    """xxh3_64 over the encoded digests in the order of their ids."""
    return xxhash.xxh3_64_intdigest(_encode(sorted(digests, key=lambda digest: digest.worker_id)))


class PushPull:
    """Both halves of the exchange."""

    def __init__(
        self, *, voice: Voice, membership: Membership, particulars: Particulars, rng: random.Random
    ) -> None:
        self.voice = voice
        self.membership = membership
        self.particulars = particulars
        self._rng = rng

    def digests(self) -> list[Digest]:
        """Everybody who lives, ourselves with them."""
        records = [row.record for row in self.voice.table.living]
        if self.voice.record.standing == Standing.ALIVE:
            records.append(self.voice.record)
        return [Digest(r.worker_id, r.epoch, r.incarnation, r.standing) for r in records]

    # --- the one who asks -------------------------------------------------------------------------------

    def start(self, to: Address, *, why: str) -> bool:
        digests = self.digests()
        body = Compare(hash_of(digests), len(digests))
        return self.voice.call(body, Pending("compare", to, why), COMPARE_TIMEOUT_NS) is not None

    def on_compared(self, pending: Pending, body: Frame) -> tuple[bool, bool]:
        """The answer to Compare: whether that was all, because the tables are the same, and whether a second
        step is under way."""
        if isinstance(body, Same):
            return True, False
        if not isinstance(body, Digests):
            return False, False
        records, want = self._differences(body.digests)
        exchange = Exchange(records, want, self.particulars.among(records))
        next_step = Pending("exchange", pending.to, pending.why)
        return False, self.voice.call(exchange, next_step, EXCHANGE_TIMEOUT_NS) is not None

    def on_exchanged(self, body: Frame, sender: NodeRef, now: int) -> bool:
        """The answer to Exchange: True when it was one."""
        if not isinstance(body, Records):
            return False
        for record in body.records:
            self.membership.hear_exchanged(record, now, teller=sender.worker_id)
        self.particulars.learn(body.metas, now)
        return True

    def _differences(self, theirs: list[Digest]) -> tuple[list[Record], list[str]]:
        """The records they lack or hold outdated, and the ids of which they know better."""
        tell: list[Record] = []
        want: list[str] = []
        listed = set()
        for digest in theirs:
            listed.add(digest.worker_id)
            held = self._held(digest.worker_id)
            known = _bare(digest)
            if held is None or outranks(known, held):
                want.append(digest.worker_id)
            elif outranks(held, known):
                tell.append(held)
        own = self.voice.record
        unlisted = [own] if own.worker_id not in listed else []
        unlisted += [r.record for r in self.voice.table.living if r.record.worker_id not in listed]
        room = FRAME_MAX_BYTES // 2 - _SPARE_BYTES
        return self._within(tell + unlisted, room), self._within(want, room // 2)

    # --- the one who is asked ---------------------------------------------------------------------------

    def answer_compare(self, body: Compare) -> Frame:
        digests = self.digests()
        if len(digests) == body.count and hash_of(digests) == body.hash:
            return Same()
        return Digests(self._within(digests, FRAME_MAX_BYTES - _SPARE_BYTES))

    def answer_exchange(self, body: Exchange, sender: NodeRef, now: int) -> Frame:
        tell: dict[str, Record] = {}
        for record in body.records:
            self.membership.hear_exchanged(record, now, teller=sender.worker_id)
        self.particulars.learn(body.metas, now)
        for record in body.records:
            held = self._held(record.worker_id)
            if held is not None and outranks(held, record):
                tell[record.worker_id] = held
        for worker_id in body.want:
            held = self._held(worker_id)
            if held is not None:
                tell[worker_id] = held
        records = self._within(list(tell.values()), FRAME_MAX_BYTES // 2)
        return Records(records, self.particulars.among(records))

    # --- both -------------------------------------------------------------------------------------------

    def _held(self, worker_id: str) -> Record | None:
        if worker_id == self.voice.me.worker_id:
            return self.voice.record
        row = self.voice.table.rows.get(worker_id)
        return None if row is None else row.record

    def _within(self, items: list[Item], budget_bytes: int) -> list[Item]:
        """As they are, or as large a part as fits, another one each time, so that all get their turn."""
        while items and len(_encode(items)) > budget_bytes:
            start = self._rng.randrange(len(items))
            items = (items[start:] + items[:start])[: len(items) // 2]
        return items


def _bare(digest: Digest) -> Record:
    return Record(digest.worker_id, digest.epoch, digest.incarnation, digest.standing, "", 0, 0)
