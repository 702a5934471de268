"""A storage that fails on order: for the suite, and for whoever tests code that uses a storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

from fluxmesh.errors import OutcomeUnknown, StorageUnreachable
from fluxmesh.storage.base import Storage


class FaultyStorage:
    """Stands before a real Storage. Each verb passes, unless a fault was ordered for it.

    `lose_replies("exchange")`: the next exchange is performed, its answer lost (OutcomeUnknown).
    `refuse("beat", times=3)`: the next three beats reach nobody (StorageUnreachable).
    `calls` counts what was asked, by verb.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lost: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def lose_replies(self, *verbs: str, times: int = 1) -> None:
        for verb in verbs:
            self._lost[verb] += times

    def refuse(self, *verbs: str, times: int = 1) -> None:
        for verb in verbs:
            self._refused[verb] += times

    @property
    def is_spent(self) -> bool:
        """Every ordered fault has happened."""
        return not +self._lost and not +self._refused

    def as_storage(self) -> Storage:
        return cast("Storage", self)

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self._storage, verb)
        if verb == "subscribe":
            return real
        return self._faulty(verb, real)

    def _faulty(self, verb: str, real: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[verb] += 1
            if self._refused[verb] > 0:
                self._refused[verb] -= 1
                raise StorageUnreachable(f"{verb}: nobody answers", hint="an ordered fault")
            answer = await real(*args, **kwargs)
            if self._lost[verb] > 0:
                self._lost[verb] -= 1
                raise OutcomeUnknown(f"{verb}: the reply was lost", hint="an ordered fault")
            return answer

        return call
