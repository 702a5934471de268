"""What is written can be read, and whatever else comes in is refused in words and at no cost."""

from __future__ import annotations

import random
import tracemalloc
from ipaddress import IPv4Address, IPv6Address

import msgspec
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fluxmesh.mesh import wire
from fluxmesh.mesh.messages import (
    OFFERED_MAX,
    PROTOCOL,
    TASKS_MAX,
    Ack,
    AckRelay,
    Compare,
    Digest,
    Digests,
    Exchange,
    Frame,
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
from fluxmesh.mesh.timing import DATAGRAM_MAX_BYTES, FRAME_MAX_BYTES, META_MAX_BYTES, SEAL_BYTES

BUDGET = DATAGRAM_MAX_BYTES - SEAL_BYTES
REASONS = {
    wire.TOO_LARGE,
    wire.MALFORMED,
    wire.VERSION,
    wire.OUT_OF_BOUNDS,
    wire.BAD_NAME,
    wire.BAD_META,
    "not an IP address",
    "unspecified address",
    "multicast address",
    "IPv4 address in the form of IPv6",
    "address with a scope, which means nothing elsewhere",
    "address not in its canonical form",
}

counts = st.integers(0, (1 << 63) - 1)
amounts = st.integers(0, 1_000_000_000)
letters = st.characters(categories=["L", "N", "P", "S"], exclude_characters="{}:")  # all can be printed
names = st.text(letters, min_size=1, max_size=50)
hosts = st.one_of(
    st.integers(1 << 24, (224 << 24) - 1).map(lambda number: str(IPv4Address(number))),
    st.integers(1 << 64, (0xFF << 120) - 1).map(lambda number: str(IPv6Address(number))),
)
ports = st.integers(1_024, 65_534)
nodes = st.builds(NodeRef, names, counts)
records = st.builds(
    Record,
    names,
    counts,
    counts,
    st.integers(0, 3),
    hosts,
    ports,
    st.integers(0, (1 << 64) - 1),
    st.one_of(st.just(""), names),
)
loads = st.builds(
    Load,
    names,
    counts,
    counts,
    amounts,
    amounts,
    st.integers(0, 10_000),
    amounts,
    st.integers(0, 3),
    amounts,
    st.integers(0, 255),
    amounts,
)
metas = st.builds(
    Meta,
    st.lists(st.text(letters, min_size=1, max_size=10), max_size=5).map(tuple),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
    st.integers(0, 10_000),
    st.booleans(),
    st.integers(1, 1_000),
    st.floats(0, 1),
    st.just("0.1.0"),
)
about = st.one_of(st.none(), records)
messages = st.one_of(
    st.builds(Ping, counts, nodes, about),
    st.builds(Ack, counts),
    st.builds(PingReq, counts, nodes, hosts, ports, amounts),
    st.builds(AckRelay, counts, nodes),
    st.builds(Nack, counts),
    st.just(Gossip()),
)
tables = st.lists(metas, max_size=3)
offered = st.lists(
    st.builds(Offered, st.uuids().map(str), counts), max_size=5, unique_by=lambda job: job.id
).map(tuple)
bodies = st.one_of(
    st.builds(Compare, st.integers(0, (1 << 64) - 1), counts),
    st.just(Same()),
    st.builds(Digests, st.lists(st.builds(Digest, names, counts, counts, st.integers(0, 3)), max_size=4)),
    st.builds(Exchange, st.lists(records, max_size=3), st.lists(names, max_size=3), tables),
    st.builds(Records, st.lists(records, max_size=3), tables),
    st.builds(MetaGet, nodes),
    st.builds(MetaIs, nodes, metas),
    st.builds(TcpPing, nodes, about),
    st.builds(TcpAck, nodes),
    st.builds(Refused, st.text(letters, max_size=200)),
    st.builds(
        Steal,
        st.integers(1, 1_000),
        st.lists(names, max_size=3).map(tuple),
        st.lists(st.integers(0, 3), max_size=4).map(tuple),
        st.lists(st.integers(0, (1 << 64) - 1), max_size=5).map(tuple),
    ),
    st.builds(Offer, offered, amounts),
    st.builds(Nothing, st.text(letters, max_size=200), amounts, amounts),
    st.builds(Taken, offered),
    st.just(Noted()),
)
frames = st.builds(StreamFrame, st.just(PROTOCOL), nodes, counts, counts, bodies)
heads = st.builds(Packet, st.just(PROTOCOL), nodes, counts, messages)


def a_record(name: str = "worker-1", **fields: object) -> Record:
    plain = Record(name, 7, 3, 1, "10.0.0.7", 7946, 0xFEDC_BA98_7654_3210, "worker-2")
    return msgspec.structs.replace(plain, **fields)


def a_load(number: int = 1) -> Load:
    return Load(f"worker-{number}", 7, 1_234, 10, 8, 8, 6, 1, 250, 9, 40)


def a_head(message: object = Ack(5)) -> Packet:
    return Packet(PROTOCOL, NodeRef("worker-1", 7), 3, message)  # type: ignore[arg-type]


def raw(*items: object) -> bytes:
    return msgspec.msgpack.encode(items)


# --- round trips ----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(heads, st.lists(records, max_size=30), st.lists(loads, max_size=9))
def test_what_fits_of_a_packet_comes_back_as_it_was(
    head: Packet, news: list[Record], some: list[Load]
) -> None:
    data, told, carried = wire.encode_packet(head, news, some, BUDGET)
    assert wire.decode_packet(data) == msgspec.structs.replace(head, news=news[:told], loads=some[:carried])
    assert len(data) <= BUDGET or (told, carried) == (0, 0)


@settings(max_examples=100, deadline=None)
@given(frames)
def test_a_frame_comes_back_as_it_was(frame: StreamFrame) -> None:
    assert wire.decode_frame(wire.encode_frame(frame)) == frame


def test_a_packet_is_as_msgspec_itself_would_write_it() -> None:
    for many in (0, 1, 15, 16, 40):
        news, some = [a_record(f"n{number}") for number in range(many)], [a_load(n) for n in range(many)]
        data, told, carried = wire.encode_packet(a_head(), news, some, 100_000)
        assert (told, carried) == (many, many)
        assert data == msgspec.msgpack.encode(msgspec.structs.replace(a_head(), news=news, loads=some))


def test_the_largest_head_leaves_a_datagram_in_its_budget() -> None:
    name = "€" * 66 + "ab"  # 200 bytes
    host = ":".join(["abcd"] * 8)
    top = (1 << 63) - 1
    record = Record(name, top, top, 3, host, 65_534, (1 << 64) - 1, name)
    for message in (
        Ping(top, NodeRef(name, top), record),
        PingReq(top, NodeRef(name, top), host, 65_534, 10**9),
    ):
        data, _, _ = wire.encode_packet(Packet(PROTOCOL, NodeRef(name, top), top, message), [], [], BUDGET)
        assert len(data) <= BUDGET
        assert isinstance(wire.decode_packet(data), Packet)


# --- packing --------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(records, max_size=20), st.lists(loads, max_size=20), st.integers(60, 2_000))
def test_a_packet_is_filled_from_the_start_and_never_beyond_its_budget(
    news: list[Record], some: list[Load], budget: int
) -> None:
    data, told, carried = wire.encode_packet(a_head(), news, some, budget)
    assert len(data) <= budget
    if told < len(news):  # the next one was too much
        one_more = msgspec.structs.replace(a_head(), news=news[: told + 1], loads=some[: min(carried, 1)])
        assert len(msgspec.msgpack.encode(one_more)) > budget
    if told == len(news) and 0 < carried < len(some):
        one_more = msgspec.structs.replace(a_head(), news=news, loads=some[: carried + 1])
        assert len(msgspec.msgpack.encode(one_more)) > budget


def test_every_budget_is_used_up_and_none_is_passed() -> None:
    def a_packet(told: int, carried: int) -> bytes:
        whole = msgspec.structs.replace(a_head(), news=news[:told], loads=some[:carried])
        return msgspec.msgpack.encode(whole)

    for accuser, news_many, loads_many in (("", 40, 9), ("worker-2", 40, 9), ("", 3, 60), ("", 0, 60)):
        news = [a_record("w" * (1 + number % 5), accuser=accuser) for number in range(news_many)]
        some = [a_load(10 ** (number % 4)) for number in range(loads_many)]
        for budget in range(len(a_packet(0, 1)), 1_400):
            data, told, carried = wire.encode_packet(a_head(), news, some, budget)
            assert data == a_packet(told, carried)
            assert len(data) <= budget
            if told < len(news):
                assert len(a_packet(told + 1, 1)) > budget
            elif carried < len(some):
                assert len(a_packet(told, carried + 1)) > budget


def test_the_own_load_has_its_place_before_any_news() -> None:
    news = [a_record(f"n{number}") for number in range(100)]
    data, told, carried = wire.encode_packet(a_head(), news, [a_load(1), a_load(10**40)], BUDGET)
    packet = wire.decode_packet(data)
    assert isinstance(packet, Packet)
    assert 0 < told < 100
    assert carried == 1
    assert packet.loads == [a_load(1)]


def test_d22_more_than_255_pieces_of_news_wrap_no_count() -> None:
    news = [a_record(f"n{number}") for number in range(600)]
    lost = list(news)
    packets = 0
    while lost:
        data, told, _ = wire.encode_packet(a_head(Gossip()), lost, [], 60_000)
        whole = msgspec.msgpack.decode(data, type=Packet)
        assert whole.news == lost[:told]
        assert 0 < told <= 255
        del lost[:told]
        packets += 1
    assert packets == 3


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"worker_id": ""}, wire.OUT_OF_BOUNDS),
        ({"worker_id": "x" * 201}, wire.OUT_OF_BOUNDS),
        ({"worker_id": "€" * 67}, wire.BAD_NAME),
        ({"worker_id": "a\nb"}, wire.BAD_NAME),
        ({"worker_id": "a{b"}, wire.BAD_NAME),
        ({"accuser": "a\x00b"}, wire.BAD_NAME),
        ({"accuser": "x" * 201}, wire.OUT_OF_BOUNDS),
        ({"epoch": -1}, wire.OUT_OF_BOUNDS),
        ({"epoch": 1 << 63}, wire.OUT_OF_BOUNDS),
        ({"incarnation": -1}, wire.OUT_OF_BOUNDS),
        ({"incarnation": 1 << 63}, wire.OUT_OF_BOUNDS),
        ({"standing": 4}, wire.OUT_OF_BOUNDS),
        ({"standing": -1}, wire.OUT_OF_BOUNDS),
        ({"standing": True}, wire.OUT_OF_BOUNDS),
        ({"port": 80}, wire.OUT_OF_BOUNDS),
        ({"port": 65_535}, wire.OUT_OF_BOUNDS),  # its streams would be at 65,536
        ({"meta_hash": -1}, wire.OUT_OF_BOUNDS),
        ({"host": "0.0.0.0"}, "unspecified address"),
        ({"host": "::"}, "unspecified address"),
        ({"host": "224.0.0.1"}, "multicast address"),
        ({"host": "ff02::1"}, "multicast address"),
        ({"host": "255.255.255.255"}, "multicast address"),
        ({"host": "::ffff:10.0.0.7"}, "IPv4 address in the form of IPv6"),
        ({"host": "0:0:0:0:0:0:0:1"}, "address not in its canonical form"),
        ({"host": "fe80::1%eth0"}, "address with a scope, which means nothing elsewhere"),
        ({"host": "example.org"}, "not an IP address"),
        ({"host": "010.0.0.7"}, "not an IP address"),
        ({"host": "1"}, wire.OUT_OF_BOUNDS),
    ],
)
def test_d02_a_record_that_nobody_can_be_is_refused_wherever_it_stands(
    fields: dict[str, object], reason: str
) -> None:
    bad = a_record(**fields)
    sender = NodeRef("worker-1", 7)
    packets = [
        Packet(PROTOCOL, sender, 3, Gossip(), [a_record(), bad]),
        Packet(PROTOCOL, sender, 3, Ping(1, sender, bad)),
    ]
    bodies = [Exchange([bad], []), Records([bad]), TcpPing(sender, bad)]
    assert [wire.decode_packet(msgspec.msgpack.encode(one)) for one in packets] == [reason] * 2
    answers = [
        wire.decode_frame(wire.encode_frame(StreamFrame(PROTOCOL, sender, 3, 1, one))) for one in bodies
    ]
    assert answers == [reason] * 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"worker_id": "a:b"}, wire.BAD_NAME),
        ({"age_ms": -1}, wire.OUT_OF_BOUNDS),
        ({"capacity": 10_001}, wire.OUT_OF_BOUNDS),
        ({"counter": -1}, wire.OUT_OF_BOUNDS),
        ({"best_tier": 4}, wire.OUT_OF_BOUNDS),
        ({"flags": 256}, wire.OUT_OF_BOUNDS),
    ],
)
def test_a_load_out_of_bounds_is_refused(changes: dict[str, object], reason: str) -> None:
    bad = msgspec.structs.replace(a_load(), **changes)
    packet = Packet(PROTOCOL, NodeRef("worker-1", 7), 3, Gossip(), [], [a_load(), bad])
    assert wire.decode_packet(msgspec.msgpack.encode(packet)) == reason


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        (Meta(("a:b",), (2,), 8), wire.BAD_META),
        (Meta(("x" * 201,), (2,), 8), wire.OUT_OF_BOUNDS),
        (Meta(("q",), (4,), 8), wire.OUT_OF_BOUNDS),
        (Meta(("q",), (2,), 10_001), wire.OUT_OF_BOUNDS),
        (Meta(("q",), (2,), 8, True, 1_000_000), wire.OUT_OF_BOUNDS),
        (Meta(("q",), (2,), 8, True, 0), wire.OUT_OF_BOUNDS),
        (Meta(("q",), (2,), 8, True, 150, float("nan")), wire.OUT_OF_BOUNDS),
        (Meta(("q",), (2,), 8, True, 150, 1.5), wire.OUT_OF_BOUNDS),
        (Meta(("q" * 180, "r" * 180, "s" * 180), (2,), 8), wire.BAD_META),
    ],
)
def test_particulars_out_of_bounds_are_refused(meta: Meta, reason: str) -> None:
    node = NodeRef("worker-1", 7)
    for body in (MetaIs(node, meta), Records([], [meta]), Exchange([], [], [meta])):
        assert wire.decode_frame(wire.encode_frame(StreamFrame(PROTOCOL, node, 0, 1, body))) == reason


