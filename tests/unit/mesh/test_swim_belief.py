"""What the core believes, tells, and answers when it is accused itself."""

from __future__ import annotations

import pytest

from fluxmesh.mesh.effects import Arm, Emit, Send
from fluxmesh.mesh.messages import Ack, Address, Gossip, NodeRef, Ping, PingReq, Record, Standing
from fluxmesh.mesh.swim import Phase
from fluxmesh.mesh.timing import MEMBERS_MAX, TOMBSTONE_NS, S, Timing, sends_of_news
from fluxmesh.mesh.voice import CORRECTIONS_MAX
from fluxmesh.mesh.wire import decode_packet
from tests.unit.mesh.driving import HASH, ME, Bench, a_record, about_me, address_of, of, packets, told

T = Timing().period_ns


def suspected(number: int, *, accuser: str, incarnation: int = 0) -> Record:
    return a_record(number, standing=Standing.SUSPECT, incarnation=incarnation, accuser=accuser)


def test_a_node_we_did_not_know_is_discovered_and_its_record_told_to_others() -> None:
    bench = Bench(3)
    effects = bench.hear(1, news=[a_record(9)])
    assert told(effects) == [("discovered", "peer-9"), ("meta", "peer-9")]
    assert bench.core.voice.news.candidates(9) == [a_record(9)]
    assert bench.now < bench.timers["gossip", 0] <= bench.now + Timing().gossip_ns


def test_news_goes_to_three_others_every_200_ms_until_it_was_sent_often_enough() -> None:
    bench = Bench(12)
    bench.hear(1, news=[a_record(2, incarnation=1)])
    seen = 0
    while ("gossip", 0) in bench.timers:
        before = bench.now
        sent = packets(bench.fire(("gossip", 0)))
        assert 1 <= len(sent) <= 3
        assert len({to for to, _ in sent}) == len(sent)
        assert bench.now - before <= Timing().gossip_ns
        seen += sum(a_record(2, incarnation=1) in packet.news for _, packet in sent)
    assert seen == sends_of_news(13)
    assert bench.core.counters()["news_queued"] == 0


def test_nobody_is_told_by_gossip_that_he_is_well() -> None:
    bench = Bench(12)
    bench.hear(1, news=[a_record(2, incarnation=1)])
    while ("gossip", 0) in bench.timers:
        for to, packet in packets(bench.fire(("gossip", 0))):
            if to == address_of(2):
                assert packet.news == []


def test_a_known_claim_is_not_told_again() -> None:
    bench = Bench(3)
    bench.hear(1, news=[a_record(2)])
    assert bench.core.counters()["news_queued"] == 0


# --- suspicion ------------------------------------------------------------------------------------------


def test_a_suspect_is_dead_when_its_time_is_over_and_not_before() -> None:
    bench = Bench(9)
    start = bench.now
    effects = bench.hear(1, news=[suspected(2, accuser="peer-1")])
    timer = bench.suspicion_timer(2)
    assert told(effects) == [("suspected", "peer-2")]
    assert bench.timers[timer] == start + Timing().suspicion_ns(10, 0) == start + 12 * S
    bench.now = start + 12 * S - 1
    early = bench.do(bench.core.on_timer(timer, bench.now))
    assert of(early, Emit) == []
    assert bench.standing(2) is Standing.SUSPECT
    effects = bench.fire(timer)
    assert told(effects) == [("dead", "peer-2")]
    dead = a_record(2, standing=Standing.DEAD, accuser=ME.worker_id)
    assert bench.core.table.rows["peer-2"].record == dead
    # It is told, too, once and unasked: perhaps only we do not hear it.
    ((_, packet),) = [(to, p) for to, p in packets(effects) if to == address_of(2)]
    assert packet.news[0] == dead


def test_each_other_accuser_brings_the_end_forward_and_is_told_on() -> None:
    bench = Bench(9)
    start = bench.now
    bench.hear(1, news=[suspected(2, accuser="peer-1")])
    timer = bench.suspicion_timer(2)
    for count, accuser in enumerate(["peer-3", "peer-4"], start=1):
        bench.hear(3, news=[suspected(2, accuser=accuser)])
        assert bench.timers[timer] == start + Timing().suspicion_ns(10, count)
        assert bench.core.voice.news.candidates(1) == [suspected(2, accuser=accuser)]
    assert bench.timers[timer] == start + 2 * S


