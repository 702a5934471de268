"""From what a server refused, or did not answer, to the error of ours that says the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from fluxmesh.errors import (
    FluxMeshError,
    InvalidOption,
    JobUnsuccessful,
    OutcomeUnknown,
    StorageUnreachable,
)

PLAINLY_REFUSED: Final = frozenset({"storage_unreachable", "server_busy"})  # said by codes: nothing was done
_SHOWN_MOST: Final = 500


class ServerRefused(FluxMeshError):
    """A refusal that only HTTP has a word for, or an answer that is none of FluxMesh's.

    `status` is the HTTP status, `problem` the code of the problem document, "" if there was none."""

    code = "server_refused"

    def __init__(self, message: str, *, status: int, problem: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.problem = problem


class ServerBusy(ServerRefused):
    """Too many requests are under way; this one was not looked at."""

    code = "server_busy"
    http_status = 503
    retryable = True


class Problem(msgspec.Struct, frozen=True):
    """The problem document of the API; members that it may gain later are passed over."""

    code: str
    detail: str
    field: str | None = None
    hint: str = ""


def _tree(root: type[FluxMeshError]) -> Iterator[type[FluxMeshError]]:
    for kind in root.__subclasses__():
        # JobUnsuccessful and those below it tell of a job, never of a request.
        if kind.__module__ == root.__module__ and not issubclass(kind, JobUnsuccessful):
            yield kind
            yield from _tree(kind)


_BY_CODE: Final[dict[str, type[FluxMeshError]]] = {kind.code: kind for kind in _tree(FluxMeshError)}
_decode = msgspec.json.Decoder(Problem).decode


def problem_error(problem: Problem, status: int) -> FluxMeshError:
    """The error of this code, with the server's words."""
    kind = _BY_CODE.get(problem.code)
    if kind is None:
        refused = ServerBusy if problem.code == "too_busy" else ServerRefused
        return refused(problem.detail, status=status, problem=problem.code, hint=problem.hint)
    if kind is InvalidOption:
        field = problem.field or "request"
        return InvalidOption(field, problem.detail.removeprefix(f"{field}: "), hint=problem.hint)
    return kind(problem.detail, hint=problem.hint)


def error_of(status: int, body: bytes, where: str, *, repeatable: bool) -> FluxMeshError:
    """The error that an answer with this status tells. A gateway that gave up on the server leaves open
    whether a request was done, unless a repetition does no harm."""
    try:
        return problem_error(_decode(body), status)
    except msgspec.MsgspecError:
        pass
    if status in (502, 503, 504):
        lost = f"{where} answers {status}: what stands before the server cannot reach it"
        return lost_error(lost, where, maybe_done=not repeatable, told=True)
    hint = "is this the address of a FluxMesh server?"
    if 300 <= status < 400:
        hint = "redirections are not followed: give the address that it names"
    return ServerRefused(f"{where} answers {status}, and with no problem document", status=status, hint=hint)


def lost_error(why: str, where: str, *, maybe_done: bool, told: bool = False) -> FluxMeshError:
    """No answer of the server: OutcomeUnknown if it may have done what was asked, else StorageUnreachable."""
    message = why if told else f"no answer from {where}: {why[:_SHOWN_MOST]}"
    if maybe_done:
        return OutcomeUnknown(message, hint="the server may have done it: look before you repeat it")
    return StorageUnreachable(message, hint="is the server running, and is its address right?")


def unreadable(where: str, what: Any) -> ServerRefused:
    return ServerRefused(
        f"{where} gave an answer that this client cannot read: {str(what)[:_SHOWN_MOST]}",
        status=200,
        hint="is this the address of a FluxMesh server, and of this client's version?",
    )
