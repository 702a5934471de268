"""Definitions of resources: what is refused, in which order they are built, and where."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fluxmesh.callshape import CallShape, left_open
from fluxmesh.errors import InvalidOption, InvalidPayload, ResourceFailed
from fluxmesh.resources import ResourceRegistry, Scope, define_resource, plan_supply


def registry(*definitions: tuple[str, Scope, Any]) -> ResourceRegistry:
    known = ResourceRegistry()
    for name, scope, factory in definitions:
        known.add(define_resource(factory, scope=scope, name=name))
    return known


def plain() -> int:
    return 1


async def coro() -> int:
    return 1


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


def takes_a(a: int) -> int:
    return a


async def coro_takes_a(a: int) -> int:
    return a


def takes_b(b: int, size: int = 3) -> int:
    return b + size


def takes_a_and_b(a: int, b: int) -> int:
    return a + b


def test_a_definition_tells_what_kind_of_function_it_has() -> None:
    kinds = {
        function.__name__: (made.is_async, made.yields, made.scope)
        for function in (plain, coro, generator, async_generator)
        if (made := define_resource(function))
    }
    assert kinds == {
        "plain": (False, False, Scope.WORKER),
        "coro": (True, False, Scope.WORKER),
        "generator": (False, True, Scope.WORKER),
        "async_generator": (True, True, Scope.WORKER),
    }


def by_place_only(a: int, /) -> int:
    return a


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (object(), {}, "resource: object is not a function"),
        (plain, {"scope": "job"}, "scope: 'job' is unknown"),
        (plain, {"name": "db pool"}, "name: 'db pool' cannot be a parameter"),
        (lambda: 1, {}, "name: '<lambda>' cannot be a parameter"),
        (by_place_only, {}, "'by_place_only' takes 'a' by place only"),
    ],
)
def test_what_cannot_be_a_resource_is_refused(factory: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        define_resource(factory, **options)
    assert message in str(caught.value)


def test_two_resources_of_one_name_are_refused() -> None:
    known = registry(("a", Scope.WORKER, plain))
    with pytest.raises(InvalidOption, match=r"'a' is already defined by tests\.unit\.test_resources\.plain"):
        known.add(define_resource(coro, name="a"))
    assert next(iter(known)).factory is plain


def test_a_cycle_is_refused_by_the_definition_that_closes_it() -> None:
    known = registry(("b", Scope.WORKER, takes_a), ("c", Scope.WORKER, takes_b))

    def a(c: int) -> int:
        return c

    with pytest.raises(InvalidOption, match=r"resources that need each other: a -> c -> b -> a"):
        known.add(define_resource(a))
    assert "a" not in known
    with pytest.raises(InvalidOption, match="a -> a"):
        known.add(define_resource(takes_a, name="a"))


@pytest.mark.parametrize("order", [("pool", "session"), ("session", "pool")])
def test_a_resource_that_outlives_what_it_takes_is_refused(order: tuple[str, str]) -> None:
    def pool(session: int) -> int:
        return session

    made = {
        "pool": define_resource(pool, scope=Scope.WORKER),
        "session": define_resource(plain, name="session", scope=Scope.TASK),
    }
    known = ResourceRegistry()
    known.add(made[order[0]])
    with pytest.raises(InvalidOption, match="'pool' of scope worker takes 'session' of scope task"):
        known.add(made[order[1]])


def test_each_is_built_after_what_it_takes_and_once() -> None:
    known = registry(
        ("c", Scope.WORKER, takes_a_and_b), ("b", Scope.WORKER, takes_a), ("a", Scope.WORKER, plain)
    )
    assert [item.name for item in known.in_order(["c", "b"])] == ["a", "b", "c"]


def test_a_parameter_that_nobody_fills_is_named() -> None:
    known = registry(("b", Scope.WORKER, takes_a))
    with pytest.raises(ResourceFailed, match="resource 'b' takes 'a', which is no resource"):
        known.in_order(["b"])
    known.add(define_resource(plain, name="a"))
    assert [item.name for item in known.in_order(["b"])] == ["a", "b"]


def places(known: ResourceRegistry, *names: str, on_thread: bool) -> tuple[list[str], list[str]]:
    plan = plan_supply(known, names, on_thread=on_thread)
    return [item.name for item in plan.early], [item.name for item in plan.late]


def test_what_a_def_body_needs_of_its_own_is_built_on_its_thread() -> None:
    known = registry(
        ("a", Scope.WORKER, plain),
        ("b", Scope.THREAD, takes_a),
        ("c", Scope.TASK, takes_b),
        ("d", Scope.TASK, coro),
    )
    assert places(known, "c", "d", on_thread=True) == (["a", "d"], ["b", "c"])
    assert places(known, "c", "d", on_thread=False) == (["a", "b", "c", "d"], [])


def test_what_an_async_resource_takes_is_built_before_the_body() -> None:
    known = registry(("a", Scope.TASK, plain), ("b", Scope.TASK, coro_takes_a))
    assert places(known, "b", on_thread=True) == (["a", "b"], [])


@pytest.mark.parametrize(
    "known",
    [
        registry(("b", Scope.THREAD, coro)),
        registry(("a", Scope.THREAD, plain), ("b", Scope.TASK, coro_takes_a)),
    ],
)
def test_an_async_resource_is_not_had_from_the_thread_of_a_def_body(known: ResourceRegistry) -> None:
    with pytest.raises(ResourceFailed, match="of scope thread cannot be built for a `def` task"):
        plan_supply(known, ["b"], on_thread=True)
    assert plan_supply(known, ["b"], on_thread=False).late == ()


# -- what a submission leaves to the worker --------------------------------------------------------------
def body(order: int, pool: Any, ctx: Any = None, *, session: Any) -> Any:
    return (order, pool, ctx, session)


def pool_first(pool: Any, order: int) -> Any:
    return (pool, order)


KNOWN = {"pool", "session"}


def test_a_submission_may_leave_resources_out_and_may_give_them() -> None:
    shape = CallShape.of(body, "ctx")
    fillable = shape.fillable(KNOWN)
    for args, kwargs, left in (
        ([1], {}, ("pool", "session")),
        ([1, 2], {}, ("session",)),
        ([], {"order": 1, "pool": None, "session": 2}, ()),
        ([1], {"session": 2}, ("pool",)),
    ):
        shape.check(args, dict(kwargs), KNOWN)
        given = list(args)
        shape.place(given, kwargs, "context")
        assert left_open(fillable, given, kwargs) == left
        value = body(*given, **kwargs, **dict.fromkeys(left, "built"))
        assert value[2] == "context"


def test_without_its_definition_a_resource_is_an_argument_like_others() -> None:
    shape = CallShape.of(body, "ctx")
    with pytest.raises(InvalidPayload, match="missing a required argument: 'pool'"):
        shape.check([1], {"session": 1})
    assert shape.fillable(()) == ()


def test_the_refusal_shows_what_the_caller_gives_and_no_more() -> None:
    with pytest.raises(InvalidPayload) as caught:
        CallShape.of(body, "ctx").check([], {}, KNOWN)
    assert "missing a required argument: 'order'" in caught.value.message
    assert "it is body(order)" in caught.value.hint
    with pytest.raises(InvalidPayload, match="pool: left to the worker, so name what follows"):
        CallShape.of(pool_first, None).check([1], {}, KNOWN)
    CallShape.of(pool_first, None).check([], {"order": 1}, KNOWN)
