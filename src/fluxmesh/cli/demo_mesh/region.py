"""The program of one region: a worker in the mesh, as any program would have one, that tells how it is.

python -m fluxmesh.cli.demo_mesh.region ORDERS: it ends by SIGTERM, or when its standard input does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import Final

import msgspec

from fluxmesh.cli.demo_mesh.telling import Orders, Seen, Telling
from fluxmesh.context import Context
from fluxmesh.errors import FluxMeshError
from fluxmesh.mesh.messages import Standing
from fluxmesh.mesh.node import MeshNode
from fluxmesh.mesh.options import MeshWorker
from fluxmesh.obs.log import configure
from fluxmesh.queue import Queue
from fluxmesh.running import WorkerHandle

TASK: Final = "serve"
TELL_S: Final = 0.2
GRACE_S: Final = 1.0
LOCAL_BUFFER: Final = 256  # deep, as for short jobs: so there is something to take when they turn out long
_encode: Final = msgspec.json.Encoder().encode


def worker_of(orders: Orders, ended: list[str]) -> WorkerHandle:
    """The region's worker. The jobs whose bodies end are put into `ended`."""
    queue = Queue(orders.url, settings={"keeper": False})

    @queue.task(name=TASK)
    async def serve(takes_ms: float, ctx: Context) -> str:
        """What a request costs: a wait, as for a database or another service."""
        await asyncio.sleep(takes_ms / 1_000)
        ended.append(ctx.job_id)
        return orders.region

    mesh = MeshWorker(
        port=orders.port,
        seeds=orders.seeds,
        steal=orders.steal,
        local_buffer=LOCAL_BUFFER,
        protocol_period_ms=orders.period_ms,
    )
    return queue.worker(
        (orders.queue,),
        worker_id=orders.region,
        concurrency=orders.concurrency,
        grace_s=GRACE_S,
        mesh=mesh,
    )


def telling(worker: WorkerHandle, node: MeshNode, queue: str, ended: list[str]) -> Telling:
    count = len(ended)
    told, ended[:count] = tuple(ended[:count]), []
    snapshot, info = node.snapshot, node.cluster_info()
    ring = snapshot.rings.get(queue)
    return Telling(
        region=worker.worker_id,
        epoch=node.me.epoch,
        on_ring=0 if ring is None else len(ring),
        running=worker.running_count,
        held=int(info["local_buffer_len"]),
        counters={name: count for name, count in node.metrics().items() if count},
        seen=tuple(
            Seen(
                view.record.worker_id,
                Standing(view.record.standing).name.lower(),
                round(view.rtt_ns / 1e6, 1) if view.rtt_ns else None,
            )
            for view in snapshot.members
        ),
        ended=told,
    )


def main(orders: Orders) -> int:
    configure("info", "json")
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    threading.Thread(target=_until_end_of_input, args=(over,), daemon=True).start()
    ended: list[str] = []
    worker = worker_of(orders, ended)
    try:
        worker.start()
    except FluxMeshError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return error.exit_code
    try:
        while not over.wait(TELL_S):
            node = worker.mesh
            if node is not None and not _say(telling(worker, node, orders.queue, ended)):
                break
        node = worker.mesh
        worker.stop()
        if node is not None:
            _say(telling(worker, node, orders.queue, ended))
    finally:
        worker.stop_now()
    return 0


def _until_end_of_input(over: threading.Event) -> None:
    while os.read(0, 4_096):
        pass
    over.set()


def _say(told: Telling) -> bool:
    """False: nobody listens any more."""
    try:
        sys.stdout.buffer.write(_encode(told) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Orders)))
