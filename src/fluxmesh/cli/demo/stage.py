"""How the demo looks: bars that move on a terminal, lines otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, Protocol

from fluxmesh.cli import output
from fluxmesh.job import TIER_NAMES
from fluxmesh.storage.values import QueueStats

LINE_EVERY: Final = 10  # looks between two lines of plain progress


class Progress(Protocol):
    """Told at every look how much is left; and of what is worth a line of its own."""

    def update(self, elapsed_s: float, stats: QueueStats) -> None: ...
    def remark(self, text: str) -> None: ...


def heading(text: str) -> None:
    if not output.is_terminal():
        output.line(f"\n== {text}")
        return
    from rich.console import Console
    from rich.rule import Rule

    Console().print(Rule(f"[bold]{text}", align="left", style="cyan"))


def say(text: str) -> None:
    output.line(output.safe(text))
    output.flush()  # whoever reads a pipe sees it happen


def stack(text: str) -> None:
    """A dead letter's stack, in red on a terminal."""
    if not output.is_terminal():
        for part in text.splitlines():
            output.line(f"    {output.safe_lines(part)}")
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    Console().print(Padding(Text(output.safe_lines(text), style="red"), (0, 0, 0, 4)))


@contextlib.contextmanager
def progress(totals: tuple[int, int, int, int]) -> Iterator[Progress]:
    if output.is_terminal():
        with _bars(totals) as shown:
            yield shown
    else:
        yield _Lines(totals)


class _Lines:
    def __init__(self, totals: tuple[int, int, int, int]) -> None:
        self._totals = totals
        self._looks = 0
        self._last = ""

    def update(self, elapsed_s: float, stats: QueueStats) -> None:
        parts = (
            f"{name} {max(total - left, 0)}/{total}"
            for name, total, left in zip(TIER_NAMES, self._totals, stats.queued, strict=True)
        )
        text = f"{'  '.join(parts)}  running {stats.running}  scheduled {stats.scheduled}"
        if text != self._last and (self._looks % LINE_EVERY == 0 or not stats.running):
            say(f"{elapsed_s:6.1f} s  started: {text}")
            self._last = text
        self._looks += 1

    def remark(self, text: str) -> None:
        say(f"          {text}")


@contextlib.contextmanager
def _bars(totals: tuple[int, int, int, int]) -> Iterator[Progress]:
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description:<9}"),
        bars.BarColumn(bar_width=40),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[note]}"),
    )
    with bars.Progress(*columns) as drawn:
        tiers = [
            drawn.add_task(name, total=max(total, 1), note="")
            for name, total in zip(TIER_NAMES, totals, strict=True)
        ]

        class Bars:
            def update(self, elapsed_s: float, stats: QueueStats) -> None:
                for bar, total, left in zip(tiers, totals, stats.queued, strict=True):
                    drawn.update(bar, completed=max(total - left, 0))
                note = f"{stats.running} running, {stats.scheduled} scheduled, {elapsed_s:.1f} s"
                drawn.update(tiers[-1], note=note)

            def remark(self, text: str) -> None:
                drawn.console.print(output.safe(text), markup=False, highlight=False)

        yield Bars()
