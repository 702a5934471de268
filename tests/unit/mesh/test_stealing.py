"""Whom a thief asks, when and for how much; what it makes of answers; what it remembers."""

from __future__ import annotations

from collections import Counter

import pytest

from fluxmesh.mesh.effects import Call, Leave, Seek, UpdateLoad, UpdateMeta
from fluxmesh.mesh.messages import (
    TASKS_MAX,
    Flag,
    Frame,
    Load,
    Meta,
    Noted,
    Nothing,
    Offer,
    Refused,
    Same,
    Standing,
    Steal,
)
from fluxmesh.mesh.stealing import (
    CONNECT_NS,
    DEBIT_NS,
    GAVE_NS,
    PAUSE_FIRST_NS,
    PAUSE_MOST_NS,
    REPLY_NS,
    TICK_NS,
)
from fluxmesh.mesh.timing import MS, S
from tests.unit.mesh.driving import Bench, a_record, address_of
from tests.unit.mesh.thieves import (
    ABOVE,
    READY,
    TASKS,
    Hungry,
    Shelf,
    job,
    jobs,
    ref,
    requests,
    the_request,
    the_take,
)

STEAL = ("steal", 0)


class TestAsking:
    def test_a_surplus_that_becomes_known_is_asked_for_at_once(self) -> None:
        bench = Hungry()
        ((call, body),) = requests(bench.hint(1, 20))
        assert call.to == address_of(1)
        assert body == Steal(4, ("default",), (0, 1, 2, 3), TASKS)
        assert call.timeout_ns == CONNECT_NS + REPLY_NS
        assert bench.count("steals_initiated") == 1

    def test_so_is_one_that_was_known_when_the_wish_came(self) -> None:
        bench = Hungry(want=0)
        assert requests(bench.hint(1, 20)) == []
        assert the_request(bench.seek(4)).to == address_of(1)

    def test_a_peer_far_away_is_waited_for_four_round_trips(self) -> None:
        bench = Hungry()
        bench.core.table.rows["peer-1"].rtt_ns = S
        assert the_request(bench.hint(1, 20)).timeout_ns == CONNECT_NS + 4 * S

    @pytest.mark.parametrize(
        ("surplus", "wish", "want"),
        [(20, 1, 1), (20, 3, 3), (20, 9, 4), (8, 9, 4), (7, 9, 3), (1_000, 1_000, 4)],
    )
    def test_d31_at_most_the_wish_a_batch_and_half_the_surplus_is_asked_for(
        self, surplus: int, wish: int, want: int
    ) -> None:
        ((_, body),) = requests(Hungry(want=wish).hint(1, surplus))
        assert body.want == want

    def test_one_peer_is_asked_at_a_time(self) -> None:
        bench = Hungry()
        call = the_request(bench.hint(1, 20))
        assert requests(bench.hint(2, 30)) == []
        effects = bench.offered(call, 1, Offer(jobs(1), 19))
        assert requests(effects) == []
        take = the_take(effects)
        assert (take.peer, take.jobs) == (ref(1), jobs(1))
        assert the_request(bench.took(1, jobs(1), jobs(1))).to == address_of(2)

    def test_of_more_tasks_than_fit_none_is_named(self) -> None:
        bench = Hungry(tasks=tuple(range(TASKS_MAX + 1)))
        ((_, body),) = requests(bench.hint(1, 20))
        assert body.tasks == ()

    def test_the_wish_is_less_by_what_was_got(self) -> None:
        bench = Hungry(want=5)
        call = the_request(bench.hint(1, 40))
        bench.offered(call, 1, Offer(jobs(1, 2, 3, 4), 36))
        ((_, body),) = requests(bench.took(1, jobs(1, 2, 3, 4), jobs(1, 2, 3, 4)))
        assert body.want == 1


