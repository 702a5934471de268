"""The hot path: exchanges, each of which settles what has ended and claims for the slots that are free.

While an exchange is under way, ends gather in the outbox; as soon as it is back the next one takes them
all. So under load the size of a batch finds itself, and a lone job is settled at once.

Storage and this loop shall not wait for each other. Jobs that fill more than half of the slots at once are
begun in two halves, so that from then on one half runs while the other is settled and claimed for. As soon
as half of the slots have ended while an exchange is under way, a second one follows it: storage has it at
hand when it is done with the first, whose jobs are begun meanwhile. Slots that the first has asked for are
not free for the second, so each claims only for room that there is. Both may be done, and repeated, in any
order: storage knows an exchange by its request id and not by its being the last one.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from fluxmesh.clock import Clock, MonoS
from fluxmesh.config import BATCH_MAX
from fluxmesh.errors import FluxMeshError
from fluxmesh.service import Service
from fluxmesh.storage.base import BATCH_BYTES, WORK_POLL_S, Storage
from fluxmesh.storage.values import (
    ClaimedJob,
    ExchangeAnswer,
    ExchangeRequest,
    Owned,
    Settle,
    Settled,
    Standing,
    WorkerRef,
)
from fluxmesh.worker.lease import Lease
from fluxmesh.worker.observe import Claimed, JobSettled, JobsReleased, Observer
from fluxmesh.worker.runs import NEVER, Run, RunTable

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
RELEASE_TRIES: Final = 4
HALVED_FROM: Final = 32  # of fewer slots the exchanges cost more than the halves save
UNDER_WAY_MOST: Final = 2
_DECLINED_PAUSE_S: Final = 0.5
_UNKNOWN_PAUSE_S: Final = 0.25  # until a beat has put the worker's row back
_SHORTEST_REST_S: Final = 0.002  # between two looks at what is due about now
_SHORTEST_TAKE_REST_S: Final = 0.05
_ABANDON_S: Final = 0.5


class _Flight(Struct):
    """An exchange under way. Its answer is None if the service was stopped, or gave up, before it came."""

    ends: list[tuple[Run, Settle]]
    asked: int
    sent_s: MonoS
    answer: asyncio.Task[ExchangeAnswer | None]


class Fetcher(Service):
    """`admit_job` takes a claimed job in and returns what begins it; `nudge_beat` asks for a beat at once;
    `on_fenced` hears that this epoch may never claim again; `on_failure` gets an error that repeating cannot
    mend."""

    def __init__(
        self,
        storage: Storage,
        worker: WorkerRef,
        *,
        table: RunTable,
        lease: Lease,
        clock: Clock,
        beat_s: float,
        batch: int,
        admit_job: Callable[[ClaimedJob, float], Callable[[], None] | None],
        nudge_beat: Callable[[], None],
        on_fenced: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        rng: random.Random,
        observer: Observer | None,
    ) -> None:
        super().__init__("fetcher", interval_s=WORK_POLL_S, round_limit_s=None, rng=rng)
        self._storage = storage
        self._worker = worker
        self._table = table
        self._slots = table.slots
        self._lease = lease
        self._clock = clock
        self._late_after_s = beat_s
        self._batch = batch
        self._admit_job = admit_job
        self._admitted: list[Callable[[], None]] = []  # what begins the bodies of the jobs at hand
        self._nudge_beat = nudge_beat
        self._on_fenced = on_fenced
        self._on_failure = on_failure
        self._observer = observer
        self._outbox: deque[tuple[Run, Settle]] = deque()
        self._flights: list[_Flight] = []
        self._half = self._half_of_slots()
        self._news: asyncio.Future[None] | None = None  # the round waits for it
        self._gave_up = False  # ends were sent whose answer nobody will hear
        self._request_id = 0
        self._hungry = True  # a claim may find something
        self._quiet = False
        self._draining = False
        self._pause_until = 0.0
        self._wake_at = NEVER
        self._timer: asyncio.TimerHandle | None = None
        self._held_at = NEVER
        self._waiting: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()
        self._flushed: asyncio.Future[None] | None = None

    # -- told by others, on the loop -----------------------------------------------------------------
    def deliver(self, run: Run, settle: Settle) -> None:
        """Take the end of a run; it is kept until storage has confirmed it."""
        self._outbox.append((run, settle))
        if not self._woken:
            self.wake()
        if len(self._outbox) == self._half:
            self._tell_round()

    def give_back(self, run: Run, why: str) -> None:
        """Release a run that was never entered."""
        run.withdrawn = True
        self.drop(run)
        self._release([run.job], why)

    def drop(self, run: Run) -> None:
        """Forget a run that was given back already; its slot is free."""
        self._table.forget(run)
        self.look()

    def look(self) -> None:
        """There may be work now."""
        self._hungry = True
        self.wake()

    def set_quiet(self, quiet: bool) -> None:  # noqa: FBT001 - a state, not a mode of the call
        """Claim no more until told otherwise."""
        self._quiet = quiet
        self.look()

    def stop_claiming(self) -> None:
        """Claim no more for good; what an exchange under way still brings is released."""
        self._draining = True
        self._stop_waiting()
        self.wake()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until storage has confirmed every end and release; False: not in time."""
        if self._idle():
            return True
        self._flushed = asyncio.get_running_loop().create_future()
        self.wake()
        await asyncio.wait((self._flushed,), timeout=max(0.0, timeout_s))
        return self._idle()

    async def stop(self, timeout_s: float = 5.0) -> None:
        self._stop_waiting()
        await super().stop(timeout_s)
        self._stop_waiting()  # the last round may have begun another wait
        for task in list(self._releases):
            task.cancel()

    # -- a round ---------------------------------------------------------------------------------------
    async def run_once(self) -> float | None:
        """Exchanges, as long as there is something to settle or a claim may find something."""
        try:
            self._send()
            while self._flights:
                await self._hear_news()
                for flight in [flight for flight in self._flights if flight.answer.done()]:
                    await self._land(flight)
                    self._send()
            self._announce_idle()
        except Exception as error:
            self._fail(error)  # a defect: ends at hand may be lost, so nothing must go on as if all were well
        finally:
            await self._abandon()
        return None

    async def _abandon(self) -> None:
        """Nothing is left under way by a round that is cancelled, or has met a defect."""
        left = [flight.answer for flight in self._flights]
        for answer in left:
            answer.cancel()
        if left:
            await asyncio.wait(left, timeout=_ABANDON_S)

    def _half_of_slots(self) -> int:
        """How many ends are worth an exchange of their own while another is under way; 0: no number is.

        With a reserve there is no second one: how much of it the first leaves is known when it is back."""
        half = min((self._slots.concurrency + 1) // 2, BATCH_MAX)
        return 0 if self._slots.reserves or half * 2 < HALVED_FROM else half

    def _send(self) -> None:
        """Begin the exchanges that may be begun now."""
        while not self.stopping and len(self._flights) < UNDER_WAY_MOST:
            asked = self._to_claim()
            waiting, half = len(self._outbox), self._half
            if self._flights:
                if not asked or not half or waiting < half:
                    return
            elif not waiting and not (asked and self._hungry):
                return
            # So much that it is two halves: the second follows at once.
            most = half if half and waiting >= 2 * half else BATCH_MAX
            self._begin_exchange(self._next_ends(most), min(asked, most))

    def _begin_exchange(self, ends: list[tuple[Run, Settle]], asked: int) -> None:
        self._request_id += 1
        request = ExchangeRequest(
            self._worker,
            self._request_id,
            settle=tuple([settle for _, settle in ends]),
            slots=asked,
            reserve=self._slots.lacking() if asked else (),
        )
        self._hungry = False
        sent_s = self._clock.mono_s()
        answer = asyncio.get_running_loop().create_task(self._exchange(request), name="fluxmesh-exchange")
        answer.add_done_callback(self._tell_round)
        self._flights.append(_Flight(ends, asked, sent_s, answer))

    async def _hear_news(self) -> None:
        """Return when an exchange was answered, or so much has ended that a second one may be sent."""
        if any(flight.answer.done() for flight in self._flights):
            return
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._news = None
        self._send()

    def _tell_round(self, _: object = None) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _land(self, flight: _Flight) -> None:
        """Draw the conclusions from an answer."""
        self._flights.remove(flight)
        if flight.answer.cancelled():
            raise RuntimeError("an exchange was cancelled by somebody else")
        answer = flight.answer.result()
        if answer is None:
            self._gave_up = self._gave_up or bool(flight.ends)
            return
        self._confirm(flight.ends, answer)
        self._take(answer, flight.asked, flight.sent_s)
        await self._begin_bodies()
        if flight.asked and not answer.running:
            await self._take_held_if_due()
        self._announce_idle()

    def _next_ends(self, most: int) -> list[tuple[Run, Settle]]:
        """What one exchange can carry of the outbox: bounded in number and, but for the first, in bytes."""
        outbox, size = self._outbox, 0
        ends: list[tuple[Run, Settle]] = []
        while outbox and len(ends) < most:
            result = outbox[0][1].transition.result
            size += 0 if result is None else len(result)
            if ends and size > BATCH_BYTES:
                break
            ends.append(outbox.popleft())
        return ends

    def _to_claim(self) -> int:
        if self._draining or self._quiet or not self._lease.holds():
            return 0
        if self._pause_until and asyncio.get_running_loop().time() < self._pause_until:
            return 0
        self._pause_until = 0.0
        asked_for = sum([flight.asked for flight in self._flights])
        return max(0, min(self._slots.free - asked_for, self._batch))

    async def _exchange(self, request: ExchangeRequest) -> ExchangeAnswer | None:
        """The same request until its answer is known. None: this service was stopped, or gives up."""
        pause_s = FIRST_PAUSE_S
        tries = 0
        while True:
            tries += 1
            try:
                answer = await self._storage.exchange(request)
            except FluxMeshError as error:
                if not error.retryable:
                    self._fail(error)
                    return None
                if tries == 1:
                    self._log.warning("storage does not answer", verb="exchange", error=str(error))
            except Exception as error:
                self._fail(error)
                return None
            else:
                if tries > 1:
                    self._log.warning("storage answers again", verb="exchange", tries=tries)
                return answer
            if self.stopping:
                return None
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    def _fail(self, error: BaseException) -> None:
        self.request_stop()
        self._on_failure(error)

    def _confirm(self, ends: Sequence[tuple[Run, Settle]], answer: ExchangeAnswer) -> None:
        """Let go of the runs whose ends storage has judged."""
        forget = self._table.forget
        for (run, _), verdict in zip(ends, answer.settled, strict=True):
            forget(run)
            if verdict is Settled.STALE:
                self._log.warning(
                    "end refused, the job has another owner", job_id=run.job.id, task=run.job.task
                )
            if self._observer is not None:
                self._observer(JobSettled(run.job.id, verdict))

    def _take(self, answer: ExchangeAnswer, asked: int, sent_s: MonoS) -> None:
        """Admit what was claimed, and note when the next claim may find something."""
        if answer.standing is not Standing.GOOD:
            self._out_of_standing(answer.standing)
        got = len(answer.running)
        if got or answer.held:
            self._admit(answer.running, answer.held, sent_s)
        if not asked:
            return
        if self._observer is not None:
            self._observer(Claimed(asked, got))
        if got >= asked or answer.more:
            self._hungry = True
            return
        now = asyncio.get_running_loop().time()
        if answer.next_due_s is not None:
            self._look_at(now + max(answer.next_due_s, _SHORTEST_REST_S))
        self._note_held(answer.next_held_s, now)
        if not self._draining and self._waiting is None and not self.stopping:
            name = "fluxmesh-wait-for-work"
            self._waiting = asyncio.get_running_loop().create_task(self._wait_for_work(), name=name)

    def _admit(self, running: Sequence[ClaimedJob], held: Sequence[ClaimedJob], sent_s: MonoS) -> None:
        late = self._clock.mono_s() - sent_s > self._late_after_s
        why = "late answer" if late else "lease lapsed"
        if self._draining:
            why = "draining"
        if late or self._draining or not self._lease.holds():
            self._release([*running, *held], why)
            return
        now = asyncio.get_running_loop().time()
        for job in running:
            if job.id in self._table:
                self._decline(job, "running already", now)  # never two at once
                continue
            try:
                begun = self._admit_job(job, now)
                if begun is not None:
                    self._admitted.append(begun)
            except Exception:
                self._log.exception("job could not be started", job_id=job.id, task=job.task)
                run = self._table.find(job.id, job.token)
                if run is not None:
                    self._table.forget(run)
                self._decline(job, "could not be started", now)
        self._release(held, "not asked for")

    async def _begin_bodies(self) -> None:
        """Those at hand come to their first await, or to their end; if they fill more than half of the slots,
        that half first."""
        begin, self._admitted = self._admitted, []
        if not begin:
            return
        half = len(begin)
        if half * 2 > self._slots.concurrency >= HALVED_FROM:
            half = (half + 1) // 2
        try:
            self._send()  # storage shall be busy while these run
            for begun in begin[:half]:
                begun()
            await asyncio.sleep(0)
            self._send()  # and while the rest runs
        finally:
            for begun in begin[half:]:
                begun()

    def _decline(self, job: ClaimedJob, why: str, now: float) -> None:
        """Give a job back and claim nothing for a while: another worker shall have it, not this one again."""
        self._pause_until = now + _DECLINED_PAUSE_S
        self._look_at(self._pause_until)
        self._release([job], why)

    def _out_of_standing(self, standing: Standing) -> None:
        if standing is Standing.FENCED:
            self._on_fenced()
        else:
            self._nudge_beat()
            self._look_at(asyncio.get_running_loop().time() + _UNKNOWN_PAUSE_S)

    # -- jobs that others hold -------------------------------------------------------------------------
    def _note_held(self, next_held_s: float | None, now: float) -> None:
        if next_held_s is None:
            self._held_at = NEVER
        else:
            self._held_at = now + max(next_held_s, 0.0)
            self._look_at(now + max(next_held_s, _SHORTEST_TAKE_REST_S))

    async def _take_held_if_due(self) -> None:
        slots = min(self._slots.open_to_all(), self._to_claim())
        if slots <= 0 or asyncio.get_running_loop().time() < self._held_at:
            return
        self._held_at = NEVER
        sent_s = self._clock.mono_s()
        try:
            answer = await self._storage.take_held(self._worker, slots)
        except FluxMeshError as error:
            # Jobs given in a lost answer are on no beat's list and are released by storage.
            self._log.warning("storage does not answer", verb="take_held", error=str(error))
            return
        self._admit(answer.running, (), sent_s)
        await self._begin_bodies()
        self._note_held(answer.next_held_s, asyncio.get_running_loop().time())

    # -- waiting ---------------------------------------------------------------------------------------
    def _look_at(self, at: float) -> None:
        """Claim again at this time of the loop's clock, or earlier."""
        if at >= self._wake_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wake_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._look_now)

    def _look_now(self) -> None:
        self._timer = None
        self._wake_at = NEVER
        self.look()

    async def _wait_for_work(self) -> None:
        try:
            await self._storage.wait_for_work(self._worker, WORK_POLL_S)
        except FluxMeshError as error:
            self._log.warning("storage does not answer", verb="wait_for_work", error=str(error))
            await asyncio.sleep(LONGEST_PAUSE_S * self._rng.uniform(0.5, 1.0))
        finally:
            self._waiting = None
        self.look()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting is not None:
            self._waiting.cancel()

    # -- giving back -----------------------------------------------------------------------------------
    def _release(self, jobs: Sequence[ClaimedJob], why: str) -> None:
        if not jobs:
            return
        self._log.info("jobs released", count=len(jobs), why=why)
        owned = [Owned(job.id, job.token) for job in jobs]
        task = asyncio.get_running_loop().create_task(self._send_release(owned, why), name="fluxmesh-release")
        self._releases.add(task)
        task.add_done_callback(self._released)

    async def _send_release(self, owned: list[Owned], why: str) -> None:
        pause_s = FIRST_PAUSE_S
        for _ in range(RELEASE_TRIES):
            try:
                for start in range(0, len(owned), BATCH_MAX):
                    await self._storage.release(self._worker, owned[start : start + BATCH_MAX])
            except FluxMeshError as error:
                # In the end storage does it: they are on no list of a beat any more.
                self._log.warning("storage does not answer", verb="release", error=str(error))
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
            else:
                break
        if self._observer is not None:
            self._observer(JobsReleased(tuple(item.id for item in owned), why))

    def _released(self, task: asyncio.Task[None]) -> None:
        self._releases.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("jobs could not be released", error=str(task.exception()))
        self.look()  # storage does not wake a worker for what it gave back itself

    # -- the end -----------------------------------------------------------------------------------------
    def _idle(self) -> bool:
        sent = self._gave_up or any(flight.ends for flight in self._flights)
        return not (sent or self._outbox or self._releases)

    def _announce_idle(self) -> None:
        if self._flushed is not None and self._idle() and not self._flushed.done():
            self._flushed.set_result(None)
