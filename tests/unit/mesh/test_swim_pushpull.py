"""Two tables become equal; hashes become particulars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxmesh.mesh.effects import Call, Reply, UpdateMeta
from fluxmesh.mesh.messages import (
    METAS_MAX,
    PROTOCOL,
    Compare,
    Digest,
    Digests,
    Exchange,
    Meta,
    MetaGet,
    MetaIs,
    NodeRef,
    Record,
    Records,
    Refused,
    Same,
    Standing,
    StreamFrame,
    TcpAck,
    TcpPing,
)
from fluxmesh.mesh.particulars import TRIES_MAX
from fluxmesh.mesh.pushpull import hash_of
from fluxmesh.mesh.timing import FRAME_MAX_BYTES, S
from fluxmesh.mesh.voice import CALLS_MAX
from fluxmesh.mesh.wire import encode_frame, meta_hash
from tests.unit.mesh.driving import (
    HASH,
    ME,
    META,
    Bench,
    a_record,
    about_me,
    address_of,
    frame_of,
    of,
    packets,
    told,
)

OTHER_META = Meta(("emails",), (2,), 4)


def digest(record: Record) -> Digest:
    return Digest(record.worker_id, record.epoch, record.incarnation, record.standing)


def compared_with(bench: Bench, theirs: list[Record]) -> Exchange:
    """What the core asks of peer 1, whose table is `theirs`, in the second step."""
    bench.core.pushpull.start(address_of(1), why="regular")
    (call,) = of(bench.do(bench.core.voice.take()), Call)
    digests = Digests([digest(record) for record in theirs])
    (exchange,) = of(bench.answer(call, NodeRef("peer-1", 1), digests), Call)
    body = frame_of(exchange)
    assert isinstance(body, Exchange)
    return body


def test_a_random_peer_is_asked_every_30_seconds() -> None:
    bench = Bench(5)
    effects = bench.fire(("push_pull", 0))
    (call,) = of(effects, Call)
    assert call.to in {address_of(n) for n in range(1, 6)}
    assert frame_of(call) == Compare(hash_of(bench.core.pushpull.digests()), 6)
    assert bench.timers["push_pull", 0] == bench.now + 30 * S


def test_the_hash_does_not_depend_on_the_order_of_rows() -> None:
    digests = [digest(a_record(n)) for n in range(9)]
    assert hash_of(digests) == hash_of(digests[::-1])
    assert hash_of(digests) != hash_of(digests[1:])
    assert hash_of(digests) != hash_of([digest(a_record(0, incarnation=1)), *digests[1:]])


def test_equal_tables_say_so_and_others_show_what_they_hold() -> None:
    bench = Bench(2)
    mine = bench.core.pushpull.digests()
    assert bench.ask(1, Compare(hash_of(mine), 3)) == Same()
    answer = bench.ask(1, Compare(hash_of(mine[1:]), 2))
    assert isinstance(answer, Digests)
    assert answer.digests == mine


def test_only_what_differs_is_told_and_wanted() -> None:
    bench = Bench(4)
    bench.hear(1, news=[a_record(2, incarnation=5)])
    theirs = [
        a_record(1),  # the same
        a_record(2),  # ours is newer
        a_record(3, incarnation=9),  # theirs is newer
        a_record(8),  # unknown here
    ]
    body = compared_with(bench, theirs)
    assert sorted(record.worker_id for record in body.records) == ["me", "peer-2", "peer-4"]
    assert body.want == ["peer-3", "peer-8"]
    assert body.metas == [META]  # once, however many have it


def test_the_dead_are_told_to_whoever_lists_them_as_living_and_to_nobody_else() -> None:
    bench = Bench(3)
    dead, gone = a_record(2, standing=Standing.DEAD), a_record(3, standing=Standing.LEFT)
    bench.hear(1, news=[dead, gone])
    assert {d.worker_id for d in bench.core.pushpull.digests()} == {"me", "peer-1"}
    body = compared_with(bench, [about_me(Standing.ALIVE), a_record(1), a_record(2)])
    assert body.records == [dead]
    answer = bench.ask(1, Exchange([a_record(3)], []))
    assert isinstance(answer, Records)
    assert answer.records == [gone]


def test_d10_a_death_that_comes_by_push_pull_is_a_suspicion() -> None:
    bench = Bench(9)
    dead = a_record(2, standing=Standing.DEAD, accuser="peer-4")
    bench.ask(1, Exchange([dead], []))
    assert told(bench.asked)[0] == ("suspected", "peer-2")
    assert bench.timers[bench.suspicion_timer(2)] == bench.now + 12 * S
    assert bench.core.table.rows["peer-2"].record.accuser == "peer-4"


@pytest.mark.parametrize("standing", [Standing.DEAD, Standing.LEFT])
def test_tombstones_are_not_handed_on_by_push_pull(standing: Standing) -> None:
    bench = Bench(2)
    bench.ask(1, Exchange([a_record(9, standing=standing)], []))
    assert "peer-9" not in bench.core.table.rows


def test_a_push_pull_that_calls_us_dead_is_answered_with_our_refutation() -> None:
    bench = Bench(2)
    answer = bench.ask(1, Exchange([about_me(Standing.DEAD, 3)], []))
    assert isinstance(answer, Records)
    assert answer.records == [bench.core.record]
    assert bench.core.record.incarnation == 4


def test_a_fleet_too_large_for_a_frame_is_compared_in_parts() -> None:
    bench = Bench(1)
    long_name = "x" * 190
    for number in range(6_000):
        where = address_of(number)
        record = Record(f"{long_name}{number}", 1, 0, 0, where.host, where.port, HASH)
        bench.core.table.put(record, bench.now)
    parts = []
    for _ in range(2):
        answer = bench.ask(1, Compare(0, 0))
        assert isinstance(answer, Digests)
        assert 1_000 < len(answer.digests) < 6_000
        parts.append(answer.digests)
        assert len(encode_frame_of(answer)) <= FRAME_MAX_BYTES
    assert parts[0] != parts[1]
    body = compared_with(bench, [])
    assert len(encode_frame_of(body)) <= FRAME_MAX_BYTES


def encode_frame_of(body: Digests | Exchange) -> bytes:
    return encode_frame(StreamFrame(PROTOCOL, ME, 0, 1, body))


tables = st.dictionaries(
    st.integers(1, 8),
    st.tuples(st.integers(0, 2), st.sampled_from([Standing.ALIVE, Standing.SUSPECT])),
    max_size=8,
)


@given(tables, tables)
def test_after_one_push_pull_both_hold_the_same(
    mine: dict[int, tuple[int, Standing]], theirs: dict[int, tuple[int, Standing]]
) -> None:
    one, other = Bench(0), Bench(0)
    other.core.voice.me = NodeRef("other", 1)
    other.core.voice.record = Record("other", 1, 0, 0, "10.7.7.7", 7946, HASH)
    other.core.voice.news.me = "other"
    for bench, table in ((one, mine), (other, theirs)):
        for number, (incarnation, standing) in table.items():
            record = a_record(number, incarnation=incarnation, standing=standing, accuser="w")
            bench.core.membership.hear(record, bench.now)
    one.core.pushpull.start(other.core.record.address, why="regular")
    calls = of(one.do(one.core.voice.take()), Call)
    while calls:
        call = calls.pop()
        (reply,) = of(other.do(other.core.on_call(1, one.core.record.address, call.frame, other.now)), Reply)
        calls += of(one.do(one.core.on_reply(call.call, reply.frame, one.now)), Call)

    def held(bench: Bench) -> list[Digest]:
        return sorted(bench.core.pushpull.digests(), key=lambda d: d.worker_id)

    assert held(one) == held(other)
    assert hash_of(held(one)) == hash_of(held(other))


# --- other calls ----------------------------------------------------------------------------------------


def test_a_ping_over_tcp_is_answered_by_this_run_only_and_accuses_like_any_other() -> None:
    bench = Bench(2)
    assert bench.ask(1, TcpPing(ME)) == TcpAck(ME)
    assert bench.ask(1, TcpPing(NodeRef("me", 4))) == Refused("another run")
    bench.ask(1, TcpPing(ME, about_me(Standing.SUSPECT, 2)))
    assert bench.core.record.incarnation == 3


@pytest.mark.parametrize("body", [Same(), TcpAck(ME), Refused("no"), Records([])])
def test_an_answer_that_comes_as_a_question_is_refused(body: Same) -> None:
    assert Bench(1).ask(1, body) == Refused("not a request")


def test_junk_over_tcp_closes_the_connection_and_is_counted() -> None:
    bench = Bench(1)
    assert bench.core.on_call(7, address_of(1), b"junk", bench.now) == [Reply(7, None)]
    assert bench.core.counters()["frames_refused_malformed"] == 1


def test_an_answer_nobody_asked_for_is_nothing() -> None:
    bench = Bench(1)
    assert bench.core.on_reply(99, b"junk", bench.now) == []


def test_an_answer_under_another_number_is_none() -> None:
    bench = Bench(2)
    (call,) = of(bench.fire(("push_pull", 0)), Call)
    frame = encode_frame(StreamFrame(PROTOCOL, NodeRef("peer-1", 1), 0, call.call + 1, Same()))
    assert bench.core.on_reply(call.call, frame, bench.now) == []
    assert bench.core.counters()["frames_refused_another call"] == 1


# --- particulars ----------------------------------------------------------------------------------------


def newcomer(bench: Bench) -> Record:
    record = a_record(9, meta_hash=meta_hash(OTHER_META))
    bench.hear(1, news=[record])
    return record


def test_an_unknown_hash_is_asked_of_a_node_that_has_it_within_half_a_second() -> None:
    bench = Bench(2)
    newcomer(bench)
    assert bench.now <= bench.timers["meta", 0] <= bench.now + S // 2
    (call,) = of(bench.fire(("meta", 0)), Call)
    assert (call.to, frame_of(call)) == (address_of(9), MetaGet(NodeRef("peer-9", 1)))
    effects = bench.answer(call, NodeRef("peer-9", 1), MetaIs(NodeRef("peer-9", 1), OTHER_META))
    assert told(effects) == [("meta", "peer-9")]
    assert [view.meta for view in bench.core.members(bench.now)][-1] == OTHER_META


def test_particulars_that_are_not_those_of_the_hash_are_not_believed() -> None:
    bench = Bench(2)
    newcomer(bench)
    (call,) = of(bench.fire(("meta", 0)), Call)
    lie = MetaIs(NodeRef("peer-9", 1), Meta(("lies",), (0,), 1))
    assert told(bench.answer(call, NodeRef("peer-9", 1), lie)) == []
    assert bench.core.members(bench.now)[-1].meta is None
    assert ("meta", 0) in bench.timers


def test_particulars_are_asked_for_a_bounded_number_of_times_and_again_after_a_while() -> None:
    bench = Bench(2)
    newcomer(bench)
    asked = 0
    while ("meta", 0) in bench.timers:
        for call in of(bench.fire(("meta", 0)), Call):
            asked += 1
            bench.answer(call, NodeRef("peer-9", 1), None)
    assert asked == TRIES_MAX
    assert bench.core.counters()["metas_not_found"] == 1
    bench.fire(("redial", 0))
    assert ("meta", 0) in bench.timers


def test_our_own_particulars_are_given_and_those_of_others_if_known() -> None:
    bench = Bench(2)
    newcomer(bench)
    assert bench.ask(1, MetaGet(ME)) == MetaIs(ME, META)
    assert bench.ask(1, MetaGet(NodeRef("peer-2", 1))) == MetaIs(NodeRef("peer-2", 1), META)
    assert bench.ask(1, MetaGet(NodeRef("peer-9", 1))) == Refused("unknown particulars")


def test_new_particulars_of_our_own_raise_our_incarnation_and_are_told() -> None:
    bench = Bench(2)
    bench.do(bench.core.command(UpdateMeta(OTHER_META), bench.now))
    assert (bench.core.record.incarnation, bench.core.record.meta_hash) == (1, meta_hash(OTHER_META))
    sent = packets(bench.fire(("gossip", 0)))
    assert all(bench.core.record in packet.news for _, packet in sent)
    assert sent
    bench.do(bench.core.command(UpdateMeta(OTHER_META), bench.now))
    assert bench.core.record.incarnation == 1


def test_particulars_of_a_fleet_where_all_differ_are_bounded_in_a_frame() -> None:
    bench = Bench(0)
    metas = [Meta(("q",), (2,), capacity) for capacity in range(1, METAS_MAX + 50)]
    for number, meta in enumerate(metas):
        bench.core.membership.hear(a_record(number, meta_hash=meta_hash(meta)), bench.now)
    bench.core.particulars.learn(metas, bench.now)
    answer = bench.ask(1, Exchange([], [f"peer-{number}" for number in range(len(metas))]))
    assert isinstance(answer, Records)
    assert (len(answer.records), len(answer.metas)) == (len(metas), METAS_MAX)


def test_particulars_nobody_has_are_not_kept() -> None:
    bench = Bench(2)
    newcomer(bench)
    bench.core.particulars.learn([OTHER_META, Meta(("nobody",), (0,), 1)], bench.now)
    assert len(bench.core.particulars._known) == 2
    bench.hear(1, news=[a_record(9, standing=Standing.LEFT)])
    bench.fire(("redial", 0))
    assert len(bench.core.particulars._known) == 1


def test_calls_under_way_are_bounded_and_what_was_crowded_out_is_counted() -> None:
    bench = Bench(1)
    began = [bench.core.pushpull.start(address_of(1), why="regular") for _ in range(CALLS_MAX + 3)]
    assert began == [True] * CALLS_MAX + [False] * 3
    assert bench.core.counters()["calls_crowded_out"] == 3
    calls = of(bench.do(bench.core.voice.take()), Call)
    bench.answer(calls[0], NodeRef("", 0), None)
    assert bench.core.pushpull.start(address_of(1), why="regular")
