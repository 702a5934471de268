"""How a task's function is called: what a submission may give, and where the worker puts the Context.

A submission leaves the Context out. If the function takes it first, the arguments begin after it; elsewhere
a None in its place is as good as nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from fluxmesh.errors import InvalidPayload

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class CallShape(Struct, frozen=True):
    """`context`: the parameter that takes the Context; `context_at`: its place among the positional ones.
    `least`..`most` positional arguments without keywords are fit without a closer look."""

    name: str
    signature: inspect.Signature
    context: str | None
    context_at: int | None
    least: int
    most: int

    @classmethod
    def of(cls, function: Callable[..., Any], context: str | None) -> CallShape:
        # Not that of what it wraps: a wrapper may add arguments of its own.
        signature = inspect.signature(function, follow_wrapped=False)
        positional = [name for name, item in signature.parameters.items() if item.kind in _POSITIONAL]
        at = positional.index(context) if context in positional else None
        needed = [
            item
            for name, item in signature.parameters.items()
            if name != context
            and item.default is inspect.Parameter.empty
            and item.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        ]
        most = len(positional) if at is None else len(positional) - 1 if at == 0 else at
        fit = all(item.kind in _POSITIONAL for item in needed)
        name = getattr(function, "__name__", "function")
        return cls(name, signature, context, at, len(needed) if fit else most + 1, most)

    def check(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raises InvalidPayload if the function cannot be called so."""
        if not kwargs and self.least <= len(args) <= self.most:
            return
        at = self.context_at
        if at and len(args) > at and args[at] is not None:
            raise self._refusal(f"{self.context!r} is for the worker to give", "; name what follows it")
        given, named = list(args), dict(kwargs)
        self.place(given, named, None)
        if self.context is not None and self.context not in self.signature.parameters:
            named.pop(self.context, None)
        try:
            self.signature.bind(*given, **named)
        except TypeError as error:
            raise self._refusal(str(error)) from None

    def place(self, args: list[Any], kwargs: dict[str, Any], context: Any) -> None:
        """Put the Context where the function takes it."""
        if self.context is None:
            return
        at = self.context_at
        if at == 0:
            kwargs.pop(self.context, None)
            args.insert(0, context)
        elif at is not None and len(args) > at and args[at] is None:
            kwargs.pop(self.context, None)
            args[at] = context
        else:
            kwargs[self.context] = context

    def _refusal(self, message: str, more: str = "") -> InvalidPayload:
        seen = [
            item.replace(annotation=inspect.Parameter.empty)
            for name, item in self.signature.parameters.items()
            if name != self.context
        ]
        called = f"{self.name}{inspect.Signature(seen)}"
        return InvalidPayload(f"the arguments do not fit: {message}", hint=f"it is {called}{more}")
