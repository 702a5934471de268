"""Resources: what bodies need and a worker makes for them, such as pools, clients and sessions.

Here are the definitions and the order in which they are built. `worker/supply.py` builds and closes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from fluxmesh.errors import InvalidOption, ResourceFailed
from fluxmesh.submission import MAX_NAME

_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LOOSE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Scope(StrEnum):
    """How long a resource lives: as long as the worker, one of its threads, or one start of a job."""

    WORKER = "worker"
    THREAD = "thread"
    TASK = "task"


_LIVES: Final = {Scope.TASK: 0, Scope.THREAD: 1, Scope.WORKER: 2}


class ResourceDefinition(Struct, frozen=True):
    """One resource: the function that makes it, and the names of the resources that this function may take.

    `is_async`: the function is a coroutine function or an async generator and runs on the worker's loop.
    `yields`: it is a generator; what follows its `yield` closes the resource. `required`: parameters
    without a default.
    """

    name: str
    factory: Callable[..., Any]
    scope: Scope
    is_async: bool
    yields: bool
    takes: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()

    @property
    def where(self) -> str:
        """The function's place, for messages."""
        return f"{self.factory.__module__}.{self.factory.__qualname__}"


def define_resource(
    factory: Callable[..., Any], *, scope: Scope = Scope.WORKER, name: str | None = None
) -> ResourceDefinition:
    """Check a function and its scope. Raises InvalidOption with the option's name."""
    if not inspect.isroutine(factory):
        kind = type(factory).__name__
        raise InvalidOption(
            "resource", f"{kind} is not a function", hint="put @queue.worker_resource() on a function"
        )
    try:
        lifetime = Scope(scope)
    except ValueError:
        hint = "Scope.WORKER, Scope.THREAD or Scope.TASK"
        raise InvalidOption("scope", f"{scope!r} is unknown", hint=hint) from None
    full = factory.__name__ if name is None else name
    if not isinstance(full, str) or not full.isidentifier() or len(full) > MAX_NAME:
        raise InvalidOption("name", f"{full!r} cannot be a parameter", hint='a name such as "db_pool"')
    parameters = inspect.signature(factory).parameters
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise InvalidOption(
                "resource", f"{full!r} takes {parameter.name!r} by place only", hint="drop the `/`"
            )
    takes = {key: item for key, item in parameters.items() if item.kind in _NAMED}
    return ResourceDefinition(
        name=full,
        factory=factory,
        scope=lifetime,
        is_async=inspect.iscoroutinefunction(factory) or inspect.isasyncgenfunction(factory),
        yields=inspect.isgeneratorfunction(factory) or inspect.isasyncgenfunction(factory),
        takes=tuple(takes),
        required=frozenset(key for key, item in takes.items() if item.default is item.empty),
    )


class ResourceRegistry:
    """Resources by name. What could never be built is refused when it is added."""

    def __init__(self) -> None:
        self._known: dict[str, ResourceDefinition] = {}

    def add(self, definition: ResourceDefinition) -> None:
        """Raises InvalidOption for a name taken, a cycle, or a resource that takes one of a shorter life."""
        name = definition.name
        known = self._known.get(name)
        if known is not None:
            raise InvalidOption(
                "resource", f"{name!r} is already defined by {known.where}", hint='give one a name="…"'
            )
        self._known[name] = definition
        try:
            self._refuse_cycle(name)
            for taker in self._known.values():
                for taken in self.taken_by(taker):
                    if name in (taker.name, taken.name):
                        _refuse_shorter(taker, taken)
        except InvalidOption:
            del self._known[name]
            raise

    def taken_by(self, definition: ResourceDefinition) -> list[ResourceDefinition]:
        """The resources among a function's parameters."""
        return [self._known[name] for name in definition.takes if name in self._known]

    def _refuse_cycle(self, name: str) -> None:
        """A cycle that a new resource closes leads through it."""
        paths = [[name]]
        seen: set[str] = set()
        while paths:
            path = paths.pop()
            for taken in self.taken_by(self._known[path[-1]]):
                if taken.name == name:
                    way = " -> ".join([*path, name])
                    raise InvalidOption("resource", f"resources that need each other: {way}")
                if taken.name not in seen:
                    seen.add(taken.name)
                    paths.append([*path, taken.name])

    def in_order(self, names: Iterable[str]) -> list[ResourceDefinition]:
        """These resources and all that they take, each after what it takes. Raises ResourceFailed for a
        function with a parameter that nobody fills."""
        found: dict[str, ResourceDefinition] = {}

        def visit(definition: ResourceDefinition) -> None:  # as deep as resources take each other
            if definition.name in found:
                return
            missing = sorted(key for key in definition.required if key not in self._known)
            if missing:
                raise ResourceFailed(
                    f"resource {definition.name!r} takes {missing[0]!r}, which is no resource",
                    hint="define it with @queue.worker_resource(), or give the parameter a default",
                )
            for taken in self.taken_by(definition):
                visit(taken)
            found[definition.name] = definition

        for name in names:
            visit(self._known[name])
        return list(found.values())

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[ResourceDefinition]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)


def _refuse_shorter(taker: ResourceDefinition, taken: ResourceDefinition) -> None:
    if _LIVES[taken.scope] < _LIVES[taker.scope]:
        raise InvalidOption(
            "resource",
            f"{taker.name!r} of scope {taker.scope} takes {taken.name!r} of scope {taken.scope}, which is"
            " closed earlier",
            hint="give both one scope",
        )


class SupplyPlan(Struct, frozen=True):
    """What a run needs, in the order of building: `early` from the loop, `late` on the body's own thread."""

    early: tuple[ResourceDefinition, ...]
    late: tuple[ResourceDefinition, ...]


def plan_supply(registry: ResourceRegistry, names: Iterable[str], *, on_thread: bool) -> SupplyPlan:
    """Where each resource of a run is built. `on_thread`: its body is a `def`.

    A sync resource of scope THREAD or TASK is made, used and closed on the thread of the `def` body that
    takes it, as a connection may demand that belongs to its thread. All others are made from the loop.
    Raises ResourceFailed for what cannot be had there.
    """
    ordered = registry.in_order(names)
    early: set[str] = set()
    for definition in reversed(ordered):  # takers come before what they take
        if not on_thread or definition.is_async or definition.scope is Scope.WORKER:
            early.add(definition.name)
        if definition.name in early:
            if on_thread and definition.scope is Scope.THREAD:
                raise _no_thread(definition)
            early.update(taken.name for taken in registry.taken_by(definition))
    return SupplyPlan(
        tuple(item for item in ordered if item.name in early),
        tuple(item for item in ordered if item.name not in early),
    )


def _no_thread(definition: ResourceDefinition) -> ResourceFailed:
    return ResourceFailed(
        f"resource {definition.name!r} of scope thread cannot be built for a `def` task: it is async, or an"
        " async resource takes it",
        hint="make it a `def` resource, or give it the scope WORKER or TASK",
    )


def arguments_for(definition: ResourceDefinition, built: Mapping[str, Any]) -> dict[str, Any]:
    """What a resource's function is called with: those of its parameters that are resources."""
    return {name: built[name] for name in definition.takes if name in built}
