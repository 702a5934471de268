"""What commands print: data on stdout, everything else on stderr; JSON is one UTF-8 document."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec

from fluxmesh.job import TIER_NAMES

_encode = msgspec.json.Encoder().encode


# -- stdout ------------------------------------------------------------------------------------------


class OutputFailed(Exception):
    """Standard output takes no more: whoever read it has gone, or its disk is full."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.reader_gone = isinstance(error, BrokenPipeError)
        self.why = error.strerror or str(error)


@contextmanager
def writing() -> Iterator[None]:
    """Around everything that writes to standard output."""
    try:
        yield
    except OSError as error:
        raise OutputFailed(error) from error


def flush() -> None:
    if sys.stdout is not None:
        with writing():
            sys.stdout.flush()


def line(text: str = "") -> None:
    """A line of data. Control characters of the data are shown escaped, never obeyed."""
    if sys.stdout is not None:
        encoding = sys.stdout.encoding or "utf-8"
        with writing():
            print(text.encode(encoding, "backslashreplace").decode(encoding))


def json_text(text: str | bytes) -> None:
    """A piece of a JSON document, in UTF-8 whatever the terminal's encoding is."""
    if sys.stdout is not None:
        with writing():
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode() if isinstance(text, str) else text)


def json_document(value: Any) -> None:
    json_text(_encode(value) + b"\n")


def encoded(value: Any) -> bytes:
    """JSON of anything made of builtins and structs."""
    return _encode(value)


def shown(value: object) -> str:
    """A value as one line of readable JSON."""
    return safe(_encode(value).decode())


def safe(text: str, *, most: int = 0) -> str:
    """Text without control characters; cut with an ellipsis at `most` characters if that is given."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f"{text[: most - 1]}…" if most and len(text) > most else text


def safe_lines(text: str) -> str:
    """The same for a text of several lines, such as a traceback."""
    return "\n".join(safe(part) for part in text.expandtabs(4).splitlines())


def is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> None:
    """Aligned columns; drawn on a terminal, plain in a pipe. Cells are data and shown as such."""
    cells = [[safe(cell) for cell in row] for row in rows]
    if is_terminal():
        _drawn_table(columns, cells, frozenset(right))
        return
    widths = [max(len(row[i]) for row in (columns, *cells)) for i in range(len(columns))]
    for row in (columns, *cells):
        parts = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        )
        line("  ".join(parts).rstrip())


def _drawn_table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        drawn.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    Console().print(drawn)


# -- stderr ------------------------------------------------------------------------------------------


def note(text: str) -> None:
    """A remark that is no data."""
    if sys.stderr is not None:
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            pass  # nobody reads stderr; the data on stdout is still worth printing


def tell_error(message: str, hint: str = "") -> None:
    note(f"error: {safe(message)}")
    if hint:
        note(f"hint: {safe(hint)}")


# -- values ------------------------------------------------------------------------------------------


def instant(seconds: float | None) -> str:
    """Epoch seconds as UTC, to the millisecond; the bare number for what no calendar holds."""
    if seconds is None:
        return ""
    try:
        at = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f}"
    return at.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


def tier(number: int) -> str:
    return TIER_NAMES[number]
