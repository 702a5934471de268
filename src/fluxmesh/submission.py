"""What a producer asks for, checked once, in the form in which storage takes it.

`Submission` is the request as every door writes it (Python options, CLI flags, REST body: same names).
`prepare` checks it and returns a `Template`; `Template.job` adds the arguments and gives a `NewJob`. A bulk
call checks its options once and builds its jobs from one template.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from fluxmesh import codec
from fluxmesh.backoff import JITTERS, STRATEGIES
from fluxmesh.clock import MAX_WALL_US, US
from fluxmesh.errors import InvalidOption, InvalidPayload, shown
from fluxmesh.ids import is_job_id, new_job_id
from fluxmesh.job import TIER_NAMES, TIERS, JobOptions
from fluxmesh.outcome import checked_delay_s, is_number

DEFAULT_QUEUE: Final = "default"
MAX_NAME: Final = 200
MAX_TAGS: Final = 50
MAX_HEADERS: Final = 64
MAX_HEADER_BYTES: Final = 8 << 10
MAX_RETRIES: Final = 1_000_000
MAX_TIMEOUT_S: Final = 366 * 86_400.0
RESERVED_QUEUES: Final = frozenset(TIER_NAMES) - {DEFAULT_QUEUE}
_FORBIDDEN_IN_QUEUE: Final = frozenset("{}:")


class NewJob(Struct, frozen=True, gc=False):
    """A checked submission. `queue`, `tier` None: as the task's registration says, else default, 2.

    Delays and lifetimes are microseconds from the storage's now; `run_at_us` is wall time.
    """

    id: str
    task: str
    queue: str | None
    tier: int | None
    payload: bytes
    options: bytes | None = None
    delay_us: int | None = None
    run_at_us: int | None = None
    expires_in_us: int | None = None
    idempotency_key: str | None = None
    payload_hash: bytes | None = None
    unique_key: str | None = None
    concurrency_key: str | None = None
    concurrency_limit: int | None = None
    tags: tuple[str, ...] = ()
    slot: int | None = None  # of its affinity key (affinity.slot_of); None: of its task's name


class Submission(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The submission fields of the contract. Unset = left to the task or the defaults."""

    task: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    queue: str | UnsetType = UNSET
    priority: int | str | UnsetType = UNSET
    max_retries: int | UnsetType = UNSET
    backoff_strategy: str | UnsetType = UNSET
    backoff_base_seconds: float | UnsetType = UNSET
    max_backoff_seconds: float | UnsetType = UNSET
    jitter: str | UnsetType = UNSET
    timeout_seconds: float | UnsetType = UNSET
    delay_seconds: float | UnsetType = UNSET
    run_at: float | str | datetime | UnsetType = UNSET
    expires_in_seconds: float | UnsetType = UNSET
    idempotency_key: str | UnsetType = UNSET
    unique_key: str | UnsetType = UNSET
    affinity_key: str | UnsetType = UNSET
    concurrency_key: str | UnsetType = UNSET
    concurrency_limit: int | UnsetType = UNSET
    max_crashes: int | UnsetType = UNSET
    tags: Sequence[str] = ()
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    id: str | UnsetType = UNSET


FIELDS: Final = tuple(Submission.__struct_fields__)
_ALIASES: Final = {"timeout": "timeout_seconds", "delay": "delay_seconds", "expires_in": "expires_in_seconds"}
TASK_ONLY: Final = ("rate_limit", "max_concurrent", "on_lease_lost", "isolation", "memory_limit_mb")
OPTION_FIELDS: Final = frozenset(FIELDS) - {"task", "args", "kwargs"} | frozenset(_ALIASES)


