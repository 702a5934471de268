"""fluxmesh submit: one job, and if wanted its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from fluxmesh.cli import output, waiting
from fluxmesh.cli.parser import Options, Parser, comma_list, examples, flatten, json_option, seconds
from fluxmesh.cli.session import with_storage
from fluxmesh.config import Settings
from fluxmesh.documents import job_document
from fluxmesh.errors import (
    IdempotencyConflict,
    InvalidOption,
    InvalidPayload,
    OutcomeUnknown,
    PayloadTooLarge,
    QueueFull,
)
from fluxmesh.storage.base import Storage, asked_again
from fluxmesh.storage.values import Enqueued, Verdict
from fluxmesh.submission import NewJob, checked_arguments, prepare

WAIT_MOST_S: Final = 366 * 86_400.0
JSON_MOST: Final = 64 << 20  # characters read from a file or a pipe that may have no end
# submission field -> flag
FLAGS: Final[dict[str, str]] = {
    "task": "--task",
    "queue": "--queue",
    "priority": "--priority",
    "max_retries": "--max-retries",
    "backoff_strategy": "--backoff-strategy",
    "backoff_base_seconds": "--backoff-base",
    "max_backoff_seconds": "--max-backoff",
    "jitter": "--jitter",
    "timeout_seconds": "--timeout",
    "delay_seconds": "--delay",
    "run_at": "--run-at",
    "expires_in_seconds": "--expires-in",
    "idempotency_key": "--idempotency-key",
    "unique_key": "--unique-key",
    "affinity_key": "--affinity-key",
    "concurrency_key": "--concurrency-key",
    "concurrency_limit": "--concurrency-limit",
    "max_crashes": "--max-crashes",
    "tags": "--tags",
    "headers": "--headers",
    "id": "--id",
}


def configure(parser: Parser) -> None:
    parser.epilog = examples(
        'fluxmesh submit --task batch_process --kwargs \'{"items": ["a", "b"]}\' --priority high --wait',
        "fluxmesh submit --task file_digest --args '[\"/etc/hostname\"]' --delay 5 --json",
        "fluxmesh submit --task file_digest --args @arguments.json",
    )
    parser.set_defaults(run=_run)
    what = parser.add_argument_group("what")
    what.add_argument("--task", required=True, metavar="NAME", help="name of the task")
    what.add_argument("--args", default="[]", metavar="JSON", help="a JSON array, or @FILE, or - for stdin")
    what.add_argument(
        "--kwargs", default="{}", metavar="JSON", help="a JSON object, or @FILE, or - for stdin"
    )
    where = parser.add_argument_group("where and when")
    where.add_argument("--queue", metavar="NAME", help="queue (the task's own, else default)")
    where.add_argument("--priority", metavar="TIER", type=_tier, help="critical, high, default, low, or 0-3")
    where.add_argument("--delay", dest="delay_seconds", metavar="S", type=float, help="seconds from now")
    where.add_argument(
        "--run-at", metavar="TIME", type=_point, help="epoch seconds, or ISO 8601 with an offset"
    )
    where.add_argument(
        "--expires-in", dest="expires_in_seconds", metavar="S", type=float, help="give up if not started"
    )
    _add_run_options(parser)
    _add_key_options(parser)
    answer = parser.add_argument_group("answer")
    answer.add_argument("--wait", action="store_true", help="wait for the end; exit 10 if the job fails")
    answer.add_argument(
        "--wait-timeout",
        metavar="S",
        type=seconds(0, WAIT_MOST_S),
        help="with --wait: exit 124 after so long",
    )
    json_option(parser)


def _add_run_options(parser: Parser) -> None:
    group = parser.add_argument_group("how (else as the task says)")
    group.add_argument("--max-retries", metavar="N", type=int, help="N retries are N + 1 attempts")
    group.add_argument(
        "--timeout", dest="timeout_seconds", metavar="S", type=float, help="seconds one attempt may take"
    )
    group.add_argument("--backoff-strategy", metavar="NAME", help="exponential, linear or fixed")
    group.add_argument(
        "--backoff-base", dest="backoff_base_seconds", metavar="S", type=float, help="first retry delay"
    )
    group.add_argument(
        "--max-backoff", dest="max_backoff_seconds", metavar="S", type=float, help="longest retry delay"
    )
    group.add_argument("--jitter", metavar="NAME", help="half, full or none")
    group.add_argument(
        "--max-crashes", metavar="N", type=int, help="dead letter at the N-th crash of its worker"
    )


def _add_key_options(parser: Parser) -> None:
    group = parser.add_argument_group("keys and labels")
    group.add_argument("--idempotency-key", metavar="KEY", help="the same key and payload give the same job")
    group.add_argument("--unique-key", metavar="KEY", help="one unfinished job per queue and key")
    group.add_argument("--affinity-key", metavar="KEY", help="what places the job near its caches")
    group.add_argument("--concurrency-key", metavar="KEY", help="jobs of one key are limited together")
    group.add_argument(
        "--concurrency-limit", metavar="N", type=int, help="so many of the key run at once (1)"
    )
    group.add_argument(
        "--tags", metavar="A,B", type=comma_list, action="append", help="labels, may be repeated"
    )
    group.add_argument("--headers", metavar="K=V", action="append", help="trace context, may be repeated")
    group.add_argument("--id", metavar="UUID", help="the job's id, a UUIDv7 made by you")


def _tier(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 10 else text


def _point(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# -- reading ------------------------------------------------------------------------------------------


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _read(flag: str, text: str) -> str:
    """The text itself, that of @FILE, or stdin's."""
    if text != "-" and not text.startswith("@"):
        return text
    try:
        if text == "-":
            source = sys.stdin.read(JSON_MOST + 1)
        else:
            with Path(text[1:]).open(encoding="utf-8") as file:
                source = file.read(JSON_MOST + 1)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InvalidOption(flag, f"{text[:200]}: {why}", hint="@FILE names a file that holds JSON") from None
    if len(source) > JSON_MOST:
        raise PayloadTooLarge(
            f"{flag}: more than {JSON_MOST:,} characters", hint="store it, and send its key"
        )
    return source


