"""How a task's function is called: what a submission may give, and what the worker adds.

A submission leaves the Context out. If the function takes it first, the arguments begin after it; elsewhere
a None in its place is as good as nothing. Parameters named as resources are filled if the submission leaves
them out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from fluxmesh.errors import InvalidPayload

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME: Final = 1_000_000  # behind every place
Fillable = tuple[tuple[str, int], ...]


def left_open(fillable: Fillable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of the parameters that these arguments do not reach."""
    return tuple([name for name, at in fillable if at >= len(args) and name not in kwargs])


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

    def check(
        self, args: Sequence[Any], kwargs: dict[str, Any], resources: Container[str] = frozenset()
    ) -> None:
        """Raises InvalidPayload if the function cannot be called so. `resources`: names that the worker can
        give besides."""
        if not kwargs and self.least <= len(args) <= self.most:
            return
        at = self.context_at
        if at and len(args) > at and args[at] is not None:
            message = f"{self.context!r} is for the worker to give"
            raise self._refusal(message, resources, "; name what follows it")
        given, named = list(args), dict(kwargs)
        self.place(given, named, None)
        if self.context is not None and self.context not in self.signature.parameters:
            named.pop(self.context, None)
        named.update(dict.fromkeys(left_open(self.fillable(resources), given, named)))
        try:
            self.signature.bind(*given, **named)
        except TypeError as error:
            raise self._refusal(str(error), resources) from None

    def fillable(self, resources: Container[str]) -> Fillable:
        """The parameters that are resources."""
        found = []
        for at, (name, item) in enumerate(self.signature.parameters.items()):
            if name != self.context and name in resources:
                if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                    found.append((name, at))
                elif item.kind is inspect.Parameter.KEYWORD_ONLY:
                    found.append((name, _BY_NAME))
        return tuple(found)

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

    def _refusal(self, message: str, resources: Container[str], more: str = "") -> InvalidPayload:
        filled = {name for name, _ in self.fillable(resources)}
        seen = [
            item.replace(annotation=inspect.Parameter.empty)
            for name, item in self.signature.parameters.items()
            if name != self.context and name not in filled
        ]
        if filled and not more:
            more = f"; {', '.join(sorted(filled))}: left to the worker, so name what follows"
        called = f"{self.name}{inspect.Signature(seen)}"
        return InvalidPayload(f"the arguments do not fit: {message}", hint=f"it is {called}{more}")