def checked_name(field: str, text: object, *, queue: bool = False) -> str:
    """A name of 1-200 printable characters; a queue or worker name also has no braces or colons."""
    if not isinstance(text, str):
        raise InvalidOption(field, f"{type(text).__name__} is not text")
    if not text:
        raise InvalidOption(field, "is empty", hint="1 to 200 printable characters")
    if len(text) > MAX_NAME:
        raise InvalidOption(field, f"{len(text):,} characters long", hint="1 to 200 printable characters")
    if not text.isprintable():
        raise InvalidOption(
            field, "has characters that cannot be printed", hint="1 to 200 printable characters"
        )
    if queue and not _FORBIDDEN_IN_QUEUE.isdisjoint(text):
        raise InvalidOption(field, f"{text!r} has a brace or a colon", hint="use dots or dashes")
    return text


def checked_queue(text: object) -> str:
    name = checked_name("queue", text, queue=True)
    if name in RESERVED_QUEUES:
        raise InvalidOption(
            "queue",
            f"{name!r} is the name of a tier",
            hint=f"submit with priority={name!r}, or name the queue else",
        )
    return name


def split_queues(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The queues and tiers that a worker's list of names means.

    Names are queues, and then every tier is served. A list of tier names with at least one of critical,
    high and low, which cannot be queues, means these tiers of the default queue. A mixture is an error.
    """
    hint = "queue names, or tier names alone such as critical,high,default,low"
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidOption("queues", f"{names!r} is not a list of names", hint='queues=["default"]')
    if not names:
        raise InvalidOption("queues", "the list is empty", hint=hint)
    wanted = tuple(dict.fromkeys(names))
    tiers = RESERVED_QUEUES.intersection(wanted)
    if not tiers:
        return tuple(checked_queue(name) for name in wanted), TIERS
    others = [name for name in wanted if name not in TIER_NAMES]
    if others:
        mixed = f"{min(tiers)!r} is a tier and {others[0]!r} is a queue"
        raise InvalidOption("queues", mixed, hint="name queues in queues and tiers in tiers")
    return (DEFAULT_QUEUE,), tuple(sorted(TIER_NAMES.index(name) for name in wanted))


def checked_tier(value: object) -> int:
    """0-3 from a number, a tier's name or a Priority."""
    if isinstance(value, str) and value in TIER_NAMES:
        return TIER_NAMES.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 3:
        return int(value)
    hint = "0-3, or critical, high, default, low"
    raise InvalidOption("priority", f"{shown(value)} is not a tier", hint=hint)


def checked_int(field: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOption(field, f"{shown(value)} is not a whole number")
    if not low <= value <= high:
        raise InvalidOption(field, f"{shown(value)} is out of range", hint=f"{low} to {high:,}")
    return value


def checked_seconds(field: str, value: object, *, above: float = 0.0, most: float = MAX_TIMEOUT_S) -> float:
    if not is_number(value):
        raise InvalidOption(field, f"{shown(value)} is not a number of seconds")
    if not above < value <= most:
        raise InvalidOption(
            field, f"{shown(value)} is out of range", hint=f"more than {above:g}, at most {most:g}"
        )
    return float(value)


def checked_run_at_us(value: object) -> int:
    """Wall microseconds from epoch seconds, an ISO 8601 text with an offset, or an aware datetime."""
    hint = "epoch seconds, or ISO 8601 with an offset such as 2030-01-31T08:00:00Z"
    if isinstance(value, str):
        text = value
        try:
            value = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidOption("run_at", f"{text[:80]!r} is not a point in time", hint=hint) from None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidOption("run_at", "the time has no UTC offset", hint=hint)
        value = value.timestamp()
    if not is_number(value):
        raise InvalidOption("run_at", f"{shown(value)} is not a point in time", hint=hint)
    if not 0 <= value * US < MAX_WALL_US:
        raise InvalidOption("run_at", f"{shown(value)} is out of range", hint="before the year 10000")
    return int(value * US)


def _choice(field: str, value: object, choices: Iterable[str]) -> str:
    known = tuple(choices)
    if value not in known:
        raise InvalidOption(field, f"{shown(value)} is unknown", hint="one of " + ", ".join(known))
    return str(value)


def _checked_tags(tags: object) -> tuple[str, ...]:
    if isinstance(tags, str) or not isinstance(tags, Sequence):
        raise InvalidOption("tags", "is not a list of names")
    if len(tags) > MAX_TAGS:
        raise InvalidOption("tags", f"{len(tags):,} tags", hint=f"at most {MAX_TAGS}")
    return tuple(dict.fromkeys(checked_name("tags", tag) for tag in tags))


def checked_headers(headers: object) -> dict[str, str]:
    """Texts by name, within the limits on number and size."""
    if not isinstance(headers, Mapping):
        raise InvalidOption("headers", "is not an object of texts")
    if len(headers) > MAX_HEADERS:
        raise InvalidOption("headers", f"{len(headers):,} headers", hint=f"at most {MAX_HEADERS}")
    size = 0
    for key, value in headers.items():
        checked_name("headers", key)
        if not isinstance(value, str):
            raise InvalidOption("headers", f"the value of {key!r} is not text")
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise InvalidOption("headers", f"the value of {key!r} is not valid Unicode (a lone surrogate)")
        size += len(key) + len(value)
    if size > MAX_HEADER_BYTES:
        raise InvalidOption("headers", f"{size:,} characters", hint=f"at most {MAX_HEADER_BYTES:,}")
    return dict(headers)


def _checked_options(fields: Mapping[str, Any]) -> JobOptions:
    given: dict[str, Any] = {}
    for name, most in (("max_retries", MAX_RETRIES), ("max_crashes", 1_000)):
        if name in fields:
            given[name] = checked_int(name, fields[name], 0 if name == "max_retries" else 1, most)
    if "backoff_strategy" in fields:
        given["backoff_strategy"] = _choice("backoff_strategy", fields["backoff_strategy"], STRATEGIES)
    if "jitter" in fields:
        given["jitter"] = _choice("jitter", fields["jitter"], JITTERS)
    for name in ("backoff_base_seconds", "max_backoff_seconds"):
        if name in fields:
            given[name] = checked_delay_s(name, fields[name])
    if "timeout_seconds" in fields:
        given["timeout_seconds"] = checked_seconds("timeout_seconds", fields["timeout_seconds"])
    if "affinity_key" in fields:
        given["affinity_key"] = checked_name("affinity_key", fields["affinity_key"])
    if "idempotency_key" in fields:
        given["idempotency_key"] = checked_name("idempotency_key", fields["idempotency_key"])
    if "tags" in fields:
        given["tags"] = _checked_tags(fields["tags"])
    if "headers" in fields:
        given["headers"] = checked_headers(fields["headers"])
    return JobOptions(**given)


class Template(Struct, frozen=True):
    """Checked options of a submission, without arguments."""

    task: str
    queue: str | None
    tier: int | None
    options: bytes | None
    delay_us: int | None
    run_at_us: int | None
    expires_in_us: int | None
    idempotency_key: str | None
    unique_key: str | None
    concurrency_key: str | None
    concurrency_limit: int | None
    tags: tuple[str, ...]
    id: str | None
    slot: int | None = None

    def job(
        self, args: Sequence[Any], kwargs: dict[str, Any], *, limit: int = codec.MAX_PAYLOAD_BYTES
    ) -> NewJob:
        """Raises InvalidPayload or PayloadTooLarge if the arguments cannot be carried."""
        digest = None
        payload = codec.encode_payload(args, kwargs, limit=limit)
        if self.idempotency_key is not None:
            digest = codec.payload_hash(self.task, args, kwargs)
        return NewJob(
            self.id or new_job_id(),
            self.task,
            self.queue,
            self.tier,
            payload,
            self.options,
            self.delay_us,
            self.run_at_us,
            self.expires_in_us,
            self.idempotency_key,
            digest,
            self.unique_key,
            self.concurrency_key,
            self.concurrency_limit,
            self.tags,
            self.slot,
        )


def _unknown(name: str, extra: Sequence[str]) -> InvalidOption:
    if name in TASK_ONLY:
        return InvalidOption(name, "belongs to a task, not to one job", hint=f"@queue.task({name}=…)")
    known = [*(field for field in FIELDS if field not in ("task", "args", "kwargs")), *_ALIASES, *extra]
    close = difflib.get_close_matches(name, known, n=1)
    short = (field for field in known if field not in _ALIASES.values())
    hint = f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(short)
    return InvalidOption(name, "unknown option", hint=hint)


def normalised(fields: Mapping[str, Any], *, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Fields by their full names, unset ones left out. An unknown name raises with a suggestion; `extra` are
    names that the caller knows besides."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        full = _ALIASES.get(name, name)
        if full not in FIELDS:
            raise _unknown(str(name)[:80], extra)
        if full in out:
            raise InvalidOption(name, f"given twice, as {full!r} too")
        if value is not UNSET and value is not None:
            out[full] = value
    return out


def _checked_times(fields: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    delay_us = run_at_us = expires_us = None
    if "delay_seconds" in fields:
        if "run_at" in fields:
            raise InvalidOption("run_at", "given together with delay_seconds", hint="give one of them")
        delay_us = round(checked_delay_s("delay_seconds", fields["delay_seconds"]) * US)
    if "run_at" in fields:
        run_at_us = checked_run_at_us(fields["run_at"])
    if "expires_in_seconds" in fields:
        expires_us = round(checked_seconds("expires_in_seconds", fields["expires_in_seconds"]) * US)
        if delay_us is not None and expires_us <= delay_us:
            raise InvalidOption("expires_in_seconds", "the job would expire before its delay is over")
    return delay_us, run_at_us, expires_us


def prepare(fields: Mapping[str, Any]) -> Template:
    """Check every option of a submission (its `args` and `kwargs` are not looked at)."""
    fields = normalised(fields)
    delay_us, run_at_us, expires_us = _checked_times(fields)
    keys: dict[str, str | None] = {}
    for name in ("idempotency_key", "unique_key", "concurrency_key"):
        keys[name] = checked_name(name, fields[name]) if name in fields else None
    limit = None
    if "concurrency_limit" in fields:
        if keys["concurrency_key"] is None:
            raise InvalidOption(
                "concurrency_limit", "given without concurrency_key", hint="name the key it limits"
            )
        limit = checked_int("concurrency_limit", fields["concurrency_limit"], 1, 1_000_000)
    elif keys["concurrency_key"] is not None:
        limit = 1
    job_id = fields.get("id")
    if job_id is not None and (not isinstance(job_id, str) or not is_job_id(job_id)):
        raise InvalidOption("id", f"{str(job_id)[:80]!r} is not a UUIDv7 in lower case")
    return Template(
        task=checked_name("task", fields.get("task", "")),
        queue=checked_queue(fields["queue"]) if "queue" in fields else None,
        tier=checked_tier(fields["priority"]) if "priority" in fields else None,
        options=codec.encode_options(_checked_options(fields)),
        delay_us=delay_us,
        run_at_us=run_at_us,
        expires_in_us=expires_us,
        idempotency_key=keys["idempotency_key"],
        unique_key=keys["unique_key"],
        concurrency_key=keys["concurrency_key"],
        concurrency_limit=limit,
        tags=_checked_tags(fields["tags"]) if "tags" in fields else (),
        id=job_id,
        slot=_slot(fields),
    )


def _slot(fields: Mapping[str, Any]) -> int | None:
    if "affinity_key" not in fields:
        return None
    from fluxmesh.affinity import slot_of  # few need it, and it brings a hash with it

    return slot_of(fields["affinity_key"])


def checked_arguments(args: object, kwargs: object) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that came as data (CLI, REST) rather than as a Python call."""
    if not isinstance(args, list | tuple):
        raise InvalidPayload(f"args: {type(args).__name__} is not a list", hint="args is a JSON array")
    if not isinstance(kwargs, dict):
        raise InvalidPayload(
            f"kwargs: {type(kwargs).__name__} is not an object", hint="kwargs is a JSON object"
        )
    return list(args), kwargs
