"""Jobs that others hold and have not started: what of it a worker may take, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from fluxmesh.storage.sqlite.belonging import Apart
from fluxmesh.storage.sqlite.claim import Found
from fluxmesh.storage.sqlite.step import Me, Step
from fluxmesh.storage.values import HELD_TAKEABLE_AFTER_S, MAX_HOPS

_LOOK: Final = 2_000
_FOUND: Final = len(Found.__struct_fields__)


class Held(Struct, frozen=True, gc=False):
    """A held job, and from when on it may be taken (time since boot, us)."""

    found: Found
    hops: int
    from_us: float


def takeable(step: Step, me: Me) -> Iterator[Held]:
    """What may go to this worker sooner or later, best tier and oldest first."""
    if not me.donates or step.one("exchange.any_held") is None:
        return
    apart = Apart.of(step, me)
    limits = step.limits()
    for row in step.all("exchange.held", str(me.epoch), _LOOK):
        taken_us, hops, registration, epoch = row[_FOUND:]
        found = Found(*row[:_FOUND])
        if (hops or 0) >= MAX_HOPS or not me.can_run(found.queue, found.tier, found.task):
            continue
        if found.task in limits or found.concurrency_key is not None:
            continue  # its limit was registered since it was held: it waits for its owner
        if step.shared.me(epoch, registration).donates:
            yield Held(
                found, hops or 0, max(taken_us + HELD_TAKEABLE_AFTER_S * 1e6, _left_to_us(step, apart, found))
            )


def _left_to_us(step: Step, apart: Apart | None, found: Found) -> int:
    """Until when (time since boot) it is left to another, to whom it belongs; 0: it is not."""
    if apart is None:
        return 0
    until_us = apart.until_us(found.queue, found.tier, found.task, found.slot, found.since_us)
    return 0 if until_us is None else step.boot_us + until_us - step.now_us


def next_s(step: Step, me: Me) -> float | None:
    """When take_held may find something for this worker: seconds; None: nothing is held that it could run."""
    first_us = min((held.from_us for held in takeable(step, me)), default=None)
    return None if first_us is None else max(0.0, (first_us - step.boot_us) / 1e6)
