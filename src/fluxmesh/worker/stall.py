"""From signs of life to what has to be done about them. Pure.

A process that is alive and says nothing (one call into C holds its interpreter) shall keep its jobs: its
lease is kept for it. One whose loop or threads stand still past the time of one of its jobs cannot enforce
that time any more, and is to be ended from outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from fluxmesh.storage.values import OnDeath, ProgressNote
from fluxmesh.worker.ledger import Entry, Vitals
from fluxmesh.worker.proc import ProcessState

LOOK_S: Final = 0.2  # between two looks at one process
SILENT_BEATS: Final = 1.3  # after so many without a good beat of its own it counts as silent
LAG_LIMIT_S: Final = 1.0  # a loop that has not answered for so long stands still
TICK_S: Final = 0.5  # the watching thread turns so often
TURN_LIMIT_S: Final = TICK_S + LAG_LIMIT_S
# After its hard timeout a job is given so long before its process is ended: with a look, and the time to tell
# storage, that is just under a second.
OVERDUE_S: Final = 0.5
# A stall counts from when it was seen in unbroken looks: whoever watches may have slept as well, and what
# wakes up with it has to be given the time to say so.
SEEN_S: Final = 0.6
GAP_MOST_S: Final = 1.0
_TIMER_SLACK_S: Final = 0.05


class Stall(Struct, frozen=True):
    """A process to be ended. `what` is wrong with it, in words; `notes`: what its end shall mean for its
    jobs; `culprit_unknown`: one of them is to blame and nobody knows which, so each is charged with the
    death, but for those in `notes`."""

    what: str
    notes: tuple[ProgressNote, ...] = ()
    culprit_unknown: bool = False


def is_silent(vitals: Vitals, beat_s: float, now_s: float) -> bool:
    return now_s - vitals.beat_s > SILENT_BEATS * beat_s


def is_mute(vitals: Vitals, now_s: float) -> bool:
    """Its threads stand still, all of them. One that has just registered has not turned yet and is well."""
    return now_s - max(vitals.turn_s, vitals.beat_s) > TURN_LIMIT_S


def last_sign_s(vitals: Vitals) -> float:
    return max(vitals.beat_s, vitals.turn_s, vitals.answered_s)


def stands_since_s(vitals: Vitals, now_s: float) -> float:
    """Since when its loop, or all of it, stands still; inf: it turns, for all that is known."""
    since = math.inf
    if vitals.answered_s < vitals.probed_s and now_s - vitals.probed_s > LAG_LIMIT_S:
        since = vitals.probed_s
    if vitals.turn_s and now_s - vitals.turn_s > TURN_LIMIT_S:
        since = min(since, vitals.turn_s)
    return since


def rest_s(vitals: Vitals, beat_s: float, now_s: float) -> float:
    """How long nothing can be seen that is not seen now, if all is well; else the time of one look."""
    silent_at = vitals.beat_s + SILENT_BEATS * beat_s
    stands_at = min(vitals.turn_s + TURN_LIMIT_S, vitals.probed_s + LAG_LIMIT_S)
    return max(LOOK_S, min(silent_at, stands_at) - now_s)


def is_ground(entry: Entry, vitals: Vitals, now_s: float) -> bool:
    """True for a job past its time that the loop had no chance to deal with: it has not turned since."""
    overdue = not (entry.waits or entry.left) and now_s - entry.hard_s >= OVERDUE_S
    return overdue and entry.hard_s > vitals.answered_s - _TIMER_SLACK_S


def corrections(
    told: Sequence[ProgressNote], found: Stall | None, entries: Sequence[Entry], now_s: float
) -> tuple[ProgressNote, ...]:
    """What has to be told after `told`, now that this was found. Where nothing is known any more, a death is
    a crash again; but a job that is past its time stays a timeout."""
    notes = found.notes if found is not None else ()
    named = {note.id for note in notes}
    late = {entry.id for entry in entries if entry.hard_s <= now_s and not entry.left}
    back = [
        ProgressNote(note.id, note.token, on_death=OnDeath.CRASH)
        for note in told
        if note.id not in named and not (note.on_death is OnDeath.TIMEOUT and note.id in late)
    ]
    return (*(note for note in notes if note not in told), *back)


class StallJudge:
    """Looks at one process again and again. `stall_limit_s`: for how long it may stand still in any case."""

    def __init__(self, stall_limit_s: float) -> None:
        self._limit_s = stall_limit_s
        self._looked_s = -math.inf
        self._seen_s: float | None = None  # when it was first seen to stand still, in unbroken looks
        self._since_s = -math.inf

    @property
    def suspects(self) -> bool:
        """True while something stands still: then its jobs matter, and are to be given to `look`."""
        return self._seen_s is not None

    def look(
        self,
        vitals: Vitals,
        entries: Sequence[Entry],
        *,
        state: ProcessState,
        kept_since_s: float | None,
        now_s: float,
    ) -> Stall | None:
        """What has to be done now, if anything. `kept_since_s`: since when its beats have failed to come
        though storage took those that were sent in its name."""
        stands_s = stands_since_s(vitals, now_s)
        since_s = min(stands_s, math.inf if kept_since_s is None else kept_since_s)
        unbroken = now_s - self._looked_s <= GAP_MOST_S
        self._looked_s = now_s
        if since_s == math.inf or state in (ProcessState.TRACED, ProcessState.DEAD):
            self._seen_s = None
            return None
        if self._seen_s is None or not unbroken or since_s != self._since_s:
            self._seen_s, self._since_s = now_s, since_s
        if now_s - self._seen_s < SEEN_S:
            return None
        return self._found(vitals, entries, state, now_s)

    def look_again(
        self,
        vitals: Vitals,
        entries: Sequence[Entry],
        *,
        state: ProcessState,
        kept_since_s: float | None,
        now_s: float,
    ) -> Stall | None:
        """After a look that found something, and whatever time was spent on that: what has to be done now;
        None: the process has moved since, and is to be looked at as before."""
        self._looked_s = now_s
        since_s = min(stands_since_s(vitals, now_s), math.inf if kept_since_s is None else kept_since_s)
        if since_s != self._since_s or state in (ProcessState.TRACED, ProcessState.DEAD):
            self._seen_s = None
            return None
        return self._found(vitals, entries, state, now_s)

    def _found(
        self, vitals: Vitals, entries: Sequence[Entry], state: ProcessState, now_s: float
    ) -> Stall | None:
        assert self._seen_s is not None
        stands_s, since_s = stands_since_s(vitals, now_s), self._since_s
        if state is ProcessState.STOPPED:
            if now_s - self._seen_s < self._limit_s:
                return None
            return Stall(f"it was stopped for {self._limit_s:g} s", _notes(entries, set()))
        if any(is_ground(entry, vitals, now_s) for entry in entries) and stands_s < math.inf:
            return _stall(vitals, entries, now_s, "past the hard timeout of a job")
        if now_s - since_s < self._limit_s:
            return None
        if stands_s == math.inf:
            return Stall(f"its beats failed for {self._limit_s:g} s", _notes(entries, set()))
        return _stall(vitals, entries, now_s, f"for {self._limit_s:g} s")


def _stall(vitals: Vitals, entries: Sequence[Entry], now_s: float, how_long: str) -> Stall:
    """Its jobs are to blame: the overdue ones, the one in which its loop stands, the only one."""
    turns = now_s - vitals.turn_s <= TURN_LIMIT_S
    what = f"its loop stood still {how_long}" if turns else f"it gave no sign of life {how_long}"
    entered = [entry for entry in entries if not (entry.waits or entry.left)]
    guilty = {entry.id for entry in entered if entry.hard_s <= now_s or entry.id == vitals.blocked_by}
    if not guilty and len(entered) == 1:
        guilty = {entered[0].id}
    if entered and not guilty:
        return Stall(what, _notes([entry for entry in entries if entry.left], set()), culprit_unknown=True)
    return Stall(what, _notes(entries, guilty))


def _notes(entries: Sequence[Entry], guilty: set[str]) -> tuple[ProgressNote, ...]:
    return tuple(
        ProgressNote(
            entry.id,
            entry.token,
            on_death=OnDeath.TIMEOUT if entry.id in guilty else OnDeath.INTERRUPTED,
        )
        for entry in entries
    )
