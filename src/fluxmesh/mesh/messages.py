"""What nodes say to each other: plain values, tagged arrays on the wire.

A packet is one datagram: a head, one message, and whatever news and loads fit behind it. A frame is one half
of a call over TCP: one request there, one answer back. Nothing here is trusted until `wire` has looked at it:
it holds each field to the bounds that stand here, and looks into names and addresses.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Annotated, Final

import msgspec
from msgspec import Struct

from fluxmesh.mesh.timing import MEMBERS_MAX, METAS_MAX

PROTOCOL: Final = 1  # a packet of another version is dropped and counted
OFFERED_MAX: Final = 1_000  # jobs in one offer
TASKS_MAX: Final = 4_096  # named by a thief; of more it names none, and says so by an empty list
NEWS_MAX: Final = 255  # pieces of news, and loads, in one packet

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # epochs, incarnations, sequence numbers
Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]  # of jobs, or milliseconds
Slots = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
Tier = Annotated[int, msgspec.Meta(ge=0, le=3)]
Hash = Annotated[int, msgspec.Meta(ge=0)]  # 64 bits, without a sign
JobId = Annotated[str, msgspec.Meta(min_length=36, max_length=36)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Host = Annotated[str, msgspec.Meta(min_length=2, max_length=45)]
Port = Annotated[int, msgspec.Meta(ge=1_024, le=65_534)]  # streams are one above
Rank = Annotated[int, msgspec.Meta(ge=0, le=3)]


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


class Address(Struct, frozen=True, array_like=True, gc=False, order=True):
    """Where a node hears datagrams; its streams are one port above."""

    host: Host  # an IP address, never a name
    port: Port


class NodeRef(Struct, frozen=True, array_like=True, gc=False, order=True):
    """One run of one worker. The epoch comes from storage and grows with every run."""

    worker_id: Name
    epoch: Count


class Record(Struct, frozen=True, array_like=True, gc=False):
    """A claim about one run of a node: one piece of news. `accuser` says who suspects or declares it (else
    "")."""

    worker_id: Name
    epoch: Count
    incarnation: Count
    standing: Rank  # a Standing; an int here, so that an unknown one is met by `wire` and not by an exception
    host: Host
    port: Port
    meta_hash: Hash  # xxh3_64 of the encoded Meta
    accuser: Annotated[str, msgspec.Meta(max_length=200)] = ""

    @property
    def ref(self) -> NodeRef:
        return NodeRef(self.worker_id, self.epoch)

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


class Meta(Struct, frozen=True, array_like=True, gc=False):
    """What changes seldom; at most META_MAX_BYTES encoded. Fetched by whoever sees a new hash."""

    queues: Annotated[tuple[Name, ...], msgspec.Meta(max_length=128)]
    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(max_length=4)]
    capacity: Slots
    steals: bool = True
    virtual_nodes: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 150
    affinity_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.7
    version: Annotated[str, msgspec.Meta(max_length=40)] = ""  # of the package


class Load(Struct, frozen=True, array_like=True, gc=False):
    """What changes all the time; ordered by (epoch, counter), of which only its subject makes new ones.

    `age_ms` grows on the way: a reader adds what it kept the value for before it passes it on.
    """

    worker_id: Name
    epoch: Count
    counter: Count
    queued: Amount = 0
    running: Amount = 0
    capacity: Slots = 0
    stealable: Amount = 0
    best_tier: Tier = 3
    run_ms: Amount = 1_000  # of the last runs, the middle one
    flags: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    age_ms: Amount = 0


class Digest(Struct, frozen=True, array_like=True, gc=False):
    """A record without its particulars: enough to see who knows the newer."""

    worker_id: Name
    epoch: Count
    incarnation: Count
    standing: Rank


# --- datagrams ----------------------------------------------------------------------------------------


class Ping(Struct, frozen=True, array_like=True, gc=False, tag=1):
    """`target` is the run that is meant: another run of that address answers nothing. `about` is what we
    hold about it if that is not plain Alive, so that it can refute."""

    seq: Count
    target: NodeRef
    about: Record | None = None


class Ack(Struct, frozen=True, array_like=True, gc=False, tag=2):
    seq: Count


class PingReq(Struct, frozen=True, array_like=True, gc=False, tag=3):
    """Ask the receiver to ping `target` for us; `window_ms` is how long we wait, a Nack comes at 0.8 of
    it."""

    seq: Count
    target: NodeRef
    host: Host
    port: Port
    window_ms: Amount


class AckRelay(Struct, frozen=True, array_like=True, gc=False, tag=4):
    """The target of our PingReq answered the helper."""

    seq: Count
    target: NodeRef


class Nack(Struct, frozen=True, array_like=True, gc=False, tag=5):
    """The helper is well, the target has not answered it yet."""

    seq: Count


class Gossip(Struct, frozen=True, array_like=True, gc=False, tag=6):
    """Nothing but what is behind it: news and loads."""


Message = Ping | Ack | PingReq | AckRelay | Nack | Gossip


class Packet(Struct, frozen=True, array_like=True, gc=False):
    """One datagram. `sender` is who says so (the key proves membership, not identity); its incarnation saves
    a refuted node a round."""

    version: Annotated[int, msgspec.Meta(ge=0, le=127)]
    sender: NodeRef
    incarnation: Count
    message: Message
    news: Annotated[list[Record], msgspec.Meta(max_length=NEWS_MAX)] = []
    loads: Annotated[list[Load], msgspec.Meta(max_length=NEWS_MAX)] = []


# --- calls over streams ---------------------------------------------------------------------------------


class Compare(Struct, frozen=True, array_like=True, gc=False, tag=1):
    """Push-pull, first step: do we hold the same? `hash` is over the sorted digests, `count` how many there
    are."""

    hash: Hash
    count: Count


class Same(Struct, frozen=True, array_like=True, gc=False, tag=2):
    pass


class Digests(Struct, frozen=True, array_like=True, gc=False, tag=3):
    """Answer to Compare that differs: all of mine."""

    digests: Annotated[list[Digest], msgspec.Meta(max_length=MEMBERS_MAX)]


class Exchange(Struct, frozen=True, array_like=True, gc=False, tag=4):
    """Push-pull, second step: what I hold that is newer or unknown to you, and whose records I want."""

    records: Annotated[list[Record], msgspec.Meta(max_length=MEMBERS_MAX)]
    want: Annotated[list[Name], msgspec.Meta(max_length=MEMBERS_MAX)]
    metas: Annotated[list[Meta], msgspec.Meta(max_length=METAS_MAX)] = []  # each once: a hash names its Meta


class Records(Struct, frozen=True, array_like=True, gc=False, tag=5):
    records: Annotated[list[Record], msgspec.Meta(max_length=MEMBERS_MAX)]
    metas: Annotated[list[Meta], msgspec.Meta(max_length=METAS_MAX)] = []


class MetaGet(Struct, frozen=True, array_like=True, gc=False, tag=6):
    """Asked of the node itself."""

    target: NodeRef


class MetaIs(Struct, frozen=True, array_like=True, gc=False, tag=7):
    target: NodeRef
    meta: Meta


class TcpPing(Struct, frozen=True, array_like=True, gc=False, tag=8):
    target: NodeRef
    about: Record | None = None


class TcpAck(Struct, frozen=True, array_like=True, gc=False, tag=9):
    target: NodeRef


class Offered(Struct, frozen=True, array_like=True, gc=False):
    """A job that is held, and the token under which it is. Nothing else of a job travels."""

    id: JobId
    token: Count


class Steal(Struct, frozen=True, array_like=True, gc=False, tag=11):
    """What have you got for me? `want` jobs at the most, of these queues, tiers and tasks (xxh3_64 of their
    names)."""

    want: Annotated[int, msgspec.Meta(ge=1, le=OFFERED_MAX)]
    queues: Annotated[tuple[Name, ...], msgspec.Meta(max_length=128)]
    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(max_length=4)]
    tasks: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=TASKS_MAX)]


class Offer(Struct, frozen=True, array_like=True, gc=False, tag=12):
    """Held jobs, the highest tier first and the coldest inside it. Nothing is marked: each is still its
    owner's, who may begin it at any time; whoever wins in storage has it. `surplus`: what is left to take."""

    jobs: Annotated[tuple[Offered, ...], msgspec.Meta(max_length=OFFERED_MAX)]
    surplus: Amount = 0


