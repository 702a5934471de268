"""What the marks of bodies have to agree about: with each other, with the entries of the history, with the
times and keys of the records. One rule a function."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from fluxmesh.job import TERMINAL, Attempt, Job, Outcome, Status
from fluxmesh.storage.values import Cancelled
from fluxmesh.testing.history import (
    DIES,
    RETURNED,
    CancelTold,
    Effect,
    Happening,
    Story,
    Violation,
    What,
)
from fluxmesh.testing.history_runs import NS, SEEN_LATE_NS, Index, Run

_STAMP_S: Final = 0.05  # stamps of one storage, and of two clocks, are compared
# An interruption that strikes between a body's mark and its end makes it write its mark once more.
_AGAIN_NS: Final = NS
# A process that was told to end gives its bodies back, and is gone so much later at the latest.
_LEAVES_NS: Final = 15 * NS
_NEVER_OF_A_RETURN: Final = frozenset({Outcome.FAILED, Outcome.SNOOZED, Outcome.UNDECODABLE})
_RAISED: Final = frozenset({Outcome.FAILED, Outcome.SNOOZED})
_ENDS_A_LIFE: Final = frozenset({Outcome.COMPLETED, Outcome.CANCELLED, Outcome.GIVEN_UP, Outcome.UNDECODABLE})
_HISTORY_KEPT: Final = 50


# -- marks among each other ------------------------------------------------------------------------------
def a_start_has_one_end(index: Index) -> Iterator[Violation]:
    """And that is written by the process that wrote the start."""
    starts: dict[tuple[str, int], Effect] = {}
    ends: dict[tuple[str, int], list[Effect]] = defaultdict(list)
    for effect in index.history.effects:
        key = (effect.job, effect.token)
        if effect.what is What.END:
            ends[key].append(effect)
        else:
            starts.setdefault(key, effect)
    for key, found in ends.items():
        start, first = starts.get(key), found[0]
        if start is None:
            yield index.violation("end without a start", key[0], f"token {key[1]}")
            continue
        if any(end.pid != start.pid for end in found):
            pids = sorted({end.pid for end in found})
            what = f"token {key[1]} began in process {start.pid}, its end was written in {pids}"
            yield index.violation("end in another process", key[0], what)
        if any(not _is_written_again(index, first, end) for end in found[1:]):
            told = [f"{end.how} at {end.at_ns / NS:.3f}" for end in found]
            yield index.violation("two ends", key[0], f"of token {key[1]}: {told}")


def _is_written_again(index: Index, first: Effect, end: Effect) -> bool:
    if (end.how, end.pid) != (first.how, first.pid):
        return False
    return end.at_ns <= index.unstopped_ns([first.pid], first.at_ns, _AGAIN_NS)


def a_body_is_of_its_task(index: Index) -> Iterator[Violation]:
    for effect in index.history.effects:
        story = index.stories.get(effect.job)
        if story is not None and story.record.task != effect.task:
            what = f"a body of {effect.task} ran, it is of {story.record.task}"
            yield index.violation("wrong task", effect.job, what)


def a_body_is_of_its_owner(index: Index) -> Iterator[Violation]:
    """A token is one worker's, and only that one starts a body under it: what was stolen is not the victim's
    any more, and what was not is not yet the thief's."""
    owner: dict[tuple[str, int], str] = {}
    for given in index.history.owners:
        first = owner.setdefault((given.id, given.token), given.worker)
        if first != given.worker:
            what = f"token {given.token} was given to {first} and to {given.worker}"
            yield index.violation("token of two owners", given.id, what)
    for effect in index.history.effects:
        known = owner.get((effect.job, effect.token))
        if effect.what is What.START and known is not None and known != effect.worker:
            what = f"{effect.worker} started it under token {effect.token}, which is {known}'s"
            yield index.violation("body under another's token", effect.job, what)


# -- jobs ------------------------------------------------------------------------------------------------
def a_job_is_stored_once(index: Index) -> Iterator[Violation]:
    for job_id, count in Counter(story.record.id for story in index.history.stories).items():
        if count > 1:
            yield index.violation("stored twice", job_id, f"{count} records of it")


def every_job_was_submitted(index: Index) -> Iterator[Violation]:
    most = index.history.untold_most
    untold = sorted(job_id for job_id in index.stories if job_id not in index.told)
    if most is not None and len(untold) > most:
        for job_id in untold[:6]:
            what = f"{len(untold)} jobs that no producer told of, {most} may be there"
            yield index.violation("job from nowhere", job_id, what)


