"""The core looks for signs of life: exact packets, exact times."""

from __future__ import annotations

import pytest

from fluxmesh.mesh.effects import Call, Emit, Send
from fluxmesh.mesh.messages import (
    Ack,
    AckRelay,
    Gossip,
    Nack,
    NodeRef,
    Ping,
    PingReq,
    Refused,
    Standing,
    TcpAck,
    TcpPing,
)
from fluxmesh.mesh.probe import DETOUR_QUIET_NS, RELAYS_AN_ASKER, RELAYS_MAX
from fluxmesh.mesh.timing import MS, Timing
from tests.unit.mesh.driving import (
    ME,
    Bench,
    a_record,
    address_of,
    decoded,
    frame_of,
    of,
    packets,
    told,
)

T = Timing().period_ns


def helpers_of(effects: list[object]) -> list[int]:
    asked = [decoded(sent) for sent in effects if isinstance(sent, Send)]
    assert all(isinstance(packet.message, PingReq) for packet in asked)
    hosts = {address_of(n): n for n in range(200)}
    return [hosts[sent.to] for sent in effects if isinstance(sent, Send)]


def test_a_period_pings_one_peer_and_waits_half_of_it_before_the_detours() -> None:
    bench = Bench(5)
    target, seq, effects = bench.round()
    assert packets(effects)[0][0] == address_of(target)
    assert decoded(of(effects, Send)[0]).message == Ping(seq, NodeRef(f"peer-{target}", 1))
    assert len(of(effects, Send)) == 1
    assert bench.timers["round", 0] == bench.now + T
    assert bench.timers["detour", seq] == bench.now + T // 2


def test_everybody_is_probed_once_before_anybody_is_probed_twice() -> None:
    bench = Bench(7)
    for _ in range(3):
        seen = []
        for _ in range(7):
            target, seq, _ = bench.round()
            bench.hear(target, Ack(seq))
            seen.append(target)
        assert sorted(seen) == list(range(1, 8))


def test_a_newcomer_is_probed_within_two_rounds_of_those_who_were_there() -> None:
    bench = Bench(6)
    bench.round()
    bench.hear(1, news=[a_record(50)])
    assert bench.round_of(50)


def test_an_answer_in_time_is_the_end_of_it() -> None:
    bench = Bench(5)
    target, seq, _ = bench.round()
    bench.now += 3 * MS
    assert of(bench.hear(target, Ack(seq)), Send) == []
    assert ("detour", seq) not in bench.timers
    assert bench.core.table.rows[f"peer-{target}"].rtt_ns == 3 * MS
    bench.fire(("round", 0))
    assert bench.standing(target) is Standing.ALIVE
    assert bench.core.counters().get("probes_unanswered") is None


@pytest.mark.parametrize("kind", ["another number", "another sender", "another run"])
def test_an_answer_to_something_else_is_none(kind: str) -> None:
    bench = Bench(5)
    target, seq, _ = bench.round()
    other = target % 5 + 1
    if kind == "another number":
        bench.hear(target, Ack(seq + 1))
    elif kind == "another sender":
        bench.hear(other, Ack(seq))
    else:
        bench.hear(target, Ack(seq), epoch=9)
    assert ("detour", seq) in bench.timers
    bench.fire(("detour", seq))
    bench.fire(("round", 0))
    assert bench.standing(target) is Standing.SUSPECT


