"""How the core finds others, finds them again, and leaves."""

from __future__ import annotations

import pytest

from fluxmesh.mesh.effects import Arm, Call, Emit, Leave, Reply, Resolve, Send
from fluxmesh.mesh.joining import ADDRESSES_MAX, DIALS_AT_ONCE, REDIAL_CALLS, REDIAL_NS, REDIAL_PINGS
from fluxmesh.mesh.messages import (
    Ack,
    Address,
    Compare,
    Digest,
    Digests,
    Exchange,
    NodeRef,
    Ping,
    Record,
    Records,
    Refused,
    Same,
    Standing,
)
from fluxmesh.mesh.swim import Phase
from fluxmesh.mesh.timing import S, sends_of_news
from tests.unit.mesh.driving import (
    HASH,
    ME,
    MY_ADDRESS,
    Bench,
    a_record,
    about_me,
    address_of,
    frame_of,
    of,
    packets,
    told,
)

SEEDS = ("seed-a", "seed-b:7000")


def resolve(bench: Bench, *addresses: Address) -> list[Call]:
    effects = bench.do(bench.core.on_resolved({"seed-a": list(addresses)}, bench.now))
    return of(effects, Call)


def alone() -> Bench:
    return Bench(0, seeds=SEEDS)


def test_to_join_is_to_look_up_all_seeds() -> None:
    bench = alone()
    assert [effect for effect in bench.first if isinstance(effect, Resolve)] == [Resolve(SEEDS)]
    assert not [effect for effect in bench.first if isinstance(effect, Send)]


def test_the_first_node_has_no_seeds_and_looks_for_none() -> None:
    bench = Bench(0)
    assert not [effect for effect in bench.first if isinstance(effect, Resolve)]
    assert ("seeds", 0) not in bench.timers


def test_d14_seeds_are_looked_up_again_after_1_2_4_to_60_seconds_for_ever() -> None:
    bench = alone()
    for seconds in [1, 2, 4, 8, 16, 32, 60, 60, 60]:
        wait = bench.timers["seeds", 0] - bench.now
        assert seconds * S <= wait <= 1.1 * seconds * S
        assert resolve(bench) == []
        assert Resolve(SEEDS) in bench.fire(("seeds", 0))


def test_three_seeds_are_dialled_at_once_and_the_next_when_one_is_done() -> None:
    bench = alone()
    calls = resolve(bench, *[address_of(n) for n in range(1, 6)])
    assert [call.to for call in calls] == [address_of(n) for n in (1, 2, 3)]
    assert len(calls) == DIALS_AT_ONCE
    assert isinstance(frame_of(calls[0]), Compare)
    (following,) = of(bench.answer(calls[0], NodeRef("", 0), None), Call)
    assert following.to == address_of(4)


def join_by(bench: Bench, call: Call, *, known: list[Record]) -> list[tuple[str, str]]:
    """Let the push-pull that `call` begins succeed with peer 1, which knows `known`."""
    sender = NodeRef("peer-1", 1)
    digests = [Digest(r.worker_id, r.epoch, r.incarnation, r.standing) for r in known]
    (exchange,) = of(bench.answer(call, sender, Digests(digests)), Call)
    body = frame_of(exchange)
    assert isinstance(body, Exchange)
    assert body.records[0] == bench.core.record
    assert sorted(body.want) == [record.worker_id for record in known]
    return told(bench.answer(exchange, sender, Records(known)))


def test_a_push_pull_with_anybody_is_the_join() -> None:
    bench = alone()
    (call,) = resolve(bench, address_of(1))
    events = join_by(bench, call, known=[a_record(1), a_record(2)])
    assert [name for kind, name in events if kind == "discovered"] == ["peer-1", "peer-2"]
    assert ("joined", "peer-1") in events
    assert bench.core.table.rows["peer-1"].answered
    assert not bench.core.table.rows["peer-2"].answered


def test_the_one_who_is_dialled_has_joined_as_well() -> None:
    bench = alone()
    answer = bench.ask(1, Exchange([a_record(1)], [ME.worker_id]))
    assert answer == Records([bench.core.record], [bench.core.particulars.own])
    assert ("joined", "peer-1") in told(bench.asked)


def test_a_seed_that_holds_the_same_is_a_join_too() -> None:
    bench = alone()
    (call,) = resolve(bench, address_of(1))
    assert told(bench.answer(call, NodeRef("peer-1", 1), Same())) == [("joined", "")]


@pytest.mark.parametrize("body", [Refused("not in the mesh"), None])
def test_a_refusal_is_no_join(body: Refused | None) -> None:
    bench = alone()
    (call,) = resolve(bench, address_of(1))
    events = told(bench.answer(call, NodeRef("peer-1", 1), body))
    assert "joined" not in [kind for kind, _ in events]


def test_d12_a_seed_that_is_ourselves_never_counts_and_is_not_dialled_again() -> None:
    bench = alone()
    behind_a_name = Address("192.168.1.1", 7946)
    (call,) = resolve(bench, behind_a_name, MY_ADDRESS)
    assert call.to == behind_a_name  # our own address is known to be ours
    assert told(bench.answer(call, ME, Refused("the same worker id"))) == []
    assert resolve(bench, behind_a_name, MY_ADDRESS) == []
    assert not bench.core.joiner.has_joined


