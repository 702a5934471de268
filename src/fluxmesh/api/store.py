"""The storage behind the API: opened once, and never waited for without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from msgspec import Raw
from starlette.requests import Request

from fluxmesh.api.problems import TooBusy
from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.documents import job_document
from fluxmesh.errors import JobGone, JobNotFound, OutcomeUnknown, StorageUnreachable
from fluxmesh.ids import is_job_id, job_id_time_ms
from fluxmesh.job import Job
from fluxmesh.query import Query
from fluxmesh.storage.base import Storage

CALL_MOST_S: Final = 9.5  # answered within 10 s, the server's own part included
READY_MOST_S: Final = 0.7  # likewise within 1 s
WAITS_MOST: Final = 500
FIRST_JOBS: Final = 25  # by whose size it is judged how many more a page may hold
PAGE_BYTES: Final = 16 << 20
_CLOSE_MOST_S: Final = 5.0
_NOBODY: Final = "00000000-0000-7000-8000-000000000000"
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class Store:
    """One storage for the requests of one event loop. `start` and `close` may be repeated."""

    def __init__(
        self, *, open_storage: Callable[[bool], Awaitable[Storage]], settings: Settings, clock: Clock
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.stopping = asyncio.Event()
        self.waits = 0  # requests that wait for the end of a job
        self._open_storage = open_storage
        self._storage: Storage | None = None
        self._look: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises a StorageError that says why it cannot be opened."""
        if self._storage is None:
            self._storage = await self._open_storage(False)

    async def close(self) -> None:
        storage, self._storage = self._storage, None
        self.stopping.set()
        if self._look is not None:
            self._look.cancel()
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

    async def wait_for(
        self, job_id: str, timeout_s: float, gone: Callable[[], Awaitable[None]]
    ) -> Job | None:
        """The job once it has ended, or as it is when the time is up, the server is told to stop or whoever
        asked has `gone`; None if there is none. Raises TooBusy rather than let waits take all places."""
        if self.waits >= WAITS_MOST:
            raise TooBusy(f"{WAITS_MOST:,} requests wait for jobs", hint="look at the job now and then")
        self.waits += 1
        waiting = asyncio.ensure_future(self.storage.wait_for(job_id, timeout_s))
        others = (asyncio.ensure_future(self.stopping.wait()), asyncio.ensure_future(gone()))
        try:
            await asyncio.wait((waiting, *others), timeout=timeout_s + 1, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            return await self.read(self.storage.get(job_id))
        finally:
            self.waits -= 1
            for future in (waiting, *others):
                future.cancel()

    async def find(self, query: Query, cursor: str | None, limit: int) -> tuple[list[Raw], str | None, bool]:
        """Jobs of a list as JSON, where the next page begins, and whether the search stopped at its bound.
        A page ends early at PAGE_BYTES: a thousand jobs may hold a thousand times the largest payload."""
        items: list[Raw] = []
        size = 0
        while True:
            room = FIRST_JOBS if not items else (PAGE_BYTES - size) * len(items) // size + 1
            want = min(limit - len(items), room)
            found = await self.read(self.storage.find(query, cursor=cursor, limit=want))
            for job in found.items:
                items.append(Raw(_encode(job_document(job))))
                size += len(items[-1])
            cursor = found.next_cursor
            if cursor is None or found.partial or len(items) >= limit or size > PAGE_BYTES:
                return items, cursor, found.partial

    async def check_ready(self) -> None:
        """Raises StorageUnreachable if the storage does not read and write within READY_MOST_S, and
        StorageRefused if it cannot be relied on. A look that is still under way is waited for, so that those
        of a frozen storage do not pile up in it."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._read_and_write())
            # Where nobody waited for its end, nobody asks how it ended either.
            self._look.add_done_callback(lambda look: look.cancelled() or look.exception())
        done, _ = await asyncio.wait((self._look,), timeout=READY_MOST_S)
        if not done:
            raise StorageUnreachable(f"the storage did not answer in {READY_MOST_S:g} s")
        await self._look

    async def _read_and_write(self) -> None:
        """Where reads go on while another process keeps the storage locked, only a write tells."""
        await self.storage.get(_NOBODY)
        await self.storage.cancel((_NOBODY,))
        await self.storage.info()

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
