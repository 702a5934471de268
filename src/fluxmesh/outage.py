"""How long whoever waits for a job bears with a storage that does not answer.

A job goes on, and ends, while its storage is restarted or fails over; a wait that gave up at the first
broken connection would tell its caller of a failure that never was.
"""

from __future__ import annotations

from typing import Final

from fluxmesh.clock import MonoS
from fluxmesh.errors import OutcomeUnknown, StorageUnreachable

BEAR_S: Final = 30.0
_PAUSES_S: Final = (0.1, 0.2, 0.4, 0.8, 1.0)
AWAY: Final = (StorageUnreachable, OutcomeUnknown)


class Outage:
    """One waiter's view: `answered` after every answer, `bear` after every failure."""

    def __init__(self) -> None:
        self._since: MonoS | None = None
        self._failures = 0

    @property
    def began(self) -> bool:
        """The last failure was the first of this outage."""
        return self._failures == 1

    def answered(self) -> None:
        self._since = None
        self._failures = 0

    def bear(self, error: StorageUnreachable | OutcomeUnknown, now: MonoS, until: MonoS | None) -> float:
        """The seconds to wait before the next look. Raises `error` when the outage has lasted BEAR_S, or
        when the waiter's own time is over at `until`."""
        if self._since is None:
            self._since = now
        if now - self._since >= BEAR_S or (until is not None and now >= until):
            raise error
        pause_s = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._failures += 1
        return pause_s if until is None else min(pause_s, until - now)
