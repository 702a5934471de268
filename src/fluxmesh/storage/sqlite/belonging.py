"""To whom a job belongs, where a worker keeps strictly to what is its own (affinity of full weight)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluxmesh.storage.affinities import STRICT_US, is_kept_apart

if TYPE_CHECKING:
    from fluxmesh.storage.sqlite.step import Me, Step


class Apart:
    """What one worker of full weight has to leave to others. Made for one step."""

    def __init__(self, step: Step, me: Me) -> None:
        self._step = step
        self._me = me
        self._known: dict[tuple[str, int, str, int | None], bool] = {}

    @staticmethod
    def of(step: Step, me: Me) -> Apart | None:
        """None for a worker that may run what others own."""
        return Apart(step, me) if me.own is not None and me.own.is_strict else None

    def until_us(self, queue: str, tier: int, task: str, slot: int | None, since_us: int) -> int | None:
        """Until when (wall) a job that became ready at `since_us` is left to the living worker to whom it
        belongs; None: this one may have it now."""
        if not is_kept_apart(since_us, self._step.now_us) or not self.is_anothers(queue, tier, task, slot):
            return None
        return since_us + STRICT_US

    def is_anothers(self, queue: str, tier: int, task: str, slot: int | None) -> bool:
        own = self._me.own
        if own is None or queue not in own.by_queue:
            return False
        asked = (queue, tier, task, slot)
        known = self._known.get(asked)
        if known is None:
            known = self._known[asked] = not own.has(queue, task, slot) and any(
                other.own is not None
                and other.own.has(queue, task, slot)
                and other.can_run(queue, tier, task)
                for other in self._step.owners()
                if other.epoch != self._me.epoch
            )
        return known
