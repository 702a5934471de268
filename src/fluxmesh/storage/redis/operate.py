"""What operators do: cancel, replay, discard and reprioritise jobs, pause and resume queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fluxmesh.storage.base import checked_batch
from fluxmesh.storage.redis.scripts import Scripts
from fluxmesh.storage.values import Cancelled, Done

EACH_MOST: Final = 250  # a script of more would keep other clients waiting


async def _each(scripts: Scripts, verb: str, ids: Sequence[str], *args: Any) -> list[str]:
    """A verb over many ids, atomic per id, in scripts that stay short for everybody else."""
    answers: list[str] = []
    checked_batch(ids)
    for start in range(0, len(ids), EACH_MOST):
        told = await scripts.run(verb, ids[start : start + EACH_MOST], *args)
        answers += [bytes(word).decode("ascii") for word in told]
    return answers


async def cancel(scripts: Scripts, ids: Sequence[str]) -> list[Cancelled]:
    """A running job gets the flag; every other one that has not ended ends here."""
    return [Cancelled(word) for word in await _each(scripts, "cancel", ids)]


async def replay(scripts: Scripts, ids: Sequence[str]) -> list[Done]:
    """A new life for ended jobs. Of several replays only the first meets an ended one."""
    return [Done(word) for word in await _each(scripts, "replay", ids)]


async def discard(scripts: Scripts, ids: Sequence[str]) -> list[Done]:
    """Delete ended jobs with all that hangs on them."""
    return [Done(word) for word in await _each(scripts, "discard", ids)]


async def reprioritise(scripts: Scripts, ids: Sequence[str], tier: int) -> list[Done]:
    """Move jobs that have not ended to another tier."""
    return [Done(word) for word in await _each(scripts, "reprioritise", ids, tier)]


async def pause(scripts: Scripts, queue: str) -> bool:
    return bool(await scripts.run("pause", queue))


async def resume(scripts: Scripts, queue: str) -> bool:
    return bool(await scripts.run("resume", queue))