def parsed(flag: str, text: str) -> Any:
    """A JSON value from the command line, with every number kept exactly or refused later."""
    source = _read(flag, text)
    try:
        return json.loads(source, parse_constant=_constant)
    except RecursionError:
        raise PayloadTooLarge(f"{flag}: nested too deeply", hint="at most 100 levels") from None
    except ValueError as error:
        hint = "quote it for the shell: --kwargs '{\"items\": [1, 2]}'"
        raise InvalidPayload(f"{flag}: {source[:60]!r} is not JSON: {error}", hint=hint) from None


def _headers(pairs: list[str] | None) -> dict[str, str]:
    headers: dict[str, str] = {}
    for pair in pairs or ():
        name, found, value = pair.partition("=")
        if not found or not name:
            raise InvalidOption("--headers", f"{pair[:80]!r} is not K=V")
        headers[name] = value
    return headers


def _fields(options: Options) -> dict[str, Any]:
    fields = {name: getattr(options, name) for name in FLAGS}
    fields["tags"] = list(flatten(options.tags))
    fields["headers"] = _headers(options.headers)
    return fields


def new_job(fields: Mapping[str, Any], args: object, kwargs: object, settings: Settings) -> NewJob:
    """The checked job. Mistakes are told with the flag's name, not the field's."""
    try:
        template = prepare(fields)
    except InvalidOption as error:
        flag = FLAGS.get(error.field, error.field)
        raise InvalidOption(flag, error.message.removeprefix(f"{error.field}: "), hint=error.hint) from None
    positional, named = checked_arguments(args, kwargs)
    return template.job(positional, named, limit=settings.payload_limit_bytes)


# -- running ------------------------------------------------------------------------------------------


def _run(options: Options) -> int:
    if options.wait_timeout is not None and not options.wait:
        raise InvalidOption("--wait-timeout", "given without --wait", hint="add --wait")
    fields = _fields(options)
    if options.args == "-" and options.kwargs == "-":
        raise InvalidOption("--kwargs", "stdin is read for --args already", hint="put one of them in a @FILE")
    args, kwargs = parsed("--args", options.args), parsed("--kwargs", options.kwargs)

    async def command(storage: Storage, settings: Settings) -> int:
        answer = await enqueue(storage, new_job(fields, args, kwargs, settings), settings)
        return await _answer(storage, answer, options)

    return with_storage(options, command)


async def enqueue(storage: Storage, job: NewJob, settings: Settings) -> Enqueued:
    """Submit one job. Raises IdempotencyConflict and QueueFull."""
    answer = await _enqueued(storage, job, settings)
    if answer.verdict is Verdict.CONFLICT:
        raise IdempotencyConflict(
            f"idempotency key {job.idempotency_key!r} belongs to job {answer.id}, which has another payload",
            hint="use another key for another payload",
        )
    if answer.verdict is Verdict.FULL:
        raise QueueFull(
            f"the queue {job.queue or 'default'!r} is full", hint="try again later, or add workers"
        )
    return answer


async def _enqueued(storage: Storage, job: NewJob, settings: Settings) -> Enqueued:
    try:
        (answer,) = await asked_again(lambda: storage.enqueue([job], queue_cap=settings.queue_cap))
    except OutcomeUnknown as error:
        raise error.about([job.id]) from error
    return answer


async def _answer(storage: Storage, answer: Enqueued, options: Options) -> int:
    new = answer.verdict is Verdict.CREATED
    if not new:
        output.note(f"this is the job of before, known by its {answer.by or 'id'}")
    facts = {"created": new, "deduplicated": not new}
    if answer.pruned:
        status = answer.status.value if answer.status else None
        if options.json:
            output.json_document({"id": answer.id, "status": status, "pruned": True, **facts})
        else:
            output.line(f"{answer.id} {status} (its record is gone already)")
        return 0
    if not options.wait:
        if not options.json:
            output.line(answer.id)
            return 0
        job = await storage.get(answer.id)
        if job is None:
            raise waiting.unknown(answer.id)
        output.json_document(job_document(job) | facts)
        return 0
    if not options.json:
        output.line(answer.id)
        output.flush()
    job, ended = await waiting.wait_for_end(storage, answer.id, options.wait_timeout)
    failure = waiting.failure_of(job, ended=ended)
    if options.json:
        output.json_document(job_document(job) | facts)
    elif failure is None:
        output.line(output.shown(job.result))
    if failure is not None:
        raise failure
    return 0
