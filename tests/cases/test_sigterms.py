"""Many SIGTERMs under load: each comes at a random moment of a worker at full speed, on a queue that never
empties, half of whose slots run bodies in one blocking call. Nothing is stranded, nothing runs beside itself.

The moments, the number of signals and the lengths of the bodies are drawn by a seed. The full form has 200.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Final

import msgspec
import pytest

from fluxmesh.config import Settings
from fluxmesh.job import TERMINAL, Attempt, Job, Outcome
from fluxmesh.storage.registry import open_storage
from tests.cases.harness import START_S, Lab, Site, wait_until
from tests.cases.judge import Story, disagreements
from tests.cases.marks import Mark
from tests.cases.report import FULL, Case
from tests.cases.test_outages import let_pass
from tests.cases.test_redis_cases import own_server
from tests.cases.workers import WorkerGroup

SEED: Final = int(os.environ.get("FLUXMESH_TEST_SEED", "1"))
GRACE_S: Final = 1.0
HARD_GRACE_S: Final = 1.0
EXIT_S: Final = GRACE_S + HARD_GRACE_S + 2.0
HURRIED_S: Final = 1.0
SIGNALLED: Final = 200 if FULL else 10
BATCH: Final = 10  # workers of one lab: so that each test stays short
SIDE_BY_SIDE: Final = 3
AWAY: Final = 10 if FULL else 1
AWAY_BATCH: Final = 2  # one signal, and two
BLOCKED: Final = 4  # slots for bodies in a call; as many again for short ones
STOCK: Final = 400
FREED_S: Final = 3.0  # until somebody has taken back what the dead one owned, its death being proven
FREED_BY_LEASE_S: Final = 12.0


class Ends:
    """What the workers' ends came to."""

    def __init__(self) -> None:
        self.drained_s: list[float] = []
        self.hurried_s: list[float] = []
        self.freed_s: list[float] = []
        self.codes: Counter[tuple[int, int]] = Counter()  # (signals, exit code)
        self.claims_on_their_way = 0
        self.bodies = 0

    def note(self, group: WorkerGroup, signals: int, code: int, took_s: float) -> None:
        (self.drained_s if signals == 1 else self.hurried_s).append(took_s)
        self.codes[signals, code] += 1
        log = group.log.read_text("utf-8")
        self.claims_on_their_way += log.count("why=draining")

    def into(self, case: Case) -> None:
        if self.drained_s:
            case.at_most("exit_after_one_signal_worst_s", max(self.drained_s), EXIT_S)
            case.at_most("exit_after_one_signal_median_s", statistics.median(self.drained_s), EXIT_S)
        if self.hurried_s:
            case.at_most("exit_after_a_second_signal_worst_s", max(self.hurried_s), HURRIED_S)
        good = {(1, 0): len(self.drained_s), (2, 1): len(self.hurried_s)}
        case.equal("exit_codes", _told(self.codes), _told(Counter(good)))


def _told(codes: Counter[tuple[int, int]]) -> dict[str, int]:
    return {f"{signals} signals: {code}": n for (signals, code), n in sorted(codes.items()) if n}


def launched(lab: Lab, worker_id: str) -> WorkerGroup:
    """A worker with room for BLOCKED bodies in a call and as many short ones, at work."""
    group = lab.launch(worker_id, "--reserve", f"default={BLOCKED}", concurrency=2 * BLOCKED)
    wait_until(lambda: "worker ready" in group.log.read_text("utf-8"), START_S, f"{worker_id} takes jobs")
    return group


def told_to_end(group: WorkerGroup, signals: int, rng: random.Random, ends: Ends) -> None:
    """One signal or two, at moments that nobody has chosen."""
    let_pass(rng.uniform(0.0, 1.2))
    group.tell()
    told_at = time.monotonic()
    if signals == 2:
        # The kernel makes one signal of two that find the process not yet awake.
        wait_until(lambda: "worker stops" in group.log.read_text("utf-8"), EXIT_S, "the first is heard")
        let_pass(rng.uniform(0.05, GRACE_S))
    if signals == 2 and group.has_ended():
        signals = 1  # it had nothing left to wait for
    elif signals == 2:
        group.tell()
        told_at = time.monotonic()
    code = group.wait(30)
    ends.note(group, signals, code, time.monotonic() - told_at)


def owned_by(lab: Lab, worker_id: str) -> list[Job]:
    return lab.queue.find(f"worker:{worker_id} state:running").items


