"""Bodies in processes of their own: what they can do, how they are stopped, what their deaths cost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluxmesh.bodies import source_of_registry
from fluxmesh.errors import InvalidOption
from fluxmesh.job import Job, Outcome, Status
from fluxmesh.middleware import CallNext, JobRun
from fluxmesh.outcome import End
from fluxmesh.resources import ResourceRegistry
from fluxmesh.task import define
from fluxmesh.worker.config import WorkerEnd
from fluxmesh.worker.isolated.call import IsolatedCall
from fluxmesh.worker.isolated.process import BodyProcess
from fluxmesh.worker.isolated.source import BodySource
from fluxmesh.worker.ledger import LedgerReader, make_ledger_file
from fluxmesh.worker.observe import BodyUnstoppable, JobEnded, JobStarted, LeaseLapsed
from fluxmesh.worker.worker import Worker
from tests.patience import soon
from tests.service.isolated_tasks import OWN, lives, registry_of_tasks, told
from tests.service.log_tap import tapped
from tests.service.test_worker_outages import Lines
from tests.service.workshop import LIMIT_S, Workshop, workshop

TIMEOUT_S = 0.4
HARD_GRACE_S = 0.3
RETRIED = {"timeout": TIMEOUT_S, "max_retries": 2, "backoff_base_seconds": 0.01}
NEVER_READY = ("/bin/sleep", "600")  # a program that says nothing
START_S = 10.0  # for a body process on a busy machine


def equip(shop: Workshop) -> None:
    shop.registry = registry_of_tasks()
    shop.source = source_of_registry(shop.registry)


def children() -> set[int]:
    """Processes that this one has started and not yet seen end."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                found.add(int(entry))
    return found


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    """No process, no zombie, no descriptor of the isolated part is left by any of these tests."""
    before, fds = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) <= fds


async def outcomes(shop: Workshop, job: Job) -> list[Outcome]:
    return [entry.outcome for entry in await shop.history(job.id)]


async def begun(path: str, count: int = 1) -> list[int]:
    """The processes of the first `count` starts of a body, once they have written their marks."""
    async with asyncio.timeout(LIMIT_S):
        while len(pids := [int(line[2]) for line in told(path) if line[0] == "start"]) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return pids


# -- what a body can do ----------------------------------------------------------------------------------
@workshop()
async def test_a_body_runs_in_a_process_that_holds_nothing_of_its_worker(shop: Workshop) -> None:
    equip(shop)
    await shop.worker()
    job = await shop.ended(await shop.put("tells"))
    seen = job.result
    assert seen["parent"] == os.getpid() != seen["pid"]
    assert (seen["main thread"], seen["current"], seen["loop"]) == (True, True, "its own")
    assert (seen["attempt"], seen["stdin"]) == (1, "/dev/null")
    assert not [name for name in seen["fds"] if str(shop.path.parent) in name]
    assert (job.progress, job.progress_message) == (100, "half way")
    again = await shop.ended(await shop.put("tells_async"))
    assert again.result == [seen["pid"], True]  # one is kept and used again


@workshop()
async def test_progress_comes_through_while_the_body_runs(shop: Workshop) -> None:
    equip(shop)
    await shop.worker()
    door = shop.path.parent / "door"
    job_id = await shop.put("steps", str(door))
    job = await shop.until(job_id, lambda job: job.progress == 30)
    assert (job.status, job.progress_message) == (Status.RUNNING, "first")
    door.touch()
    job = await shop.ended(job_id)
    assert (job.result, job.progress_message) == ("done", "last")


@workshop()
async def test_results_and_failures_have_the_form_that_they_have_elsewhere(shop: Workshop) -> None:
    equip(shop)
    for name in ("chained", "leaves"):
        function = shop.registry.get(name)
        assert function is not None
        shop.registry.add(define(function.function, f"{name}_here", {}))
    await shop.worker()
    assert len((await shop.ended(await shop.put("large", 900_000))).result) == 900_000
    assert len((await shop.ended(await shop.put("large", 10))).result) == 10
    too_large = await shop.ended(await shop.put("large", 2 << 20, max_retries=0))
    assert too_large.reason == "result cannot be encoded"
    assert (await shop.ended(await shop.put("odd", max_retries=0))).reason == "result cannot be encoded"
    for name in ("chained", "leaves"):
        here = await shop.ended(await shop.put(f"{name}_here", max_retries=0))
        there = await shop.ended(await shop.put(name, max_retries=0))
        assert there.error == here.error is not None
    assert (await shop.ended(await shop.put("leaves_async", max_retries=0))).error.type == "SystemExit"
    wrong = await shop.ended(await shop.put("large", "no number", max_retries=0))
    assert wrong.error.type == "TypeError"


