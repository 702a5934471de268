"""What a worker does when storage is silent, slow or forgetful: nothing runs twice, nothing is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import structs

from fluxmesh.context import Context
from fluxmesh.job import Outcome, Status
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Owned, Settled
from fluxmesh.testing.contract.faulty import FaultyStorage
from fluxmesh.worker.config import WorkerEnd
from fluxmesh.worker.observe import (
    BodyUnstoppable,
    Claimed,
    JobEnded,
    JobSettled,
    JobsReleased,
    JobStarted,
    LeaseLapsed,
    LoopBlocked,
)
from fluxmesh.worker.worker import Worker
from tests.service.log_tap import tapped
from tests.service.workshop import Witness, Workshop, workshop


class Line(FaultyStorage):
    """A storage behind a line: `down` verbs reach nobody, replies of `slow` ones wait for `arrive`."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.down: set[str] = set()
        self.slow: set[str] = set()
        self.asked: list[tuple[Any, ...]] = []  # arguments of every exchange
        self.sent = asyncio.Event()
        self.arrive = asyncio.Event()

    def _faulty(self, verb: str, real: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        faulty = super()._faulty(verb, real)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if verb == "exchange":
                self.asked.append(args)
            if verb in self.down:
                self.refuse(verb)
            answer = await faulty(*args, **kwargs)
            if verb in self.slow:
                self.sent.set()
                await self.arrive.wait()
            return answer

        return call


class Lines:
    """Opens the two storages of one worker, each behind a line."""

    def __init__(self, shop: Workshop) -> None:
        self._shop = shop
        self.main: Line
        self.beats: Line

    async def open(self, inline: bool) -> Storage:
        line = Line(await self._shop._open_for_worker(inline))
        if inline:
            self.beats = line
        else:
            self.main = line
        return line.as_storage()


@workshop()
async def test_lost_replies_and_refusals_of_every_verb_lose_and_double_nothing(shop: Workshop) -> None:
    runs: list[int] = []

    @shop.task("note")
    async def note(number: int) -> int:
        runs.append(number)
        return number

    lines = Lines(shop)
    ids = [await shop.put("note", number) for number in range(30)]
    await shop.worker(concurrency=4, open_storage=lines.open)
    lines.beats.lose_replies("beat")
    for settled in (4, 12, 20):
        await shop.witness.saw(JobSettled, settled)
        lines.main.lose_replies("exchange", "wait_for_work")
        lines.main.refuse("exchange")
    assert [(await shop.ended(job_id)).result for job_id in ids] == list(range(30))
    assert sorted(runs) == list(range(30))
    assert (await shop.storage.counts()).stale_settles == 0
    repeated = [
        again
        for again, before in zip(lines.main.asked[1:], lines.main.asked, strict=False)
        if again == before
    ]
    assert len(repeated) == 6  # the very same request, after three lost replies and three refusals
    assert all(request.settle or request.slots for (request,) in repeated)


@workshop()
async def test_ends_wait_in_the_worker_until_storage_is_back(shop: Workshop) -> None:
    gate = asyncio.Event()

    @shop.task("hold")
    async def hold(number: int) -> int:
        await gate.wait()
        return number

    lines = Lines(shop)
    ids = [await shop.put("hold", number) for number in range(3)]
    await shop.worker(concurrency=3, open_storage=lines.open)
    await shop.witness.saw(JobStarted, 3)
    lines.main.down = {"exchange"}
    gate.set()
    await shop.witness.saw(JobEnded, 3)
    assert [await shop.status(job_id) for job_id in ids] == [Status.RUNNING] * 3
    lines.main.down = set()
    assert [(await shop.ended(job_id)).result for job_id in ids] == [0, 1, 2]


@workshop()
async def test_jobs_of_an_answer_that_comes_late_are_released_and_never_run(shop: Workshop) -> None:
    @shop.task("quick")
    async def quick() -> str:
        return "done"

    lines = Lines(shop)
    await shop.worker(open_storage=lines.open)
    await shop.witness.saw(Claimed, got=0)
    lines.main.slow = {"exchange"}
    job_id = await shop.put("quick")
    await lines.main.sent.wait()
    job = await shop.job(job_id)
    assert (job.status, job.worker_id) == (Status.RUNNING, "w1")
    await asyncio.sleep(1.1 * shop.settings.beat_every_s)  # what counts is that much time
    lines.main.slow = set()
    lines.main.arrive.set()
    assert (await shop.witness.saw(JobsReleased))[0] == JobsReleased((job_id,), "late answer")
    job = await shop.ended(job_id)  # given back at once, and claimed anew
    assert (job.result, job.attempts, job.interruptions) == ("done", 1, 0)
    assert len(shop.witness.all(JobStarted)) == 1


@workshop()
async def test_without_good_beats_nothing_is_begun_and_running_bodies_go_on(shop: Workshop) -> None:
    gate = asyncio.Event()

    @shop.task("hold")
    async def hold() -> str:
        await gate.wait()
        return "done"

    @shop.task("careful", on_lease_lost="cancel", max_retries=0)
    async def careful() -> str:
        await gate.wait()
        return "done"

    lines = Lines(shop)
    hold_id, careful_id = await shop.put("hold"), await shop.put("careful")
    await shop.worker(concurrency=4, open_storage=lines.open)
    await shop.witness.saw(JobStarted, 2)
    lines.beats.down = {"beat"}
    await shop.witness.saw(LeaseLapsed)
    await shop.witness.saw(JobEnded, job_id=careful_id, outcome=Outcome.INTERRUPTED)
    later = await shop.put("hold")
    gate.set()
    assert (await shop.ended(hold_id)).result == "done"
    assert await shop.status(later) is Status.PENDING
    assert len(shop.witness.all(JobStarted)) == 2
    lines.beats.down = set()
    for job_id in (later, careful_id):
        assert (await shop.ended(job_id)).result == "done"
    job = await shop.job(careful_id)
    assert (job.attempts, job.interruptions, job.crashes) == (1, 1, 0)


@workshop()
async def test_a_lost_job_is_stopped_and_its_end_is_refused_and_counted(shop: Workshop) -> None:
    @shop.task("long", max_retries=0)
    async def long() -> str:
        if not first.is_set():
            first.set()
            await asyncio.Event().wait()
        return "anew"

    first = asyncio.Event()
    job_id = await shop.put("long")
    worker = await shop.worker(concurrency=1)
    await first.wait()
    job = await shop.job(job_id)
    await shop.storage.release(shop.ref(worker), [Owned(job_id, job.token)])  # behind its back
    other = Witness()
    await shop.worker("w2", witness=other)
    done = await shop.ended(job_id)
    # By w2, or by w1 itself if its beat came first and stopped the old body before w2 looked.
    assert (done.result, done.attempts, done.interruptions) == ("anew", 1, 0)
    await shop.witness.saw(JobSettled, job_id=job_id, verdict=Settled.STALE)
    assert (await shop.storage.counts()).stale_settles == 1
    assert worker.running_count == 0


@workshop(hard_grace_s=0.0)
async def test_a_job_whose_body_still_runs_here_is_not_started_a_second_time(shop: Workshop) -> None:
    release, inside = shop.gate(), threading.Event()
    starts: list[str] = []

    @shop.task("stuck", max_retries=0)
    def stuck() -> None:
        starts.append("start")
        inside.set()
        release.wait(20)

    @shop.task("quick")
    async def quick() -> None: ...

    job_id = await shop.put("stuck")
    worker = await shop.worker(concurrency=2)
    await asyncio.to_thread(inside.wait, 10)
    job = await shop.job(job_id)
    await shop.storage.release(shop.ref(worker), [Owned(job_id, job.token)])
    await shop.put("quick")  # wakes it
    await shop.witness.saw(JobsReleased, job_ids=(job_id,), why="running already")
    assert starts == ["start"]
    assert len(shop.witness.all(JobStarted, task="stuck")) == 1
    release.set()
    await shop.witness.saw(JobStarted, 2, task="stuck")
    await shop.ended(job_id)


@workshop()
async def test_a_worker_whose_row_is_deleted_puts_it_back_and_its_job_runs_once(shop: Workshop) -> None:
    gate = asyncio.Event()

    @shop.task("hold")
    async def hold() -> str:
        await gate.wait()
        return "done"

    first = await shop.put("hold")
    worker = await shop.worker()
    await shop.witness.saw(JobStarted)
    with shop.back_door() as db:
        db.execute('delete from "fluxmesh:worker" where epoch = ?', (worker.epoch,))
    second = await shop.put("hold")
    await shop.witness.saw(JobStarted, job_id=second)
    assert [info.epoch for info in await shop.storage.fleet()] == [worker.epoch]
    gate.set()
    for job_id in (first, second):
        assert (await shop.ended(job_id)).attempts == 1
    assert len(shop.witness.all(JobStarted)) == 2


@workshop()
async def test_a_file_locked_for_a_while_by_another_program_is_waited_out(shop: Workshop) -> None:
    gate = asyncio.Event()

    @shop.task("hold")
    async def hold() -> str:
        await gate.wait()
        return "done"

    ids = [await shop.put("hold") for _ in range(4)]
    await shop.worker(concurrency=4)
    await shop.witness.saw(JobStarted, 4)
    with shop.back_door() as db:
        db.execute("begin immediate")
        await shop.witness.saw(LeaseLapsed)
        gate.set()
        await shop.witness.saw(JobEnded, 4)
        await asyncio.sleep(2 * shop.settings.lease_s)  # far longer than the lease
        db.execute("commit")
    for job_id in ids:
        job = await shop.ended(job_id)
        assert (job.result, job.attempts, job.crashes) == ("done", 1, 0)
    assert len(shop.witness.all(JobStarted)) == 4


@workshop()
async def test_a_drain_ends_though_storage_does_not_answer(shop: Workshop) -> None:
    @shop.task("long")
    async def long() -> None:
        await asyncio.Event().wait()

    lines = Lines(shop)
    await shop.put("long")
    worker = await shop.worker(open_storage=lines.open)
    await shop.witness.saw(JobStarted)
    lines.main.down = {"exchange", "declare_dead", "progress", "release", "wait_for_work"}
    lines.beats.down = {"beat"}
    async with asyncio.timeout(4):
        await worker.stop(0)
        assert await worker.wait() is WorkerEnd.STOPPED


@workshop()
async def test_an_error_that_repeating_cannot_mend_ends_the_worker_with_it(shop: Workshop) -> None:
    class Broken(Line):
        def _faulty(self, verb: str, real: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            if verb == "exchange" and self.calls["wait_for_work"]:
                raise ZeroDivisionError("a defect of a backend")
            return super()._faulty(verb, real)

    async def open_broken(inline: bool) -> Storage:
        storage = await shop._open_for_worker(inline)
        return storage if inline else Broken(storage).as_storage()

    @shop.task("quick")
    async def quick() -> None: ...

    worker = shop.make_worker(open_storage=open_broken)
    await worker.start()
    await shop.witness.saw(Claimed)
    await shop.put("quick")  # wakes it
    with pytest.raises(ZeroDivisionError, match="defect"):
        await asyncio.wait_for(worker.wait(), 8)


@workshop()
async def test_jobs_behind_a_blocked_loop_run_elsewhere_and_the_warning_names_the_blocker(
    shop: Workshop,
) -> None:
    blocked = threading.Event()
    ran: list[tuple[str, bool, float]] = []
    over: list[float] = []

    @shop.task("blocks")
    async def blocks() -> None:
        blocked.set()
        time.sleep(3.5)  # noqa: ASYNC251 - the fault at hand
        over.append(asyncio.get_running_loop().time())

    @shop.task("quick")
    async def quick(name: str) -> None:
        loop = asyncio.get_running_loop()
        ran.append((name, threading.current_thread() is threading.main_thread(), loop.time()))

    def elsewhere() -> None:
        async def serve() -> None:
            worker: Worker = shop.make_worker("w2", witness=Witness())
            await worker.start()
            await asyncio.to_thread(finish.wait, 20)
            await worker.stop(0)

        blocked.wait(10)
        asyncio.run(serve())

    finish = threading.Event()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    blocker = await shop.put("blocks")
    ids = [await shop.put("quick", name) for name in "abc"]
    await shop.worker(concurrency=4)
    try:
        assert (await shop.witness.saw(LoopBlocked))[0].job_id == blocker
        for job_id in (*ids, blocker):
            job = await shop.ended(job_id)
            assert (job.status, job.attempts, job.crashes) == (Status.COMPLETED, 1, 0)
    finally:
        finish.set()
        await asyncio.to_thread(thread.join, 10)
    assert [(name, here) for name, here, _ in sorted(ran)] == [("a", False), ("b", False), ("c", False)]
    assert all(at < over[0] for _, _, at in ran)
    assert not shop.witness.all(BodyUnstoppable)


@workshop()
async def test_an_outage_is_warned_of_once_by_whoever_stores_progress(shop: Workshop) -> None:
    gate = asyncio.Event()

    @shop.task("steps")
    async def steps(ctx: Context) -> None:
        ctx.progress(10, "begun")
        await gate.wait()

    lines = Lines(shop)
    with tapped() as tap:
        await shop.worker(open_storage=lines.open)
        lines.main.refuse("progress", times=3)
        job_id = await shop.put("steps")
        await shop.until(job_id, lambda job: job.progress == 10)
        assert lines.main.is_spent
        assert len(tap.found("progress not stored", level="warning")) == 1
    gate.set()
    await shop.ended(job_id)


class Losing(Line):
    """Beats that tell of lost jobs; `heard` is set when the one after such a beat begins."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.losing: list[str] = []
        self.told = threading.Event()
        self.heard = threading.Event()

    def _faulty(self, verb: str, real: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        faulty = super()._faulty(verb, real)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if verb == "beat" and self.told.is_set():
                self.heard.set()
            answer = await faulty(*args, **kwargs)
            if verb == "beat" and self.losing:
                answer = structs.replace(answer, lost=tuple(self.losing))
                self.told.set()
            return answer

        return call


@workshop()
async def test_a_beat_that_renews_the_lease_lets_no_body_of_a_lost_job_begin(shop: Workshop) -> None:
    """In a process that was stopped the lease may be renewed before the loop hears what is lost."""
    begun: list[str] = []
    beats: list[Losing] = []

    async def opened(inline: bool) -> Storage:
        storage = await shop._open_for_worker(inline)
        if not inline:
            return storage
        beats.append(Losing(storage))
        return beats[0].as_storage()

    @shop.task("stands")
    async def stands() -> None:
        beats[0].losing.append(lost_id)
        worker._beater.nudge()
        assert beats[0].told.wait(5)
        worker._beater.nudge()
        assert beats[0].heard.wait(5)
        beats[0].losing.clear()

    @shop.task("lost")
    async def lost() -> None:
        begun.append("lost")

    standing_id, lost_id = await shop.put("stands"), await shop.put("lost")
    worker = await shop.worker(open_storage=opened, concurrency=2)
    job = await shop.ended(standing_id)
    assert (job.status, job.error) == (Status.COMPLETED, None)
    assert begun == []