def await_freed(lab: Lab, group: WorkerGroup, ends: Ends, within_s: float) -> None:
    """Until nothing is owned by a worker that is gone."""
    gone_at = time.monotonic()
    wait_until(lambda: not owned_by(lab, group.worker_id), within_s, f"{group.worker_id} owns nothing")
    ends.freed_s.append(time.monotonic() - gone_at)


# -- the queue that never empties ------------------------------------------------------------------------
def stock_up(lab: Lab, rng: random.Random, stock: int = STOCK) -> None:
    """Short jobs, and in the tier above them bodies in one call of 3 to 5 s, which nothing can stop."""
    queued = lab.queue.counts().queued
    if queued.get(("default", 2), 0) < stock:
        lab.submit_many("tick", [("short",)] * stock)
    if queued.get(("default", 0), 0) < 2 * BLOCKED:
        naps = [(rng.uniform(3.0, 5.0), "blocked") for _ in range(2 * BLOCKED)]
        lab.submit_many("nap", naps, priority="critical")


@contextmanager
def never_empty(lab: Lab, rng: random.Random) -> Iterator[None]:
    over = threading.Event()

    def feed() -> None:
        while not over.wait(0.02):
            stock_up(lab, rng)

    stock_up(lab, rng)
    with ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(feed)
        try:
            yield
        finally:
            over.set()
            feeding.result(30)


# -- judging ---------------------------------------------------------------------------------------------
def finish(lab: Lab) -> None:
    """Another worker finishes everything."""
    lab.worker("last", concurrency=4 * BLOCKED)

    def all_ended() -> bool:
        counts = lab.queue.counts().by_status
        return not sum(n for status, n in counts.items() if status not in TERMINAL)

    wait_until(all_ended, 120, "everything has ended")


def judged(lab: Lab, *, answers_lost: bool = False) -> tuple[list[str], int]:
    """Every story, as the judge of all cases has it; and how many there are. `answers_lost`: ends may have
    reached nobody, and so may claims."""
    records = lab.records()
    histories = asyncio.run(histories_of(lab, records))
    marks: dict[str, list[Mark]] = {}
    for mark in lab.marks.all():
        marks.setdefault(mark.job, []).append(mark)
    stories = [
        Story(record, history, marks.get(record.id, []))
        for record, history in zip(records, histories, strict=True)
    ]
    charged = [] if answers_lost else [record.id for record in records if record.crashes]
    stories = [forgiven(story) for story in stories]
    lost = set(lab.ids) - {record.id for record in records}
    found = [f"job {job_id} is lost" for job_id in sorted(lost)]
    found += disagreements(stories, lab.queue.counts())
    found += [f"{len(charged)} jobs are charged a crash, {charged[0]} for one"] if charged else []
    return [*found, *lab.miscounted()], len(records)


def forgiven(story: Story) -> Story:
    """Without what was charged for claims whose answer came too late, to a process that was gone by then, or
    had left: no body began."""
    starts = sum(mark.what == "start" for mark in story.marks)
    surplus = max(0, len(story.history) - starts)
    history: list[Attempt] = []
    dropped: Counter[Outcome] = Counter()
    for attempt in story.history:
        if surplus and attempt.outcome in (Outcome.CRASHED, Outcome.INTERRUPTED):
            surplus -= 1
            dropped[attempt.outcome] += 1
        else:
            history.append(attempt)
    record = msgspec.structs.replace(
        story.record,
        crashes=story.record.crashes - dropped[Outcome.CRASHED],
        interruptions=story.record.interruptions - dropped[Outcome.INTERRUPTED],
    )
    return Story(record, history, story.marks)


async def histories_of(lab: Lab, records: Sequence[Job]) -> list[list[Attempt]]:
    settings = Settings(namespace=lab.door.namespace)
    storage = await open_storage(lab.door.url, settings, create=False, clock=lab._clock())
    try:
        found: list[list[Attempt]] = []
        for start in range(0, len(records), 200):
            some = records[start : start + 200]
            histories = await asyncio.gather(*(storage.history(record.id) for record in some))
            found += [history or [] for history in histories]
        return found
    finally:
        await storage.close()


