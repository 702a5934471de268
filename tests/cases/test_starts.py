"""Can the judge of starts fail? And does the audit of each storage see what happens?"""

from __future__ import annotations

from tests.cases.audit import HELD, READY, RUNNING, Move
from tests.cases.harness import Lab
from tests.cases.starts import Runs, doubly_owned, starts_of, stays

ALL = Runs(frozenset({"default"}), frozenset(range(4)))
BOTH = {"1": ALL, "2": ALL}


def move(
    job: str, place: int, tier: int, *, epoch: str = "", step: int = 0, token: int = 0, at_us: int = 0
) -> Move:
    return Move(step, at_us, job, place, tier, "default", "t", token, epoch, f"w{epoch}" if epoch else "")


def test_a_start_below_a_ready_job_is_seen() -> None:
    moves = [
        move("low", READY, 3),
        move("low", HELD, 3, epoch="1", token=5),
        move("urgent", READY, 0),
        move("low", RUNNING, 3, epoch="1", token=5, step=7),
    ]
    found = starts_of(moves, BOTH)
    assert [(one.started, one.better) for one in found.below_ready] == [("low", "urgent")]
    assert (found.starts, found.two_tiers, found.stolen) == (1, 0, 0)


def test_so_is_one_whose_exchange_only_holds_the_better_one() -> None:
    moves = [
        move("low", READY, 3),
        move("urgent", READY, 0),
        move("low", RUNNING, 3, epoch="1", token=5, step=7),
        move("urgent", HELD, 0, epoch="1", token=6),
    ]
    found = starts_of(moves, BOTH)
    assert len(found.below_ready) == 1
    assert found.two_tiers == 1


def test_what_one_exchange_starts_is_judged_as_a_whole_and_what_a_worker_cannot_run_does_not_count() -> None:
    moves = [
        move("low", READY, 3),
        move("urgent", READY, 0),
        move("low", RUNNING, 3, epoch="1", token=5, step=7),
        move("other", READY, 2),
        move("urgent", RUNNING, 0, epoch="1", token=6, step=7),
    ]
    found = starts_of(moves, BOTH)
    assert found.below_ready == ()
    assert (found.starts, found.two_tiers) == (2, 2)
    only_low = {"1": Runs(frozenset({"default"}), frozenset({3}))}
    assert starts_of(moves[:3], only_low).below_ready == ()
    assert len(starts_of(moves[:3], BOTH).below_ready) == 1
    assert starts_of(moves[:3], {}).starts == 0


def test_a_worker_that_starts_below_what_it_holds_is_told_apart() -> None:
    moves = [
        move("low", HELD, 3, epoch="1", token=5),
        move("urgent", HELD, 0, epoch="1", token=6),
        move("low", RUNNING, 3, epoch="1", token=5, step=7),
    ]
    found = starts_of(moves, BOTH)
    assert found.below_ready == ()
    assert [one.better for one in found.below_own] == ["urgent"]


def test_a_start_of_a_job_that_changed_hands_is_a_stolen_one_and_a_token_has_one_owner() -> None:
    moves = [
        move("a", HELD, 3, epoch="1", token=5, at_us=1_000_000),
        move("a", HELD, 3, epoch="2", token=6, at_us=1_500_000),
        move("a", RUNNING, 3, epoch="2", token=6, step=7, at_us=1_600_000),
        move("a", 5, 3, token=6, at_us=1_700_000),
    ]
    assert starts_of(moves, BOTH).stolen == 1
    assert [(one.worker, one.place, one.length_s(0)) for one in stays(moves)] == [
        ("w1", HELD, 0.5),
        ("w2", HELD, 0.1),
        ("w2", RUNNING, 0.1),
    ]
    assert doubly_owned(moves) == []
    assert len(doubly_owned([*moves, move("a", RUNNING, 3, epoch="1", token=6)])) == 1


def test_the_audit_sees_every_move_and_leaves_nothing_behind(lab: Lab) -> None:
    early = lab.submit("brief", 0.0)
    with lab.audited() as audit:
        assert [(one.id, one.place, one.task) for one in audit.moves()] == [(early.id, READY, "brief")]
        lab.worker("w1", concurrency=2)
        jobs = lab.submit_many("brief", [(0.0,)] * 20)
        failing = lab.submit("fail", 1, backoff_base_seconds=0.05, jitter="none")
        lab.await_ended([early, *jobs, failing], 20)
        epochs = {str(row.epoch) for row in lab.queue.list_workers()}
        moves = audit.moves()
    assert starts_of(moves, dict.fromkeys(epochs, ALL)).starts == 23
    of_one = [(one.place, one.worker) for one in moves if one.id == failing.id]
    assert of_one == [(1, ""), (4, "w1"), (0, ""), (1, ""), (4, "w1"), (5, "")]
    assert {one.epoch for one in moves if one.place == RUNNING} == epochs
    stored = {one.id: one.token for one in lab.records()}
    assert stored == {one.id: one.token for one in moves if one.place == 5}
    assert not any("audit" in name for name in lab.door.rows())
    assert lab.judged() == []
