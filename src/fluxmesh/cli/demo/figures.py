"""What the records of the demo's jobs say: waits, retries, the place of the urgent one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct

from fluxmesh.cli.demo.cast import Cast
from fluxmesh.job import TIER_NAMES, Attempt, Job, Status


class TierFigures(Struct, frozen=True):
    """Of the files' jobs of one tier. Waits are seconds from submission to start; None: none started."""

    tier: str
    jobs: int
    completed: int
    wait_median_s: float | None
    wait_most_s: float | None


class Place(Struct, frozen=True):
    """Where a job came: its number in the order of submission and of starts, and how many it overtook."""

    submitted: int
    started: int
    overtaken: int


def first_start(job: Job, history: Sequence[Attempt]) -> float | None:
    """When the body was first entered."""
    starts = [attempt.started_at for attempt in history if attempt.started_at is not None]
    return min(starts, default=job.started_at)


def tier_figures(jobs: Sequence[Job], cast: Cast) -> list[TierFigures]:
    parts = {cast.flaky, cast.failing, cast.delayed, cast.urgent}
    figures = []
    for tier, name in enumerate(TIER_NAMES):
        mine = [job for job in jobs if job.priority == tier and job.id not in parts]
        waits = [job.started_at - job.created_at for job in mine if job.started_at is not None]
        figures.append(
            TierFigures(
                name,
                len(mine),
                sum(job.status is Status.COMPLETED for job in mine),
                median(waits) if waits else None,
                max(waits, default=None),
            )
        )
    return figures


def place_of(job_id: str, order: Sequence[str], starts: Mapping[str, float]) -> Place:
    """`order`: ids as submitted. `starts`: first start of each job that was started."""
    mine = starts[job_id]
    number = order.index(job_id)
    before = [starts[other] for other in order[:number] if other in starts]
    after = [starts[other] for other in order[number + 1 :] if other in starts]
    # Jobs that one claim gave out have one stamp: they count in the order of their submission.
    ahead = sum(start <= mine for start in before) + sum(start < mine for start in after)
    return Place(number + 1, ahead + 1, sum(start > mine for start in before))
