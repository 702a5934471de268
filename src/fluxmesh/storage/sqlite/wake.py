"""Whom to wake for new work: min(n, waiting) workers that can run it, owners before others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from fluxmesh.storage.sqlite.bells import WORK
from fluxmesh.storage.sqlite.belonging import Apart

if TYPE_CHECKING:
    from fluxmesh.storage.sqlite.step import Me, Step

UNKNOWN_SLOT: Final = -1  # of a job, or of several, that nobody looked at
Wish = tuple[str, int, str, int | None]  # queue, tier, task ("" = any), slot


class Waiting:
    """The workers that wait for work, as far as they were not woken yet."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._left: list[tuple[str | None, Me]] = []
        for epoch, bell in step.all("step.waiting"):
            if epoch != step.asking:
                _, me = step.standing(epoch)
                if me is not None:
                    self._left.append((bell, me))
        self._apart = {me.epoch: Apart.of(step, me) for _, me in self._left}
        self.have_own = any(me.own is not None for _, me in self._left)

    def __bool__(self) -> bool:
        return bool(self._left)

    def wake_for(self, wish: Wish, count: int, *, owners: bool) -> int:
        """Wake at most `count` workers for jobs like this, of its owners alone or of all. How many were."""
        woken = 0
        for entry in list(self._left):
            if woken >= count:
                break
            bell, me = entry
            if _fits(me, wish) and (_owns(me, wish) if owners else not self._leaves(me, wish)):
                self._left.remove(entry)
                woken += 1
                self._step.run("step.woken", me.epoch)
                if bell is not None:
                    self._step.ring(bell, WORK)
        return woken

    def _leaves(self, me: Me, wish: Wish) -> bool:
        """Whether this worker would leave such a job to another one, to whom it belongs."""
        apart = self._apart[me.epoch]
        queue, tier, task, slot = wish
        return apart is not None and slot != UNKNOWN_SLOT and apart.is_anothers(queue, tier, task, slot)


def _fits(me: Me, wish: Wish) -> bool:
    queue, tier, task, _ = wish
    return tier in me.tiers and queue in me.queues and (not task or task in me.tasks)


def _owns(me: Me, wish: Wish) -> bool:
    queue, _, task, slot = wish
    return me.own is not None and slot != UNKNOWN_SLOT and me.own.has(queue, task, slot)


def wake(step: Step, wishes: Mapping[Wish, int]) -> None:
    """Ring min(n, waiting) workers for each wish with n new jobs, the highest tiers first."""
    waiting = Waiting(step)
    ordered = sorted(wishes.items(), key=lambda item: item[0][1])
    if waiting.have_own:
        ordered = [(wish, count - waiting.wake_for(wish, count, owners=True)) for wish, count in ordered]
    for wish, count in ordered:
        if not waiting:
            return
        waiting.wake_for(wish, count, owners=False)
