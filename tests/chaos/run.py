"""One chaos run: a storage, workers, producers and a nemesis; then the history checker judges."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from fluxmesh.clock import Clock, SystemClock
from fluxmesh.config import ENV_PREFIX
from fluxmesh.errors import FluxMeshError
from fluxmesh.job import TERMINAL, Job, Status
from fluxmesh.queue import Queue
from fluxmesh.testing.history import (
    Answer,
    CancelTold,
    Effect,
    History,
    Ownership,
    Sighting,
    Story,
    Told,
    Verdict,
    judge,
)
from tests.cases.audit import Move, audit_of
from tests.cases.starts import thefts
from tests.cases.workers import ROOT, adopt_orphans
from tests.chaos import files, mutants, storages
from tests.chaos.fleet import Watch
from tests.chaos.nemesis import Nemesis
from tests.chaos.plan import DONE, EFFECTS_ENV, KEYS, LEASE_S, PAIR_LIMIT, UNIQUES, Plan
from tests.chaos.producer import Word

PRODUCERS: Final = 2
GRACE_S: Final = 2.0
START_S: Final = 120.0  # for processes to come up on a busy machine
GIVE_UP_S: Final = 35.0  # producers, after the faults have ended
DRAIN_S: Final = 90.0  # a fleet that was broken all the time has a backlog; seconds on a machine of its own
MUTANT_DRAIN_S: Final = 20.0  # what has not ended by then is caught
PROBES_S: Final = 15.0
_LOOK_S: Final = 0.1
_SIGHT_S: Final = 1.0
_PAGE: Final = 1_000
_PAGES_MOST: Final = 200


class Report(Struct, frozen=True):
    """The line of a run."""

    seed: int
    storage: str
    seconds: float
    plan: str
    mutant: str
    workers: int
    jobs: int
    accepted: int
    unknown: int
    refused: int
    starts: int
    reruns: int
    excused_overlaps: int
    rolled_back: int
    replayed: int
    faults: dict[str, int]
    not_done: dict[str, int]
    ended_alone: list[str]  # workers that met no storage when they started
    ends: dict[str, int]
    took_s: float
    phases: dict[str, float]  # seconds of each
    load: float
    violations: list[str]
    folder: str
    jobs_stolen: int = 0  # in a mesh: that one held, and another made its own to hold them
    jobs_taken_held: int = 0  # that one held, and another started

    @property
    def passed(self) -> bool:
        return not self.violations


class Run:
    """`folder` takes everything that tells of the run."""

    def __init__(self, plan: Plan, folder: Path, *, mutant: str = "") -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.plan = plan
        self.mutant = mutant
        self.lease_s = LEASE_S[plan.storage]
        self._rng = random.Random(f"{plan.seed} run")
        self._sightings: dict[tuple[str, int, str, int], Sighting] = {}
        self._over = threading.Event()
        self._told: list[Told] = []
        self._producers: list[subprocess.Popen[bytes]] = []
        self._phases: dict[str, float] = {}
        self._phase_s = time.monotonic()

    def _phase_ends(self, name: str) -> None:
        now_s = time.monotonic()
        self._phases[name] = round(now_s - self._phase_s, 1)
        self._phase_s = now_s

    def carry_out(self) -> Report:
        began_s = time.monotonic()
        adopt_orphans(yes=True)
        with contextlib.ExitStack() as stack:
            self.storage = storages.open_storage_of_run(self.plan.storage, self.folder, self._rng)
            stack.callback(self.storage.close)
            self.watch = Watch()
            stack.callback(self.watch.stop)
            self.nemesis = Nemesis(
                self.plan,
                self.storage,
                self.watch,
                folder=self.folder,
                env=self._env_of_worker,
                lease_s=self.lease_s,
            )
            stack.callback(self.nemesis.kill_all)
            stack.callback(self._kill_producers)
            self.queue = self._open()
            stack.callback(self.queue.close)
            self.queue.counts()  # the storage is there
            self.audit = audit_of(self.storage.door) if self.plan.mesh else None
            self._start_workers()
            self._phase_ends("start")
            self._run_faults()
            self._phase_ends("faults")
            history = self._finish()
            verdict = judge(history)
            if verdict.violations:
                self.storage.keep(self.folder)
        report = self._report(history, verdict, time.monotonic() - began_s)
        (self.folder / "report.json").write_bytes(msgspec.json.encode(report))
        (self.folder / "violations.txt").write_text("\n\n".join(map(str, verdict.violations)))
        return report

    # -- what processes are given ------------------------------------------------------------------------
    def _settings(self) -> dict[str, Any]:
        return {
            "url": self.storage.url,
            "namespace": self.storage.door.namespace,
            "lease_s": self.lease_s,
            "reap_s": 0.5,
            "grace_s": GRACE_S,
            "log_format": "json",
            "log_level": "info",
        }

    def _env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        ours = {ENV_PREFIX + name.upper(): str(value) for name, value in self._settings().items()}
        ours |= {EFFECTS_ENV: str(self.folder / "effects.jsonl"), mutants.MUTANT_ENV: self.mutant}
        return {**kept, **ours, **self.storage.env(), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}

    def _env_of_worker(self, slot: int) -> dict[str, str]:
        return {**self._env(), **self.storage.env_of_worker(slot)}

    def _clock(self) -> Clock:
        if isinstance(self.storage, storages.SqliteStorage):
            return self.storage.clock
        return SystemClock()

    def _open(self) -> Queue:
        settings = self._settings()
        if self.plan.storage == "replicas":
            settings["wait_replicas"] = 1
        return Queue(settings.pop("url"), settings=settings, create=True, clock=self._clock())

    # -- the run -----------------------------------------------------------------------------------------
    def _start_workers(self) -> None:
        for slot in self.nemesis.slots:
            self.nemesis.start_worker(slot)
        wanted = sum(worker.processes or 1 for worker in self.plan.workers)

        def ready() -> bool:
            return sum(1 for row in self.queue.list_workers() if row.status == "ready") >= wanted

        self._wait(ready, START_S, f"{wanted} worker processes are ready")

    def _run_faults(self) -> None:
        plan_file = self.folder / "plan.json"
        plan_file.write_bytes(msgspec.json.encode(self.plan))
        start_ns = time.monotonic_ns() + 1_500_000_000
        give_up_s = self.plan.seconds + GIVE_UP_S
        with (self.folder / "producers.log").open("ab") as log:
            for share in range(PRODUCERS):
                told = self.folder / f"told-{share}.jsonl"
                argv = [sys.executable, "-m", "tests.chaos.producer", plan_file, share, PRODUCERS]
                argv += [start_ns, give_up_s, told]
                self._producers.append(
                    subprocess.Popen(
                        [str(word) for word in argv],
                        env=self._env(),
                        cwd=self.folder,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        operator = threading.Thread(target=self._operate, args=(start_ns,), name="operator", daemon=True)
        witness = threading.Thread(target=self._witness, name="witness", daemon=True)
        operator.start()
        witness.start()
        self.nemesis.run(start_ns / 1e9)

    def _kill_producers(self) -> None:
        for producer in self._producers:
            producer.kill()
            producer.wait(10)

    def _operate(self, start_ns: int) -> None:
        """Replay dead letters, now and then."""
        queue = self._open()
        for at_s in self.plan.replays_at_s:
            if self._over.wait(max(0.0, start_ns / 1e9 + at_s - time.monotonic())):
                break
            with contextlib.suppress(FluxMeshError):
                dead = queue.find("state:dead_letter", limit=20).items
                again = [job.id for job in dead if job.task != "poison"][:3]
                if again:
                    queue.replay(again)
        queue.close()

    def _witness(self) -> None:
        """See which jobs have ended, while the run goes on."""
        queue = self._open()
        while not self._over.wait(_SIGHT_S):
            with contextlib.suppress(FluxMeshError):
                for job in self._records(queue):
                    self._sight(job)
        queue.close()

    def _sight(self, job: Job) -> None:
        if job.status in TERMINAL:
            key = (job.id, job.life, job.status, job.token)
            if key not in self._sightings:
                self._sightings[key] = Sighting(job.id, job.life, job.status, job.token, time.monotonic_ns())

    def _records(self, queue: Queue) -> list[Job]:
        found: dict[str, Job] = {}
        cursor: str | None = None
        for _ in range(_PAGES_MOST):
            page = queue.find("", cursor=cursor, limit=_PAGE)
            found |= {job.id: job for job in page.items}
            cursor = page.next_cursor
            if cursor is None:
                return list(found.values())
        raise AssertionError("more jobs than any run has")

    # -- the end -----------------------------------------------------------------------------------------
    def _finish(self) -> History:
        for producer in self._producers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                producer.wait(GIVE_UP_S + 15)
        self._kill_producers()
        self._phase_ends("producers")
        # The longer it was broken, the more has piled up.
        drain_s = MUTANT_DRAIN_S if self.mutant else max(DRAIN_S, self.plan.seconds)
        leftovers = [] if self._drained(drain_s) else [f"not all jobs have ended in {drain_s:g} s"]
        self._phase_ends("drain")
        self._over.set()
        leftovers += self._probe()
        self.nemesis.kill_all()  # from here on nothing moves
        if self.audit is not None:
            self.audit.stop()
        self._phase_ends("probes")
        leftovers += self.nemesis.leftovers
        leftovers += [
            f"{row.running} jobs of queue {row.queue} count as running"
            for row in self.queue.stats()
            if row.running
        ]
        records = self._records(self.queue)
        for job in records:
            self._sight(job)
        stories = [Story(job, self.queue.get(job.id).history()) for job in records]
        told_counts = dict(self.queue.counts().by_status)
        walked = self.storage.door.places()
        leftovers += self.storage.leftovers()
        self._phase_ends("records")
        return self._history(stories, told_counts, walked, leftovers)

    def _history(
        self,
        stories: list[Story],
        told_counts: dict[Status, int],
        walked: dict[Status, int],
        leftovers: list[str],
    ) -> History:
        self.watch.stop()
        words = [
            word
            for share in range(PRODUCERS)
            for word in files.read(self.folder / f"told-{share}.jsonl", Word)
        ]
        told = {word.told.id: word.told for word in words if word.told is not None}
        told |= {one.id: one for one in self._told}
        cancels: list[CancelTold] = [word.cancel for word in words if word.cancel is not None]
        exact = not self.storage.clock_is_stepped
        history = History(
            effects=files.read(self.folder / "effects.jsonl", Effect),
            stories=stories,
            told=list(told.values()),
            cancels=cancels,
            sightings=list(self._sightings.values()),
            processes=self.watch.events,
            lease_s=self.lease_s,
            beat_s=self.lease_s / 3,
            storage_us=(time.time_ns() - time.monotonic_ns()) // 1_000 if exact else None,
            max_concurrent={"pair": PAIR_LIMIT},
            losses=getattr(self.storage, "lost_ns", []),
            told_counts=told_counts,
            walked_counts=walked,
            leftovers=leftovers,
            owners=self._owners(),
        )
        (self.folder / "history.json").write_bytes(msgspec.json.encode(history))
        (self.folder / "faults.json").write_bytes(msgspec.json.encode(self.nemesis.done))
        return history

    def _moves(self) -> list[Move]:
        return [] if self.audit is None else self.audit.moves()

    def _owners(self) -> list[Ownership]:
        """Whom the storage has given jobs to; each once."""
        given = {Ownership(move.id, move.token, move.worker): None for move in self._moves() if move.epoch}
        return list(given)

    def _drained(self, within_s: float) -> bool:
        """Wait until every job has ended."""

        def ended() -> bool:
            counts = self.queue.counts().by_status
            return all(not n or status in TERMINAL for status, n in counts.items())

        try:
            self._wait(ended, within_s, "every job has ended")
        except AssertionError:
            return False
        return True

    def _probe(self) -> list[str]:
        """Jobs that only run at once if no permit and no unique key was kept by one that has ended."""
        made = []
        for key, limit in KEYS.items():
            options = {"concurrency_key": key, "concurrency_limit": limit}
            made += [self.queue.submit("quick", (0.3,), **options) for _ in range(limit)]
        made += [self.queue.submit("pair", (0.3,)) for _ in range(PAIR_LIMIT)]
        for key in UNIQUES:
            handle = self.queue.submit("quick", (0.0,), unique_key=key)
            if handle.deduplicated:
                return [f"the unique key {key} is held by job {handle.id}"]
            made.append(handle)
        self._told += [Told(one.id, Answer.ACCEPTED, time.monotonic_ns(), DONE) for one in made]
        if self._drained(PROBES_S):
            return []
        return [f"the last jobs of keys and limits have not run in {PROBES_S:g} s"]

    def _wait(self, condition: Callable[[], object], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        error: FluxMeshError | None = None
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except FluxMeshError as caught:
                error = caught
            time.sleep(_LOOK_S)
        raise AssertionError(f"not within {within_s:g} s: {what} ({error})")

    def _report(self, history: History, verdict: Verdict, took_s: float) -> Report:
        answers = Counter(one.answer for one in history.told)
        stolen = thefts(self._moves())
        return Report(
            seed=self.plan.seed,
            storage=self.plan.storage,
            seconds=self.plan.seconds,
            plan=self.plan.digest,
            mutant=self.mutant,
            workers=len(self.plan.workers),
            jobs=len(history.stories),
            accepted=answers[Answer.ACCEPTED],
            unknown=answers[Answer.UNKNOWN],
            refused=answers[Answer.REFUSED],
            starts=verdict.starts,
            reruns=verdict.reruns,
            excused_overlaps=verdict.excused,
            rolled_back=verdict.rolled_back,
            replayed=sum(1 for story in history.stories if story.record.life > 1),
            faults=self.nemesis.counted(),
            not_done=dict(Counter(f"{one.kind}: {one.what}" for one in self.nemesis.done if not one.counts)),
            ended_alone=self.nemesis.ended_alone,
            ends=dict(Counter(story.record.status.value for story in history.stories)),
            took_s=round(took_s, 1),
            phases=self._phases,
            load=round(os.getloadavg()[0], 1),
            violations=[str(one) for one in verdict.violations],
            folder=str(self.folder),
            jobs_stolen=stolen.stolen,
            jobs_taken_held=stolen.taken_held,
        )