class Nothing(Struct, frozen=True, array_like=True, gc=False, tag=13):
    """No offer. Ask again after `retry_ms` at the earliest."""

    reason: Annotated[str, msgspec.Meta(max_length=200)]
    retry_ms: Amount = 0
    surplus: Amount = 0


class Taken(Struct, frozen=True, array_like=True, gc=False, tag=14):
    """Of your offer these are mine now, by the tokens that you named. It only tells sooner what storage
    would."""

    jobs: Annotated[tuple[Offered, ...], msgspec.Meta(max_length=OFFERED_MAX)]


class Noted(Struct, frozen=True, array_like=True, gc=False, tag=15):
    pass


class Refused(Struct, frozen=True, array_like=True, gc=False, tag=10):
    """Not this run, not now, or not understood."""

    reason: Annotated[str, msgspec.Meta(max_length=200)]


Frame = (
    Compare
    | Same
    | Digests
    | Exchange
    | Records
    | MetaGet
    | MetaIs
    | TcpPing
    | TcpAck
    | Refused
    | Steal
    | Offer
    | Nothing
    | Taken
    | Noted
)


class StreamFrame(Struct, frozen=True, array_like=True, gc=False):
    """One half of a call. `call` pairs an answer with its request on one connection."""

    version: Annotated[int, msgspec.Meta(ge=0, le=127)]
    sender: NodeRef
    incarnation: Count
    call: Count
    body: Frame
