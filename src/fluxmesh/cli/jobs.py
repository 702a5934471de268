"""fluxmesh jobs: list, show, cancel, retry, wait, history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fluxmesh.cli import output, waiting
from fluxmesh.cli.listing import add_page_options, print_jobs
from fluxmesh.cli.many import Told, in_batches, report, told
from fluxmesh.cli.parser import Options, Parser, Verbs, add_verb, add_verbs, json_option, seconds
from fluxmesh.cli.session import with_storage
from fluxmesh.cli.submit import WAIT_MOST_S
from fluxmesh.config import Settings
from fluxmesh.documents import attempt_document, job_document
from fluxmesh.errors import JobConflict
from fluxmesh.job import Attempt, Job
from fluxmesh.query import parse_query
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Cancelled

_ID: Final = "0190a3e4-5b6c-7d8e-9f01-23456789abcd"
_TIMES: Final = frozenset({"created_at", "scheduled_at", "expires_at", "started_at", "completed_at"})


def configure(parser: Parser) -> None:
    verbs = add_verbs(parser)
    _add_list(verbs)
    show = add_verb(verbs, "show", _show, "show all that is known of one job", f"fluxmesh jobs show {_ID}")
    show.add_argument("id", metavar="ID", help="the job's id")
    json_option(show)
    history = add_verb(
        verbs, "history", _history, "show how each start of a job ended", f"fluxmesh jobs history {_ID}"
    )
    history.add_argument("id", metavar="ID", help="the job's id")
    json_option(history)
    cancel = add_verb(
        verbs, "cancel", _cancel, "cancel jobs; a running one is told to stop", f"fluxmesh jobs cancel {_ID}"
    )
    retry = add_verb(
        verbs,
        "retry",
        _retry,
        "start a new life of jobs that ended without success",
        f"fluxmesh jobs retry {_ID}",
    )
    for verb in (cancel, retry):
        verb.add_argument("ids", metavar="ID", nargs="+", help="ids of jobs")
        json_option(verb)
    wait = add_verb(
        verbs,
        "wait",
        _wait,
        "wait for the end of a job; exit 10 if it failed, 124 if the time is up",
        f"fluxmesh jobs wait {_ID} --timeout 30",
    )
    wait.add_argument("id", metavar="ID", help="the job's id")
    wait.add_argument("--timeout", metavar="S", type=seconds(0, WAIT_MOST_S), help="seconds to wait (no end)")
    json_option(wait)


def _add_list(verbs: Verbs) -> None:
    listed = add_verb(
        verbs,
        "list",
        _list,
        "list jobs, newest first",
        "fluxmesh jobs list --q 'state:PENDING queue:default'",
        "fluxmesh jobs list --q task:file_digest --all --json",
    )
    listed.add_argument(
        "--q",
        default="",
        metavar="QUERY",
        help="field:value of state, queue, task, tag, worker, created>, created<",
    )
    add_page_options(listed)


# -- reads -------------------------------------------------------------------------------------------


def _list(options: Options) -> int:
    query = parse_query(options.q)

    async def command(storage: Storage, _settings: Settings) -> int:
        await print_jobs(storage, query, options)
        return 0

    return with_storage(options, command)


def _show(options: Options) -> int:
    async def command(storage: Storage, _settings: Settings) -> int:
        job = await storage.get(options.id)
        if job is None:
            raise waiting.unknown(options.id)
        if options.json:
            output.json_document(job_document(job))
        else:
            print_job(job)
        return 0

    return with_storage(options, command)


def print_job(job: Job) -> None:
    """The fields that say something, one a line, then the error with its stack."""
    empty: tuple[object, ...] = (None, (), {}, "")
    for name in job.__struct_fields__:
        value = getattr(job, name)
        if name in ("error", "token") or any(value is e or value == e for e in empty):
            continue
        if name in _TIMES:
            text = output.instant(value)
        elif name == "priority":
            text = f"{value} ({output.tier(value)})"
        elif isinstance(value, str):
            text = output.safe(value)
        else:
            text = output.shown(value)
        output.line(f"{name + ':':<22}{text}")
    if job.error is not None:
        output.line(f"{'error:':<22}{output.safe(job.error.type)}: {output.safe(job.error.message)}")
        for part in (job.error.text or "\n".join(job.error.frames)).splitlines():
            output.line(f"    {output.safe_lines(part)}")


def _history(options: Options) -> int:
    async def command(storage: Storage, _settings: Settings) -> int:
        attempts = await storage.history(options.id)
        if attempts is None:
            raise waiting.unknown(options.id)
        if options.json:
            documents = [attempt_document(attempt) for attempt in attempts]
            output.json_document({"items": documents, "next_cursor": None})
        else:
            columns = ("LIFE", "ATTEMPT", "STARTED", "ENDED", "WORKER", "OUTCOME", "ERROR")
            output.table(columns, [_attempt_row(attempt) for attempt in attempts], right=("LIFE", "ATTEMPT"))
        return 0

    return with_storage(options, command)


def _attempt_row(attempt: Attempt) -> Sequence[str]:
    error = f"{attempt.error.type}: {attempt.error.message}" if attempt.error else ""
    return (
        str(attempt.life),
        str(attempt.attempt),
        output.instant(attempt.started_at),
        output.instant(attempt.ended_at),
        attempt.worker_id,
        attempt.outcome.value,
        output.safe(error, most=80),
    )


def _wait(options: Options) -> int:
    async def command(storage: Storage, _settings: Settings) -> int:
        job, ended = await waiting.wait_for_end(storage, options.id, options.timeout)
        failure = waiting.failure_of(job, ended=ended)
        if options.json:
            output.json_document(job_document(job))
        elif failure is None:
            output.line(output.shown(job.result))
        if failure is not None:
            raise failure
        return 0

    return with_storage(options, command)


# -- writes ------------------------------------------------------------------------------------------


def _cancel(options: Options) -> int:
    async def command(storage: Storage, _settings: Settings) -> int:
        answers = await in_batches(storage.cancel, options.ids)
        return report([_cancelled(job_id, answer) for job_id, answer in answers], as_json=options.json)

    return with_storage(options, command)


def _cancelled(job_id: str, answer: Cancelled) -> Told:
    match answer:
        case Cancelled.CANCELLED:
            return Told(job_id, "CANCELLED")
        case Cancelled.REQUESTED:
            return Told(job_id, "RUNNING", cancel_requested=True)
        case Cancelled.ENDED:
            return Told(
                job_id,
                failure=JobConflict(
                    f"job {job_id} has ended already", hint=f"`fluxmesh jobs show {job_id}` tells how"
                ),
            )
        case Cancelled.UNKNOWN:
            return Told(job_id, failure=waiting.unknown(job_id))


def _retry(options: Options) -> int:
    async def command(storage: Storage, _settings: Settings) -> int:
        answers = await in_batches(storage.replay, options.ids)
        why = "cannot be retried: it has not ended, or it completed, or another job holds its unique key"
        return report(
            [told(job_id, answer, "REPLAYED", why) for job_id, answer in answers], as_json=options.json
        )

    return with_storage(options, command)
