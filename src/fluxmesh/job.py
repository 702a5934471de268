"""A job: its states, the one table of legal transitions, its record, its history, its fingerprint."""

from __future__ import annotations

import hashlib
import re
from enum import IntEnum, StrEnum
from typing import Any, Final

from msgspec import Struct, field


class Priority(IntEnum):
    """The four tiers. A lower number runs first."""

    CRITICAL = 0
    HIGH = 1
    DEFAULT = 2
    LOW = 3


TIER_NAMES: Final = ("critical", "high", "default", "low")
TIERS: Final = (0, 1, 2, 3)
HISTORY_KEPT: Final = 50


class Status(StrEnum):
    SCHEDULED = "SCHEDULED"
    PENDING = "PENDING"
    CLAIMED = "CLAIMED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    DEAD_LETTER = "DEAD_LETTER"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"


TERMINAL: Final = frozenset({Status.COMPLETED, Status.DEAD_LETTER, Status.CANCELLED, Status.EXPIRED})
REPLAYABLE: Final = TERMINAL - {Status.COMPLETED}

# from -> the states a job may be moved to, and by what. Rendered into docs/job-states.md.
TRANSITIONS: Final[dict[Status, dict[Status, str]]] = {
    Status.SCHEDULED: {
        Status.PENDING: "due (promote)",
        Status.CANCELLED: "cancel",
        Status.EXPIRED: "not started in time",
    },
    Status.PENDING: {
        Status.CLAIMED: "claim into a buffer (held)",
        Status.RUNNING: "claim into a slot",
        Status.CANCELLED: "cancel",
        Status.EXPIRED: "not started in time",
    },
    Status.CLAIMED: {
        Status.RUNNING: "begin",
        Status.CLAIMED: "transfer to another worker",
        Status.PENDING: "release, outranked, reaped",
        Status.CANCELLED: "cancel",
        Status.EXPIRED: "not started in time",
    },
    Status.RUNNING: {
        Status.COMPLETED: "the body returned",
        Status.SCHEDULED: "retry, snooze, retry after a crash, no process for its body",
        Status.PENDING: "interrupted, released, reaped after the first crash",
        Status.DEAD_LETTER: "retries, crashes or snoozes used up, given up, undecodable",
        Status.CANCELLED: "any end but a normal return while the cancel flag stands",
    },
    Status.COMPLETED: {},
    Status.DEAD_LETTER: {Status.PENDING: "replay (a new life)"},
    Status.CANCELLED: {Status.PENDING: "replay (a new life)"},
    Status.EXPIRED: {Status.PENDING: "replay (a new life)"},
}


def is_legal(before: Status, after: Status) -> bool:
    """True if the table allows this move."""
    return after in TRANSITIONS[before]


class Outcome(StrEnum):
    """How a start ended; kept in the history."""

    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    SNOOZED = "snoozed"
    INTERRUPTED = "interrupted"
    CRASHED = "crashed"
    CANCELLED = "cancelled"
    GIVEN_UP = "given_up"
    UNDECODABLE = "undecodable"


class JobError(Struct, frozen=True, array_like=True):
    """An exception as data. `frames` are "file:line function" lines, outermost first, causes included."""

    type: str
    message: str
    frames: tuple[str, ...] = ()
    text: str = ""


class Attempt(Struct, frozen=True):
    """One start of the body as kept in the history. Times are epoch seconds of the storage's clock."""

    life: int
    attempt: int
    started_at: float | None
    ended_at: float
    worker_id: str
    outcome: Outcome
    error: JobError | None = None


class JobOptions(Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a submission says about how to run it. None = the task's own option, else the default.

    Kept in storage as one opaque value: nothing that storage decides by lives here.
    """

    max_retries: int | None = None
    backoff_strategy: str | None = None
    backoff_base_seconds: float | None = None
    max_backoff_seconds: float | None = None
    jitter: str | None = None
    timeout_seconds: float | None = None
    affinity_key: str | None = None
    tags: tuple[str, ...] = ()
    headers: dict[str, str] = {}
    max_crashes: int | None = None
    idempotency_key: str | None = None
    fallback_timeout_seconds: float | None = None  # of the door; weaker than the task's own


class Job(Struct, frozen=True, kw_only=True):
    """The record of a job as every door shows it. Times are epoch seconds of the storage's clock.

    `args` and `kwargs` are None for a payload that cannot be decoded; `raw_payload` then holds it as hex.
    """

    id: str
    task: str
    queue: str
    priority: int
    status: Status
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    raw_payload: str | None = None
    max_retries: int | None = None
    backoff_strategy: str | None = None
    backoff_base_seconds: float | None = None
    max_backoff_seconds: float | None = None
    jitter: str | None = None
    timeout_seconds: float | None = None
    max_crashes: int | None = None
    idempotency_key: str | None = None
    unique_key: str | None = None
    affinity_key: str | None = None
    concurrency_key: str | None = None
    concurrency_limit: int | None = None
    tags: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    attempts: int = 0
    crashes: int = 0
    snoozes: int = 0
    interruptions: int = 0
    life: int = 1
    token: int = 0
    progress: float = 0.0
    progress_message: str | None = None
    cancel_requested: bool = False
    timed_out: bool = False
    created_at: float = 0.0
    scheduled_at: float | None = None
    expires_at: float | None = None
    started_at: float | None = None
    completed_at: float | None = None
    worker_id: str | None = None
    waiting_for: str | None = None
    result: Any = None
    error: JobError | None = None
    reason: str | None = None
    fingerprint: str | None = None

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL


_VOLATILE: Final = re.compile(
    r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}|\b[0-9a-fA-F]{16,}\b|\d+(?:\.\d+)?|'[^']*'|\"[^\"]*\""
)


def fingerprint(task: str, error: JobError) -> str:
    """16 hexadecimal digits that are equal for failures of one kind.

    Made of the task, the error's type, its innermost frame and the message with numbers, ids, addresses
    and quoted text taken out.
    """
    frame = re.sub(r":\d+", "", error.frames[-1]) if error.frames else ""
    message = _VOLATILE.sub("#", error.message[:1_000])
    text = "\x1f".join((task, error.type, frame, message))
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
