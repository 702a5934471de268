"""The jobs that this worker owns: started, running, ended but not yet confirmed by storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from fluxmesh.callshape import CallShape, Fillable
from fluxmesh.context import Context
from fluxmesh.job import JobOptions
from fluxmesh.outcome import Policy
from fluxmesh.storage.values import ClaimedJob, Owned
from fluxmesh.worker.ledger import NONE, Ledger
from fluxmesh.worker.slots import Slots
from fluxmesh.worker.threads import Phase, ThreadCall

if TYPE_CHECKING:
    from fluxmesh.worker.isolated.call import IsolatedCall
    from fluxmesh.worker.stock import Stock

NEVER: Final = float("inf")


class Plan(Struct, frozen=True):
    """How jobs of one task with the same stored options are run: worked out once, used by each of them.

    `fillable`: parameters that are resources. `guided`: there is more to a run than its body. `isolated`: the
    body runs in a process of its own, `alone` in one that runs nothing else."""

    function: Callable[..., Any] | None
    is_async: bool
    shape: CallShape | None
    options: JobOptions
    policy: Policy
    timeout_s: float
    cancel_on_lapse: bool
    fillable: Fillable = ()
    guided: bool = False
    isolated: bool = False
    alone: bool = False
    memory_limit_mb: int | None = None


class Run:
    """One start of one job. Changed on the loop alone, but for `withdrawn`, which the beat thread sets too.

    What was asked of the body is kept as flags, because several may hold at once: `timed_out` (its soft
    timeout has passed), `overdue` (the hard one: it counts as unstoppable), `cancelled` (by request),
    `interrupted` (the worker stops, or its lease lapsed), `lost` (it is another's now).
    """

    __slots__ = (
        "began",
        "cancelled",
        "context",
        "deadline",
        "ended",
        "handle",
        "interrupted",
        "job",
        "ledger_at",
        "lost",
        "overdue",
        "overdue_since",
        "plan",
        "seated",
        "timed_out",
        "took_s",
        "withdrawn",
    )

    def __init__(self, job: ClaimedJob, plan: Plan, context: Context, deadline: float) -> None:
        self.job = job
        self.plan = plan
        self.context = context
        self.deadline = deadline  # of the loop's clock: the next at which something is to be done about it
        self.began = 0.0  # of the loop's clock; 0: not known
        self.took_s = 0.0  # of a body on a thread, without the ways there and back
        self.handle: asyncio.Task[None] | ThreadCall | IsolatedCall | None = None
        self.seated = True  # it occupies a slot
        self.ledger_at = NONE
        self.ended = False
        self.timed_out = False
        self.overdue = False
        self.overdue_since = 0.0
        self.cancelled = False
        self.interrupted = False
        self.lost = False
        self.withdrawn = False


class RunTable:
    """Runs by job id, and the slots they take.

    The beat thread reads it: `owned` and `withdraw_waiting` copy or pop in one step of the interpreter
    each, so neither side ever waits for the other.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.ledger: Ledger | None = None  # of whoever watches over this process
        self.stock: Stock | None = None  # jobs that are owned as well, and not started
        self.runs: dict[str, Run] = {}
        self.on_change: Callable[[], None] | None = None  # a slot was freed or a body has ended
        # Async bodies whose task was made but whose first line was not reached yet. Whoever pops an entry,
        # the loop to enter it or the beat thread to give it back, has decided alone what becomes of it.
        self._waiting: dict[str, Run] = {}

    def __len__(self) -> int:
        return len(self.runs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self.runs

    def find(self, job_id: str, token: int) -> Run | None:
        """The run of this job under this token; a later run of the same job is another."""
        run = self.runs.get(job_id)
        return run if run is not None and run.job.token == token else None

    def add(self, run: Run) -> None:
        job = run.job
        self.runs[job.id] = run
        self.slots.enter(job.tier)
        ledger = self.ledger
        if ledger is not None:
            waits = run.plan.is_async or run.plan.guided
            # A body elsewhere cannot block this loop, and when its time begins is not known yet.
            soft_s = NEVER if run.plan.isolated else run.deadline
            run.ledger_at = ledger.enter(job.id, job.token, soft_s, waits)

    def mark_of_leaving(self, run: Run) -> Callable[[], None] | None:
        """What a thread calls when this body has ended on it: the loop may hear of that late."""
        return partial(self.ledger.left, run.ledger_at) if self.ledger is not None else None

    def resumed(self, run: Run) -> None:
        """The loop has heard of the end of its body on a thread, and goes on with the run."""
        if run.ledger_at != NONE and self.ledger is not None:
            self.ledger.resumed(run.ledger_at)

    def await_entry(self, run: Run) -> None:
        self._waiting[run.job.id] = run

    def enter(self, run: Run) -> bool:
        """True: the body may be entered now, and nobody will give the job back meanwhile."""
        if self._waiting.pop(run.job.id, None) is None:
            return False
        ledger = self.ledger
        if ledger is None or ledger.begin(run.ledger_at):
            return True
        run.withdrawn = True  # by whoever watches over this process
        return False

    def unseat(self, run: Run) -> None:
        """Its slot is free again: it has ended, or cannot be stopped."""
        if run.seated:
            run.seated = False
            self.slots.leave(run.job.tier)
            if self.on_change is not None:
                self.on_change()

    def end(self, run: Run) -> None:
        """Its body has ended; it stays here until storage has confirmed that."""
        run.ended = True
        run.handle = None
        if run.ledger_at:
            self._strike(run)
        if run.seated:
            self.unseat(run)
        elif self.on_change is not None:
            self.on_change()

    def _strike(self, run: Run) -> None:
        assert self.ledger is not None
        self.ledger.strike(run.ledger_at)
        run.ledger_at = NONE

    def forget(self, run: Run) -> None:
        """Storage has its end, or it was given back."""
        if self.runs.get(run.job.id) is run:
            del self.runs[run.job.id]
        if run.ledger_at:
            self._strike(run)
        self.unseat(run)

    def landed(self, job: ClaimedJob, stock: Stock) -> None:
        """A job that was begun is in here now. The beat thread may have heard meanwhile that it is another's:
        it says so to the stock first and looks in here then, as this looks there after the job came here."""
        if stock.must_not_run(job):
            self._withdraw((Owned(job.id, job.token),))
        stock.landed(job)

    def bodies(self) -> list[Run]:
        """Runs whose bodies have not ended."""
        return [run for run in self.runs.values() if not run.ended]

    def stuck(self) -> list[Run]:
        """Runs past their hard timeout whose bodies have not ended."""
        return [run for run in self.runs.values() if run.overdue and not run.ended]

    # -- any thread ----------------------------------------------------------------------------------
    def owned(self) -> list[Owned]:
        """What a beat presents. A job comes from the stock into this table before it leaves the stock, so
        it is missed by no look in this order."""
        held = self.stock.owned() if self.stock is not None else None
        owned = [
            Owned(run.job.id, run.job.token)
            for run in list(self.runs.values())
            if not (run.withdrawn or run.lost)
        ]
        if held:
            started = {item.id for item in owned}
            owned += [item for item in held if item.id not in started]
        return owned

    def on_threads(self) -> bool:
        """True while a body runs on a thread, whether or not the loop can hear of its end."""
        handles = [run.handle for run in list(self.runs.values())]
        return any(isinstance(handle, ThreadCall) and handle.phase is not Phase.LEFT for handle in handles)

    def withdraw_waiting(self) -> list[Owned]:
        """Take back every run whose body was not entered; the loop will not enter them any more. And all that
        is held, which not everybody who is idle may take."""
        held = self.stock.clear() if self.stock is not None else ()
        taken = [Owned(job.id, job.token) for job in held]
        for job_id in list(self._waiting):
            run = self._waiting.pop(job_id, None)
            if run is not None:
                run.withdrawn = True
                taken.append(Owned(run.job.id, run.job.token))
        return taken

    def withdraw(self, lost: Iterable[Owned]) -> None:
        """These are another's by now: none of their bodies is entered any more. What has begun is for the
        loop to stop."""
        lost = tuple(lost)
        if self.stock is not None:
            for item in lost:
                self.stock.lose(item)
        self._withdraw(lost)

    def _withdraw(self, lost: Iterable[Owned]) -> None:
        for item in lost:
            run = self.runs.get(item.id)
            if run is None or run.job.token != item.token:
                continue
            if self._waiting.pop(item.id, None) is run:
                run.withdrawn = True
            elif isinstance(run.handle, ThreadCall):
                run.handle.withdraw()

    def name_of(self, job_id: str) -> str:
        """The task of a job at hand, for messages."""
        run = self.runs.get(job_id)
        return run.job.task if run is not None else ""
