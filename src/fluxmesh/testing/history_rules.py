"""What the records, histories and effects of jobs have to agree about. One rule a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from fluxmesh.job import TERMINAL, Attempt, Job, Outcome, Status
from fluxmesh.storage.values import Cancelled
from fluxmesh.testing.history import Answer, Happening, Violation
from fluxmesh.testing.history_marks import MARK_RULES
from fluxmesh.testing.history_runs import NS, SEEN_LATE_NS, Index, Run

ATTEMPTS: Final = frozenset({Outcome.COMPLETED, Outcome.FAILED, Outcome.TIMEOUT, Outcome.GIVEN_UP})
_WITHOUT_BODY: Final = frozenset({Outcome.UNDECODABLE})
_SAID_BY_BODY: Final = frozenset({Outcome.COMPLETED, Outcome.FAILED, Outcome.SNOOZED, Outcome.GIVEN_UP})
_HISTORY_KEPT: Final = 50
_UNHEARD_NS: Final = 15 * NS  # a question waits so long for a storage that stands still
_STAMP_NS: Final = NS // 100  # stamps of two clocks are compared


def accepted_is_kept(index: Index) -> Iterator[Violation]:
    for told in index.told.values():
        kept = told.id in index.stories or told.id in index.history.pruned
        if told.answer is Answer.ACCEPTED and not kept:
            yield index.violation("accepted job lost", told.id, f"was accepted at {told.at_ns / NS:.3f}")


def refused_is_not_there(index: Index) -> Iterator[Violation]:
    for told in index.told.values():
        if told.answer is Answer.REFUSED and (told.id in index.stories or told.id in index.runs_of):
            what = "its producer was told that nothing was stored"
            yield index.violation("refused job exists", told.id, what)


def everything_ends(index: Index) -> Iterator[Violation]:
    for story in index.history.stories:
        if story.record.status not in TERMINAL:
            yield index.violation("not ended", story.record.id, f"is {story.record.status.value} at the end")


def ends_as_expected(index: Index) -> Iterator[Violation]:
    for record, _, _ in index.jobs():
        told = index.told.get(record.id)
        if told is None or record.status not in TERMINAL or record.status in told.expected:
            continue
        most = record.max_crashes or index.history.max_crashes
        if record.status is Status.DEAD_LETTER and record.crashes >= most:
            continue  # its processes died under it as often as is allowed
        expected = " or ".join(status.value for status in told.expected)
        yield index.violation("unexpected end", record.id, f"{record.status.value} instead of {expected}")


def an_end_stays(index: Index) -> Iterator[Violation]:
    for record, _, _ in index.jobs():
        now = (record.life, record.status, record.token)
        for seen in index.sightings_of.get(record.id, ()):
            if seen.life > record.life or (
                seen.life == record.life and (seen.life, seen.status, seen.token) != now
            ):
                what = (
                    f"was {seen.status.value} (token {seen.token}), is {record.status.value}"
                    f" (token {record.token}) in life {record.life}"
                )
                yield index.violation("end changed", record.id, what)
                break


def nothing_starts_after_the_end(index: Index) -> Iterator[Violation]:
    for record, _, runs in index.jobs():
        if record.status not in TERMINAL:
            continue
        for run in runs:
            if run.life == record.life and run.token > record.token:
                yield index.violation("start after the end", record.id, f"token {run.token}")
                break
            seen_ns = [
                seen.at_ns
                for seen in index.sightings_of.get(record.id, ())
                if seen.life == run.life and run.life
            ]
            if seen_ns and run.start_ns > min(seen_ns):
                yield index.violation("start after the end", record.id, "it had been seen ended")
                break


def a_completed_job_has_a_body_that_returned(index: Index) -> Iterator[Violation]:
    for record, _, runs in index.jobs():
        if record.status is not Status.COMPLETED:
            continue
        own = [run for run in runs if run.token == record.token]
        if not own:
            yield index.violation("completed without a body", record.id, "no body ran under its token")
        elif not own[-1].returned:
            yield index.violation(
                "completed without a return", record.id, "the body under its token did not return"
            )


def a_body_ends_before_its_job(index: Index) -> Iterator[Violation]:
    for record, _, runs in index.jobs():
        if record.status not in TERMINAL:
            continue
        own = next((run for run in runs if run.token == record.token), None)
        if own is None:
            continue
        ended_ns = index.storage_ns(record.completed_at)
        if ended_ns is not None and own.end_ns > ended_ns + _STAMP_NS:
            what = f"its job had ended {(own.end_ns - ended_ns) / NS:.3f} s before"
            yield index.violation("body after its job", record.id, what)
            continue
        for seen in index.sightings_of.get(record.id, ()):
            if seen.token == own.token and own.end_ns > seen.at_ns:
                what = f"its job was seen ended {(own.end_ns - seen.at_ns) / NS:.3f} s before"
                yield index.violation("body after its job", record.id, what)
                break


def counters_tell_the_history(index: Index) -> Iterator[Violation]:
    for record, story, _ in index.jobs():
        if len(story.history) >= _HISTORY_KEPT:
            continue
        life = [attempt for attempt in story.history if attempt.life == record.life]
        tally = Counter(attempt.outcome for attempt in life)
        cancelled = tally[Outcome.CANCELLED]  # whatever ended it charged what it would have charged
        expected = {
            "attempts": sum(tally[outcome] for outcome in ATTEMPTS),
            "crashes": tally[Outcome.CRASHED],
            "snoozes": tally[Outcome.SNOOZED],
            "interruptions": tally[Outcome.INTERRUPTED],
        }
        for name, count in expected.items():
            if not count <= getattr(record, name) <= count + cancelled:
                what = f"{name} is {getattr(record, name)}, its history has {count}"
                yield index.violation("counter", record.id, what)
        if tally[Outcome.COMPLETED] > 1 or (tally[Outcome.COMPLETED] == 1) != (
            record.status is Status.COMPLETED
        ):
            what = f"is {record.status.value}, completed {tally[Outcome.COMPLETED]} times in its history"
            yield index.violation("counter", record.id, what)


def limits_of_charges_hold(index: Index) -> Iterator[Violation]:
    for record, _, _ in index.jobs():
        retries = index.history.max_retries if record.max_retries is None else record.max_retries
        most = record.max_crashes or index.history.max_crashes
        if record.attempts > retries + 1:
            yield index.violation("too many attempts", record.id, f"{record.attempts}, allowed {retries + 1}")
        if record.crashes > most:
            yield index.violation("too many crashes", record.id, f"{record.crashes}, allowed {most}")
        if record.status is Status.DEAD_LETTER:
            reason = record.reason or ""
            if reason.startswith("worker lost") and record.crashes < most:
                yield index.violation("given up too soon", record.id, f"{reason}; {record.crashes} of {most}")
            if reason in ("error", "timeout") and record.attempts < retries + 1:
                yield index.violation("given up too soon", record.id, f"{record.attempts} of {retries + 1}")


def starts_are_told(index: Index) -> Iterator[Violation]:
    """Every start of a body is an entry of the history; and what only a body can say, a body said."""
    for record, story, runs in index.jobs():
        if record.status not in TERMINAL or len(story.history) >= _HISTORY_KEPT:
            continue
        entries = [attempt for attempt in story.history if attempt.outcome not in _WITHOUT_BODY]
        if len(runs) > len(entries):
            outcomes = [attempt.outcome.value for attempt in entries]
            what = f"{len(runs)} bodies started, its history has {len(entries)}: {outcomes}"
            yield index.violation("start not told", record.id, what)
        said = sum(1 for attempt in entries if attempt.outcome in _SAID_BY_BODY)
        ended = sum(1 for run in runs if run.how)
        if said > ended:
            what = f"its history has {said} ends of bodies, {ended} bodies said so"
            yield index.violation("end not seen", record.id, what)


def a_crash_has_a_ground(index: Index) -> Iterator[Violation]:
    """Nobody is charged for the death of a process that did not die, or was not frozen past its lease."""
    for record, story, _ in index.jobs():
        for attempt in story.history:
            if attempt.outcome is Outcome.CRASHED and not _has_ground(index, record.id, attempt):
                what = f"charged at {attempt.ended_at:.3f}, nothing had happened to {attempt.worker_id}"
                yield index.violation("crash without ground", record.id, what)
                break


def _has_ground(index: Index, job_id: str, attempt: Attempt) -> bool:
    low, high = index.storage_ns(attempt.started_at), index.storage_ns(attempt.ended_at)
    low_ns = float("-inf") if low is None else low - SEEN_LATE_NS
    high_ns = float("inf") if high is None else high + SEEN_LATE_NS
    # What it had asked for before it died is done once its storage is back, and then no body begins.
    asked_ns = low_ns - _UNHEARD_NS if _has_no_body(index, job_id, attempt) else low_ns
    for pid in index.pids_of.get(attempt.worker_id, ()):
        for event in index.events_of.get(pid, ()):
            died = event.what in (Happening.KILLED, Happening.GONE)
            if died and asked_ns <= event.at_ns and event.at_ns - SEEN_LATE_NS <= high_ns:
                return True
    return index.lapse_ns(attempt.worker_id, low_ns, high_ns) is not None


def _has_no_body(index: Index, job_id: str, attempt: Attempt) -> bool:
    low, high = index.storage_ns(attempt.started_at), index.storage_ns(attempt.ended_at)
    if low is None or high is None:
        return False
    return not any(
        run.worker == attempt.worker_id and low - _STAMP_NS <= run.start_ns <= high + _STAMP_NS
        for run in index.runs_of.get(job_id, ())
    )


def a_cancel_is_kept(index: Index) -> Iterator[Violation]:
    for cancel in index.history.cancels:
        story = index.stories.get(cancel.id)
        if story is None or cancel.id in index.touched:
            continue
        record = story.record
        if cancel.answer is Cancelled.CANCELLED:
            late = [run for run in index.runs_of.get(cancel.id, ()) if run.start_ns > cancel.at_ns]
            if late:
                yield index.violation("start after a cancel", cancel.id, "it was answered: cancelled")
            elif record.status is not Status.CANCELLED:
                yield index.violation("cancel lost", cancel.id, f"it is {record.status.value}")
        elif cancel.answer is Cancelled.REQUESTED and record.status not in (
            Status.CANCELLED,
            Status.COMPLETED,
        ):
            yield index.violation("cancel lost", cancel.id, f"it is {record.status.value}")


def every_body_has_a_job(index: Index) -> Iterator[Violation]:
    for job_id in index.runs_of:
        if job_id not in index.stories and job_id not in index.history.pruned:
            yield index.violation("body without a job", job_id, "a body ran, and there is no record of it")


def counters_are_true(index: Index) -> Iterator[Violation]:
    told = {status: n for status, n in index.history.told_counts.items() if n}
    walked = {status: n for status, n in index.history.walked_counts.items() if n}
    if told != walked:
        yield Violation("counters", "", f"they tell {_plain(told)}, the storage holds {_plain(walked)}")


def _plain(counts: dict[Status, int]) -> dict[str, int]:
    return {status.value: counts[status] for status in sorted(counts)}


def nothing_is_left(index: Index) -> Iterator[Violation]:
    for words in index.history.leftovers:
        yield Violation("left over", "", words)


RULES: Final[tuple[Callable[[Index], Iterator[Violation]], ...]] = (
    accepted_is_kept,
    refused_is_not_there,
    everything_ends,
    ends_as_expected,
    an_end_stays,
    nothing_starts_after_the_end,
    a_completed_job_has_a_body_that_returned,
    a_body_ends_before_its_job,
    counters_tell_the_history,
    limits_of_charges_hold,
    starts_are_told,
    a_crash_has_a_ground,
    a_cancel_is_kept,
    every_body_has_a_job,
    counters_are_true,
    nothing_is_left,
    *MARK_RULES,
)

__all__ = ["RULES", "Job", "Run"]
