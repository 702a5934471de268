"""What bodies tell of themselves: one JSON line a mark, read while it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

MARKS_ENV: Final = "FLUXMESH_TEST_MARKS"
GATE_ENV: Final = "FLUXMESH_TEST_GATE"


class Mark(Struct, frozen=True):
    """`what` is "start" or "end"; `at` is the machine's monotonic clock, the same for every process.

    A start names in `beside` the live processes in which an earlier run of the same job had not ended; an
    end names in `raised` the exception that left the body.
    """

    what: str
    at: float
    job: str
    task: str
    note: str
    attempt: int
    token: int
    pid: int
    beside: tuple[int, ...] = ()
    raised: str | None = None


_decode = msgspec.json.Decoder(Mark).decode


class MarkFile:
    """The marks so far. Reads only what was appended since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._offset = 0
        self._marks: list[Mark] = []

    def all(self) -> list[Mark]:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._marks += [_decode(line) for line in whole.splitlines()]
        return self._marks

    def starts(self, *, note: str | None = None, job: str | None = None) -> list[Mark]:
        return [mark for mark in self.of(note=note, job=job) if mark.what == "start"]

    def ends(self, *, note: str | None = None, job: str | None = None) -> list[Mark]:
        return [mark for mark in self.of(note=note, job=job) if mark.what == "end"]

    def of(self, *, note: str | None = None, job: str | None = None) -> list[Mark]:
        return [
            mark
            for mark in self.all()
            if (note is None or mark.note == note) and (job is None or mark.job == job)
        ]


def lives(pid: int) -> bool:
    """True while a process may run code: it is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"
