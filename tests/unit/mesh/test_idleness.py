"""Who becomes idle and knows nobody to ask says so, and hears at once who has something."""

from __future__ import annotations

import pytest

from fluxmesh.mesh.messages import Flag, Gossip, Load, Nothing
from fluxmesh.mesh.surge import FANOUT, GAP_NS
from fluxmesh.mesh.timing import MS
from tests.unit.mesh.driving import address_of, packets
from tests.unit.mesh.thieves import ABOVE, READY, Hungry, Shelf, the_request

IDLE = ("idle", 0)


def busy(peers: int, **options: bool) -> Hungry:
    bench = Hungry(peers, want=0, **options)
    bench.tell(running=8)
    bench.now += GAP_NS
    return bench


def test_up_to_three_are_told_once() -> None:
    bench = busy(9)
    assert packets(bench.tell(running=0)) == []  # nothing is wanted yet
    said = packets(bench.seek(4))
    assert len(said) == FANOUT
    for _, packet in said:
        assert packet.message == Gossip()
        assert (packet.loads[0].worker_id, packet.loads[0].running) == ("me", 0)
    assert packets(bench.seek(4) + bench.tell(running=1)) == []
    assert bench.count("idleness_told") == FANOUT


def test_and_again_when_it_has_been_busy_but_50_ms_apart() -> None:
    bench = busy(2)
    bench.seek(4)
    assert len(packets(bench.tell(running=0))) == 2
    bench.now += GAP_NS // 2
    assert packets(bench.tell(running=8) + bench.tell(running=0)) == []
    assert bench.timers[IDLE] == bench.now + GAP_NS // 2
    assert len(packets(bench.fire(IDLE))) == 2


def test_who_is_busy_again_when_its_turn_comes_says_nothing() -> None:
    bench = busy(2)
    bench.seek(4)
    bench.tell(running=0)
    bench.tell(running=8)
    bench.tell(running=0)
    bench.tell(running=8)
    assert packets(bench.fire(IDLE)) == []


def test_one_that_has_somebody_to_ask_tells_nobody_until_nothing_came_of_it() -> None:
    bench = busy(2)
    bench.hint(1, 20)
    bench.tell(running=0)
    effects = bench.seek(4)
    call = the_request(effects)
    assert packets(effects) == []
    assert len(packets(bench.offered(call, 1, Nothing("nothing")))) == 2


@pytest.mark.parametrize("flags", [Flag.READY, Flag.STEALS, READY | Flag.DRAINING, READY | Flag.DEGRADED])
def test_who_may_not_take_or_is_not_ready_is_not_idle(flags: Flag) -> None:
    bench = busy(2)
    assert packets(bench.tell(running=0, flags=flags) + bench.seek(4)) == []


def test_those_who_do_not_steal_are_not_told() -> None:
    bench = busy(3)
    bench.hint(2, 0, flags=Flag.READY)
    bench.tell(running=0)
    assert {to for to, _ in packets(bench.seek(4))} == {address_of(1), address_of(3)}


def test_one_with_a_surplus_answers_the_idle_with_its_load() -> None:
    bench = Hungry(3, want=0, shelf=Shelf())
    for number in (1, 2, 3):
        bench.hint(number, 3)  # not idle: they hold something
    bench.tell(running=8, stealable=20)
    assert bench.count("surges_sent") == 0
    said = packets(bench.hint(2, 0, flags=READY) + bench.hear(1))
    assert said == []  # all its slots are taken
    bench.counters[2] += 1
    said = packets(bench.hear(2, loads=[idle(2, bench.counters[2])]))
    assert [to for to, _ in said] == [address_of(2)]
    assert said[0][1].loads[0].stealable == 20
    bench.now += 100 * MS
    bench.counters[2] += 1
    assert packets(bench.hear(2, loads=[idle(2, bench.counters[2])])) == []  # that it was idle it knew


def test_one_without_a_surplus_has_nothing_to_say_to_the_idle() -> None:
    bench = Hungry(1, want=0)
    bench.tell(running=8, stealable=ABOVE)
    bench.counters[1] += 1
    assert packets(bench.hear(1, loads=[idle(1, bench.counters[1])])) == []
    assert bench.count("surges_sent") == 0


def idle(number: int, counter: int) -> Load:
    return Load(f"peer-{number}", 1, counter, running=0, capacity=8, flags=int(READY))
