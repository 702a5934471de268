"""What a submission may give to a function whose context the worker adds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from fluxmesh.callshape import CallShape
from fluxmesh.context import Context
from fluxmesh.errors import InvalidPayload

CONTEXT: Any = object()


def plain(a: int, b: int = 2) -> Any:
    return (a, b)


def first(ctx: Context, a: int, b: int = 2) -> Any:
    return (a, b, ctx)


def middle(a: int, ctx: Context | None = None, b: int = 2) -> Any:
    return (a, b, ctx)


def last(a: int, b: int = 2, ctx: Context | None = None) -> Any:
    return (a, b, ctx)


def named(a: int, *, b: int = 2, ctx: Context) -> Any:
    return (a, b, ctx)


def anything(*args: Any, ctx: Context, **kwargs: Any) -> Any:
    return (*args, ctx, kwargs)


def shape(function: Callable[..., Any]) -> CallShape:
    return CallShape.of(function, None if function is plain else "ctx")


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "got"),
    [
        (plain, [1], {}, (1, 2)),
        (plain, [1, 3], {}, (1, 3)),
        (plain, [], {"b": 3, "a": 1}, (1, 3)),
        (first, [1], {}, (1, 2, CONTEXT)),
        (first, [None], {}, (None, 2, CONTEXT)),
        (first, [1, 3], {}, (1, 3, CONTEXT)),
        (first, [], {"a": 1}, (1, 2, CONTEXT)),
        (first, [], {"a": 1, "ctx": None}, (1, 2, CONTEXT)),
        (middle, [1], {}, (1, 2, CONTEXT)),
        (middle, [1], {"b": 3}, (1, 3, CONTEXT)),
        (middle, [1, None, 3], {}, (1, 3, CONTEXT)),
        (last, [1, 3], {}, (1, 3, CONTEXT)),
        (last, [1, 3, None], {}, (1, 3, CONTEXT)),
        (last, [1], {"ctx": None}, (1, 2, CONTEXT)),
        (named, [1], {"b": 3}, (1, 3, CONTEXT)),
        (anything, [1], {"x": 3}, (1, CONTEXT, {"x": 3})),
    ],
)
def test_what_is_accepted_can_be_run(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], got: Any
) -> None:
    shape(function).check(args, kwargs)
    given = shape(function)
    given.place(args, kwargs, CONTEXT)
    assert function(*args, **kwargs) == got


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (plain, [], {}, "missing a required argument: 'a'"),
        (plain, [1, 2, 3], {}, "too many positional arguments"),
        (plain, [1], {"c": 3}, "got an unexpected keyword argument 'c'"),
        (plain, [1], {"a": 3}, "multiple values for argument 'a'"),
        (first, [], {}, "missing a required argument: 'a'"),
        (first, [1, 2, 3], {}, "too many positional arguments"),
        (middle, [1, 3], {}, "'ctx' is for the worker to give"),
        (last, [1, 2, 3], {}, "'ctx' is for the worker to give"),
        (named, [], {}, "missing a required argument: 'a'"),
    ],
)
def test_what_the_function_cannot_take_is_refused_with_its_signature(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidPayload) as caught:
        shape(function).check(args, kwargs)
    assert message in str(caught.value)
    assert f"{function.__name__}(" in caught.value.hint


def test_a_wrapper_is_taken_by_what_it_takes_itself() -> None:
    def with_session(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function("session", *args, **kwargs)

        return inner

    @with_session
    def body(session: str, a: int) -> Any:
        return (session, a)

    CallShape.of(body, None).check([1], {})
