"""The hot path: one exchange a round, which settles what has ended and claims for the slots that are free.

While an exchange is under way, ends gather in the outbox; as soon as it is back the next one takes them
all. So under load the size of a batch finds itself, and a lone job is settled at once.

Storage and bodies shall not wait for each other: jobs that fill more than half of the slots at once are
begun in two halves, so that from then on one half runs while the other is settled and claimed for.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

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
HALVED_FROM: Final = 32  # of fewer jobs the exchanges cost more than the halves save
_DECLINED_PAUSE_S: Final = 0.5
_UNKNOWN_PAUSE_S: Final = 0.25  # until a beat has put the worker's row back
_SHORTEST_REST_S: Final = 0.002  # between two looks at what is due about now
_SHORTEST_TAKE_REST_S: Final = 0.05


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
        self._unbegun: list[Callable[[], None]] = []  # the second half
        self._nudge_beat = nudge_beat
        self._on_fenced = on_fenced
        self._on_failure = on_failure
        self._observer = observer
        self._outbox: deque[tuple[Run, Settle]] = deque()
        self._sending: list[tuple[Run, Settle]] = []
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
        """Exchanges, as long as there is something to settle; one, if a claim may find something."""
        try:
            rest_s = await self._round_trip()
            while self._outbox and not self.stopping:
                # At once: what was just begun runs while storage is busy with this.
                rest_s = await self._round_trip()
            return rest_s
        except Exception as error:
            self._fail(error)  # a defect: ends at hand may be lost, so nothing must go on as if all were well
            return None

    async def _round_trip(self) -> float | None:
        asked = self._to_claim()
        outbox = self._outbox
        if not outbox and not (asked and self._hungry):
            self._announce_idle()
            return None
        self._sending = self._next_ends()
        self._request_id += 1
        request = ExchangeRequest(
            self._worker,
            self._request_id,
            settle=tuple([settle for _, settle in self._sending]),
            slots=asked,
            reserve=self._slots.lacking() if asked else (),
        )
        self._hungry = False
        sent_s = self._clock.mono_s()
        answer = await self._exchange(request)
        if answer is None:
            return None  # stopped, or failed for good
        self._confirm(answer)
        self._take(answer, asked, sent_s)
        await self._begin_second_half()
        if asked and not answer.running:
            await self._take_held_if_due()
        self._announce_idle()
        return 0.0 if self._hungry and self._to_claim() else None

    def _next_ends(self) -> list[tuple[Run, Settle]]:
        """What one exchange can carry of the outbox: bounded in number and, but for the first, in bytes."""
        outbox, size = self._outbox, 0
        ends: list[tuple[Run, Settle]] = []
        while outbox and len(ends) < BATCH_MAX:
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
        return max(0, min(self._slots.free, self._batch))

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

    def _confirm(self, answer: ExchangeAnswer) -> None:
        """Let go of the runs whose ends storage has judged."""
        forget = self._table.forget
        for (run, _), verdict in zip(self._sending, answer.settled, strict=True):
            forget(run)
            if verdict is Settled.STALE:
                self._log.warning(
                    "end refused, the job has another owner", job_id=run.job.id, task=run.job.task
                )
            if self._observer is not None:
                self._observer(JobSettled(run.job.id, verdict))
        self._sending = []

    def _take(self, answer: ExchangeAnswer, asked: int, sent_s: MonoS) -> None:
        """Begin what was claimed, and note when the next claim may find something."""
        if answer.standing is not Standing.GOOD:
            self._out_of_standing(answer.standing)
        got = len(answer.running)
        if got or answer.held:
            self._begin(answer.running, answer.held, sent_s)
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

    def _begin(self, running: Sequence[ClaimedJob], held: Sequence[ClaimedJob], sent_s: MonoS) -> None:
        late = self._clock.mono_s() - sent_s > self._late_after_s
        why = "late answer" if late else "lease lapsed"
        if self._draining:
            why = "draining"
        if late or self._draining or not self._lease.holds():
            self._release([*running, *held], why)
            return
        now = asyncio.get_running_loop().time()
        begin: list[Callable[[], None]] = []
        for job in running:
            if job.id in self._table:
                self._decline(job, "running already", now)  # never two at once
                continue
            try:
                begun = self._admit_job(job, now)
                if begun is not None:
                    begin.append(begun)
            except Exception:
                self._log.exception("job could not be started", job_id=job.id, task=job.task)
                run = self._table.find(job.id, job.token)
                if run is not None:
                    self._table.forget(run)
                self._decline(job, "could not be started", now)
        half = len(begin)
        if half * 2 > self._slots.concurrency and half >= HALVED_FROM:
            half = (half + 1) // 2
        for begun in begin[:half]:
            begun()
        self._unbegun = begin[half:]
        self._release(held, "not asked for")

    async def _begin_second_half(self) -> None:
        if not self._unbegun:
            return
        try:
            await asyncio.sleep(0)  # the first half comes to its first await, or to its end
        finally:
            for begun in self._unbegun:
                begun()
            self._unbegun = []

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
        self._begin(answer.running, (), sent_s)
        await self._begin_second_half()
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
        return not (self._outbox or self._sending or self._releases)

    def _announce_idle(self) -> None:
        if self._flushed is not None and self._idle() and not self._flushed.done():
            self._flushed.set_result(None)
