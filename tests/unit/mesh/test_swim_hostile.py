"""What a member that lies can do to others: little, and not for long."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from fluxmesh.mesh.effects import Call, Effect, Leave, Send, UpdateLoad
from fluxmesh.mesh.loads import COUNTER_MAX, LEAP_MAX
from fluxmesh.mesh.member import INCARNATION_MAX, Member
from fluxmesh.mesh.membership import GREETINGS_A_PERIOD, GREETINGS_AT_ONCE
from fluxmesh.mesh.messages import Ack, Exchange, Flag, Load, Meta, NodeRef, Ping, PingReq, Standing, TcpPing
from fluxmesh.mesh.particulars import SPARE_MAX
from fluxmesh.mesh.probe import RELAYS_AN_ASKER, RELAYS_MAX, RELAYS_OF_STRANGERS_MAX
from fluxmesh.mesh.swim import Phase
from fluxmesh.mesh.timing import METAS_MAX, SCORE_MAX, Timing
from fluxmesh.mesh.wire import meta_hash
from tests.unit.mesh.driving import ME, Bench, a_record, about_me, address_of, of, packets, told

ACCUSED = [Standing.SUSPECT, Standing.DEAD, Standing.LEFT]

# --- incarnations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("standing", ACCUSED)
@pytest.mark.parametrize("way", ["news", "ping", "exchange", "tcp ping"])
def test_no_accusation_is_heard_that_its_subject_could_not_outbid(standing: Standing, way: str) -> None:
    bench = Bench(5)
    mine = about_me(standing, INCARNATION_MAX)
    if way == "news":
        bench.hear(1, news=[mine, a_record(2, standing=standing, incarnation=INCARNATION_MAX, accuser="x")])
    elif way == "ping":
        bench.hear(1, Ping(7, ME, mine))
    elif way == "exchange":
        other = a_record(2, standing=standing, incarnation=INCARNATION_MAX, accuser="x")
        bench.ask(1, Exchange([mine, other], [], []))
    else:
        bench.ask(1, TcpPing(ME, mine))
    assert bench.core.record.incarnation == 0
    assert bench.standing(2) is Standing.ALIVE


@pytest.mark.parametrize("standing", [Standing.SUSPECT, Standing.DEAD])
def test_the_highest_accusation_that_is_heard_can_be_refuted(standing: Standing) -> None:
    bench, witness = Bench(5), Bench(5)
    bench.hear(1, news=[about_me(standing, INCARNATION_MAX - 1)])
    answer = bench.core.record
    assert (answer.incarnation, answer.standing) == (INCARNATION_MAX, Standing.ALIVE)
    witness.hear(1, news=[a_record(2, standing=standing, incarnation=INCARNATION_MAX - 1, accuser="x")])
    assert witness.standing(2) is standing
    witness.hear(1, news=[a_record(2, incarnation=answer.incarnation)])
    assert witness.standing(2) is Standing.ALIVE


def test_nobody_goes_beyond_the_bound_of_incarnations_himself() -> None:
    bench = Bench(5)
    bench.hear(1, news=[about_me(Standing.ALIVE, INCARNATION_MAX)])
    assert bench.core.record.incarnation == INCARNATION_MAX
    bench.core.membership.describe(4711)
    assert (bench.core.record.incarnation, bench.core.record.meta_hash) == (INCARNATION_MAX, 4711)


def test_who_stands_at_the_bound_is_still_found_dead_by_our_own_eyes() -> None:
    bench = Bench(3)
    bench.hear(1, news=[a_record(2, incarnation=INCARNATION_MAX)])
    bench.round_of(2)
    bench.round()
    assert bench.standing(2) is Standing.SUSPECT
    bench.fire(bench.suspicion_timer(2))
    assert bench.standing(2) is Standing.DEAD


# --- a fenced node --------------------------------------------------------------------------------------


def test_a_fenced_node_that_is_to_leave_is_gone_at_once_and_without_a_word() -> None:
    bench = Bench(5)
    bench.hear(1, news=[about_me(Standing.ALIVE, epoch=ME.epoch + 1)])
    effects = bench.do(bench.core.command(Leave(), bench.now))
    assert told(effects) == [("gone", ME.worker_id)]
    assert of(effects, Send) == []
    assert bench.core.phase is Phase.GONE
    assert told(bench.do(bench.core.command(Leave(), bench.now))) == []


@pytest.mark.parametrize("lingers", [False, True])
def test_a_leaving_node_that_is_fenced_is_gone_at_once(lingers: bool) -> None:
    bench = Bench(5)
    bench.do(bench.core.command(Leave(), bench.now))
    if lingers:
        bench.fire(("leave", 0))
    effects = bench.hear(1, news=[about_me(Standing.ALIVE, epoch=ME.epoch + 1)])
    assert told(effects) == [("fenced", ME.worker_id), ("gone", ME.worker_id)]
    assert packets(effects) == []
    assert bench.core.phase is Phase.GONE


# --- loads ----------------------------------------------------------------------------------------------


def a_load(number: int, counter: int, *, running: int = 0) -> Load:
    return Load(f"peer-{number}", 1, counter, running=running, capacity=8, flags=int(Flag.READY))


def held(bench: Bench, number: int) -> tuple[int, int]:
    load = bench.core.table.rows[f"peer-{number}"].load
    assert load is not None
    return load.counter, load.running


@pytest.mark.parametrize("forged", [4, LEAP_MAX, COUNTER_MAX, COUNTER_MAX + 1, (1 << 63) - 1])
def test_a_forged_load_does_not_mute_its_subject(forged: int) -> None:
    bench = Bench(3)
    bench.hear(2, loads=[a_load(1, forged, running=8)])
    bench.hear(1, loads=[a_load(1, 3, running=1)])
    assert held(bench, 1) == (3, 1)
    # Nor do others who still pass the lie on, or only for as long as it counts no more than could be true.
    bench.hear(2, loads=[a_load(1, forged, running=8)])
    assert held(bench, 1) == ((3, 1) if forged > LEAP_MAX + 3 else (forged, 8))
    bench.hear(1, loads=[a_load(1, 4, running=2)])
    assert held(bench, 1) == (4, 2)
    bench.hear(3, loads=[a_load(1, 5, running=3)])
    assert held(bench, 1) == (5, 3)


def test_a_lie_in_the_name_of_the_sender_is_over_with_its_next_packet() -> None:
    bench = Bench(3)
    bench.hear(1, loads=[a_load(1, 3, running=1)])
    bench.hear(1, loads=[a_load(1, COUNTER_MAX, running=8)])
    bench.hear(1, loads=[a_load(1, 4, running=2)])
    assert held(bench, 1) == (4, 2)


def test_a_packet_that_was_overtaken_takes_no_word_back() -> None:
    bench = Bench(3)
    for counter, running in [(5, 5), (3, 3), (5, 6)]:
        bench.hear(1, loads=[a_load(1, counter, running=running)])
        assert held(bench, 1) == (5, 5)


def test_what_others_pass_on_under_our_name_is_outbid() -> None:
    bench = Bench(3)
    load = Load("", 0, 0, running=1, capacity=8, flags=int(Flag.READY))
    bench.do(bench.core.command(UpdateLoad(load), bench.now))
    bench.hear(2, loads=[Load(ME.worker_id, ME.epoch, 77, running=8)])
    own = bench.core.voice.loads.own
    assert own is not None
    assert (own.counter, own.running) == (78, 1)
    bench.hear(2, loads=[Load(ME.worker_id, ME.epoch, COUNTER_MAX), Load(ME.worker_id, ME.epoch + 1, 90)])
    assert bench.core.voice.loads.own == own


# --- particulars ----------------------------------------------------------------------------------------


def a_meta(number: int) -> Meta:
    return Meta((f"queue-{number}",), (0,), 4)


def test_metas_are_matched_to_members_by_their_hash_and_not_by_a_look_at_everybody() -> None:
    bench = Bench(3)
    metas = [a_meta(number) for number in range(METAS_MAX)]
    unknown = Exchange([], [], metas)

    class Watched(list[Member]):
        walks = 0

        def __iter__(self) -> Iterator[Member]:
            Watched.walks += 1
            return super().__iter__()

    bench.core.table.living = Watched(bench.core.table.living)
    bench.ask(1, unknown)
    assert Watched.walks == 0


def test_those_who_live_are_listed_by_their_hash_whatever_becomes_of_them() -> None:
    bench = Bench(40)
    rng = random.Random(4)
    for _ in range(2_000):
        number, standing = rng.randrange(1, 60), rng.choice(list(Standing))
        record = a_record(
            number,
            standing=standing,
            incarnation=rng.randrange(40),
            epoch=rng.randrange(1, 4),
            accuser="x",
            meta_hash=rng.randrange(1, 6),
        )
        bench.hear(1, news=[record])
    table = bench.core.table
    for digest in {*table.by_hash, *range(1, 6)}:
        expected = [row for row in table.living if row.record.meta_hash == digest]
        assert sorted(row.number for row in table.holders(digest)) == sorted(row.number for row in expected)
        assert (digest in table.by_hash) == bool(expected)


def test_a_member_that_changes_its_hash_without_end_fills_no_memory() -> None:
    bench = Bench(3)
    for step in range(8):
        metas = [a_meta(1_000 * step + k) for k in range(100)]
        for k, meta in enumerate(metas):
            record = a_record(2, incarnation=100 * step + k + 1, meta_hash=meta_hash(meta))
            bench.ask(1, Exchange([record], [], [meta]))
            known = len(bench.core.particulars._known)
            assert known <= len(bench.core.table.by_hash) + SPARE_MAX + 1


# --- relays ---------------------------------------------------------------------------------------------


def relayed(effects: list[Effect], number: int) -> bool:
    return address_of(number) in [to for to, _ in packets(effects)]


def a_request(seq: int, number: int, *, window_ms: int = 400) -> PingReq:
    to = address_of(number)
    return PingReq(seq, NodeRef(f"peer-{number}", 1), to.host, to.port, window_ms)


def test_one_asker_cannot_take_the_relays_of_others() -> None:
    bench = Bench(4)
    for seq in range(2 * RELAYS_MAX):
        assert relayed(bench.hear(1, a_request(seq, 4, window_ms=60_000)), 4)
    assert bench.core.counters()["relays_open"] == RELAYS_AN_ASKER
    assert relayed(bench.hear(2, a_request(7, 4)), 4)


def test_askers_that_never_answered_cannot_take_the_relays_of_those_who_did() -> None:
    bench = Bench(4)
    made_up = range(10, 10 + RELAYS_MAX)
    bench.hear(1, news=[a_record(number) for number in made_up[:20]])
    for start in range(20, RELAYS_MAX, 20):
        bench.hear(1, news=[a_record(number) for number in made_up[start : start + 20]])
    for number in made_up:
        bench.hear(number, a_request(number, 4))
    assert bench.core.counters()["relays_open"] == RELAYS_OF_STRANGERS_MAX
    assert relayed(bench.hear(2, a_request(7, 4)), 4)


def test_a_relay_lasts_no_longer_than_the_longest_period_of_an_asker() -> None:
    bench = Bench(4)
    start = bench.now
    bench.hear(1, a_request(7, 4, window_ms=60_000))
    for _ in range(2):
        (timer,) = [timer for timer in bench.timers if timer[0] == "relay"]
        bench.fire(timer)
    assert bench.now - start == (SCORE_MAX + 1) * Timing().period_ns
    assert bench.core.counters()["relays_open"] == 0
    assert bench.core.prober._relays_of == {}


# --- members that were made up --------------------------------------------------------------------------


def made_up(bench: Bench, count: int) -> None:
    for start in range(1_000, 1_000 + count, 20):
        bench.hear(1, news=[a_record(number) for number in range(start, min(start + 20, 1_000 + count))])


@pytest.mark.parametrize("peers", [2, 9])
def test_a_thousand_made_up_members_hide_no_death(peers: int) -> None:
    """The wait for news grows with the logarithm of all who are listed, and with nothing else."""
    timing = Timing()
    bench = Bench(peers)
    made_up(bench, 1_000)
    start, dead = bench.now, 2
    effects: list[Effect] = []
    while bench.standing(dead) is not Standing.DEAD:
        assert bench.now - start < (2 * peers + 4) * timing.period_ns + timing.suspicion_ns(
            1_010, 0, known=peers + 1
        )
        target, seq, _ = bench.round()
        if target != dead and target < 1_000:
            effects += bench.hear(target, Ack(seq))
        for timer in [
            timer for timer, at in bench.timers.items() if timer[0] == "suspicion" and at <= bench.now
        ]:
            bench.fire(timer)
    assert bench.core.voice.health.score <= 1


def test_never_more_than_every_fourth_probe_goes_to_who_never_answered() -> None:
    bench = Bench(5)
    made_up(bench, 100)
    targets = []
    for _ in range(40):
        target, seq, _ = bench.round()
        targets.append(target)
        if target < 1_000:
            bench.hear(target, Ack(seq))
    assert sum(target >= 1_000 for target in targets) == 10
    # And the others have their rounds as ever.
    known = [target for target in targets if target < 1_000]
    assert all(sorted(known[at : at + 5]) == [1, 2, 3, 4, 5] for at in range(0, 30, 5))


def test_one_that_never_answered_and_fails_our_probe_goes_after_the_shortest_wait() -> None:
    bench = Bench(5)
    made_up(bench, 1)
    bench.round_of(1_000)
    bench.round()
    start = bench.now
    assert bench.standing(1_000) is Standing.SUSPECT
    timer = bench.suspicion_timer(1_000)
    assert bench.timers[timer] == start + Timing().suspicion_min_ns(7)
    bench.fire(timer)
    assert bench.standing(1_000) is Standing.DEAD


def test_news_helpers_and_exchanges_are_for_those_who_answered() -> None:
    bench = Bench(5)
    made_up(bench, 200)
    bench.core.membership.ungreeted.clear()
    known = {address_of(number) for number in range(1, 6)}
    for _ in range(6):
        assert {to for to, _ in packets(bench.fire(("gossip", 0)))} <= known
    _, seq, _ = bench.round()
    asked = packets(bench.fire(("detour", seq)))
    assert len(asked) == 3
    assert {to for to, _ in asked} <= known
    (call,) = of(bench.fire(("push_pull", 0)), Call)
    assert call.to in known


def test_made_up_members_that_come_and_go_take_no_room() -> None:
    bench = Bench(3)
    core, left = bench.core, int(Standing.LEFT)
    for step in range(400):
        numbers = range(1_000 + 8 * step, 1_008 + 8 * step)
        gone = [a_record(number, standing=Standing(left)) for number in numbers]
        bench.hear(1, news=[a_record(number) for number in numbers])
        bench.hear(1, news=gone)
        table = core.table
        assert len(table.unmet.rows) == len(table.unmet._places) == len(core.membership.ungreeted) == 0
        assert len(table.met.rows) == len(table.met._places) == len(table.living) == 3
        assert len(table.by_hash) == 1


def test_the_rolls_are_the_living_whatever_becomes_of_them() -> None:
    bench, rng = Bench(20), random.Random(2)
    table = bench.core.table
    for _ in range(1_500):
        number = rng.randrange(1, 40)
        record = a_record(
            number,
            standing=rng.choice(list(Standing)),
            incarnation=rng.randrange(30),
            epoch=rng.randrange(1, 4),
            accuser="x",
        )
        bench.hear(50, news=[record])
        row = table.rows.get(f"peer-{rng.randrange(1, 40)}")
        if row is not None:
            bench.core.membership.answered(row)
        bench.core.prober.order.pick()
        for roll, answered in ((table.met, True), (table.unmet, False)):
            expected = {row.number for row in table.living if row.answered is answered}
            assert {row.number for row in roll.rows} == expected
            assert roll._places == {row.number: place for place, row in enumerate(roll.rows)}
            assert 0 <= roll.due <= len(roll.rows)


def test_greetings_beside_the_probes_are_bounded() -> None:
    bench = Bench(2)
    made_up(bench, 400)
    greetings = rounds = 0
    while rounds < 20:
        timer = min((("gossip", 0), ("round", 0)), key=bench.timers.__getitem__)
        sent = packets(bench.fire(timer))
        rounds += timer[0] == "round"
        greetings += sum(isinstance(p.message, Ping) for _, p in sent) if timer[0] == "gossip" else 0
    assert greetings <= GREETINGS_AT_ONCE + GREETINGS_A_PERIOD * 20
    assert greetings >= GREETINGS_AT_ONCE + GREETINGS_A_PERIOD * 18


def test_the_dead_that_were_made_up_are_not_looked_for_instead_of_the_others() -> None:
    bench = Bench(5)
    made_up(bench, 400)
    bench.hear(
        1, news=[a_record(number, standing=Standing.DEAD, accuser="x") for number in range(1_000, 1_016)]
    )
    for start in range(1_016, 1_400, 16):
        some = range(start, start + 16)
        bench.hear(1, news=[a_record(number, standing=Standing.DEAD, accuser="x") for number in some])
    bench.hear(1, news=[a_record(5, standing=Standing.DEAD, accuser="x")])
    for _ in range(3):
        effects = bench.fire(("redial", 0))
        assert address_of(5) in {to for to, _ in packets(effects)}
        assert address_of(5) in {call.to for call in of(effects, Call)}
