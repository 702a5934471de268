"""Workers of one measurement that know each other: their ports, from when they do, what they have counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from benchmarks.bench import Site
from benchmarks.crew import WorkerProcess
from benchmarks.figures import CheckFailed
from fluxmesh.mesh.view import NodeReport, decode_report

PORTS: Final = range(22_000, 30_000)  # below those that the kernel gives to connections
AGREED_S: Final = 60.0
ELIGIBLE_S: Final = 2.0  # from the agreement on, until each has said for a second that it is ready
TOLD_S: Final = 20.0  # numbers of jobs alone are told to storage every 15 s
_next_port = PORTS.start + os.getpid() * 38 % len(PORTS)


class Member(Struct, frozen=True):
    """One worker of a team. `flags` are its own, beside those that the mesh needs."""

    name: str
    flags: tuple[str, ...] = ()
    in_mesh: bool = True


@contextlib.asynccontextmanager
async def team(
    site: Site, members: Sequence[Member], *, concurrency: int
) -> AsyncIterator[list[WorkerProcess]]:
    """`fluxmesh worker` for each, all started at once; from when they are ready and, those in the mesh, each
    has told storage that it sees all others in its ring."""
    seed = free_ports()
    async with contextlib.AsyncExitStack() as stack:
        workers: list[WorkerProcess] = []
        for member in members:
            flags = [*member.flags, *(mesh_flags(seed, first=not workers) if member.in_mesh else ())]
            worker = site.worker(worker_id=member.name, concurrency=concurrency, ready=False, flags=flags)
            workers.append(await stack.enter_async_context(worker))
        for worker in workers:
            await site.until_ready(worker)
        await _until_agreed(site, {member.name for member in members if member.in_mesh})
        yield workers


def mesh_flags(seed: int, *, first: bool = False) -> list[str]:
    """Of a worker whose mesh began at the port `seed`; the first one has it."""
    flags = ["--mesh", "--mesh-port", str(seed if first else free_ports())]
    return flags if first else [*flags, "--mesh-seeds", f"127.0.0.1:{seed}"]


async def _until_agreed(site: Site, names: set[str]) -> None:
    if len(names) < 2:
        await asyncio.sleep(ELIGIBLE_S)
        return

    async def agreed() -> bool:
        seen = {name: in_ring(report) for name, report in (await reports(site)).items()}
        return all(names <= seen.get(name, set()) for name in names)

    try:
        await site.until(agreed, AGREED_S)
    except CheckFailed:
        raise CheckFailed(f"the workers do not all see each other after {AGREED_S:g} s") from None
    await asyncio.sleep(ELIGIBLE_S)


async def reports(site: Site) -> dict[str, NodeReport]:
    """What each worker told storage last of the mesh."""
    found = {}
    for view in await site.storage.mesh_views():
        report = decode_report(view.view)
        if report is not None:
            found[view.worker_id] = report
    return found


def in_ring(report: NodeReport) -> set[str]:
    return {member.worker_id for member in report.members if member.in_ring and member.answered}


async def counters(site: Site, enough: Callable[[Mapping[str, int]], bool]) -> dict[str, int]:
    """The counters of all workers together: of each the last that it told. They are told rarely; so wait
    until they account for what is known to have happened, for TOLD_S at most."""

    async def told() -> bool:
        found.clear()
        for report in (await reports(site)).values():
            found.update(report.counters)
        return enough(found)

    found: Counter[str] = Counter()
    with contextlib.suppress(CheckFailed):
        await site.until(told, TOLD_S)
    return dict(found)


def taken(counted: Mapping[str, int]) -> int:
    """Jobs that changed hands before their start, whichever way."""
    return counted.get("jobs_stolen_in", 0) + counted.get("jobs_taken_held", 0)


def free_ports() -> int:
    """The first of two neighbouring ports that nobody has, for datagrams and for streams."""
    global _next_port
    for _ in PORTS:
        _next_port += 2
        if _next_port + 1 >= PORTS.stop:
            _next_port = PORTS.start
        if _is_free(_next_port) and _is_free(_next_port + 1):
            return _next_port
    raise CheckFailed(f"no two free ports from {PORTS.start} to {PORTS.stop}")


def _is_free(port: int) -> bool:
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True
