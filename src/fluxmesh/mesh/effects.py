"""What the core asks of its shell, what it tells, and the verbs by which it is driven.

The contract between `swim.Swim` and whoever carries it (`node`, the simulator). All instants are nanoseconds
of one monotonic clock. A method returns the effects of one input in the order in which they are to be
carried out; the core keeps no reference to them.
"""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct

from fluxmesh.mesh.messages import Address, Load, Meta, NodeRef, Offered, Record

Timer = tuple[str, int]  # a purpose and a number; arming one that is armed moves it


class Send(Struct, frozen=True):
    """One datagram. What became of it nobody learns, but a send that fails at once comes back as
    `on_send_failed`."""

    to: Address
    data: bytes


class Call(Struct, frozen=True):
    """One request over TCP to `to` (its datagram address; streams are one port above). Its answer, or None
    when `timeout_ns` is over, it was refused or its connection failed, comes to `on_reply` exactly once."""

    call: int
    to: Address
    frame: bytes
    timeout_ns: int


class Reply(Struct, frozen=True):
    """The answer to a request that came in by `on_call` under `call`. None closes the connection."""

    call: int
    frame: bytes | None


class Arm(Struct, frozen=True):
    timer: Timer
    at_ns: int


class Disarm(Struct, frozen=True):
    timer: Timer


EventKind = Literal[
    "joined",  # the first push-pull with somebody succeeded
    "discovered",
    "restarted",  # a higher epoch replaced the run we knew
    "suspected",
    "refuted",  # a suspect, or a dead one, is alive after all
    "dead",
    "left",
    "forgotten",  # the tombstone is over
    "meta",  # the particulars of a member are known or have changed
    "fenced",  # somebody holds our id under a higher epoch: stop claiming
    "accused",  # we were suspected or declared dead, and said no
    "probe_resolved",  # a probe found an answer by a detour
    "seed_failed",  # a seed has no address, or nobody answers there
    "seed_reached",  # one that had failed
    "surge",  # a peer has surplus now
    "stole",  # storage gave us jobs of a peer
    "gave",  # a peer says that it has jobs of ours
    "gone",  # our own leave is complete: the shell may close
]


class Emit(Struct, frozen=True):
    """Something worth telling: a log event, a counter, a change of ring or targets. `text` names the how and
    why, `seed` the seed as configured, `again_ns` how long from now it is tried again, `jobs` how many."""

    kind: EventKind
    record: Record | None = None
    meta: Meta | None = None
    load: Load | None = None
    text: str = ""
    seed: str = ""
    again_ns: int = 0
    jobs: int = 0


class Resolve(Struct, frozen=True):
    """Names to look up. The addresses (all families, several a name; none if that failed) come to
    `on_resolved`."""

    seeds: tuple[str, ...]  # host or host:port, as configured


class Take(Struct, frozen=True):
    """Have storage transfer these jobs of `peer` to this worker; what came of it comes back by the command
    `Took` exactly once, with nothing if it could not be done."""

    peer: NodeRef
    jobs: tuple[Offered, ...]


Effect = Send | Call | Reply | Arm | Disarm | Emit | Resolve | Take


class Join(Struct, frozen=True):
    """Become alive and look for the seeds."""


class Leave(Struct, frozen=True):
    """Say goodbye; `gone` is emitted when that is done."""


class UpdateLoad(Struct, frozen=True):
    load: Load  # worker_id, epoch, counter and age are set by the core


class UpdateMeta(Struct, frozen=True):
    meta: Meta


class Seek(Struct, frozen=True):
    """This worker could use so many jobs more, and its last claim found nothing. 0: it needs none any more.
    It stands until the next one replaces it."""

    want: int


class Took(Struct, frozen=True):
    """What became of a `Take`: `got` are those of its jobs that are ours now, under the tokens offered."""

    peer: NodeRef
    jobs: tuple[Offered, ...]
    got: tuple[Offered, ...]


Command = Join | Leave | UpdateLoad | UpdateMeta | Seek | Took


class MemberView(Struct, frozen=True):
    """A member as we see it, for doors and for whoever chooses targets."""

    record: Record
    meta: Meta | None
    load: Load | None  # age_ms as of the question
    since_ns: int  # when its standing was last changed here
    answered: bool  # it has answered us directly in this run
    rtt_ns: int | None
    # Living, has answered us, and says for a second that it is ready: it has its place in the ring. A target
    # of stealing it is only while Alive.
    eligible: bool = False


class Core(Protocol):
    """Obligations: never raises on any bytes; never blocks; draws chance only from the generator it was
    given; the same seed and the same inputs give the same effects on every Python."""

    def on_packet(self, src: Address, data: bytes, now: int) -> list[Effect]: ...
    def on_call(self, call: int, src: Address, frame: bytes, now: int) -> list[Effect]: ...
    def on_reply(self, call: int, frame: bytes | None, now: int) -> list[Effect]: ...
    def on_timer(self, timer: Timer, now: int) -> list[Effect]: ...
    def on_resolved(self, addresses: dict[str, list[Address]], now: int) -> list[Effect]: ...
    def on_send_failed(self, to: Address, now: int) -> list[Effect]: ...
    def on_stall(self, late_ns: int, now: int) -> list[Effect]: ...
    def command(self, command: Command, now: int) -> list[Effect]: ...
    def members(self, now: int) -> list[MemberView]: ...
    def counters(self) -> dict[str, int]: ...
    @property
    def me(self) -> NodeRef: ...
