"""What nodes say to each other: plain values, tagged arrays on the wire.

A packet is one datagram: a head, one message, and whatever news and loads fit behind it. A frame is one half
of a call over TCP: one request there, one answer back. Nothing here is trusted until `wire` has looked at it.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

from msgspec import Struct

PROTOCOL: Final = 1  # a packet of another version is dropped and counted


class Standing(IntEnum):
    """What is believed of a run of a node; at the same incarnation the higher wins."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Flag(IntFlag):
    """What a node says of itself beside its numbers."""

    READY = 1  # has been ready for work for a second
    DRAINING = 2
    DEGRADED = 4  # its worker's loop stands: it claims and steals nothing
    STEALS = 8  # takes part in stealing


class Address(Struct, frozen=True, array_like=True, order=True):
    """Where a node hears datagrams; its streams are one port above."""

    host: str  # an IP address, never a name
    port: int


class NodeRef(Struct, frozen=True, array_like=True, order=True):
    """One run of one worker. The epoch comes from storage and grows with every run."""

    worker_id: str
    epoch: int


class Record(Struct, frozen=True, array_like=True):
    """A claim about one run of a node: one piece of news. `accuser` says who suspects or declares it (else
    "")."""

    worker_id: str
    epoch: int
    incarnation: int
    standing: int  # a Standing; an int here, so that an unknown one is met by `wire` and not by an exception
    host: str
    port: int
    meta_hash: int  # xxh3_64 of the encoded Meta
    accuser: str = ""

    @property
    def ref(self) -> NodeRef:
        return NodeRef(self.worker_id, self.epoch)

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


class Meta(Struct, frozen=True, array_like=True):
    """What changes seldom; at most META_MAX_BYTES encoded. Fetched by whoever sees a new hash."""

    queues: tuple[str, ...]
    tiers: tuple[int, ...]
    capacity: int
    steals: bool = True
    virtual_nodes: int = 150
    affinity_weight: float = 0.7
    version: str = ""  # of the package


class Load(Struct, frozen=True, array_like=True):
    """What changes all the time; ordered by (epoch, counter), of which only its subject makes new ones.

    `age_ms` grows on the way: a reader adds what it kept the value for before it passes it on.
    """

    worker_id: str
    epoch: int
    counter: int
    queued: int = 0
    running: int = 0
    capacity: int = 0
    stealable: int = 0
    best_tier: int = 3
    run_ms: int = 1_000  # EWMA of run times
    flags: int = 0
    age_ms: int = 0


class Digest(Struct, frozen=True, array_like=True):
    """A record without its particulars: enough to see who knows the newer."""

    worker_id: str
    epoch: int
    incarnation: int
    standing: int


# --- datagrams ----------------------------------------------------------------------------------------


class Ping(Struct, frozen=True, array_like=True, tag=1):
    """`target` is the run that is meant: another run of that address answers nothing. `about` is what we
    hold about it if that is not plain Alive, so that it can refute."""

    seq: int
    target: NodeRef
    about: Record | None = None


class Ack(Struct, frozen=True, array_like=True, tag=2):
    seq: int


class PingReq(Struct, frozen=True, array_like=True, tag=3):
    """Ask the receiver to ping `target` for us; `window_ms` is how long we wait, a Nack comes at 0.8 of
    it."""

    seq: int
    target: NodeRef
    host: str
    port: int
    window_ms: int


class AckRelay(Struct, frozen=True, array_like=True, tag=4):
    """The target of our PingReq answered the helper."""

    seq: int
    target: NodeRef


class Nack(Struct, frozen=True, array_like=True, tag=5):
    """The helper is well, the target has not answered it yet."""

    seq: int


class Gossip(Struct, frozen=True, array_like=True, tag=6):
    """Nothing but what is behind it: news and loads."""


Message = Ping | Ack | PingReq | AckRelay | Nack | Gossip


class Packet(Struct, frozen=True, array_like=True):
    """One datagram. `sender` is who says so (the key proves membership, not identity); its incarnation saves
    a refuted node a round."""

    version: int
    sender: NodeRef
    incarnation: int
    message: Message
    news: list[Record] = []
    loads: list[Load] = []


# --- calls over streams ---------------------------------------------------------------------------------


class Compare(Struct, frozen=True, array_like=True, tag=1):
    """Push-pull, first step: do we hold the same? `hash` is over the sorted digests, `count` how many there
    are."""

    hash: int
    count: int


class Same(Struct, frozen=True, array_like=True, tag=2):
    pass


class Digests(Struct, frozen=True, array_like=True, tag=3):
    """Answer to Compare that differs: all of mine."""

    digests: list[Digest]


class Exchange(Struct, frozen=True, array_like=True, tag=4):
    """Push-pull, second step: what I hold that is newer or unknown to you, and whose records I want."""

    records: list[Record]
    want: list[str]
    metas: list[Meta] = []  # each once: a hash names its Meta, whoever has it


class Records(Struct, frozen=True, array_like=True, tag=5):
    records: list[Record]
    metas: list[Meta] = []


class MetaGet(Struct, frozen=True, array_like=True, tag=6):
    """Asked of the node itself."""

    target: NodeRef


class MetaIs(Struct, frozen=True, array_like=True, tag=7):
    target: NodeRef
    meta: Meta


class TcpPing(Struct, frozen=True, array_like=True, tag=8):
    target: NodeRef
    about: Record | None = None


class TcpAck(Struct, frozen=True, array_like=True, tag=9):
    target: NodeRef


class Refused(Struct, frozen=True, array_like=True, tag=10):
    """Not this run, not now, or not understood."""

    reason: str


Frame = Compare | Same | Digests | Exchange | Records | MetaGet | MetaIs | TcpPing | TcpAck | Refused


class StreamFrame(Struct, frozen=True, array_like=True):
    """One half of a call. `call` pairs an answer with its request on one connection."""

    version: int
    sender: NodeRef
    incarnation: int
    call: int
    body: Frame