@pytest.mark.parametrize("accuser", ["peer-1", "peer-2", ""])
def test_the_same_accuser_the_suspect_and_nobody_confirm_nothing(accuser: str) -> None:
    bench = Bench(9)
    bench.hear(1, news=[suspected(2, accuser="peer-1")])
    timer = bench.suspicion_timer(2)
    before = bench.timers[timer]
    bench.core.voice.news.clear()
    bench.hear(3, news=[suspected(2, accuser=accuser)])
    assert bench.timers[timer] == before
    assert not len(bench.core.voice.news)


def test_our_own_silent_probe_confirms_what_others_say() -> None:
    bench = Bench(9)
    bench.hear(1, news=[suspected(2, accuser="peer-1")])
    timer = bench.suspicion_timer(2)
    before = bench.timers[timer]
    seq, _ = bench.round_of(2)
    bench.fire(("detour", seq))
    bench.fire(("round", 0))
    assert bench.timers[timer] < before


def test_a_suspect_that_answers_with_a_higher_incarnation_is_alive() -> None:
    bench = Bench(9)
    bench.hear(1, news=[suspected(2, accuser="peer-1")])
    timer = bench.suspicion_timer(2)
    effects = bench.hear(3, news=[a_record(2, incarnation=1)])
    assert told(effects) == [("refuted", "peer-2")]
    assert timer not in bench.timers
    assert bench.do(bench.core.on_timer(timer, bench.now + 60 * S)) == []
    assert bench.standing(2) is Standing.ALIVE


def test_the_death_of_a_node_we_never_heard_of_is_kept_and_no_event() -> None:
    bench = Bench(3)
    assert told(bench.hear(1, news=[a_record(9, standing=Standing.DEAD)])) == []
    assert told(bench.hear(2, news=[a_record(9)])) == []  # older than its death
    assert bench.standing(9) is Standing.DEAD


# --- restarts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", list(Standing))
@pytest.mark.parametrize("epoch", [2, 1 << 62])
def test_d16_d18_a_higher_epoch_is_taken_from_its_first_packet_with_a_new_address(
    held: Standing, epoch: int
) -> None:
    bench = Bench(3)
    bench.hear(1, news=[a_record(2, standing=held, incarnation=7, accuser="peer-1")])
    new = Record("peer-2", epoch, 0, 0, "192.168.7.7", 9_000, HASH)
    effects = bench.hear(2, Ping(1, ME), news=[new], epoch=epoch, src=Address("192.168.7.7", 9_000))
    assert ("restarted", "peer-2") in told(effects)
    assert any(isinstance(packet.message, Ack) for _, packet in packets(effects))
    row = bench.core.table.rows["peer-2"]
    assert (row.record, row.address) == (new, Address("192.168.7.7", 9_000))
    assert not row.answered
    assert not any(purpose == "suspicion" for purpose, _ in bench.timers)


def test_d7_d17_after_200_restarts_there_is_one_row_and_the_queue_is_empty() -> None:
    bench = Bench(3)
    for epoch in range(2, 202):
        bench.hear(1, news=[a_record(9, epoch=epoch)])
    assert [key for key in bench.core.table.rows if key == "peer-9"] == ["peer-9"]
    assert bench.core.counters()["news_queued"] == 1
    ticks = 0
    while ("gossip", 0) in bench.timers:
        bench.fire(("gossip", 0))
        ticks += 1
        assert ticks < 50
    assert bench.core.counters()["news_queued"] == 0


def test_an_older_run_is_told_once_a_period_and_otherwise_ignored() -> None:
    bench = Bench(3)
    bench.hear(1, news=[a_record(2, epoch=5)])
    bench.hear(2, Ping(1, ME), epoch=5)
    bench.now += T
    ((to, packet),) = packets(bench.hear(2, Ping(1, ME), epoch=4, src=address_of(50)))
    assert (to, packet.message) == (address_of(50), Gossip())
    assert packet.news[0].epoch == 5
    assert packets(bench.hear(2, Ping(1, ME), epoch=4, src=address_of(50))) == []