ID = "0190f3a4-7c1d-7c55-8a10-0123456789ab"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (Offer((Offered(ID, 1), Offered(ID, 2))), wire.BAD_JOBS),
        (Taken((Offered(ID, 1), Offered(ID, 1))), wire.BAD_JOBS),
        (Offer((Offered(ID[:-1], 1),)), wire.OUT_OF_BOUNDS),
        (Offer((Offered(ID[:-1] + "\n", 1),)), wire.BAD_NAME),
        (Taken((Offered(ID[:-1] + "é", 1),)), wire.BAD_NAME),
        (Taken((Offered(ID, -1),)), wire.OUT_OF_BOUNDS),
        (Offer(tuple(Offered(f"{n:036}", 1) for n in range(OFFERED_MAX + 1))), wire.OUT_OF_BOUNDS),
        (Steal(0, ("q",), (0,), ()), wire.OUT_OF_BOUNDS),
        (Steal(OFFERED_MAX + 1, ("q",), (0,), ()), wire.OUT_OF_BOUNDS),
        (Steal(1, ("a:b",), (0,), ()), wire.BAD_NAME),
        (Steal(1, ("q",) * 129, (0,), ()), wire.OUT_OF_BOUNDS),
        (Steal(1, ("q",), (4,), ()), wire.OUT_OF_BOUNDS),
        (Steal(1, ("q",), (0,), tuple(range(TASKS_MAX + 1))), wire.OUT_OF_BOUNDS),
        (Nothing("a\nb"), wire.BAD_NAME),
        (Nothing("", -1), wire.OUT_OF_BOUNDS),
    ],
)
def test_what_moves_work_is_held_to_its_bounds(body: Frame, reason: str) -> None:
    frame = StreamFrame(PROTOCOL, NodeRef("worker-1", 7), 3, 1, body)
    assert wire.decode_frame(wire.encode_frame(frame)) == reason


