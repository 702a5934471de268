"""A case's laboratory: one storage, the tasks of app.py, worker processes, marks, and the judge."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from fluxmesh.clock import OFFSETS_ENV, Clock, OffsetClock, SystemClock
from fluxmesh.config import ENV_PREFIX, Settings
from fluxmesh.handle import JobHandle
from fluxmesh.job import TERMINAL, Attempt, Job, Outcome
from fluxmesh.queue import Queue
from fluxmesh.storage.registry import open_storage
from fluxmesh.storage.values import Retention, WorkerInfo
from tests.cases.audit import Audit, audited
from tests.cases.backdoor import BackDoor, Opener
from tests.cases.judge import Story, disagreements
from tests.cases.marks import GATE_ENV, MARKS_ENV, Mark, MarkFile
from tests.cases.report import Case
from tests.cases.workers import ROOT, ApiServer, DirectWorker, Group, WorkerGroup
from tests.mesh.sockets import free_port

T = TypeVar("T")
LEASE_S: Final = 3.0
BEAT_S: Final = 1.0
REAP_S: Final = 1.0
GRACE_S: Final = 2.0
START_S: Final = 30.0  # for processes to come up on a busy machine; no case measures it
_LOOK_S: Final = 0.01
_PAGE: Final = 1_000


def wait_until(condition: Callable[[], T], within_s: float, what: str) -> T:
    """The first answer of `condition` that is true, looked for often; AssertionError at the deadline."""
    deadline = time.monotonic() + within_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within_s:g} s: {what} (last: {answer!r})")
        time.sleep(_LOOK_S)


def together(*parts: Callable[[], Any]) -> None:
    """Run independent parts side by side; all end before the first failure is raised."""
    with ThreadPoolExecutor(len(parts)) as pool:
        runs = [pool.submit(part) for part in parts]
    for run in runs:
        run.result()


class Site:
    """Where a test's labs stand: in a folder, each on an empty storage of one kind."""

    def __init__(self, folder: Path, opener: Opener) -> None:
        self.folder = folder
        self._opener = opener

    def lab(self, name: str = "lab", *, namespace: str | None = None, **more: Any) -> Lab:
        """`more`: as Lab has it."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        return Lab(folder, self._opener(folder, namespace), **more)


class Lab:
    """`settings` become FLUXMESH_* of the workers and the settings of the test's own Queue. `own_clock`: a
    clock that `step_clock` steps for all of them at once (a storage that has a clock of its own keeps it)."""

    def __init__(self, folder: Path, door: BackDoor, *, own_clock: bool = False, **settings: Any) -> None:
        self.folder = folder
        self.door = door
        self.settings = {
            "lease_s": LEASE_S,
            "beat_s": BEAT_S,
            "reap_s": REAP_S,
            "grace_s": GRACE_S,
            **settings,
        }
        self.neighbours = [self]
        self.marks = MarkFile(folder / "marks.jsonl")
        self.clock_file = folder / "clock" if own_clock else None
        if self.clock_file is not None:
            self.step_clock(0)
        self.queue = self.open()
        self.groups: list[Group] = []
        self.ids: list[str] = []
        self._seed = ""  # the first of the mesh

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.kill_workers()
        self.queue.close()
        if kind is not None:
            self.tell_logs()

    def tell_logs(self) -> None:
        for log in sorted(self.folder.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text('utf-8', 'replace')[-6_000:]}")

    # -- opening -----------------------------------------------------------------------------------
    @property
    def storage(self) -> str:
        return self.door.storage

    def case(self, name: str, **parameters: Any) -> Case:
        return Case(name, self.storage, **parameters)

    def beside(self, namespace: str) -> Lab:
        """Another namespace of the same storage, with the same file of marks."""
        other = Lab(self.folder, self.door.beside(namespace), **self.settings)
        other.neighbours = self.neighbours
        self.neighbours.append(other)
        return other

    def _clock(self) -> Clock:
        return SystemClock() if self.clock_file is None else OffsetClock(self.clock_file)

    def open(self, **more: Any) -> Queue:
        settings = {**self.settings, "namespace": self.door.namespace, **more}
        return Queue(self.door.url, settings=settings, create=True, clock=self._clock())

    def env(self, **settings: Any) -> dict[str, str]:
        """The environment of a process of this lab; none of the caller's own settings is in it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        chosen = {"url": self.door.url, "namespace": self.door.namespace, **self.settings, **settings}
        ours = {ENV_PREFIX + name.upper(): str(value) for name, value in chosen.items()}
        ours[MARKS_ENV] = str(self.marks.path)
        if self.clock_file is not None:
            ours[OFFSETS_ENV] = str(self.clock_file)
        return {**kept, **ours, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}

    def step_clock(self, seconds: float) -> None:
        """Step the clocks of this lab, its workers' and its Queue's, to so much beside the machine's."""
        assert self.clock_file is not None
        shift_us = round(seconds * 1e6)
        OffsetClock.write(self.clock_file, wall_us=shift_us, boot_us=shift_us)

    # -- workers -----------------------------------------------------------------------------------
    def in_mesh(self, *more: str) -> tuple[str, ...]:
        """Flags of one more worker of this lab's mesh, on ports of its own; the first is the others' seed."""
        port = free_port()
        seeds = ("--mesh-seeds", self._seed) if self._seed else ()
        self._seed = self._seed or f"127.0.0.1:{port}"
        return ("--mesh", "--mesh-port", str(port), *seeds, *more)

    def launch(
        self,
        worker_id: str,
        *flags: str,
        concurrency: int = 4,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> WorkerGroup:
        """Start `fluxmesh worker`, without waiting for it; `environ` is added to its environment."""
        env = {**self.env(**settings), **(environ or {})}
        group = WorkerGroup(worker_id, flags, concurrency=concurrency, env=env, folder=self.folder)
        self.groups.append(group)
        return group

    def worker(self, worker_id: str, *flags: str, concurrency: int = 4, **settings: Any) -> WorkerGroup:
        """Start `fluxmesh worker` and wait until it takes jobs."""
        group = self.launch(worker_id, *flags, concurrency=concurrency, **settings)
        self.await_workers(group)
        return group

    def standby(self, worker_id: str, *flags: str, concurrency: int = 4, **settings: Any) -> WorkerGroup:
        """Start `fluxmesh worker` up to the instant before it opens its storage: it begins at `let_in`,
        however long a process takes to start on a busy machine."""
        gate = self.folder / f"gate-of-{worker_id}"
        env = {**self.env(**settings), GATE_ENV: str(gate)}
        group = WorkerGroup(worker_id, flags, concurrency=concurrency, env=env, folder=self.folder)
        self.groups.append(group)
        reached = gate.with_name(f"{gate.name}.reached")
        wait_until(reached.exists, START_S, f"worker {worker_id} stands by")
        return group

    def let_in(self, group: WorkerGroup) -> None:
        """Let a worker that stands by begin, and wait until it takes jobs."""
        (self.folder / f"gate-of-{group.worker_id}").touch()
        self.await_workers(group)

    def api(self, name: str) -> tuple[ApiServer, str]:
        """Start `fluxmesh server` without a worker; it and its address once it listens."""
        server = ApiServer(name, env=self.env(), folder=self.folder)
        self.groups.append(server)
        url = wait_until(lambda: server.url, START_S, f"{name} listens")
        assert url is not None
        return server, url

    def direct_worker(
        self,
        worker_id: str,
        *queues: str,
        concurrency: int = 4,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> DirectWorker:
        """Start a program that calls run_worker() and wait until it takes jobs."""
        env = {**self.env(**settings), **(environ or {})}
        group = DirectWorker(worker_id, queues, concurrency=concurrency, env=env, folder=self.folder)
        self.groups.append(group)
        self.await_workers(group)
        return group

    def kill_workers(self) -> None:
        for group in self.groups:
            group.kill()

    def await_workers(self, *groups: WorkerGroup | DirectWorker, processes: int = 1) -> None:
        for group in groups:
            wait_until(
                lambda group=group: len(self.members(group)) >= processes,
                START_S,
                f"worker {group.worker_id} is ready",
            )

    def members(self, group: WorkerGroup | DirectWorker) -> list[WorkerInfo]:
        """Rows of the workers that are processes of this group and ready."""
        rows = self.queue.list_workers()
        return [row for row in rows if row.status == "ready" and _group_of(row.pid) == group.pid]

    # -- jobs --------------------------------------------------------------------------------------
    def submit(self, task: str, *args: Any, **options: Any) -> JobHandle[Any]:
        handle = self.queue.submit(task, args, **options)
        if not handle.deduplicated:
            self.ids.append(handle.id)
        return handle

    def submit_many(
        self, task: str, items: Iterable[tuple[Any, ...]], **options: Any
    ) -> list[JobHandle[Any]]:
        handles = self.queue.task_named(task).options(**options).map(list(items))
        self.ids += [handle.id for handle in handles]
        return handles

    def submit_held(self, count: int, note: str, **options: Any) -> tuple[list[JobHandle[Any]], Path]:
        """Jobs whose bodies go on until the file that comes with them is made."""
        door = self.folder / f"{note} may end"
        return self.submit_many("until", [(str(door), note)] * count, **options), door

    def records(self) -> list[Job]:
        """Every stored job, by pages."""
        found: list[Job] = []
        cursor: str | None = None
        while True:
            page = self.queue.find("", cursor=cursor, limit=_PAGE)
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                return found

    def await_ended(self, handles: Iterable[JobHandle[Any]], within_s: float) -> None:
        """Wait until each of these jobs has ended, however it did."""
        left = {handle.id for handle in handles}

        def ended() -> bool:
            for job_id in list(left):
                if self.queue.get(job_id).record.status in TERMINAL:
                    left.discard(job_id)
                else:
                    return False
            return True

        wait_until(ended, within_s, f"{len(left)} jobs have ended")

    def await_starts(
        self, count: int, within_s: float, *, note: str | None = None, job: str | None = None
    ) -> list[Mark]:
        """The first `count` starts of bodies, once there are so many."""
        what = f"{count} bodies have started ({note or job or 'any'})"
        return wait_until(
            lambda: len(starts := self.marks.starts(note=note, job=job)) >= count and starts, within_s, what
        )

    def now(self, handle: JobHandle[Any]) -> Job:
        """The stored record as it is now."""
        return self.queue.get(handle.id).record

    def outcomes(self, handle: JobHandle[Any]) -> list[Outcome]:
        return [attempt.outcome for attempt in handle.history()]

    # -- judging -----------------------------------------------------------------------------------
    @contextmanager
    def audited(self) -> Iterator[Audit]:
        """Every move of every job from now on; to be over before the lab is judged."""
        self.queue.counts()  # the storage is there
        with audited(self.door) as audit:
            yield audit

    def stories(self) -> list[Story]:
        marks: dict[str, list[Mark]] = {}
        for mark in self.marks.all():
            marks.setdefault(mark.job, []).append(mark)
        return [Story(job, self.queue.get(job.id).history(), marks.get(job.id, [])) for job in self.records()]

    def disagreements(self, *, gone: Iterable[str] = ()) -> list[str]:
        """What records, counters and marks do not agree about. Every job that was accepted must be there,
        but those `gone` on purpose."""
        stories = self.stories()
        lost = set(self.ids) - {story.record.id for story in stories} - set(gone)
        return [
            *(f"job {job_id} is lost" for job_id in sorted(lost)),
            *disagreements(stories, self.queue.counts()),
            *self.miscounted(),
        ]

    def miscounted(self) -> list[str]:
        """What the counters tell otherwise than the storage walked by its back door, and what is wrong
        there."""
        told = {status: n for status, n in self.queue.counts().by_status.items() if n}
        walked = self.door.places()
        namespaces = [lab.door.namespace for lab in self.neighbours]
        return [
            *([] if told == walked else [f"the counters tell {told}, the storage holds {walked}"]),
            *self.door.disorder(namespaces),
        ]

    def close(self, case: Case) -> None:
        """Write the case's line, and fail if a bound is broken, somebody disagrees, or something stays of
        what has ended."""
        case.close(self.judged())

    def judged(self, *, gone: Iterable[str] = ()) -> list[str]:
        """What nobody agrees about; else what is left over when all is pruned."""
        return self.disagreements(gone=gone) or self.left_over()

    def left_over(self) -> list[str]:
        """What stays of this namespace when its workers are gone and all its jobs have been kept for as long
        as they had to be. Only of jobs that have all ended."""
        alive = [job for job in self.records() if job.status not in TERMINAL]
        if alive:
            return [f"{len(alive)} jobs have not ended"]
        self.kill_workers()
        asyncio.run(self._prune())
        return [f"left over: {what}" for what in self.door.left_over()]

    def command(self, worker_id: str, command: str | None) -> None:
        """Tell a worker "quiet" or "stop", or take that back; its next beat hears of it."""
        assert asyncio.run(self._command(worker_id, command)), f"no worker {worker_id}"

    async def _command(self, worker_id: str, command: str | None) -> bool:
        settings = Settings(namespace=self.door.namespace)
        storage = await open_storage(self.door.url, settings, create=False, clock=self._clock())
        try:
            return await storage.command(worker_id, command)
        finally:
            await storage.close()

    async def _prune(self) -> None:
        settings = Settings(namespace=self.door.namespace)
        storage = await open_storage(self.door.url, settings, create=False, clock=self._clock())
        try:
            at_once = Retention(0.0, 0.0, 0.0, worker_ttl_s=0.0)
            # Workers that were killed are kept for a lease after their last beat.
            deadline = time.monotonic() + self.settings["lease_s"] + START_S
            while self.door.left_over() and time.monotonic() < deadline:
                await storage.prune(at_once, _PAGE)
                await asyncio.sleep(_LOOK_S)
        finally:
            await storage.close()


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def crashed(history: list[Attempt]) -> list[Attempt]:
    return [attempt for attempt in history if attempt.outcome is Outcome.CRASHED]
