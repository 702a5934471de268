"""How a fresh process comes to the tasks of its worker. The floor above makes it; here it is only carried."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class BodySource(Struct, frozen=True):
    """`argv` starts a body process (two numbers follow: the descriptor of its pipe, the worker's process id);
    `spec` is what its program reads to find the tasks. `hidden`: tasks that no fresh process can find, and
    why."""

    argv: tuple[str, ...]
    spec: bytes
    hidden: Mapping[str, str] = {}

    def obstacle(self, task: str) -> str | None:
        """Why a fresh process cannot find this task; None: it can."""
        return self.hidden.get(task)
