"""What a thief is answered, and what is believed of what it says it took."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxmesh.mesh import donating
from fluxmesh.mesh.donating import OFFER_ALONE_NS, OFFER_KEPT_NS, RETRY_TRIED_MS, Rates
from fluxmesh.mesh.effects import Leave
from fluxmesh.mesh.messages import Flag, Noted, Nothing, Offer, Standing, Steal, Taken
from fluxmesh.mesh.timing import MS, S
from tests.unit.mesh.driving import a_record
from tests.unit.mesh.thieves import READY, Hungry, Shelf, job, jobs, ref

WISH = Steal(4, ("default",), (0, 1, 2, 3), ())
TWENTY = jobs(*range(20))


def full(*, peers: int = 3, steals: bool = True, rate: float = 0.0) -> tuple[Hungry, Shelf]:
    shelf = Shelf(*TWENTY)
    bench = Hungry(peers, want=0, shelf=shelf, steals=steals, steal_rate_limit=rate)
    bench.tell(running=8, stealable=20)
    return bench, shelf


class TestOffers:
    def test_what_is_asked_for_is_offered_and_marked_by_nothing(self) -> None:
        bench, shelf = full()
        assert bench.ask(1, WISH) == Offer(jobs(0, 1, 2, 3), 16)
        assert shelf.held == list(TWENTY)
        assert [(wish, thief) for wish, _, thief in shelf.asked] == [(WISH, ref(1))]
        assert (bench.count("steal_requests"), bench.count("jobs_offered")) == (1, 4)

    @pytest.mark.parametrize(
        ("held", "want", "offered"),
        [(20, 1, 1), (20, 4, 4), (20, 1_000, 4), (7, 4, 3), (3, 4, 1), (2, 4, 1), (1, 4, 1)],
    )
    def test_d31_at_most_the_wish_a_batch_and_half_of_what_is_there(
        self, held: int, want: int, offered: int
    ) -> None:
        bench, shelf = full()
        shelf.held = list(TWENTY[:held])
        answer = bench.ask(1, Steal(want, ("default",), (0,), ()))
        assert isinstance(answer, Offer)
        assert answer == Offer(TWENTY[:offered], held - offered)

    def test_two_that_ask_in_the_same_instant_are_not_sent_for_the_same_jobs(self) -> None:
        bench, _ = full()
        assert bench.ask(1, WISH) == Offer(jobs(0, 1, 2, 3), 16)
        assert bench.ask(2, WISH) == Offer(jobs(4, 5, 6, 7), 12)
        assert bench.ask(3, WISH) == Offer(jobs(8, 9, 10, 11), 8)
        # Nor the same one, whose next request may have overtaken its word of what it took.
        assert bench.ask(1, WISH) == Offer(jobs(12, 13, 14, 15), 4)
        bench.now += OFFER_ALONE_NS
        assert bench.ask(2, WISH) == Offer(jobs(0, 1, 2, 3), 16)

    def test_where_all_was_offered_to_another_a_moment_ago_a_thief_shall_come_again_soon(self) -> None:
        bench, shelf = full()
        shelf.held = [job(1)]
        assert bench.ask(1, WISH) == Offer((job(1),), 0)
        assert bench.ask(2, WISH) == Nothing("nothing", RETRY_TRIED_MS, 0)

    def test_what_one_that_died_was_offered_others_may_have_at_once(self) -> None:
        bench, _ = full()
        bench.ask(1, WISH)
        bench.hear(2, news=[a_record(1, standing=Standing.DEAD, accuser="peer-2")])
        assert bench.ask(2, WISH) == Offer(jobs(0, 1, 2, 3), 16)

    def test_an_empty_shelf_is_said_to_be_empty_and_may_be_asked_again_at_any_time(self) -> None:
        bench, shelf = full()
        shelf.held = []
        assert bench.ask(1, WISH) == Nothing("nothing", 0, 0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("flags", "reason"),
        [
            (READY | Flag.DRAINING, "drains"),
            (READY | Flag.DEGRADED, "stands still"),
            (Flag.READY, "does not steal"),
        ],
    )
    def test_one_that_may_not_give_says_why_and_does_not_look(self, flags: Flag, reason: str) -> None:
        bench, shelf = full()
        bench.tell(flags=flags, stealable=20)
        assert bench.ask(1, WISH) == Nothing(reason, 1_000, 0)
        assert shelf.asked == []
        assert (bench.count("steals_refused"), bench.count(f"steals_refused_{reason}")) == (1, 1)

    def test_with_stealing_off_nothing_is_given(self) -> None:
        bench, shelf = full(steals=False)
        assert bench.ask(1, WISH) == Nothing("does not steal", 1_000, 0)
        assert shelf.asked == []

    def test_one_that_leaves_gives_nothing_more(self) -> None:
        bench, _ = full()
        bench.do(bench.core.command(Leave(), bench.now))
        assert bench.ask(1, WISH) == Nothing("leaves", 1_000, 0)

    def test_a_stranger_another_run_and_one_that_is_dead_get_nothing(self) -> None:
        bench, shelf = full()
        assert bench.ask(99, WISH) == Nothing("unknown", 1_000, 0)
        assert bench.ask(1, WISH, epoch=2) == Nothing("unknown", 1_000, 0)
        bench.hear(2, news=[a_record(1, standing=Standing.DEAD, accuser="peer-2")])
        assert bench.ask(1, WISH) == Nothing("unknown", 1_000, 0)
        assert shelf.asked == []


class TestRates:
    def test_each_peer_has_a_rate_of_its_own_and_hears_when_to_come_again(self) -> None:
        bench, shelf = full(rate=10.0)
        shelf.held = list(jobs(*range(100)))  # more than all of them are offered
        answers = [bench.ask(1, WISH) for _ in range(12)]
        assert [type(one) for one in answers] == [Offer] * 10 + [Nothing] * 2
        assert answers[10] == Nothing("rate", 101, 0)
        assert isinstance(bench.ask(2, WISH), Offer)
        bench.now += 101 * MS
        assert isinstance(bench.ask(1, WISH), Offer)
        assert isinstance(bench.ask(1, WISH), Nothing)

    def test_none_is_no_limit(self) -> None:
        bench, shelf = full(rate=0.0)
        shelf.held = list(jobs(*range(1_000)))
        assert all(isinstance(bench.ask(1, WISH), Offer) for _ in range(200))

    def test_a_rate_below_one_lets_one_through_at_a_time(self) -> None:
        rates = Rates(0.5)
        assert rates.wait_ms("a", 0) == 0
        assert rates.wait_ms("a", S) == 1_001
        assert rates.wait_ms("a", 2 * S) == 0

    @settings(max_examples=60, deadline=None)
    @given(st.floats(0.1, 50), st.lists(st.integers(0, 400), min_size=1, max_size=200))
    def test_in_no_second_are_more_than_twice_the_rate_let_through(
        self, rate: float, gaps_ms: list[int]
    ) -> None:
        rates, now, passed = Rates(rate), 0, []
        for gap in gaps_ms:
            now += gap * MS
            if not rates.wait_ms("a", now):
                passed.append(now)
        for at in passed:
            within = sum(1 for other in passed if at <= other < at + S)
            assert within <= rate + max(1.0, rate) + 1e-6

    def test_many_names_take_no_more_than_a_bounded_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(donating, "THIEVES_MAX", 5)
        rates = Rates(1.0)
        for number in range(50):
            assert rates.wait_ms(f"peer-{number}", number) == 0
        assert len(rates._of) == 5


class TestTaken:
    def test_what_was_taken_leaves_the_shelf_and_is_counted_once(self) -> None:
        bench, shelf = full()
        bench.ask(1, WISH)
        for _ in range(3):  # the answer was lost twice
            assert bench.ask(1, Taken(jobs(0, 2))) == Noted()
        assert shelf.told == [(jobs(0, 2), ref(1))]
        assert job(0) not in shelf.held
        assert bench.count("jobs_stolen_out") == 2

    def test_d29_what_was_never_offered_under_that_token_nobody_can_have_taken(self) -> None:
        bench, shelf = full()
        bench.ask(1, WISH)
        assert bench.ask(1, Taken((job(9), job(0, 7)))) == Noted()
        assert bench.ask(2, Taken(jobs(0))) == Noted()
        assert bench.ask(1, Taken(jobs(0)), epoch=2) == Noted()
        assert shelf.told == []
        assert bench.count("taken_unasked") == 4

    def test_while_it_leaves_it_still_learns_what_it_lost(self) -> None:
        bench, shelf = full()
        bench.ask(1, WISH)
        bench.do(bench.core.command(Leave(), bench.now))
        assert bench.ask(1, Taken(jobs(0))) == Noted()
        assert shelf.told == [(jobs(0), ref(1))]

    def test_an_offer_is_remembered_for_a_minute(self) -> None:
        bench, shelf = full()
        bench.ask(1, WISH)
        bench.now += OFFER_KEPT_NS
        bench.ask(2, WISH)
        bench.ask(1, Taken(jobs(0)))
        assert shelf.told == []
        assert bench.core.donor.remembered == 4

    def test_of_more_offers_than_can_be_kept_the_oldest_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(donating, "OFFERS_MAX", 6)
        bench, shelf = full()
        for number in (1, 2, 3):
            bench.ask(number, WISH)
            assert bench.core.donor.remembered <= 6
        bench.ask(1, Taken(jobs(0)))
        bench.ask(3, Taken(jobs(8)))
        assert shelf.told == [(jobs(8), ref(3))]
        for low in range(0, 16, 4):  # of one thief as well
            shelf.held = list(TWENTY[low:])
            bench.ask(3, WISH)
            assert bench.core.donor.remembered <= 6
