"""Work without workers: shelves of jobs, a storage that lets one of two have each, and hands."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Sequence

from fluxmesh.mesh.messages import Flag, NodeRef, Offer, Offered, Steal
from tests.mesh.nodes import READY, Host

_tokens = itertools.count(1)


def jobs(count: int) -> list[Offered]:
    return [Offered(str(uuid.uuid4()), next(_tokens)) for _ in range(count)]


class Owners:
    """Storage, as far as stealing needs it: by whom each job is held, under which token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held: dict[str, tuple[str, int]] = {}

    def put(self, worker_id: str, some: Sequence[Offered]) -> None:
        with self._lock:
            self.held.update({job.id: (worker_id, job.token) for job in some})

    def transfer(self, some: Sequence[Offered], *, victim: str, thief: str) -> list[Offered]:
        got = []
        with self._lock:
            for job in some:
                if self.held.get(job.id) == (victim, job.token):
                    self.held[job.id] = (thief, next(_tokens))
                    got.append(job)
        return got


class Hand:
    """A worker's stock and its loop in one. What it is told to take it takes at once, on the node's thread,
    unless it `hesitates`."""

    def __init__(self, owners: Owners, worker_id: str, *, hesitates: bool = False) -> None:
        self.owners = owners
        self.worker_id = worker_id
        self.hesitates = hesitates
        self.host: Host | None = None
        self.shelf: list[Offered] = []
        self.wishes: list[Steal] = []
        self.takes: list[tuple[NodeRef, tuple[Offered, ...]]] = []
        self.got: list[Offered] = []
        self.stolen_out = 0
        self.changed = threading.Condition()

    # -- as a shelf ----------------------------------------------------------------------------------
    def offer(self, wish: Steal, most: int, thief: NodeRef) -> Offer:
        with self.changed:
            self.wishes.append(wish)
            return Offer(tuple(self.shelf[:most]), max(0, len(self.shelf) - most))

    def taken(self, some: Sequence[Offered], thief: NodeRef) -> int:
        with self.changed:
            gone = [job for job in some if job in self.shelf]
            self.shelf = [job for job in self.shelf if job not in gone]
            self.stolen_out += len(gone)
            self.changed.notify_all()
            return len(gone)

    # -- as a worker ---------------------------------------------------------------------------------
    def fill(self, count: int) -> None:
        """Hold so many jobs more, with all slots busy, and say so."""
        more = jobs(count)
        self.owners.put(self.worker_id, more)
        with self.changed:
            self.shelf += more
        self.tell(running=4)

    def tell(self, *, running: int, flags: Flag = READY) -> None:
        assert self.host is not None
        held = len(self.shelf)
        self.host.node.publish(queued=held, running=running, flags=flags, stealable=held)

    def take(self, peer: NodeRef, some: tuple[Offered, ...]) -> None:
        with self.changed:
            self.takes.append((peer, some))
            self.changed.notify_all()
        if not self.hesitates:
            self.answer(peer, some)

    def answer(self, peer: NodeRef, some: tuple[Offered, ...]) -> None:
        assert self.host is not None
        got = self.owners.transfer(some, victim=peer.worker_id, thief=self.worker_id)
        with self.changed:
            self.got += got
            self.changed.notify_all()
        self.host.node.took(peer, some, got)


def a_hand(
    owners: Owners, worker_id: str, *, hesitates: bool = False, **options: object
) -> tuple[Host, Hand]:
    hand = Hand(owners, worker_id, hesitates=hesitates)
    host = Host(worker_id, shelf=hand, on_take=hand.take, **options)  # type: ignore[arg-type]
    hand.host = host
    return host, hand