def test_the_largest_request_and_the_largest_offer_are_within_a_frame() -> None:
    queues = tuple(f"{number:0200}" for number in range(128))
    tasks = tuple((1 << 64) - 1 - number for number in range(TASKS_MAX))
    jobs = tuple(Offered(f"{number:036}", (1 << 63) - 1) for number in range(OFFERED_MAX))
    for body in (Steal(OFFERED_MAX, queues, (0, 1, 2, 3), tasks), Offer(jobs, 1_000_000_000), Taken(jobs)):
        frame = StreamFrame(PROTOCOL, NodeRef("w" * 200, 1), 0, 1, body)
        assert wire.decode_frame(wire.encode_frame(frame)) == frame


def test_particulars_of_many_queues_are_told_to_be_too_large_before_they_are_sent() -> None:
    assert wire.meta_refusal(Meta(("default",), (0, 1, 2, 3), 8)) == ""
    many = Meta(tuple(f"a-queue-of-mine-{number}" for number in range(60)), (2,), 8)
    assert f"of which {META_MAX_BYTES} are allowed" in wire.meta_refusal(many)


@pytest.mark.parametrize("version", [0, 2, 127])
def test_another_version_is_a_reason_of_its_own_whatever_follows_it(version: int) -> None:
    node = ("worker-1", 7)
    for data in (raw(version, node, 3, (2, 5)), raw(version, "anything", {}), raw(version)):
        assert wire.decode_packet(data) == wire.VERSION
        assert wire.decode_frame(data) == wire.VERSION


