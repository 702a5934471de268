"""Runs of bodies, made of their effects and of what became of their processes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

from fluxmesh.job import Job, Status
from fluxmesh.testing.history import (
    DIES,
    RETURNED,
    Effect,
    Happening,
    History,
    ProcessEvent,
    Sighting,
    Story,
    Told,
    Violation,
    What,
)

NS: Final = 1_000_000_000
NEVER_NS: Final = math.inf
# Between the last look at a process that was there and its end, and between an end and whoever charges it.
SEEN_LATE_NS: Final = NS
# Stops with so little between them count as one: no beat may have come through.
_BETWEEN_STOPS_NS: Final = NS // 2
# An asynchronous replica lacks what was written so shortly before its primary died.
BEFORE_LOSS_NS: Final = NS
AFTER_LOSS_NS: Final = NS // 2


class Run(Struct, frozen=True):
    """One start of one body. `end_ns`: until when it certainly went on; NEVER_NS: it still may. `how`: as it
    said itself, or empty if it said nothing."""

    job: str
    task: str
    token: int
    attempt: int
    life: int
    pid: int
    worker: str
    start_ns: int
    end_ns: float
    how: str = ""

    @property
    def returned(self) -> bool:
        return self.how == RETURNED

    def tell(self) -> str:
        end = "goes on" if self.end_ns == NEVER_NS else f"to {self.end_ns / NS:.3f}"
        how = self.how or "said no end"
        return (
            f"start {self.start_ns / NS:.3f} {end} ({how}) in {self.worker}[{self.pid}], token {self.token}"
        )


class Stop(Struct, frozen=True):
    """A stretch in which a process was stopped."""

    start_ns: int
    end_ns: float


class Index:
    """A history, looked up by job and by process."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.stories: dict[str, Story] = {story.record.id: story for story in history.stories}
        self.told: dict[str, Told] = {one.id: one for one in history.told}
        self.events_of: dict[int, list[ProcessEvent]] = defaultdict(list)
        for event in sorted(history.processes, key=lambda one: one.at_ns):
            self.events_of[event.pid].append(event)
        self.stops_of = {pid: _stops(events) for pid, events in self.events_of.items()}
        self.pids_of: dict[str, set[int]] = defaultdict(set)  # by worker
        for event in history.processes:
            self.pids_of[event.worker].add(event.pid)
        self._dies_of = {one.pid: one.at_ns for one in history.effects if one.how == DIES}
        self.runs: list[Run] = self._paired()
        self.runs_of: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            self.runs_of[run.job].append(run)
            self.pids_of[run.worker].add(run.pid)
        self.sightings_of: dict[str, list[Sighting]] = defaultdict(list)
        for sighting in history.sightings:
            self.sightings_of[sighting.id].append(sighting)
        self.touched = self._touched()

    def _paired(self) -> list[Run]:
        ends: dict[tuple[str, int], Effect] = {}
        for effect in self.history.effects:
            if effect.what is What.END:
                ends[effect.job, effect.token] = effect  # of several the last: until then it went on
        runs = []
        for effect in self.history.effects:
            if effect.what is What.START:
                end = ends.get((effect.job, effect.token))
                over_ns = self._gone_ns(effect) if end is None else end.at_ns
                how = "" if end is None else end.how
                runs.append(
                    Run(
                        effect.job, effect.task, effect.token, effect.attempt, effect.life, effect.pid,
                        effect.worker, effect.at_ns, over_ns, how,
                    )
                )  # fmt: skip
        return sorted(runs, key=lambda run: run.start_ns)

    def _gone_ns(self, start: Effect) -> float:
        """Until when the process of a body that said no end was certainly there."""
        dies_ns = self._dies_of.get(start.pid)
        if dies_ns is not None and dies_ns >= start.at_ns:
            return dies_ns
        for event in self.events_of.get(start.pid, ()):
            late_ns = SEEN_LATE_NS if event.what is Happening.GONE else 0
            if event.at_ns < start.at_ns - late_ns:
                continue  # of an earlier process of that number
            if event.what in (Happening.KILLED, Happening.GONE):
                return max(start.at_ns, event.at_ns)
        return NEVER_NS

    def _touched(self) -> frozenset[str]:
        """Jobs whose last steps before the loss of a primary may be unknown to the next one."""
        found = set()
        for loss_ns in self.history.losses:
            low, high = loss_ns - BEFORE_LOSS_NS, loss_ns + AFTER_LOSS_NS
            found |= {effect.job for effect in self.history.effects if low <= effect.at_ns <= high}
            found |= {cancel.id for cancel in self.history.cancels if low <= cancel.at_ns <= high}
            found |= {seen.id for seen in self.history.sightings if low <= seen.at_ns <= high}
        return frozenset(found)

    def jobs(self) -> Iterator[tuple[Job, Story, list[Run]]]:
        """Every stored job whose steps are all known, with its runs in the order they began."""
        for job_id, story in self.stories.items():
            if job_id not in self.touched:
                yield story.record, story, self.runs_of.get(job_id, [])

    def storage_ns(self, seconds: float | None) -> float | None:
        """An instant of the storage on the machine's clock; None: it cannot be told."""
        if seconds is None or self.history.storage_us is None:
            return None
        return seconds * NS - self.history.storage_us * 1_000

    def owners_of(self, run: Run) -> list[int]:
        """The process whose lease the run was under: its own, or the worker's that had started that one."""
        events = self.events_of.get(run.pid, ())
        if not events or any(event.worker for event in events):
            return [run.pid]
        return [
            pid
            for pid in self.pids_of.get(run.worker, ())
            if any(event.worker for event in self.events_of.get(pid, ()))
            and not any(
                event.what is Happening.GONE and event.at_ns < run.start_ns - SEEN_LATE_NS
                for event in self.events_of[pid]
            )
        ]

    @property
    def patience_ns(self) -> float:
        """The last beat before a stop may have been sent a beat and a bit earlier."""
        return (self.history.lease_s - 1.2 * self.history.beat_s) * NS

    def lapse_ns(self, worker: str, low_ns: float, high_ns: float) -> float | None:
        """The same of any process of a worker."""
        return self.lapse_of(self.pids_of.get(worker, ()), low_ns, high_ns)

    def lapse_of(self, pids: Iterable[int], low_ns: float, high_ns: float) -> float | None:
        """The first instant between these two at which the lease of one of these processes may have lapsed,
        because it had been stopped for so long; None: there is none."""
        found = [
            stop.start_ns + self.patience_ns
            for pid in pids
            for stop in self.stops_of.get(pid, ())
            if stop.start_ns + self.patience_ns <= min(stop.end_ns, high_ns) and stop.end_ns >= low_ns
        ]
        return min(found, default=None)

    def unstopped_ns(self, pids: Iterable[int], from_ns: float, length_ns: float) -> float:
        """When a process has gone on for so long since that instant; what it is stopped does not count."""
        until_ns = from_ns + length_ns
        stops = [stop for pid in pids for stop in self.stops_of.get(pid, ())]
        for stop in sorted(stops, key=lambda one: one.start_ns):
            if stop.end_ns > from_ns and stop.start_ns < until_ns:
                until_ns += stop.end_ns - max(stop.start_ns, from_ns)
        return until_ns

    def violation(self, rule: str, job_id: str, what: str, *evidence: str) -> Violation:
        """With what is known of the job."""
        known = [*evidence]
        story = self.stories.get(job_id)
        if story is not None:
            known.append(_told_of(story))
        known += [run.tell() for run in self.runs_of.get(job_id, [])[-6:]]
        known += [
            f"sighted at {seen.at_ns / NS:.3f} {seen.status.value} life {seen.life} token {seen.token}"
            for seen in self.sightings_of.get(job_id, [])[:2]
        ]
        pids = {run.pid for run in self.runs_of.get(job_id, [])}
        known += [
            f"process {event.worker}[{pid}] {event.what.value} at {event.at_ns / NS:.3f}"
            for pid in sorted(pids)
            for event in self.events_of.get(pid, ())[-6:]
        ]
        return Violation(rule, job_id, what, tuple(known))


def _told_of(story: Story) -> str:
    record = story.record
    outcomes = [f"{one.outcome.value}@{one.worker_id}" for one in story.history[-8:]]
    reason = f" ({record.reason})" if record.status is Status.DEAD_LETTER else ""
    return (
        f"record: {record.task} {record.status.value}{reason} life {record.life} token {record.token}"
        f" attempts {record.attempts} crashes {record.crashes} snoozes {record.snoozes}"
        f" interruptions {record.interruptions}; history: {outcomes}"
    )


def _stops(events: list[ProcessEvent]) -> list[Stop]:
    stops: list[Stop] = []
    since: int | None = None
    for event in events:
        if event.what is Happening.STOPPED:
            since = event.at_ns if since is None else since
        elif since is not None:
            if stops and since - stops[-1].end_ns < _BETWEEN_STOPS_NS:
                stops[-1] = Stop(stops[-1].start_ns, event.at_ns)
            else:
                stops.append(Stop(since, event.at_ns))
            since = None
    if since is not None:
        stops.append(Stop(since, NEVER_NS))
    return stops