# -- the cases -------------------------------------------------------------------------------------------
def one_batch(site: Site, number: int, ends: Ends) -> tuple[list[str], int]:
    with site.lab(f"batch-{number}", grace_s=GRACE_S, hard_grace_s=HARD_GRACE_S) as lab:
        rng = random.Random(f"{SEED} {number}")
        seeds = [rng.random() for _ in range(BATCH)]

        def one(index: int) -> None:
            drawn = random.Random(seeds[index])
            group = launched(lab, f"w{index}")
            told_to_end(group, drawn.choice((1, 1, 2)), drawn, ends)
            await_freed(lab, group, ends, FREED_S)
            assert not group.kill(), "a process of the worker is left"

        with never_empty(lab, rng), ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            for run in [pool.submit(one, index) for index in range(BATCH)]:
                run.result()
        finish(lab)
        ends.bodies += len(lab.marks.starts())
        return judged(lab)


@pytest.mark.parametrize("number", range(SIGNALLED // BATCH))
def test_sigterms_under_load_strand_nothing_and_run_nothing_twice_at_once(
    site: Site, storage: str, number: int
) -> None:
    case = Case("sigterm", storage, signalled=BATCH, grace_s=GRACE_S, seed=f"{SEED} {number}")
    ends = Ends()
    found, jobs = one_batch(site, number, ends)
    ends.into(case)
    case.at_most("owned_by_the_dead_worst_s", max(ends.freed_s), FREED_S)
    case.equal("workers_ended", sum(ends.codes.values()), BATCH)
    case.tell("claims_on_their_way_at_the_signal", ends.claims_on_their_way)
    case.tell("jobs", jobs)
    case.tell("bodies_started", ends.bodies)
    case.equal("stranded_or_overlapping", len(found), 0)
    case.close(found)


def away_once(lab: Lab, index: int, rng: random.Random, ends: Ends) -> None:
    stock_up(lab, rng, 3_000)
    group = launched(lab, f"away{index}")
    let_pass(rng.uniform(0.2, 1.0))
    with lab.door.out_of_reach():
        let_pass(rng.uniform(0.0, 1.0))
        told_to_end(group, 1 + index % 2, rng, ends)
    await_freed(lab, group, ends, FREED_BY_LEASE_S)
    assert not group.kill(), "a process of the worker is left"


def away(site: Site, storage: str, number: int) -> None:
    seed = f"{SEED} away {number}"
    case = Case(
        "sigterm", storage, signalled=AWAY_BATCH, grace_s=GRACE_S, seed=seed, storage_is="out of reach"
    )
    ends, rng = Ends(), random.Random(seed)
    with site.lab("away", grace_s=GRACE_S, hard_grace_s=HARD_GRACE_S) as lab:
        lab.worker("looks-on", "--queues", "other")
        for index in range(AWAY_BATCH):
            away_once(lab, index, rng, ends)
        finish(lab)
        found, _ = judged(lab, answers_lost=True)
    ends.into(case)
    case.at_most("owned_by_the_dead_worst_s", max(ends.freed_s), FREED_BY_LEASE_S)
    case.close(found)


@pytest.mark.slow
def test_a_program_that_runs_a_worker_ends_in_time_while_the_storage_is_away(
    site: Site, storage: str
) -> None:
    """Nobody is there to kill it when its time is over."""
    with own_server(site) if storage == "redis" else nullcontext((None, site)) as (_, own):
        case = Case("sigterm", storage, signalled=1, grace_s=GRACE_S, program="run_worker()", seed=SEED)
        with own.lab("direct", grace_s=GRACE_S, hard_grace_s=HARD_GRACE_S) as lab:
            stock_up(lab, random.Random(SEED))
            group = lab.direct_worker("direct", concurrency=2 * BLOCKED)
            lab.await_starts(BLOCKED, 10, note="blocked")
            with lab.door.out_of_reach():
                group.tell()
                told_at = time.monotonic()
                case.equal("exit_code", group.wait(30), 0)
                case.at_most("exit_after_signal_s", time.monotonic() - told_at, EXIT_S)
            finish(lab)
            found, _ = judged(lab, answers_lost=True)
        case.close(found)


@pytest.mark.parametrize("number", range(AWAY))
@pytest.mark.only("sqlite")
def test_sigterms_while_the_database_is_locked(site: Site, storage: str, number: int) -> None:
    away(site, storage, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(AWAY))
@pytest.mark.only("redis")
def test_sigterms_while_the_server_is_silent(site: Site, storage: str, number: int) -> None:
    with own_server(site) as (_, own):
        away(own, storage, number)
