"""A task as the engine knows it: a function, its name and its options. Names are unique in a registry."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, ForwardRef, get_args

from msgspec import Struct

from fluxmesh.backoff import Backoff
from fluxmesh.callshape import CallShape
from fluxmesh.codec import decode_options
from fluxmesh.config import Settings
from fluxmesh.context import Context
from fluxmesh.errors import DuplicateTask, InvalidOption
from fluxmesh.job import JobOptions
from fluxmesh.limits import parse_rate
from fluxmesh.middleware import Middleware, Outgoing
from fluxmesh.outcome import Policy
from fluxmesh.resources import ResourceRegistry
from fluxmesh.storage.values import TaskSpec
from fluxmesh.submission import (
    TASK_ONLY,
    checked_int,
    checked_name,
    checked_queue,
    checked_tier,
    normalised,
    prepare,
)

_PER_JOB: Final = frozenset({"id", "idempotency_key", "run_at"})
MAIN_NAMES: Final = ("__main__", "__mp_main__")  # the second: in a process beside the program's own
NONE: Final = "none"
PROCESS: Final = "process"
LEAST_MEMORY_MB: Final = 32  # an interpreter with FluxMesh weighs not much less
_BETWEEN_NAMES: Final = re.compile(r"[\s|\[\],'\"]+")


class TaskDefinition(Struct, frozen=True):
    """One registered function. `fields` are the submission fields its jobs start from, by full name."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    takes_context: str | None
    shape: CallShape
    spec: TaskSpec
    fields: Mapping[str, Any]
    on_lease_lost: str | None = None
    isolation: str = NONE
    memory_limit_mb: int | None = None


def _context_parameter(function: Callable[..., Any]) -> str | None:
    """The name of the parameter that takes the Context: annotated so (`Context | None` too), or called `ctx`
    without an annotation."""
    for name, parameter in inspect.signature(function).parameters.items():
        note = parameter.annotation
        if _means_context(note) or (name == "ctx" and note is inspect.Parameter.empty):
            return name
    return None


def _means_context(note: Any) -> bool:
    if isinstance(note, ForwardRef):
        note = note.__forward_arg__
    if isinstance(note, str):  # as all annotations are in a module that postpones their evaluation
        return any(part.split(".")[-1] == "Context" for part in _BETWEEN_NAMES.split(note))
    return note is Context or any(_means_context(part) for part in get_args(note))


def task_name(function: Callable[..., Any]) -> str:
    """The default name: module.function. A module that is run as a program counts by its own name, by which
    workers import it, and a package by the package's."""
    module = _main_name() if function.__module__ in MAIN_NAMES else function.__module__
    return f"{module.removesuffix('.__main__')}.{function.__qualname__}".replace(".<locals>", "")


def _main_name() -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else "__main__"


def define(function: Callable[..., Any], name: str | None, options: Mapping[str, Any]) -> TaskDefinition:
    """Check a function and its options. Raises InvalidOption with the option's name."""
    own = {key: value for key, value in options.items() if key in TASK_ONLY}
    fields = normalised(
        {key: value for key, value in options.items() if key not in TASK_ONLY}, extra=TASK_ONLY
    )
    for key in _PER_JOB & fields.keys():
        raise InvalidOption(key, "belongs to one job, not to a task", hint="use .options(...)")
    full = checked_name("task", task_name(function) if name is None else name)
    template = prepare({**fields, "task": full})
    if own.get("rate_limit") is not None:
        parse_rate(own["rate_limit"])
    if own.get("max_concurrent") is not None:
        checked_int("max_concurrent", own["max_concurrent"], 1, 1_000_000)
    if own.get("on_lease_lost") not in (None, "continue", "cancel"):
        raise InvalidOption(
            "on_lease_lost", f"{own['on_lease_lost']!r} is unknown", hint="continue or cancel"
        )
    isolation, memory_limit_mb = _checked_isolation(own)
    spec = TaskSpec(
        full,
        checked_queue(fields["queue"]) if "queue" in fields else None,
        checked_tier(fields["priority"]) if "priority" in fields else None,
        own.get("rate_limit"),
        own.get("max_concurrent"),
        decode_options(template.options),
    )
    context = _context_parameter(function)
    return TaskDefinition(
        name=full,
        function=function,
        is_async=inspect.iscoroutinefunction(function),
        takes_context=context,
        shape=CallShape.of(function, context),
        spec=spec,
        fields=fields,
        on_lease_lost=own.get("on_lease_lost"),
        isolation=isolation,
        memory_limit_mb=memory_limit_mb,
    )


def _checked_isolation(own: Mapping[str, Any]) -> tuple[str, int | None]:
    isolation = NONE if own.get("isolation") is None else own["isolation"]
    if isolation not in (NONE, PROCESS):
        raise InvalidOption("isolation", f"{isolation!r} is unknown", hint="none or process")
    limit_mb = own.get("memory_limit_mb")
    if limit_mb is None:
        return isolation, None
    if isolation != PROCESS:
        raise InvalidOption(
            "memory_limit_mb", "a body that shares its process has no limit", hint='isolation="process"'
        )
    return isolation, checked_int("memory_limit_mb", limit_mb, LEAST_MEMORY_MB, 1_000_000_000)


class TaskRegistry:
    """Tasks by name, and what goes along with all of them. Two tasks of one name are an error, whoever
    defined them."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskDefinition] = {}
        self.resources = ResourceRegistry()
        self.middleware: list[Middleware] = []  # around runs, the outermost first
        self.outgoing: list[Outgoing] = []  # called for each submission, in this order

    def add(self, definition: TaskDefinition) -> None:
        known = self._tasks.get(definition.name)
        if known is not None:
            where = f"{known.function.__module__}.{known.function.__qualname__}"
            raise DuplicateTask(
                f"task {definition.name!r} is already defined by {where}", hint='give one a name="…"'
            )
        self._tasks[definition.name] = definition

    def get(self, name: str) -> TaskDefinition | None:
        return self._tasks.get(name)

    def __iter__(self) -> Iterator[TaskDefinition]:
        return iter(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def policy_for(job: JobOptions, task: JobOptions | None, settings: Settings) -> Policy:
    """Limits of one job: its submission's, else its task's, else the settings'."""
    own = task or JobOptions()
    default = Backoff()
    return Policy(
        max_retries=_first(job.max_retries, own.max_retries, settings.max_retries),
        max_crashes=_first(job.max_crashes, own.max_crashes, settings.max_crashes),
        max_snoozes=settings.max_snoozes,
        max_interruptions=settings.max_interruptions,
        backoff=Backoff(
            strategy=_first(job.backoff_strategy, own.backoff_strategy, default.strategy),
            base_s=_first(job.backoff_base_seconds, own.backoff_base_seconds, default.base_s),
            max_s=_first(job.max_backoff_seconds, own.max_backoff_seconds, default.max_s),
            jitter=_first(job.jitter, own.jitter, default.jitter),
        ),
    )


def timeout_for(job: JobOptions, task: JobOptions | None, settings: Settings) -> float:
    """Seconds a body of this job may run (soft)."""
    own = task or JobOptions()
    return float(
        _first(job.timeout_seconds, own.timeout_seconds, job.fallback_timeout_seconds, settings.timeout_s)
    )
