"""What a worker tells its node, from any thread to that of the node: of loads and wishes the last counts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from fluxmesh.mesh.effects import Command, Seek, Took, UpdateLoad
from fluxmesh.mesh.messages import Load

TOOK_MAX: Final = 64  # answers that wait; a core has one Take under way


class Inbox:
    """`post` has the node call `take` soon, on its thread; it is called once for all that waits. False: there
    is no thread (yet); what waits then is taken when one asks."""

    def __init__(self, load: Load, post: Callable[[], bool]) -> None:
        self.load = load  # as last told
        self._post = post
        self._lock = threading.Lock()
        self._has_load = False
        self._wish: int | None = None
        self._wish_told = 0
        self._took: deque[Took] = deque(maxlen=TOOK_MAX)
        self._is_posted = False

    def put_load(self, load: Load) -> None:
        """Never waits, and does nothing if it is what was told last."""
        with self._lock:
            if load == self.load:
                return
            self.load = load
            self._has_load = True
        self._wake()

    def put_wish(self, want: int) -> None:
        """A wish for as many again is another wish: the last one may have been granted. For none is not."""
        with self._lock:
            if not want and not self._wish_told:
                return
            self._wish = self._wish_told = want
        self._wake()

    def put_took(self, took: Took) -> None:
        with self._lock:
            self._took.append(took)
        self._wake()

    @property
    def wish(self) -> int:
        """As last told."""
        return self._wish_told

    def _wake(self) -> None:
        with self._lock:
            if self._is_posted:
                return
            self._is_posted = True
        if not self._post():
            self._is_posted = False

    def take(self) -> list[Command]:
        """All that waits, in the order in which it is to be obeyed: what a worker wishes for it wishes for as
        it is now, and after what it was given."""
        with self._lock:
            self._is_posted = False
            commands: list[Command] = [UpdateLoad(self.load)] if self._has_load else []
            commands += self._took
            if self._wish is not None:
                commands.append(Seek(self._wish))
            self._has_load, self._wish = False, None
            self._took.clear()
        return commands
