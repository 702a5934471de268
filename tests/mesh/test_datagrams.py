"""The UDP socket of a node."""

from __future__ import annotations

import asyncio
import errno
import socket
import time

import pytest

from fluxmesh.errors import InvalidOption
from fluxmesh.mesh.datagrams import Datagrams
from fluxmesh.mesh.messages import Address
from fluxmesh.mesh.ports import bind_ports
from tests.mesh.sockets import free_port, run, until


class Failing(socket.socket):
    """A socket that fails to receive, so many times, although something is there."""

    failures = 0

    def recvfrom(self, *args: int) -> tuple[bytes, tuple[str, int]]:  # type: ignore[override]
        if self.failures > 0:
            self.failures -= 1
            raise OSError(errno.ECONNRESET, "connection reset")
        return super().recvfrom(*args)


def bound(host: str = "127.0.0.1") -> Failing:
    sock = Failing(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.bind((host, 0))
    return sock


class Ear:
    """What one socket has heard."""

    def __init__(self, sock: socket.socket) -> None:
        self.address = Address(*sock.getsockname()[:2])
        self.heard: list[tuple[Address, bytes]] = []
        self.errors: list[OSError] = []
        self.datagrams = Datagrams(
            sock,
            asyncio.get_running_loop(),
            lambda src, data: self.heard.append((src, data)),
            self.errors.append,
        )
        self.datagrams.start()


def test_what_is_sent_is_heard_with_its_source() -> None:
    async def main() -> None:
        one, two = Ear(bound()), Ear(bound())
        assert one.datagrams.send(two.address, b"hello")
        await until(lambda: bool(two.heard))
        assert two.heard == [(one.address, b"hello")]
        assert (one.datagrams.sent, one.datagrams.sent_bytes) == (1, 5)
        assert (two.datagrams.received, two.datagrams.received_bytes) == (1, 5)
        one.datagrams.close()
        two.datagrams.close()

    run(main())


def test_d20_a_flood_of_packets_that_take_long_is_read_for_a_bounded_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        one, sock = Ear(bound()), bound()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        heard: list[float] = []

        def slowly(_source: Address, _data: bytes) -> None:
            time.sleep(0.002)
            heard.append(loop.time())

        datagrams = Datagrams(sock, loop, slowly, lambda _: None)
        for number in range(300):
            one.datagrams.send(Address(*sock.getsockname()[:2]), b"%d" % number)
        began_s = loop.time()
        assert 1 <= datagrams.drain() < 300
        assert loop.time() - began_s < 0.2
        fired: list[float] = []

        def timer() -> None:
            fired.append(loop.time())
            if len(heard) < 300:
                loop.call_later(0.001, timer)

        datagrams.start()
        timer()
        await until(lambda: len(heard) == 300)
        assert len(fired) > 3  # between, not after
        datagrams.close()
        one.datagrams.close()

    run(main())


def test_d25_receive_errors_are_counted_and_the_reading_goes_on() -> None:
    async def main() -> None:
        sock = bound()
        one, two = Ear(bound()), Ear(sock)
        sock.failures = 7
        one.datagrams.send(two.address, b"still there")
        await until(lambda: bool(two.heard))
        assert (two.datagrams.receive_errors, len(two.errors)) == (7, 7)
        one.datagrams.send(two.address, b"and again")
        await until(lambda: len(two.heard) == 2)
        one.datagrams.close()
        two.datagrams.close()

    run(main())


def test_a_send_that_fails_here_says_so_and_one_into_the_void_does_not() -> None:
    async def main() -> None:
        one = Ear(bound())
        assert one.datagrams.send(Address("127.0.0.1", free_port()), b"nobody hears this")
        assert not one.datagrams.send(Address("127.0.0.1", 1_024), b"x" * 70_000)
        assert not one.datagrams.send(Address("::1", 7_946), b"another family")
        assert not one.datagrams.send(Address("no address", 7_946), b"no address")
        assert one.datagrams.send_errors == 3
        one.datagrams.close()

    run(main())


def test_draining_takes_what_has_come_without_waiting_for_the_loop() -> None:
    async def main() -> None:
        one, two = Ear(bound()), Ear(bound())
        for number in range(100):
            one.datagrams.send(two.address, b"%d" % number)
        assert two.datagrams.drain() == 100
        assert [data for _, data in two.heard] == [b"%d" % number for number in range(100)]
        assert two.datagrams.drain() == 0
        one.datagrams.close()
        two.datagrams.close()

    run(main())


def test_a_socket_of_both_families_speaks_of_ipv4_addresses_as_such() -> None:
    async def main() -> None:
        port = free_port()
        ports = bind_ports("::", port)
        ports.tcp.close()
        one, two = Ear(bound()), Ear(ports.udp)
        one.datagrams.send(Address("127.0.0.1", port), b"ping")
        await until(lambda: bool(two.heard))
        assert two.heard[0][0] == one.address
        assert two.datagrams.send(one.address, b"pong")
        await until(lambda: bool(one.heard))
        one.datagrams.close()
        two.datagrams.close()

    run(main())


class TestPorts:
    def test_both_ports_are_bound_and_the_kernel_says_what_buffer_it_granted(self) -> None:
        port = free_port()
        ports = bind_ports("127.0.0.1", port)
        assert (ports.port, ports.tcp.getsockname()[1]) == (port, port + 1)
        assert ports.receive_buffer_bytes > 0
        assert not ports.udp.get_inheritable()
        assert not ports.tcp.get_inheritable()
        ports.close()

    @pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])
    def test_d27_a_taken_port_is_an_error_that_names_it_and_leaves_nothing_open(
        self, kind: socket.SocketKind
    ) -> None:
        port = free_port()
        with socket.socket(socket.AF_INET, kind) as other:
            other.bind(("127.0.0.1", port + (kind is socket.SOCK_STREAM)))
            if kind is socket.SOCK_STREAM:
                other.listen()
            taken = f"{port + (kind is socket.SOCK_STREAM)} of 127.0.0.1 is taken"
            with pytest.raises(InvalidOption, match=taken):
                bind_ports("127.0.0.1", port)
        bind_ports("127.0.0.1", port).close()

    def test_an_address_of_another_machine_cannot_be_bound(self) -> None:
        with pytest.raises(InvalidOption, match=r"198\.51\.100\.7 is no address of this machine"):
            bind_ports("198.51.100.7", free_port())


def test_a_port_that_can_be_bound_and_not_listened_at_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(_sock: socket.socket, _backlog: int) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    port = free_port()
    monkeypatch.setattr(socket.socket, "listen", listen)
    with pytest.raises(InvalidOption, match=f"TCP port {port + 1} of 127.0.0.1 is taken"):
        bind_ports("127.0.0.1", port)