# -- marks and the history -------------------------------------------------------------------------------
def a_return_is_completed(index: Index) -> Iterator[Violation]:
    """What a body that returned is told to have ended with, if that can be told. Its process may have died
    or been frozen before the end was stored, its time may have been over, and an interruption may strike
    between its mark and its end; but nobody may say that it failed or snoozed."""
    for record, story, runs in index.jobs():
        if len(story.history) >= _HISTORY_KEPT:
            continue
        raised = sum(1 for run in runs if run.how not in ("", RETURNED, DIES))
        told = sum(1 for attempt in story.history if attempt.outcome in _RAISED)
        if told > raised and any(run.returned for run in runs):
            what = f"its history has {told} failures and snoozes, {raised} bodies raised something"
            yield index.violation("return not kept", record.id, what)
            continue
        for run in runs:
            entry = _entry_of(index, story, runs, run) if run.returned else None
            if entry is not None and not _may_follow_a_return(index, record, run, entry):
                what = f"token {run.token} returned, its history says {entry.outcome.value}"
                yield index.violation("return not kept", record.id, what)
                break


def _entries_of(index: Index, story: Story, run: Run) -> list[Attempt]:
    """The entries that may tell of this run."""
    found = []
    for entry in story.history:
        if (entry.life, entry.worker_id) != (run.life, run.worker):
            continue
        low, high = index.storage_ns(entry.started_at), index.storage_ns(entry.ended_at)
        early = low is not None and run.start_ns < low - _STAMP_S * NS
        # A body that was on its way when its process was stopped begins after its end was told.
        late = high is not None and run.start_ns > high + _STAMP_S * NS
        if not early and not late:
            found.append(entry)
    return found


def _entry_of(index: Index, story: Story, runs: list[Run], run: Run) -> Attempt | None:
    """The entry that tells of this run; None: that cannot be told."""
    entries = _entries_of(index, story, run)
    if len(entries) != 1:
        return None
    others = [other for other in runs if other is not run and entries[0] in _entries_of(index, story, other)]
    return None if others else entries[0]


def _may_follow_a_return(index: Index, record: Job, run: Run, entry: Attempt) -> bool:
    if entry.outcome in _NEVER_OF_A_RETURN:
        return False
    if entry.outcome is Outcome.TIMEOUT and _was_over_time(index, record, run, entry):
        return True
    if entry.outcome in (Outcome.TIMEOUT, Outcome.INTERRUPTED):
        return _has_left(index, run, entry)
    return True


def _was_over_time(index: Index, record: Job, run: Run, entry: Attempt) -> bool:
    timeout_s = record.timeout_seconds or index.history.timeout_s
    began_ns = index.storage_ns(entry.started_at)
    began_ns = run.start_ns - NS if began_ns is None else min(began_ns, run.start_ns)
    return run.end_ns - began_ns >= (timeout_s - _STAMP_S) * NS


def _has_left(index: Index, run: Run, entry: Attempt) -> bool:
    """The process that owned it has died since, was ending, or was frozen for longer than its lease."""
    over_ns = index.storage_ns(entry.ended_at)
    high_ns = math.inf if over_ns is None else max(over_ns, run.end_ns) + _LEAVES_NS
    owners = index.owners_of(run)
    for pid in owners:
        for event in index.events_of.get(pid, ()):
            died = event.what in (Happening.KILLED, Happening.GONE)
            if died and run.start_ns - SEEN_LATE_NS <= event.at_ns <= high_ns:
                return True
    return index.lapse_of(owners, run.start_ns, high_ns) is not None


def an_end_of_a_life_is_its_last(index: Index) -> Iterator[Violation]:
    """Also the record says so."""
    for record, story, _ in index.jobs():
        for before, after in itertools.pairwise(story.history):
            if before.outcome in _ENDS_A_LIFE and after.life == before.life:
                what = f"{before.outcome.value} was followed by {after.outcome.value} in life {after.life}"
                yield index.violation("went on after its end", record.id, what)
                break
        last = story.history[-1] if story.history else None
        if last is None or last.life != record.life or last.outcome is not Outcome.CANCELLED:
            continue
        if record.status is not Status.CANCELLED:
            what = f"is {record.status.value}, its history ends with cancelled"
            yield index.violation("went on after its end", record.id, what)