# --- accused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("standing", [Standing.SUSPECT, Standing.DEAD, Standing.LEFT])
@pytest.mark.parametrize("accused", [0, 6])
def test_accused_we_say_no_with_one_incarnation_more_than_was_accused(
    standing: Standing, accused: int
) -> None:
    bench = Bench(5)
    effects = bench.hear(1, news=[about_me(standing, accused)])
    assert told(effects) == [("accused", ME.worker_id)]
    assert bench.core.record.incarnation == accused + 1
    assert bench.core.record.standing == Standing.ALIVE
    assert bench.core.voice.news.candidates(9)[0] == bench.core.record
    assert bench.core.counters()["health_score"] == 1
    # Who told us hears it at once.
    ((to, packet),) = packets(effects)
    assert to == address_of(1)
    assert bench.core.record in packet.news


def test_d26_a_ping_that_accuses_is_answered_with_the_refutation() -> None:
    bench = Bench(5)
    accusation = about_me(Standing.SUSPECT, 0, accuser="peer-1")
    ((to, packet),) = packets(bench.hear(1, Ping(3, ME, accusation)))
    assert (to, packet.message) == (address_of(1), Ack(3))
    assert packet.incarnation == 1
    assert packet.news[0] == bench.core.record


def test_d26_a_suspect_is_told_by_every_answer_and_by_every_ping() -> None:
    bench = Bench(5)
    accusation = suspected(2, accuser="peer-1")
    bench.hear(1, news=[accusation])
    bench.core.voice.news.clear()
    ((_, ack),) = packets(bench.hear(2, Ping(8, ME)))
    assert ack.news == [accusation]
    _, effects = bench.round_of(2)
    pings = [p.message for to, p in packets(effects) if to == address_of(2)]
    assert [message.about for message in pings if isinstance(message, Ping)] == [accusation]


def test_one_accusation_is_answered_once() -> None:
    bench = Bench(5)
    for number in (1, 2, 3):
        bench.hear(number, news=[about_me(Standing.SUSPECT, 0, accuser=f"peer-{number}")])
    assert bench.core.record.incarnation == 1
    assert bench.core.counters()["event_accused"] == 1
    # The later ones hold something old of us, and are told so.
    assert bench.core.counters()["notices_sent"] == 3


def test_a_claim_about_an_older_run_of_ours_changes_nothing() -> None:
    bench = Bench(5)
    before = bench.core.record
    effects = bench.hear(1, news=[about_me(Standing.DEAD, 9, epoch=ME.epoch - 1)])
    assert bench.core.record == before
    assert told(effects) == []


def test_an_incarnation_that_could_not_be_refuted_is_ignored() -> None:
    bench = Bench(5)
    bench.hear(1, news=[about_me(Standing.DEAD, (1 << 63) - 1)])
    bench.hear(1, news=[a_record(2, standing=Standing.DEAD, incarnation=(1 << 63) - 1)])
    assert bench.core.record.incarnation == 0
    assert bench.standing(2) is Standing.ALIVE
    assert bench.core.counters()["claims_unusable"] == 2


@pytest.mark.parametrize("by", ["news", "a stranger's news", "its own packet"])
def test_a_higher_epoch_of_our_own_id_fences_us_and_we_fall_silent(by: str) -> None:
    bench = Bench(5)
    higher = about_me(Standing.ALIVE, epoch=ME.epoch + 1)
    if by == "its own packet":
        other = Bench(0)
        other.core.voice.me = NodeRef("me", ME.epoch + 1)
        other.core.voice.say_bare(address_of(1), Gossip())
        (sent,) = of(other.core.voice.take(), Send)
        effects = bench.packet(address_of(44), sent.data)
    else:
        effects = bench.hear(1 if by == "news" else 70, news=[higher])
    assert told(effects) == [("fenced", ME.worker_id)]
    assert bench.core.phase is Phase.FENCED
    assert of(effects, Send) == []
    for timer in list(bench.timers):
        assert bench.fire(timer) == []
    assert bench.hear(1, Ping(1, ME)) == []


def test_an_echo_of_our_own_packet_is_dropped() -> None:
    bench = Bench(2)
    _, _, effects = bench.round()
    assert bench.packet(address_of(1), of(effects, Send)[0].data) == []
    assert bench.core.counters()["met_our_own_id"] == 1


# --- notices --------------------------------------------------------------------------------------------


def a_dead_peer(bench: Bench, number: int) -> Record:
    dead = a_record(number, standing=Standing.DEAD, accuser="peer-1")
    bench.hear(1, news=[dead])
    bench.core.voice.news.clear()
    return dead


