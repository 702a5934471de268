"""The one skeleton of every background loop: start, stop, run_once, wake.

A loop is a subclass with `run_once`, which does one bounded round and says how long to rest. Everything
else is here and nowhere else: jitter, waking, bounded rounds, failures that are logged and backed off,
a stop that ends. Tests call `run_once` and need no loop at all.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from fluxmesh.errors import FluxMeshError, StorageDamaged, StorageError
from fluxmesh.obs.log import Logger, get_logger

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
CANCEL_PATIENCE_S: Final = 1.0  # a round that swallows its cancellation is left behind after this
_MAX_DOUBLINGS: Final = 16


def pause_after_s(failures: int, rng: random.Random) -> float:
    """Rest after the n-th failure running: 0.1 s doubled each time up to 5 s, then x U(0.5, 1.0)."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))
    return longest * rng.uniform(0.5, 1.0)


class Service(ABC):
    """A loop of one asyncio event loop.

    `interval_s` is the rest between rounds, times U(1 - jitter, 1 + jitter), unless a round answers
    otherwise. A round longer than `round_limit_s` is cancelled and counts as failed (None: the round
    bounds itself). A round that meets a damaged storage is the last one, if `on_damage` is there to hear of
    it. Not thread-safe: from another thread, `loop.call_soon_threadsafe(service.wake)`.
    """

    def __init__(
        self,
        name: str,
        *,
        interval_s: float,
        jitter: float = 0.1,
        round_limit_s: float | None = 30.0,
        rng: random.Random | None = None,
        on_damage: Callable[[StorageDamaged], object] | None = None,
    ) -> None:
        self.name = name
        self.interval_s = interval_s
        self.failures = 0  # failed rounds running
        self._jitter = jitter
        self._round_limit_s = round_limit_s
        self._rng = rng or random.Random()
        self._on_damage = on_damage
        self._log: Logger = get_logger(name)
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._woken = False
        self._sleeper: asyncio.Future[None] | None = None

    @abstractmethod
    async def run_once(self) -> float | None:
        """One round. Answers seconds to rest before the next (0: at once), None: the interval."""

    @property
    def stopping(self) -> bool:
        """True once a stop was asked for: a long round should come to its end."""
        return self._stopping

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Begin with a round at once. A service that runs already, or was stopped, stays as it is."""
        if self._task is None and not self._stopping:
            self._task = asyncio.get_running_loop().create_task(self._loop(), name=f"fluxmesh-{self.name}")

    def wake(self) -> None:
        """Cut the rest short; during a round: make the next one follow at once. A pause after a failure
        is kept to its end."""
        self._woken = True
        self._rouse()

    def request_stop(self) -> None:
        """Make this round the last one, without waiting for it; a round may ask this of itself."""
        self._stopping = True
        self._rouse()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End within about timeout_s + 1 s: let the round at hand finish, else cancel it. Idempotent."""
        self.request_stop()
        task = self._task
        if task is None or task is asyncio.current_task():
            return
        done, _ = await asyncio.wait((task,), timeout=timeout_s)
        if not done:
            self._log.warning(
                "service stopped in the middle of a round", service=self.name, after_s=timeout_s
            )
            task.cancel()
            done, _ = await asyncio.wait((task,), timeout=CANCEL_PATIENCE_S)
        if not done:
            self._log.error("service does not end", service=self.name)

    async def wait(self) -> None:
        """Return once the loop has ended (also when it was never started)."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _loop(self) -> None:
        while not self._stopping:
            self._woken = False
            rest_s = await self._round()
            if self._stopping:
                return
            await self._rest(rest_s)

    async def _round(self) -> float:
        try:
            async with asyncio.timeout(self._round_limit_s):
                rest_s = await self.run_once()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return self._failed(error)  # something awaited was cancelled, not this loop
        except Exception as error:
            return self._failed(error)
        if self.failures:
            self._log.info("service works again", service=self.name, failures=self.failures)
            self.failures = 0
        if rest_s is None:
            return self.interval_s * self._rng.uniform(1 - self._jitter, 1 + self._jitter)
        return rest_s

    def _failed(self, error: BaseException) -> float:
        self.failures += 1
        pause_s = pause_after_s(self.failures, self._rng)
        if self._on_damage is not None and isinstance(error, StorageDamaged):
            self.request_stop()
            self._on_damage(error)
            return pause_s
        expected = isinstance(error, StorageError) or (isinstance(error, FluxMeshError) and error.retryable)
        self._log.warning(
            "service round failed",
            service=self.name,
            failures=self.failures,
            error=f"{type(error).__name__}: {error}",
            pause_s=round(pause_s, 3),
            exc_info=None if expected else error,
        )
        return pause_s

    async def _rest(self, seconds: float) -> None:
        if seconds <= 0 or (self._woken and not self.failures):
            await asyncio.sleep(0)  # a round that never waits must not starve the others
            return
        loop = asyncio.get_running_loop()
        sleeper = self._sleeper = loop.create_future()
        timer = loop.call_later(seconds, _finish, sleeper)
        try:
            await sleeper
        finally:
            timer.cancel()
            self._sleeper = None

    def _rouse(self) -> None:
        if self._sleeper is not None and (self._stopping or not self.failures):
            _finish(self._sleeper)


def _finish(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
