"""The storage behind the API: opened once, and never waited for without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from starlette.requests import Request

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.errors import JobGone, JobNotFound, OutcomeUnknown, StorageUnreachable
from fluxmesh.ids import is_job_id, job_id_time_ms
from fluxmesh.storage.base import Storage

CALL_MOST_S: Final = 10.0
READY_MOST_S: Final = 0.8
_CLOSE_MOST_S: Final = 5.0
_NOBODY: Final = "00000000-0000-7000-8000-000000000000"
T = TypeVar("T")


class Store:
    """One storage for the requests of one event loop. `start` and `close` may be repeated."""

    def __init__(
        self, *, open_storage: Callable[[bool], Awaitable[Storage]], settings: Settings, clock: Clock
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.stopping = asyncio.Event()
        self._open_storage = open_storage
        self._storage: Storage | None = None

    async def start(self) -> None:
        """Raises a StorageError that says why it cannot be opened."""
        if self._storage is None:
            self._storage = await self._open_storage(False)

    async def close(self) -> None:
        storage, self._storage = self._storage, None
        self.stopping.set()
        if storage is not None:
            try:
                await asyncio.wait_for(storage.close(), _CLOSE_MOST_S)
            except TimeoutError:
                pass  # what was asked of it is done; the process ends

    @property
    def storage(self) -> Storage:
        if self._storage is None:
            raise StorageUnreachable("the storage is not open", hint="the server starts or ends just now")
        return self._storage

    async def read(self, verb: Awaitable[T]) -> T:
        """Its answer within CALL_MOST_S, or StorageUnreachable."""
        try:
            async with asyncio.timeout(CALL_MOST_S):
                return await verb
        except TimeoutError:
            raise StorageUnreachable(
                f"the storage did not answer in {CALL_MOST_S:g} s", hint="try again in a second"
            ) from None

    async def write(self, verb: Awaitable[T]) -> T:
        """Its answer within CALL_MOST_S, or OutcomeUnknown."""
        try:
            async with asyncio.timeout(CALL_MOST_S):
                return await verb
        except TimeoutError:
            raise OutcomeUnknown(
                f"the storage did not answer in {CALL_MOST_S:g} s, and may or may not have done it",
                hint="look before you repeat it",
            ) from None

    async def check_ready(self) -> None:
        """Raises StorageUnreachable if the storage does not answer a small question within READY_MOST_S."""
        try:
            async with asyncio.timeout(READY_MOST_S):
                await self.storage.get(_NOBODY)
        except TimeoutError:
            raise StorageUnreachable(f"the storage did not answer in {READY_MOST_S:g} s") from None

    def missing(self, job_id: str) -> JobNotFound:
        """What to say of a job that is not there: 410 where its retention may be over, else 404."""
        kept_s = min(self.settings.result_ttl, self.settings.dead_letter_ttl)
        if is_job_id(job_id) and job_id_time_ms(job_id) / 1e3 < self.clock.wall_us() / 1e6 - kept_s:
            return JobGone(
                f"there is no job {job_id}, and its id is older than jobs are kept ({kept_s:,.0f} s)",
                hint="result_ttl says how long a job is kept after its end",
            )
        return JobNotFound(
            f"there is no job {job_id[:80]!r}", hint="GET /api/v1/jobs lists them; is the namespace right?"
        )


def store_of(request: Request) -> Store:
    store: Store = request.app.state.store
    return store
