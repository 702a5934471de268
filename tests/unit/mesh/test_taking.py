"""What storage gave, to whom that is told, and that nothing of it goes beyond its bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fluxmesh.mesh.effects import Call, Leave, Take
from fluxmesh.mesh.messages import (
    Noted,
    Nothing,
    Offer,
    Refused,
    Standing,
    Taken,
)
from fluxmesh.mesh.stealing import (
    PEERS_MAX,
    TAKE_NS,
    TOLD_MAX,
    TOLD_TRIES,
)
from fluxmesh.mesh.timing import MS
from fluxmesh.mesh.voice import CALLS_MAX, Pending
from tests.unit.mesh.driving import a_record, address_of, frame_of, of
from tests.unit.mesh.thieves import (
    Hungry,
    job,
    jobs,
    ref,
    requests,
    the_request,
)

STEAL = ("steal", 0)


class TestTaking:
    def test_what_storage_gave_is_counted_and_told_to_the_victim(self) -> None:
        bench = Hungry(1)
        bench.offered(the_request(bench.hint(1, 20)), 1, Offer(jobs(1, 2, 3), 17))
        effects = bench.took(1, jobs(1, 2, 3), jobs(1, 3))
        (call,) = [one for one in of(effects, Call) if isinstance(frame_of(one), Taken)]
        assert frame_of(call) == Taken(jobs(1, 3))
        assert call.to == address_of(1)
        assert (bench.count("steals_succeeded"), bench.count("jobs_stolen_in")) == (1, 2)
        bench.answer(call, ref(1), Noted())
        assert not any(purpose == "taken" for purpose, _ in bench.timers)

    def test_what_was_lost_to_another_is_no_success_and_nobody_is_told(self) -> None:
        bench = Hungry(1)
        bench.offered(the_request(bench.hint(1, 20)), 1, Offer(jobs(1), 17))
        effects = bench.took(1, jobs(1), ())
        assert of(effects, Call) == []  # nor is the same one asked again at once
        assert (bench.count("steals_succeeded"), bench.count("steals_lost")) == (0, 1)

    def test_jobs_that_were_not_offered_are_not_counted(self) -> None:
        bench = Hungry(1)
        bench.offered(the_request(bench.hint(1, 20)), 1, Offer(jobs(1), 17))
        bench.took(1, jobs(1), (job(1), job(2), job(1, 9)))
        assert bench.count("jobs_stolen_in") == 1

    def test_a_victim_that_does_not_note_it_is_told_three_times(self) -> None:
        bench = Hungry(1)
        bench.offered(the_request(bench.hint(1, 20)), 1, Offer(jobs(1), 0))
        effects = bench.took(1, jobs(1), jobs(1))
        for tries in range(1, TOLD_TRIES + 1):
            (call,) = of(effects, Call)
            assert frame_of(call) == Taken(jobs(1))
            bench.answer(call, ref(1), None if tries % 2 else Refused("no"))
            due = [timer for timer in bench.timers if timer[0] == "taken"]
            assert len(due) == (tries < TOLD_TRIES)
            effects = bench.fire(due[0]) if due else []
        assert bench.count("taken_untold") == 1

    def test_another_run_of_the_victim_is_not_told_again(self) -> None:
        bench = Hungry(1)
        bench.offered(the_request(bench.hint(1, 20)), 1, Offer(jobs(1), 0))
        (call,) = of(bench.took(1, jobs(1), jobs(1)), Call)
        bench.answer(call, ref(1, 2), Noted())
        assert not any(purpose == "taken" for purpose, _ in bench.timers)

    def test_nor_is_one_that_was_replaced_before_storage_answered(self) -> None:
        bench = Hungry(1)
        bench.offered(the_request(bench.hint(1, 20)), 1, Offer(jobs(1), 0))
        bench.hear(1, news=[a_record(1, epoch=2)], epoch=2)
        assert requests(bench.took(1, jobs(1), jobs(1))) == []
        assert (bench.count("jobs_stolen_in"), bench.count("taken_untold")) == (1, 1)

    def test_of_a_bounded_number_of_victims_it_is_tried(self) -> None:
        bench = Hungry(1)
        for number in range(TOLD_MAX + 2):
            bench.took(1, jobs(number), jobs(number))
        assert len(bench.core.voice.calls) == TOLD_MAX
        assert bench.count("taken_untold") == 2

    def test_where_too_much_is_under_way_nothing_is_asked_and_the_next_tick_tries_again(self) -> None:
        bench = Hungry(1, want=0)
        bench.hint(1, 20)
        crowd = {-number: Pending("meta", address_of(1)) for number in range(1, CALLS_MAX + 1)}
        bench.core.voice.calls.update(crowd)
        assert requests(bench.seek(4)) == []
        assert bench.count("steals_initiated") == 0
        bench.core.voice.calls.clear()
        assert len(requests(bench.fire(STEAL))) == 1

    def test_while_it_leaves_what_was_got_is_still_told(self) -> None:
        bench = Hungry(1)
        bench.offered(the_request(bench.hint(1, 20)), 1, Offer(jobs(1), 0))
        bench.do(bench.core.command(Leave(), bench.now))
        (call,) = of(bench.took(1, jobs(1), jobs(1)), Call)
        assert frame_of(call) == Taken(jobs(1))
        bench.answer(call, ref(1), None)
        (timer,) = [timer for timer in bench.timers if timer[0] == "taken"]
        assert len(of(bench.fire(timer), Call)) == 1

    def test_a_take_that_nobody_answers_holds_up_for_ten_seconds(self) -> None:
        bench = Hungry(1)
        bench.offered(the_request(bench.hint(1, 20)), 1, Offer(jobs(1), 17))
        assert bench.timers[("take", 0)] == bench.now + TAKE_NS
        assert requests(bench.hint(1, 30)) == []
        bench.fire(("take", 0))
        assert bench.count("steals_unresolved") == 1
        assert len(requests(bench.hint(1, 30))) == 1
        # What it got after all is ours, and is counted.
        bench.took(1, jobs(1), jobs(1))
        assert bench.count("jobs_stolen_in") == 1
        assert bench.core.thief.is_busy

    def test_a_peer_that_dies_while_storage_is_asked_is_waited_for(self) -> None:
        bench = Hungry(2)
        bench.offered(the_request(bench.hint(1, 20)), 1, Offer(jobs(1), 17))
        bench.hear(2, news=[a_record(1, standing=Standing.DEAD, accuser="peer-2")])
        assert bench.core.thief.is_busy
        bench.took(1, jobs(1), jobs(1))
        assert bench.count("jobs_stolen_in") == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.sampled_from(["hint", "low", "offer", "nothing", "lost", "tick"])),
        max_size=60,
    )
)
def test_whatever_happens_one_request_is_under_way_and_no_more_is_taken_than_wished(
    course: list[tuple[int, str]],
) -> None:
    bench = Hungry(8, want=6)
    calls: list[Call] = []
    numbers = iter(range(10_000))
    got = 0
    for number, what in course:
        bench.now += 20 * MS
        effects = []
        if what in ("hint", "low"):
            effects = bench.hint(number, 30 if what == "hint" else 2)
        elif what == "tick" and STEAL in bench.timers:
            effects = bench.fire(STEAL)
        elif calls and what in ("offer", "nothing", "lost"):
            call = calls.pop()
            body = {"offer": Offer(jobs(next(numbers)), 29), "nothing": Nothing("nothing"), "lost": None}[
                what
            ]
            victim = next(one for one in range(1, 9) if address_of(one) == call.to)
            effects = bench.offered(call, victim, body)
            for take in of(effects, Take):
                got += len(take.jobs)
                effects = effects + bench.took(victim, take.jobs, take.jobs)
        calls += [call for call, _ in requests(effects)]
        assert len(calls) <= 1
        assert got <= 6
        assert bench.core.thief.remembered <= 8


def test_of_peers_beyond_the_bound_the_longest_unmet_are_forgotten() -> None:
    many = PEERS_MAX + 40
    bench = Hungry(many)
    for number in range(1, many + 1):
        bench.offered(the_request(bench.hint(number, 20)), number, Nothing("nothing"))
        bench.hint(number, 0)
    assert bench.count("steals_initiated") == many
    assert bench.core.thief.remembered == PEERS_MAX


def test_one_that_lies_all_the_time_keeps_neither_storage_busy_nor_the_thief_from_others() -> None:
    """A fresh word ends the pause after a fruitless request, but not each of a thousand a second."""
    bench = Hungry(2, want=0)
    bench.hint(2, 20)
    effects = bench.seek(4)
    asked = dict.fromkeys((1, 2), 0)
    for _ in range(1_000):
        bench.now += MS
        effects += bench.hint(1, 1_000)
        while calls := requests(effects):
            ((call, _),) = calls
            number = 1 if call.to == address_of(1) else 2
            asked[number] += 1
            effects = bench.offered(call, number, Offer(jobs(1), 1_000) if number == 1 else Nothing("no"))
            if of(effects, Take):
                effects = bench.took(number, jobs(1), ())
        effects = []
    assert 1 <= asked[1] <= 50
    assert asked[2] >= 1