@pytest.mark.parametrize(
    "data", [b"", b"\x91", b"\x01", b"\xc0\xc0", b"\xdc\x00\x06\x01", b"{}", b"\x96\xff"]
)
def test_what_is_no_array_with_a_version_is_malformed(data: bytes) -> None:
    assert wire.decode_packet(data) == wire.MALFORMED
    assert wire.decode_frame(data) == wire.MALFORMED


def test_what_is_too_large_is_not_looked_at() -> None:
    assert wire.decode_packet(bytes(DATAGRAM_MAX_BYTES + 1)) == wire.TOO_LARGE
    assert wire.decode_frame(bytes(FRAME_MAX_BYTES + 1)) == wire.TOO_LARGE


def test_an_unknown_message_is_refused() -> None:
    node = ("worker-1", 7)
    assert wire.decode_packet(raw(PROTOCOL, node, 3, (99, 5))) == wire.OUT_OF_BOUNDS
    assert wire.decode_frame(raw(PROTOCOL, node, 3, 1, (99, 5))) == wire.OUT_OF_BOUNDS


# --- hostile bytes --------------------------------------------------------------------------------------


def is_an_answer(data: bytes) -> None:
    for value, kind in ((wire.decode_packet(data), Packet), (wire.decode_frame(data), StreamFrame)):
        assert isinstance(value, kind) or value in REASONS


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=DATAGRAM_MAX_BYTES))
@example(b"\x94\x01" + b"\x91" * 1_000)
def test_any_bytes_are_answered(data: bytes) -> None:
    is_an_answer(data)
    is_an_answer(bytes((0x96, PROTOCOL)) + data)