class TestWhoIsNotAsked:
    @pytest.mark.parametrize(
        "flags",
        [
            Flag.STEALS,
            Flag.READY,
            READY | Flag.DRAINING,
            READY | Flag.DEGRADED,
        ],
        ids=["not ready", "does not steal", "drains", "stands still"],
    )
    def test_who_says_that_nothing_is_to_be_had_of_it(self, flags: Flag) -> None:
        bench = Hungry()
        assert requests(bench.hint(1, 20, flags=flags)) == []

    @pytest.mark.parametrize("surplus", [0, 1, ABOVE])
    def test_whose_surplus_is_within_the_bound(self, surplus: int) -> None:
        assert requests(Hungry().hint(1, surplus)) == []

    def test_who_is_suspect_and_it_is_again_once_it_has_said_no(self) -> None:
        bench = Hungry()
        bench.hear(2, news=[a_record(1, standing=Standing.SUSPECT, accuser="peer-2")])
        assert requests(bench.hint(1, 20)) == []
        bench.hear(1, news=[a_record(1, incarnation=1)], incarnation=1)
        assert the_request(bench.hint(1, 20)).to == address_of(1)

    @pytest.mark.parametrize("standing", [Standing.DEAD, Standing.LEFT])
    def test_who_is_gone(self, standing: Standing) -> None:
        bench = Hungry(want=0)
        bench.hint(1, 20)
        bench.hear(2, news=[a_record(1, standing=standing, accuser="peer-2")])
        assert requests(bench.seek(4)) == []

    def test_another_run_before_it_has_been_ready_for_a_second(self) -> None:
        bench = Hungry()
        bench.hear(1, news=[a_record(1, epoch=2)], epoch=2)
        bench.core.membership.answered(bench.core.table.rows["peer-1"])
        assert requests(bench.hint(1, 20, epoch=2)) == []
        bench.now += S
        assert the_request(bench.hint(1, 20, epoch=2)).to == address_of(1)

    def test_whose_load_is_older_than_five_seconds(self) -> None:
        assert requests(Hungry().hint(1, 20, by=2, age_ms=5_001)) == []
        assert len(requests(Hungry().hint(1, 20, by=2, age_ms=5_000))) == 1

    def test_who_serves_no_queue_of_ours(self) -> None:
        bench = Hungry(1)
        bench.do(bench.core.command(UpdateMeta(Meta(("mail",), (0,), 8)), bench.now))
        assert requests(bench.hint(1, 20)) == []

    def test_who_was_given_some_of_ours_in_the_last_second(self) -> None:
        bench = Hungry(shelf=Shelf(*jobs(*range(20))))
        assert isinstance(bench.ask(1, Steal(4, ("default",), (0, 1, 2, 3), ())), Offer)
        assert requests(bench.hint(1, 20)) == []
        bench.now += GAVE_NS
        assert the_request(bench.hint(1, 20)).to == address_of(1)


class TestWhoDoesNotAsk:
    @pytest.mark.parametrize(
        "flags",
        [Flag.READY, READY | Flag.DRAINING, READY | Flag.DEGRADED],
        ids=["does not steal", "drains", "stands still"],
    )
    def test_d32_one_that_may_not_take(self, flags: Flag) -> None:
        bench = Hungry()
        bench.tell(flags=flags)
        assert requests(bench.hint(1, 20) + bench.seek(4)) == []
        assert STEAL not in bench.timers

    def test_d32_one_that_was_paused_needs_nothing(self) -> None:
        bench = Hungry()
        bench.seek(0)
        assert requests(bench.hint(1, 20)) == []
        assert STEAL not in bench.timers

    def test_d32_what_was_asked_for_before_a_drain_is_not_taken_after_it(self) -> None:
        bench = Hungry()
        call = the_request(bench.hint(1, 20))
        bench.tell(flags=READY | Flag.DRAINING)
        effects = bench.offered(call, 1, Offer(jobs(1, 2), 18))
        assert effects == []
        assert bench.count("steals_dropped") == 1

    def test_d32_nor_more_than_is_wanted_by_then(self) -> None:
        bench = Hungry()
        call = the_request(bench.hint(1, 20))
        bench.seek(1)
        assert the_take(bench.offered(call, 1, Offer(jobs(1, 2, 3), 17))).jobs == jobs(1)

    def test_with_stealing_off_nobody_is_asked(self) -> None:
        bench = Hungry(steals=False)
        assert requests(bench.hint(1, 20)) == []

    def test_nor_before_the_own_load_is_known_nor_before_the_join_nor_after_the_leave(self) -> None:
        quiet = Bench(1)
        assert requests(quiet.do(quiet.core.command(Seek(4), quiet.now))) == []
        early = Bench(0, joins=False)
        early.do(early.core.command(UpdateLoad(Load("", 0, 0, capacity=8, flags=int(READY))), early.now))
        assert early.do(early.core.command(Seek(4), early.now)) == []
        bench = Hungry(want=0)
        bench.hint(1, 20)
        bench.do(bench.core.command(Leave(), bench.now))
        assert requests(bench.seek(4)) == []

    def test_d33_one_that_stood_still_asks_as_soon_as_it_is_well_again(self) -> None:
        bench = Hungry()
        bench.tell(flags=READY | Flag.DEGRADED)
        bench.hint(1, 20)
        bench.now += S // 2
        assert the_request(bench.tell()).to == address_of(1)

    def test_d33_after_a_stall_of_the_whole_process_the_next_word_of_a_peer_is_enough(self) -> None:
        bench = Hungry()
        bench.tell(flags=READY | Flag.DEGRADED)
        bench.hint(1, 20)
        bench.now += 10 * S  # all hints are too old by now
        bench.do(bench.core.on_stall(10 * S, bench.now))
        assert requests(bench.tell()) == []
        bench.now += S
        assert the_request(bench.hint(1, 20)).to == address_of(1)

    def test_d33_a_request_whose_answer_was_lost_in_the_stall_is_over_with_its_call(self) -> None:
        bench = Hungry()
        call = the_request(bench.hint(1, 20))
        bench.now += 3 * S
        bench.do(bench.core.on_stall(3 * S, bench.now))
        bench.offered(call, 1, None)
        assert the_request(bench.hint(2, 20)).to == address_of(2)