def test_who_dials_itself_is_told_who_answers() -> None:
    bench = alone()
    bench.core.pushpull.start(address_of(1), why="seed")
    (call,) = of(bench.core.voice.take(), Call)
    (reply,) = of(bench.core.on_call(4, MY_ADDRESS, call.frame, bench.now), Reply)
    assert reply.frame is not None
    assert told(bench.do(bench.core.on_reply(call.call, reply.frame, bench.now))) == []
    assert resolve(bench, address_of(1)) == []


def test_d13_a_seed_that_is_alive_is_not_dialled_whatever_its_address_looks_like() -> None:
    bench = alone()
    (call,) = resolve(bench, Address("10.9.9.9", 7946))
    join_by(bench, call, known=[a_record(1)])  # it advertises another address than the one that was dialled
    assert resolve(bench, Address("10.9.9.9", 7946)) == []
    assert resolve(bench, address_of(1)) == []
    mapped = Address("::ffff:" + address_of(1).host, address_of(1).port)
    assert resolve(bench, mapped) == []


def test_d11_a_seed_that_is_not_alive_is_dialled_every_minute_by_a_node_that_has_joined() -> None:
    bench = alone()
    (call,) = resolve(bench, address_of(1))
    join_by(bench, call, known=[a_record(1)])
    bench.fire(("seeds", 0))
    wait = bench.timers["seeds", 0] - bench.now
    assert 60 * S <= wait <= 66 * S
    (call,) = resolve(bench, address_of(1), address_of(7))
    assert call.to == address_of(7)


def test_a_name_that_stands_for_a_crowd_is_bounded() -> None:
    bench = alone()
    calls = resolve(bench, *[address_of(n) for n in range(1, 200)])
    dialled = 0
    while calls:
        dialled += 1
        calls += of(bench.answer(calls.pop(), NodeRef("", 0), None), Call)
    assert dialled == ADDRESSES_MAX


def test_addresses_where_nobody_can_be_are_not_dialled() -> None:
    bench = alone()
    assert resolve(bench, Address("0.0.0.0", 7946), Address("224.0.0.1", 7946), Address("name", 7946)) == []


# --- the dead -------------------------------------------------------------------------------------------


def test_d11_the_dead_are_looked_for_every_30_seconds_and_the_left_are_not() -> None:
    bench = Bench(4)
    dead = a_record(2, standing=Standing.DEAD)
    bench.hear(1, news=[dead, a_record(3, standing=Standing.LEFT)])
    bench.core.voice.news.clear()
    for _ in range(3):
        effects = bench.fire(("redial", 0))
        assert bench.timers["redial", 0] == bench.now + REDIAL_NS
        ((to, packet),) = packets(effects)
        assert to == address_of(2)
        assert isinstance(packet.message, Ping)
        assert packet.message.about == dead
        assert [call.to for call in of(effects, Call)] == [address_of(2)]
        bench.answer(of(effects, Call)[0], NodeRef("", 0), None)


def test_of_many_dead_all_get_their_turn() -> None:
    bench = Bench(1)
    for number in range(100, 180):
        bench.hear(1, news=[a_record(number, standing=Standing.DEAD)])
    looked_for = set()
    for _ in range(3):
        effects = bench.fire(("redial", 0))
        assert len(of(effects, Send)) <= REDIAL_PINGS
        assert len(of(effects, Call)) <= REDIAL_CALLS
        looked_for |= {sent.to for sent in of(effects, Send)}
        for call in of(effects, Call):
            bench.answer(call, NodeRef("", 0), None)
    assert len(looked_for) == 80


def test_d11_with_one_that_came_back_tables_are_compared_at_once() -> None:
    bench = Bench(4)
    bench.hear(1, news=[a_record(n, standing=Standing.DEAD) for n in (2, 3)])
    effects = bench.hear(2, news=[a_record(2, incarnation=1)], incarnation=1)
    assert ("refuted", "peer-2") in told(effects)
    (call,) = of(effects, Call)
    assert call.to == address_of(2)
    # A whole island that comes back is not compared with one by one.
    assert of(bench.hear(3, news=[a_record(3, incarnation=1)], incarnation=1), Call) == []


# --- leaving --------------------------------------------------------------------------------------------


def test_d10_a_leaver_tells_it_often_enough_answers_a_second_more_and_is_gone() -> None:
    bench = Bench(12)
    start = bench.now
    effects = bench.do(bench.core.command(Leave(), bench.now))
    left = a_me(Standing.LEFT)
    heard = [to for to, packet in packets(effects) if left in packet.news]
    assert len(heard) == 3
    while bench.core.phase is Phase.LEAVING:
        heard += [to for to, p in packets(bench.fire(("gossip", 0))) if left in p.news]
    assert len(heard) >= sends_of_news(13)
    assert bench.now - start < 2 * S
    assert bench.timers["linger", 0] == bench.now + S
    ((_, ack),) = packets(bench.hear(1, Ping(5, ME)))
    assert ack.message == Ack(5)
    assert left in ack.news
    assert told(bench.fire(("linger", 0))) == [("gone", ME.worker_id)]
    assert bench.hear(1, Ping(5, ME)) == []