def a_cancel_stops_all_but_its_run(index: Index) -> Iterator[Violation]:
    """Once a cancel was taken no other body of that life begins than the one that was running then."""
    for cancel in index.history.cancels:
        story = index.stories.get(cancel.id)
        if cancel.answer is not Cancelled.REQUESTED or story is None or cancel.id in index.touched:
            continue
        runs = index.runs_of.get(cancel.id, [])
        before = [run for run in runs if run.start_ns <= cancel.at_ns]
        late = [run for run in runs if run.start_ns > cancel.at_ns]
        life = before[-1].life if before else min((run.life for run in late), default=0)
        of_life = [run for run in late if run.life == life]
        allowed = 1 if of_life and _was_running(index, story, before, of_life[0], cancel) else 0
        if len(of_life) > allowed:
            what = f"requested, answered at {cancel.at_ns / NS:.3f}"
            yield index.violation("start after a cancel", cancel.id, what)


def _was_running(index: Index, story: Story, before: list[Run], late: Run, cancel: CancelTold) -> bool:
    """Its job was taken for it when the cancel came, though its body had not begun."""
    entries = _entries_of(index, story, late)
    began = [index.storage_ns(entry.started_at) for entry in entries]
    if entries and None not in began:
        return any(ns is not None and ns <= cancel.at_ns + _STAMP_S * NS for ns in began)
    under_way = [run for run in before if run.life == late.life and run.end_ns > cancel.at_ns]
    return all(
        index.lapse_of(index.owners_of(run), run.start_ns, cancel.at_ns) is not None for run in under_way
    )


# -- times and keys --------------------------------------------------------------------------------------
def everything_starts_in_its_time(index: Index) -> Iterator[Violation]:
    """Not before it is due, and for the first time not after it has expired. Only of first lives: a replay
    waits for no time, and `scheduled_at` is of the last start."""
    if index.history.storage_us is None:
        return
    for record, story, runs in index.jobs():
        began = [entry.started_at for entry in story.history if entry.started_at is not None]
        if record.life != 1 or not began or len(story.history) >= _HISTORY_KEPT:
            continue
        # Others may have been cancelled while they waited for their next start.
        if record.scheduled_at is not None and record.status in (Status.COMPLETED, Status.DEAD_LETTER):
            early_s = record.scheduled_at - min([began[-1], *_last_start_s(index, record, runs)])
            if early_s > _STAMP_S:
                what = f"{early_s:.3f} s before it was due"
                yield index.violation("started too soon", record.id, what)
        if record.expires_at is not None and began[0] > record.expires_at + _STAMP_S:
            late_s = began[0] - record.expires_at
            yield index.violation("started too late", record.id, f"{late_s:.3f} s after it had expired")


def _last_start_s(index: Index, record: Job, runs: list[Run]) -> list[float]:
    """When the body of its last start began, by the storage's clock; empty: none did."""
    zero_ns = index.storage_ns(0.0) or 0.0
    return [(run.start_ns - zero_ns) / NS for run in runs if run.token == record.token][-1:]


def a_unique_key_is_of_one_job(index: Index) -> Iterator[Violation]:
    """At any time one unfinished job of a queue has it."""
    spans: dict[tuple[str, str], list[tuple[float, float, str]]] = defaultdict(list)
    for record, _, runs in index.jobs():
        if record.unique_key is not None:
            low, high = _unfinished(index, record, runs)
            if low < high:
                spans[record.queue, record.unique_key].append((low, high, record.id))
    for (_, name), found in spans.items():
        until, holder = -math.inf, ""
        for low, high, job_id in sorted(found):
            if low < until - _STAMP_S * NS:
                what = f"{name!r} was held by job {holder} for {(until - low) / NS:.3f} s more"
                yield index.violation("unique key held twice", job_id, what)
            if high > until:
                until, holder = high, job_id


def _unfinished(index: Index, record: Job, runs: list[Run]) -> tuple[float, float]:
    """When it certainly had not ended, in the life that its record tells of; empty if that is not known."""
    own = [run for run in runs if run.life == record.life]
    began = index.storage_ns(record.created_at) if record.life == 1 else None
    if began is None:
        began = own[0].start_ns if own else math.inf
    if record.status not in TERMINAL:
        return began, math.inf
    over = index.storage_ns(record.completed_at)
    if over is None:
        over = max((run.start_ns for run in own), default=-math.inf)
        over = max([over, *(run.end_ns for run in own if run.returned and run.token == record.token)])
    return began, over


MARK_RULES: Final[tuple[Callable[[Index], Iterator[Violation]], ...]] = (
    a_start_has_one_end,
    a_body_is_of_its_task,
    a_body_is_of_its_owner,
    a_job_is_stored_once,
    every_job_was_submitted,
    a_return_is_completed,
    an_end_of_a_life_is_its_last,
    a_cancel_stops_all_but_its_run,
    everything_starts_in_its_time,
    a_unique_key_is_of_one_job,
)