@workshop()
async def test_what_a_body_says_by_raising_is_done(shop: Workshop) -> None:
    equip(shop)
    await shop.worker()
    snoozed, later, dead = [await shop.put("says", what) for what in ("snooze", "retry", "dead letter")]
    job = await shop.until(snoozed, lambda job: job.status is Status.SCHEDULED)
    assert (job.snoozes, job.attempts) == (1, 0)
    job = await shop.until(later, lambda job: job.status is Status.SCHEDULED)
    assert (job.attempts, (await shop.history(later))[0].error.message) == (1, "not yet")
    assert (await shop.ended(dead)).reason == "of no use"


@workshop()
async def test_a_copy_that_the_body_forks_does_not_answer_for_it(shop: Workshop) -> None:
    equip(shop)
    await shop.worker()
    path = str(shop.path.parent / "marks")
    assert (await shop.ended(await shop.put("forks", path))).result == "the body"
    assert told(path) == [["copy", "0"]]
    assert (await shop.ended(await shop.put("signals_of_children"))).result == ["True", "True"]


@workshop()
async def test_resources_are_built_and_closed_in_the_process(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(shop.path.parent / "journal")
    monkeypatch.setenv("ISOLATED_JOURNAL", path)
    equip(shop)
    worker = await shop.worker(concurrency=1)
    [_, pid] = (await shop.ended(await shop.put("takes"))).result
    assert (await shop.ended(await shop.put("takes_async"))).result == ["session", pid]
    await worker.stop()
    assert pid != os.getpid()
    each = [["opened", str(pid)], ["left", str(pid)]]
    assert told(path) == [["built", str(pid)], *each, *each, ["closed", str(pid)]]


@workshop()
async def test_middleware_is_around_it_in_the_worker(shop: Workshop) -> None:
    equip(shop)
    seen: list[tuple[int, Outcome]] = []

    async def doubling(run: JobRun, call_next: CallNext) -> End:
        run.args[0] *= 2
        end = await call_next()
        seen.append((os.getpid(), end.outcome))
        return end

    async def impatient(run: JobRun, call_next: CallNext) -> End:
        if run.task == "blocked":
            async with asyncio.timeout(0.2):
                return await call_next()
        return await call_next()

    shop.registry.middleware += [impatient, doubling]
    await shop.worker()
    assert len((await shop.ended(await shop.put("large", 21))).result) == 42
    assert seen == [(os.getpid(), Outcome.COMPLETED)]
    shop.registry.middleware.remove(doubling)
    job = await shop.ended(await shop.put("blocked", "/dev/null/no", max_retries=0))
    assert job.error.type in ("TimeoutError", "NotADirectoryError")


@workshop(hard_grace_s=HARD_GRACE_S)
async def test_middleware_that_hangs_before_the_body_is_timed_out(shop: Workshop) -> None:
    equip(shop)

    async def hangs(run: JobRun, call_next: CallNext) -> End:
        await asyncio.get_running_loop().create_future()
        return await call_next()

    shop.registry.middleware.append(hangs)
    await shop.worker(concurrency=1)
    job = await shop.ended(await shop.put("tells", timeout=0.3, max_retries=0), 10)
    assert (job.status, job.reason) == (Status.DEAD_LETTER, "timeout")


@workshop(hard_grace_s=HARD_GRACE_S)
async def test_middleware_that_hangs_after_a_body_that_had_no_process_is_timed_out(shop: Workshop) -> None:
    equip(shop)
    shop.source = BodySource(NEVER_READY, b"")
    begins, reached = asyncio.Event(), asyncio.Event()

    async def hangs(run: JobRun, call_next: CallNext) -> End:
        begins.set()
        await call_next()
        reached.set()
        return await asyncio.get_running_loop().create_future()

    shop.registry.middleware.append(hangs)
    worker = await shop.worker(concurrency=1, grace_s=60)
    job_id = await shop.put("tells", timeout=0.3, max_retries=0)
    await begins.wait()
    stopping = asyncio.create_task(worker.stop())
    async with asyncio.timeout(10):
        await reached.wait()
        await stopping
    job = await shop.job(job_id)
    assert (job.status, job.reason) == (Status.DEAD_LETTER, "timeout")


@workshop()
async def test_for_its_supervisor_a_body_elsewhere_is_never_overdue(shop: Workshop) -> None:
    """Its end may lie unread in the pipe while the loop is blocked."""
    equip(shop)
    worker, reader = shop.make_worker(), LedgerReader(make_ledger_file())
    try:
        worker.write_ledger(reader.fd)
        await worker.start()
        shop.workers.append(worker)
        path, door = str(shop.path.parent / "marks"), shop.path.parent / "door"
        job_id = await shop.put("until_apart", path, str(door), timeout=60)
        await begun(path)
        [entry] = reader.entries()
        assert (entry.id, entry.hard_s) == (job_id, float("inf"))
        door.touch()
        assert (await shop.ended(job_id)).result == "done"
        await worker.stop()
    finally:
        reader.close()


# -- how it is stopped (C16, C18) ------------------------------------------------------------------------
STOPPED = ("blocked", "spins", "waits")
KILLED = ("swallows", "blocks_its_loop", "in_c_for_ever", "ignores_sigterm")


@pytest.mark.parametrize("task", [*STOPPED, *KILLED])
@workshop(hard_grace_s=HARD_GRACE_S)
async def test_a_timeout_gives_the_slot_back_and_bodies_do_not_overlap(shop: Workshop, task: str) -> None:
    equip(shop)

    async def quick() -> float:
        return time.monotonic()

    shop.registry.add(define(quick, "quick", {}))
    worker = await shop.worker(concurrency=1)
    path = str(shop.path.parent / "marks")
    job_id = await shop.put(task, path, **RETRIED)
    await begun(path)
    after_at = (await shop.ended(await shop.put("quick", priority="low"))).result
    job = await shop.ended(job_id)
    assert (job.status, job.reason, job.attempts, job.crashes) == (Status.DEAD_LETTER, "timeout", 3, 0)
    assert await outcomes(shop, job) == [Outcome.TIMEOUT] * 3
    starts = [line for line in told(path) if line[0] == "start"]
    assert [line[4:] for line in starts] == [[], [], []]
    hard_at = float(starts[0][3]) + TIMEOUT_S + HARD_GRACE_S
    assert after_at < hard_at + 1.0
    assert not shop.witness.all(BodyUnstoppable)
    assert worker.running_count == 0
    assert job.error is not None
    stopped = "ran longer than its timeout of 0.4 s"
    if task in STOPPED:
        assert job.error.message == stopped
        assert any(frame.endswith(task) for frame in job.error.frames), job.error.frames
        assert not [frame for frame in job.error.frames if "/worker/" in frame]
        assert len([line for line in told(path) if line[0] == "end"]) == 3
    else:
        assert job.error.message == f"{stopped} and could not be stopped in time"


@workshop(hard_grace_s=600)
async def test_while_a_body_does_not_stop_the_next_process_is_started(shop: Workshop) -> None:
    equip(shop)
    worker = await shop.worker(concurrency=1, grace_s=0)
    path, before = str(shop.path.parent / "marks"), children()
    job_id = await shop.put("swallows", path, timeout=0.2, max_retries=0)
    [pid] = await begun(path)
    assert pid in children()
    async with asyncio.timeout(LIMIT_S):
        while not children() - before - {pid}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert lives(pid)
    assert (await shop.job(job_id)).status is Status.RUNNING
    worker.stop_now()
    await worker.wait()
    job = await shop.job(job_id)
    assert (job.status, job.reason) == (Status.DEAD_LETTER, "timeout")


@pytest.mark.parametrize("task", ["blocked", "waits", "ignores_sigterm", "in_c_for_ever"])
@workshop(hard_grace_s=HARD_GRACE_S)
async def test_a_running_job_can_be_cancelled(shop: Workshop, task: str) -> None:
    """C18 (e)."""
    equip(shop)
    await shop.worker(concurrency=1)
    path = str(shop.path.parent / "marks")
    job_id = await shop.put(task, path)
    [pid] = await begun(path)
    await shop.storage.cancel([job_id])
    job = await shop.ended(job_id, HARD_GRACE_S + 2)
    assert job.status is Status.CANCELLED
    assert lives(pid) == (task in STOPPED)
    assert len((await shop.ended(await shop.put("large", 3))).result) == 3


@workshop()
async def test_a_body_that_wants_sigterm_for_itself_is_asked_by_the_flag(shop: Workshop) -> None:
    equip(shop)
    await shop.worker(concurrency=1)
    path = str(shop.path.parent / "marks")
    job_id = await shop.put("gives_sigterm_back", path)
    [pid] = await begun(path)
    await shop.storage.cancel([job_id])
    job = await shop.ended(job_id)
    assert job.status is Status.CANCELLED
    assert lives(pid)
    os.kill(pid, signal.SIGTERM)  # as a process manager does: of the next body's business no more
    assert (await shop.ended(await shop.put("tells_async"))).result == [pid, True]


@workshop()
async def test_signals_to_the_group_are_for_the_worker_to_answer(shop: Workshop) -> None:
    equip(shop)
    await shop.worker(concurrency=1)
    path, door = str(shop.path.parent / "marks"), shop.path.parent / "door"
    job_id = await shop.put("until_apart", path, str(door))
    [pid] = await begun(path)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    door.touch()
    assert (await shop.ended(job_id)).result == "done"
    os.kill(pid, signal.SIGTERM)
    assert (await shop.ended(await shop.put("tells_async"))).result == [pid, True]


@workshop(hard_grace_s=HARD_GRACE_S)
async def test_a_drain_interrupts_and_then_kills_and_charges_nothing(shop: Workshop) -> None:
    equip(shop)
    worker = await shop.worker(concurrency=3, grace_s=0.3)
    ids = {}
    for task in ("blocked", "swallows", "blocks_its_loop"):
        ids[task] = await shop.put(task, str(shop.path.parent / task), max_retries=0)
        await begun(str(shop.path.parent / task))
    began = time.monotonic()
    await worker.stop()
    assert time.monotonic() - began < soon(0.3 + HARD_GRACE_S + 2)
    assert await worker.wait() is WorkerEnd.STOPPED
    for task, job_id in ids.items():
        job = await shop.job(job_id)
        charged = (job.status, job.attempts, job.crashes, job.interruptions)
        assert charged == (Status.PENDING, 0, 0, 1), task
    assert not shop.witness.all(BodyUnstoppable)


@workshop()
async def test_a_drain_hands_back_at_once_what_still_waits_for_a_process(shop: Workshop) -> None:
    equip(shop)
    shop.source = BodySource(NEVER_READY, b"")
    worker = await shop.worker(concurrency=2, grace_s=60)
    ids = [await shop.put("large", 3, max_retries=0) for _ in range(2)]
    await shop.witness.saw(JobStarted, count=2)
    async with asyncio.timeout(10):
        await worker.stop()
    for job_id in ids:
        job = await shop.job(job_id)
        charged = (job.status, job.attempts, job.crashes, job.interruptions)
        assert charged == (Status.PENDING, 0, 0, 1)


@workshop()
async def test_from_the_start_of_a_drain_on_nothing_is_sent_to_a_process_that_becomes_free(
    shop: Workshop,
) -> None:
    equip(shop)

    async def late(run: JobRun, call_next: CallNext) -> End:
        if run.task == "large":
            at_the_gate.set()
            await gate.wait()
        return await call_next()

    gate, at_the_gate = asyncio.Event(), asyncio.Event()
    shop.registry.middleware.append(late)
    worker = await shop.worker(concurrency=2, grace_s=60)
    path, door = str(shop.path.parent / "marks"), shop.path.parent / "door"
    running = await shop.put("until_apart", path, str(door))
    await begun(path)
    job_id = await shop.put("large", 3, max_retries=0)
    await at_the_gate.wait()
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)  # the drain has begun
    gate.set()
    await shop.until(job_id, lambda job: job.status is Status.PENDING)
    door.touch()
    await stopping
    assert (await shop.job(running)).result == "done"
    job = await shop.job(job_id)
    assert (job.status, job.attempts, job.interruptions) == (Status.PENDING, 0, 1)


