"""Every error FluxMesh raises, as one tree.

FluxMeshError
├── UsageError                 a value the caller gave is not acceptable
│   ├── InvalidOption          an option, field or name (422, exit 2)
│   ├── InvalidPayload         arguments or a result that cannot be carried (422, exit 2)
│   ├── PayloadTooLarge        more bytes or levels than the limits allow (413, exit 2)
│   ├── DuplicateTask          two tasks of one name
│   └── WouldDeadlock          a task waits for a job of its own worker
├── AppImportFailed            the module given with --app cannot be imported (exit 3)
├── StorageError
│   ├── StorageUnreachable     nobody answers, or the file cannot be opened (503, exit 4)
│   ├── StorageMissing         no database where one was named (exit 4)
│   ├── StorageRefused         a foreign or newer schema, a network file system
│   │   ├── StorageDamaged      the file is not sound: trying again mends nothing (exit 4)
│   │   └── StorageLoginRefused  it wants another user or password, or allows this one too little (exit 5)
│   └── OutcomeUnknown         the request may or may not have been applied; safe to repeat
├── NotAuthorised              a request without a token that the server knows (401, exit 5)
├── JobNotFound                404, exit 6
│   └── JobGone                the id is older than jobs are kept (410)
├── JobConflict                the job's state does not allow this (409, exit 6)
│   └── IdempotencyConflict    the key is known with another payload
├── NotInMesh                  nobody told of a mesh that has this (404, exit 6)
├── QueueFull                  429
├── ResourceFailed             what a task needs could not be built: its attempt fails
├── JobUnsuccessful            `result()` of a job that did not complete (exit 10)
│   ├── JobFailed · JobCancelled · JobExpired
├── WaitTimeout                the job had not ended in time (exit 124)
├── WorkerRetired              a worker ended because a body could not be stopped
└── WorkerFenced               a worker ended because another took over its id

Every message says what happened, where, and what to try. `code` is stable and meant for programs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Final

_SHOWN_MOST: Final = 80
# Up to the last @: a password in which nobody has escaped a / or a ? is hidden as well, and so is one of a
# URL that lacks a slash or its scheme.
_PASSWORD: Final = re.compile(r"^((?:[A-Za-z][\w+.-]*:/+)?+[^:@]*:).*@", re.DOTALL)
_URL_OPTION: Final = re.compile(r"(?<=[?&;])([^=&;#]*)=[^&;#]*")
# Any other may be a password whose name was mistyped.
_OPEN_URL_OPTION: Final = re.compile(
    r"db|username|client_name|socket_(connect_)?timeout|max_connections|sentinel_username"
    r"|ssl_(ca_certs|ca_path|ca_data|certfile|keyfile|cert_reqs|check_hostname|ciphers)"
)


def shown(value: object) -> str:
    """A value as it may stand in a message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an int of very many digits, or somebody's own __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_MOST else f"{text[:_SHOWN_MOST]}…"


def masked(url: str) -> str:
    """The URL without its passwords, for messages."""
    return _URL_OPTION.sub(_masked_option, _PASSWORD.sub(r"\1***@", url))


def _masked_option(match: re.Match[str]) -> str:
    return match[0] if _OPEN_URL_OPTION.fullmatch(match[1]) else f"{match[1]}=***"


class FluxMeshError(Exception):
    """Base of all errors raised on purpose. `hint` is one sentence that says what to try."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(FluxMeshError, ValueError):
    code = "usage"
    http_status = 422
    exit_code = 2


class InvalidOption(UsageError):
    """`field` names the option or submission field that was refused."""

    code = "invalid_option"

    def __init__(self, field: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{field}: {message}", hint=hint)
        self.field = field


class InvalidPayload(UsageError):
    code = "invalid_payload"


class PayloadTooLarge(UsageError):
    code = "payload_too_large"
    http_status = 413


class DuplicateTask(UsageError):
    code = "duplicate_task"


class WouldDeadlock(UsageError):
    code = "would_deadlock"


class AppImportFailed(FluxMeshError):
    code = "app_import_failed"
    exit_code = 3


class StorageError(FluxMeshError):
    code = "storage"
    http_status = 503
    exit_code = 4


class StorageUnreachable(StorageError):
    code = "storage_unreachable"
    retryable = True


class StorageMissing(StorageError):
    code = "storage_missing"


class StorageRefused(StorageError):
    code = "storage_refused"


class StorageDamaged(StorageRefused):
    """What is stored cannot be read as what it should be. Whoever meets it need not try again."""

    code = "storage_damaged"


class StorageLoginRefused(StorageRefused):
    code = "storage_login_refused"
    exit_code = 5


class OutcomeUnknown(StorageError):
    """The reply was lost. Repeating the same call with the same ids does no harm. `ids`: of a submission, the
    jobs that may be stored now."""

    code = "outcome_unknown"
    retryable = True
    ids: tuple[str, ...] = ()

    def about(self, ids: Sequence[str]) -> OutcomeUnknown:
        """The same of a submission, whose jobs it names."""
        which = f"job {ids[0]}" if len(ids) == 1 else f"{len(ids):,} jobs, {ids[0]} the first,"
        error = OutcomeUnknown(
            f"{self.message}; {which} may or may not be stored", hint="look at its id before you submit anew"
        )
        error.ids = tuple(ids)
        return error


class NotAuthorised(FluxMeshError):
    code = "not_authorised"
    http_status = 401
    exit_code = 5


class JobNotFound(FluxMeshError):
    code = "job_not_found"
    http_status = 404
    exit_code = 6


class JobGone(JobNotFound):
    code = "job_gone"
    http_status = 410


class NotInMesh(FluxMeshError):
    code = "not_in_mesh"
    http_status = 404
    exit_code = 6


class JobConflict(FluxMeshError):
    code = "job_conflict"
    http_status = 409
    exit_code = 6


class IdempotencyConflict(JobConflict):
    """`accepted` holds the ids of the jobs of the same call that were stored."""

    code = "idempotency_conflict"
    accepted: tuple[str, ...] = ()


class QueueFull(FluxMeshError):
    """`accepted` holds the ids of the jobs of the same call that were stored."""

    code = "queue_full"
    accepted: tuple[str, ...] = ()
    http_status = 429
    retryable = True


class ResourceFailed(FluxMeshError):
    """A resource that a body takes could not be built. The attempt fails as by an error of the body."""

    code = "resource_failed"
    retryable = True


class JobUnsuccessful(FluxMeshError):
    """A job ended without a result. `job_id` names it."""

    code = "job_unsuccessful"
    exit_code = 10

    def __init__(self, message: str, *, job_id: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.job_id = job_id


class JobFailed(JobUnsuccessful):
    """Dead-lettered. `error_type`, `error_message` and `frames` are those of the last failure."""

    code = "job_failed"

    def __init__(
        self,
        message: str,
        *,
        job_id: str,
        reason: str = "",
        error_type: str = "",
        error_message: str = "",
        frames: tuple[str, ...] = (),
        hint: str = "",
    ) -> None:
        super().__init__(message, job_id=job_id, hint=hint)
        self.reason = reason
        self.error_type = error_type
        self.error_message = error_message
        self.frames = frames


class JobCancelled(JobUnsuccessful):
    code = "job_cancelled"


class JobExpired(JobUnsuccessful):
    code = "job_expired"


class WaitTimeout(FluxMeshError, TimeoutError):
    code = "wait_timeout"
    http_status = 202
    exit_code = 124
    retryable = True


class WorkerRetired(FluxMeshError):
    code = "worker_retired"


class WorkerFenced(FluxMeshError):
    code = "worker_fenced"
