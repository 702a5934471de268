"""What a node may ask of its worker's buffer. It stands between the two so that neither knows the other.

Both calls come on the node's thread while the worker's loop changes the buffer: whoever implements them
copies in one step of the interpreter what is to be looked at, and never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fluxmesh.mesh.messages import NodeRef, Offer, Offered, Steal


class Shelf(Protocol):
    """The jobs that are held and not started, as others may see them."""

    def offer(self, wish: Steal, most: int, thief: NodeRef) -> Offer:
        """At most `most` jobs that the thief can run, best tier first, inside it those that belong to the
        thief, then the coldest. Not offered: what is on its way to its start, has changed hands MAX_HOPS
        times, or, at full weight, belongs to this worker. Marks nothing."""
        ...

    def taken(self, jobs: Sequence[Offered], thief: NodeRef) -> int:
        """These are the thief's now: they leave the buffer, if they are in it under these tokens, and are
        counted as stolen, each once, whether or not this worker heard of the loss already. Their number."""
        ...


class EmptyShelf:
    """Of one that holds nothing."""

    def offer(self, wish: Steal, most: int, thief: NodeRef) -> Offer:
        return Offer(())

    def taken(self, jobs: Sequence[Offered], thief: NodeRef) -> int:
        return 0


class Store(Protocol):
    """What the public verbs of a node reach of its worker's buffer, from any thread. A job is a ClaimedJob of
    storage, which the mesh does not look into."""

    def prefetch(self, jobs: Sequence[Any]) -> int:
        """Hold these jobs, which this worker has claimed; how many fit, from the first on."""
        ...

    def pop(self) -> Any | None:
        """Take the hottest job out, or None. It is still held in storage: whoever has it has to begin it."""
        ...

    def figures(self) -> dict[str, int]:
        """Counters since the start, and how things stand: `buffered` jobs are held, `adaptive_prefetch` one
        claim may hold beyond its free slots, `should_prefetch` (0 or 1) more should be held, `should_steal`
        others are to be asked."""
        ...