@workshop()
async def test_a_process_that_has_nothing_to_close_does_not_hold_up_the_end_of_its_worker(
    shop: Workshop,
) -> None:
    equip(shop)
    shop.registry.resources = ResourceRegistry()
    worker = await shop.worker(concurrency=1)
    pid = (await shop.ended(await shop.put("leaves_a_thread"))).result
    began = time.monotonic()
    await worker.stop()
    assert time.monotonic() - began < soon(1.2)
    assert not lives(pid)


@workshop()
async def test_what_must_not_overlap_is_stopped_when_the_lease_may_be_lost(shop: Workshop) -> None:
    equip(shop)
    lines = Lines(shop)
    await shop.worker(concurrency=2, open_storage=lines.open)
    careful, other = str(shop.path.parent / "careful"), str(shop.path.parent / "other")
    door = shop.path.parent / "door"
    careful_id = await shop.put("careful", careful, max_retries=0)
    other_id = await shop.put("until_apart", other, str(door), max_retries=0)
    await begun(careful)
    await begun(other)
    lines.beats.down = {"beat"}
    await shop.witness.saw(LeaseLapsed)
    await shop.witness.saw(JobEnded, job_id=careful_id, outcome=Outcome.INTERRUPTED)
    door.touch()
    assert (await shop.ended(other_id)).result == "done"
    lines.beats.down = set()
    await begun(careful, 2)
    job = await shop.job(careful_id)
    assert (job.status, job.attempts, job.interruptions, job.crashes) == (Status.RUNNING, 0, 1, 0)


