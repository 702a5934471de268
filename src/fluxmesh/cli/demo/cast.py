"""The jobs of the demo: one digest for each file, and four that show what else can happen to a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from fluxmesh.config import BATCH_MAX, Settings
from fluxmesh.errors import QueueFull
from fluxmesh.ids import new_job_id
from fluxmesh.job import TIERS
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import Verdict
from fluxmesh.submission import NewJob, prepare

DELAY_S: Final = 2.0
TAGS: Final = ("demo",)


class Cast(Struct, frozen=True):
    """All jobs in the order of their submission, and the ids of those with a part of their own."""

    jobs: tuple[NewJob, ...]
    flaky: str
    failing: str
    delayed: str
    urgent: str
    by_tier: tuple[int, int, int, int]


def make_cast(files: Sequence[str], missing: str, queue: str, settings: Settings) -> Cast:
    """Files are spread over the tiers in turn. `missing` is a file that does not exist yet."""
    ids = {part: new_job_id() for part in ("flaky", "failing", "delayed", "urgent")}
    common: dict[str, Any] = {"queue": queue, "tags": TAGS}
    digests = [prepare({"task": "file_digest", "priority": tier, **common}) for tier in TIERS]
    jobs = [digests[number % len(TIERS)].job([path], {}) for number, path in enumerate(files)]
    quick = {"backoff_base_seconds": 0.3, "jitter": "none"}

    def add(part: str, args: list[Any], **fields: Any) -> None:
        template = prepare({"id": ids[part], **common, **fields})
        jobs.append(template.job(args, {}, limit=settings.payload_limit_bytes))

    add("flaky", [2, "demo"], task="flaky_pipeline", priority="high", **quick)
    add("failing", [missing], task="file_digest", priority="default", max_retries=1, **quick)
    add("delayed", [["bread", "butter", "jam"]], task="batch_process", delay_seconds=DELAY_S)
    add("urgent", [50_000], task="heavy_computation", priority="critical")
    tiers = [2 if job.tier is None else job.tier for job in jobs]
    counts = (tiers.count(0), tiers.count(1), tiers.count(2), tiers.count(3))
    return Cast(jobs=tuple(jobs), by_tier=counts, **ids)


async def submit(storage: Storage, cast: Cast, settings: Settings) -> None:
    """All of them, in order, a thousand at a time."""
    for start in range(0, len(cast.jobs), BATCH_MAX):
        batch = cast.jobs[start : start + BATCH_MAX]
        answers = await storage.enqueue(batch, queue_cap=settings.queue_cap)
        if any(answer.verdict is Verdict.FULL for answer in answers):
            raise QueueFull("the demo's queue is full", hint="name a smaller folder, or another --db")
