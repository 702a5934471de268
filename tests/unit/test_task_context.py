"""Which parameter of a task takes the Context."""

from __future__ import annotations

import contextvars
import decimal
import inspect
from collections.abc import Callable
from typing import Any, Optional, Union

import pytest

from fluxmesh.context import Context
from fluxmesh.task import define


def annotated(note: Any, name: str = "run") -> Callable[..., None]:
    def body() -> None: ...

    parameter = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=note)
    body.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    return body


@pytest.mark.parametrize(
    "note",
    [
        Context,
        Context | None,
        Optional[Context],  # noqa: UP045
        Union[None, Context],  # noqa: UP007
        Optional["Context"],
        "Context",
        "Context | None",
        "None|Context",
        "Optional[Context]",
        "typing.Optional['fluxmesh.Context']",
        "fm.Context",
        "fluxmesh.context.Context | None",
    ],
)
def test_an_annotated_parameter_takes_the_context(note: Any) -> None:
    assert define(annotated(note), "t", {}).takes_context == "run"


@pytest.mark.parametrize(
    "note", [int, "int", contextvars.ContextVar, decimal.Context, "ContextVar[int]", "MyContext", "Contexts"]
)
def test_other_parameters_do_not(note: Any) -> None:
    assert define(annotated(note), "t", {}).takes_context is None
    assert define(annotated(note, "ctx"), "t", {}).takes_context is None


def test_a_parameter_called_ctx_needs_no_annotation() -> None:
    def body(value, ctx=None): ...  # type: ignore[no-untyped-def]

    assert define(body, "t", {}).takes_context == "ctx"
