"""From a claimed job to the end of its body: decode, look up, context, executor, end, decision.

All of it happens on the loop; only a `def` body runs on a thread, and an isolated one in another process.
What a body does is turned into an `End` and that into a `Transition` on the spot, so that an exchange carries
nothing but decisions.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from fluxmesh.codec import WARN_PAYLOAD_BYTES, decode_options, decode_payload
from fluxmesh.config import Settings
from fluxmesh.context import Context, current_run
from fluxmesh.job import JobError, JobOptions, Outcome, Status
from fluxmesh.obs.log import get_logger
from fluxmesh.outcome import End, JobInterrupted, JobTimeout, Transition, decide
from fluxmesh.storage.values import ClaimedJob, OnDeath, Settle
from fluxmesh.task import TaskRegistry, policy_for, timeout_for
from fluxmesh.worker import ending
from fluxmesh.worker.deadlines import Deadlines
from fluxmesh.worker.forked import end_if_forked
from fluxmesh.worker.guided import Guide
from fluxmesh.worker.isolated.call import IsolatedCall
from fluxmesh.worker.isolated.isolation import ALONE_FROM_CRASHES, Isolation
from fluxmesh.worker.isolated.source import BodySource
from fluxmesh.worker.lease import Lease
from fluxmesh.worker.observe import BodyUnstoppable, JobEnded, JobStarted, Observer
from fluxmesh.worker.progress import ProgressSender
from fluxmesh.worker.runs import NEVER, Plan, Run, RunTable
from fluxmesh.worker.supply import Supply
from fluxmesh.worker.threads import Interruption, ThreadCall, ThreadPool

_PLANS_MAX: Final = 1_024
_JUNK: Final = (msgspec.MsgspecError, ValueError, RecursionError)
_log = get_logger("worker")


class Runner:
    """Starts runs and sees them to their ends. Everything here is called on the loop.

    `deliver` takes the end of a run, `give_back` a run that was never entered and shall be released, `drop`
    one that the beat thread has released.
    `on_overdue` hears of a body that cannot be stopped.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        name: str,
        registry: TaskRegistry,
        settings: Settings,
        cancel_on_lapse: bool,
        table: RunTable,
        lease: Lease,
        source: BodySource | None,
        progress: ProgressSender,
        deliver: Callable[[Run, Settle], None],
        give_back: Callable[[Run, str], None],
        drop: Callable[[Run], None],
        on_overdue: Callable[[], None],
        rng: random.Random,
        observer: Observer | None,
    ) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self._registry = registry
        self._settings = settings
        self._cancel_on_lapse = cancel_on_lapse
        self._table = table
        self._lease = lease
        self._progress = progress
        self._deliver = deliver
        self._give_back = give_back
        self._drop = drop
        self._on_overdue = on_overdue
        self._rng = rng
        self._observer = observer
        self._supply = Supply(loop, name, registry.resources)
        self._pool = ThreadPool(loop, f"{name}-body", at_exit=self._supply.end_thread)
        self._isolation = Isolation(
            loop,
            name=name,
            registry=registry,
            settings=settings,
            source=source,
            most=table.slots.concurrency,
            may_begin=self._may_send,
        )
        self._guide = Guide(
            loop,
            middleware=tuple(registry.middleware),
            supply=self._supply,
            pool=self._pool,
            table=table,
            end_of_value=self._end_of_value,
            isolate=self._isolate,
        )
        self._deadlines = Deadlines(loop, table, self._on_due)
        self._plans: dict[tuple[str, bytes | None], Plan] = {}
        self._notify = progress.notify

    def start(self) -> None:
        """Get ready for the first jobs."""
        self._isolation.start()

    def drain(self) -> None:
        """The worker ends: hand back at once what still waits for a process, and send nothing to one."""
        self._isolation.drain()

    async def close_resources(self) -> None:
        """After `close`, when no body runs any more. Bounded."""
        await asyncio.gather(self._supply.close(), self._isolation.close())
        self._supply.stop()

    @property
    def has_resources(self) -> bool:
        """There is something to be closed."""
        return not (self._supply.empty and self._isolation.empty)

    async def kill_processes(self) -> None:
        """End every process of a body, and wait for that. Bounded."""
        await self._isolation.kill()

    def close(self) -> None:
        self._deadlines.close()
        self._pool.close()

    # -- starting ------------------------------------------------------------------------------------
    def admit(self, job: ClaimedJob, now: float) -> Callable[[], None] | None:
        """Take in a job given running: from now on it is named in every beat, and can be stopped. What is
        returned, to be called soon, begins its body; None: there is nothing to be begun any more.
        `now` is the loop's time, read once for all jobs of an answer."""
        try:
            plan = self._plans.get((job.task, job.options)) or self._make_plan(job)
            args, kwargs = decode_payload(job.payload)
        except _JUNK as error:
            self._refuse(job, ending.undecodable(error))
            return None
        function = plan.function
        if function is None:
            message = f"task {job.task!r} is not registered in this worker"
            self._refuse(job, End(Outcome.FAILED, error=JobError("UnknownTask", message)))
            return None
        if job.crashes >= ALONE_FROM_CRASHES:
            plan = self._isolation.alone(plan, job.task)
        run = Run(job, plan, Context(job, plan.options, self._notify), now + plan.timeout_s)
        run.began = now
        self._table.add(run)
        self._deadlines.watch(run.deadline)
        if not plan.guided and plan.shape is not None:
            plan.shape.place(args, kwargs, run.context)
        if plan.guided or plan.is_async:
            self._table.await_entry(run)
            return partial(self._begin_task, run, function, args, kwargs)
        self._start_on_thread(run, function, args, kwargs)
        return None

    def _begin_task(
        self, run: Run, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        if run.plan.guided:
            body = self._guided(run, args, kwargs)
        else:
            body = self._body(run, function, args, kwargs)
        # The name is the job's id: the loop's current task then tells which job blocks it.
        run.handle = self._loop.create_task(body, name=run.job.id)

    def _make_plan(self, job: ClaimedJob) -> Plan:
        options = decode_options(job.options)
        definition = self._registry.get(job.task)
        own = definition.spec.options if definition is not None else None
        timeout_s = timeout_for(options, own, self._settings)
        if not timeout_s > 0:
            raise ValueError(f"its timeout is {timeout_s!r}")
        on_lapse = definition.on_lease_lost if definition is not None else None
        fillable = definition.shape.fillable(self._registry.resources) if definition is not None else ()
        isolated = self._isolation.applies_to(definition)
        plan = Plan(
            function=definition.function if definition is not None else None,
            is_async=definition is not None and definition.is_async,
            shape=definition.shape if definition is not None and definition.takes_context else None,
            options=options,
            policy=policy_for(options, own, self._settings),
            timeout_s=timeout_s,
            cancel_on_lapse=self._cancel_on_lapse if on_lapse is None else on_lapse == "cancel",
            fillable=fillable,
            guided=bool(fillable or self._guide.middleware or isolated),
            isolated=isolated,
            memory_limit_mb=definition.memory_limit_mb if definition is not None else None,
        )
        if len(self._plans) >= _PLANS_MAX:
            self._plans.clear()
        self._plans[job.task, job.options] = plan
        return plan

    def _refuse(self, job: ClaimedJob, end: End) -> None:
        """End a job whose body cannot even be looked for."""
        options = JobOptions()
        policy = policy_for(options, None, self._settings)
        plan = Plan(None, False, None, options, policy, self._settings.timeout_s, False)
        run = Run(job, plan, Context(job, options, self._notify), NEVER)
        self._table.add(run)
        self._finish(run, end)

    async def _body(
        self, run: Run, function: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if not self._entered(run):
            return
        try:
            value = await function(*args, **kwargs)
        except BaseException as error:  # of any kind: it ends the run and nothing else
            end_if_forked(self._pid, error)
            self._raised(run, error)
        else:
            end_if_forked(self._pid, None)
            self._returned(run, value)

    async def _guided(self, run: Run, args: list[Any], kwargs: dict[str, Any]) -> None:
        if self._entered(run):
            self._finish(run, await self._guide.end_of(run, args, kwargs))

    def _entered(self, run: Run) -> bool:
        """From here on the body counts as begun. False: the job was taken back meanwhile."""
        if not self._table.enter(run):
            self._drop_withdrawn(run)
            return False
        if not self._lease.holds():
            self._give_back(run, "lease lapsed")
            return False
        current_run.set(run.context)
        if self._observer is not None:
            self._observer(JobStarted(run.job.id, run.job.task, run.job.token))
        return True

    def _isolate(self, run: Run, args: list[Any], kwargs: dict[str, Any]) -> IsolatedCall:
        """Send the body to a process. The time in which it only waits for one is not its own."""
        before, run.deadline = run.deadline, run.deadline if run.timed_out else NEVER
        try:
            call = self._isolation.call(run, args, kwargs)
        except BaseException:
            run.deadline = before
            self._deadlines.watch(before)
            raise
        call.ended.add_done_callback(lambda _: self._out_of_pool(run))
        return call

    def _out_of_pool(self, run: Run) -> None:
        """Without having been sent, perhaps. Middleware may follow: that has a bound as well."""
        if run.deadline == NEVER and not (run.ended or run.interrupted or run.timed_out):
            self._count_anew(run)

    def _count_anew(self, run: Run) -> None:
        run.deadline = self._loop.time() + run.plan.timeout_s
        self._deadlines.watch(run.deadline)

    def _may_send(self, call: IsolatedCall) -> bool:
        """A process is free for this body: its time counts from now. False: it must not begin any more."""
        run = call.run
        if run.withdrawn or not self._lease.holds():
            return False
        call.begin_by_s = self._lease.until_s
        if not run.timed_out:
            self._count_anew(run)
        return True

    def _drop_withdrawn(self, run: Run) -> None:
        if run.withdrawn and run.seated:
            self._drop(run)

    def _start_on_thread(
        self, run: Run, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        context = contextvars.copy_context()
        context.run(current_run.set, run.context)
        run.handle = ThreadCall(
            function,
            args,
            kwargs,
            context,
            partial(self._thread_ended, run),
            self._table.mark_of_leaving(run),
            self._lease.holds,
        )
        if self._observer is not None:
            self._observer(JobStarted(run.job.id, run.job.task, run.job.token))
        self._pool.submit(run.handle)

    def _thread_ended(self, run: Run, call: ThreadCall) -> None:
        run.took_s = call.took_s
        if call.refused and not run.cancelled:
            self._give_back(run, "never entered")
        elif call.error is None:
            self._returned(run, call.value)
        else:
            self._raised(run, call.error)
        call.error = call.value = None

    # -- ending --------------------------------------------------------------------------------------
    def _returned(self, run: Run, value: Any) -> None:
        self._finish(run, self._end_of_value(run, value))

    def _end_of_value(self, run: Run, value: Any) -> End:
        if run.overdue:
            return ending.timed_out(run, None)
        end = ending.returned(value, self._settings.result_limit_bytes)
        if end.result is not None and len(end.result) > WARN_PAYLOAD_BYTES:
            _log.warning("large result", job_id=run.job.id, task=run.job.task, bytes=len(end.result))
        return end

    def _raised(self, run: Run, error: BaseException) -> None:
        self._finish(run, ending.raised(run, error))

    def _finish(self, run: Run, end: End) -> None:
        job = run.job
        transition = decide(job.task, end, job.counters, run.plan.policy, self._rng)
        reported = run.context.reported
        if reported is None:
            settle = Settle(job.id, job.token, transition)
        else:
            settle = Settle(job.id, job.token, transition, reported[0], reported[1])
        self._table.end(run)
        self._deliver(run, settle)
        if end.outcome is not Outcome.COMPLETED:
            self._tell(run, transition)
        if self._observer is not None:
            self._observer(JobEnded(job.id, end.outcome))

    def _tell(self, run: Run, transition: Transition) -> None:
        fields: dict[str, Any] = {
            "job_id": run.job.id,
            "task": run.job.task,
            "outcome": transition.outcome.value,
        }
        if transition.error is not None:
            fields["error"] = f"{transition.error.type}: {transition.error.message[:200]}"
        if transition.status is Status.DEAD_LETTER:
            _log.warning("job given up", reason=transition.reason, **fields)
        else:
            _log.info("job not completed", next=transition.status.value, **fields)

    # -- stopping ------------------------------------------------------------------------------------
    def cancel(self, run: Run) -> None:
        """Somebody asked storage to cancel it."""
        if not (run.ended or run.cancelled):
            run.cancelled = True
            self._stop_body(run, JobInterrupted)

    def lose(self, run: Run) -> None:
        """Storage gave it to another. Its end is presented all the same, refused there and counted."""
        if not (run.ended or run.lost):
            run.lost = True
            _log.warning("job lost", job_id=run.job.id, task=run.job.task, token=run.job.token)
            self._stop_body(run, JobInterrupted)

    def interrupt(self, run: Run) -> None:
        """The worker must stop it: it goes back to its place, and no attempt is charged."""
        if not (run.ended or run.interrupted):
            run.interrupted = True
            if not run.timed_out:
                run.deadline = NEVER
            self._stop_body(run, JobInterrupted)

    def interrupt_on_lapse(self) -> None:
        """The lease may have lapsed: stop what must not overlap with a run elsewhere."""
        for run in self._table.bodies():
            if run.plan.cancel_on_lapse:
                self.interrupt(run)

    def _stop_body(self, run: Run, kind: Interruption) -> None:
        handle = run.handle
        if isinstance(handle, ThreadCall | IsolatedCall):
            # The exception first: a body that polls the flag shall not return before it comes.
            handle.interrupt(kind)
            run.context.mark_cancelled()
        else:
            run.context.mark_cancelled()
            if not self._table.enter(run):
                if run.withdrawn:
                    self._drop_withdrawn(run)
                elif handle is not None:
                    handle.cancel()
            elif run.cancelled:
                self._finish(run, End(Outcome.CANCELLED))
            else:
                self._give_back(run, "never entered")

    # -- timeouts ------------------------------------------------------------------------------------
    def _on_due(self, run: Run, now: float) -> None:
        if not run.timed_out:
            run.timed_out = True
            run.deadline = now + self._settings.hard_grace_s
            self._stop_body(run, JobTimeout)
        else:
            self._overdue(run, now)

    def _overdue(self, run: Run, now: float) -> None:
        run.deadline = NEVER
        if isinstance(run.handle, IsolatedCall):
            run.handle.kill()
            if now < run.handle.gone_by:
                run.deadline = run.handle.gone_by
                return
        if isinstance(run.handle, ThreadCall) and not self._pool.abandon(run.handle):
            if run.plan.guided:  # what follows the body may hang as well
                run.deadline = now + self._settings.hard_grace_s
            return  # it has ended just now
        run.overdue = True
        run.overdue_since = now
        self._progress.on_death(run, OnDeath.TIMEOUT)
        _log.error(
            "body cannot be stopped", job_id=run.job.id, task=run.job.task, timeout_s=run.plan.timeout_s
        )
        self._table.unseat(run)
        if self._observer is not None:
            self._observer(BodyUnstoppable(run.job.id))
        self._on_overdue()

    def kill_isolated(self) -> list[Run]:
        """At the end of the worker: kill the processes of the bodies that still run in one. Their runs."""
        left: list[Run] = []
        for run in self._table.bodies():
            if isinstance(run.handle, IsolatedCall):
                run.handle.kill()
                left.append(run)
        return left

    def mark_unstoppable(self) -> list[Run]:
        """At the end of the worker: what its jobs' owner shall leave behind for bodies that still run."""
        left = self._table.bodies()
        for run in left:
            if not run.overdue:
                meaning = OnDeath.TIMEOUT if run.timed_out else OnDeath.INTERRUPTED
                self._progress.on_death(run, meaning)
                _log.error("body did not stop with its worker", job_id=run.job.id, task=run.job.task)
                if self._observer is not None:
                    self._observer(BodyUnstoppable(run.job.id))
        return left
