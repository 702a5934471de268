"""The schemas of the OpenAPI document. Answers are derived from the structs; requests are written out,
because the checks of `submission.prepare` know more than types do."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fluxmesh.api.responses import ref
from fluxmesh.backoff import JITTERS, STRATEGIES
from fluxmesh.config import BATCH_MAX
from fluxmesh.job import TIER_NAMES, Attempt, Job, JobError
from fluxmesh.outcome import MAX_DELAY_S
from fluxmesh.peers import Observation, OwnerView, RingView, Totals
from fluxmesh.storage.values import DeadGroup, QueueStats, WorkerInfo
from fluxmesh.submission import MAX_HEADERS, MAX_NAME, MAX_RETRIES, MAX_TAGS, MAX_TIMEOUT_S, RESERVED_QUEUES

_PRINTABLE: Final = r"^[^\u0000-\u001F\u007F-\u00A0\u00AD]+$"


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _shape(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    """An object of an answer: later versions may add fields."""
    return {"type": "object", "properties": properties, "required": list(required)}


def _optional(**schema: Any) -> dict[str, Any]:
    """null is the same as leaving a field out."""
    return {"anyOf": [schema, {"type": "null"}]}


def _name(**more: Any) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "pattern": _PRINTABLE, **more}


def _seconds(**bounds: Any) -> dict[str, Any]:
    return _optional(type="number", **bounds)


def submission_schema() -> dict[str, Any]:
    """The submission fields of the contract, with their bounds."""
    delay = {"minimum": 0, "maximum": MAX_DELAY_S}
    lasting = {"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S}
    key = _optional(**_name())
    return _object(
        ("task",),
        task=_name(description="the name of a registered task"),
        args=_optional(type="array", items={}, default=[]),
        kwargs=_optional(type="object", default={}),
        queue=_optional(
            type="string",
            minLength=1,
            maxLength=MAX_NAME,
            pattern=r"^[^{}:\u0000-\u001F\u007F-\u00A0\u00AD]+$",
            **{"not": {"enum": sorted(RESERVED_QUEUES)}},
            description="the task's own, else default",
        ),
        priority=ref("Tier"),
        max_retries=_optional(type="integer", minimum=0, maximum=MAX_RETRIES),
        backoff_strategy=_optional(type="string", enum=list(STRATEGIES)),
        backoff_base_seconds=_seconds(**delay),
        max_backoff_seconds=_seconds(**delay),
        jitter=_optional(type="string", enum=list(JITTERS)),
        timeout_seconds=_seconds(**lasting, description="the task's own, else 60"),
        delay_seconds=_seconds(**delay, description="not together with run_at"),
        run_at={
            "description": "epoch seconds, or ISO 8601 with an offset",
            "anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}, {"type": "null"}],
        },
        expires_in_seconds=_seconds(**lasting, description="from now, before the first start"),
        idempotency_key=key,
        unique_key=key,
        affinity_key=key,
        concurrency_key=key,
        concurrency_limit=_optional(type="integer", minimum=1, maximum=1_000_000),
        max_crashes=_optional(type="integer", minimum=1, maximum=1_000),
        tags=_optional(type="array", items=_name(), maxItems=MAX_TAGS),
        headers=_optional(
            type="object",
            maxProperties=MAX_HEADERS,
            additionalProperties={"type": "string"},
            description="trace context",
        ),
        id=_optional(
            type="string",
            pattern="^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$",
            description="a UUIDv7 made by the producer",
        ),
    )


def _numbers(*names: str) -> dict[str, Any]:
    return {name: {"type": "integer", "minimum": 0} for name in names}


def _metrics_schema() -> dict[str, Any]:
    counts = _numbers(
        "active_workers", "total_jobs", "pending_jobs", "scheduled_jobs", "running_jobs", "completed_jobs",
        "failed_jobs", "cancelled_jobs", "expired_jobs", "dead_letter_jobs",
    )  # fmt: skip
    rest = {
        "queue_depths": _shape(TIER_NAMES, **_numbers(*TIER_NAMES)),
        "queues": {
            "type": "object",
            "additionalProperties": _shape(
                ("pending", *TIER_NAMES, "scheduled", "running", "parked", "paused"),
                **_numbers("pending", *TIER_NAMES, "scheduled", "running", "parked"),
                paused={"type": "boolean"},
                oldest_wait_s={"type": ["number", "null"]},
            ),
        },
        "timestamp": {"type": "number"},
    }
    return _shape((*counts, *rest), **counts, **rest)


def _requests() -> dict[str, Any]:
    tier_names = {"type": "string", "enum": list(TIER_NAMES)}
    tier_number = {"type": "integer", "minimum": 0, "maximum": 3}
    return {
        "Submission": submission_schema(),
        "Bulk": _object(
            ("jobs",),
            jobs={
                "type": "array",
                "items": {"description": "a Submission; each is judged for itself"},
                "maxItems": BATCH_MAX,
            },
        ),
        "Tier": {"anyOf": [tier_number, tier_names, {"type": "null"}], "description": "0 is the first"},
        "Priority": _object(("priority",), priority={"anyOf": [tier_number, tier_names]}),
        "BulkReplay": _object((), q={"type": "string", "maxLength": 4_000}, dry_run={"type": "boolean"}),
    }


def _answers() -> dict[str, Any]:
    text = {"type": "string"}
    gone = _shape(("id", "status", "pruned"), id=text, status=text, pruned={"const": True})
    item = _shape(
        ("status",),
        status={"type": "integer"},
        job=ref("Submitted"),
        problem=ref("Problem"),
        idempotent_replayed={"type": "boolean"},
    )
    return {
        "Submitted": {"anyOf": [ref("Job"), gone]},
        "BulkAnswer": _shape(("items",), items={"type": "array", "items": item}),
        "Verdict": _shape(
            ("job_id", "status"),
            job_id=text,
            status=text,
            cancel_requested={"type": "boolean"},
            priority={"type": "integer", "minimum": 0, "maximum": 3},
        ),
        "Replayed": _shape(
            ("items", "next_cursor", "count", "dry_run", "more"),
            items={"type": "array", "items": ref("Verdict")},
            next_cursor={"type": "null"},
            count={"type": "integer", "minimum": 0},
            dry_run={"type": "boolean"},
            more={"type": "boolean"},
        ),
        "QueueState": _shape(
            ("queue", "paused", "changed"),
            queue=text,
            paused={"type": "boolean"},
            changed={"type": "boolean"},
        ),
        "Metrics": _metrics_schema(),
        "Problem": _shape(
            ("type", "title", "status", "detail", "code"),
            type=text,
            title=text,
            status={"type": "integer"},
            detail=text,
            code={**text, "description": "stable, for programs"},
            field={**text, "description": "what is to blame"},
            hint={**text, "description": "what to try"},
        ),
    }


def schemas() -> dict[str, Any]:
    """All components, by name."""
    _, derived = msgspec.json.schema_components(
        (Job, Attempt, WorkerInfo, QueueStats, DeadGroup, Observation, Totals, RingView, OwnerView),
        ref_template="#/components/schemas/{name}",
    )
    # In storage an error is an array, and the tiers of a queue a tuple; doors show objects.
    fields: dict[str, Any] = {
        "type": {"type": "string"},
        "message": {"type": "string"},
        "frames": {"type": "array", "items": {"type": "string"}},
        "text": {"type": "string"},
    }
    derived["JobError"] = _shape(JobError.__struct_fields__, **fields)
    derived["QueueStats"]["properties"]["queued"] = _shape(TIER_NAMES, **_numbers(*TIER_NAMES))
    return {**derived, **_requests(), **_answers()}
