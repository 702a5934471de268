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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from fluxmesh.clock import Clock, MonoS
from fluxmesh.config import BATCH_MAX
from fluxmesh.service import Service
from fluxmesh.storage.base import WORK_POLL_S, Storage
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
from fluxmesh.worker.flights import Flight, Outbox, exchanged
from fluxmesh.worker.holding import Holding, Trade
from fluxmesh.worker.lease import Lease
from fluxmesh.worker.lookout import Lookout
from fluxmesh.worker.observe import Claimed, JobSettled, Observer
from fluxmesh.worker.releases import Releases
from fluxmesh.worker.runs import Run, RunTable
from fluxmesh.worker.taking import Taking

if TYPE_CHECKING:
    from fluxmesh.mesh.messages import NodeRef, Offered
    from fluxmesh.worker.stock import Stock

HALVED_FROM: Final = 32  # of fewer slots the exchanges cost more than the halves save
UNDER_WAY_MOST: Final = 2
_DECLINED_PAUSE_S: Final = 0.5
_UNKNOWN_PAUSE_S: Final = 0.25  # until a beat has put the worker's row back
_SHORTEST_REST_S: Final = 0.002  # between two looks at what is due about now
_ABANDON_S: Final = 0.5


class Fetcher(Service):
    """`admit_job` takes a claimed job in and returns what begins it; `nudge_beat` asks for a beat at once;
    `on_fenced` hears that this epoch may never claim again; `on_failure` gets an error that repeating cannot
    mend. `stock`: what is claimed beyond the free slots is held there, and begun from there; None: nothing
    is. `trade`: with whom it is shared."""

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
        stock: Stock | None = None,
        trade: Trade | None = None,
        poll_s: float = WORK_POLL_S,
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
        self._outbox = Outbox()
        self._flights: list[Flight] = []
        self._half = self._half_of_slots()
        self._news: asyncio.Future[None] | None = None  # the round waits for it
        self._gave_up = False  # ends were sent whose answer nobody will hear
        self._request_id = 0
        self._hungry = True  # a claim may find something
        self._quiet = False
        self._draining = False
        self._pause_until = 0.0
        self._flushed: asyncio.Future[None] | None = None
        self._releases = Releases(
            storage, worker, rng=rng, log=self._log, observer=observer, on_released=self.look
        )
        self._release = self._releases.release
        self._lookout = Lookout(storage, worker, look=self.look, rng=rng, log=self._log, poll_s=poll_s)
        self._look_at = self._lookout.look_at
        self._taking = Taking(storage, worker, look_at=self._look_at, log=self._log)
        self._stock = stock
        self._holding = self._make_holding(stock, trade) if stock is not None else None

    def _make_holding(self, stock: Stock, trade: Trade | None) -> Holding:
        return Holding(
            stock,
            self._storage,
            self._worker,
            slots=self._slots,
            clock=self._clock,
            late_after_s=self._late_after_s,
            releases=self._releases,
            lookout=self._lookout,
            log=self._log,
            may_hold=self._may_claim,
            wake=self.wake,
            trade=trade,
        )

    # -- told by others, on the loop -----------------------------------------------------------------
    def deliver(self, run: Run, settle: Settle) -> None:
        """Take the end of a run; it is kept until storage has confirmed it."""
        self._outbox.append((run, settle))
        if self._holding is not None:
            self._holding.ended(run)
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
        """Claim no more until told otherwise, and hold nothing."""
        self._quiet = quiet
        if quiet and self._holding is not None:
            self._holding.let_go("quiet")
        self.look()

    def stop_claiming(self) -> None:
        """Claim no more for good; what is held is released, and what an exchange under way still brings."""
        self._draining = True
        self._lookout.stop()
        if self._holding is not None:
            self._holding.let_go("draining")
        self.wake()

    def take(self, peer: NodeRef, jobs: tuple[Offered, ...]) -> None:
        """Take jobs that a peer has offered. Only of one that has a stock."""
        assert self._holding is not None
        self._holding.take(peer, jobs)

    def refuse(self, item: Owned, why: str) -> None:
        """A held job must not be started here. One whose begin is under way is released when that is over."""
        job = self._stock.lose(item) if self._stock is not None else None
        if job is not None:
            self._release([job], why)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until storage has confirmed every end and release; False: not in time."""
        if self._idle():
            return True
        self._flushed = asyncio.get_running_loop().create_future()
        self.wake()
        await asyncio.wait((self._flushed,), timeout=max(0.0, timeout_s))
        return self._idle()

    async def stop(self, timeout_s: float = 5.0) -> None:
        self._lookout.stop()
        await super().stop(timeout_s)
        self._lookout.stop()  # the last round may have begun another wait
        self._releases.cancel()
        if self._holding is not None:
            self._holding.cancel()

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
            if self._holding is not None:
                self._holding.tell()
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
        if self._holding is not None:
            self._holding.shed()
        while not self.stopping and len(self._flights) < UNDER_WAY_MOST:
            asked = self._to_claim()
            waiting, half = len(self._outbox), self._half
            if self._flights:
                if not asked or not half or waiting < half:
                    return
            elif not waiting and not (asked and self._hungry) and not self._has_to_hold(asked):
                return
            # So much that it is two halves: the second follows at once.
            most = half if half and waiting >= 2 * half else BATCH_MAX
            self._begin_exchange(self._outbox.next(most), min(asked, most))

    def _has_to_hold(self, asked: int) -> bool:
        """Jobs that are held can be begun, or others be held because there seems to be no end of them."""
        if self._stock is None or self._holding is None:
            return False
        if asked and self._stock.begins(asked, self._slots.lacking()):
            return True
        return self._holding.fills and self._to_hold(asked, asked) > 0 and self._holding.may_fill(asked)

    def _to_hold(self, asked: int, slots: int) -> int:
        """How many jobs to claim beyond `asked` free slots, of which `slots` are for what is claimed."""
        if self._holding is None:
            return 0
        coming = sum([flight.extra for flight in self._flights])
        return self._holding.extra(asked, slots, coming, min(self._batch, BATCH_MAX) - asked)

    def _begin_exchange(self, ends: list[tuple[Run, Settle]], asked: int) -> None:
        self._request_id += 1
        reserve = self._slots.lacking() if asked else ()
        begin: list[ClaimedJob] = []
        extra = 0
        if self._stock is not None:
            begin = self._stock.pick(asked, reserve) if asked else []
            extra = self._to_hold(asked, asked - len(begin) - sum(reserve))
        request = ExchangeRequest(
            self._worker,
            self._request_id,
            settle=tuple([settle for _, settle in ends]),
            begin=tuple([Owned(job.id, job.token) for job in begin]),
            slots=asked - len(begin),
            extra=extra,
            reserve=reserve,
        )
        self._hungry = False
        sent_s = self._clock.mono_s()
        exchange = exchanged(
            self._storage, request, gives_up=self._gives_up, fail=self._fail, rng=self._rng, log=self._log
        )
        answer = asyncio.get_running_loop().create_task(exchange, name="fluxmesh-exchange")
        answer.add_done_callback(self._tell_round)
        self._flights.append(Flight(ends, begin, asked, sum(reserve), extra, sent_s, answer))

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

    async def _land(self, flight: Flight) -> None:
        """Draw the conclusions from an answer."""
        self._flights.remove(flight)
        if flight.answer.cancelled():
            raise RuntimeError("an exchange was cancelled by somebody else")
        answer = flight.answer.result()
        if answer is None:
            self._gave_up = self._gave_up or bool(flight.ends)
            return
        if self._holding is not None:
            self._holding.answered(flight)
        self._confirm(flight.ends, answer)
        slots = flight.slots_claimed(answer)
        self._take(flight, answer, slots)
        await self._begin_bodies()
        if slots and not answer.running and (self._stock is None or self._stock.rules.steal):
            await self._take_held()
        if self._holding is not None:
            self._holding.tell()
        self._announce_idle()

    def _may_claim(self) -> bool:
        """Jobs may be claimed, held and begun."""
        if self._draining or self._quiet or not self._lease.holds():
            return False
        if self._pause_until and asyncio.get_running_loop().time() < self._pause_until:
            return False
        self._pause_until = 0.0
        return True

    def _to_claim(self) -> int:
        if not self._may_claim():
            return 0
        asked_for = sum([flight.asked for flight in self._flights])
        return max(0, min(self._slots.free - asked_for, self._batch))

    def _gives_up(self) -> bool:
        return self.stopping

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

    def _take(self, flight: Flight, answer: ExchangeAnswer, slots: int) -> None:
        """Admit what was begun or claimed, and note when the next claim may find something."""
        if answer.standing is not Standing.GOOD:
            self._out_of_standing(answer.standing)
        got = len(answer.running)
        if flight.begin and self._holding is not None:
            begun = self._holding.begun(flight, answer)
            self._admit(begun, flight.sent_s)
            if begun and self._slots.reserves:
                self._hungry = True  # what was begun may have filled a reserve that the claim kept free too
        if got or answer.held:
            self._admit(answer.running, flight.sent_s, answer.held)
        if self._holding is not None:
            self._holding.claimed(flight, answer, slots)
        if not slots:
            self._hungry = self._hungry or answer.more
            return
        if self._observer is not None:
            self._observer(Claimed(slots, got))
        if got >= slots or answer.more:
            self._hungry = True
            return
        now = asyncio.get_running_loop().time()
        if answer.next_due_s is not None:
            self._look_at(now + max(answer.next_due_s, _SHORTEST_REST_S))
        self._taking.note(answer.next_held_s if self._slots.open_to_all() else None)
        if not self._draining and not self.stopping:
            self._lookout.wait()

    def _admit(self, running: Sequence[ClaimedJob], sent_s: MonoS, held: Sequence[ClaimedJob] = ()) -> None:
        late = self._clock.mono_s() - sent_s > self._late_after_s
        why = "late answer" if late else "lease lapsed"
        if self._draining:
            why = "draining"
        stock = self._stock
        if late or self._draining or not self._lease.holds():
            if stock is not None:
                for job in running:
                    stock.landed(job)
            self._release([*running, *held], why)
            return
        now = asyncio.get_running_loop().time()
        if stock is not None:
            running = self._from_stock(stock, running)
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
        if stock is not None and stock.is_beginning:
            for job in running:
                self._table.landed(job, stock)
        if self._holding is not None:
            self._holding.hold(held)
        else:
            self._release(held, "not asked for")

    def _from_stock(self, stock: Stock, running: Sequence[ClaimedJob]) -> Sequence[ClaimedJob]:
        """Those of these jobs that may be started here."""
        if not len(stock) and not stock.is_beginning:
            stock.note_starts(running)
            return running
        may: list[ClaimedJob] = []
        for job in running:
            stock.forget(job)
            if stock.must_not_run(job):
                stock.landed(job)
                self._release([job], "lost meanwhile")
            else:
                may.append(job)
        stock.note_starts(may)
        return may

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

    async def _take_held(self) -> None:
        held = len(self._stock) if self._stock is not None else 0
        slots = min(self._slots.open_to_all(), self._to_claim()) - held
        if slots <= 0 or not self._taking.is_due():
            return
        sent_s = self._clock.mono_s()
        jobs = await self._taking.take(slots)
        if self._stock is not None:
            self._stock.counts["jobs_taken_held"] += len(jobs)
        self._admit(jobs, sent_s)
        self._hungry = self._hungry or len(jobs) >= slots  # else what is free waits unheard
        await self._begin_bodies()

    # -- the end -----------------------------------------------------------------------------------------
    def _idle(self) -> bool:
        sent = self._gave_up or any(flight.ends or not flight.answer.done() for flight in self._flights)
        return not (sent or self._outbox or self._releases or self._holding)

    def _announce_idle(self) -> None:
        if self._flushed is not None and self._idle() and not self._flushed.done():
            self._flushed.set_result(None)
