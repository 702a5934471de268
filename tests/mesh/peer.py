"""python -m tests.mesh.peer: one node in a process of its own, told by one JSON argument (Orders).

What it logs and meets goes to standard output as JSON lines, with instants of the machine's monotonic clock.
On standard input it takes words: "leave", "members", "metrics"; at its end the process ends at once.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from fluxmesh.mesh.delays import Weather, parse_weather
from fluxmesh.mesh.effects import Emit
from fluxmesh.mesh.messages import Address, Flag, Meta, Standing
from fluxmesh.mesh.names import look_up
from fluxmesh.mesh.node import MeshNode
from fluxmesh.mesh.options import MeshWorker
from fluxmesh.mesh.ports import bind_ports


class Orders(Struct, frozen=True, kw_only=True):
    worker_id: str
    epoch: int
    port: int
    host: str = "127.0.0.1"
    seeds: tuple[str, ...] = ()
    label: str = "fluxmesh"
    options: dict[str, Any] = {}
    weather: str = ""
    names: dict[str, str] = {}  # what names resolve to, by a name service of its own
    names_after_s: float = 0.0  # and from when on after the start


_lock = threading.Lock()


def say(**fields: object) -> None:
    line = msgspec.json.encode({"at": time.monotonic(), **fields}) + b"\n"
    with _lock:
        try:
            os.write(1, line)
        except OSError:
            os._exit(0)


def main(orders: Orders) -> None:
    begun_s = time.monotonic()

    def lookup(name: str) -> Sequence[str]:
        if orders.names:
            if time.monotonic() - begun_s < orders.names_after_s or name not in orders.names:
                raise socket.gaierror(socket.EAI_NONAME, "no such name")
            return [orders.names[name]]
        return look_up(name)

    def hear(event: Emit) -> None:
        record = event.record
        who = "" if record is None else record.worker_id
        say(event=event.kind, who=who, epoch=0 if record is None else record.epoch, text=event.text)

    options = MeshWorker(port=orders.port, seeds=orders.seeds, **orders.options).resolved()
    weather: Weather | None = parse_weather(orders.weather) if orders.weather else None
    node = MeshNode(
        options,
        ports=bind_ports(orders.host, orders.port),
        address=Address(orders.host, orders.port),
        worker_id=orders.worker_id,
        epoch=orders.epoch,
        meta=Meta(("default",), (0, 1, 2, 3), 8),
        label=orders.label,
        tell=lambda level, word, fields: say(level=level, word=word, fields=fields),
        on_fenced=lambda _: say(fenced=True),
        on_event=hear,
        lookup=lookup,
        weather=weather,
    )
    node.start()
    node.publish(queued=0, running=0, flags=Flag.READY | Flag.STEALS)
    for line in sys.stdin:
        match line.strip():
            case "leave":
                node.leave()
                say(done="leave")
            case "members":
                say(members={v.record.worker_id: _shown(v.record.standing) for v in node.members()})
            case "metrics":
                say(metrics=node.metrics())
    os._exit(0)


def _shown(standing: int) -> str:
    return Standing(standing).name.lower()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Orders))