@settings(max_examples=150, deadline=None)
@given(heads, st.lists(records, max_size=6), st.lists(loads, max_size=3), st.data())
def test_a_packet_cut_short_or_with_bits_turned_is_answered(
    head: Packet, news: list[Record], some: list[Load], data: st.DataObject
) -> None:
    whole, _, _ = wire.encode_packet(head, news, some, BUDGET)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert wire.decode_packet(whole[:cut]) in REASONS
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    turned = bytearray(whole)
    turned[bit // 8] ^= 1 << bit % 8
    is_an_answer(bytes(turned))


@settings(max_examples=100, deadline=None)
@given(frames, st.data())
def test_a_frame_cut_short_or_with_bits_turned_is_answered(frame: StreamFrame, data: st.DataObject) -> None:
    whole = wire.encode_frame(frame)
    assert wire.decode_frame(whole[: data.draw(st.integers(0, len(whole) - 1))]) in REASONS
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    turned = bytearray(whole)
    turned[bit // 8] ^= 1 << bit % 8
    is_an_answer(bytes(turned))


def test_twenty_thousand_random_datagrams_are_answered() -> None:
    rng = random.Random(5)
    whole, _, _ = wire.encode_packet(a_head(), [a_record(f"n{n}") for n in range(9)], [a_load()], BUDGET)
    for _ in range(20_000):
        junk = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            junk[rng.randrange(len(junk))] = rng.randrange(256)
        is_an_answer(bytes(junk))


HEAD = raw(PROTOCOL, ("worker-1", 7), 3, (6,))[1:]
FRAME_HEAD = raw(PROTOCOL, ("worker-1", 7), 3, 1)[1:]


@pytest.mark.parametrize(
    "data",
    [
        b"\x96" + HEAD + b"\xdd\xff\xff\xff\xff",  # four thousand million pieces of news
        b"\x96" + HEAD + b"\xdd\x00\xff\xff\xff" + raw("w", 1, 1, 0, "10.0.0.1", 7946, 0),
        b"\x95" + FRAME_HEAD + b"\x92\x03\xdd\x7f\xff\xff\xff",  # digests
        b"\x95" + FRAME_HEAD + b"\x92\x03\xdc\x4e\x20",  # as many as may be, and none there
        b"\x95" + FRAME_HEAD + b"\x94\x04\x90\x90\xdf\xff\xff\xff\xff",  # a table of particulars
        b"\x95" + FRAME_HEAD + b"\x93\x07\x92\xa1w\x01\x93\xdd\xff\xff\xff\xff",  # queues
        b"\x94" + b"\x01\x92\xdb\xff\xff\xff\xff",  # a name
        b"\x97" + HEAD + b"\x90\x90\xdd\xff\xff\xff\xff",  # behind everything that is known
        b"\x97" + HEAD + b"\x90\x90\xc6\xff\xff\xff\xff",
        b"\x97" + HEAD + b"\x90\x90" + b"\x91" * 1_000,  # a bomb of nesting
        b"\x97" + HEAD + b"\x90\x90" + b"\x81" * 1_000,
        b"\x95" + FRAME_HEAD + b"\x91" * 500_000,
        b"\x95" + FRAME_HEAD + b"\xdd\x00\x00\x00\x02" * 200_000,
    ],
)
def test_d21_lying_lengths_and_bombs_cost_no_memory(data: bytes) -> None:
    is_an_answer(data)  # caches are filled
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        is_an_answer(data)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 16_384


# --- particulars ----------------------------------------------------------------------------------------


def test_the_hash_of_particulars_is_that_of_their_bytes() -> None:
    meta = Meta(("default", "mail"), (0, 1, 2, 3), 8)
    assert wire.meta_hash(meta) == xxhash.xxh3_64_intdigest(wire.encode_meta(meta))
    assert 0 <= wire.meta_hash(meta) < 1 << 64
    assert wire.meta_hash(meta) != wire.meta_hash(msgspec.structs.replace(meta, capacity=9))


@settings(max_examples=100, deadline=None)
@given(metas)
def test_particulars_that_travelled_have_the_same_hash(meta: Meta) -> None:
    frame = StreamFrame(PROTOCOL, NodeRef("w", 1), 0, 1, MetaIs(NodeRef("w", 1), meta))
    again = wire.decode_frame(wire.encode_frame(frame))
    assert isinstance(again, StreamFrame)
    assert isinstance(again.body, MetaIs)
    assert wire.meta_hash(again.body.meta) == wire.meta_hash(meta)
