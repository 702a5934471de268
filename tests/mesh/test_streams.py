"""Calls over TCP, sealed and plain."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from fluxmesh.mesh import streams
from fluxmesh.mesh.messages import Address
from fluxmesh.mesh.ports import bind_ports
from fluxmesh.mesh.seal import SALT_BYTES, Envelope, Keyring, Plain, Sealed
from fluxmesh.mesh.streams import CONNECTIONS_PER_HOST, STRANGERS_PER_HOST, Streams
from tests.mesh.sockets import free_port, run, until

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
Answer = Callable[[Address, bytes], Awaitable[bytes | None]]


def sealed(key: bytes = KEY, label: str = "fluxmesh") -> Envelope:
    return Sealed(Keyring([key], label=label), salt=os.urandom(SALT_BYTES))


async def echo(_source: Address, frame: bytes) -> bytes | None:
    return b"echo " + frame


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


class Side(Streams):
    """Streams with what they refused."""

    def __init__(
        self, envelope: Envelope, answer: Answer = echo, *, delay_s: float = 0.0, back_s: float = 0.0
    ) -> None:
        self.port = free_port()
        self.address = Address("127.0.0.1", self.port)
        self.refused: list[str] = []
        ports = bind_ports("127.0.0.1", self.port)
        ports.udp.close()
        super().__init__(
            ports.tcp,
            session=lambda: envelope.session(os.urandom(SALT_BYTES)),
            on_call=answer,
            on_refused=lambda _, why: self.refused.append(why),
            delay_s=lambda _: (delay_s, back_s),
        )


@asynccontextmanager
async def sides(*made: Side) -> AsyncIterator[None]:
    for side in made:
        await side.start()
    try:
        yield
    finally:
        for side in made:
            await side.close()


@pytest.mark.parametrize("make", [sealed, lambda: Plain(label="fluxmesh")], ids=["sealed", "plain"])
def test_calls_are_answered_one_after_the_other_on_one_warm_connection(make: Callable[[], Envelope]) -> None:
    async def main() -> None:
        one, two = Side(make()), Side(make())
        async with sides(one, two):
            for number in range(5):
                assert await one.call(two.address, b"%d" % number, 2) == b"echo %d" % number
            large = os.urandom(1_000_000)
            assert await one.call(two.address, large, 2) == b"echo " + large
        assert (two.counts.connections, two.counts.calls_taken) == (1, 6)
        assert (one.counts.calls, one.counts.calls_failed) == (6, 0)

    run(main())


def test_calls_at_once_have_connections_of_their_own() -> None:
    async def main() -> None:
        one, two = Side(sealed()), Side(sealed())
        async with sides(one, two):
            answers = await asyncio.gather(*(one.call(two.address, b"%d" % n, 2) for n in range(8)))
        assert answers == [b"echo %d" % n for n in range(8)]
        assert two.counts.connections == 8

    run(main())


def test_a_peer_that_was_started_anew_is_reached_although_its_connection_is_stale() -> None:
    async def main() -> None:
        one, two = Side(sealed()), Side(sealed())
        async with sides(one):
            async with sides(two):
                assert await one.call(two.address, b"1", 2) == b"echo 1"
            assert await one.call(two.address, b"2", 2) is None
            again = Side(sealed())
            async with sides(again):
                assert await one.call(again.address, b"3", 2) == b"echo 3"

    run(main())


def test_a_late_answer_is_none_and_meets_no_later_call() -> None:
    async def main() -> None:
        hold = asyncio.Event()

        async def slow(_source: Address, frame: bytes) -> bytes | None:
            if frame == b"slow":
                await hold.wait()
            return frame

        one, two = Side(sealed()), Side(sealed(), slow)
        async with sides(one, two):
            assert await one.call(two.address, b"slow", 0.05) is None
            hold.set()
            assert await one.call(two.address, b"fast", 2) == b"fast"

    run(main())


def test_a_call_that_is_refused_by_the_core_closes_the_connection() -> None:
    async def main() -> None:
        async def nothing(_source: Address, _frame: bytes) -> bytes | None:
            return None

        one, two = Side(sealed()), Side(sealed(), nothing)
        async with sides(one, two):
            assert await one.call(two.address, b"1", 2) is None
            assert one.counts.calls_failed == 1

    run(main())


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (sealed(), sealed(OTHER_KEY), "wrong key"),
        (sealed(), sealed(label="another"), "wrong label"),
        (Plain(label="fluxmesh"), Plain(label="another"), "wrong label"),
        (Plain(label="fluxmesh"), sealed(), "plaintext where a key is needed"),
    ],
    ids=["key", "label", "plain label", "no key"],
)
def test_d15_a_stranger_is_refused_and_both_sides_know_why(
    mine: Envelope, theirs: Envelope, why: str
) -> None:
    async def main() -> None:
        one, two = Side(mine), Side(theirs)
        async with sides(one, two):
            assert await one.call(two.address, b"let me in", 2) is None
            await until(lambda: bool(two.refused))
        assert two.refused == [why]
        assert len(one.refused) == 1
        assert (one.counts.calls_failed, two.counts.calls_taken) == (1, 0)

    run(main())


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n" * 3, os.urandom(16), struct.pack(">I", 0xFFFFFFFF) * 8],
    ids=["nothing", "http", "noise", "lengths"],
)
def test_d21_what_is_no_greeting_of_ours_is_closed_and_takes_no_memory(said: bytes) -> None:
    async def main() -> None:
        one, two = Side(sealed()), Side(sealed())
        async with sides(one, two):
            reader, writer = await asyncio.open_connection("127.0.0.1", two.port + 1)
            writer.write(said)
            if not said:
                writer.write_eof()
            with suppress(ConnectionResetError):  # what was not read is thrown away with the connection
                assert len(await reader.read()) <= max(len(said), 16)
            await hang_up(writer)
            assert await one.call(two.address, b"well", 2) == b"echo well"
        assert two.counts.calls_taken == 1

    run(main())


def test_d21_a_frame_that_claims_to_be_giant_closes_the_connection_before_it_is_read() -> None:
    async def main() -> None:
        two = Side(Plain(label="fluxmesh"))
        async with sides(two):
            reader, writer = await asyncio.open_connection("127.0.0.1", two.port + 1)
            writer.write(Plain(label="fluxmesh").session(os.urandom(SALT_BYTES)).greeting())
            writer.write(struct.pack(">I", (1 << 20) + 1))
            assert len(await reader.read()) == 16
            await hang_up(writer)
        assert two.refused == ["frame too large"]

    run(main())


def test_d21_strangers_who_bring_giant_frames_fill_no_memory() -> None:
    async def main() -> None:
        two = Side(sealed())
        async with sides(two):
            tracemalloc.start()
            writers = []
            for _ in range(40):
                _, writer = await asyncio.open_connection("127.0.0.1", two.port + 1)
                # A greeting shows which key is meant and proves nothing.
                writer.write(sealed().session(os.urandom(SALT_BYTES)).greeting())
                writer.write(struct.pack(">I", 1 << 20))
                writers.append(writer)
            piece = bytes(60_000)
            for _ in range(15):
                for writer in writers:
                    writer.write(piece)
                await asyncio.sleep(0.01)
            taken = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            for writer in writers:
                writer.transport.abort()
        assert taken < 20_000_000  # of 36 MB, most of which the kernel has to keep

    run(main())


async def crowd(to: Side, number: int, *, greeting: bytes = b"") -> list[asyncio.StreamWriter]:
    """So many connections without a key, all taken."""
    before = to.counts.connections
    writers = []
    for _ in range(number):
        _, writer = await asyncio.open_connection("127.0.0.1", to.port + 1)
        writer.write(greeting)
        writers.append(writer)
    await until(lambda: to.counts.connections == before + number)
    return writers


def test_a_stranger_who_holds_all_connections_of_a_host_keeps_nobody_out_who_has_a_key() -> None:
    async def main() -> None:
        one, two = Side(sealed()), Side(sealed())
        async with sides(one, two):
            writers = await crowd(two, CONNECTIONS_PER_HOST)
            assert await one.call(two.address, b"1", 2) == b"echo 1"
            assert (two.counts.gave_way, two.counts.turned_away) == (1, 0)
            assert two.refused == [streams.CROWDED]
            for writer in writers:
                writer.transport.abort()

    run(main())


def test_strangers_have_a_smaller_share_once_they_had_the_time_to_show_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "SHOW_S", 0.05)

    async def main() -> None:
        one, two = Side(sealed()), Side(sealed())
        async with sides(one, two):
            writers = await crowd(two, 40)
            await asyncio.sleep(0.1)
            assert await one.call(two.address, b"1", 2) == b"echo 1"
            await until(lambda: len(two._serving) <= STRANGERS_PER_HOST)
            assert two.counts.gave_way >= 40 - STRANGERS_PER_HOST
            for writer in writers:
                writer.transport.abort()

    run(main())


def test_who_has_not_even_greeted_gives_way_before_those_who_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CONNECTIONS_PER_HOST", 4)

    async def main() -> None:
        two = Side(sealed())
        async with sides(two):
            greeting = sealed().session(os.urandom(SALT_BYTES)).greeting()
            writers = await crowd(two, 2, greeting=greeting)
            await until(lambda: sum(served.greeted for served in two._serving.values()) == 2)
            writers += await crowd(two, 12)
            assert sum(served.greeted for served in two._serving.values()) == 2
            assert two.counts.gave_way == 10
            for writer in writers:
                writer.transport.abort()

    run(main())


def test_who_says_nothing_is_closed_soon_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "GREET_S", 0.05)

    async def main() -> None:
        two = Side(sealed())
        async with sides(two):
            reader, writer = await asyncio.open_connection("127.0.0.1", two.port + 1)
            writer.write(b"\xf1")
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            await hang_up(writer)
            await until(lambda: two.refused == [streams.SILENT])

    run(main(), 5)


def test_strangers_who_bring_giant_frames_slowly_keep_no_large_frame_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "SHOW_S", 0.05)

    async def main() -> None:
        one, two = Side(sealed()), Side(sealed())
        async with sides(one, two):
            greeting = sealed().session(os.urandom(SALT_BYTES)).greeting()
            writers = await crowd(two, 12, greeting=greeting + struct.pack(">I", 1 << 20))
            await until(lambda: len(two._bringing) == streams.LARGE_OF_STRANGERS)
            large = os.urandom(1_000_000)
            assert await one.call(two.address, large, 3) == b"echo " + large
            for writer in writers:
                writer.transport.abort()

    run(main())


def test_one_host_has_a_bounded_number_of_connections_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CONNECTIONS_PER_HOST", 3)

    async def main() -> None:
        hold = asyncio.Event()

        async def slow(_source: Address, frame: bytes) -> bytes | None:
            await hold.wait()
            return frame

        one, two = Side(sealed()), Side(sealed(), slow)
        async with sides(one, two):
            calls = [asyncio.create_task(one.call(two.address, b"%d" % n, 5)) for n in range(3)]
            await until(lambda: two.counts.calls_taken == 3)
            assert await one.call(two.address, b"3", 2) is None
            assert two.counts.turned_away == 1
            hold.set()
            assert await asyncio.gather(*calls) == [b"0", b"1", b"2"]

    run(main())


def test_connections_that_are_only_kept_warm_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred nodes of one machine join by the same seed: each keeps its connection warm for a minute."""
    monkeypatch.setattr(streams, "CONNECTIONS_PER_HOST", 3)

    async def main() -> None:
        two = Side(sealed())
        others = [Side(sealed()) for _ in range(8)]
        async with sides(two, *others):
            for _ in range(3):
                for one in others:
                    assert await one.call(two.address, b"1", 2) == b"echo 1"
        assert two.counts.turned_away == 0
        assert all(one.counts.calls_failed == 0 for one in others)

    run(main())


