"""Loads, surges, who is eligible, and what a standstill voids."""

from __future__ import annotations

import random

import pytest

from fluxmesh.mesh.effects import Effect, Emit, Join, MemberView, Send, UpdateLoad
from fluxmesh.mesh.loads import OTHERS_MAX
from fluxmesh.mesh.messages import Ack, Flag, Gossip, Load, NodeRef, Ping, PingReq, Standing
from fluxmesh.mesh.surge import FANOUT, GAP_NS
from fluxmesh.mesh.swim import Swim
from fluxmesh.mesh.timing import MS, S, Timing
from tests.unit.mesh.driving import (
    ME,
    META,
    MY_ADDRESS,
    Bench,
    a_record,
    address_of,
    of,
    packets,
    told,
)

READY = int(Flag.READY | Flag.STEALS)
MINE = Load("", 0, 0, queued=3, running=8, capacity=8)


def a_load(
    number: int,
    counter: int = 1,
    *,
    epoch: int = 1,
    stealable: int = 0,
    running: int = 0,
    flags: int = READY,
    age_ms: int = 0,
) -> Load:
    return Load(
        f"peer-{number}",
        epoch,
        counter,
        running=running,
        capacity=8,
        stealable=stealable,
        flags=flags,
        age_ms=age_ms,
    )


def update(bench: Bench, *, stealable: int = 0) -> list[Effect]:
    load = Load("", 0, 0, queued=stealable, running=8, capacity=8, stealable=stealable, flags=READY)
    return bench.do(bench.core.command(UpdateLoad(load), bench.now))


def view(bench: Bench, number: int) -> MemberView:
    views = bench.core.members(bench.now)
    return next(one for one in views if one.record.worker_id == f"peer-{number}")


def test_our_own_load_goes_with_every_packet_with_our_name_and_its_age() -> None:
    bench = Bench(2)
    update(bench, stealable=1)
    bench.now += 70 * MS
    ((_, packet),) = packets(bench.hear(1, Ping(1, ME)))
    assert packet.loads == [
        Load(
            ME.worker_id,
            ME.epoch,
            1,
            queued=1,
            running=8,
            capacity=8,
            stealable=1,
            flags=READY,
            age_ms=70,
        )
    ]


def test_a_load_that_does_not_change_is_renewed_every_period_under_a_new_number() -> None:
    bench = Bench(2)
    update(bench)
    _, _, effects = bench.round()
    own = packets(effects)[0][1].loads[0]
    assert (own.counter, own.age_ms) == (2, 0)


def test_the_last_word_of_its_subject_wins_in_any_order() -> None:
    bench = Bench(2)
    for counter, running in [(5, 5), (4, 4), (5, 6), (7, 7), (6, 1)]:
        bench.hear(2, loads=[a_load(1, counter, running=running)])
    load = view(bench, 1).load
    assert load is not None
    assert (load.counter, load.running) == (7, 7)


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_load_of_another_run_is_ignored(epoch: int) -> None:
    bench = Bench(2)
    bench.hear(2, loads=[a_load(1, epoch=epoch)])
    assert view(bench, 1).load is None


def test_a_load_of_a_node_we_do_not_know_or_that_is_gone_is_not_kept() -> None:
    bench = Bench(2)
    bench.hear(1, loads=[a_load(50)])
    bench.hear(1, news=[a_record(2, standing=Standing.DEAD)])
    bench.hear(1, loads=[a_load(2)])
    assert view(bench, 2).load is None
    assert len(bench.core.table.rows) == 2


def test_the_age_of_a_load_counts_from_its_subject_and_beyond_five_seconds_it_is_unknown() -> None:
    bench = Bench(2)
    bench.hear(2, loads=[a_load(1, age_ms=3_000)])
    bench.now += S
    load = view(bench, 1).load
    assert load is not None
    assert load.age_ms == 4_000
    bench.now += S + MS
    assert view(bench, 1).load is None


def test_the_eight_freshest_of_others_ride_along_with_their_ages() -> None:
    bench = Bench(30)
    update(bench)
    order = list(range(1, 31))
    random.Random(3).shuffle(order)
    for number in order:
        bench.hear(1, loads=[a_load(number, age_ms=10 * number)])
    ((_, packet),) = packets(bench.hear(2, Ping(1, ME)))
    others = packet.loads[1:]
    assert len(others) == OTHERS_MAX
    # Freshest first, without the one who is spoken to.
    assert [load.worker_id for load in others] == [f"peer-{n}" for n in (1, 3, 4, 5, 6, 7, 8, 9)]
    assert [load.age_ms for load in others] == [10, 30, 40, 50, 60, 70, 80, 90]


