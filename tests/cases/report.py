"""What a case has measured: one JSON line a case, from which the table in docs/cases.md is made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from tests.patience import soon

FULL_ENV: Final = "FLUXMESH_TEST_CASES"  # "full": the cases' own times
LINES_ENV: Final = "FLUXMESH_TEST_CASE_LINES"  # a file that gets the lines
LINES: Final[list[str]] = []  # of this session

TITLES: Final = {
    "C01": "worker killed in the middle",
    "C02": "healthy job far longer than the lease",
    "C03": "blocking call inside an async job",
    "C04": "frozen worker wakes up; concurrency key of 1",
    "C05": "bookkeeping lost",
    "C06": "one bad message must not hurt the batch",
    "C07": "Redis restarts",
    "C08": "script cache lost, replica promoted",
    "C12": "many delayed jobs",
    "C13": "long job must not sit on short ones",
    "C14": "urgent job overtakes the backlog",
    "C15": "poison pill",
    "C16": "timeout must give the slot back",
    "C17": "SIGTERM during a deploy",
    "C18": "cancel in awkward moments",
    "C20": "unique key must die with its job",
    "C21": "idempotency under parallel submits",
    "C22a": "retention: nothing stays",
    "C22b": "full memory",
    "C22c": "a server that throws keys away",
    "C24": "worker with a wrong clock",
    "D31": "no worker steals nearly all",
    "D32": "a worker told to be quiet does not steal",
    "D33": "a pause of half a second",
    "D35": "a job of ten leases",
    "D36": "a host dies while busy",
    "P5": "innocent job beside two killers",
    "P7": "no start below a ready higher tier",
    "P12": "all gossip dropped",
    "crowd": "many processes on one storage",
    "death": "killed beside an idle worker",
    "drain": "a full buffer and SIGTERM",
    "three": "three workers, one with all the work",
    "sigterm": "many SIGTERMs under load",
    "held": "a process that cannot say that it lives",
    "away": "storage away: killed, flapping, frozen, locked",
    "outage": "storage out of reach, clock stepped",
    "stall": "a body that does not end in its time",
}

FULL: Final = os.environ.get(FULL_ENV) == "full"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def scaled(seconds: float) -> float:
    """A case's own time of a job or a wait: as it stands, or a quarter of it."""
    return seconds if FULL else seconds / 4


class Case:
    """One run of one case: its name, what it was run with, what came out beside what is allowed."""

    def __init__(self, name: str, storage: str, **parameters: Any) -> None:
        self.name = name
        self._storage = storage
        self._parameters = {"times": "full" if FULL else "divided by 4", **parameters}
        self._measured: dict[str, Any] = {}
        self._bound: dict[str, str] = {}
        self._failed: list[str] = []

    def at_most(self, what: str, measured: float, bound: float) -> None:
        """Note a figure that must not be greater than its bound; judged in `close`. Seconds (`…_s`) are held
        to it at full times; a run among other tests shows what happens, and only roughly how soon."""
        if what.endswith("_s") and not FULL:
            bound = soon(bound)
        self._note(what, round(measured, 3), f"<= {bound:g}", holds=measured <= bound)

    def at_least(self, what: str, measured: float, bound: float) -> None:
        """The same for a figure that must not be smaller."""
        self._note(what, round(measured, 3), f">= {bound:g}", holds=measured >= bound)

    def equal(self, what: str, measured: Any, expected: Any) -> None:
        """Note something that must be just so; judged in `close`."""
        self._note(
            what, measured, f"= {json.dumps(expected, default=_plain)}", holds=bool(measured == expected)
        )

    def tell(self, what: str, measured: Any) -> None:
        """Note a figure that has no bound."""
        self._note(what, measured, "told", holds=True)

    def _note(self, what: str, measured: Any, bound: str, *, holds: bool) -> None:
        if what in self._measured:
            raise KeyError(f"{what!r} was measured already")
        self._measured[what] = measured
        self._bound[what] = bound
        if not holds:
            self._failed.append(f"{what}: {measured}, must be {bound}")

    def close(self, found: list[str]) -> None:
        """Print the line; fail if a figure is out of its bound, or the history checker found something."""
        failed = [*self._failed, *found]
        line = json.dumps(
            {
                "case": self.name,
                "title": TITLES[self.name],
                "storage": self._storage,
                "parameters": self._parameters,
                "measured": self._measured,
                "bound": self._bound,
                "load": round(os.getloadavg()[0], 1),
                "passed": not failed,
            },
            default=_plain,
        )
        LINES.append(line)
        path = os.environ.get(LINES_ENV)
        if path:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        print(line)
        assert not failed, "\n".join([f"{self.name}:", *failed])
