"""Which bodies run in a process of their own, and the way there: what the rest of the worker knows of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from fluxmesh.codec import encode_payload
from fluxmesh.config import Settings
from fluxmesh.errors import InvalidOption
from fluxmesh.obs.log import get_logger, rendering
from fluxmesh.task import PROCESS, TaskDefinition, TaskRegistry
from fluxmesh.worker.isolated.call import IsolatedCall
from fluxmesh.worker.isolated.frames import Hello
from fluxmesh.worker.isolated.pool import BodyPool, Recycling
from fluxmesh.worker.isolated.source import BodySource
from fluxmesh.worker.runs import Plan, Run

ALONE_FROM_CRASHES: Final = 2  # a job that shared two crashes runs where it can take nobody along
HOPELESS: Final = 3  # starts that failed in a row
NO_SOURCE: Final = "this worker was made without a way for another process to find its tasks"
_log = get_logger("worker")


def obstacle(source: BodySource | None, task: str) -> str | None:
    """Why the body of this task cannot run in another process; None: it can."""
    if sys.platform == "win32":
        return "body processes need a POSIX system"
    return NO_SOURCE if source is None else source.obstacle(task)


def check_isolation(registry: TaskRegistry, source: BodySource | None) -> None:
    """Raises InvalidOption for a task that shall run in a process of its own and cannot."""
    for definition in registry:
        if definition.isolation == PROCESS:
            why = obstacle(source, definition.name)
            if why is not None:
                hint = "define it at the top of a module, or start `fluxmesh worker --app module:queue`"
                what = f"no other process can find task {definition.name!r}: {why}"
                raise InvalidOption("isolation", what, hint=hint)


class Isolation:
    """The isolated bodies of one worker. `may_begin` is asked in the moment in which a body would be sent."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        name: str,
        registry: TaskRegistry,
        settings: Settings,
        source: BodySource | None,
        most: int,
        may_begin: Callable[[IsolatedCall], bool],
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._source = source
        self._altered = bool(registry.middleware)  # which may have changed the arguments
        self._pool: BodyPool | None = None
        if source is None:
            return
        self._pool = BodyPool(
            loop,
            source,
            Hello(source.spec, name, settings, rendering()),
            most=most,
            warm=any(definition.isolation == PROCESS for definition in registry),
            recycling=Recycling(settings.recycle_after_jobs, settings.recycle_above_mb),
            has_resources=bool(registry.resources),
            may_begin=may_begin,
        )

    def start(self) -> None:
        """Have a process ready for the first job."""
        if self._pool is not None:
            self._pool.start()

    def applies_to(self, definition: TaskDefinition | None) -> bool:
        """True for a task whose bodies shall be isolated."""
        return definition is not None and definition.isolation == PROCESS

    def alone(self, plan: Plan, task: str) -> Plan:
        """The plan for a job that has been in too many crashes: in a process that runs nothing else."""
        why = obstacle(self._source, task)
        if why is None and not plan.isolated and self._pool is not None and self._pool.failures >= HOPELESS:
            why = "processes do not start"  # it can run without one, and must not wait for ever
        if why is not None:
            _log.warning("job of several crashes runs in its worker", task=task, why=why)
            return plan
        return replace(plan, guided=True, isolated=True, alone=True)

    def call(self, run: Run, args: list[Any], kwargs: dict[str, Any]) -> IsolatedCall:
        """Begin it as soon as there is a process. Raises InvalidPayload or PayloadTooLarge, if middleware has
        made arguments that cannot be carried."""
        assert self._pool is not None
        job = run.job
        if self._altered:
            payload = encode_payload(args, kwargs, limit=self._settings.payload_limit_bytes)
            job = replace(job, payload=payload)
        call = IsolatedCall(self._loop, run, job, hard_grace_s=self._settings.hard_grace_s)
        self._pool.submit(call)
        return call

    def drain(self) -> None:
        """The worker ends: from now on no body is sent, and those that wait for a process are handed back."""
        if self._pool is not None:
            self._pool.drain()

    @property
    def empty(self) -> bool:
        """No process is left."""
        return self._pool is None or self._pool.empty

    async def close(self) -> None:
        """Let the processes end, when no body runs any more. Bounded."""
        if self._pool is not None:
            await self._pool.close()

    async def kill(self) -> None:
        """Let nothing stay behind. Bounded."""
        if self._pool is not None:
            await self._pool.kill()