@workshop(hard_grace_s=30)
async def test_a_second_signal_ends_within_a_second(shop: Workshop) -> None:
    equip(shop)
    worker = await shop.worker(concurrency=2, grace_s=600)
    path = str(shop.path.parent / "marks")
    job_id = await shop.put("swallows", path, max_retries=0)
    await begun(path)
    began = time.monotonic()
    worker.stop_now()
    assert await worker.wait() is WorkerEnd.HURRIED
    assert time.monotonic() - began < soon(1.0)
    job = await shop.job(job_id)
    assert (job.status, job.interruptions) == (Status.PENDING, 1)


# -- its deaths (C15) ------------------------------------------------------------------------------------
DEATHS = {
    "SIGKILL": "killed by SIGKILL",
    "0": "exit status 0",
    "7": "exit status 7",
    "segfault": "killed by SIGSEGV",
}


@pytest.mark.parametrize("how", DEATHS)
@workshop()
async def test_a_body_that_ends_its_process_is_charged_a_crash_at_once(shop: Workshop, how: str) -> None:
    equip(shop)
    await shop.worker(concurrency=2)
    path, door = str(shop.path.parent / "marks"), shop.path.parent / "door"
    beside = await shop.put("until_apart", str(shop.path.parent / "beside"), str(door))
    await begun(str(shop.path.parent / "beside"))
    job = await shop.ended(await shop.put("dies", path, how, backoff_base_seconds=0.01))
    assert (job.status, job.attempts, job.crashes) == (Status.DEAD_LETTER, 0, 3)
    assert job.reason == f"worker lost x3: {DEATHS[how]}"
    assert await outcomes(shop, job) == [Outcome.CRASHED] * 3
    assert [line[4:] for line in told(path) if line[0] == "start"] == [[], [], []]
    door.touch()
    job = await shop.ended(beside)
    assert (job.result, job.crashes) == ("done", 0)


