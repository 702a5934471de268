"""Does this machine's clock agree with the storage's? Nothing depends on it, but somebody should know."""

from __future__ import annotations

from typing import Final

from fluxmesh.clock import US, WallUs
from fluxmesh.obs.log import get_logger

TOLERATED_S: Final = 1.0
_log = get_logger("worker")


def skew_s(sent_us: WallUs, received_us: WallUs, storage_us: int) -> float:
    """By how much a wall clock is ahead of the storage's (negative: behind), at least. The storage read its
    own between the sending of a request and the receipt of its answer; within that, nothing is known."""
    if storage_us < sent_us:
        return (sent_us - storage_us) / US
    return min(0.0, (received_us - storage_us) / US)


class SkewWatch:
    """Tells once that the clock is wrong, and once that it is right again."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._told = False

    def look(self, sent_us: WallUs, received_us: WallUs, storage_us: int) -> None:
        """`storage_us`: what an answer told of the storage's time."""
        by_s = skew_s(sent_us, received_us, storage_us)
        wrong = abs(by_s) > TOLERATED_S
        if wrong and not self._told:
            _log.warning(
                "clock differs from the storage's",
                worker=self._worker_id,
                ahead_s=round(by_s, 3),
                hint="jobs go by the storage's time; but set this machine's clock (NTP)",
            )
        elif self._told and not wrong:
            _log.info("clock agrees with the storage's again", worker=self._worker_id)
        self._told = wrong
