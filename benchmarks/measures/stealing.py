"""How fast an idle worker runs what another one holds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from msgspec import Struct, field

from benchmarks.bench import Bench
from benchmarks.figures import CheckFailed, Figure, spread
from benchmarks.marks import Crossing, Mark, beside_held, falls_idle
from benchmarks.seen import Seen
from benchmarks.stage import GATE, Scene, Stage
from benchmarks.team import Member, counters, taken, team
from fluxmesh.config import Settings
from fluxmesh.storage.values import HELD_TAKEABLE_AFTER_S

PAIRS: Final = 4  # they take turns: who has been robbed does not ask the robber for a second
PERIOD_S: Final = 1.3
WARM_ROUNDS: Final = 3  # until workers know how long a job takes
ROUNDS_MOST: Final = 4  # for one steal
SURPLUS_LEAST: Final = Settings().mesh_steal_threshold + Settings().mesh_steal_batch + 1
DIRECT_S: Final = HELD_TAKEABLE_AFTER_S * 0.9  # what began sooner was claimed: nothing is taken so early
VICTIM: Final = "north"
THIEF: Final = "south"


def _falls_idle(jobs: Sequence[Seen], starts: dict[int, Mark], gate: Mark) -> Crossing | None:
    return falls_idle(jobs, starts, gate, THIEF, SURPLUS_LEAST)


def _held(jobs: Sequence[Seen], starts: dict[int, Mark], _: Mark) -> Crossing | None:
    """Only the worker in the mesh holds; a job that began on the other one soon was claimed by it."""
    crossing = beside_held(jobs, starts)
    if crossing is None or crossing.victim != VICTIM or (crossing.crossed and crossing.waited_s < DIRECT_S):
        return None
    return crossing


# Without a buffer the thief wants nothing before its slot is free. With one it would take while it is busy
# still, and never be idle.
FALLS_IDLE: Final = Scene(
    members=(Member(VICTIM), Member(THIEF, ("--queues", f"default,{GATE}", "--mesh-local-buffer", "0"))),
    jobs=14,
    nap_s=0.006,
    gate_s=0.03,
    judge=_falls_idle,
)
PLAIN_THIEF: Final = Scene(
    members=(Member(VICTIM), Member(THIEF, ("--queues", f"default,{GATE}"), in_mesh=False)),
    jobs=2,
    nap_s=0.5,
    gate_s=0.03,
    judge=_held,
    turns=False,
)


async def steal_latency(bench: Bench) -> AsyncIterator[Figure]:
    """By the mesh, to a worker that falls idle beside a surplus."""
    bounds = {"p50": "steal-p50", "p99": "steal-p99"}
    async for figure in _latency(bench, "steal latency", FALLS_IDLE, bounds):
        yield figure


async def take_held_latency(bench: Bench) -> AsyncIterator[Figure]:
    """By storage alone. The first 100 ms are the rule: what was held for less is not taken."""
    bounds = {"p50": "take-held-p50", "p99": "take-held-p99"}
    async for figure in _latency(bench, "take held latency", PLAIN_THIEF, bounds):
        yield figure


async def _latency(bench: Bench, name: str, scene: Scene, bounds: dict[str, str]) -> AsyncIterator[Figure]:
    wanted = 12 if bench.quick else 200
    found, told = [], []
    for _ in range(bench.repeat):
        steals = await _steals(bench, scene, wanted)
        found.append(spread([one.waited_s * 1e3 for one in steals.crossings]))
        told.append(_told(steals, scene))
    for share, bound in bounds.items():
        yield Figure(
            name=f"{name} {share}",
            unit="ms",
            values=[one[share] for one in found],
            parameters={
                "steals": wanted,
                "concurrency": 1,
                "body_ms": scene.nap_s * 1e3,
                "pairs": PAIRS,
            },
            bound=bench.bound(bound),
            details={"ms": found, "repetitions": told},
        )


class Steals(Struct):
    """What the rounds of one scene came to. `void`: rounds in which the scene did not come about."""

    crossings: list[Crossing] = field(default_factory=list)
    rounds: int = 0
    void: int = 0
    counted: Counter[str] = field(default_factory=Counter)


def _told(steals: Steals, scene: Scene) -> dict[str, Any]:
    """Where both of a pair are in the mesh, their counters say which way the jobs went; what they do not
    account for was claimed, so it was no steal."""
    moved = sum(one.moved for one in steals.crossings)
    told = {
        "steals": sum(one.crossed for one in steals.crossings),
        "missed": sum(not one.crossed for one in steals.crossings),
        "over_100_ms": sum(one.waited_s > 0.1 for one in steals.crossings),
        "rounds": steals.rounds,
        "rounds_without_surplus": steals.void,
        "jobs_moved": moved,
        "victims": dict(Counter(one.victim for one in steals.crossings)),
    }
    if not _all_in_mesh(scene):
        return told
    if taken(steals.counted) < moved:
        raise CheckFailed(f"{moved} jobs ran on the other worker, {taken(steals.counted)} count as taken")
    return told | {"counters": dict(steals.counted)}


def _all_in_mesh(scene: Scene) -> bool:
    return all(member.in_mesh for member in scene.members)


async def _steals(bench: Bench, scene: Scene, wanted: int) -> Steals:
    steals, turn = Steals(), asyncio.Lock()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(PAIRS):
                group.create_task(_pair(bench, scene, wanted, steals, turn))
    except* CheckFailed as failed:
        raise CheckFailed("; ".join(sorted({str(error) for error in failed.exceptions}))) from None
    if len(steals.crossings) < wanted:
        raise CheckFailed(
            f"in {steals.rounds} rounds a worker stood idle beside a surplus {len(steals.crossings)} times,"
            f" not {wanted}"
        )
    return steals


async def _pair(bench: Bench, scene: Scene, wanted: int, steals: Steals, turn: asyncio.Lock) -> None:
    async with bench.site() as site, team(site, scene.members, concurrency=1):
        stage = Stage(site, scene)
        warm = [await stage.play() for _ in range(WARM_ROUNDS)]
        moved = sum(one.moved for one in warm if one is not None)
        await asyncio.sleep(PERIOD_S)
        while len(steals.crossings) < wanted and steals.rounds < ROUNDS_MOST * wanted:
            began = time.monotonic()
            async with turn if scene.turns else contextlib.nullcontext():
                crossing = await stage.play()
            steals.rounds += 1
            if crossing is None:
                steals.void += 1
            else:
                steals.crossings.append(crossing)
                moved += crossing.moved
            await asyncio.sleep(max(0.0, began + PERIOD_S - time.monotonic()))
        if _all_in_mesh(scene):
            steals.counted.update(await counters(site, lambda told: taken(told) >= moved))