@workshop()
async def test_a_body_over_its_memory_limit_is_killed_as_a_crash(shop: Workshop) -> None:
    equip(shop)
    await shop.worker()
    job = await shop.ended(await shop.put("eats", str(shop.path.parent / "marks"), backoff_base_seconds=0.01))
    assert (job.crashes, job.reason) == (3, "worker lost x3: killed: over its memory limit of 200 MB")


@workshop()
async def test_a_job_is_not_charged_for_the_memory_that_others_have_left(shop: Workshop) -> None:
    equip(shop)
    await shop.worker(concurrency=1)
    used = (await shop.ended(await shop.put("tells_async"))).result[0]
    assert (await shop.ended(await shop.put("tells_within"))).result[0] == used
    await shop.ended(await shop.put("grows", 150))
    fresh = (await shop.ended(await shop.put("tells_within"))).result[0]
    assert fresh != used
    assert (await shop.ended(await shop.put("tells_within"))).result[0] == fresh


@workshop()
async def test_a_body_that_closes_what_is_not_its_own_ends_its_process_quietly(
    shop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    equip(shop)
    await shop.worker(concurrency=1)
    path = str(shop.path.parent / "marks")
    job = await shop.ended(await shop.put("closes_everything", path, max_crashes=1))
    assert job.reason == "worker lost x1: exit status 1"
    assert "Traceback" not in capfd.readouterr().err


@workshop()
async def test_deaths_of_idle_processes_are_no_failed_starts(shop: Workshop) -> None:
    equip(shop)
    with tapped() as tap:
        await shop.worker(concurrency=3)
        door = shop.path.parent / "door"
        paths = [str(shop.path.parent / f"marks{n}") for n in range(3)]
        ids = [await shop.put("until_apart", path, str(door)) for path in paths]
        pids = [(await begun(path))[0] for path in paths]
        door.touch()
        for job_id in ids:
            await shop.ended(job_id)
        so_far = len(tap.found("body process started"))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await tap.until("body process gone while it was idle", count=3)
        await tap.until("body process started", count=so_far + 1)  # one is kept ready, without a rest
        job = await shop.ended(await shop.put("tells_async"))
    assert (job.status, job.interruptions) == (Status.COMPLETED, 0)


@workshop()
async def test_without_proc_and_pidfd_bodies_run_and_are_bounded_all_the_same(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on other systems than Linux."""
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(BodyProcess, "rss_bytes", lambda _: None)
    equip(shop)
    await shop.worker(concurrency=1)
    path = str(shop.path.parent / "marks")
    job = await shop.ended(await shop.put("eats", path, max_retries=0))
    assert (job.status, job.crashes, job.error.type) == (Status.DEAD_LETTER, 0, "MemoryError")
    pid = int(told(path)[0][2])
    assert (await shop.ended(await shop.put("large", 5 << 20, max_retries=0))).crashes == 0
    job = await shop.ended(await shop.put("dies", path, "SIGKILL", max_crashes=1))
    assert job.reason == "worker lost x1: killed by SIGKILL"
    assert not lives(pid)
    assert len((await shop.ended(await shop.put("large", 3))).result) == 3


@workshop()
async def test_from_its_second_crash_on_a_job_runs_alone_though_its_task_is_not_isolated(
    shop: Workshop,
) -> None:
    equip(shop)
    path, door = str(shop.path.parent / "marks"), shop.path.parent / "door"
    door.touch()
    job_id = await shop.put("bites", path, str(door), backoff_base_seconds=0.01)
    other = await shop.put("until", str(shop.path.parent / "other"), str(door))
    with shop.back_door() as db:
        db.execute('update "fluxmesh:job" set crashes = 2')
    await shop.worker()
    job = await shop.ended(job_id)
    assert (job.status, job.reason) == (Status.DEAD_LETTER, "worker lost x3: killed by SIGKILL")
    job = await shop.ended(other)
    assert (job.status, job.crashes) == (Status.COMPLETED, 2)
    pids = {line[2] for name in ("marks", "other") for line in told(str(shop.path.parent / name))[:1]}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids


@workshop()
async def test_a_job_of_several_crashes_that_no_process_can_find_runs_in_its_worker(shop: Workshop) -> None:
    @shop.task("here")
    def here() -> int:
        return os.getpid()

    shop.source = source_of_registry(shop.registry)
    job_id = await shop.put("here")
    with shop.back_door() as db:
        db.execute('update "fluxmesh:job" set crashes = 2')
    with tapped() as tap:
        await shop.worker()
        assert (await shop.ended(job_id)).result == os.getpid()
    [event] = tap.found("job of several crashes runs in its worker")
    assert "is defined inside another" in event["why"]


@workshop()
async def test_nor_does_such_a_job_wait_for_ever_where_no_process_starts(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOLATED_BROKEN", "yes")
    equip(shop)
    path, door = str(shop.path.parent / "marks"), shop.path.parent / "door"
    door.touch()
    job_id = await shop.put("until", path, str(door))
    with shop.back_door() as db:
        db.execute('update "fluxmesh:job" set crashes = 2')
    await shop.worker(concurrency=1)
    job = await shop.ended(job_id, 3 * LIMIT_S)
    assert (job.status, job.attempts, job.crashes) == (Status.COMPLETED, 1, 2)
    assert await begun(path) == [os.getpid()]


# -- starting and recycling ------------------------------------------------------------------------------
@workshop()
async def test_a_task_that_no_other_process_can_find_is_refused_at_the_start(shop: Workshop) -> None:
    @shop.task("hidden", **OWN)
    def hidden() -> None: ...

    with pytest.raises(InvalidOption, match=r"'hidden'.*made without a way"):
        shop.make_worker()
    shop.source = source_of_registry(shop.registry)
    with pytest.raises(InvalidOption, match=r"'hidden'.*is defined inside another.*--app"):
        shop.make_worker()


@workshop(recycle_after_jobs=3)
async def test_a_process_is_replaced_after_so_many_jobs(shop: Workshop) -> None:
    equip(shop)
    await shop.worker(concurrency=1)
    pids = [(await shop.ended(await shop.put("tells_async"))).result[0] for _ in range(7)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]
    assert not lives(pids[0])


@workshop(recycle_above_mb=120)
async def test_a_process_is_replaced_when_it_has_grown(shop: Workshop) -> None:
    equip(shop)
    await shop.worker(concurrency=1)
    seen: list[Any] = [(await shop.ended(await shop.put("tells_async"))).result[0] for _ in range(2)]
    assert seen[0] == seen[1]
    await shop.ended(await shop.put("grows", 150))
    assert (await shop.ended(await shop.put("tells_async"))).result[0] != seen[0]


@workshop()
async def test_a_process_that_cannot_start_costs_its_jobs_nothing_and_is_not_tried_without_rest(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOLATED_BROKEN", "yes")
    equip(shop)
    with tapped() as tap:
        worker: Worker = await shop.worker(concurrency=1)
        job_id = await shop.put("large", 3, max_retries=0)
        for count in (1, 2, 3):  # each is waited for as long as a busy machine needs for a process
            await tap.until("body process cannot start", count=count)
        await shop.until(job_id, lambda job: job.interruptions >= 1)
        rests = [event["next_try_s"] for event in tap.found("body process cannot start")]
        assert rests[:3] == [0.0, 0.5, 1.0]
        assert "this module is broken" in tap.found("body process cannot start")[0]["error"]
        monkeypatch.delenv("ISOLATED_BROKEN")
        job = await shop.ended(job_id)
    assert (job.status, job.attempts, job.crashes) == (Status.COMPLETED, 1, 0)
    assert worker.running_count == 0


@workshop()
async def test_while_no_process_starts_other_jobs_have_the_slots(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOLATED_BROKEN", "yes")
    equip(shop)

    async def quick() -> str:
        return "done"

    shop.registry.add(define(quick, "quick", {}))
    with tapped() as tap:
        await shop.worker(concurrency=2)
        ids = [await shop.put("large", 3, max_retries=0, priority="high") for _ in range(4)]
        for rest_s in (0.5, 1.0, 2.0):  # each is waited for as long as a busy machine needs
            await tap.until("body process cannot start", next_try_s=rest_s)
        for job_id in ids:
            await shop.until(job_id, lambda job: job.status is Status.SCHEDULED)
        job = await shop.ended(await shop.put("quick", priority="low"))
        assert job.result == "done"
        last = tap.found("body process cannot start")[-1]
        assert last["next_try_s"] == 2.0  # it was in the rest, and no pause between two of them
        monkeypatch.delenv("ISOLATED_BROKEN")
        for job_id in ids:
            job = await shop.ended(job_id)
            assert (job.status, job.attempts, job.crashes) == (Status.COMPLETED, 1, 0)


@workshop(hard_grace_s=0.2)
async def test_a_job_that_waits_for_its_process_can_be_cancelled(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOLATED_BROKEN", "yes")
    equip(shop)
    with tapped() as tap:
        await shop.worker(concurrency=1)
        job_id = await shop.put("large", 3, max_retries=0)
        for count in (1, 2):
            await tap.until("body process cannot start", count=count)
        await shop.storage.cancel([job_id])
        job = await shop.ended(job_id, 3)  # whether it waits for a process, or has just gone back
    assert job.status is Status.CANCELLED
    ended = [event.outcome for event in shop.witness.all(JobEnded, job_id=job_id)]
    assert ended[-1] in (Outcome.CANCELLED, Outcome.INTERRUPTED)


@workshop()
async def test_a_body_that_meets_its_process_too_late_does_not_begin(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a worker's processes were stopped while the job was in the pipe: it may be another's by now."""
    begin, late = IsolatedCall.begin, list[str]()

    def begun_late(self: IsolatedCall, *given: Any) -> None:
        if not late:
            late.append(self.job.id)
            self.begin_by_s = shop.clock.mono_s() - 1.0
        begin(self, *given)

    monkeypatch.setattr(IsolatedCall, "begin", begun_late)
    equip(shop)
    await shop.worker()
    job = await shop.ended(await shop.put("tells"))
    assert late == [job.id]
    assert (job.status, job.attempts, job.crashes, job.interruptions) == (Status.COMPLETED, 1, 0, 1)
