"""Whatever is said to it in whatever order, the core raises nothing and keeps its promises."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxmesh.mesh import wire
from fluxmesh.mesh.donating import OFFERS_MAX
from fluxmesh.mesh.effects import (
    Arm,
    Call,
    Command,
    Effect,
    Leave,
    Reply,
    Seek,
    Send,
    Take,
    Took,
    UpdateLoad,
    UpdateMeta,
)
from fluxmesh.mesh.messages import (
    PROTOCOL,
    Ack,
    AckRelay,
    Address,
    Compare,
    Digest,
    Digests,
    Exchange,
    Gossip,
    Load,
    Meta,
    MetaGet,
    MetaIs,
    Nack,
    NodeRef,
    Noted,
    Nothing,
    Offer,
    Offered,
    Packet,
    Ping,
    PingReq,
    Record,
    Records,
    Refused,
    Same,
    Steal,
    StreamFrame,
    Taken,
    TcpAck,
    TcpPing,
)
from fluxmesh.mesh.stealing import PEERS_MAX
from fluxmesh.mesh.timing import MS, S
from fluxmesh.mesh.voice import CALLS_MAX
from tests.unit.mesh.driving import BUDGET, HASH, META, Bench, address_of, of

# A small world, so that what is said fits together often enough to have consequences.
IDS = [f"{number:036}" for number in range(6)]
names = st.sampled_from(["me", "peer-1", "peer-2", "peer-3", "peer-4", "x"])
epochs = st.integers(0, 6)
nodes = st.builds(NodeRef, names, epochs)
addresses = st.builds(address_of, st.integers(0, 5))
hashes = st.sampled_from([HASH, 7])
metas = st.sampled_from([META, Meta(("other",), (0,), 1)])
seqs = st.one_of(st.integers(0, 9), st.integers(0, (1 << 63) - 1))
incarnations = st.one_of(st.integers(0, 3), st.just((1 << 63) - 1))
records = st.builds(
    lambda name, epoch, incarnation, standing, where, digest, accuser: Record(
        name, epoch, incarnation, standing, where.host, where.port, digest, accuser
    ),
    names,
    epochs,
    incarnations,
    st.integers(0, 3),
    addresses,
    hashes,
    st.one_of(st.just(""), names),
)
loads = st.builds(
    Load,
    names,
    epochs,
    st.integers(0, 5),
    stealable=st.integers(0, 30),
    flags=st.integers(0, 15),
    age_ms=st.integers(0, 9_000),
)
digests = st.builds(Digest, names, epochs, incarnations, st.integers(0, 3))
offered = st.lists(st.builds(Offered, st.sampled_from(IDS), st.integers(0, 3)), max_size=4).map(tuple)
messages = st.one_of(
    st.builds(Ping, seqs, nodes, st.one_of(st.none(), records)),
    st.builds(Ack, seqs),
    st.builds(
        lambda seq, target, where, window: PingReq(seq, target, where.host, where.port, window),
        seqs,
        nodes,
        addresses,
        st.integers(0, 100_000),
    ),
    st.builds(AckRelay, seqs, nodes),
    st.builds(Nack, seqs),
    st.just(Gossip()),
)
bodies = st.one_of(
    st.builds(Compare, st.integers(0, 9), st.integers(0, 9)),
    st.just(Same()),
    st.builds(Digests, st.lists(digests, max_size=6)),
    st.builds(
        Exchange,
        st.lists(records, max_size=6),
        st.lists(names, max_size=6),
        st.lists(metas, max_size=2),
    ),
    st.builds(Records, st.lists(records, max_size=6), st.lists(metas, max_size=2)),
    st.builds(MetaGet, nodes),
    st.builds(MetaIs, nodes, metas),
    st.builds(TcpPing, nodes, st.one_of(st.none(), records)),
    st.builds(TcpAck, nodes),
    st.just(Refused("no")),
    st.builds(
        Steal,
        st.integers(1, 9),
        st.sampled_from([(), ("default",), ("other",)]),
        st.sampled_from([(), (0, 1, 2, 3)]),
        st.sampled_from([(), (1, 2)]),
    ),
    st.builds(Offer, offered, st.integers(0, 20)),
    st.builds(Nothing, st.just("no"), st.integers(0, 5_000), st.integers(0, 20)),
    st.builds(Taken, offered),
    st.just(Noted()),
)
packets = st.builds(
    Packet,
    st.just(PROTOCOL),
    nodes,
    incarnations,
    messages,
    st.lists(records, max_size=5),
    st.lists(loads, max_size=4),
)
commands = st.one_of(
    st.builds(UpdateMeta, metas),
    st.builds(UpdateLoad, loads),
    st.builds(Seek, st.integers(0, 9)),
    st.builds(Seek, st.integers(1, 9)),
    st.builds(Took, nodes, offered, offered),
    st.just(Leave()),
)
steps = st.one_of(
    st.tuples(st.just("packet"), packets, addresses),
    st.tuples(st.just("ask"), nodes, bodies),
    st.tuples(st.just("answer"), nodes, st.one_of(st.none(), bodies)),
    st.tuples(st.just("timer"), st.integers(0, 50), st.none()),
    st.tuples(st.just("timer"), st.integers(0, 50), st.none()),
    st.tuples(st.just("stall"), st.integers(1, 60), st.none()),
    st.tuples(st.just("failed"), addresses, st.none()),
    st.tuples(st.just("resolved"), st.lists(addresses, max_size=4), st.none()),
)


class Full:
    """A shelf that never empties."""

    def offer(self, wish: Steal, most: int, thief: NodeRef) -> Offer:
        return Offer(tuple(Offered(one, 1) for one in IDS[:most]), len(IDS) - min(most, len(IDS)))

    def taken(self, jobs: Sequence[Offered], thief: NodeRef) -> int:
        return len(jobs)


def a_step(bench: Bench, calls: list[Call], step: tuple[str, object, object]) -> list[Effect]:
    core, now = bench.core, bench.now
    match step:
        case ("packet", Packet() as packet, Address() as src):
            return core.on_packet(src, msgspec.msgpack.encode(packet), now)
        case ("ask", NodeRef() as sender, body):
            frame = StreamFrame(PROTOCOL, sender, 0, 1, body)  # type: ignore[arg-type]
            return core.on_call(1, address_of(1), wire.encode_frame(frame), now)
        case ("answer", NodeRef() as sender, body):
            if not calls:
                return []
            call = calls.pop(0)
            return bench.answer(call, sender, body)  # type: ignore[arg-type]
        case ("timer", int(index), _):
            if not bench.timers:
                return []
            due = sorted(bench.timers)
            return bench.fire(due[index % len(due)])
        case ("stall", int(seconds), _):
            bench.now += seconds * S
            return core.on_stall(seconds * S, bench.now)
        case ("failed", Address() as to, _):
            return core.on_send_failed(to, now)
        case ("resolved", list() as found, _):
            return core.on_resolved({"s": found}, now)
        case _:
            raise AssertionError(step)


@settings(max_examples=150)
@given(
    st.lists(steps, max_size=50),
    st.lists(st.tuples(st.integers(0, 50), commands), max_size=6),
    st.integers(0, 99),
)
def test_anything_may_come(
    course: list[tuple[str, object, object]],
    ordered: list[tuple[int, Command]],
    seed: int,
) -> None:
    bench = Bench(3, seed=seed, seeds=("s",), shelf=Full())
    calls = of(bench.first, Call)
    held: dict[str, tuple[int, int, int]] = {}
    incarnation = 0
    for index, step in enumerate(course):
        bench.now += MS
        effects = bench.do(a_step(bench, calls, step))
        for when, command in ordered:
            if when == index:
                effects += bench.do(bench.core.command(command, bench.now))
        calls += of(effects, Call)
        assert len(bench.core.voice.calls) <= CALLS_MAX
        assert all(len(sent.data) <= BUDGET for sent in of(effects, Send))
        assert all(isinstance(wire.decode_packet(sent.data), Packet) for sent in of(effects, Send))
        assert all(arm.at_ns >= bench.now for arm in of(effects, Arm))
        assert len(of(effects, Reply)) == (step[0] == "ask")
        assert bench.core.thief.remembered <= PEERS_MAX
        assert bench.core.donor.remembered <= OFFERS_MAX
        for take in of(effects, Take):
            assert 0 < len({job.id for job in take.jobs}) == len(take.jobs) <= 4
        assert bench.core.record.incarnation >= incarnation
        incarnation = bench.core.record.incarnation
        seen = set()
        for view in bench.core.members(bench.now):
            record = view.record
            assert record.worker_id not in seen
            seen.add(record.worker_id)
            state = (record.epoch, record.incarnation, record.standing)
            assert record.worker_id == "me" or held.get(record.worker_id, state) <= state
            held[record.worker_id] = state
