"""What the end of a child process means."""

from __future__ import annotations

import signal

import pytest

from fluxmesh.worker.deaths import LONGEST_DELAY_S, Next, how_ended, next_step, restart_delay_s


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (-signal.SIGKILL, "killed by SIGKILL"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-60, "killed by signal 60"),
        (3, "exit status 3"),
        (75, "retired: a body could not be stopped"),
        (76, "fenced: its lease was lost"),
    ],
)
def test_an_end_is_told_in_words(code: int, how: str) -> None:
    assert how_ended(code) == how


@pytest.mark.parametrize(
    ("code", "was_ready", "stopping", "step"),
    [
        (0, False, True, Next.LEAVE),
        (-9, True, True, Next.LEAVE),
        (75, True, True, Next.LEAVE),
        (-9, True, False, Next.RESTART),
        (1, False, False, Next.RESTART),
        (76, True, False, Next.RESTART),
        (75, True, False, Next.REPLACE),
        (2, False, False, Next.GIVE_UP),
        (3, False, False, Next.GIVE_UP),
        (4, False, False, Next.GIVE_UP),
        (3, True, False, Next.RESTART),
        (4, True, False, Next.RESTART),
    ],
)
def test_what_follows_an_end(code: int, was_ready: bool, stopping: bool, step: Next) -> None:
    assert next_step(code, was_ready=was_ready, stopping=stopping, said_so=False) is step


@pytest.mark.parametrize(("said_so", "step"), [(True, Next.LEAVE), (False, Next.RESTART)])
def test_a_status_of_0_is_a_planned_end_only_if_the_worker_said_so(said_so: bool, step: Next) -> None:
    """A body may call os._exit(0)."""
    assert next_step(0, was_ready=True, stopping=False, said_so=said_so) is step


def test_restarts_back_off_from_at_once_to_a_bound() -> None:
    assert [restart_delay_s(failures) for failures in range(1, 10)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert restart_delay_s(1_000_000) == LONGEST_DELAY_S


def test_a_child_that_no_other_would_fare_better_than_ends_the_worker() -> None:
    for was_ready in (True, False):
        step = next_step(4, was_ready=was_ready, stopping=False, said_so=False, hopeless=True)
        assert step is Next.GIVE_UP
    assert next_step(4, was_ready=True, stopping=True, said_so=False, hopeless=True) is Next.LEAVE


def test_a_child_that_was_ended_because_it_stood_still_is_renewed() -> None:
    assert next_step(-9, was_ready=True, stopping=False, said_so=False, stalled=True) is Next.RENEW
    assert next_step(-9, was_ready=True, stopping=True, said_so=False, stalled=True) is Next.LEAVE


def test_stalls_cost_no_rest_at_first_and_then_as_much_as_crashes() -> None:
    assert [restart_delay_s(0, stalls) for stalls in range(8)] == [0, 0, 0, 0, 0.5, 1, 2, 4]
    assert restart_delay_s(3, 1) == restart_delay_s(3)
