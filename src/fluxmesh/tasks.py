"""Built-in tasks: something real to run before there is a task of one's own. Their names are bare."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from fluxmesh.clock import system_clock
from fluxmesh.config import Settings
from fluxmesh.context import Context
from fluxmesh.errors import InvalidOption
from fluxmesh.task import TaskRegistry, define

CHUNK_BYTES: Final = 1 << 20
MAX_ITERATIONS: Final = 1_000_000_000
MAX_DURATION_S: Final = 86_400.0
STEPS: Final = 20
_SPACES: Final = frozenset(b" \t\n\r\x0b\x0c")


class FlakyFailure(Exception):
    """What flaky_pipeline fails with."""


class DeliberateFailure(Exception):
    """What failing_task fails with."""


def file_digest(path: str) -> dict[str, Any]:
    """sha256, bytes, lines (newline characters) and words (runs without white space) of a file, which is
    read as a stream."""
    digest = hashlib.sha256()
    size = lines = words = 0
    inside_word = False
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            lines += chunk.count(b"\n")
            words += len(chunk.split())
            # A word that goes on from the chunk before was counted there.
            words -= inside_word and chunk[0] not in _SPACES
            inside_word = chunk[-1] not in _SPACES
    return {"path": path, "sha256": digest.hexdigest(), "bytes": size, "lines": lines, "words": words}


def flaky_pipeline(fail_times: int, key: str, ctx: Context) -> dict[str, Any]:
    """Fails on its first `fail_times` attempts, then succeeds."""
    if ctx.attempt <= fail_times:
        raise FlakyFailure(f"{key}: attempt {ctx.attempt} of {fail_times} that fail")
    return {"key": key, "attempts": ctx.attempt}


def failing_task(reason: str) -> None:
    """Fails, always."""
    raise DeliberateFailure(reason)


async def slow_task(duration: float, ctx: Context) -> dict[str, Any]:
    """Takes `duration` seconds and tells how far it is."""
    if isinstance(duration, bool) or not 0 <= duration <= MAX_DURATION_S:
        raise InvalidOption("duration", f"{duration!r} is out of range", hint=f"0 to {MAX_DURATION_S:g} s")
    for step in range(STEPS):
        ctx.progress(100 * step / STEPS, f"step {step + 1} of {STEPS}")
        await asyncio.sleep(duration / STEPS)
    return {"duration": duration}


async def batch_process(items: Sequence[Any], ctx: Context) -> dict[str, Any]:
    """Handles items one by one and tells how far it is: total, processed_count, results."""
    results = []
    for index, item in enumerate(items):
        results.append({"item": item, "status": "processed"})
        ctx.progress(100 * (index + 1) / len(items), f"{index + 1} of {len(items)}")
        await asyncio.sleep(0)  # a long batch leaves room for other jobs, and can be cancelled
    return {"total": len(items), "processed_count": len(results), "results": results}


def heavy_computation(iterations: int, ctx: Context) -> dict[str, Any]:
    """Keeps a processor busy: the sum of the square roots of 1 to `iterations`."""
    if (
        isinstance(iterations, bool)
        or not isinstance(iterations, int)
        or not 0 <= iterations <= MAX_ITERATIONS
    ):
        raise InvalidOption("iterations", f"{iterations!r} is out of range", hint=f"0 to {MAX_ITERATIONS:,}")
    total = 0.0
    block = 100_000
    for start in range(1, iterations + 1, block):
        end = min(start + block, iterations + 1)
        total += math.fsum(math.sqrt(number) for number in range(start, end))
        ctx.progress(100 * (end - 1) / iterations)
        if ctx.cancelled:
            break  # whatever is returned: a cancelled job that returns is COMPLETED
    return {"iterations": iterations, "sum": total}


def webhook_task(settings: Settings) -> Callable[..., Any]:
    """webhook_delivery as these settings allow it."""
    allow_private = settings.webhook_allow_private

    def webhook_delivery(url: str, payload: Any, secret: str, ctx: Context) -> dict[str, Any]:
        """POSTs the payload as JSON, signed with the secret, to a public address."""
        from fluxmesh.webhook import deliver  # loads an HTTP client, which few workers need

        return deliver(
            url,
            payload,
            secret,
            job_id=ctx.job_id,
            attempt=ctx.attempt,
            allow_private=allow_private,
            clock=system_clock(),
        )

    return webhook_delivery


BUILTINS: Final[tuple[Callable[..., Any], ...]] = (
    file_digest,
    flaky_pipeline,
    failing_task,
    slow_task,
    batch_process,
    heavy_computation,
)


def builtin_registry(settings: Settings) -> TaskRegistry:
    """A registry of all built-in tasks."""
    registry = TaskRegistry()
    add_builtins(registry, settings)
    return registry


def add_builtins(registry: TaskRegistry, settings: Settings) -> None:
    """Add the built-in tasks to a registry. Raises DuplicateTask if it has one of their names."""
    for function in (*BUILTINS, webhook_task(settings)):
        registry.add(define(function, function.__name__, {}))
