"""python -m fluxmesh.bodies: where a body process finds the tasks of its worker, a fresh process that it is.

Under `fluxmesh worker` it loads the same app. Beside a worker of `Queue.worker()` and `Queue.run_worker()` it
imports each task by its function's module and name. Functions of the main program are found by loading that
program under another name, so that what stands under `if __name__ == "__main__":` does not run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import msgspec
from msgspec import Struct

from fluxmesh.config import Settings
from fluxmesh.errors import AppImportFailed, FluxMeshError
from fluxmesh.resources import Scope, define_resource
from fluxmesh.task import TaskRegistry, define
from fluxmesh.worker.isolated.source import BodySource

_MAIN: Final = "__main__"
_BESIDE: Final = "__mp_main__"  # the name by which multiprocessing, too, loads a main program once more
_MAX_WRAPPERS: Final = 20


class Place(Struct, frozen=True):
    """Where a function stands. `unwrapped`: how many wrappers are around it there, a task among them."""

    module: str
    qualname: str
    unwrapped: int


class Spec(Struct, frozen=True):
    """All that a fresh process needs to find the tasks. `main_name` or `main_path`: the main program."""

    path: list[str]
    argv: list[str]
    app: str | None = None
    builtins: bool = False
    main_name: str | None = None
    main_path: str | None = None
    tasks: dict[str, Place] = {}
    resources: list[tuple[str, Scope, Place]] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Spec).decode


def _source(spec: Spec, hidden: dict[str, str]) -> BodySource:
    return BodySource((sys.executable, "-m", "fluxmesh.bodies"), _encode(spec), hidden)


def source_of_app(app: str | None, *, builtins: bool) -> BodySource:
    """For the tasks of "module:queue", of the built-in ones, or of both."""
    return _source(Spec(list(sys.path), list(sys.argv), app=app, builtins=builtins), {})


def source_of_registry(registry: TaskRegistry) -> BodySource:
    """For the tasks of this registry, each by its own place. If a resource cannot be found, no task that
    takes one is: resources take each other."""
    name, path = _main_program()
    has_main = name is not None or path is not None
    tasks: dict[str, Place] = {}
    hidden: dict[str, str] = {}
    resources: list[tuple[str, Scope, Place]] = []
    lost: str | None = None
    for resource in registry.resources:
        found = _place_of(resource.factory, has_main=has_main)
        if isinstance(found, Place):
            resources.append((resource.name, resource.scope, found))
        else:
            lost = f"the resource {resource.name!r} {found}"
    for definition in registry:
        found = _place_of(definition.function, has_main=has_main)
        if not isinstance(found, Place):
            hidden[definition.name] = f"its function {found}"
        elif lost is not None and definition.shape.fillable(registry.resources):
            hidden[definition.name] = lost
        else:
            tasks[definition.name] = found
    spec = Spec(
        list(sys.path),
        list(sys.argv),
        main_name=name,
        main_path=path,
        tasks=tasks,
        resources=[] if lost else resources,
    )
    return _source(spec, hidden)


def _main_program() -> tuple[str | None, str | None]:
    """How the main program can be loaded once more: by its name (python -m), or by its path."""
    main = sys.modules[_MAIN]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name), None
    file = getattr(main, "__file__", None)
    return None, os.path.abspath(file) if file and os.path.isfile(file) else None


def _place_of(function: Callable[..., Any], *, has_main: bool) -> Place | str:
    """Where another process finds this very function; else why it does not."""
    module, qualname = function.__module__, function.__qualname__
    if "<locals>" in qualname or "<lambda>" in qualname:
        return f"is defined inside another ({qualname})"
    if module == _MAIN and not has_main:
        return "is defined in a program that is not in a file"
    try:
        for unwrapped, found in enumerate(_layers(_walk(sys.modules[module], qualname))):
            if found is function:
                return Place(module, qualname, unwrapped)
    except (KeyError, AttributeError):
        pass
    return f"is not {module}.{qualname}, as its name says"


def _walk(module: ModuleType, qualname: str) -> Any:
    value: Any = module
    for part in qualname.split("."):
        value = getattr(value, part)
    return value


def _layers(thing: Any) -> Iterator[Any]:
    """A thing, what it wraps, and so on: a task wraps its function."""
    for _ in range(_MAX_WRAPPERS):
        yield thing
        if not hasattr(thing, "__wrapped__"):
            return
        thing = thing.__wrapped__


# -- in the body process -----------------------------------------------------------------------------------
def main() -> int:
    from fluxmesh.worker.isolated.inside import serve

    fd, worker_pid = (int(number) for number in sys.argv[1:3])
    return serve(fd, worker_pid, load)


def load(blob: bytes, settings: Settings) -> TaskRegistry:
    """The tasks that a spec means. Raises AppImportFailed, and what the modules raise."""
    spec = _decode(blob)
    sys.path[:], sys.argv[:] = spec.path, spec.argv  # as modules see them in the worker
    if spec.app is not None or spec.builtins:
        return _of_app(spec, settings)
    registry = TaskRegistry()
    places = [*spec.tasks.values(), *(place for _, _, place in spec.resources)]
    if any(place.module == _MAIN for place in places):
        _load_main(spec)
    for name, scope, place in spec.resources:
        registry.resources.add(define_resource(_find(place), scope=scope, name=name))
    for name, place in spec.tasks.items():
        registry.add(define(_find(place), name, {}))
    return registry


def _of_app(spec: Spec, settings: Settings) -> TaskRegistry:
    from fluxmesh.queue import load_app
    from fluxmesh.tasks import add_builtins, builtin_registry

    if spec.app is None:
        return builtin_registry(settings)
    queue = load_app(spec.app)
    if spec.builtins:
        add_builtins(queue.registry, queue.settings)
    return queue.registry


def _load_main(spec: Spec) -> None:
    """Load the worker's main program, and put it in its place, but not under that name."""
    from fluxmesh.running import loading

    with loading(spec.main_name or spec.main_path or _MAIN):
        if spec.main_name is not None:
            sys.modules[_MAIN] = importlib.import_module(spec.main_name)
            return
        found = importlib.util.spec_from_file_location(_BESIDE, spec.main_path or "")
        if found is None or found.loader is None:
            raise AppImportFailed(f"the main program {spec.main_path!r} cannot be loaded")
        module = importlib.util.module_from_spec(found)
        module.__spec__ = None  # as a script has none: the names of its tasks come from its file
        sys.modules[_MAIN] = sys.modules[_BESIDE] = module
        try:
            found.loader.exec_module(module)
        except FluxMeshError:
            raise
        except Exception as error:
            raise AppImportFailed(
                f"the main program {spec.main_path!r} failed when it was loaded for a body process: "
                f"{type(error).__name__}: {error}",
                hint='put what shall happen once under `if __name__ == "__main__":`',
            ) from error


def _find(place: Place) -> Callable[..., Any]:
    where = f"{place.module}.{place.qualname}"
    module = sys.modules[_MAIN] if place.module == _MAIN else importlib.import_module(place.module)
    try:
        return list(_layers(_walk(module, place.qualname)))[place.unwrapped]  # type: ignore[no-any-return]
    except (AttributeError, IndexError):
        message = f"{where} is not there when its module is imported anew"
        raise AppImportFailed(message, hint="define tasks whenever the module is imported") from None


if __name__ == "__main__":
    sys.exit(main())
