"""The carrier of a core: stalls, defects, order."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fluxmesh.mesh.carrier import Carrier
from fluxmesh.mesh.effects import Arm, Effect, Emit, Join, Timer
from fluxmesh.mesh.messages import Address, Meta, NodeRef, Standing
from fluxmesh.mesh.names import Names
from fluxmesh.mesh.options import MeshWorker
from fluxmesh.mesh.ports import bind_ports
from fluxmesh.mesh.swim import Swim
from fluxmesh.mesh.timing import MS, Timing
from tests.mesh.sockets import free_port, run, until

TIMING = Timing(period_ns=200 * MS)


class Watched(Swim):
    """A core that notes its inputs, and fails where a test says so."""

    def __init__(self, worker_id: str, port: int, seeds: tuple[str, ...]) -> None:
        super().__init__(
            me=NodeRef(worker_id, 1),
            address=Address("127.0.0.1", port),
            meta=Meta(("default",), (0, 1, 2, 3), 4),
            timing=TIMING,
            seeds=seeds,
            rng=random.Random(worker_id),
        )
        self.inputs: list[str] = []
        self.fails: Callable[[str], bool] = lambda _: False

    def _note(self, what: str) -> None:
        self.inputs.append(what)
        if self.fails(what):
            raise RuntimeError(f"a defect in {what}")

    def on_packet(self, src: Address, data: bytes, now: int) -> list[Effect]:
        self._note("packet")
        return super().on_packet(src, data, now)

    def on_timer(self, timer: Timer, now: int) -> list[Effect]:
        self._note("timer")
        return super().on_timer(timer, now)

    def on_stall(self, late_ns: int, now: int) -> list[Effect]:
        self._note("stall")
        return super().on_stall(late_ns, now)


class Carried:
    """A watched core on real sockets in this loop."""

    def __init__(self, worker_id: str, *seeds: str) -> None:
        self.port = free_port()
        self.core = Watched(worker_id, self.port, seeds)
        self.events: list[Emit] = []
        self.told: list[str] = []
        self.carrier = Carrier(
            self.core,
            bind_ports("127.0.0.1", self.port),
            envelope=MeshWorker().envelope(label="x", salt=bytes(12)),
            period_ns=TIMING.period_ns,
            default_port=self.port,
            names=Names(),
            rng=random.Random(1),
            tell=lambda _level, event, _fields: self.told.append(event),
            on_take=lambda _: None,
            on_event=self.events.append,
        )

    def alive(self) -> list[str]:
        members = self.core.members(self.carrier.now_ns())
        return [view.record.worker_id for view in members if view.record.standing == Standing.ALIVE]


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Carried, Carried]]:
    one = Carried("one")
    two = Carried("two", f"127.0.0.1:{one.port}")
    try:
        for each in (one, two):
            await each.carrier.start()
            each.carrier.command(Join())
        await until(lambda: len(one.alive()) == len(two.alive()) == 2)
        yield one, two
    finally:
        await one.carrier.close()
        await two.carrier.close()


def test_d20_after_a_stall_the_socket_is_read_first_then_the_core_is_told_then_timers_fire() -> None:
    async def main() -> None:
        async with pair() as (one, two):
            await asyncio.sleep(0.3)
            for each in (one, two):
                each.core.inputs.clear()
            # Both share this loop, so what one has said before lies in the socket of the other.
            for _ in range(200):
                two.carrier._datagrams.send(Address("127.0.0.1", one.port), b"noise")
            time.sleep(0.5)  # noqa: ASYNC251 - the stall
            await until(lambda: "stall" in one.core.inputs and "timer" in one.core.inputs)
            first = [what for what in one.core.inputs if what != "packet"][:2]
            assert first == ["stall", "timer"]
            assert one.carrier.counters()["refused_seal_version"] == 200
            assert one.carrier.stalls >= 1
            assert one.carrier.longest_lag_ns > 200 * MS
            assert "mesh stood still" in one.told
            await asyncio.sleep(1.0)
            assert not [event for each in (one, two) for event in each.events if event.kind == "dead"]

    run(main())


def test_timers_that_take_long_are_fired_for_a_bounded_time() -> None:
    async def main() -> None:
        one = Carried("one")
        await one.carrier.start()
        fired: list[float] = []

        def slowly(_timer: Timer, _now: int) -> list[Effect]:
            time.sleep(0.005)
            fired.append(time.monotonic())
            return []

        one.core.on_timer = slowly  # type: ignore[method-assign]
        now_ns = one.carrier.now_ns()
        one.carrier._carry([Arm(("gossip", number), now_ns) for number in range(100)])
        between = 0
        while len(fired) < 100:
            await asyncio.sleep(0)
            between += 1
        assert between > 5
        await one.carrier.close()

    run(main())


def test_a_defect_in_the_core_ends_neither_the_reading_nor_the_timers() -> None:
    failures: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
        async with pair() as (one, two):
            left = {"packet": 3, "timer": 3}

            def fails(what: str) -> bool:
                left[what] = left.get(what, 0) - 1
                return left[what] >= 0

            one.core.fails = fails
            await until(lambda: left["packet"] < -5 and left["timer"] < -5)
            await until(lambda: len(one.alive()) == len(two.alive()) == 2)

    run(main())
    assert sorted(failures) == ["a defect in packet"] * 3 + ["a defect in timer"] * 3


def test_nothing_is_said_before_the_first_command_and_nothing_after_the_end() -> None:
    async def main() -> None:
        one = Carried("one", "127.0.0.1:20001")
        await one.carrier.start()
        await asyncio.sleep(0.3)
        counts = one.carrier.counters()
        assert (counts["datagrams_sent"], counts["stream_calls"]) == (0, 0)
        await one.carrier.close()
        one.carrier.command(Join())
        await asyncio.sleep(0.1)
        assert one.carrier.counters()["stream_calls"] == 0

    run(main())