class TestAnswers:
    @pytest.mark.parametrize(
        ("epoch", "body"),
        [
            (2, Offer(jobs(1), 9)),
            (1, Offer(jobs(1, 2, 3, 4, 5), 9)),
            (1, Offer((job(1, 1), job(1, 2)), 9)),
            (1, Refused("no")),
            (1, Same()),
            (1, Noted()),
            (1, None),
        ],
        ids=["another run", "more than wanted", "twice", "refused", "no offer", "noted", "nobody"],
    )
    def test_d29_what_is_no_answer_to_this_request_changes_nothing_but_a_count(
        self, epoch: int, body: Frame | None
    ) -> None:
        bench = Hungry(1)
        call = the_request(bench.hint(1, 20))
        effects = bench.answer(call, ref(1, epoch), body)
        assert requests(effects) == []
        assert bench.core.counters().get("steals_failed") == 1
        assert bench.core.counters().get("steals_initiated") == 1
        assert not bench.core.thief.is_busy

    def test_d29_a_late_answer_to_a_call_that_is_over_meets_nobody(self) -> None:
        bench = Hungry(1)
        call = the_request(bench.hint(1, 20))
        bench.offered(call, 1, None)
        assert bench.offered(call, 1, Offer(jobs(1, 2), 18)) == []
        second = the_request(bench.hint(1, 20))
        assert bench.offered(call, 1, Offer(jobs(1, 2), 18)) == []
        assert bench.core.thief.is_busy
        assert the_take(bench.offered(second, 1, Offer(jobs(3), 18))).jobs == jobs(3)

    def test_d29_an_answer_of_a_run_that_was_replaced_meanwhile_meets_nobody(self) -> None:
        bench = Hungry(1)
        call = the_request(bench.hint(1, 20))
        bench.hear(1, news=[a_record(1, epoch=2)], epoch=2)
        effects = bench.answer(call, ref(1), Offer(jobs(1), 19))
        assert [one for one in effects if not isinstance(one, Call)] == []
        assert bench.count("steals_late") == 1
        assert bench.core.thief.remembered == 0

    def test_d29_nor_does_it_end_the_request_that_was_made_since(self) -> None:
        bench = Hungry(2)
        old = the_request(bench.hint(1, 20))
        bench.hear(1, news=[a_record(1, epoch=2)], epoch=2)
        new = the_request(bench.hint(2, 20))
        assert bench.answer(old, ref(1), Offer(jobs(1), 19)) == []
        assert bench.core.thief.is_busy
        assert the_take(bench.offered(new, 2, Offer(jobs(2), 18))).peer == ref(2)

    def test_an_empty_offer_and_a_refusal_are_counted_as_such(self) -> None:
        for body in (Offer((), 0), Nothing("nothing", 0, 3)):
            bench = Hungry(1)
            bench.offered(the_request(bench.hint(1, 20)), 1, body)
            assert (bench.count("steals_empty"), bench.count("steals_failed")) == (1, 0)

    def test_after_a_refusal_another_peer_is_asked_at_once(self) -> None:
        bench = Hungry()
        call = the_request(bench.hint(1, 20))
        bench.hint(2, 20)
        assert the_request(bench.offered(call, 1, Nothing("rate", 80))).to == address_of(2)

    def test_one_that_asks_to_be_left_alone_is_even_if_it_says_something(self) -> None:
        bench = Hungry(1)
        bench.offered(the_request(bench.hint(1, 20)), 1, Nothing("rate", 80))
        bench.now += 79 * MS
        assert requests(bench.hint(1, 20)) == []
        bench.now += MS
        assert len(requests(bench.hint(1, 20))) == 1

    def test_but_not_for_longer_than_ten_seconds(self) -> None:
        bench = Hungry(1)
        bench.offered(the_request(bench.hint(1, 20)), 1, Nothing("rate", 1_000_000_000))
        bench.now += 10 * S
        assert len(requests(bench.hint(1, 20))) == 1


