"""The parts of the simulator that stand for the world do what they say."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from fluxmesh.mesh.effects import Arm, Call, Effect, Emit, Join, Reply, Send
from fluxmesh.mesh.messages import Address, NodeRef
from fluxmesh.mesh.timing import MS, S
from fluxmesh.testing.simnet import Simnet
from fluxmesh.testing.simnet_network import LAN, LINKS, LOOPBACK, LocalClock, Names, Network, Via
from fluxmesh.testing.simnet_node import SimNode, Spec
from fluxmesh.testing.simnet_trace import Violation

A, B = "10.0.0.1", "10.0.0.2"
AT_A, AT_B = Address(A, 7946), Address(B, 7946)


def network(seed: int = 1) -> Network:
    return Network(link=LAN, rng=Random(seed))


# -- links ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINKS)
def test_a_datagram_takes_at_least_the_base_of_its_link(name: str) -> None:
    link = LINKS[name]
    net = Network(link=link, rng=Random(1))
    delays = [net.datagram(A, B, 100)[0] for _ in range(500)]
    most = link.base_ns + link.spread_ns + link.jitter_ns + link.tail_ns
    assert link.base_ns <= min(delays) <= max(delays) <= most
    assert len(set(delays)) > 100


def test_the_share_that_is_lost_or_doubled_is_the_one_that_was_asked_for() -> None:
    net = network()
    net.loss, net.doubled = 0.3, 0.2
    copies = [len(net.datagram(A, B, 100)) for _ in range(5_000)]
    assert 0.27 < copies.count(0) / 5_000 < 0.33
    assert 0.17 < copies.count(2) / (5_000 - copies.count(0)) < 0.23


def test_a_cut_is_one_way_and_of_one_kind() -> None:
    net = network()
    net.cuts[A, B] = Via.UDP
    assert net.datagram(A, B, 100) == ()
    assert net.datagram(B, A, 100) != ()
    assert net.segments(A, B, count=3) is not None
    net.cuts[A, B] = Via.TCP
    assert net.datagram(A, B, 100) != ()
    assert net.segments(B, A, count=3) is None, "a stream needs both ways"


def test_a_partition_lets_through_what_stays_on_its_side() -> None:
    net = network()
    net.sides[A] = 1
    assert net.datagram(A, B, 100) == net.datagram(B, A, 100) == ()
    assert net.datagram(B, "10.0.0.3", 100) != ()
    net.heal()
    assert net.datagram(A, B, 100) != ()


def test_what_is_larger_than_the_path_is_lost() -> None:
    net = network()
    net.mtu = 1_280
    assert net.datagram(A, B, 1_252) != ()
    assert net.datagram(A, B, 1_253) == ()


def test_lost_segments_come_late_and_not_never() -> None:
    net = network()
    net.loss = 0.4
    takes = [net.segments(A, B, count=3) for _ in range(200)]
    assert all(one is not None for one in takes)
    assert max(one or 0 for one in takes) > 200 * MS


# -- clocks and names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ppm", [0, 500, -500])
def test_a_clock_and_its_inverse_agree_whatever_its_rate(ppm: int) -> None:
    clock = LocalClock(base_ns=5 * S, ppm=ppm)
    for step in range(1, 200):
        at = clock.read(step * 123_456_789)
        true = clock.true(at + 1_000)
        assert clock.read(true) >= at + 1_000
        assert clock.read(true - 2) < at + 1_000


def test_a_clock_jumps_ahead_and_never_back() -> None:
    clock = LocalClock(base_ns=0)
    before = clock.read(S)
    clock.jump(S, ahead_ns=3 * S)
    assert clock.read(S) == before + 3 * S
    clock.set_rate(2 * S, ppm=1_000)
    assert clock.read(2 * S) == before + 4 * S


def test_a_name_answers_what_was_true_last_and_a_literal_is_itself() -> None:
    names = Names(rng=Random(1))
    names.tell("one.test", (AT_A,), since_ns=10)
    names.tell("one.test", (), since_ns=0)
    assert names.resolve("one.test", 5) == []
    assert names.resolve("one.test", 10) == [AT_A]
    assert names.resolve("two.test", 10) == []
    assert names.resolve(f"{B}:7946", 0) == [AT_B]


# -- nodes ---------------------------------------------------------------------------------------------


class Scripted:
    """A core that does what it is told and writes down what it is given."""

    def __init__(self, *, me: NodeRef, **_options: Any) -> None:
        self.me = me
        self.inputs: list[tuple[str, object, int]] = []
        self.script: dict[str, list[Effect]] = {}

    def _note(self, what: str, detail: object, now: int) -> list[Effect]:
        self.inputs.append((what, detail, now))
        return self.script.pop(what, [])

    def on_packet(self, _src: Address, data: bytes, now: int) -> list[Effect]:
        return self._note("packet", data, now)

    def on_call(self, call: int, _src: Address, frame: bytes, now: int) -> list[Effect]:
        self.inputs.append(("call", frame, now))
        return [Reply(call, b"answer")] if frame == b"question" else []

    def on_reply(self, call: int, frame: bytes | None, now: int) -> list[Effect]:
        return self._note("reply", (call, frame), now)

    def on_timer(self, timer: tuple[str, int], now: int) -> list[Effect]:
        return self._note("timer", timer, now)

    def on_resolved(self, addresses: dict[str, list[Address]], now: int) -> list[Effect]:
        return self._note("resolved", addresses, now)

    def on_send_failed(self, to: Address, now: int) -> list[Effect]:
        return self._note("failed", to, now)

    def on_stall(self, late_ns: int, now: int) -> list[Effect]:
        return self._note("stall", late_ns, now)

    def command(self, command: object, now: int) -> list[Effect]:
        return self._note("join" if isinstance(command, Join) else "command", command, now)

    def members(self, _now: int) -> list[Any]:
        return []

    def counters(self) -> dict[str, int]:
        return {}

    def kinds(self) -> list[str]:
        return [what for what, _, _ in self.inputs if what != "join"]


def pair(*effects: Effect) -> tuple[Simnet, Scripted, Scripted]:
    """Two scripted nodes; the first carries these effects out at once."""
    net = Simnet(seed=1, link=LOOPBACK, make_core=Scripted)
    second = net.start(Spec(name="b", host=B))
    first = net.start(Spec(name="a", host=A))
    assert isinstance(first.core, Scripted)
    assert isinstance(second.core, Scripted)
    first.core.script["command"] = list(effects)
    first.publish(queued=0, running=0)
    return net, first.core, second.core


def test_a_datagram_arrives_at_the_node_of_its_address() -> None:
    net, _, second = pair(Send(AT_B, b"hello"))
    net.run(S)
    assert second.inputs[-1][:2] == ("packet", b"hello")


def test_a_send_error_comes_back_to_the_sender() -> None:
    net, first, second = pair()
    net.network.send_errors.add(A)
    first.script["command"] = [Send(AT_B, b"hello")]
    net.nodes["a"].publish(queued=0, running=0)
    net.run(S)
    assert first.inputs[-1][:2] == ("failed", AT_B)
    assert second.kinds() == []


def test_a_call_is_answered_exactly_once() -> None:
    net, first, _ = pair(Call(7, AT_B, b"question", 2 * S))
    net.run(5 * S)
    assert [one[:2] for one in first.inputs if one[0] == "reply"] == [("reply", (7, b"answer"))]


@pytest.mark.parametrize(("host_too", "at_ns"), [(False, 10 * MS), (True, 2 * S)])
def test_a_call_to_a_dead_process_is_refused_and_to_a_dead_host_times_out(host_too: bool, at_ns: int) -> None:
    net = Simnet(seed=1, link=LOOPBACK, make_core=Scripted)
    second = net.start(Spec(name="b", host=B))
    first = net.start(Spec(name="a", host=A))
    net.kill(second, host_too=host_too)
    assert isinstance(first.core, Scripted)
    first.core.script["command"] = [Call(7, AT_B, b"question", 2 * S)]
    began = first.now
    first.publish(queued=0, running=0)
    net.run(5 * S)
    what, detail, now = first.core.inputs[-1]
    assert (what, detail) == ("reply", (7, None))
    assert now - began <= at_ns
    assert not host_too or now - began == at_ns


def test_a_call_that_is_never_answered_ends_with_its_time() -> None:
    net, first, _ = pair(Call(7, AT_B, b"silence", S))
    net.run(5 * S)
    assert [one[:2] for one in first.inputs if one[0] == "reply"] == [("reply", (7, None))]


def test_a_timer_that_is_armed_again_fires_once_and_at_the_new_time() -> None:
    net, first, _ = pair()
    node = net.nodes["a"]
    first.script["command"] = [Arm(("x", 1), node.now + S), Arm(("x", 1), node.now + 2 * S)]
    node.publish(queued=0, running=0)
    began = node.now
    net.run(5 * S)
    assert [(what, now - began) for what, _, now in first.inputs if what == "timer"] == [("timer", 2 * S)]


def test_who_wakes_up_reads_its_socket_first_then_hears_how_late_it_is_then_its_timers_fire() -> None:
    net, first, _ = pair()
    node = net.nodes["a"]
    first.script["command"] = [Arm(("x", 1), node.now + S)]
    node.publish(queued=0, running=0)
    node.freeze(3 * S)
    net.push(2 * S, net.arrive, AT_B, AT_A, b"waiting")
    net.run(5 * S)
    assert first.kinds()[-3:] == ["packet", "stall", "timer"]
    assert first.inputs[-2][1] == 2 * S
    assert node.slept_ns == 2 * S


def test_a_short_stall_is_none() -> None:
    net, first, _ = pair()
    node = net.nodes["a"]
    first.script["command"] = [Arm(("x", 1), node.now + S)]
    node.publish(queued=0, running=0)
    net.run(900 * MS)
    node.freeze(200 * MS)
    net.run(5 * S)
    assert first.kinds()[-1] == "timer"
    assert "stall" not in first.kinds()


def test_a_clock_that_jumps_past_a_timer_is_a_stall() -> None:
    net, first, _ = pair()
    node = net.nodes["a"]
    first.script["command"] = [Arm(("x", 1), node.now + S)]
    node.publish(queued=0, running=0)
    node.jump(10 * S)
    net.run(S // 2)
    assert first.kinds()[-2:] == ["stall", "timer"]


def test_every_start_of_an_id_has_the_next_epoch() -> None:
    net, first, _ = pair()
    net.kill(net.nodes["a"])
    again: SimNode = net.start(Spec(name="a", host=A))
    assert (first.me.epoch, again.me.epoch) == (1, 2)


def test_an_error_of_a_core_is_a_violation_that_names_its_node_and_line() -> None:
    class Broken(Scripted):
        def on_packet(self, _src: Address, _data: bytes, _now: int) -> list[Effect]:
            raise KeyError("oh")

    net = Simnet(seed=1, link=LOOPBACK, make_core=Broken)
    net.start(Spec(name="b", host=B))
    net.push(MS, net.arrive, AT_A, AT_B, b"x")
    with pytest.raises(Violation, match=r"raised: .*KeyError\('oh'\) in on_packet"):
        net.run(S)


def test_events_without_time_going_on_are_a_violation() -> None:
    class Restless(Scripted):
        def on_timer(self, timer: tuple[str, int], now: int) -> list[Effect]:
            return [Arm(timer, now)]

    net = Simnet(seed=1, link=LOOPBACK, make_core=Restless)
    node = net.start(Spec(name="b", host=B))
    assert isinstance(node.core, Restless)
    node.core.script["command"] = [Arm(("x", 1), node.now)]
    node.publish(queued=0, running=0)
    with pytest.raises(Violation, match="circles"):
        net.run(S)


def test_a_node_that_is_gone_closes() -> None:
    net, first, _ = pair()
    first.script["command"] = [Emit("gone")]
    net.nodes["a"].publish(queued=0, running=0)
    net.run(MS)
    assert not net.nodes["a"].alive
    assert AT_A not in net.running
