"""Exchanges under way, and what they carry."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from fluxmesh.clock import MonoS
from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import Logger
from fluxmesh.storage.base import BATCH_BYTES, Storage
from fluxmesh.storage.values import Begun, ClaimedJob, ExchangeAnswer, ExchangeRequest, Settle
from fluxmesh.worker.runs import Run

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0


class Flight(Struct):
    """An exchange under way, for `asked` free slots: some for `begin`, jobs that are held, the rest for
    claimed ones, `kept` of these for jobs of the tiers that have a reserve; and `extra` more to be held. Its
    answer is None if the service was stopped, or gave up, before it came."""

    ends: list[tuple[Run, Settle]]
    begin: list[ClaimedJob]
    asked: int
    kept: int
    extra: int
    sent_s: MonoS
    answer: asyncio.Task[ExchangeAnswer | None]

    def slots_claimed(self, answer: ExchangeAnswer) -> int:
        """A job that was not begun left its slot to the claim."""
        if not self.begin:
            return self.asked
        return self.asked - sum([verdict is Begun.BEGUN for verdict in answer.begun])


class Outbox(deque[tuple[Run, Settle]]):
    """Ends that storage does not know yet, the oldest first."""

    def next(self, most: int) -> list[tuple[Run, Settle]]:
        """What one exchange can carry of them: bounded in number and, but for the first, in bytes."""
        size = 0
        ends: list[tuple[Run, Settle]] = []
        while self and len(ends) < most:
            result = self[0][1].transition.result
            size += 0 if result is None else len(result)
            if ends and size > BATCH_BYTES:
                break
            ends.append(self.popleft())
        return ends


async def exchanged(
    storage: Storage,
    request: ExchangeRequest,
    *,
    gives_up: Callable[[], bool],
    fail: Callable[[BaseException], None],
    rng: random.Random,
    log: Logger,
) -> ExchangeAnswer | None:
    """The same request until its answer is known. None: `gives_up`, or `fail` was told why."""
    pause_s = FIRST_PAUSE_S
    tries = 0
    while True:
        tries += 1
        try:
            answer = await storage.exchange(request)
        except FluxMeshError as error:
            if not error.retryable:
                fail(error)
                return None
            if tries == 1:
                log.warning("storage does not answer", verb="exchange", error=str(error))
        except Exception as error:
            fail(error)
            return None
        else:
            if tries > 1:
                log.warning("storage answers again", verb="exchange", tries=tries)
            return answer
        if gives_up():
            return None
        await asyncio.sleep(pause_s * rng.uniform(0.5, 1.0))
        pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