def a_me(standing: Standing, incarnation: int = 0) -> Record:
    return Record(ME.worker_id, ME.epoch, incarnation, int(standing), "10.0.0.1", 7946, HASH)


def test_a_leaver_probes_nobody_and_declares_nobody() -> None:
    bench = Bench(6)
    bench.hear(1, news=[a_record(2, standing=Standing.SUSPECT, accuser="peer-1")])
    bench.round()
    bench.do(bench.core.command(Leave(), bench.now))
    assert {purpose for purpose, _ in bench.timers} == {"leave", "gossip"}


def test_the_news_of_a_leave_is_given_two_seconds_at_most() -> None:
    bench = Bench(12)
    start = bench.now
    bench.do(bench.core.command(Leave(), bench.now))
    assert bench.timers["leave", 0] == start + 2 * S
    del bench.timers["gossip", 0]
    bench.fire(("leave", 0))
    assert bench.core.phase is Phase.LINGERING


@pytest.mark.parametrize("standing", [Standing.SUSPECT, Standing.DEAD])
def test_d10_a_leaver_that_is_accused_says_that_it_left(standing: Standing) -> None:
    bench = Bench(6)
    bench.do(bench.core.command(Leave(), bench.now))
    ((_, packet),) = packets(bench.hear(1, news=[about_me(standing)]))
    assert a_me(Standing.LEFT) in packet.news
    assert bench.core.record == a_me(Standing.LEFT)


def test_a_leave_outranks_a_suspicion_and_a_death_of_the_same_incarnation() -> None:
    bench = Bench(6)
    bench.hear(1, news=[a_record(2, standing=Standing.SUSPECT, accuser="peer-1")])
    timer = bench.suspicion_timer(2)
    assert told(bench.hear(1, news=[a_record(2, standing=Standing.LEFT)])) == [("left", "peer-2")]
    assert timer not in bench.timers


def test_d8_two_different_leaves_of_one_node_are_told_a_bounded_number_of_times() -> None:
    bench = Bench(6)
    for _ in range(20):
        for incarnation in (3, 4):
            bench.hear(1, news=[a_record(2, standing=Standing.LEFT, incarnation=incarnation)])
    sent = 0
    while ("gossip", 0) in bench.timers:
        for _, packet in packets(bench.fire(("gossip", 0))):
            sent += sum(record.worker_id == "peer-2" for record in packet.news)
    assert sent == sends_of_news(6)


def test_alone_a_leave_is_over_at_once_and_only_once() -> None:
    bench = Bench(0)
    assert told(bench.do(bench.core.command(Leave(), bench.now))) == [("gone", ME.worker_id)]
    assert of(bench.do(bench.core.command(Leave(), bench.now)), Emit) == []


def test_before_join_there_is_nothing_to_leave() -> None:
    bench = Bench(0, joins=False)
    assert told(bench.core.command(Leave(), bench.now)) == [("gone", ME.worker_id)]


def test_after_the_end_no_timer_is_armed() -> None:
    bench = Bench(2)
    bench.do(bench.core.command(Leave(), bench.now))
    while bench.core.phase is not Phase.GONE:
        bench.fire(min(bench.timers, key=lambda timer: bench.timers[timer]))
    for timer in list(bench.timers):
        assert not of(bench.fire(timer), Arm)


def test_d10_a_leaver_whose_first_push_pull_is_under_way_waits_for_it_and_says_goodbye() -> None:
    bench = alone()
    (call,) = resolve(bench, address_of(1))
    known = [a_record(1), a_record(2)]
    digests = [Digest(r.worker_id, r.epoch, r.incarnation, r.standing) for r in known]
    (exchange,) = of(bench.answer(call, NodeRef("peer-1", 1), Digests(digests)), Call)
    # By now the other may have heard that we are there.
    assert told(bench.do(bench.core.command(Leave(), bench.now))) == []
    bench.answer(exchange, NodeRef("peer-1", 1), Records(known))
    heard = {to for to, p in packets(bench.fire(("gossip", 0))) if a_me(Standing.LEFT) in p.news}
    assert heard == {address_of(1), address_of(2)}


@pytest.mark.parametrize("answer", [Same(), Digests([]), None])
def test_a_leaver_that_nobody_heard_of_goes_when_its_dial_is_over(answer: Same | Digests | None) -> None:
    bench = alone()
    (call,) = resolve(bench, address_of(1))
    assert told(bench.do(bench.core.command(Leave(), bench.now))) == []
    effects = bench.answer(call, NodeRef("peer-1", 1), answer)
    assert of(effects, Call) == []
    assert told(effects) == [("gone", ME.worker_id)]
    assert ("leave", 0) not in bench.timers