def test_bad_weather_delays_calls_and_loses_none() -> None:
    async def main() -> None:
        one, two = Side(sealed(), delay_s=0.05), Side(sealed())
        async with sides(one, two):
            began = asyncio.get_running_loop().time()
            assert await one.call(two.address, b"1", 2) == b"echo 1"
            assert asyncio.get_running_loop().time() - began >= 0.05

    run(main())


def test_an_answer_that_is_late_beyond_the_time_for_it_is_none() -> None:
    async def main() -> None:
        one, two = Side(sealed(), back_s=0.05), Side(sealed())
        async with sides(one, two):
            began = asyncio.get_running_loop().time()
            assert await one.call(two.address, b"1", 2) == b"echo 1"
            assert asyncio.get_running_loop().time() - began >= 0.05
            assert await one.call(two.address, b"2", 0.03) is None
            assert await one.call(two.address, b"3", 2) == b"echo 3"

    run(main())


def test_a_connection_whose_turn_never_comes_is_closed_all_the_same() -> None:
    """The loop ends between the moment in which a connection is there and the first step of whoever serves
    it; and one that the listener had accepted comes after the end."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        side = Side(sealed())
        made: list[asyncio.StreamWriter] = []

        async def bring() -> asyncio.StreamWriter:
            ours, theirs = socket.socketpair()
            ours.close()
            theirs.setblocking(False)
            reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, theirs)
            return asyncio.StreamWriter(transport, protocol, reader, loop)

        async with sides(side):
            made.append(await bring())
            before = asyncio.all_tasks()
            side._taken(asyncio.StreamReader(), made[0])
            for task in asyncio.all_tasks() - before:
                task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert made[0].transport.is_closing()
        made.append(await bring())
        side._taken(asyncio.StreamReader(), made[1])
        assert made[1].transport.is_closing()
        await asyncio.sleep(0)

    run(main())
