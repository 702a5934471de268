"""The history checker: what bodies wrote themselves, against what storage tells of the same jobs.

Pure. Answers with every disagreement, in words; none is the verdict that a case needs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from fluxmesh.job import Attempt, Job, Outcome, Status
from fluxmesh.storage.values import Counts
from tests.cases.marks import Mark

ATTEMPTS = frozenset({Outcome.COMPLETED, Outcome.FAILED, Outcome.TIMEOUT, Outcome.GIVEN_UP})
WITHOUT_BODY = frozenset({Outcome.UNDECODABLE})


class Story(Struct, frozen=True):
    """One job: its record, its history and the marks of its bodies, in the order they were written."""

    record: Job
    history: Sequence[Attempt]
    marks: Sequence[Mark]


def disagreements(stories: Sequence[Story], counts: Counts) -> list[str]:
    found = [f"{_name(story)}: {what}" for story in stories for what in judged(story)]
    walked = Counter(story.record.status for story in stories)
    told = {status: n for status, n in counts.by_status.items() if n}
    if told != dict(walked):
        found.append(f"the counters tell {told}, the records {dict(walked)}")
    queued = sum(counts.queued.values())
    waiting = walked[Status.PENDING] + walked[Status.CLAIMED]
    if queued != waiting:
        found.append(f"the depths of the queues add up to {queued}, the records to {waiting}")
    return found


def judged(story: Story) -> list[str]:
    return [*_starts(story), *_charges(story), *_order(story), *_end(story)]


def _name(story: Story) -> str:
    return f"job {story.record.id[-6:]} ({story.record.task}, {story.record.status.value})"


def _starts(story: Story) -> list[str]:
    """Every start of a body is one entry of the history, unless it runs now. What was given back because
    another body held the interpreter may not have been entered: it is interrupted, and left no mark."""
    entries = sum(1 for attempt in story.history if attempt.outcome not in WITHOUT_BODY)
    running = int(story.record.status is Status.RUNNING)
    starts = sum(1 for mark in story.marks if mark.what == "start")
    given_back = sum(1 for attempt in story.history if attempt.outcome is Outcome.INTERRUPTED)
    if entries + running - given_back <= starts <= entries + running:
        return []
    outcomes = [attempt.outcome.value for attempt in story.history]
    return [f"{starts} bodies started, the history tells of {entries + running}: {outcomes}"]


def _charges(story: Story) -> list[str]:
    """The counters of a life are those of its history."""
    life = [attempt for attempt in story.history if attempt.life == story.record.life]
    tally = Counter(attempt.outcome for attempt in life)
    expected = {
        "attempts": sum(tally[outcome] for outcome in ATTEMPTS),
        "crashes": tally[Outcome.CRASHED],
        "snoozes": tally[Outcome.SNOOZED],
        "interruptions": tally[Outcome.INTERRUPTED],
    }
    return [
        f"{name} is {getattr(story.record, name)}, its history has {count}"
        for name, count in expected.items()
        if getattr(story.record, name) != count
    ]


def _order(story: Story) -> list[str]:
    """No two bodies at once, and a greater token for each."""
    found = []
    starts = [mark for mark in story.marks if mark.what == "start"]
    ends = {mark.token: mark for mark in story.marks if mark.what == "end"}
    for before, after in itertools.pairwise(starts):
        if after.token <= before.token:
            found.append(f"token {after.token} follows {before.token}")
        ended = ends.get(before.token)
        if ended is not None and ended.at > after.at:
            found.append(f"a body starts {ended.at - after.at:.3f} s before the one before it ends")
    found += [
        f"a body starts in process {mark.pid} beside one in {list(mark.beside)}"
        for mark in starts
        if mark.beside
    ]
    return found


def _end(story: Story) -> list[str]:
    """A completed job has one body that returned, its last."""
    completed = [attempt for attempt in story.history if attempt.outcome is Outcome.COMPLETED]
    last_is = bool(story.history) and story.history[-1].outcome is Outcome.COMPLETED
    if (story.record.status is Status.COMPLETED) != last_is or len(completed) > 1:
        outcomes = [attempt.outcome.value for attempt in story.history]
        return [f"is {story.record.status.value}, its history says {outcomes}"]
    returned = [mark for mark in story.marks if mark.what == "end" and mark.raised is None]
    if completed and not returned:
        return ["is completed, and no body returned"]
    return []
