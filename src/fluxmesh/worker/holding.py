"""The fetcher's dealings with the stock: what comes in beside claims, what has to go, when others are asked.

Hunger is a standing wish. It begins when a claim came back short while no more than `steal_threshold` jobs
are held, and ends when there is enough, or when this worker may claim no more. The number that is told is
capped by the most that one steal can bring, so it changes when it matters and not with every job.

Where jobs are shorter than an exchange nothing is held: the next claim brings as much (`buffer.pays`). When
they turn out to be longer, nothing ends for as long as an exchange takes, and then the buffer is filled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from fluxmesh.clock import Clock
from fluxmesh.errors import FluxMeshError
from fluxmesh.obs.log import Logger
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Begun, ClaimedJob, ExchangeAnswer, Owned, Standing, WorkerRef
from fluxmesh.worker.lookout import Lookout
from fluxmesh.worker.releases import Releases
from fluxmesh.worker.slots import Slots

if TYPE_CHECKING:
    from fluxmesh.mesh.messages import NodeRef, Offered
    from fluxmesh.worker.flights import Flight
    from fluxmesh.worker.runs import Run
    from fluxmesh.worker.stock import Stock

FILL_REST_S: Final = 0.002
_SHORTEST_REST_S: Final = 0.002  # between two looks whether it is quiet here


class Trade(Protocol):
    """The others, as the worker's loop meets them. Nothing here waits."""

    def seek(self, want: int) -> None:
        """So many jobs more could be used; 0: none any more. It holds until it is told anew, less what is
        got meanwhile."""
        ...

    def took(self, peer: NodeRef, jobs: Sequence[Offered], got: Sequence[Offered]) -> None:
        """What came of taking these: once for each `take`."""
        ...

    def changed(self) -> None:
        """There may be more or less to do here than a moment ago."""
        ...


