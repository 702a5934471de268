"""The two faces of the client: the same verbs, one blocking and one to be awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, Unpack
from urllib.parse import urlsplit

from fluxmesh.calls import SubmitOptions
from fluxmesh.client.answers import Metrics, Replayed, Submitted
from fluxmesh.client.plans import Ask, Heard, Lost, Pause, Plan, Reply
from fluxmesh.client.verbs import DEFAULT_LIMIT, Verbs, checked_limit, page_size
from fluxmesh.clock import Clock, system_clock
from fluxmesh.errors import FluxMeshError, InvalidOption
from fluxmesh.job import Attempt, Job
from fluxmesh.peers import Observation, OwnerView, RingView, Totals
from fluxmesh.query import PAGE_MAX, Page
from fluxmesh.storage.values import Cancelled, DeadGroup, QueueStats, WorkerInfo
from fluxmesh.submission import checked_int, checked_seconds

try:
    import httpx
except ImportError as error:
    raise ImportError("fluxmesh.client needs httpx: pip install 'fluxmesh[client]'") from error

T = TypeVar("T")
TIMEOUT_S: Final = 30.0
RETRIES: Final = 2
RETRIES_MOST: Final = 10
CONNECT_MOST_S: Final = 5.0
ANSWER_MOST_BYTES: Final = 1 << 30
TOKEN_MOST: Final = 1_000
_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)


def checked_url(url: object) -> str:
    """An http or https address without a trailing slash. Raises InvalidOption."""
    hint = "write it like http://127.0.0.1:8000"
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        raise InvalidOption("url", "is not the address of a server", hint=hint)
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise InvalidOption("url", "is not the address of a server", hint=hint) from None
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidOption("url", f"{parts.scheme or 'no scheme'!r}: not http or https to a host", hint=hint)
    if "@" in parts.netloc:
        raise InvalidOption("url", "has a user or a password in it", hint="give the token as token=…")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise InvalidOption("url", "has a query or a fragment", hint=hint)
    path = parts.path.rstrip("/")
    if path.endswith("/api/v1"):
        raise InvalidOption("url", "names the API below the server", hint="leave /api/v1 out")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _headers(token: object) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token is None:
        return headers
    if not isinstance(token, str) or not 0 < len(token) <= TOKEN_MOST:
        raise InvalidOption("token", "is not 1 to 1,000 characters of text")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidOption("token", "has characters other than printable ASCII, or spaces")
    return headers | {"Authorization": f"Bearer {token}"}


class _Face:
    """What both faces are made with: `timeout_s` bounds one request, `retries` how often it is repeated."""

    def __init__(self, url: str, *, token: str | None, timeout_s: float, retries: int, clock: Clock) -> None:
        self.url: Final = checked_url(url)
        self._timeout_s = checked_seconds("timeout_s", timeout_s)
        self._verbs = Verbs(self.url, retries=checked_int("retries", retries, 0, RETRIES_MOST), clock=clock)
        self._clock = clock
        # httpx.Headers show no Authorization in their repr.
        self._headers = httpx.Headers(_headers(token))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def _request(self, ask: Ask) -> dict[str, Any]:
        """The arguments of httpx's `stream`."""
        total_s = self._timeout_s + ask.extra_s
        wanted: dict[str, Any] = {
            "method": ask.method,
            "url": f"{self.url}{ask.path}",
            "timeout": httpx.Timeout(total_s, connect=min(CONNECT_MOST_S, total_s)),
        }
        if ask.query:
            wanted["params"] = ask.query
        if ask.body is not None:
            wanted["content"] = ask.body
        return wanted


