"""Every verb of the SDK has two faces of one shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from fluxmesh.calls import BoundTask
from fluxmesh.handle import AsyncJob, JobHandle
from fluxmesh.queue import AsyncQueue, Queue
from fluxmesh.running import AsyncWorkerHandle, WorkerHandle

PAIRS = [(Queue, AsyncQueue), (JobHandle, AsyncJob), (WorkerHandle, AsyncWorkerHandle)]
# Verbs that touch no storage, block by their very nature, or have their other face under another name.
ONE_FACE = {
    Queue: {
        "task",
        "task_named",
        "worker",
        "run_worker",
        "worker_resource",
        "add_middleware",
        "add_outgoing",
    },
    JobHandle: {"refresh"},  # both faces in one: the test of handles shows it
    WorkerHandle: {"stop_now"},
}
EXTRA_ASYNC = {AsyncJob: {"read", "ended", "refresh"}}


def verbs(kind: type) -> dict[str, Callable[..., Any]]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: function for name, function in found if not name.startswith("_")}


def shape(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS)
def test_both_faces_have_the_same_verbs(blocking: type, awaited: type) -> None:
    assert set(verbs(blocking)) - ONE_FACE[blocking] == set(verbs(awaited)) - EXTRA_ASYNC.get(awaited, set())


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS)
def test_both_faces_take_the_same_arguments_and_answer_alike(blocking: type, awaited: type) -> None:
    for name, function in verbs(awaited).items():
        assert inspect.iscoroutinefunction(function), name
        twin = verbs(blocking).get(name)
        if twin is not None and name not in ONE_FACE[blocking]:
            assert not inspect.iscoroutinefunction(twin), name
            assert shape(twin) == shape(function), name
            answers = twin.__annotations__["return"], function.__annotations__["return"]
            assert answers[0] == answers[1], name


@pytest.mark.parametrize(("blocking", "awaited"), [("delay", "enqueue"), ("map", "enqueue_map")])
def test_a_task_is_submitted_in_both_ways(blocking: str, awaited: str) -> None:
    ways = verbs(BoundTask)
    assert shape(ways[blocking]) == shape(ways[awaited])
    assert inspect.iscoroutinefunction(ways[awaited])
    assert not inspect.iscoroutinefunction(ways[blocking])


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS)
def test_every_verb_says_what_it_promises(blocking: type, awaited: type) -> None:
    assert [name for name, verb in verbs(blocking).items() if not verb.__doc__] == []
