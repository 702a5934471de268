"""What bodies noted of their own starts and ends, and how long a job took from one worker to another. Pure
but for `read_marks`.

Two clocks are in it: storage stamps the claim (epoch seconds), bodies read the monotonic clock of the machine
and, in the same instant, its wall clock. So each mark says how the two clocks stand to each other, and where
that changes by more than STEP_MOST_S in a run somebody has set the clock, and no figure is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from benchmarks.figures import CheckFailed
from benchmarks.seen import Seen

STEP_MOST_S: Final = 0.002


class Mark(Struct, frozen=True, array_like=True):
    """The body of job `number` has just begun, or is about to return."""

    number: int
    event: Literal["start", "end"]
    mono_s: float
    wall_s: float


_decode: Final = msgspec.json.Decoder(Mark).decode


def read_marks(journal: Path) -> list[Mark]:
    """All whole lines so far; none before the first."""
    if not journal.exists():
        return []
    return [_decode(line) for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def check_clocks(marks: Iterable[Mark]) -> None:
    """Raises CheckFailed if the wall clock was set while marks were made."""
    offsets = [mark.wall_s - mark.mono_s for mark in marks]
    if offsets and max(offsets) - min(offsets) > STEP_MOST_S:
        raise CheckFailed(f"the clock was set meanwhile, by {max(offsets) - min(offsets):.3f} s")


class Crossing(Struct, frozen=True):
    """One round in which a worker without work stood beside another's surplus. `waited_s`: from when both
    were so to the start of the first job on it; of one that never got a job it is as long as the surplus
    lasted, and `crossed` is False. `moved`: jobs of the other that it ran."""

    waited_s: float
    crossed: bool
    moved: int
    victim: str


def starts_of(marks: Iterable[Mark]) -> dict[int, Mark]:
    return {mark.number: mark for mark in marks if mark.event == "start"}


def beside_held(jobs: Sequence[Seen], starts: dict[int, Mark]) -> Crossing | None:
    """From the storage's stamp of the first claim, before which nothing was held, to the first body on the
    other worker. None: only one job is there, so none was held."""
    if len(jobs) < 2:
        return None
    first = min(jobs, key=lambda job: job.started_at or 0.0)
    assert first.started_at is not None
    assert first.worker_id is not None
    others = [starts[job.number].wall_s for job in jobs if job.worker_id != first.worker_id]
    if others:
        return Crossing(min(others) - first.started_at, True, len(others), first.worker_id)
    lasted_s = max(starts[job.number].wall_s for job in jobs) - first.started_at
    return Crossing(lasted_s, False, 0, first.worker_id)


def falls_idle(
    jobs: Sequence[Seen], starts: dict[int, Mark], gate: Mark, thief: str, least: int
) -> Crossing | None:
    """`thief` held its slot with a job of another queue until `gate`, its end. From there to its first body.
    None: fewer than `least` of the jobs had not begun by then, so it fell idle beside no surplus."""
    waiting = [job for job in jobs if starts[job.number].mono_s > gate.mono_s]
    if len(waiting) < least:
        return None
    victim = next((str(job.worker_id) for job in jobs if job.worker_id != thief), "")
    taken = [starts[job.number].mono_s for job in jobs if job.worker_id == thief]
    if taken:
        return Crossing(min(taken) - gate.mono_s, True, len(taken), victim)
    return Crossing(max(starts[job.number].mono_s for job in waiting) - gate.mono_s, False, 0, victim)