def test_d6_one_that_is_down_here_is_told_once_a_period() -> None:
    bench = Bench(4)
    dead = a_dead_peer(bench, 2)
    ((to, packet),) = packets(bench.hear(2, Ack(1)))
    assert (to, packet.message, packet.news[0]) == (address_of(2), Gossip(), dead)
    assert packets(bench.hear(2, Gossip())) == []
    bench.now += T - 1
    assert packets(bench.hear(2, Gossip())) == []
    bench.now += 1
    assert len(packets(bench.hear(2, Gossip()))) == 1


def test_d6_a_notice_is_answered_by_a_refutation_and_never_by_a_notice() -> None:
    bench = Bench(4)
    a_dead_peer(bench, 2)
    bench.core.table.rows["peer-2"].notice_ns = bench.now  # it was told in this period already
    effects = bench.hear(2, news=[about_me(Standing.DEAD, 0)])
    assert packets(effects) == []
    assert bench.core.record.incarnation == 1
    bench.now += T
    # A notice that is outdated already gets no word back but our own record.
    ((_, packet),) = packets(bench.hear(2, news=[about_me(Standing.DEAD, 0)]))
    assert bench.core.record in packet.news


def test_d6_two_that_hold_each_other_dead_are_quiet_after_a_few_packets() -> None:
    one, other = Bench(4), Bench(4, seed=2)
    other.core.voice.me = other.core.voice.loads.me = NodeRef("peer-2", 1)
    other.core.voice.record = a_record(2)
    other.core.voice.news.me = "peer-2"
    other.hear(1, news=[Record("me", 5, 0, 0, "10.0.0.1", 7946, HASH)])
    other.hear(1, news=[about_me(Standing.DEAD)])
    a_dead_peer(one, 2)
    other.core.voice.news.clear()
    exchanged = 0
    waiting = [(one, sent) for sent in of(one.hear(2, Ack(1)), Send)]
    while waiting:
        speaker, sent = waiting.pop(0)
        hearer = other if speaker is one else one
        src = address_of(2) if speaker is other else Address("10.0.0.1", 7946)
        exchanged += 1
        assert exchanged < 12
        for bench in (one, other):
            bench.now += T
        waiting += [(hearer, reply) for reply in of(hearer.packet(src, sent.data), Send)]
    assert one.standing(2) is Standing.ALIVE
    assert other.core.table.rows["me"].record.standing == Standing.ALIVE


def test_a_leaver_is_not_told_that_it_left() -> None:
    bench = Bench(4)
    left = a_record(2, standing=Standing.LEFT)
    assert packets(bench.hear(2, news=[left])) == []
    assert packets(bench.hear(2, news=[left])) == []
    assert len(packets(bench.hear(2, Gossip()))) == 1  # it does not say so itself, so perhaps it did not


def test_one_that_speaks_of_a_newer_incarnation_is_told_what_we_hold() -> None:
    bench = Bench(4)
    ((_, packet),) = packets(bench.hear(2, Ping(1, ME), incarnation=3))
    assert packet.news == [a_record(2)]


# --- bounds ---------------------------------------------------------------------------------------------


def test_d2_an_address_where_nobody_can_be_is_dropped_and_nobody_else_suspected() -> None:
    bench = Bench(3)
    for host in ("0.0.0.0", "224.0.0.1", "255.255.255.255"):
        bench.hear(1, news=[Record("bad", 1, 0, 0, host, 7946, HASH)])
        bench.core.membership.hear(Record("bad", 1, 0, 0, host, 7946, HASH), bench.now)
    assert "bad" not in bench.core.table.rows
    assert bench.core.counters()["claims_unusable"] == 3
    assert all(bench.standing(n) is Standing.ALIVE for n in (1, 2, 3))


def test_a_stranger_gets_no_more_than_it_sent() -> None:
    bench = Bench(3)
    bench.hear(1, news=[a_record(n) for n in range(10, 20)])
    data = of(bench.core.on_packet(address_of(77), a_strangers_ping(), bench.now), Send)
    assert len(data) == 1
    assert len(data[0].data) <= len(a_strangers_ping())
    packet = decode_packet(data[0].data)
    assert not isinstance(packet, str)
    assert (packet.message, packet.news, packet.loads) == (Ack(1), [], [])


