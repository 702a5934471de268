"""An exception as data: bounded, and made without trust in the exception's own methods."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import CodeType, TracebackType
from typing import Final

from fluxmesh.context import carried
from fluxmesh.job import JobError

MAX_TYPE_CHARS: Final = 200
MAX_MESSAGE_CHARS: Final = 2_000
MAX_FRAMES: Final = 50
MAX_TEXT_BYTES: Final = 16 << 10
MAX_CHAIN: Final = 10
_HEAD_BYTES: Final = 4 << 10
_CUT: Final = "\n[…]\n"
_OWN_FOLDER: Final = str(Path(__file__).parent)


def describe(error: BaseException) -> JobError:
    """Type, message, frames (causes first, the failure's own innermost frame last) and traceback text.

    Never raises, whatever __str__, __repr__ or __cause__ of the exception do.
    """
    try:
        kind, frames = carried(_type_name(error)[:MAX_TYPE_CHARS]), _frames(error)
    except BaseException:  # even __cause__ and __qualname__ may be properties that raise
        kind, frames = "Exception", ()
    return JobError(kind, carried(message_of(error)[:MAX_MESSAGE_CHARS]), frames, _text(error))


def _type_name(error: BaseException) -> str:
    kind = type(error)
    module = kind.__module__
    if not isinstance(module, str) or module in ("builtins", "__main__", "__mp_main__"):
        return kind.__qualname__
    return f"{module}.{kind.__qualname__}"


def message_of(error: BaseException) -> str:
    """What the exception says. Never raises."""
    try:
        return str(error)
    except BaseException:  # the body's own code, which may raise anything
        return "(its message could not be made: __str__ raised)"


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and what led to it, the first cause first."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and len(chain) < MAX_CHAIN and all(following is not seen for seen in chain):
        chain.append(following)
        cause, hidden = following.__cause__, following.__suppress_context__
        following = cause if cause is not None else None if hidden else following.__context__
    chain.reverse()
    return chain


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is not the worker's."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        trace = trace.tb_next
    return trace


def without_tail(error: BaseException, code: CodeType) -> None:
    """Cut the frames of this function, where they are the innermost ones, off the tracebacks of an exception
    and of what led to it."""
    try:
        for link in _chain(error):
            frames: list[TracebackType] = []
            trace = link.__traceback__
            while trace is not None:
                frames.append(trace)
                trace = trace.tb_next
            while len(frames) > 1 and frames[-1].tb_frame.f_code is code:
                frames.pop()
                frames[-1].tb_next = None
    except BaseException:  # __cause__ may be a property that raises anything: then it is told as it is
        return


def _frames(error: BaseException) -> tuple[str, ...]:
    lines: list[str] = []
    for link in _chain(error):
        trace = _own(link.__traceback__)
        own: list[str] = []
        while trace is not None:
            code = trace.tb_frame.f_code
            own.append(carried(f"{code.co_filename}:{trace.tb_lineno} {code.co_qualname}"[:500]))
            if len(own) > MAX_FRAMES:
                del own[0]  # a deep recursion: the innermost frames tell most
            trace = trace.tb_next
        lines += own
    return tuple(lines[-MAX_FRAMES:])


def _text(error: BaseException) -> str:
    try:
        summary = traceback.TracebackException(
            type(error), error, _own(error.__traceback__), limit=-MAX_FRAMES, compact=True
        )
        text = "".join(summary.format())
    except BaseException:  # __notes__, __cause__ and their like may be anything
        text = f"{message_of(error)}\n(the traceback could not be written)"
    blob = text.encode("utf-8", "backslashreplace")
    if len(blob) > MAX_TEXT_BYTES:
        tail = MAX_TEXT_BYTES - _HEAD_BYTES - len(_CUT.encode())
        return blob[:_HEAD_BYTES].decode("utf-8", "ignore") + _CUT + blob[-tail:].decode("utf-8", "ignore")
    return blob.decode("utf-8")
