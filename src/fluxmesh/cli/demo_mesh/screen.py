"""How the demo looks: a picture that changes on a terminal, a line a second otherwise."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, Protocol

from fluxmesh.cli import output
from fluxmesh.cli.demo.stage import heading, say
from fluxmesh.cli.demo_mesh.atlas import REGIONS
from fluxmesh.cli.demo_mesh.figures import Look, RegionLook, Summary

KEYS: Final = "b = a burst of long jobs   k = kill a region (-9)   r = bring it back   q = end"
LEGEND: Final = "OWN: of its own keys   STOLEN, GIVEN: over the mesh   BY STORAGE: taken by storage alone"
REMARKS_SHOWN: Final = 8
PAIRS_SHOWN: Final = 3
LINE_EVERY_S: Final = 1.0
_NUMBERS: Final = (
    ("RUNNING", 7),
    ("HELD", 4),
    ("DONE", 5),
    ("OWN", 5),
    ("STOLEN", 6),
    ("GIVEN", 5),
    ("BY STORAGE", 10),
)
_BAR: Final = 24
_STATES: Final = {"alive": "green", "killed": "red"}


class Screen(Protocol):
    """Told now and then how things are, and of what is worth a line of its own."""

    def show(self, look: Look) -> None: ...
    def remark(self, elapsed_s: float, text: str) -> None: ...


@contextlib.contextmanager
def screen(*, drawn: bool, quiet: bool) -> Iterator[Screen]:
    """`drawn` on a terminal; `quiet`: nothing at all, for who wants only the summary as JSON."""
    if quiet:
        yield _Silent()
    elif drawn:
        with _picture() as picture:
            yield picture
    else:
        yield _Lines()


class _Silent:
    def show(self, look: Look) -> None:
        pass

    def remark(self, elapsed_s: float, text: str) -> None:
        pass


class _Lines:
    def __init__(self) -> None:
        self._next_s = 0.0

    def show(self, look: Look) -> None:
        if look.elapsed_s < self._next_s:
            return
        self._next_s = look.elapsed_s + LINE_EVERY_S
        held = " ".join(f"{one.region} {one.running}+{one.held}" for one in look.regions)
        took = sum(one.took for one in look.regions)
        by_storage = sum(one.took_by_storage for one in look.regions)
        say(
            f"{look.elapsed_s:5.1f} s  {look.done}/{look.submitted} done, {look.done_per_s:.0f}/s, "
            f"{look.waiting} wait; run+held: {held}; taken: {took} by the mesh, {by_storage} by storage"
        )

    def remark(self, elapsed_s: float, text: str) -> None:
        say(f"{elapsed_s:5.1f} s  * {text}")


class _Picture:
    def __init__(self, live: Any) -> None:
        self._live = live
        self._remarks: deque[str] = deque(maxlen=REMARKS_SHOWN)

    def show(self, look: Look) -> None:
        self._live.update(_drawn(look, list(self._remarks)), refresh=True)

    def remark(self, elapsed_s: float, text: str) -> None:
        self._remarks.append(f"{elapsed_s:5.1f} s  {output.safe(text)}")


@contextlib.contextmanager
def _picture() -> Iterator[Screen]:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True, redirect_stdout=False, redirect_stderr=False) as live:
        yield _Picture(live)


def _drawn(look: Look, remarks: list[str]) -> Any:
    from rich.console import Group
    from rich.text import Text

    took = sum(one.took for one in look.regions)
    by_storage = sum(one.took_by_storage for one in look.regions)
    head = (
        f"{look.elapsed_s:5.1f} s   {look.done:,} of {look.submitted:,} jobs done, "
        f"{look.done_per_s:,.0f} a second, {look.waiting:,} wait\n"
        f"taken from others: {took} over the mesh, {by_storage} through storage alone"
    )
    parts = [
        Text(head, style="bold"),
        Text(KEYS, style="dim"),
        _regions(look.regions),
        Text(LEGEND, style="dim"),
        _round_trips(look),
    ]
    return Group(*parts, *(Text(remark) for remark in reversed(remarks)))


def _regions(regions: tuple[RegionLook, ...]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("REGION", min_width=9, no_wrap=True)
    table.add_column("STATE", min_width=15, max_width=15, no_wrap=True)
    for name, width in _NUMBERS:
        table.add_column(name, justify="right", min_width=width, no_wrap=True)
    table.add_column("", no_wrap=True, overflow="crop")
    for one in regions:
        seen = one.standing.partition(",")[0]  # as most see it
        state = seen or "joining" if one.alive else "killed"
        numbers = (one.running, one.held, one.done, one.own, one.took, one.left, one.took_by_storage)
        bar = ("█" * one.running + "░" * one.held)[:_BAR]
        table.add_row(
            one.region,
            Text(state if one.alive else f"killed, {seen}", style=_STATES.get(state, "yellow")),
            *(f"{number:,}" for number in numbers),
            Text(bar, style="cyan"),
        )
    return table


def _round_trips(look: Look) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("RTT MS, FROM", no_wrap=True)
    for region in REGIONS:
        table.add_column(region, justify="right", no_wrap=True)
    for one in REGIONS:
        measured = (look.round_trips_ms.get((one, other)) for other in REGIONS)
        table.add_row(one, *("" if rtt is None else f"{rtt:,.0f}" for rtt in measured))
    return table


def tell(summary: Summary) -> None:
    """The summary, for people."""
    heading("Result")
    columns = ("REGION", "COMPLETED", "OWN", "OTHERS'", "STOLEN", "GIVEN", "BY STORAGE", "RUNS")
    rows = [
        tuple(
            str(value)
            for value in (
                one.region, one.completed, one.own, one.others,
                one.stolen_in, one.stolen_out, one.taken_held, one.runs,
            )
        )
        for one in summary.regions
    ]  # fmt: skip
    output.table(columns, rows, right=columns[1:])
    output.flush()
    say(
        f"jobs      {summary.completed:,} of {summary.jobs:,} completed in {summary.seconds:.1f} s, "
        f"{summary.jobs_per_s:,.0f} a second"
    )
    say(
        f"stolen    {summary.jobs_stolen_in:,} jobs by {summary.steals_succeeded:,} of "
        f"{summary.steals_initiated:,} requests over the mesh; "
        f"{summary.jobs_taken_held:,} jobs by storage alone"
    )
    if summary.thefts:
        pairs = [f"{one.thief} {one.jobs} from {one.victim}" for one in summary.thefts[:PAIRS_SHOWN]]
        if rest := sum(one.jobs for one in summary.thefts[PAIRS_SHOWN:]):
            pairs.append(f"{rest} between others")
        say(f"          {', '.join(pairs)}")
    if starts := summary.starts_counted:
        share = summary.affinity_hits / starts
        say(f"affinity  {share:.0%} of {starts:,} starts that were counted were at the owner of their key")
    if summary.kills:
        say(
            "          not counted: what a killed region did last, and started before it met the others again"
        )
        times = "once" if summary.kills == 1 else f"{summary.kills:,} times"
        jobs = "1 job was" if summary.ran_again == 1 else f"{summary.ran_again:,} jobs were"
        say(f"killed    {times}; {jobs} started once more for it")
    if summary.unfinished:
        say(f"left      {summary.unfinished:,} jobs that had not ended yet")
    say(f"checked   {summary.lost} lost, {summary.doubled} doubled: by what storage holds and bodies told")