def a_strangers_ping() -> bytes:
    other = Bench(0)
    other.core.voice.me = NodeRef("s", 1)
    other.core.voice.say_bare(address_of(1), Ping(1, ME))
    return of(other.core.voice.take(), Send)[0].data


@pytest.mark.parametrize("junk", [b"", b"\x00", b"\xff" * 1_200, b"x" * 70_000])
def test_junk_is_counted_and_changes_nothing(junk: bytes) -> None:
    bench = Bench(3)
    before = bench.core.members(bench.now)
    assert bench.packet(address_of(1), junk) == []
    assert bench.core.members(bench.now) == before
    assert sum(n for name, n in bench.core.counters().items() if name.startswith("packets_refused")) == 1


def test_before_join_nothing_is_heard_and_nothing_is_said() -> None:
    bench = Bench(0, joins=False)
    assert bench.hear(1, Ping(1, ME)) == []
    assert bench.first == []
    assert not any(isinstance(effect, Arm) for effect in bench.hear(1, news=[a_record(1)]))


# --- what others hold that is old -----------------------------------------------------------------------


def test_d10_who_accuses_one_that_left_is_told_at_once_that_it_left() -> None:
    bench = Bench(5)
    left = a_record(2, standing=Standing.LEFT)
    bench.hear(1, news=[left])
    bench.core.voice.news.clear()
    ((to, packet),) = packets(bench.hear(3, news=[suspected(2, accuser="peer-3")]))
    assert (to, packet.message) == (address_of(3), Gossip())
    assert left in packet.news


def test_d10_who_asks_after_one_that_left_is_told_so_before_its_verdict() -> None:
    bench = Bench(5)
    left = a_record(2, standing=Standing.LEFT)
    bench.hear(1, news=[left])
    bench.core.voice.news.clear()
    where = address_of(2)
    request = PingReq(7, NodeRef("peer-2", 1), where.host, where.port, 250)
    told_to = [to for to, packet in packets(bench.hear(3, request)) if left in packet.news]
    assert address_of(3) in told_to


def test_who_accuses_one_that_said_no_is_told_what_it_said() -> None:
    bench = Bench(5)
    bench.hear(1, news=[a_record(2, incarnation=4)])
    bench.core.voice.news.clear()
    ((_, packet),) = packets(bench.hear(3, news=[suspected(2, accuser="peer-3", incarnation=3)]))
    assert a_record(2, incarnation=4) in packet.news
    # An outdated word that does no harm is left alone.
    assert packets(bench.hear(4, news=[a_record(2, incarnation=3)])) == []


def test_corrections_of_one_record_are_bounded() -> None:
    bench = Bench(5)
    left = a_record(2, standing=Standing.LEFT)
    bench.hear(1, news=[left])
    bench.core.voice.news.clear()
    sent = 0
    for _ in range(50):
        bench.now += T
        for _, packet in packets(bench.hear(3, news=[suspected(2, accuser="peer-3")])):
            sent += packet.news.count(left)
    assert sent == CORRECTIONS_MAX
    bench.now += T
    assert packets(bench.hear(3, news=[suspected(2, accuser="peer-3")])) == []


def test_a_full_table_is_counted_and_no_exception() -> None:
    bench = Bench(0)
    for number in range(MEMBERS_MAX):
        bench.core.table.put(a_record(number), bench.now)
    assert told(bench.hear(1, news=[a_record(60_000)])) == []
    assert bench.core.counters()["table_full"] == 1


def test_a_tombstone_that_is_over_is_forgotten_and_said_to_be() -> None:
    bench = Bench(2)
    bench.hear(1, news=[a_record(2, standing=Standing.LEFT)])
    bench.now += TOMBSTONE_NS
    assert ("forgotten", "peer-2") in told(bench.fire(("redial", 0)))
    assert "peer-2" not in bench.core.table.rows
    # Whoever still tells of it tells of somebody unknown.
    assert bench.standing(2) is None


def test_a_dead_one_that_comes_back_as_a_suspect_is_back_and_suspected() -> None:
    bench = Bench(5)
    bench.hear(1, news=[a_record(2, standing=Standing.DEAD)])
    effects = bench.hear(1, news=[suspected(2, accuser="peer-1", incarnation=1)])
    assert told(effects) == [("refuted", "peer-2"), ("suspected", "peer-2")]
    assert told(bench.hear(1, news=[suspected(2, accuser="peer-1", incarnation=2)])) == [
        ("suspected", "peer-2")
    ]