def test_silence_for_half_a_period_asks_three_helpers_and_tcp() -> None:
    bench = Bench(8)
    target, seq, _ = bench.round()
    effects = bench.fire(("detour", seq))
    helpers = helpers_of(list(effects)[:3])
    assert len(set(helpers)) == 3
    assert target not in helpers
    where = address_of(target)
    for _, packet in packets(effects):
        run = NodeRef(f"peer-{target}", 1)
        assert packet.message == PingReq(seq, run, where.host, where.port, T // 2 // MS)
    (call,) = of(effects, Call)
    assert (call.to, call.timeout_ns) == (where, T // 2)
    assert frame_of(call) == TcpPing(NodeRef(f"peer-{target}", 1))


@pytest.mark.parametrize("seed", range(25))
def test_d4_the_only_helper_there_is_is_always_asked(seed: int) -> None:
    bench = Bench(2, seed=seed)
    target, seq, _ = bench.round()
    assert helpers_of(of(list(bench.fire(("detour", seq))), Send)) == [3 - target]


def test_d4_a_suspect_helps_where_there_are_too_few_others() -> None:
    bench = Bench(4)
    bench.hear(1, news=[a_record(2, standing=Standing.SUSPECT, accuser="peer-1")])
    seq, _ = bench.round_of(3)
    assert sorted(helpers_of(of(list(bench.fire(("detour", seq))), Send))) == [1, 2, 4]


def test_d4_each_helper_that_was_asked_counts_once_as_well() -> None:
    bench = Bench(6)
    target, seq, _ = bench.round()
    asked = helpers_of(of(list(bench.fire(("detour", seq))), Send))
    strangers = [n for n in range(1, 7) if n not in asked and n != target]
    for number in [*asked[:2], *asked[:2], *strangers]:
        bench.hear(number, Nack(seq))
    bench.fire(("round", 0))
    assert bench.standing(target) is Standing.SUSPECT
    assert bench.core.counters()["health_score"] == 1  # of three helpers one did not even say no


def test_when_all_helpers_say_no_the_silence_is_not_our_fault() -> None:
    bench = Bench(6)
    _, seq, _ = bench.round()
    for number in helpers_of(of(list(bench.fire(("detour", seq))), Send)):
        bench.hear(number, Nack(seq))
    bench.fire(("round", 0))
    assert bench.core.counters()["health_score"] == 0


def test_d3_nobody_is_suspected_while_an_answer_by_detour_can_still_come() -> None:
    bench = Bench(6)
    target, seq, _ = bench.round()
    asked = helpers_of(of(list(bench.fire(("detour", seq))), Send))
    assert bench.standing(target) is Standing.ALIVE
    bench.now = bench.timers["round", 0] - 1
    effects = bench.hear(asked[0], AckRelay(seq, NodeRef(f"peer-{target}", 1)))
    assert told(effects) == [("probe_resolved", f"peer-{target}")]
    bench.fire(("round", 0))
    assert bench.standing(target) is Standing.ALIVE


def test_the_verdict_comes_at_the_end_of_the_period_and_the_suspect_hears_of_it_at_once() -> None:
    bench = Bench(6)
    target, seq, _ = bench.round()
    bench.fire(("detour", seq))
    effects = bench.fire(("round", 0))
    assert told(effects) == [("suspected", f"peer-{target}")]
    accusation = a_record(target, standing=Standing.SUSPECT, accuser=ME.worker_id)
    to_it = [packet.message for to, packet in packets(effects) if to == address_of(target)]
    assert [message.about for message in to_it if isinstance(message, Ping)] == [accusation]


def test_d1_an_answer_over_tcp_keeps_it_alive_and_is_told_once_in_ten_minutes() -> None:
    bench = Bench(1)
    run, events = NodeRef("peer-1", 1), []
    start = bench.now
    while bench.now < start + DETOUR_QUIET_NS - T:
        _, seq, _ = bench.round()
        (call,) = of(bench.fire(("detour", seq)), Call)
        events += told(bench.answer(call, run, TcpAck(run)))
    assert events == [("probe_resolved", "peer-1")]
    assert bench.standing(1) is Standing.ALIVE
    assert bench.core.counters()["health_score"] == 0


@pytest.mark.parametrize("answer", [None, Refused("another run"), TcpAck(NodeRef("peer-1", 2))])
def test_any_other_answer_over_tcp_is_no_sign_of_life(answer: Refused | TcpAck | None) -> None:
    bench = Bench(1)
    _, seq, _ = bench.round()
    (call,) = of(bench.fire(("detour", seq)), Call)
    bench.answer(call, NodeRef("peer-1", 1), answer)
    bench.fire(("round", 0))
    assert bench.standing(1) is Standing.SUSPECT


def test_d5_a_ping_that_did_not_leave_is_a_direct_probe_without_an_answer() -> None:
    bench = Bench(5)
    target, seq, _ = bench.round()
    effects = bench.do(bench.core.on_send_failed(address_of(target), bench.now))
    assert len(of(effects, Call)) == 1
    assert ("detour", seq) not in bench.timers
    bench.fire(("round", 0))
    assert bench.standing(target) is Standing.SUSPECT


def test_d5_a_failed_send_to_somebody_else_changes_nothing() -> None:
    bench = Bench(5)
    target, seq, _ = bench.round()
    assert not of(bench.do(bench.core.on_send_failed(address_of(target % 5 + 1), bench.now)), Call)
    assert ("detour", seq) in bench.timers


def test_a_bad_score_stretches_the_period_and_the_waits_and_answers_mend_it() -> None:
    bench = Bench(5)
    bench.core.voice.health.blame(2)
    target, seq, _ = bench.round()
    assert bench.timers["round", 0] == bench.now + 3 * T
    assert bench.timers["detour", seq] == bench.now + 3 * T // 2
    bench.hear(target, Ack(seq))
    bench.round()
    assert bench.core.counters()["health_score"] == 1


def test_quick_answers_bring_the_detours_forward() -> None:
    bench = Bench(5)
    for _ in range(16):
        target, seq, _ = bench.round()
        bench.now += 20 * MS
        bench.hear(target, Ack(seq))
    _, seq, _ = bench.round()
    assert bench.timers["detour", seq] == bench.now + 60 * MS


def test_an_ack_alone_does_not_clear_a_suspect() -> None:
    bench = Bench(5)
    bench.hear(1, news=[a_record(2, standing=Standing.SUSPECT, accuser="peer-1")])
    seq, _ = bench.round_of(2)
    bench.hear(2, Ack(seq))
    assert bench.standing(2) is Standing.SUSPECT
    bench.hear(2, Ack(seq), news=[a_record(2, incarnation=1)], incarnation=1)
    assert bench.standing(2) is Standing.ALIVE


def test_nobody_there_nobody_probed() -> None:
    bench = Bench(0)
    assert of(bench.fire(("round", 0)), Send) == []
    assert ("round", 0) in bench.timers


# --- for others -----------------------------------------------------------------------------------------


def a_request(target: int, window_ms: int = 250) -> PingReq:
    where = address_of(target)
    return PingReq(41, NodeRef(f"peer-{target}", 1), where.host, where.port, window_ms)


def test_a_ping_is_answered_to_where_it_came_from() -> None:
    bench = Bench(3)
    ((to, packet),) = packets(bench.hear(1, Ping(41, ME), src=address_of(99)))
    assert to == address_of(99)
    assert (packet.message, packet.sender) == (Ack(41), ME)


@pytest.mark.parametrize("target", [NodeRef("me", 4), NodeRef("another", 5)])
def test_a_ping_for_another_run_of_this_address_is_not_acknowledged(target: NodeRef) -> None:
    bench = Bench(3)
    answers = [packet.message for _, packet in packets(bench.hear(1, Ping(41, target)))]
    assert not any(isinstance(message, Ack) for message in answers)


def test_a_helper_pings_and_passes_the_answer_on() -> None:
    bench = Bench(3)
    ((to, packet),) = packets(bench.hear(1, a_request(2)))
    assert to == address_of(2)
    assert isinstance(packet.message, Ping)
    assert packet.message.target == NodeRef("peer-2", 1)
    ((to, answer),) = packets(bench.hear(2, Ack(packet.message.seq)))
    assert (to, answer.message) == (address_of(1), AckRelay(41, NodeRef("peer-2", 1)))
    assert not any(purpose == "relay" for purpose, _ in bench.timers)
    assert bench.core.counters()["relays_open"] == 0


def test_a_helper_says_no_at_four_fifths_of_the_window_and_still_passes_a_late_answer_on() -> None:
    bench = Bench(3)
    start = bench.now
    ((_, packet),) = packets(bench.hear(1, a_request(2)))
    assert isinstance(packet.message, Ping)
    timer = ("relay", packet.message.seq)
    assert bench.timers[timer] == start + 200 * MS
    ((to, nack),) = packets(bench.fire(timer))
    assert (to, nack.message) == (address_of(1), Nack(41))
    assert bench.timers[timer] == start + 250 * MS
    ((_, relayed),) = packets(bench.hear(2, Ack(packet.message.seq)))
    assert relayed.message == AckRelay(41, NodeRef("peer-2", 1))


def test_a_helper_stops_listening_at_the_end_of_the_window() -> None:
    bench = Bench(3)
    ((_, packet),) = packets(bench.hear(1, a_request(2)))
    assert isinstance(packet.message, Ping)
    for _ in range(2):
        bench.fire(("relay", packet.message.seq))
    assert bench.core.counters()["relays_open"] == 0
    assert packets(bench.hear(2, Ack(packet.message.seq))) == []


def test_a_helper_pings_whom_it_does_not_know_itself() -> None:
    bench = Bench(1)
    ((to, packet),) = packets(bench.hear(1, a_request(77)))
    assert to == address_of(77)
    assert not packet.news
    assert not packet.loads


def test_a_helper_has_a_bound_on_what_it_does_for_others() -> None:
    askers = RELAYS_MAX // RELAYS_AN_ASKER
    bench = Bench(askers + 1)
    for number in range(1, askers + 1):
        for _ in range(RELAYS_AN_ASKER):
            bench.hear(number, a_request(2))
    assert packets(bench.hear(askers + 1, a_request(2))) == []
    assert bench.core.counters()["relays_crowded_out"] == 1


def test_strangers_are_not_helped() -> None:
    bench = Bench(1)
    assert packets(bench.hear(77, a_request(1))) == []


def test_a_relayed_answer_counts_only_from_a_helper_that_was_asked() -> None:
    bench = Bench(6)
    target, seq, _ = bench.round()
    asked = helpers_of(of(list(bench.fire(("detour", seq))), Send))
    other = next(n for n in range(1, 7) if n not in asked and n != target)
    effects = bench.hear(other, AckRelay(seq, NodeRef(f"peer-{target}", 1)))
    assert not of(effects, Emit)
    bench.fire(("round", 0))
    assert bench.standing(target) is Standing.SUSPECT


def test_gossip_alone_is_not_answered() -> None:
    bench = Bench(2)
    assert packets(bench.hear(1, Gossip())) == []
