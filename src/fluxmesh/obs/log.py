"""Log events with fields: `log.info("jobs reaped", count=3, worker="w1")`.

As a library FluxMesh stays quiet: until `configure` is called, events from warning upwards go to the
standard logger "fluxmesh", where an application may pick them up, and nothing is printed. Commands call
`configure`; from then on structlog renders every event at or above the level to one stream. structlog is
loaded no earlier than that.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

from fluxmesh.errors import InvalidOption

DEBUG: Final = logging.DEBUG
INFO: Final = logging.INFO
WARNING: Final = logging.WARNING
ERROR: Final = logging.ERROR
LEVELS: Final[Mapping[str, int]] = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR}
FORMATS: Final = ("text", "json")
_NAMES: Final = {number: name for name, number in LEVELS.items()}

Sink = Callable[[int, str, str, dict[str, Any]], None]

_library = logging.getLogger("fluxmesh")
_library.addHandler(logging.NullHandler())  # without it, logging's last resort would print


def _to_library(level: int, name: str, event: str, fields: dict[str, Any]) -> None:
    if not _library.isEnabledFor(level):
        return
    exc_info = fields.pop("exc_info", None)
    text = " ".join([event, *(f"{key}={value!r}" for key, value in fields.items())])
    _library.log(level, "%s", text, exc_info=exc_info, extra={"fluxmesh_logger": name})


class _State:
    """Where events go, and from which level on: one per process."""

    threshold: int = WARNING
    sink: Sink = staticmethod(_to_library)
    rendering: tuple[str, str] | None = None


def configure(level: str = "info", format: str = "text", stream: TextIO | None = None) -> None:
    """Render events at or above `level` to `stream` (default: stderr as it is now), one line an event.

    `format` "json": one object a line, with an ISO 8601 UTC timestamp; "text": for people, coloured on a
    terminal. May be called again. Raises InvalidOption. A stream that cannot be written to loses events
    and harms nothing else.
    """
    if level not in LEVELS:
        raise InvalidOption("log_level", f"{level!r} is unknown", hint=", ".join(LEVELS))
    if format not in FORMATS:
        raise InvalidOption("log_format", f"{format!r} is unknown", hint=" or ".join(FORMATS))
    _State.sink = _structlog_sink(format, sys.stderr if stream is None else stream)
    _State.threshold = LEVELS[level]
    _State.rendering = (level, format)


def rendering() -> tuple[str, str] | None:
    """Level and format that `configure` was called with; None: this is a library in somebody's program."""
    return _State.rendering


def reset() -> None:
    """Back to the manners of a library, as if `configure` had never been called."""
    _State.sink = _to_library
    _State.threshold = WARNING
    _State.rendering = None


def _structlog_sink(format: str, stream: TextIO) -> Sink:
    import structlog

    shared: list[Any] = [structlog.processors.TimeStamper(fmt="iso", utc=True)]
    if format == "json":
        renderer = structlog.processors.JSONRenderer(serializer=_dumps)
        shared += [structlog.processors.format_exc_info, renderer]
    else:
        shared.append(
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            )
        )
    # Wrapped by hand: structlog.configure() belongs to the application, whose tasks may use it too.
    logger = structlog.wrap_logger(
        structlog.WriteLogger(stream), processors=shared, wrapper_class=structlog.BoundLogger
    )

    def emit(level: int, name: str, event: str, fields: dict[str, Any]) -> None:
        if "event" in fields:
            fields["event_"] = fields.pop("event")
        fields["level"] = _NAMES.get(level, str(level))
        fields["logger"] = name
        try:
            logger.msg(event, **fields)
        except (OSError, ValueError):
            pass  # the stream is closed or full: there is nowhere left to say so

    return emit


def _dumps(fields: dict[str, Any], **options: Any) -> str:
    """JSON of any fields at all: what has no JSON is written as its repr."""
    try:
        return json.dumps(fields, **options)
    except (TypeError, ValueError, RecursionError):
        return json.dumps({str(key): repr(value) for key, value in fields.items()})


class Logger:
    """Events of one part of the program. Cheap to make; safe in every thread."""

    __slots__ = ("_fields", "_name")

    def __init__(self, name: str, fields: Mapping[str, Any] | None = None) -> None:
        self._name = name
        self._fields = dict(fields or {})

    def bind(self, **fields: Any) -> Logger:
        """The same logger with these fields on each of its events."""
        return Logger(self._name, {**self._fields, **fields})

    def enabled(self, level: int) -> bool:
        """True if an event of this level goes anywhere: asked on hot paths before fields are gathered."""
        return level >= _State.threshold

    def debug(self, event: str, /, **fields: Any) -> None:
        if _State.threshold <= DEBUG:
            _State.sink(DEBUG, self._name, event, {**self._fields, **fields})

    def info(self, event: str, /, **fields: Any) -> None:
        if _State.threshold <= INFO:
            _State.sink(INFO, self._name, event, {**self._fields, **fields})

    def warning(self, event: str, /, **fields: Any) -> None:
        if _State.threshold <= WARNING:
            _State.sink(WARNING, self._name, event, {**self._fields, **fields})

    def error(self, event: str, /, **fields: Any) -> None:
        _State.sink(ERROR, self._name, event, {**self._fields, **fields})

    def exception(self, event: str, /, **fields: Any) -> None:
        """An error with the stack of the exception being handled."""
        _State.sink(ERROR, self._name, event, {**self._fields, "exc_info": True, **fields})


def get_logger(name: str) -> Logger:
    """The logger of a part of the program, named as in "worker" or "housekeeping"."""
    return Logger(name)
