"""Verbs over many job ids: in batches, one answer for each, exit 6 if one of them could not be done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from fluxmesh.cli import output, waiting
from fluxmesh.config import BATCH_MAX
from fluxmesh.errors import FluxMeshError, JobConflict
from fluxmesh.storage.values import Done

T = TypeVar("T")


class Told(Struct, frozen=True):
    """What became of one job: its status in capitals, or why nothing was done."""

    job_id: str
    status: str = ""
    cancel_requested: bool = False
    failure: FluxMeshError | None = None

    @property
    def document(self) -> dict[str, Any]:
        if self.failure is not None:
            return {
                "job_id": self.job_id,
                "error": {"code": self.failure.code, "message": self.failure.message},
            }
        flag = {"cancel_requested": True} if self.cancel_requested else {}
        return {"job_id": self.job_id, "status": self.status, **flag}

    @property
    def text(self) -> str:
        return f"{self.job_id} {self.status}{' cancel requested' if self.cancel_requested else ''}"


async def in_batches(
    verb: Callable[[Sequence[str]], Awaitable[list[T]]], ids: Sequence[str]
) -> list[tuple[str, T]]:
    """The verb's answer for each id, in order; an id given twice is asked for once."""
    wanted = list(dict.fromkeys(ids))
    answers: list[tuple[str, T]] = []
    for start in range(0, len(wanted), BATCH_MAX):
        batch = wanted[start : start + BATCH_MAX]
        answers.extend(zip(batch, await verb(batch), strict=True))
    return answers


def told(job_id: str, answer: Done, done: str, why_not: str) -> Told:
    match answer:
        case Done.DONE:
            return Told(job_id, done)
        case Done.CONFLICT:
            hint = f"`fluxmesh jobs show {job_id}` tells which"
            return Told(job_id, failure=JobConflict(f"job {job_id} {why_not}", hint=hint))
        case Done.UNKNOWN:
            return Told(job_id, failure=waiting.unknown(job_id))


def report(items: Sequence[Told], *, as_json: bool) -> int:
    """Print the answers; 0, or the exit code of the first that failed."""
    failures = [item.failure for item in items if item.failure is not None]
    if as_json:
        output.json_document({"items": [item.document for item in items]})
    else:
        for item in items:
            if item.failure is None:
                output.line(item.text)
    for failure in failures:
        output.tell_error(failure.message, failure.hint)
    return failures[0].exit_code if failures else 0