class TestHints:
    def test_d34_a_debit_is_undone_by_the_next_load_of_the_peer(self) -> None:
        bench = Hungry(1)
        call = the_request(bench.hint(1, 20))
        bench.offered(call, 1, Offer(jobs(1, 2, 3, 4), 5))  # it says that 5 are left
        assert requests(bench.took(1, jobs(1, 2, 3, 4), jobs(1)) + bench.seek(4)) == []
        assert len(requests(bench.hint(1, 20))) == 1  # the same number, newly said

    def test_d34_and_after_a_second_in_any_case(self) -> None:
        bench = Hungry(1)
        call = the_request(bench.hint(1, 20))
        bench.offered(call, 1, Offer(jobs(1, 2, 3, 4), 5))
        bench.took(1, jobs(1, 2, 3, 4), jobs(1))
        bench.seek(4)
        started = bench.now
        effects = []
        while not requests(effects):
            effects = bench.fire(STEAL)  # nothing else is heard
            assert bench.now <= started + DEBIT_NS + 2 * TICK_NS
        assert bench.now >= started + DEBIT_NS

    def test_what_is_under_way_is_taken_off_what_the_peer_was_said_to_have(self) -> None:
        bench = Hungry(1, want=8)
        call = the_request(bench.hint(1, 9))
        bench.offered(call, 1, Offer(jobs(1, 2, 3, 4), 7))
        ((_, body),) = requests(bench.took(1, jobs(1, 2, 3, 4), jobs(1, 2, 3, 4)))
        assert body.want == 3  # half of the 7 that it said are left

    def test_fruitless_requests_are_made_more_and_more_seldom(self) -> None:
        bench = Hungry(1)
        call = the_request(bench.hint(1, 20, by=1))
        waits = []
        for _ in range(9):
            asked, effects = bench.now, bench.offered(call, 1, Nothing("nothing", 0, 20))
            while not requests(effects):
                effects = bench.fire(STEAL) if STEAL in bench.timers else []
                member = bench.core.table.rows["peer-1"]
                member.born_ns = bench.now  # as if others had passed it on
            call = the_request(effects)
            waits.append(bench.now - asked)
        assert waits[0] <= 3 * TICK_NS
        assert all(PAUSE_FIRST_NS // 2 <= wait <= PAUSE_MOST_NS + 2 * TICK_NS for wait in waits)
        assert min(waits[-3:]) >= PAUSE_MOST_NS // 2

    def test_a_word_of_its_own_ends_the_pause_and_hearsay_does_not(self) -> None:
        bench = Hungry(2)
        bench.offered(the_request(bench.hint(1, 20)), 1, None)
        assert requests(bench.hint(1, 21, by=2)) == []
        assert the_request(bench.hint(1, 22)).to == address_of(1)

    def test_one_that_died_without_a_word_costs_one_connection(self) -> None:
        bench = Hungry(2)
        bench.offered(the_request(bench.hint(1, 20)), 1, None)
        died = bench.now
        while STEAL in bench.timers and bench.timers[STEAL] < died + PAUSE_MOST_NS // 2:
            assert requests(bench.fire(STEAL) + bench.hint(1, 20, by=2)) == []
        bench.hear(2, news=[a_record(1, standing=Standing.DEAD, accuser="peer-2")])
        assert bench.core.thief.remembered == 0
        bench.now += 3 * S
        assert requests(bench.seek(4)) == []

    def test_the_timer_is_armed_while_there_is_a_wish_a_surplus_and_nothing_under_way(self) -> None:
        bench = Hungry(2)
        assert STEAL not in bench.timers
        call = the_request(bench.hint(1, 20))
        assert STEAL not in bench.timers
        bench.offered(call, 1, Nothing("nothing", 0, 0))
        wait = bench.timers[STEAL] - bench.now
        assert TICK_NS * 0.75 <= wait <= TICK_NS * 1.25
        bench.seek(0)
        assert STEAL not in bench.timers
        bench.seek(4)
        assert STEAL in bench.timers
        bench.hint(1, 0)
        bench.fire(STEAL)
        assert STEAL not in bench.timers

    def test_of_two_drawn_by_their_surplus_the_larger_is_asked(self) -> None:
        asked: Counter[str] = Counter()
        for seed in range(300):
            bench = Hungry(4, want=0, seed=seed)
            for number, surplus in ((1, 60), (2, 40), (3, 20), (4, 10)):
                bench.hint(number, surplus)
            asked[the_request(bench.seek(4)).to.host] += 1
        counts = [asked[address_of(number).host] for number in (1, 2, 3, 4)]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] < 270  # not everybody goes to the largest,
        assert counts[3] == 0 or counts[3] < 15  # and hardly anybody to the smallest
        assert counts[1] > 30
