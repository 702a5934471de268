"""The history checker finds each kind of lie; else the verdict of every case would mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fluxmesh.job import Attempt, Job, Outcome, Status
from fluxmesh.storage.values import Counts
from scripts.cases_table import BEGIN, END, update
from tests.cases.judge import Story, disagreements
from tests.cases.marks import Mark
from tests.cases.report import TITLES, Case

JOB = "0190a3e4-5b6c-7d8e-9f01-23456789abcd"


def mark(what: str, at: float, token: int, **more: Any) -> Mark:
    return Mark(what, at, JOB, "nap", "", 1, token, 100 + token, **more)


def attempt(outcome: Outcome, number: int = 1, life: int = 1) -> Attempt:
    return Attempt(life, number, 1.0, 2.0, "w1", outcome)


def sound() -> Story:
    """Killed once, then completed."""
    record = Job(
        id=JOB, task="nap", queue="default", priority=2, status=Status.COMPLETED, attempts=1, crashes=1
    )
    history = [attempt(Outcome.CRASHED), attempt(Outcome.COMPLETED)]
    return Story(record, history, [mark("start", 1.0, 1), mark("start", 2.0, 2), mark("end", 3.0, 2)])


def counts(**by_status: int) -> Counts:
    return Counts({Status(name): n for name, n in by_status.items()}, {}, 0, 0)


def verdict(story: Story) -> list[str]:
    return disagreements([story], counts(COMPLETED=1))


def changed(story: Story, **fields: Any) -> Story:
    return msgspec.structs.replace(story, record=msgspec.structs.replace(story.record, **fields))


def test_a_sound_story_is_accepted() -> None:
    assert verdict(sound()) == []


def test_what_was_given_back_before_its_body_was_entered_leaves_no_mark() -> None:
    whole = sound()
    history = [whole.history[0], attempt(Outcome.INTERRUPTED), whole.history[1]]
    story = changed(msgspec.structs.replace(whole, history=history), interruptions=1)
    assert verdict(story) == []
    [told] = verdict(msgspec.structs.replace(story, marks=story.marks[1:]))  # but for that of the crash
    assert "1 bodies started" in told


@pytest.mark.parametrize(
    ("lie", "word"),
    [
        (lambda s: msgspec.structs.replace(s, marks=[*s.marks, mark("start", 4.0, 3)]), "3 bodies started"),
        (lambda s: msgspec.structs.replace(s, marks=s.marks[1:]), "1 bodies started"),
        (lambda s: msgspec.structs.replace(s, history=s.history[1:]), "2 bodies started"),
        (lambda s: changed(s, crashes=0), "crashes is 0"),
        (lambda s: changed(s, attempts=2), "attempts is 2"),
        (lambda s: changed(s, interruptions=1), "interruptions is 1"),
        (
            lambda s: msgspec.structs.replace(
                s, marks=[mark("start", 1.0, 1), mark("start", 2.0, 2, beside=(101,)), mark("end", 3.0, 2)]
            ),
            "beside",
        ),
        (
            lambda s: msgspec.structs.replace(
                s,
                marks=[
                    mark("start", 1.0, 1),
                    mark("start", 2.0, 2),
                    mark("end", 2.5, 1, raised="JobInterrupted"),
                    mark("end", 3.0, 2),
                ],
            ),
            "before the one before it ends",
        ),
        (
            lambda s: msgspec.structs.replace(
                s, marks=[mark("start", 1.0, 2), mark("start", 2.0, 2), mark("end", 3.0, 2)]
            ),
            "token 2 follows 2",
        ),
        (
            lambda s: msgspec.structs.replace(s, history=[*s.history[:1], attempt(Outcome.FAILED)]),
            "its history says",
        ),
        (
            lambda s: msgspec.structs.replace(
                s, marks=[*s.marks[:2], mark("end", 3.0, 2, raised="ValueError")]
            ),
            "no body returned",
        ),
    ],
)
def test_a_lie_is_found(lie: Any, word: str) -> None:
    found = verdict(lie(sound()))
    assert any(word in line for line in found), found


def test_counters_that_differ_from_the_records_are_found() -> None:
    assert "the counters tell" in disagreements([sound()], counts(COMPLETED=2))[0]
    waiting = changed(Story(sound().record, [], []), status=Status.PENDING, attempts=0, crashes=0)
    assert "queues add up to 0" in disagreements([waiting], counts(PENDING=1))[0]


def test_a_figure_out_of_its_bound_fails_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cases.report.LINES", [])
    monkeypatch.setitem(TITLES, "C00", "no case")
    monkeypatch.delenv("FLUXMESH_TEST_CASE_LINES", raising=False)
    case = Case("C00", "none")
    case.at_most("seconds", 1.5, 1.0)
    with pytest.raises(AssertionError, match=r"seconds: 1\.5, must be <= 1"):
        case.close([])
    for full, bound in ((True, "1"), (False, "3")):
        monkeypatch.setattr("tests.cases.report.FULL", full)
        case = Case("C00", "none")
        case.at_most("restart_s", 3.5, 1.0)
        with pytest.raises(AssertionError, match=rf"restart_s: 3\.5, must be <= {bound}"):
            case.close([])
    with pytest.raises(AssertionError, match="somebody lies"):
        Case("C00", "none").close(["somebody lies"])


def test_the_table_shows_figures_beside_their_bounds_and_what_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.jsonl"
    monkeypatch.setattr("tests.cases.report.LINES", [])
    monkeypatch.setitem(TITLES, "C00", "no case")
    monkeypatch.setenv("FLUXMESH_TEST_CASE_LINES", str(lines))
    monkeypatch.setattr("tests.cases.report.FULL", True)
    sound = Case("C00", "sqlite", lost="a | b")
    sound.at_most("restart_s", 0.25, 1)
    sound.equal("starts", [1, 1], [1, 1])
    sound.close([])
    broken = Case("C00", "sqlite", lost="c")
    broken.equal("starts", 2, 1)
    with pytest.raises(AssertionError):
        broken.close([])
    page = tmp_path / "cases.md"
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    lines.write_text("".join(json.dumps({**row, "load": 2.5}) + "\n" for row in rows))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    update(page, lines.read_text())
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert r"lost a \| b | restart_s 0.25 (<= 1) | 1 | 2.5 | yes |" in text
    assert "| starts 2 (= 1) | 0 | 2.5 | **no** |" in text
