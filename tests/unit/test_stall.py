"""When a process counts as silent, when as standing still, and who is charged for its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from fluxmesh.storage.values import OnDeath, ProgressNote
from fluxmesh.worker.ledger import Entry, Vitals
from fluxmesh.worker.proc import ProcessState
from fluxmesh.worker.stall import (
    GAP_MOST_S,
    LAG_LIMIT_S,
    LOOK_S,
    OVERDUE_S,
    SEEN_S,
    TURN_LIMIT_S,
    Stall,
    StallJudge,
    corrections,
    is_mute,
    is_silent,
    last_sign_s,
)

LIMIT_S = 100.0
WELL = Vitals(epoch=1, beat_s=0.0, turn_s=0.0, probed_s=0.0, answered_s=0.0, blocked_by="")


def at(now_s: float, **changes: Any) -> Vitals:
    """Everything fine at `now_s`, but for these."""
    fine = {"beat_s": now_s, "turn_s": now_s, "probed_s": now_s - 0.1, "answered_s": now_s - 0.1}
    return msgspec.structs.replace(WELL, **{**fine, **changes})


def blocked(now_s: float, since_s: float, job_id: str = "a") -> Vitals:
    """The loop stands still, the rest goes on."""
    return at(now_s, probed_s=since_s, answered_s=since_s - 0.5, blocked_by=job_id)


def dumb(now_s: float, since_s: float) -> Vitals:
    """Nothing of the process says a word."""
    return at(now_s, beat_s=since_s, turn_s=since_s, probed_s=since_s, answered_s=since_s)


class Scene:
    def __init__(self) -> None:
        self.judge = StallJudge(LIMIT_S)
        self.state = ProcessState.RUNS
        self.kept_since_s: float | None = None

    def look(self, vitals: Vitals, now_s: float, entries: Sequence[Entry] = ()) -> Stall | None:
        return self.judge.look(vitals, entries, state=self.state, kept_since_s=self.kept_since_s, now_s=now_s)

    def again(self, vitals: Vitals, now_s: float, entries: Sequence[Entry] = ()) -> Stall | None:
        kept_s = self.kept_since_s
        return self.judge.look_again(vitals, entries, state=self.state, kept_since_s=kept_s, now_s=now_s)

    def first(self, vitals_at: Any, entries: Sequence[Entry], *, from_s: float, to_s: float) -> Any:
        """The instant and the stall of the first look that finds one."""
        for step in range(int((to_s - from_s) / LOOK_S) + 1):
            now_s = from_s + step * LOOK_S
            stall = self.look(vitals_at(now_s), now_s, entries)
            if stall is not None:
                return now_s, stall
        return None


@pytest.fixture
def scene() -> Scene:
    return Scene()


def meanings(stall: Stall) -> dict[str, OnDeath | None]:
    return {note.id: note.on_death for note in stall.notes}


def test_a_process_is_silent_a_third_of_a_beat_after_one_was_due() -> None:
    assert not is_silent(at(10.0), 2.0, 12.5)
    assert is_silent(at(10.0), 2.0, 12.7)
    assert last_sign_s(at(10.0, beat_s=3.0)) == 10.0


def test_a_process_that_has_just_registered_is_not_mute_though_it_never_turned() -> None:
    """The kernel was told to kill it with its supervisor, though it would have gone on well."""
    new = Vitals(epoch=1, beat_s=100.0, turn_s=0.0, probed_s=0.0, answered_s=0.0, blocked_by="")
    assert not is_mute(new, 100.0 + TURN_LIMIT_S)
    assert is_mute(new, 100.1 + TURN_LIMIT_S)
    assert not is_mute(msgspec.structs.replace(new, turn_s=100.1), 100.1 + TURN_LIMIT_S)


def test_a_process_whose_loop_turns_is_never_ended(scene: Scene) -> None:
    overdue = [Entry("a", 1, 5.0)]
    assert scene.first(at, overdue, from_s=10.0, to_s=10.0 + 2 * LIMIT_S) is None


def test_one_that_stands_still_is_ended_just_under_a_second_after_the_hard_timeout(scene: Scene) -> None:
    jobs = [Entry("a", 1, 13.0), Entry("b", 2, 600.0)]
    when, stall = scene.first(lambda now: blocked(now, 10.0), jobs, from_s=10.0, to_s=20.0)
    assert OVERDUE_S - 0.01 <= when - 13.0 <= OVERDUE_S + LOOK_S + 0.01 < 0.9
    assert meanings(stall) == {"a": OnDeath.TIMEOUT, "b": OnDeath.INTERRUPTED}
    assert "loop stood still past the hard timeout" in stall.what


def test_a_loop_that_blocks_briefly_is_not_ended_while_every_job_has_time(scene: Scene) -> None:
    jobs = [Entry("a", 1, 90.0)]
    assert scene.first(lambda now: blocked(now, 10.0), jobs, from_s=10.0, to_s=80.0) is None


def test_a_job_overdue_since_before_the_loop_stood_still_is_no_ground(scene: Scene) -> None:
    """The loop dealt with it already: its body cannot be stopped, and the worker retires for it in time."""
    jobs = [Entry("stuck", 1, 5.0), Entry("brief", 2, 600.0)]
    assert scene.first(lambda now: blocked(now, 10.0, "brief"), jobs, from_s=10.0, to_s=60.0) is None


def test_a_job_that_waits_for_its_turn_is_no_ground(scene: Scene) -> None:
    jobs = [Entry("a", 1, 600.0), Entry("waits", 2, 12.0, waits=True)]
    assert scene.first(lambda now: blocked(now, 10.0), jobs, from_s=10.0, to_s=60.0) is None


def test_a_body_that_has_ended_is_no_ground_and_is_charged_with_nothing(scene: Scene) -> None:
    """Only the loop has not heard of it yet, because another job blocks it."""
    jobs = [Entry("blocks", 1, 200.0), Entry("ended", 2, 12.0, left=True)]
    vitals_at = lambda now: blocked(now, 10.0, "blocks")  # noqa: E731
    assert scene.first(vitals_at, jobs, from_s=10.0, to_s=60.0) is None
    _, stall = scene.first(vitals_at, jobs, from_s=60.0, to_s=10.0 + 2 * LIMIT_S)
    assert meanings(stall) == {"blocks": OnDeath.TIMEOUT, "ended": OnDeath.INTERRUPTED}


@pytest.mark.parametrize("more", [[], [Entry("a", 1, 600.0), Entry("b", 2, 600.0)]])
def test_nor_where_nobody_knows_what_it_is_that_stands(scene: Scene, more: list[Entry]) -> None:
    jobs = [*more, Entry("ended", 3, 12.0, left=True)]
    _, stall = scene.first(lambda now: blocked(now, 10.0, ""), jobs, from_s=10.0, to_s=10.0 + 2 * LIMIT_S)
    assert meanings(stall) == {"ended": OnDeath.INTERRUPTED}
    assert stall.culprit_unknown == bool(more)


def test_who_blocks_the_loop_is_charged_beside_who_is_overdue(scene: Scene) -> None:
    jobs = [Entry("a", 1, 600.0), Entry("late", 2, 12.0), Entry("c", 3, 600.0)]
    _, stall = scene.first(lambda now: blocked(now, 10.0), jobs, from_s=10.0, to_s=20.0)
    assert meanings(stall) == {"a": OnDeath.TIMEOUT, "late": OnDeath.TIMEOUT, "c": OnDeath.INTERRUPTED}


def test_no_sign_at_all_is_the_same(scene: Scene) -> None:
    jobs = [Entry("a", 1, 13.0), Entry("b", 2, 600.0)]
    when, stall = scene.first(lambda now: dumb(now, 10.0), jobs, from_s=10.0, to_s=20.0)
    assert when - 13.0 <= OVERDUE_S + LOOK_S + 0.01
    assert meanings(stall) == {"a": OnDeath.TIMEOUT, "b": OnDeath.INTERRUPTED}
    assert "no sign of life" in stall.what


@pytest.mark.parametrize(
    ("vitals_at", "lag_s"),
    [(lambda now: blocked(now, 10.0), LAG_LIMIT_S), (lambda now: dumb(now, 10.0), TURN_LIMIT_S)],
)
def test_after_the_stall_limit_it_is_ended_in_any_case(scene: Scene, vitals_at: Any, lag_s: float) -> None:
    when, stall = scene.first(vitals_at, [Entry("a", 1, 600.0)], from_s=10.0, to_s=10.0 + 2 * LIMIT_S)
    assert LIMIT_S <= when - 10.0 <= LIMIT_S + lag_s
    assert meanings(stall) == {"a": OnDeath.TIMEOUT}


def test_if_nobody_knows_which_of_several_it_was_each_is_charged_with_the_death(scene: Scene) -> None:
    """So that a killer is found: from its second crash on a job has a process of its own."""
    jobs = [Entry("a", 1, 600.0), Entry("b", 2, 600.0)]
    _, stall = scene.first(lambda now: dumb(now, 10.0), jobs, from_s=10.0, to_s=10.0 + 2 * LIMIT_S)
    assert stall.culprit_unknown
    assert stall.notes == ()


def test_whoever_slept_as_well_gives_the_process_time_to_wake_up(scene: Scene) -> None:
    """Supervisor and child are stopped together and go on together."""
    jobs = [Entry("a", 1, 13.0)]
    assert scene.look(at(10.0), 10.0, jobs) is None
    assert scene.look(dumb(60.0, 10.0), 60.0, jobs) is None
    assert scene.look(dumb(60.0 + LOOK_S, 10.0), 60.0 + LOOK_S, jobs) is None
    assert scene.look(at(60.0 + 2 * LOOK_S), 60.0 + 2 * LOOK_S, jobs) is None


def test_a_look_after_a_gap_does_not_count_the_gap(scene: Scene) -> None:
    jobs = [Entry("a", 1, 11.0)]
    assert scene.look(dumb(20.0, 10.0), 20.0, jobs) is None
    late_s = 20.0 + SEEN_S + GAP_MOST_S
    assert scene.look(dumb(late_s, 10.0), late_s, jobs) is None


def test_a_process_that_somebody_stopped_is_left_alone_for_as_long_as_the_limit(scene: Scene) -> None:
    scene.state = ProcessState.STOPPED
    jobs = [Entry("a", 1, 13.0)]
    when, stall = scene.first(lambda now: dumb(now, 10.0), jobs, from_s=10.0, to_s=10.0 + 2 * LIMIT_S)
    assert when - 10.0 >= LIMIT_S
    assert meanings(stall) == {"a": OnDeath.INTERRUPTED}


@pytest.mark.parametrize("state", [ProcessState.TRACED, ProcessState.DEAD])
def test_one_that_a_debugger_holds_or_that_is_gone_is_not_ended(scene: Scene, state: ProcessState) -> None:
    scene.state = state
    jobs = [Entry("a", 1, 13.0)]
    assert scene.first(lambda now: dumb(now, 10.0), jobs, from_s=10.0, to_s=10.0 + 2 * LIMIT_S) is None


def test_one_that_cannot_beat_though_storage_answers_others_is_ended_after_the_limit(scene: Scene) -> None:
    scene.kept_since_s = 20.0
    jobs = [Entry("a", 1, 600.0)]
    when, stall = scene.first(lambda now: at(now, beat_s=10.0), jobs, from_s=20.0, to_s=20.0 + 2 * LIMIT_S)
    assert LIMIT_S <= when - 20.0 <= LIMIT_S + 2 * LOOK_S
    assert meanings(stall) == {"a": OnDeath.INTERRUPTED}


@pytest.mark.parametrize("stands", [blocked, dumb])
def test_right_before_its_end_a_process_is_looked_at_again(scene: Scene, stands: Any) -> None:
    """What was to be stored first may have taken longer than a look, and the process has moved or has not."""
    jobs = [Entry("a", 1, 13.0)]
    when, stall = scene.first(lambda now: stands(now, 10.0), jobs, from_s=10.0, to_s=20.0)
    later_s = when + GAP_MOST_S + 0.2
    assert scene.again(stands(later_s, 10.0), later_s, jobs) == stall
    assert scene.again(at(later_s), later_s, jobs) is None
    assert not scene.judge.suspects


def test_nor_is_it_ended_for_a_job_that_has_ended_meanwhile(scene: Scene) -> None:
    jobs = [Entry("blocks", 1, 200.0), Entry("late", 2, 13.0)]
    when, _ = scene.first(lambda now: blocked(now, 10.0, "blocks"), jobs, from_s=10.0, to_s=20.0)
    jobs[1] = msgspec.structs.replace(jobs[1], left=True)
    assert scene.again(blocked(when, 10.0, "blocks"), when, jobs) is None


def test_what_was_told_of_a_process_that_goes_on_is_taken_back() -> None:
    told = [
        ProgressNote("late", 1, on_death=OnDeath.TIMEOUT),
        ProgressNote("blocked", 2, on_death=OnDeath.TIMEOUT),
        ProgressNote("beside", 3, on_death=OnDeath.INTERRUPTED),
    ]
    jobs = [Entry("late", 1, 12.0), Entry("blocked", 2, 90.0), Entry("beside", 3, 90.0)]
    back = (
        ProgressNote("blocked", 2, on_death=OnDeath.CRASH),
        ProgressNote("beside", 3, on_death=OnDeath.CRASH),
    )
    assert corrections(told, None, jobs, 20.0) == back
    found = Stall("stands", (told[0], ProgressNote("beside", 3, on_death=OnDeath.TIMEOUT)))
    assert corrections(told, found, jobs, 20.0) == (found.notes[1], back[0])
    assert corrections(told, Stall("stands", tuple(told)), jobs, 20.0) == ()