def test_what_is_too_old_or_dead_is_not_passed_on() -> None:
    bench = Bench(4)
    update(bench)
    bench.hear(1, loads=[a_load(1), a_load(2), a_load(3, age_ms=6_000)])
    bench.hear(1, news=[a_record(2, standing=Standing.DEAD)])
    bench.core.voice.news.clear()
    ((_, packet),) = packets(bench.hear(4, Ping(1, ME)))
    assert [load.worker_id for load in packet.loads] == ["me", "peer-1"]


# --- surges ---------------------------------------------------------------------------------------------


def with_idle_peers(*idle: int, peers: int = 8) -> Bench:
    bench = Bench(peers)
    update(bench)
    for number in range(1, peers + 1):
        bench.hear(number, loads=[a_load(number, running=0 if number in idle else 8)])
    return bench


def test_a_surplus_that_rises_above_the_bound_is_told_at_once_to_three_idle_peers() -> None:
    bench = with_idle_peers(1, 2, 3, 4, 5)
    assert of(update(bench, stealable=6), Send) == []  # threshold 2 and batch 4: not yet
    sent = packets(update(bench, stealable=7))
    assert len(sent) == FANOUT
    assert {to for to, _ in sent} < {address_of(n) for n in (1, 2, 3, 4, 5)}
    assert all(p.message == Gossip() and p.loads[0].stealable == 7 for _, p in sent)
    assert of(update(bench, stealable=9), Send) == []  # it rose before


def test_fewer_idle_peers_fewer_packets_and_the_busy_get_none() -> None:
    bench = with_idle_peers(4)
    assert [to for to, _ in packets(update(bench, stealable=20))] == [address_of(4)]


@pytest.mark.parametrize(
    "flags",
    [int(Flag.STEALS), int(Flag.READY), READY | Flag.DRAINING, READY | Flag.DEGRADED],
)
def test_who_is_not_ready_or_does_not_steal_is_not_told(flags: int) -> None:
    bench = Bench(1)
    bench.hear(1, loads=[a_load(1, flags=int(flags))])
    assert of(update(bench, stealable=20), Send) == []


def test_a_suspect_and_one_whose_load_is_old_are_not_told() -> None:
    bench = with_idle_peers(1, 2, peers=3)
    bench.hear(3, news=[a_record(1, standing=Standing.SUSPECT, accuser="peer-3")])
    assert [to for to, _ in packets(update(bench, stealable=20))] == [address_of(2)]
    bench.now += 6 * S
    update(bench)
    assert of(update(bench, stealable=20), Send) == []


def test_a_surplus_that_trembles_about_the_bound_is_told_every_50_ms_at_most() -> None:
    bench = with_idle_peers(1)
    assert len(of(update(bench, stealable=7), Send)) == 1
    start = bench.now
    for _ in range(10):
        bench.now += MS
        assert of(update(bench, stealable=6), Send) == []
        assert of(update(bench, stealable=7), Send) == []
    assert bench.timers["surge", 0] == start + GAP_NS
    assert len(of(bench.fire(("surge", 0)), Send)) == 1


def test_a_surplus_that_is_gone_when_its_turn_comes_is_not_told() -> None:
    bench = with_idle_peers(1)
    for stealable in (7, 6, 7, 6):
        update(bench, stealable=stealable)
    assert of(bench.fire(("surge", 0)), Send) == []


def test_the_surge_of_another_is_an_event_when_it_rises_and_not_while_it_lasts() -> None:
    bench = Bench(2)
    events = []
    for counter, stealable in enumerate([0, 7, 9, 6, 7], start=1):
        load = a_load(1, counter, stealable=stealable)
        effects = bench.hear(1, loads=[load])
        events.append([effect.load for effect in of(effects, Emit) if effect.kind == "surge"] == [load])
    assert events == [False, True, False, False, True]


# --- eligible -------------------------------------------------------------------------------------------


def test_eligible_is_who_lives_answered_us_and_has_said_for_a_second_that_it_is_ready() -> None:
    bench = Bench(1)
    assert not view(bench, 1).eligible
    bench.hear(1, loads=[a_load(1, 1)])
    bench.now += S - 1
    bench.hear(1, loads=[a_load(1, 2)])
    assert not view(bench, 1).eligible
    bench.now += 1
    assert view(bench, 1).eligible
    bench.core.table.rows["peer-1"].answered = False
    assert not view(bench, 1).eligible


