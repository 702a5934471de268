"""A seed that leads nowhere is told, once for each reason and seldom again; that it is reached, too."""

from __future__ import annotations

from itertools import pairwise

from fluxmesh.mesh.effects import Call, Effect, Emit, Resolve
from fluxmesh.mesh.messages import Address, NodeRef, Refused, Same
from fluxmesh.mesh.seeds import TELL_AGAIN_NS
from fluxmesh.mesh.timing import S
from tests.unit.mesh.driving import ME, MY_ADDRESS, Bench, address_of, of

NOBODY = NodeRef("", 0)


def words(effects: list[Effect]) -> list[tuple[str, str, str]]:
    return [(e.kind, e.seed, e.text) for e in of(effects, Emit) if e.seed]


def found(bench: Bench, **addresses: list[Address]) -> list[Effect]:
    return bench.do(bench.core.on_resolved(dict(addresses), bench.now))


def test_a_seed_without_an_address_is_told_with_the_next_try() -> None:
    bench = Bench(0, seeds=("tpyo",))
    (event,) = of(found(bench), Emit)
    assert (event.kind, event.seed, event.text) == ("seed_failed", "tpyo", "no address is found for it")
    assert S <= event.again_ns <= 1.1 * S


def test_a_seed_that_nobody_answers_at_is_told_after_its_last_address() -> None:
    bench = Bench(0, seeds=("a",))
    one, two = of(found(bench, a=[address_of(1), address_of(2)]), Call)
    assert words(bench.answer(one, NOBODY, None)) == []
    text = f"no answer from {address_of(1).host} port 7946, {address_of(2).host} port 7946"
    assert words(bench.answer(two, NOBODY, None)) == [("seed_failed", "a", text)]


def test_one_address_that_answers_is_enough() -> None:
    bench = Bench(0, seeds=("a",))
    one, two = of(found(bench, a=[address_of(1), address_of(2)]), Call)
    assert words(bench.answer(one, NOBODY, None)) == []
    assert words(bench.answer(two, NodeRef("peer-2", 1), Same())) == []


def test_one_address_of_two_seeds_speaks_for_both() -> None:
    bench = Bench(0, seeds=("a", "b"))
    (call,) = of(found(bench, a=[address_of(1)], b=[address_of(1)]), Call)
    assert [seed for _, seed, _ in words(bench.answer(call, NOBODY, None))] == ["a", "b"]


def test_the_same_reason_is_told_again_after_ten_minutes_and_another_at_once() -> None:
    bench = Bench(0, seeds=("a",))
    told_at = []
    end = bench.now + 25 * 60 * S
    while bench.now < end:
        if words(found(bench)):
            told_at.append(bench.now)
        assert Resolve(("a",)) in bench.fire(("seeds", 0))
    assert len(told_at) == 3
    assert all(later - sooner >= TELL_AGAIN_NS for sooner, later in pairwise(told_at))
    (call,) = of(found(bench, a=[address_of(1)]), Call)
    (event,) = words(bench.answer(call, NOBODY, None))
    assert event[2].startswith("no answer from")


def test_that_it_is_reached_is_told_if_its_failure_was() -> None:
    bench = Bench(0, seeds=("a", "b"))
    effects = found(bench, b=[address_of(2)])
    assert [seed for _, seed, _ in words(effects)] == ["a"]
    (call,) = of(effects, Call)
    assert words(bench.answer(call, NodeRef("peer-2", 1), Refused("no"))) == []
    bench.fire(("seeds", 0))
    call, _ = of(found(bench, a=[address_of(1)], b=[address_of(2)]), Call)
    assert words(bench.answer(call, NodeRef("peer-1", 1), Same())) == [("seed_reached", "a", "")]


def test_a_seed_that_is_ourselves_or_known_to_be_alive_is_no_failure() -> None:
    bench = Bench(1, seeds=("me", "known", "named"))
    behind_a_name = Address("192.168.1.1", 7946)
    effects = found(bench, me=[MY_ADDRESS], known=[address_of(1)], named=[behind_a_name])
    assert words(effects) == []
    (call,) = of(effects, Call)
    assert words(bench.answer(call, ME, Refused("the same worker id"))) == []
