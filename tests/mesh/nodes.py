"""Real nodes on loopback, in this process, each on a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fluxmesh.mesh.delays import Weather
from fluxmesh.mesh.effects import Emit
from fluxmesh.mesh.messages import Address, Flag, Meta, NodeRef, Offered, Record, Standing
from fluxmesh.mesh.names import Lookup, look_up
from fluxmesh.mesh.node import MeshNode
from fluxmesh.mesh.options import MeshWorker
from fluxmesh.mesh.ports import bind_ports
from fluxmesh.mesh.shelf import Shelf, Store
from tests.mesh.sockets import free_port

READY = Flag.READY | Flag.STEALS
BOUND_S = 30.0


class Told:
    """What a node has logged and which events it met, to be waited for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.lines: list[tuple[str, str, dict[str, object]]] = []
        self.events: list[tuple[float, Emit]] = []

    def tell(self, level: str, event: str, fields: dict[str, object]) -> None:
        with self._changed:
            self.lines.append((level, event, fields))
            self._changed.notify_all()

    def hear(self, event: Emit) -> None:
        with self._changed:
            self.events.append((time.monotonic(), event))
            self._changed.notify_all()

    def wait(self, holds: Callable[[], bool], bound_s: float = BOUND_S) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, bound_s), self.lines[-20:]

    def kinds(self, worker_id: str | None = None) -> list[str]:
        return [
            event.kind
            for _, event in list(self.events)
            if worker_id is None or (event.record is not None and event.record.worker_id == worker_id)
        ]

    def words(self) -> list[str]:
        return [event for _, event, _ in list(self.lines)]


class Host:
    """A node with what it told. The epoch counts up with every node of an id, as storage's would."""

    epochs: dict[str, int] = {}  # noqa: RUF012

    def __init__(
        self,
        worker_id: str,
        *,
        port: int | None = None,
        seeds: Sequence[str] = (),
        label: str = "fluxmesh",
        queues: tuple[str, ...] = ("default",),
        lookup: Lookup = look_up,
        weather: Weather | None = None,
        on_fenced: Callable[[Record], None] = lambda _: None,
        shelf: Shelf | None = None,
        on_take: Callable[[NodeRef, tuple[Offered, ...]], None] | None = None,
        on_share: Callable[[], None] = lambda: None,
        store: Store | None = None,
        tasks: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.worker_id = worker_id
        self.port = free_port() if port is None else port
        self.told = Told()
        Host.epochs[worker_id] = epoch = Host.epochs.get(worker_id, 0) + 1
        self.options = MeshWorker(
            port=self.port, seeds=list(seeds), **{"protocol_period_ms": 200, **options}
        ).resolved()
        self.node = MeshNode(
            self.options,
            ports=bind_ports("127.0.0.1", self.port),
            address=Address("127.0.0.1", self.port),
            worker_id=worker_id,
            epoch=epoch,
            meta=Meta(
                queues,
                (0, 1, 2, 3),
                4,
                steals=self.options.steal,
                virtual_nodes=self.options.virtual_nodes,
                affinity_weight=self.options.affinity_weight,
            ),
            label=label,
            tell=self.told.tell,
            on_fenced=on_fenced,
            on_event=self.told.hear,
            shelf=shelf,
            on_take=on_take,
            on_share=on_share,
            store=store,
            tasks=tasks,
            lookup=lookup,
            weather=weather,
        )

    @property
    def seed(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> Host:
        self.node.start()
        self.node.publish(queued=0, running=0, flags=READY)
        return self

    def standing_of(self, worker_id: str) -> Standing | None:
        for view in self.node.members():
            if view.record.worker_id == worker_id:
                return Standing(view.record.standing)
        return None

    def send(self, datagram: bytes) -> None:
        """As a stranger."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(datagram, ("127.0.0.1", self.port))

    def sees(self, *others: Host) -> bool:
        """It holds every one of them for alive."""
        return all(self.standing_of(other.worker_id) is Standing.ALIVE for other in others)


@contextmanager
def hosts(*made: Host) -> Iterator[None]:
    """Start them, the first one first; at the end all are silenced without a goodbye."""
    try:
        for host in made:
            host.start()
        yield
    finally:
        for host in made:
            host.node.close_after(0.0)


def eventually(holds: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    """Look until it holds: snapshots change on other threads, which give no sign."""
    end_s = time.monotonic() + bound_s
    while not holds():
        assert time.monotonic() < end_s, "it never came to hold"
        time.sleep(0.01)


def all_see_all(made: Sequence[Host]) -> bool:
    return all(one.sees(*(other for other in made if other is not one)) for one in made)