class Holding:
    """`may_hold`: jobs may be claimed, held and begun now. `wake`: jobs are there to be begun."""

    def __init__(
        self,
        stock: Stock,
        storage: Storage,
        worker: WorkerRef,
        *,
        slots: Slots,
        clock: Clock,
        late_after_s: float,
        releases: Releases,
        lookout: Lookout,
        log: Logger,
        may_hold: Callable[[], bool],
        wake: Callable[[], None],
        trade: Trade | None,
    ) -> None:
        self._stock = stock
        self._storage = storage
        self._worker = worker
        self._slots = slots
        self._clock = clock
        self._late_after_s = late_after_s
        self._releases = releases
        self._lookout = lookout
        self._log = log
        self._may_hold = may_hold
        self._wake = wake
        self._trade = trade
        self._short = False  # the last claim found less than it asked for
        self.full = False  # or all of it
        self._fill_at = 0.0
        self.fills = False  # and more was wanted still
        self._takes: set[asyncio.Task[None]] = set()
        self._stirred_at = 0.0  # by the loop's clock: since then nothing has ended or was started
        self._quiet_timer: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        """A take is under way."""
        return bool(self._takes)

    def cancel(self) -> None:
        for task in list(self._takes):
            task.cancel()
        if self._quiet_timer is not None:
            self._quiet_timer.cancel()

    # -- how much --------------------------------------------------------------------------------------
    def extra(self, asked: int, slots: int, coming: int, most: int) -> int:
        """How many jobs, at most `most`, to claim beyond `asked` free slots, of which `slots` are for what is
        claimed; `coming` are asked for already. While there is room here, others may have room as well: what
        would wait here could start there. So some are held if the last claim found all it asked for, or with
        a claim for no slot at all; and on and on while claims find all that they ask for."""
        if not (self.fills or (asked and (self.full or slots <= 0))):
            return 0
        if not self._pays() or not self._may_hold():
            return 0
        return max(0, min(self._stock.extra(coming, fills=self.fills), most))

    def _pays(self) -> bool:
        """As `buffer.pays` has it; if it is only not quiet yet, there is a look again when it may be."""
        loop = asyncio.get_running_loop()
        quiet_s = loop.time() - self._stirred_at
        if self._stock.pays(quiet_s):
            return True
        if self._quiet_timer is None:
            rest_s = max(self._stock.trips.run_s - quiet_s, _SHORTEST_REST_S)
            self._quiet_timer = loop.call_later(rest_s, self._look_again)
        return False

    def _look_again(self) -> None:
        self._quiet_timer = None
        self._wake()

    def ended(self, run: Run) -> None:
        """A run is over."""
        now = self._stirred_at = asyncio.get_running_loop().time()
        if run.began:
            self._stock.times.note(run.took_s or now - run.began)

    def answered(self, flight: Flight) -> None:
        """A flight is back, and what it was for may start."""
        self._stock.trips.note(self._clock.mono_s() - flight.sent_s)
        if flight.asked:
            self._stirred_at = asyncio.get_running_loop().time()

    # -- an answer -------------------------------------------------------------------------------------
    def begun(self, flight: Flight, answer: ExchangeAnswer) -> list[ClaimedJob]:
        """Which jobs of the flight were begun. They stay in the stock until they have `landed`; the others
        are in it no longer."""
        won: list[ClaimedJob] = []
        lost: list[ClaimedJob] = []
        for job, verdict in zip(flight.begin, answer.begun, strict=True):
            if verdict is Begun.BEGUN:
                won.append(job)
            else:
                self._stock.landed(job)
                if answer.standing is not Standing.GOOD:
                    lost.append(job)  # nothing was looked at: it may be held for us still
        self._stock.counts["local_pops"] += len(won)
        self._releases.release(lost, "not in good standing")
        return won

    def claimed(self, flight: Flight, answer: ExchangeAnswer, slots: int) -> None:
        """What the claim of a flight, for `slots` slots, says of what there is."""
        got, held = len(answer.running), len(answer.held)
        slots -= flight.kept
        if slots > 0 or flight.extra:
            self.full = got >= slots and held >= flight.extra
            self._short = not self.full
            self.fills = self.full and self._stock.lacks() > 0
            self._fill_at = asyncio.get_running_loop().time() + FILL_REST_S
        if held:
            self._stock.counts["prefetch_count"] += 1
            self._stock.counts["prefetch_jobs"] += held

    def may_fill(self, slots: int) -> bool:
        """Whether to claim now only in order to hold, when there is no slot to claim for. Where bodies are
        short one is about to end, and the exchange that tells it holds some as well; one for that alone,
        between any two of those, would double their number. So the next is given a moment to come."""
        if slots or asyncio.get_running_loop().time() >= self._fill_at:
            return True
        self._lookout.look_at(self._fill_at)
        return False

    def hold(self, jobs: Sequence[ClaimedJob]) -> None:
        """Hold what may be held, and give back the rest."""
        if not jobs:
            return
        if not self._may_hold():
            self._releases.release(jobs, "may not hold")
            return
        self._releases.release(self._stock.put(jobs), "no room")
        self._look_at_old()

    # -- what has to go ----------------------------------------------------------------------------------
    def let_go(self, why: str) -> None:
        """Give back all that is held."""
        self._releases.release(self._stock.clear(), why)

    def shed(self) -> None:
        """Give back what has been held for too long."""
        if not len(self._stock):
            return
        old = self._stock.take_old()
        if old:
            self._releases.release(old, "held too long")
            self._look_at_old()

    def _look_at_old(self) -> None:
        left_s = self._stock.old_in_s()
        if left_s is not None:
            self._lookout.look_at(asyncio.get_running_loop().time() + max(left_s, 0.0) + 0.001)

    # -- others ------------------------------------------------------------------------------------------
    def tell(self) -> None:
        """Have others know what has changed here."""
        if self._trade is None:
            return
        want = self._want()
        if want != self._stock.want:
            self._stock.want = want
            self._trade.seek(want)
        self._trade.changed()

    def _want(self) -> int:
        rules, held = self._stock.rules, len(self._stock)
        if not (rules.steal and self._short) or held > rules.steal_threshold or not self._may_hold():
            return 0
        free = max(0, self._slots.open_to_all() - held)
        return min(rules.steal_batch, free + self._stock.lacks())

    def take(self, peer: NodeRef, jobs: tuple[Offered, ...]) -> None:
        """Make jobs of a peer our own, if storage agrees. The trade hears what came of it, in any case."""
        name = "fluxmesh-take"
        task = asyncio.get_running_loop().create_task(self._take(peer, jobs), name=name)
        self._takes.add(task)
        task.add_done_callback(self._took)

    async def _take(self, peer: NodeRef, jobs: tuple[Offered, ...]) -> None:
        rows: list[ClaimedJob] = []
        try:
            if self._may_hold():
                rows = await self._transferred(jobs)
        finally:
            self._stock.want = max(0, self._stock.want - len(rows))  # so much of the wish is fulfilled
            if self._trade is not None:
                ours = {row.id for row in rows}
                self._trade.took(peer, jobs, tuple(item for item in jobs if item.id in ours))

    async def _transferred(self, jobs: Sequence[Offered]) -> list[ClaimedJob]:
        sent_s = self._clock.mono_s()
        owned = [Owned(item.id, item.token) for item in jobs]
        try:
            rows = await self._storage.transfer(self._worker, owned)
        except FluxMeshError as error:
            # Jobs given in a lost answer are on no beat's list and are released by storage.
            self._log.warning("storage does not answer", verb="transfer", error=str(error))
            return []
        if self._clock.mono_s() - sent_s > self._late_after_s:
            self._releases.release(rows, "late answer")
        else:
            self.hold(rows[::-1])  # the offer had the newest first
        return rows

    def _took(self, task: asyncio.Task[None]) -> None:
        self._takes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("jobs could not be taken", error=f"{type(error).__name__}: {error}")
        self._wake()
