"""The two ports of a node, bound before anything is announced: datagrams, and streams one above."""

from __future__ import annotations

import errno
import socket
from typing import Final

from fluxmesh.errors import InvalidOption
from fluxmesh.mesh.datagrams import RECEIVE_BUFFER_BYTES
from fluxmesh.mesh.streams import STREAM_PORT_ABOVE

_BACKLOG: Final = 128


class Ports:
    """Both sockets, bound, the stream one listening; neither is passed on to child processes.

    `receive_buffer_bytes` is what the kernel granted. `close` does no harm to what is closed already."""

    def __init__(self, udp: socket.socket, tcp: socket.socket) -> None:
        self.udp = udp
        self.tcp = tcp
        self.port: int = udp.getsockname()[1]
        self.receive_buffer_bytes = udp.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def close(self) -> None:
        self.udp.close()
        self.tcp.close()


def bind_ports(host: str, port: int) -> Ports:
    """Raises InvalidOption that says which port of which address cannot be had, and why."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened: list[socket.socket] = []
    try:
        udp = _bound(opened, family, socket.SOCK_DGRAM, host, port, of=port)
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        tcp = _bound(opened, family, socket.SOCK_STREAM, host, port + STREAM_PORT_ABOVE, of=port)
        return Ports(udp, tcp)
    except BaseException:
        for sock in opened:
            sock.close()
        raise


def _bound(
    opened: list[socket.socket], family: int, kind: socket.SocketKind, host: str, port: int, *, of: int
) -> socket.socket:
    """`of`: the port that was asked for, to which this one belongs."""
    what = "UDP" if kind is socket.SOCK_DGRAM else "TCP"
    try:
        sock = socket.socket(family, kind)
        opened.append(sock)
        sock.setblocking(False)
        if kind is socket.SOCK_STREAM:
            # Connections of the last run that are being forgotten must not keep the next from starting.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind((host, port))
        if kind is socket.SOCK_STREAM:
            sock.listen(_BACKLOG)
        return sock
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise InvalidOption(
                "mesh_bind_addr", f"{host} is no address of this machine", hint="0.0.0.0 means all of them"
            ) from None
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
        other = of + 2 if of + 2 + STREAM_PORT_ABOVE < 65_536 else of - 2
        raise InvalidOption(
            "mesh_port",
            f"{what} port {port} of {host} {why}",
            hint=f"a mesh worker needs two ports, the second one above: give it others, --mesh-port {other}",
        ) from None