class _Body:
    """The bytes of an answer as they come in, within bounds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._deadline = clock.mono_s() + seconds
        self._chunks: list[bytes] = []
        self._room = ANSWER_MOST_BYTES

    def add(self, chunk: bytes) -> None:
        """Raises httpx.ReadTimeout or httpx.ReadError past a bound."""
        self._room -= len(chunk)
        if self._room < 0:
            raise httpx.ReadError(f"the answer has more than {ANSWER_MOST_BYTES:,} bytes")
        if self._clock.mono_s() > self._deadline:
            raise httpx.ReadTimeout("the answer did not come to an end in time")
        self._chunks.append(chunk)

    def reply(self, response: httpx.Response) -> Reply:
        return Reply(response.status_code, dict(response.headers), b"".join(self._chunks))


def _lost(error: httpx.RequestError) -> Lost:
    return Lost(not isinstance(error, _UNSENT), str(error) or type(error).__name__)


class AsyncClient(_Face):
    """A server's jobs, to be awaited on one event loop: `async with AsyncClient(url, token=…) as client`."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            url, token=token, timeout_s=timeout_s, retries=retries, clock=clock or system_clock()
        )
        self._http = httpx.AsyncClient(headers=self._headers)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The client cannot be used after it."""
        await self._http.aclose()

    async def _do(self, plan: Plan[T]) -> T:
        heard: Heard = None
        try:
            while True:
                step = plan.send(heard)
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    heard = None
                else:
                    heard = await self._send(step)
        except StopIteration as end:
            answer: T = end.value
            return answer

    async def _send(self, ask: Ask) -> Reply | Lost:
        seconds = self._timeout_s + ask.extra_s
        body = _Body(self._clock, seconds)
        try:
            async with asyncio.timeout(seconds), self._http.stream(**self._request(ask)) as response:
                async for chunk in response.aiter_bytes():
                    body.add(chunk)
                return body.reply(response)
        except httpx.RequestError as error:
            return _lost(error)
        except TimeoutError:
            return Lost(sent=True, why=f"nothing within {seconds:g} s")

    async def submit(
        self,
        task: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Submitted:
        return await self._do(self._verbs.submit({**options, "task": task, "args": args, "kwargs": kwargs}))

    async def submit_many(self, jobs: Sequence[Mapping[str, Any]]) -> list[Submitted | FluxMeshError]:
        return await self._do(self._verbs.submit_many(jobs))

    async def get(self, job_id: str) -> Job:
        return await self._do(self._verbs.get(job_id))

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        return await self._do(self._verbs.wait(job_id, timeout))

    async def cancel(self, job_id: str) -> Cancelled:
        return await self._do(self._verbs.cancel(job_id))

    async def retry(self, job_id: str) -> None:
        await self._do(self._verbs.retry(job_id))

    async def reprioritise(self, job_id: str, priority: int | str) -> None:
        await self._do(self._verbs.reprioritise(job_id, priority))

    async def history(self, job_id: str) -> list[Attempt]:
        return await self._do(self._verbs.history(job_id))

    async def jobs(self, q: str = "", *, cursor: str | None = None, limit: int = DEFAULT_LIMIT) -> Page[Job]:
        return await self._do(self._verbs.jobs(q, cursor, limit))

    async def iterate(
        self, q: str = "", *, limit: int | None = None, page: int = DEFAULT_LIMIT
    ) -> AsyncIterator[Job]:
        left, size = checked_limit(limit), checked_int("page", page, 1, PAGE_MAX)
        cursor: str | None = None
        while left is None or left > 0:
            found = await self.jobs(q, cursor=cursor, limit=page_size(left, size))
            for job in found.items:
                yield job
            left = None if left is None else left - len(found.items)
            if found.next_cursor is None:
                return
            cursor = found.next_cursor

    async def dlq(self, q: str = "", *, cursor: str | None = None, limit: int = DEFAULT_LIMIT) -> Page[Job]:
        return await self._do(self._verbs.dlq(q, cursor, limit))

    async def dlq_groups(self, *, limit: int = DEFAULT_LIMIT) -> list[DeadGroup]:
        return await self._do(self._verbs.dlq_groups(limit))

    async def dlq_replay(self, job_id: str) -> None:
        await self._do(self._verbs.dlq_replay(job_id))

    async def dlq_replay_many(self, q: str = "", *, dry_run: bool = False) -> Replayed:
        return await self._do(self._verbs.dlq_replay_many(q, dry_run=dry_run))

    async def dlq_discard(self, job_id: str) -> None:
        await self._do(self._verbs.dlq_discard(job_id))

    async def queues(self) -> list[QueueStats]:
        return await self._do(self._verbs.queues())

    async def pause(self, queue: str) -> bool:
        return await self._do(self._verbs.pause(queue))

    async def resume(self, queue: str) -> bool:
        return await self._do(self._verbs.resume(queue))

    async def workers(self) -> list[WorkerInfo]:
        return await self._do(self._verbs.workers())

    async def mesh(self) -> list[Observation]:
        return await self._do(self._verbs.mesh())

    async def mesh_totals(self) -> Totals:
        return await self._do(self._verbs.mesh_totals())

    async def mesh_rings(self, queue: str | None = None) -> list[RingView]:
        return await self._do(self._verbs.mesh_rings(queue))

    async def mesh_owner(self, key: str, *, queue: str = "default") -> OwnerView:
        return await self._do(self._verbs.mesh_owner(key, queue))

    async def metrics(self) -> Metrics:
        return await self._do(self._verbs.metrics())

    async def health(self) -> None:
        await self._do(self._verbs.health())


class Client(_Face):
    """A server's jobs, for programs without an event loop: `with Client(url, token=…) as client`.

    May be used by several threads. `timeout_s` bounds one request, `retries` is how often one is repeated
    that the server cannot have done, or that does no harm when it is done twice. Errors are those of
    `fluxmesh.errors` by the problem's code, or ServerRefused."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            url, token=token, timeout_s=timeout_s, retries=retries, clock=clock or system_clock()
        )
        self._http = httpx.Client(headers=self._headers)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The client cannot be used after it."""
        self._http.close()

    def _do(self, plan: Plan[T]) -> T:
        heard: Heard = None
        try:
            while True:
                step = plan.send(heard)
                if isinstance(step, Pause):
                    threading.Event().wait(step.seconds)
                    heard = None
                else:
                    heard = self._send(step)
        except StopIteration as end:
            answer: T = end.value
            return answer

    def _send(self, ask: Ask) -> Reply | Lost:
        body = _Body(self._clock, self._timeout_s + ask.extra_s)
        try:
            with self._http.stream(**self._request(ask)) as response:
                for chunk in response.iter_bytes():
                    body.add(chunk)
                return body.reply(response)
        except httpx.RequestError as error:
            return _lost(error)

    def submit(
        self,
        task: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> Submitted:
        """Store a job. Its id is made here, so a repetition after a lost answer stores it once.

        Raises UsageError, IdempotencyConflict, QueueFull; OutcomeUnknown tells the id to repeat it with."""
        return self._do(self._verbs.submit({**options, "task": task, "args": args, "kwargs": kwargs}))

    def submit_many(self, jobs: Sequence[Mapping[str, Any]]) -> list[Submitted | FluxMeshError]:
        """Store jobs, each an object of submission fields, in requests of up to 1,000. What became of each,
        in order: stored, or the error that it has. Raises only if the first request failed."""
        return self._do(self._verbs.submit_many(jobs))

    def get(self, job_id: str) -> Job:
        """The record now. Raises JobNotFound, JobGone."""
        return self._do(self._verbs.get(job_id))

    def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """The record once the job has ended, however it did. Raises WaitTimeout, JobNotFound."""
        return self._do(self._verbs.wait(job_id, timeout))

    def cancel(self, job_id: str) -> Cancelled:
        """CANCELLED, or REQUESTED from the worker that runs it. Raises JobConflict if it has ended."""
        return self._do(self._verbs.cancel(job_id))

    def retry(self, job_id: str) -> None:
        """A new life for a job that ended without completing. Raises JobConflict, JobNotFound."""
        self._do(self._verbs.retry(job_id))

    def reprioritise(self, job_id: str, priority: int | str) -> None:
        """Move a job that has not ended to another tier. Raises JobConflict, JobNotFound."""
        self._do(self._verbs.reprioritise(job_id, priority))

    def history(self, job_id: str) -> list[Attempt]:
        """Ended starts of all lives, oldest first, the last 50."""
        return self._do(self._verbs.history(job_id))

    def jobs(self, q: str = "", *, cursor: str | None = None, limit: int = DEFAULT_LIMIT) -> Page[Job]:
        """A page of jobs, newest first; `cursor` is the `next_cursor` of the page before, of the same q."""
        return self._do(self._verbs.jobs(q, cursor, limit))

    def iterate(self, q: str = "", *, limit: int | None = None, page: int = DEFAULT_LIMIT) -> Iterator[Job]:
        """All jobs of a query, newest first, at most `limit`; `page` are asked for at a time."""
        left, size = checked_limit(limit), checked_int("page", page, 1, PAGE_MAX)
        cursor: str | None = None
        while left is None or left > 0:
            found = self.jobs(q, cursor=cursor, limit=page_size(left, size))
            yield from found.items
            left = None if left is None else left - len(found.items)
            if found.next_cursor is None:
                return
            cursor = found.next_cursor

    def dlq(self, q: str = "", *, cursor: str | None = None, limit: int = DEFAULT_LIMIT) -> Page[Job]:
        """A page of dead letters, newest first."""
        return self._do(self._verbs.dlq(q, cursor, limit))

    def dlq_groups(self, *, limit: int = DEFAULT_LIMIT) -> list[DeadGroup]:
        """Dead letters counted by what went wrong, largest group first."""
        return self._do(self._verbs.dlq_groups(limit))

    def dlq_replay(self, job_id: str) -> None:
        """A new life for a dead letter. Raises JobConflict, JobNotFound."""
        self._do(self._verbs.dlq_replay(job_id))

    def dlq_replay_many(self, q: str = "", *, dry_run: bool = False) -> Replayed:
        """A new life for the dead letters of a query, at most 10,000 at a time; `dry_run` only looks."""
        return self._do(self._verbs.dlq_replay_many(q, dry_run=dry_run))

    def dlq_discard(self, job_id: str) -> None:
        """Delete a dead letter with its history. Raises JobConflict, JobNotFound."""
        self._do(self._verbs.dlq_discard(job_id))

    def queues(self) -> list[QueueStats]:
        """Queues that hold jobs or are paused, by name."""
        return self._do(self._verbs.queues())

    def pause(self, queue: str) -> bool:
        """Start no more jobs of a queue. False if it was paused before (perhaps by a try of this call)."""
        return self._do(self._verbs.pause(queue))

    def resume(self, queue: str) -> bool:
        """Start jobs of a queue again. False if it was open before (perhaps by a try of this call)."""
        return self._do(self._verbs.resume(queue))

    def workers(self) -> list[WorkerInfo]:
        """Every run of a worker that the storage knows."""
        return self._do(self._verbs.workers())

    def mesh(self) -> list[Observation]:
        """The members of the mesh, as each worker sees them."""
        return self._do(self._verbs.mesh())

    def mesh_totals(self) -> Totals:
        """What all workers of the mesh hold, stole and kept in place together."""
        return self._do(self._verbs.mesh_totals())

    def mesh_rings(self, queue: str | None = None) -> list[RingView]:
        """Who owns which share of the keys, by queue."""
        return self._do(self._verbs.mesh_rings(queue))

    def mesh_owner(self, key: str, *, queue: str = "default") -> OwnerView:
        """To whom a key belongs, as most workers see it. Raises NotInMesh."""
        return self._do(self._verbs.mesh_owner(key, queue))

    def metrics(self) -> Metrics:
        """True numbers of stored jobs."""
        return self._do(self._verbs.metrics())

    def health(self) -> None:
        """Returns if the server answers and its storage does. Raises StorageUnreachable."""
        self._do(self._verbs.health())