@pytest.mark.parametrize("flag", [Flag.DRAINING, Flag.DEGRADED])
def test_one_that_drains_or_stands_still_is_not_eligible_until_a_second_after(flag: Flag) -> None:
    bench = Bench(1)
    bench.hear(1, loads=[a_load(1, 1)])
    bench.now += 2 * S
    bench.hear(1, loads=[a_load(1, 2, flags=READY | int(flag))])
    assert not view(bench, 1).eligible
    bench.hear(1, loads=[a_load(1, 3)])
    assert not view(bench, 1).eligible
    bench.now += S
    assert view(bench, 1).eligible


def test_a_suspect_keeps_its_place_and_another_run_starts_anew() -> None:
    bench = Bench(2)
    bench.hear(1, loads=[a_load(1)])
    bench.now += S
    bench.hear(2, news=[a_record(1, standing=Standing.SUSPECT, accuser="peer-2")])
    assert view(bench, 1).eligible
    bench.hear(2, news=[a_record(1, epoch=2)])
    assert not view(bench, 1).eligible


def test_we_stand_in_our_own_view_first() -> None:
    bench = Bench(1)
    update(bench)
    mine = bench.core.members(bench.now)[0]
    assert (mine.record, mine.meta, mine.eligible, mine.answered) == (bench.core.record, META, True, True)


def test_newcomers_are_greeted_so_that_they_are_eligible_long_before_their_turn() -> None:
    bench = Bench(100)
    bench.hear(1, news=[a_record(200)])
    pings = []
    while ("gossip", 0) in bench.timers:
        for to, packet in packets(bench.fire(("gossip", 0))):
            if isinstance(packet.message, Ping):
                pings.append((to, packet.message.seq))
                assert bench.core.record in packet.news  # it may not know us
    assert [to for to, _ in pings] == [address_of(200)] * 3
    bench.hear(200, Ack(pings[0][1]))
    assert view(bench, 200).answered


# --- standing still -------------------------------------------------------------------------------------


def test_d20_a_standstill_voids_the_open_probe_and_gives_suspects_the_time_back() -> None:
    bench = Bench(9)
    bench.hear(1, news=[a_record(2, standing=Standing.SUSPECT, accuser="peer-1")])
    deadline = bench.timers[bench.suspicion_timer(2)]
    target, seq, _ = bench.round()
    bench.now += 5 * S
    bench.do(bench.core.on_stall(5 * S, bench.now))
    assert ("detour", seq) not in bench.timers
    assert bench.timers["round", 0] == bench.now + Timing().period_ns
    assert bench.timers[bench.suspicion_timer(2)] == deadline + 5 * S
    bench.fire(("round", 0))
    if target != 2:
        assert bench.standing(target) is Standing.ALIVE
    assert bench.core.counters()["stalls"] == 1


def test_d20_a_suspicion_timer_that_comes_late_by_a_standstill_declares_nobody() -> None:
    bench = Bench(9)
    bench.hear(1, news=[a_record(2, standing=Standing.SUSPECT, accuser="peer-1")])
    timer = bench.suspicion_timer(2)
    bench.now += 40 * S
    bench.do(bench.core.on_stall(40 * S, bench.now))
    assert told(bench.do(bench.core.on_timer(timer, bench.now))) == []
    assert bench.standing(2) is Standing.SUSPECT


def test_d20_what_was_asked_of_us_before_a_standstill_is_not_answered_after_it() -> None:
    bench = Bench(3)
    where = address_of(2)
    bench.hear(1, PingReq(1, NodeRef("peer-2", 1), where.host, where.port, 250))
    bench.do(bench.core.on_stall(5 * S, bench.now))
    assert bench.core.counters()["relays_open"] == 0
    assert not any(purpose == "relay" for purpose, _ in bench.timers)


# --- the same again -------------------------------------------------------------------------------------


def test_the_same_seed_and_the_same_inputs_give_the_same_effects() -> None:
    def effects_of_a_life(seed: int) -> list[Effect]:
        core = Swim(
            me=ME,
            address=MY_ADDRESS,
            meta=META,
            timing=Timing(),
            seeds=("s",),
            rng=random.Random(seed),
        )
        done = core.command(Join(), 0)
        for step in range(300):
            now = step * 50 * MS
            standing = Standing.SUSPECT if step % 3 == 2 else Standing.ALIVE
            core.membership.hear(a_record(step % 40, incarnation=step // 40, standing=standing), now)
            for purpose in ("round", "gossip", "redial"):
                done += core.on_timer((purpose, 0), now)
        return done

    assert effects_of_a_life(4) == effects_of_a_life(4)
    assert effects_of_a_life(4) != effects_of_a_life(5)
